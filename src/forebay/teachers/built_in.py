"""The built-in teachers as data: encoders, UNets, language models; and how a teacher is found by its name.

`forebay.torch.teachers` runs them. A class that was passed in Python is known to this process from then on, so that its
recipe can be read back. No class is imported because a file names it.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from forebay.columns import Array, Columns
from forebay.errors import LibraryMissing, RecipeInvalid
from forebay.fields import Finite
from forebay.teachers.hook import Hook
from forebay.teachers.model_families import DENOISERS, DenoiserFamily, check_text_model, denoiser_class, latent_shape
from forebay.teachers.protocol import (
    Output,
    Teacher,
    TimeDirection,
    config_of,
    hashes,
    setting,
    tokenizer_of,
    unusable,
)
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX, class_in

MODEL = {"format": "file", "metavar": "MODEL"}  # a folder written by save_pretrained, or a name on the hub


class Latents(Teacher, frozen=True, kw_only=True, tag="latents"):
    """The latents of letterboxed images: a VAE's mean, or a sample drawn by the seed and the sample's id.

    `size`, `pad_color` and `storage` are those of the images. Latents are scaled as the VAE's pipelines do, by the
    configuration's scaling_factor, shift_factor, latents_mean and latents_std. To a VAE of videos (Wan, Qwen-Image) an
    image is one frame; its latents are stored without the axis of frames. `fb.teachers.weights_of_latents` returns the
    share of content in each cell.
    """

    located: ClassVar[tuple[str, ...]] = ("vae",)
    libraries: ClassVar[tuple[str, ...]] = ("torch", "diffusers")
    loaded_by: ClassVar[tuple[str, ...]] = ("run_encoders", "LoadedVae")

    vae: Annotated[str, Meta(description="VAE for latents of images.", extra=MODEL)]
    size: Annotated[int, Meta(ge=1)] = 512
    pad_color: tuple[int, int, int] = (114, 114, 114)
    storage: Literal["raw", "jpeg"] = "raw"
    sample: Annotated[Literal["mean", "seeded"], Meta(description="VAE posterior: its mean, or a seeded sample.")] = (
        "mean"
    )
    name: str = "latents"

    def inputs(self) -> tuple[str, ...]:
        return ("pixels" if self.storage == "raw" else "jpeg", "box")

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, latent_shape(self.vae, self.size)),)

    def files(self) -> Mapping[str, str]:
        return hashes("vae", self.vae)

    def computes_in(self, dtype: str) -> str:
        return "float32" if config_of(self.vae).get("force_upcast") else dtype


class T5(Teacher, frozen=True, kw_only=True, tag="t5"):
    """The last hidden states of a T5 encoder, and a mask, True for tokens that are not padding.

    With `ragged` only the states of tokens that are not padding are stored; `forebay.torch.Padded` fills them up with
    zeros. `masked=False` runs the encoder without its attention mask, as Flux and SD3 do.
    """

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
    located: ClassVar[tuple[str, ...]] = ("model", "tokenizer")
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers", "tokenizers")
    loaded_by: ClassVar[tuple[str, ...]] = ("run_encoders", "LoadedT5")

    model: Annotated[str, Meta(description="T5 encoder for hidden states of prompts.", extra=MODEL)]
    tokenizer: str | None = None  # its folder, if it is neither with the model nor in the `tokenizer` of its pipeline
    max_length: Annotated[int, Meta(ge=1, description="Tokens per prompt, for T5.")] = 128
    ragged: Annotated[
        bool, Meta(description="Store the states of real tokens only.", extra={"flags": ["--ragged-t5"]})
    ] = False
    masked: bool = True
    name: str = "t5"

    def outputs(self) -> tuple[Output, ...]:
        check_text_model(self.model, ("t5", "mt5"), "a T5 encoder")
        width = int(setting(self.model, "d_model"))
        states = Output(
            f"{self.name}_states",
            (width,) if self.ragged else (self.max_length, width),
            ragged=self.ragged,
            most=self.max_length if self.ragged else 1,
        )
        return (states, Output(f"{self.name}_mask", (self.max_length,), "bool"))

    def files(self) -> Mapping[str, str]:
        return hashes("t5", self.model, tokenizer=tokenizer_of(self.model, self.tokenizer))


class Clip(Teacher, frozen=True, kw_only=True, tag="clip"):
    """The pooled output and the hidden states of a CLIP text encoder, or one of them (`keeps`).

    `states_layer` is the layer of the states, -1 for the last, with its final norm; SDXL and SD3 read -2. `projected`
    stores the pooled output after the model's text projection, as SDXL's and SD3's pipelines read it.
    """

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
    located: ClassVar[tuple[str, ...]] = ("model", "tokenizer")
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers", "tokenizers")
    loaded_by: ClassVar[tuple[str, ...]] = ("run_encoders", "LoadedClip")

    model: Annotated[str, Meta(description="CLIP text encoder for hidden states of prompts.", extra=MODEL)]
    tokenizer: str | None = None
    keeps: tuple[Literal["pooled", "states"], ...] = ("pooled", "states")
    states_layer: Annotated[int, Meta(le=-1)] = -1
    projected: Annotated[
        bool,
        Meta(description="Apply the text projection to CLIP's pooled output.", extra={"flags": ["--clip-projected"]}),
    ] = False
    name: str = "clip"

    @property
    def length(self) -> int:
        return int(self._setting("max_position_embeddings", 77))

    def outputs(self) -> tuple[Output, ...]:
        check_text_model(self.model, ("clip_text_model", "clip"), "a CLIP text encoder")
        width = int(self._setting("hidden_size", None))
        pooled = int(self._setting("projection_dim", None)) if self.projected else width
        shapes = {"pooled": (pooled,), "states": (self.length, width)}
        return tuple(Output(f"{self.name}_{output}", shapes[output]) for output in self.keeps)

    def files(self) -> Mapping[str, str]:
        return hashes("clip", self.model, tokenizer=tokenizer_of(self.model, self.tokenizer))

    def _setting(self, name: str, default: Any) -> Any:
        """Return a setting of the text model, also from a configuration of text and image models."""
        inner = config_of(self.model).get("text_config") or {}
        return inner[name] if name in inner else setting(self.model, name, default)


SOL_STATS = ("locality", "entropy", "clustering", "sparsity")
NoiseKind = Literal["pure", "noised"]


class DenoiserTeacher(Teacher, frozen=True, kw_only=True):
    """The base of Lune and Sol: a UNet or a diffusion transformer, its text input and its latents.

    `weights` is a fine-tuned state dict for the model's configuration. With `noise="pure"` the latents are noise only,
    keyed by (seed, sample, bucket); with `"noised"`, a linear mix of it and the image's latents. `time_direction` is
    the end of t that is noise, in the mix and in the model's timestep. The model itself counts from `data_timestep` to
    `noise_timestep`: 0 to 1000, or 1 to 0 for a SiT. With `noise_per="sample"` the noise of a sample is the same at all
    buckets, so that features between two buckets do not mix two draws.

    Several columns are joined by `+`. A UNet of the SDXL kind reads the states of two encoders and the `pooled` output
    of the second; its time ids are those of a whole square image of `image_size` pixels. SD3 reads the states of two
    CLIP encoders and, if there is one, of T5, and both pooled outputs; Flux the states of T5, the pooled output of
    CLIP, and `guidance` if it is distilled from it. A DiT or SiT reads `labels`: a column of class numbers, `tags` of
    images with one tag each, or a key of JSON such as "metadata.class"; "" is the class that stands for none.
    """

    timed: ClassVar[bool] = True
    located: ClassVar[tuple[str, ...]] = ("unet", "weights")
    libraries: ClassVar[tuple[str, ...]] = ("torch", "diffusers")

    unet: Annotated[str, Meta(description="UNet or diffusion transformer.", extra=MODEL)]
    weights: Annotated[
        str | None,
        Meta(description="Fine-tuned .safetensors weights of the model.", extra={"format": "file", "metavar": "FILE"}),
    ] = None
    noise: Annotated[NoiseKind, Meta(description="Input of the UNet.")] = "pure"
    time_direction: Annotated[
        TimeDirection, Meta(description="End of t that is noise, for latents and the model's timestep.")
    ] = "t0_noise"
    noise_per: Annotated[
        Literal["bucket", "sample"], Meta(description="New noise for each bucket, or one for all of a sample's.")
    ] = "bucket"
    text: str = "clip_states"  # the column of text states, or several, joined by +
    pooled: str = ""  # the column of pooled text, or several
    image_size: Annotated[int, Meta(ge=0)] = 0  # in time ids and, for Flux, of pure noise; 0: that of the model
    latents: str = "latents"  # the column of image latents, with noise="noised"
    guidance: Finite = 3.5  # of a model that is distilled from guidance
    labels: str = ""  # the column of class numbers, or column.key
    noise_timestep: Finite = 1000.0  # the model's timestep of noise
    data_timestep: Finite = 0.0  # and of data

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of text states."""
        return tuple(self.text.split("+")) if self.text else ()

    @property
    def pooleds(self) -> tuple[str, ...]:
        """The columns of pooled text."""
        return tuple(self.pooled.split("+")) if self.pooled else ()

    def inputs(self) -> tuple[str, ...]:
        shared = (*self.texts, *self.pooleds)
        latents = (self.latents,) if self.noise == "noised" else ()
        labels = (self.labels.partition(".")[0],) if self.labels else ()
        return (*shared, *(f"{column}{SHARED_ROW_SUFFIX}" for column in shared), *latents, *labels)

    def files(self) -> Mapping[str, str]:
        self.check_inputs()
        return hashes("unet", self.unet, self.weights)

    def check_inputs(self) -> DenoiserFamily:
        """Return the family of the model; raise ModelUnusable if it reads other columns than the fields name."""
        kind = denoiser_class(self.unet)
        family = DENOISERS[kind]
        wrong_pooled = family.needs_pooled is not None and family.needs_pooled != bool(self.pooled)
        wrong_labels = bool(self.labels) and 0 not in family.texts
        if len(self.texts) not in family.texts or wrong_pooled or wrong_labels:
            named = f"text={self.text!r}, pooled={self.pooled!r}, labels={self.labels!r}"
            raise unusable(self.unet, f"a {kind} takes {family.fields} (got {named})")
        return family

    def unusable(self, rows: Columns) -> Mapping[int, str]:
        if not self.labels:
            return {}
        column, _, key = self.labels.partition(".")
        most = int(setting(self.unet, "num_embeds_ada_norm"))  # the number after the classes stands for none
        values = rows[column]
        labels = {row: class_in(values[row], key) for row in range(len(values))}
        wrong = f"'{self.labels}' is not one whole number from 0 to {most}"
        return {row: f"{wrong}: {label}" for row, label in labels.items() if label is None or not 0 <= label <= most}

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        channels, side = self.check_inputs().latents(self.unet, self.image_size)
        return channels, side, side


class Lune(DenoiserTeacher, frozen=True, kw_only=True, tag="lune"):
    """The mean over the image of the output of a denoiser's middle block (or another `submodule`).

    The middle block of a transformer is the one in the middle of all its blocks; of its output, the tokens of the image
    are taken.
    """

    loaded_by: ClassVar[tuple[str, ...]] = ("run_denoiser", "LoadedLune")

    submodule: str = "mid_block"
    name: str = "lune"

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, (self.check_inputs().width(self.unet),)),)

    def hooked(self) -> str:
        """Return the name of the submodule in this model."""
        return self.check_inputs().middle(self.unet) if self.submodule == "mid_block" else self.submodule


class Sol(DenoiserTeacher, frozen=True, kw_only=True, tag="sol"):
    """Statistics of the self-attention of a UNet or DiT, and a map of attended positions, averaged over layers.

    For attention p over N positions of a square grid: entropy −Σ p ln p / ln N; locality 1 − E[distance] / diagonal;
    sparsity (N − 1/Σp²) / (N − 1); clustering Σ min(p, p′) of neighboring queries. The map is the attention received,
    resampled to `side` × `side`, with sum 1. Layers of more than `most_positions` are skipped: their attention would
    take gigabytes.
    """

    loaded_by: ClassVar[tuple[str, ...]] = ("run_denoiser", "LoadedSol")

    side: Annotated[int, Meta(ge=1)] = 8
    most_positions: Annotated[int, Meta(ge=1)] = 1024
    name: str = "sol"

    def outputs(self) -> tuple[Output, ...]:
        stats = Output(f"{self.name}_stats", (len(SOL_STATS),))
        return (stats, Output(f"{self.name}_spatial", (self.side, self.side)))


class GeometricSol(Teacher, frozen=True, kw_only=True, tag="geometric-sol"):
    """A formula instead of a model: early attention focused and central, late attention spread. Stored once."""

    timed: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "nothing"

    side: Annotated[int, Meta(ge=1)] = 8
    name: str = "sol"

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
    """Return maps that fall off from the center, never below 0, with sum 1: `(buckets, side, side)`."""
    t = np.asarray(buckets, np.float64)
    line = np.linspace(-1.0, 1.0, side)
    distance = np.hypot(line[:, None], line[None, :])
    # Without the clamp the corners are negative for t below 0.3.
    height = np.maximum(1.0 - distance * (1.0 - t)[:, None, None], 0.0)
    normal: NDArray[np.float32] = (height / height.sum(axis=(1, 2), keepdims=True)).astype(np.float32)
    return normal


class LogProbs(Teacher, frozen=True, kw_only=True, tag="log-probs"):
    """The log-probs that a causal language model gives the labels, or its `top_k` most likely tokens at each of them.

    `over` is the kind of cache: "tokens" for token and chat caches, "preferences" for preference caches. A row has one
    value per label: one for every token of a document but its first, or for every token of a candidate. Documents of a
    row do not see each other. Columns are `<name>_logps` in float32, or with `top_k` `<name>_top_ids` and
    `<name>_top_logps`, most likely first, the latter in the recipe's `stored` type. With `top_p` below 1, a label has
    only as many of them as it takes to reach that probability, and `<name>_top_counts` says how many. The model must
    have the tokenizer of the cache; only the number of its tokens can be checked.
    """

    needs_ids: ClassVar[bool] = False
    located: ClassVar[tuple[str, ...]] = ("model", "weights")
    libraries: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    loaded_by: ClassVar[tuple[str, ...]] = ("run_encoders", "LoadedLanguageModel")

    model: str
    weights: str | None = None
    over: Literal["tokens", "preferences"] = "tokens"
    top_k: int = 0
    top_p: float = 1.0
    name: str = "ref"

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise RecipeInvalid(f"top_k must be at least 0; 0 stores the labels' log-probs (got {self.top_k})")
        if not 0 < self.top_p <= 1:
            raise RecipeInvalid(f"top_p must be above 0 and at most 1 (got {self.top_p})")
        if self.top_p < 1 and not self.top_k:
            raise RecipeInvalid("top_p needs top_k, the most tokens that are stored for a label")

    def inputs(self) -> tuple[str, ...]:
        return ("tokens", "seq_lens") if self.over == "tokens" else ("prompt", "candidates", "candidate_lens")

    def outputs(self) -> tuple[Output, ...]:
        if not self.top_k:
            return (Output(f"{self.name}_logps", (), "float32", ragged=True),)
        shape = (self.top_k,) if self.top_p == 1 else ()
        ids = Output(f"{self.name}_top_ids", shape, "uint32", ragged=True)
        values = Output(f"{self.name}_top_logps", shape, ragged=True)
        counts = Output(f"{self.name}_top_counts", (), "uint32", ragged=True)
        return (ids, values) if self.top_p == 1 else (ids, values, counts)

    def files(self) -> Mapping[str, str]:
        return hashes("model", self.model, self.weights)


BUILT_IN: dict[str, type[Teacher]] = {
    each.tag(): each for each in (Clip, GeometricSol, Hook, Latents, LogProbs, Lune, Sol, T5)
}
_passed: dict[str, type[Teacher]] = {}


def known_teacher(teacher: object) -> Teacher:
    """Return a teacher, or the one that the fields in a recipe describe."""
    if isinstance(teacher, Teacher):
        _passed[teacher.tag()] = type(teacher)
        return _checked(type(teacher), msgspec.to_builtins(teacher))
    if not isinstance(teacher, Mapping) or not isinstance(teacher.get("kind"), str):
        raise RecipeInvalid(f"teacher must be a teacher, such as fb.teachers.T5(model='…') (got {teacher!r:.60})")
    return _checked(teacher_class(teacher["kind"]), teacher)


def teacher_class(kind: str) -> type[Teacher]:
    """Return the class of a built-in teacher, of an entry point, or of a teacher that was passed in Python."""
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    for entry in entry_points(group="forebay.teachers", name=kind):
        loaded_class: type[Teacher] = entry.load()
        return loaded_class
    if kind in _passed:
        return _passed[kind]
    raise LibraryMissing(
        f"no teacher of kind '{kind}' is installed (known: {', '.join(sorted(BUILT_IN))})",
        hint="install the package that provides it, or pass the teacher itself",
    )


def _checked(cls: type[Teacher], fields: Mapping[str, Any]) -> Teacher:
    """Return a teacher whose fields have the declared types; msgspec structs do not check them themselves."""
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise RecipeInvalid(f"the teacher '{cls.tag()}' has a field of the wrong type: {error}") from error
