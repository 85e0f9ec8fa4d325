"""The base class of teachers, and how a teacher is found by its name.

    class Brightness(Teacher, frozen=True, tag="brightness"):
        reads: ClassVar[tuple[str, ...]] = ("pixels",)

        def outputs(self) -> tuple[Output, ...]:
            return (Output("brightness", ()),)

        def load(self, device: str, dtype: str) -> Loaded:
            return lambda batch: {"brightness": np.array([pixels.mean() for pixels in batch.rows("pixels")])}

Its fields are its identity. `TeacherRecipe(teacher=Brightness())` adds a layer `brightness`, without registration. To
continue such a layer from the command line, name its class by an entry point in the group `forebay.teachers`.

A class that was passed in Python is known to this process from then on, so that its recipe can be read back. No class
is imported because a file names it.
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

    Values are stored in the recipe's `stored` type, unless `dtype` names another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some samples, each at one bucket if the teacher is timed. A sample may occur more than once."""

    ids: tuple[str, ...]
    columns: Columns  # those that the teacher reads
    prompts: tuple[str, ...]  # empty unless the teacher is `prompted`
    t: NDArray[np.float32] | None  # (samples,), of a timed teacher
    buckets: NDArray[np.int64]  # (samples,), the number of the bucket; 0 without timesteps
    keys: NDArray[np.uint64]  # (samples,), the keys of their noise
    seed: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def first_t(self) -> float | None:
        """The t of the first sample, for errors."""
        return None if self.t is None else float(self.t[0])

    def array(self, column: str) -> Array:
        """Return a column whose rows have one shape, `(samples, …)`."""
        values = self.columns[column]
        if isinstance(values, Ragged):
            raise TypeError(f"'{column}' is ragged; use batch.rows('{column}')")
        return values

    def rows(self, column: str) -> list[Array]:
        """Return a column row by row."""
        values = self.columns[column]
        return [values[row] for row in range(len(self))]

    def noise(self, shape: tuple[int, ...], purpose: str = "noise") -> NDArray[np.float32]:
        """Return standard normal numbers per sample and bucket, independent of the rest of the batch."""
        return normal(self.seed, self.keys, self.buckets, shape, purpose)


Loaded = Callable[[Batch], Mapping[str, Array]]


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base class of teachers. A subclass has a `tag`, which names it in recipes and, by default, its layer.

    `timed` teachers run at every bucket, others once. Outputs that depend on the prompt only (`depends_on = "prompt"`)
    are stored once for each distinct prompt of a chunk; those that depend on nothing are constants, stored once.
    `located` fields are the places of weights, which do not identify them: `files` does.
    """

    timed: ClassVar[bool] = False
    prompted: ClassVar[bool] = False  # whether batches have prompts
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "sample"
    revision: ClassVar[int] = (
        1  # increase it when code changes what is stored: layers of other revisions are not reused
    )
    located: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def tag(cls) -> str:
        return str(cls.__struct_config__.tag)

    def layer_name(self) -> str:
        """Return the default name of the layer."""
        return self.tag()

    def inputs(self) -> tuple[str, ...]:
        """Return the columns that batches have: `reads`, unless they depend on the fields."""
        return self.reads

    def outputs(self) -> tuple[Output, ...]:
        """Return the columns made of every sample. Must not need the weights: estimates call it."""
        raise NotImplementedError

    def constants(self, buckets: tuple[float, ...]) -> Mapping[str, Array]:
        """Return the arrays that are the same for all samples."""
        return {}

    def files(self) -> Mapping[str, str]:
        """Return the hash of every file that the outputs depend on, by name."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that the outputs depend on."""
        return {}

    def load(self, device: str, dtype: str) -> Loaded:
        """Load the model onto a device, to compute in a dtype, and return a function of batches."""
        raise NotImplementedError


TEACHERS = {
    "clip": "Clip",
    "geometric-sol": "GeometricSol",
    "hook": "Hook",
    "latents": "Latents",
    "lune": "Lune",
    "sol": "Sol",
    "t5": "T5",
}  # tag -> class of `forebay.teachers.built_in`
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
    found: type[Teacher]
    if kind in TEACHERS:
        found = getattr(import_module("forebay.teachers.built_in"), TEACHERS[kind])
        return found
    for entry in entry_points(group="forebay.teachers", name=kind):
        found = entry.load()
        return found
    if kind in _passed:
        return _passed[kind]
    raise UnknownKind("teacher", kind, sorted(TEACHERS))


def _checked(cls: type[Teacher], fields: Mapping[str, Any]) -> Teacher:
    """Return a teacher whose fields have the declared types; msgspec structs do not check them themselves."""
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise RecipeInvalid(f"the teacher '{cls.tag()}' has a field of the wrong type: {error}") from error


ROOM = "forebay.torch.teachers"


def load_by(module: str, name: str, teacher: Teacher, device: str, dtype: str) -> Loaded:
    """Load a teacher with a class of `forebay.torch.teachers`."""
    loaded: Loaded = getattr(runner(module), name)(teacher, device, dtype)
    return loaded


def runner(module: str) -> Any:
    """Import a module of `forebay.torch.teachers`."""
    try:
        return import_module(f"{ROOM}.{module}")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(str(missing.name), "running a teacher", "teachers") from missing


def library_versions(*names: str) -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
