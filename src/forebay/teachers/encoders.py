"""Teachers that encode: images as latents, prompts as states. What they are; `forebay.torch.teachers` runs them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from forebay.teachers.libraries import library_versions
from forebay.teachers.protocol import Loaded, Output, Teacher
from forebay.teachers.running import load_by
from forebay.teachers.weights import config_of, hashes, setting, tokenizer_of


class Latents(Teacher, frozen=True, kw_only=True, tag="latents"):
    """The latents of letterboxed images: a VAE's mean, or a sample of it that the seed and the sample's id decide.

    `size`, `pad_color` and `storage` are those of the images. Latents are scaled as the VAE's pipelines do, by the
    configuration's scaling_factor, shift_factor, latents_mean and latents_std. How much of each cell is content follows
    from the stored rectangle: `fb.teachers.weights_of_latents`.
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
        # Up to revision 1 these were left out: latents of such a VAE are another layer now.
        normalized = {"latents_normalized": "per channel"} if config_of(self.vae).get("latents_mean") else {}
        return {**hashes("vae", self.vae), **normalized}

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "diffusers")

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("vae", "LoadedVae", self, device, dtype)


class T5(Teacher, frozen=True, kw_only=True, tag="t5"):
    """The last hidden states of a T5 encoder, and the mask of the tokens that are no padding."""

    prompted: ClassVar[bool] = True
    of: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
    located: ClassVar[tuple[str, ...]] = ("model", "tokenizer")

    model: str
    tokenizer: str | None = None  # where it is, if neither with the model nor in the `tokenizer` of its pipeline
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
        return load_by("text", "LoadedT5", self, device, dtype)


class Clip(Teacher, frozen=True, kw_only=True, tag="clip"):
    """The pooled output and the last hidden states of a CLIP text encoder; `keeps` may leave one out."""

    prompted: ClassVar[bool] = True
    of: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
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
        return load_by("text", "LoadedClip", self, device, dtype)

    def _setting(self, name: str, default: Any) -> Any:
        """Of the text side, where the configuration is that of text and images."""
        inner = config_of(self.model).get("text_config") or {}
        return inner[name] if name in inner else setting(self.model, name, default)
