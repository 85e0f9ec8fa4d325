"""A teacher that listens to any part of any model."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from forebay.teachers.libraries import library_versions
from forebay.teachers.protocol import Loaded, Output, Teacher
from forebay.teachers.running import load_by
from forebay.teachers.samples import HOLDER
from forebay.teachers.weights import hashes

Pooling = Literal["none", "mean", "max", "spatial_mean", "first", "last"]


class Hook(Teacher, frozen=True, kw_only=True, tag="hook"):
    """What one named part of a model gives, pooled.

    `architecture` is a class of `transformers` or `diffusers`, such as "AutoModel"; `arguments` says which column each
    argument of its forward is taken from. Pooling is over all axes between the first and the channels, which are the
    last axis, or the second for "spatial_mean"; "first" and "last" take one position of the second axis.
    A module of your own, or another pooling, is a teacher of your own: a `Teacher` whose `load` gives
    `forebay.torch.teachers.HookedModule(module, submodule, pool)`.
    """

    located: ClassVar[tuple[str, ...]] = ("model", "weights")

    model: str
    architecture: str
    submodule: str
    shape: tuple[int, ...]
    arguments: dict[str, str]
    pooling: Pooling = "mean"
    shared: tuple[str, ...] = ()  # those of the columns that are stored once for equal prompts
    weights: str | None = None
    name: str = "hook"

    def layer_name(self) -> str:
        return self.name

    def inputs(self) -> tuple[str, ...]:
        return (*dict.fromkeys(self.arguments.values()), *(f"{column}{HOLDER}" for column in self.shared))

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, self.shape),)

    def files(self) -> Mapping[str, str]:
        return hashes("model", self.model, self.weights)

    def versions(self) -> Mapping[str, str]:
        return library_versions("torch", "transformers", "diffusers")

    def load(self, device: str, dtype: str) -> Loaded:
        return load_by("hook", "LoadedHook", self, device, dtype)
