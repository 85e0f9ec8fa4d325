"""What training beside teachers is set to: the document's `TrainerConfig`, and what its numbers become."""

from dataclasses import dataclass

from torch import Tensor

from forebay.torch.distill.dropout import TeacherDropout
from forebay.torch.distill.flow import MIN_SNR_GAMMA, SHIFT
from forebay.torch.distill.losses import LossMode
from forebay.torch.distill.rows import TeacherRows
from forebay.torch.distill.warmup import Warmup
from forebay.torch.distill.weighting import loss_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Weights, warm-ups and dropout of both teachers.

    >>> config = TrainerConfig(use_spatial_weighting=True)
    >>> config.lune(500), config.sol(500)
    (0.05, 0.0125)
    """

    lune_weight: float = 0.1
    lune_warmup_steps: int = 1000
    lune_dropout: float = 0.1
    lune_loss_mode: LossMode = "cosine"
    sol_weight: float = 0.05
    sol_warmup_steps: int = 2000
    sol_dropout: float = 0.1
    use_spatial_weighting: bool = False
    min_snr_gamma: float = MIN_SNR_GAMMA
    shift: float = SHIFT
    seed: int = 0

    def lune(self, step: int) -> float:
        """The weight of Lune's loss at a step."""
        return Warmup(self.lune_weight, self.lune_warmup_steps)(step)

    def sol(self, step: int) -> float:
        """The weight of Sol's loss at a step."""
        return Warmup(self.sol_weight, self.sol_warmup_steps)(step)

    def loss_weights(
        self, spatial: TeacherRows | None, content: Tensor | None = None, size: tuple[int, int] = (64, 64)
    ) -> Tensor | None:
        """Where in an image the loss counts: never in padding, and by Sol's maps with `use_spatial_weighting`."""
        return loss_weights(spatial if self.use_spatial_weighting else None, content, size)

    def dropout(self, teacher: str) -> TeacherDropout:
        rates = {"lune": self.lune_dropout, "sol": self.sol_dropout}
        if teacher not in rates:
            raise ValueError(f"the teacher is {teacher!r}; known are: lune, sol")
        return TeacherDropout(rates[teacher], self.seed)
