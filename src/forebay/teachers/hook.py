"""A teacher around any model of transformers or diffusers: the outputs of named submodules, of inputs from a cache.

Hook(
    model="facebook/dinov2-small", architecture="Dinov2Model", images=ImageInput(size=224), name="dino",
    points=(HookPoint("cls", "layernorm", (384,), "first"), HookPoint("patches", "layernorm", (257, 384), "none")),
)

One forward fills the columns `dino_cls` and `dino_patches`. It ends when the last of the submodules has run.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from forebay.errors import RecipeInvalid
from forebay.fields import Finite
from forebay.teachers.protocol import (
    Output,
    Teacher,
    TimeDirection,
    config_of,
    hashes,
    library_versions,
    setting,
    tokenizer_of,
)
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX

Pooling = Literal["none", "mean", "max", "spatial_mean", "first", "last"]


class _Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input of a model that is made of stored columns."""


class ImageInput(_Input, frozen=True, kw_only=True):
    """Stored images as floats `(samples, 3, size, size)`.

    "letterbox" shrinks a larger image to the square and pads it with `pad_color`, as the image recipe does; "crop"
    resizes the shorter side and crops the center, as most preprocessors of CLIP and DINO do. Values are
    (x / 255 − mean) / std. `size` 0 is the `image_size` of the model's configuration.
    """

    argument: str = "pixel_values"
    size: Annotated[int, Meta(ge=0)] = 0
    fit: Literal["letterbox", "crop"] = "letterbox"
    resample: Literal["bilinear", "bicubic", "lanczos", "box", "nearest"] = "bicubic"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    pad_color: tuple[int, int, int] = (114, 114, 114)
    storage: Literal["raw", "jpeg"] = "raw"

    @property
    def columns(self) -> tuple[str, str]:
        return ("pixels" if self.storage == "raw" else "jpeg", "box")


class PromptInput(_Input, frozen=True, kw_only=True):
    """Prompts as token ids `(samples, max_length)`, truncated and padded, and a mask, 1 where a token is not padding.

    With `mask=""` the model gets no mask. Padding is left out of pooled outputs in either case.
    """

    max_length: Annotated[int, Meta(ge=1)]
    argument: str = "input_ids"
    mask: str = "attention_mask"


class TokenInput(_Input, frozen=True, kw_only=True):
    """The documents of packed token rows, each run as a sequence by itself, so that none can see another.

    Pooled outputs are one for each document of a row. With pooling "none" they are `(sequence_length, …)`, zeros on
    padding.
    """

    argument: str = "input_ids"
    mask: str = "attention_mask"


class LatentInput(_Input, frozen=True, kw_only=True):
    """Latents at t, and the model's own timestep: the hook is timed.

    Latents are a linear mix of a stored `column` and noise, or with `column=""` noise of a `shape`. The timestep is
    `noise_timestep` where they are noise and `data_timestep` where they are data; the hook's `time_direction` says
    which end of t is noise. With `noise_per="sample"` the noise of a sample is the same at all buckets.
    """

    argument: str = "sample"
    timestep: str = "timestep"
    column: str = "latents"
    shape: tuple[int, ...] = ()
    noise_timestep: Finite = 1000.0
    data_timestep: Finite = 0.0
    noise_per: Literal["bucket", "sample"] = "bucket"


class HookPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A submodule whose output is stored as the column `<hook>_<name>`, and the shape of that for one sample."""

    name: str
    submodule: str
    shape: tuple[int, ...]
    pooling: Pooling = "mean"


class Hook(Teacher, frozen=True, kw_only=True, tag="hook"):
    """The outputs of one submodule, or of several `points`, of a model.

    `architecture` is a class of `transformers` or `diffusers`, such as "AutoModel". `images`, `prompts`, `tokens` and
    `latents` make inputs; `arguments` maps further arguments of its forward to a column, or to a number that is passed
    as it is. Pooling is over all axes between the first and the channels, which are the last axis, or the second for
    "spatial_mean"; "first" and "last" take one position of the second axis. Padding of prompts and tokens does not
    count. If a submodule runs more than once, its first output is stored. For your own module or pooling, write a
    `Teacher` whose `load` uses `forebay.torch.teachers.Captures`.
    """

    located: ClassVar[tuple[str, ...]] = ("model", "weights", "tokenizer")
    loaded_by: ClassVar[tuple[str, ...]] = ("run_hook", "LoadedHook")

    model: str
    architecture: str
    submodule: str = ""
    shape: tuple[int, ...] = ()
    arguments: dict[str, str | bool | int | float] = msgspec.field(default_factory=dict)
    pooling: Pooling = "mean"
    shared: tuple[str, ...] = ()  # the columns among the arguments that are stored once for equal prompts
    weights: str | None = None
    name: str = "hook"
    images: ImageInput | None = None
    prompts: PromptInput | None = None
    tokens: TokenInput | None = None
    latents: LatentInput | None = None
    time_direction: TimeDirection = "t0_noise"  # the end of t that is noise, with `latents`
    points: tuple[HookPoint, ...] = ()
    tokenizer: str | None = None  # its folder, if it is neither with the model nor in the `tokenizer` of its pipeline

    def __post_init__(self) -> None:
        if bool(self.submodule) == bool(self.points):
            raise RecipeInvalid("a Hook needs either a submodule with its shape, or several points")
        if not all(isinstance(one, _Input | None) for one in (self.images, self.prompts, self.tokens, self.latents)):
            return  # the recipe checks types, and names the field
        if self.tokens and (self.images or self.prompts or self.latents or self.argument_columns):
            raise RecipeInvalid(
                "a Hook with tokens runs each document by itself, so it takes no images, prompts, latents or columns"
            )
        if self.latents and bool(self.latents.column) == bool(self.latents.shape):
            raise RecipeInvalid("latents need either the column that holds them, or with column='' a shape of noise")
        if twice := _repeated([one.name for one in self.points]):
            raise RecipeInvalid(
                f"two points are named '{twice}', and would fill one column", hint="name each HookPoint apart"
            )
        if twice := _repeated([*self.arguments, *self._made_arguments()]):
            raise RecipeInvalid(f"two inputs fill the argument '{twice}' of the model", hint="leave one of them out")
        if unknown := [column for column in self.shared if column not in self.argument_columns]:
            raise RecipeInvalid(f"shared names '{unknown[0]}', which is not the column of an argument")

    @property
    def timed(self) -> bool:  # type: ignore[override]  # here and below: the inputs decide, not the class
        return self.latents is not None

    @property
    def prompted(self) -> bool:  # type: ignore[override]
        return self.prompts is not None

    @property
    def needs_ids(self) -> bool:  # type: ignore[override]
        return self.tokens is None

    @property
    def depends_on(self) -> Literal["sample", "prompt", "nothing"]:  # type: ignore[override]
        others = self.images or self.tokens or self.latents or self.argument_columns
        return "prompt" if self.prompts and not others else "sample"

    @property
    def argument_columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value for value in self.arguments.values() if isinstance(value, str)))

    @property
    def image_size(self) -> int:
        """The side of the images that the model gets."""
        if self.images and self.images.size:
            return self.images.size
        inner = config_of(self.model).get("vision_config") or {}
        return int(inner["image_size"] if "image_size" in inner else setting(self.model, "image_size"))

    def inputs(self) -> tuple[str, ...]:
        columns = [*self.argument_columns, *(f"{column}{SHARED_ROW_SUFFIX}" for column in self.shared)]
        columns += self.images.columns if self.images else ()
        columns += ("tokens", "seq_lens") if self.tokens else ()
        columns += (self.latents.column,) if self.latents and self.latents.column else ()
        return tuple(dict.fromkeys(columns))

    def fed_arguments(self) -> tuple[str, ...]:
        """Return the arguments that are made from the cache."""
        return (*(name for name, value in self.arguments.items() if isinstance(value, str)), *self._made_arguments())

    def _made_arguments(self) -> tuple[str, ...]:
        arguments = [self.images.argument] if self.images else []
        arguments += (self.latents.argument, self.latents.timestep) if self.latents else ()
        for each in (self.prompts, self.tokens):
            arguments += (each.argument, each.mask) if each else ()
        return tuple(name for name in arguments if name)

    def hooked(self) -> tuple[HookPoint, ...]:
        """Return all submodules with the names of their columns."""
        named = (HookPoint(f"{self.name}_{one.name}", one.submodule, one.shape, one.pooling) for one in self.points)
        return tuple(named) or (HookPoint(self.name, self.submodule, self.shape, self.pooling),)

    def outputs(self) -> tuple[Output, ...]:
        return tuple(
            Output(one.name, one.shape, ragged=self.tokens is not None and one.pooling != "none")
            for one in self.hooked()
        )

    def files(self) -> Mapping[str, str]:
        tokenizer = tokenizer_of(self.model, self.tokenizer) if self.prompts else None
        return hashes("model", self.model, self.weights, tokenizer)

    def versions(self) -> Mapping[str, str]:
        further = (("pillow",) if self.images else ()) + (("tokenizers",) if self.prompts else ())
        return library_versions("torch", "transformers", "diffusers", *further)


def _repeated(names: list[str]) -> str:
    """Return the first name that occurs twice, empty where none does."""
    return next((name for name in names if names.count(name) > 1), "")
