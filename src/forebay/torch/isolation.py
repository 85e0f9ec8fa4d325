"""Prove on your own model that documents do not see each other and that padding is not seen at all.

Each check changes a part of the input that must not matter and looks at the output that must not move:

    input        a a a b b . .      change b →      a a a B B . .
    output       x x x y y z z                      x x x Y Y z z       only the output of b may differ

An empty answer is the proof; each `Leak` says what reached what. A model that is random (dropout) or that
does not react to its input at all proves nothing, and is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay.masks.documents import document_ids
from forebay.masks.rectangle import IGNORE_THRESHOLD, pixel_mask, token_ignore_mask

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Leak:
    """Changing one document moved the output of another."""

    row: int
    changed: int  # number of the document that was changed, in every row that has it
    reached: int  # number of the document of `row` whose output moved
    difference: float

    def __str__(self) -> str:
        return (
            f"row {self.row}: changing document {self.changed} moved the output of document {self.reached} "
            f"by {self.difference:.3g}"
        )


@dataclass(frozen=True, slots=True)
class PaddingLeak:
    """Changing the padding of an image moved its output."""

    image: int
    difference: float

    def __str__(self) -> str:
        return f"image {self.image}: changing its padding moved the output by {self.difference:.3g}"


def document_leaks(
    model: Model, inputs: Tensor, seq_lens: Tensor | ArrayLike, *, tolerance: float = 1e-6
) -> list[Leak]:
    """What reached other documents when one was changed; padding is a document too.

        assert not document_leaks(lambda tokens: model(tokens, seq_lens), tokens, seq_lens)

    `inputs` are token ids `[rows, S]` or embeddings `[rows, S, …]`, and the output starts with `[rows, S]`.
    One pass per document of the fullest row, and two more.
    """
    lengths = seq_lens.cpu().numpy() if isinstance(seq_lens, Tensor) else seq_lens
    ids = torch.from_numpy(document_ids(lengths, inputs.shape[1])).to(inputs.device)
    before = _steady_output(model, inputs)
    other = _different(inputs)
    leaks = []
    for document in range(int(ids.max()) + 1):
        moved = _moved(before, model(torch.where(_like(ids == document, inputs), other, inputs)), keep_dims=2)
        _check_reaction(moved[ids == document], tolerance, f"document {document}")
        leaks += _leaks_of(document, moved, ids, tolerance)
    return leaks


def padding_leaks(
    model: Model,
    images: Tensor,
    rectangles: Tensor | ArrayLike,
    patch: int,
    *,
    threshold: float = IGNORE_THRESHOLD,
    tolerance: float = 1e-6,
) -> list[PaddingLeak]:
    """The images whose output moved when the padding of their ignored patches was changed.

        assert not padding_leaks(lambda images: model(images, ignore), images, rectangles, patch=16)

    `images` are `[images, channels, height, width]`. A patch with content enough to be kept is seen whole,
    its padded pixels with it: those are not changed. Return from `model` what must not move: CLS, pooled or
    kept tokens; an ignored token's own output is free to.
    """
    boxes = rectangles.cpu().numpy() if isinstance(rectangles, Tensor) else rectangles
    size = (images.shape[2], images.shape[3])
    padded = torch.from_numpy(pixel_mask(boxes, size)).to(images.device)
    ignored = torch.from_numpy(token_ignore_mask(boxes, size, patch, threshold)).to(images.device)
    unseen = padded & ignored.repeat_interleave(patch, 1).repeat_interleave(patch, 2)
    before, other = _steady_output(model, images), _different(images)
    reaction = _moved(before, model(torch.where(padded[:, None], images, other)), keep_dims=1)
    _check_reaction(reaction, tolerance, "the content of the images")
    moved = _moved(before, model(torch.where(unseen[:, None], other, images)), keep_dims=1)
    return [PaddingLeak(int(image), float(moved[image])) for image in torch.nonzero(~(moved <= tolerance))]


def _leaks_of(document: int, moved: Tensor, ids: Tensor, tolerance: float) -> list[Leak]:
    # `not <=` so that NaN is a leak.
    reached = ~(moved <= tolerance) & (ids != document)
    pairs = {(int(row), int(ids[row, token])) for row, token in torch.nonzero(reached)}
    return [Leak(row, document, other, float(moved[row, ids[row] == other].max())) for row, other in sorted(pairs)]


def _steady_output(model: Model, inputs: Tensor) -> Tensor:
    before, again = model(inputs), model(inputs)
    if not torch.equal(before, again):
        raise ValueError(
            "the model gives two outputs for one input, so a change proves nothing; call model.eval() first"
        )
    return before


def _different(inputs: Tensor) -> Tensor:
    """Another value at every place: the next token id, or 1 − x."""
    if inputs.is_floating_point():
        return torch.where(inputs == 0.5, 0.0, 1.0 - inputs)
    return ((inputs.long() + 1) % max(2, int(inputs.max()) + 1)).to(inputs.dtype)


def _moved(before: Tensor, after: Tensor, keep_dims: int) -> Tensor:
    """The largest change per token (`keep_dims` 2) or per image (1)."""
    difference = (after.detach().double() - before.detach().double()).abs()
    return difference.flatten(keep_dims).amax(-1) if difference.dim() > keep_dims else difference


def _like(choice: Tensor, inputs: Tensor) -> Tensor:
    return choice.reshape(choice.shape + (1,) * (inputs.dim() - 2))


def _check_reaction(moved: Tensor, tolerance: float, what: str) -> None:
    if bool((moved <= tolerance).all()):
        raise ValueError(
            f"the output does not react to {what}, so that an unmoved output proves nothing; "
            "check that the model uses its input (a new head may be all zeros)"
        )
