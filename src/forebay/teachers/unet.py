"""Teachers that listen inside a diffusion UNet: Lune to its middle, Sol to how it attends."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from forebay.teachers.libraries import library_versions
from forebay.teachers.protocol import Loaded, Output, Teacher
from forebay.teachers.running import load_by
from forebay.teachers.samples import HOLDER
from forebay.teachers.weights import hashes, setting

SOL_STATS = ("locality", "entropy", "clustering", "sparsity")

NoiseKind = Literal["pure", "noised"]
TimeDirection = Literal["t0_noise", "t0_data"]


class UnetTeacher(Teacher, frozen=True, kw_only=True):
    """What Lune and Sol share: a UNet, the text it is told, and the latents it is given.

    `weights` are a fine-tuned state dict over the UNet's own configuration. With `noise="pure"` the latents are noise
    alone, keyed by (seed, sample, bucket); with `"noised"`, the image's latents mixed with it on a straight line.
    `time_direction` says which end of t is noise, in the mix and in the timestep that the UNet gets, whose 1000 is
    noise: (1 − t) · 1000 with `"t0_noise"`, t · 1000 with `"t0_data"`.
    """

    timed: ClassVar[bool] = True
    revision: ClassVar[int] = 2  # 1 passed t · 1000 in both directions
    located: ClassVar[tuple[str, ...]] = ("unet", "weights")

    unet: str
    weights: str | None = None
    noise: NoiseKind = "pure"
    time_direction: TimeDirection = "t0_noise"
    text: str = "clip_states"  # the column of text states
    latents: str = "latents"  # the column of image latents, with noise="noised"

    def inputs(self) -> tuple[str, ...]:
        latents = (self.latents,) if self.noise == "noised" else ()
        return (self.text, f"{self.text}{HOLDER}", *latents)

    def files(self) -> Mapping[str, str]:
        return hashes("unet", self.unet, self.weights)

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "diffusers")

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        side = int(setting(self.unet, "sample_size"))
        return int(setting(self.unet, "in_channels")), side, side


class Lune(UnetTeacher, frozen=True, kw_only=True, tag="lune"):
    """The spatial mean of the output of a UNet's middle block."""

    submodule: str = "mid_block"
    name: str = "lune"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, (int(setting(self.unet, "block_out_channels")[-1]),)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("lune", "LoadedLune", self, device, dtype)


class Sol(UnetTeacher, frozen=True, kw_only=True, tag="sol"):
    """Statistics of a UNet's self-attention, and where it goes: an average over layers, heads and queries.

    For attention p over N positions of a square grid: entropy −Σ p ln p / ln N; locality 1 − E[distance] / diagonal;
    sparsity (N − 1/Σp²) / (N − 1); clustering Σ min(p, p′) of queries side by side. The map is the attention received,
    resampled to `side` × `side`, with sum 1. Layers of more than `most_positions` are passed over: their maps alone
    would take gigabytes.
    """

    side: int = 8
    most_positions: int = 1024
    name: str = "sol"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        stats = Output(f"{self.name}_stats", (len(SOL_STATS),))
        return (stats, Output(f"{self.name}_spatial", (self.side, self.side)))

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("sol", "LoadedSol", self, device, dtype)
