"""The built-in teachers as data: encoders, UNets, hooks. `forebay.torch.teachers` runs them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.columns import Array
from forebay.teachers.model_files import config_of, hashes, setting, tokenizer_of
from forebay.teachers.protocol import Loaded, Output, Teacher, library_versions, load_by
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX


class Latents(Teacher, frozen=True, kw_only=True, tag="latents"):
    """The latents of letterboxed images: a VAE's mean, or a sample drawn by the seed and the sample's id.

    `size`, `pad_color` and `storage` are those of the images. Latents are scaled as the VAE's pipelines do, by the
    configuration's scaling_factor, shift_factor, latents_mean and latents_std. `fb.teachers.weights_of_latents` returns
    the share of content in each cell.
    """

    located: ClassVar[tuple[str, ...]] = ("vae",)

    vae: str
    size: int = 512
    pad_color: tuple[int, int, int] = (114, 114, 114)
    storage: Literal["raw", "jpeg"] = "raw"
    sample: Literal["mean", "seeded"] = "mean"
    name: str = "latents"

    def layer_name(self) -> str:
        return self.name

    def inputs(self) -> tuple[str, ...]:
        return ("pixels" if self.storage == "raw" else "jpeg", "box")

    def outputs(self) -> tuple[Output, ...]:
        side = self.size // 2 ** (len(setting(self.vae, "block_out_channels")) - 1)
        return (Output(self.name, (int(setting(self.vae, "latent_channels")), side, side)),)

    def files(self) -> Mapping[str, str]:
        # Revision 1 ignored these, so latents of such a VAE need a new layer.
        normalized = {"latents_normalized": "per channel"} if config_of(self.vae).get("latents_mean") else {}
        return {**hashes("vae", self.vae), **normalized}

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "diffusers")

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("run_encoders", "LoadedVae", self, device, dtype)


class T5(Teacher, frozen=True, kw_only=True, tag="t5"):
    """The last hidden states of a T5 encoder, and a mask, True for tokens that are not padding."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
    located: ClassVar[tuple[str, ...]] = ("model", "tokenizer")

    model: str
    tokenizer: str | None = None  # its folder, if it is neither with the model nor in the `tokenizer` of its pipeline
    max_length: int = 128
    name: str = "t5"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        states = (self.max_length, int(setting(self.model, "d_model")))
        return (Output(f"{self.name}_states", states), Output(f"{self.name}_mask", (self.max_length,), "bool"))

    def files(self) -> Mapping[str, str]:
        return hashes("t5", self.model, tokenizer=tokenizer_of(self.model, self.tokenizer))

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "transformers", "tokenizers")

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("run_encoders", "LoadedT5", self, device, dtype)


class Clip(Teacher, frozen=True, kw_only=True, tag="clip"):
    """The pooled output and the last hidden states of a CLIP text encoder, or one of them (`keeps`)."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
    located: ClassVar[tuple[str, ...]] = ("model", "tokenizer")

    model: str
    tokenizer: str | None = None
    keeps: tuple[Literal["pooled", "states"], ...] = ("pooled", "states")
    name: str = "clip"

    def layer_name(self) -> str:
        return self.name

    @property
    def length(self) -> int:
        return int(self._setting("max_position_embeddings", 77))

    def outputs(self) -> tuple[Output, ...]:
        width = int(self._setting("hidden_size", None))
        shapes = {"pooled": (width,), "states": (self.length, width)}
        return tuple(Output(f"{self.name}_{kept}", shapes[kept]) for kept in self.keeps)

    def files(self) -> Mapping[str, str]:
        return hashes("clip", self.model, tokenizer=tokenizer_of(self.model, self.tokenizer))

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "transformers", "tokenizers")

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("run_encoders", "LoadedClip", self, device, dtype)

    def _setting(self, name: str, default: Any) -> Any:
        """Return a setting of the text model, also from a configuration of text and image models."""
        inner = config_of(self.model).get("text_config") or {}
        return inner[name] if name in inner else setting(self.model, name, default)


SOL_STATS = ("locality", "entropy", "clustering", "sparsity")
NoiseKind = Literal["pure", "noised"]
TimeDirection = Literal["t0_noise", "t0_data"]


class UnetTeacher(Teacher, frozen=True, kw_only=True):
    """The base of Lune and Sol: a UNet, its text input and its latents.

    `weights` is a fine-tuned state dict for the UNet's configuration. With `noise="pure"` the latents are noise only,
    keyed by (seed, sample, bucket); with `"noised"`, a linear mix of it and the image's latents. `time_direction` is
    the end of t that is noise, in the mix and in the UNet's timestep, whose 1000 is noise: (1 − t) · 1000 with
    `"t0_noise"`, t · 1000 with `"t0_data"`.
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
        return (self.text, f"{self.text}{SHARED_ROW_SUFFIX}", *latents)

    def files(self) -> Mapping[str, str]:
        return hashes("unet", self.unet, self.weights)

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "diffusers")

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        side = int(setting(self.unet, "sample_size"))
        return int(setting(self.unet, "in_channels")), side, side


class Lune(UnetTeacher, frozen=True, kw_only=True, tag="lune"):
    """The spatial mean of the output of a UNet's middle block (or another `submodule`)."""

    submodule: str = "mid_block"
    name: str = "lune"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, (int(setting(self.unet, "block_out_channels")[-1]),)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("run_unet", "LoadedLune", self, device, dtype)


class Sol(UnetTeacher, frozen=True, kw_only=True, tag="sol"):
    """Statistics of a UNet's self-attention, and a map of the positions it attends to, averaged over layers.

    For attention p over N positions of a square grid: entropy −Σ p ln p / ln N; locality 1 − E[distance] / diagonal;
    sparsity (N − 1/Σp²) / (N − 1); clustering Σ min(p, p′) of neighbouring queries. The map is the attention received,
    resampled to `side` × `side`, with sum 1. Layers of more than `most_positions` are skipped: their attention would
    take gigabytes.
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
        return load_by("run_unet", "LoadedSol", self, device, dtype)


class GeometricSol(Teacher, frozen=True, kw_only=True, tag="geometric-sol"):
    """A formula instead of a model: early attention focused and central, late attention spread. Stored once."""

    timed: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "nothing"

    side: int = 8
    name: str = "sol"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        return ()

    def constants(self, buckets: tuple[float, ...]) -> Mapping[str, Array]:
        return {
            f"{self.name}_stats": geometric_stats(buckets),
            f"{self.name}_spatial": geometric_spatial(buckets, self.side),
        }


def geometric_stats(buckets: ArrayLike) -> NDArray[np.float32]:
    """Return locality, entropy, clustering and sparsity, `(buckets, 4)`."""
    t = np.asarray(buckets, np.float64)
    return np.stack([1 - t, t, 0.5 - 0.3 * np.abs(t - 0.5), 1 - t], axis=-1).astype(np.float32)


def geometric_spatial(buckets: ArrayLike, side: int = 8) -> NDArray[np.float32]:
    """Return maps that fall off from the centre, never below 0, with sum 1: `(buckets, side, side)`."""
    t = np.asarray(buckets, np.float64)
    line = np.linspace(-1.0, 1.0, side)
    distance = np.hypot(line[:, None], line[None, :])
    # Without the clamp the corners are negative for t below 0.3.
    height = np.maximum(1.0 - distance * (1.0 - t)[:, None, None], 0.0)
    normal: NDArray[np.float32] = (height / height.sum(axis=(1, 2), keepdims=True)).astype(np.float32)
    return normal


Pooling = Literal["none", "mean", "max", "spatial_mean", "first", "last"]


class Hook(Teacher, frozen=True, kw_only=True, tag="hook"):
    """The pooled output of one named submodule of a model.

    `architecture` is a class of `transformers` or `diffusers`, such as "AutoModel"; `arguments` maps each argument of
    its forward to a column. Pooling is over all axes between the first and the channels, which are the last axis, or
    the second for "spatial_mean"; "first" and "last" take one position of the second axis. For your own module or
    pooling, write a `Teacher` whose `load` returns `forebay.torch.teachers.HookedModule(module, submodule, pool)`.
    """

    located: ClassVar[tuple[str, ...]] = ("model", "weights")

    model: str
    architecture: str
    submodule: str
    shape: tuple[int, ...]
    arguments: dict[str, str]
    pooling: Pooling = "mean"
    shared: tuple[str, ...] = ()  # the columns among them that are stored once for equal prompts
    weights: str | None = None
    name: str = "hook"

    def layer_name(self) -> str:
        return self.name

    def inputs(self) -> tuple[str, ...]:
        return (*dict.fromkeys(self.arguments.values()), *(f"{column}{SHARED_ROW_SUFFIX}" for column in self.shared))

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, self.shape),)

    def files(self) -> Mapping[str, str]:
        return hashes("model", self.model, self.weights)

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "transformers", "diffusers")

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("run_hook", "LoadedHook", self, device, dtype)
