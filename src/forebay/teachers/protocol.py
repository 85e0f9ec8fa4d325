"""The base class of teachers, and what runs one.

    class Brightness(Teacher, frozen=True, tag="brightness"):
        reads: ClassVar[tuple[str, ...]] = ("pixels",)

        def outputs(self) -> tuple[Output, ...]:
            return (Output("brightness", ()),)

        def load(self, device: str, dtype: str) -> Loaded:
            return lambda batch: {"brightness": np.array([pixels.mean() for pixels in batch.rows("pixels")])}

Its fields are its identity. `TeacherRecipe(teacher=Brightness())` adds a layer `brightness`, without registration. To
continue such a layer from the command line, name its class by an entry point in the group `forebay.teachers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Columns, Dtype, Ragged
from forebay.errors import LibraryMissing
from forebay.teachers.teacher_samples import normal


@dataclass(frozen=True, slots=True)
class Output:
    """A column that a teacher makes: the shape of one sample's values, at one bucket if the teacher is timed.

    Values are stored in the recipe's `stored` type, unless `dtype` names another. A sample has any number of values of
    a `ragged` output, each of that shape and at most `most` where that is known: the teacher returns them as `Ragged`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None
    ragged: bool = False
    most: int = 1


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
        values = self._column(column)
        if isinstance(values, Ragged):
            raise TypeError(f"'{column}' is ragged; use batch.rows('{column}')")
        return values

    def rows(self, column: str) -> list[Array]:
        """Return a column row by row."""
        values = self._column(column)
        return [values[row] for row in range(len(self))]

    def _column(self, column: str) -> Array | Ragged:
        if column not in self.columns:
            read = ", ".join(f"'{name}'" for name in self.columns) or "nothing"
            raise LookupError(f"the teacher does not read '{column}' but {read}; add it to its `reads`")
        return self.columns[column]

    def noise(
        self, shape: tuple[int, ...], purpose: str = "noise", per: Literal["bucket", "sample"] = "bucket"
    ) -> NDArray[np.float32]:
        """Return standard normal numbers per sample and bucket, or per sample, independent of the rest of the batch."""
        buckets = self.buckets if per == "bucket" else np.zeros_like(self.buckets)
        return normal(self.seed, self.keys, buckets, shape, purpose)


TimeDirection = Literal["t0_noise", "t0_data"]  # the end of t that is noise
Loaded = Callable[[Batch], Mapping[str, Array | Ragged]]


@runtime_checkable
class Closeable(Protocol):
    """A loaded teacher that holds more than memory: it is closed when it is released."""

    def close(self) -> None: ...


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base class of teachers. A subclass has a `tag`, which names it in recipes and, by default, its layer.

    `timed` teachers run at every bucket, others once. Outputs that depend on the prompt only (`depends_on = "prompt"`)
    are stored once for each distinct prompt of a chunk; those that depend on nothing are constants, stored once.
    `located` fields are the places of weights, which do not identify them: `files` does.
    """

    timed: ClassVar[bool] = False
    prompted: ClassVar[bool] = False  # whether batches have prompts
    needs_ids: ClassVar[bool] = True  # whether the cache must have sample ids: for noise, and to name failed samples
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "sample"
    revision: ClassVar[int] = (
        1  # increase it when code changes what is stored: layers of other revisions are not reused
    )
    located: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[tuple[str, ...]] = ()  # fields that layers from before they existed have at their default
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

    def unusable(self, rows: Columns) -> Mapping[int, str]:
        """Return the rows of a chunk that it cannot process -> why. They become absent rows of its layer."""
        return {}

    def constants(self, buckets: tuple[float, ...]) -> Mapping[str, Array]:
        """Return the arrays that are the same for all samples."""
        return {}

    def files(self) -> Mapping[str, str]:
        """Return the hash of every file that the outputs depend on, by name."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that the outputs depend on."""
        return {}

    def computes_in(self, dtype: str) -> str:
        """Return the type that it computes in when asked for one: a wider one if the model needs it."""
        return dtype

    def load(self, device: str, dtype: str) -> Loaded:
        """Load the model onto a device, to compute in a dtype, and return a function of batches."""
        raise NotImplementedError


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
