"""What a teacher is: frozen data that names its outputs; and which class and which modules stand behind its name.

    class Brightness(Teacher, frozen=True, tag="brightness"):
        reads: ClassVar[tuple[str, ...]] = ("pixels",)

        def outputs(self) -> tuple[Output, ...]:
            return (Output("brightness", ()),)

        def load(self, device: str, dtype: str) -> Loaded:
            return lambda batch: {"brightness": np.array([pixels.mean() for pixels in batch.rows("pixels")])}

Its fields are its identity. Nothing to register: `TeacherRecipe(teacher=Brightness())` adds a layer `brightness`. To go
on with such a layer from the command line, its class is named by an entry point in the group `forebay.teachers`.

A class that was given from Python is known in this process from then on, so that its recipe reads back; none is ever
imported because a file names it.

to describe, estimate or read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Columns, Dtype, Ragged
from forebay.errors import LibraryMissing, RecipeInvalid, UnknownKind
from forebay.teachers.teacher_samples import normal


@dataclass(frozen=True, slots=True)
class Output:
    """A column that a teacher makes: the shape of one sample's values, at one bucket if the teacher is timed.

    Values are stored in the type that the recipe chooses, unless `dtype` names one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some samples, each at one bucket if the teacher is timed. A sample may stand in it more than once."""

    ids: tuple[str, ...]
    columns: Columns  # those that the teacher reads
    prompts: tuple[str, ...]  # empty unless the teacher is `prompted`
    t: NDArray[np.float32] | None  # (samples,), of a timed teacher
    buckets: NDArray[np.int64]  # (samples,), the number of the bucket; 0 without timesteps
    keys: NDArray[np.uint64]  # (samples,), what noise is keyed by
    seed: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def first_t(self) -> float | None:
        """What errors name beside the first sample."""
        return None if self.t is None else float(self.t[0])

    def array(self, column: str) -> Array:
        """A column whose rows have one shape, `(samples, …)`."""
        values = self.columns[column]
        if isinstance(values, Ragged):
            raise TypeError(f"'{column}' is ragged; take its `rows`")
        return values

    def rows(self, column: str) -> list[Array]:
        """A column, row by row."""
        values = self.columns[column]
        return [values[row] for row in range(len(self))]

    def noise(self, shape: tuple[int, ...], purpose: str = "noise") -> NDArray[np.float32]:
        """Standard normal numbers for every sample and bucket, whatever else is in the batch."""
        return normal(self.seed, self.keys, self.buckets, shape, purpose)


Loaded = Callable[[Batch], Mapping[str, Array]]


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base of teachers. A subclass has a `tag`, which names it in recipes and, by default, its layer.

    `timed` teachers are asked at every bucket, others once. What depends `of` the prompt alone is stored once for each
    distinct prompt of a chunk; what depends of nothing is constant, and stored once. `located` fields say where weights
    are, not what: `files` stands for them.
    """

    timed: ClassVar[bool] = False
    prompted: ClassVar[bool] = False  # whether batches bring prompts
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "sample"
    revision: ClassVar[int] = 1  # raise it when code changes what is stored: layers of another one are not reused
    located: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def tag(cls) -> str:
        return str(cls.__struct_config__.tag)

    def layer_name(self) -> str:
        """The name of the layer, unless the caller chooses one."""
        return self.tag()

    def inputs(self) -> tuple[str, ...]:
        """The columns that batches bring: `reads`, unless the fields decide."""
        return self.reads

    def outputs(self) -> tuple[Output, ...]:
        """What is made of every sample. It must not need the weights: estimates ask for it."""
        raise NotImplementedError

    def constants(self, buckets: tuple[float, ...]) -> Mapping[str, Array]:
        """What is the same for all samples."""
        return {}

    def files(self) -> Mapping[str, str]:
        """The hash of every file the outputs depend on, by name."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """The libraries that shape the bytes."""
        return {}

    def load(self, device: str, dtype: str) -> Loaded:
        """Ready to map batches, with the model on a device and its numbers of a type."""
        raise NotImplementedError


TEACHERS = {
    "clip": ("forebay.teachers.built_in", "Clip"),
    "geometric-sol": ("forebay.teachers.built_in", "GeometricSol"),
    "hook": ("forebay.teachers.built_in", "Hook"),
    "latents": ("forebay.teachers.built_in", "Latents"),
    "lune": ("forebay.teachers.built_in", "Lune"),
    "sol": ("forebay.teachers.built_in", "Sol"),
    "t5": ("forebay.teachers.built_in", "T5"),
}
_given: dict[str, type[Teacher]] = {}


def known_teacher(given: object) -> Teacher:
    """A teacher, or one from the fields that a recipe keeps of it."""
    if isinstance(given, Teacher):
        _given[given.tag()] = type(given)
        return _checked(type(given), msgspec.to_builtins(given))
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise RecipeInvalid(f"a teacher is expected, for instance fb.teachers.T5(model='…'), not {given!r:.60}")
    return _checked(teacher_class(given["kind"]), given)


def teacher_class(kind: str) -> type[Teacher]:
    if kind in TEACHERS:
        module, name = TEACHERS[kind]
        return _teacher(getattr(import_module(module), name))
    for entry in entry_points(group="forebay.teachers", name=kind):
        return _teacher(entry.load())
    if kind in _given:
        return _given[kind]
    raise UnknownKind("teacher", kind, sorted(TEACHERS))


def _checked(cls: type[Teacher], fields: Mapping[str, Any]) -> Teacher:
    """A teacher with fields of the types it declares: a word that is none of those it knows must not pass for one."""
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise RecipeInvalid(f"the teacher '{cls.tag()}' has a field of the wrong type: {error}") from error


def _teacher(found: Any) -> type[Teacher]:
    known: type[Teacher] = found
    return known


ROOM = "forebay.torch.teachers"


def load_by(module: str, name: str, teacher: Teacher, device: str, dtype: str) -> Loaded:
    """A teacher loaded by a class of the room that runs them."""
    loaded: Loaded = getattr(runner(module), name)(teacher, device, dtype)
    return loaded


def runner(module: str) -> Any:
    """A module of the room that runs teachers."""
    try:
        return import_module(f"{ROOM}.{module}")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(str(missing.name), "running a teacher", "teachers") from missing


def library_versions(*names: str) -> dict[str, str]:
    """Those of some libraries that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
