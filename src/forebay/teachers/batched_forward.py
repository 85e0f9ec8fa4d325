"""Run the one loaded teacher of this process, on as many samples at a time as fit in memory.

samples   a b c d e        batch_size 2, three buckets

one bucket at a time       [a b]₀ [a b]₁ [a b]₂  [c d]₀ …  [e e]₂
all timesteps at once      [a₀ a₁ a₂ b₀ b₁ b₂]  …  [e₀ e₁ e₂ e₀ e₁ e₂]

The last batch is filled up with its last sample, since kernels are not bit-equal across batch sizes.

Outputs that depend on the prompt only: computed and stored once per distinct prompt of a chunk.

row         0     1     2     3
prompt      cat   dog   cat   cat
states      ■     ■     ·     ·        a ragged column: one value, or none
states_row  0     1     0     0        the row of this chunk that holds it
"""

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.columns import DTYPES, Array, Column, Dtype, Ragged
from forebay.errors import ColumnNotFound, ForebayError, MemoryTooSmall, TeacherOutputInvalid, TeacherRaised
from forebay.read.cache import Cache
from forebay.teachers.protocol import ROOM, Batch, Closeable, Loaded, Output, Teacher, runner
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX, TeacherSamples, prompt_hash


class Memo:
    """An LRU cache, bounded by bytes, of the arrays that a teacher made of each prompt."""

    def __init__(self, limit_bytes: int) -> None:
        self.hits = 0
        self.bytes = 0
        self._limit = limit_bytes
        self._known: OrderedDict[str, Mapping[str, Array]] = OrderedDict()

    def get(self, key: str) -> Mapping[str, Array] | None:
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            self.hits += 1
        return found

    def clear(self) -> None:
        self._known.clear()
        self.bytes = 0

    def put(self, key: str, arrays: Mapping[str, Array]) -> None:
        size = _size(arrays)
        if size > self._limit or key in self._known:
            return
        self._known[key] = arrays
        self.bytes += size
        while self.bytes > self._limit:
            _, oldest = self._known.popitem(last=False)
            self.bytes -= _size(oldest)


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


@dataclass(slots=True, eq=False)
class LoadedTeacher:
    """A loaded teacher, its memo, and counts of what it did."""

    name: str
    device: str
    loaded: Loaded
    memo: Memo
    forwards: int = 0
    prompts: int = 0
    computed: int = 0
    row_position_invariant: bool | None = None  # None until it was tried
    signature: Hashable = None

    def __call__(self, batch: Batch) -> Mapping[str, Array | Ragged]:
        self.forwards += 1
        return self.loaded(batch)

    def begin(self, signature: Hashable) -> None:
        """Clear the memo if prompts are run or stored differently from before."""
        if self.signature != signature:
            self.memo.clear()
            self.signature, self.row_position_invariant = signature, None

    def notes(self) -> tuple[str, ...]:
        where = "" if self.device == "auto" else f" onto {self.device}"
        lines = [f"'{self.name}' was loaded{where} and ran {self.forwards:,} forward batch(es)"]
        if self.prompts:
            apart = (
                ""
                if self.row_position_invariant is not False
                else "; results depend on the position in a batch, so none is reused"
            )
            lines.append(
                f"of {self.prompts:,} prompt(s), {self.computed:,} were computed and {self.memo.hits:,} reused from "
                f"earlier chunks{apart}"
            )
        return tuple(lines)


@dataclass(slots=True)
class _TeacherSlot:
    """The one loaded teacher of this process."""

    key: Hashable = None
    teacher: LoadedTeacher | None = None


_slot = _TeacherSlot()


def load_once(teacher: Teacher, device: str, dtype: str, memo_bytes: int) -> LoadedTeacher:
    """Return the loaded teacher; load it, and release another, unless it is already loaded."""
    key = (teacher, device, dtype, tuple(sorted(teacher.files().items())))
    if _slot.teacher is None or _slot.key != key:
        unload()
        loaded = teacher.load(resolved_device(device), dtype)
        _slot.teacher = LoadedTeacher(teacher.layer_name(), device, loaded, Memo(memo_bytes))
        _slot.key = key
    return _slot.teacher


def resolved_device(device: str) -> str:
    """Return the device that "auto" stands for: a teacher gets the name of a device. Without torch it is the CPU."""
    if device != "auto":
        return device
    found: str = import_module(ROOM).default_device() if find_spec("torch") else "cpu"
    return found


def unload() -> tuple[str, ...]:
    """Release the loaded teacher, if any, and return notes on what it did."""
    teacher, _slot.teacher, _slot.key = _slot.teacher, None, None
    if teacher is None:
        return ()
    notes = teacher.notes()
    if isinstance(teacher.loaded, Closeable):
        teacher.loaded.close()
    del teacher
    gc.collect()  # modules are in reference cycles
    if "torch" in sys.modules:
        runner("devices").release_device_memory()
    return notes


NO_BUCKETS = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class BatchedForward:
    """Runs a teacher on samples in batches: the part of a recipe that shapes batches and results."""

    outputs: Mapping[str, tuple[Output, Dtype]]
    inputs: tuple[str, ...]
    buckets: tuple[float, ...]  # none where the teacher is not timed
    batch_size: int
    all_timesteps: bool  # all timesteps in one batch
    seed: int

    def run(
        self, teacher: LoadedTeacher, samples: TeacherSamples, rows: Sequence[int]
    ) -> tuple[dict[str, Array], dict[int, str]]:
        """Return the results for some rows, in order, `(rows, [buckets,] *shape)` per output; if ragged, arrays.

        Also return the positions among `rows` with a number that is NaN or infinite as stored -> its output and t.
        """
        steps = (len(self.buckets),) if self.buckets else ()
        found: dict[str, Array] = {
            name: np.empty(len(rows), object)
            if output.ragged
            else np.empty((len(rows), *steps, *output.shape), DTYPES[dtype][1])
            for name, (output, dtype) in self.outputs.items()
        }
        bad: dict[int, str] = {}
        for at in range(0, len(rows), self.batch_size):
            some = slice(at, at + self.batch_size)
            batch = self._run_batch(teacher, samples, rows[some])
            bad |= {at + place: detail for place, detail in self._not_finite(batch).items()}
            for name, values in batch.items():
                found[name][some] = values if self.buckets else values[:, 0]
        return found, bad

    def _run_batch(self, teacher: LoadedTeacher, samples: TeacherSamples, rows: Sequence[int]) -> dict[str, Array]:
        filled = [*rows, *[rows[-1]] * (self.batch_size - len(rows))]
        every = np.arange(len(self.buckets)) if self.buckets else NO_BUCKETS
        turns = [every] if self.all_timesteps else [every[turn : turn + 1] for turn in range(len(every))]
        made = [self._forward(teacher, samples, filled, turn) for turn in turns]
        return {name: np.concatenate([one[name] for one in made], axis=1)[: len(rows)] for name in self.outputs}

    def _forward(
        self, teacher: LoadedTeacher, samples: TeacherSamples, rows: Sequence[int], buckets: NDArray[np.int64]
    ) -> dict[str, Array]:
        """Run one forward, every sample at each of these buckets: `(rows, buckets, *shape)` per output."""
        batch = self.batch(samples, np.repeat(rows, len(buckets)), np.tile(buckets, len(rows)))
        made = _outputs(teacher, batch)
        found = {}
        for name, (output, dtype) in self.outputs.items():
            if output.ragged:
                found[name] = _ragged_rows(teacher, batch, output, made.get(name), DTYPES[dtype][1])
                continue
            values, expected = np.asarray(made[name]) if name in made else None, (len(batch), *output.shape)
            if values is None or values.shape != expected:
                shape = None if values is None else values.shape
                raise TeacherOutputInvalid(teacher.name, name, batch.ids[0], batch.first_t, shape, expected)
            with np.errstate(over="ignore"):  # `_not_finite` finds overflows
                found[name] = values.astype(DTYPES[dtype][1]).reshape(len(rows), len(buckets), *output.shape)
        return found

    def batch(self, samples: TeacherSamples, rows: NDArray[np.int64], buckets: NDArray[np.int64]) -> Batch:
        chosen = rows.tolist()
        return Batch(
            ids=tuple(samples.ids[row] for row in chosen),
            columns={name: samples.take(name, chosen) for name in self.inputs},
            prompts=tuple(samples.prompts[row] for row in chosen) if samples.prompts else (),
            t=np.array(self.buckets, np.float32)[buckets] if self.buckets else None,
            buckets=buckets,
            keys=samples.keys[rows],
            seed=self.seed,
        )

    def _not_finite(self, found: Mapping[str, Array]) -> dict[int, str]:
        """Return the samples of a batch with a number that is not finite -> its first output and bucket."""
        bad: dict[int, str] = {}
        for name, values in found.items():
            if values.dtype.kind in "biu":
                continue
            good = np.array([[_is_finite(value) for value in row] for row in values], np.bool_)
            for sample, bucket in np.argwhere(~good).tolist():
                when = f" at t = {self.buckets[bucket]:g}" if self.buckets else ""
                stored = self.outputs[name][1]
                bad.setdefault(sample, f"NaN or infinity in '{name}'{when}, as {stored}")
        return bad


def _is_finite(values: Array) -> bool:
    return bool(np.isfinite(np.asarray(values).astype(np.float32)).all())


def _ragged_rows(
    teacher: LoadedTeacher, batch: Batch, output: Output, made: Array | Ragged | None, dtype: np.dtype[Any]
) -> Array:
    """Return the values of every sample of an untimed teacher as an array of arrays, `(samples, 1)`."""
    if not isinstance(made, Ragged) or (len(made), *made.values.shape[1:]) != (len(batch), *output.shape):
        shape = made.values.shape if isinstance(made, Ragged) else None if made is None else made.shape
        raise TeacherOutputInvalid(teacher.name, output.name, batch.ids[0], None, shape, (len(batch), *output.shape))
    found = np.empty((len(batch), 1), object)
    with np.errstate(over="ignore"):  # `_not_finite` finds overflows
        for row in range(len(batch)):
            found[row, 0] = made[row].astype(dtype)
    return found


def _outputs(teacher: LoadedTeacher, batch: Batch) -> Mapping[str, Array | Ragged]:
    """Run a teacher; an error of a library is raised with the sample and its t."""
    try:
        return teacher(batch)
    except ForebayError:
        raise
    except Exception as error:
        raise TeacherRaised(teacher.name, batch.ids[0], batch.first_t, error) from error


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


class PeakMemory(Protocol):
    """Counts the peak of some memory since it was reset."""

    def reset(self) -> None: ...

    def peak_bytes(self) -> int: ...


def device_memory(device: str) -> PeakMemory | None:
    """Return the counters of a device, of any teacher; None where its memory is that of this process."""
    name = resolved_device(device)
    if name == "cpu" or not find_spec("torch"):  # a teacher without torch does not wait for its import
        return None
    counters: PeakMemory | None = runner("devices").device_memory(name)
    return counters


class HostMemory:
    """The memory of this process on the host, where the system reports it."""

    def reset(self) -> None:
        with suppress(OSError):  # where the peak cannot be reset, it is that of the whole process
            _CLEAR.write_text(_FORGET_PEAK)

    def peak_bytes(self) -> int:
        return peak_bytes()


def fit_batch(
    requested: int, limit_bytes: int | None, attempt: Callable[[int], object], memory: PeakMemory | None = None
) -> int:
    """Return the largest of `requested`, `requested / 2`, … that `attempt` runs without running out of memory.

    `limit_bytes` also bounds the peak of `memory`, by default that of this process on the host.
    """
    size, memory = requested, memory or HostMemory()
    while True:
        try:
            memory.reset()
            attempt(size)
            peak = memory.peak_bytes()
            if limit_bytes is None or peak <= limit_bytes:
                return size
            if size == 1:
                raise MemoryTooSmall(limit_bytes, peak)
        except Exception as error:
            if size == 1 or not is_out_of_memory(error):
                raise
        size //= 2


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error, of any library, says that memory ran out."""
    own = error.__cause__ or error
    named = f"{type(own).__name__}: {own}".lower()
    return isinstance(own, MemoryError) or "out of memory" in named or "can't allocate memory" in named


def peak_bytes() -> int:
    """Return the peak memory of this process since the last reset; 0 where the system does not report it."""
    if not _STATUS.exists():
        return 0
    return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) * 1024


PROMPT = "_prompt"  # suffix of the column with the hash of each row's prompt
EMPTY = "_empty"  # suffix of the constant with the encoding of the empty prompt


def shared_columns(outputs: Mapping[str, tuple[Output, Dtype]], name: str) -> tuple[Column, ...]:
    """Return the columns that store outputs of prompts."""
    found: list[Column] = [Column(name=f"{name}{PROMPT}", dtype="uint64")]
    for output, dtype in outputs.values():
        found.append(Column(name=output.name, dtype=dtype, shape=output.shape, ragged=True, rows_per_block=1))
        found.append(Column(name=f"{output.name}{SHARED_ROW_SUFFIX}", dtype="uint32"))
    return tuple(found)


def shared_rows(
    forward: BatchedForward, teacher: LoadedTeacher | None, samples: TeacherSamples, name: str
) -> tuple[dict[str, Array | Ragged], TeacherSamples]:
    """Return the columns of a chunk, and its samples without those whose numbers are not finite.

    `teacher` is None if no row has a prompt to encode.
    """
    first: dict[str, int] = {}
    for row in np.flatnonzero(samples.present).tolist():
        first.setdefault(samples.prompts[row], row)
    outputs, bad = _prompt_outputs(forward, teacher, samples, first) if teacher is not None and first else ({}, {})
    if bad:
        rows = np.flatnonzero(samples.present).tolist()
        samples = samples.without({row: bad[prompt] for row in rows if (prompt := samples.prompts[row]) in bad})
        first = {prompt: row for prompt, row in first.items() if prompt not in bad}
    holders = [first.get(prompt, row) if samples.present[row] else row for row, prompt in enumerate(samples.prompts)]
    hashes = [prompt_hash(prompt) for prompt in samples.prompts]
    columns: dict[str, Array | Ragged] = {f"{name}{PROMPT}": np.array(hashes, np.uint64)}
    for column, (output, dtype) in forward.outputs.items():
        held = [outputs[prompt][column] for prompt in first]
        each = [np.empty((0, *output.shape), DTYPES[dtype][1])] * len(samples)
        for row, values in zip(first.values(), held, strict=True):
            each[row] = values if output.ragged else values[None]
        columns[column] = Ragged.of(each, DTYPES[dtype][1], output.shape)
        columns[f"{column}{SHARED_ROW_SUFFIX}"] = np.array(holders, np.uint32)
    return columns, samples


def _prompt_outputs(
    forward: BatchedForward, teacher: LoadedTeacher, samples: TeacherSamples, first: Mapping[str, int]
) -> tuple[dict[str, Mapping[str, Array]], dict[str, str]]:
    """Return the outputs of every prompt, computed now or for an earlier chunk, and the prompts that are not finite."""
    teacher.begin((forward.batch_size, tuple(dtype for _, dtype in forward.outputs.values())))
    remembers = _row_position_invariant(forward, teacher, samples, next(iter(first.values())))
    teacher.prompts += len(samples.present.nonzero()[0])
    known = {prompt: found for prompt in first if remembers and (found := teacher.memo.get(prompt)) is not None}
    wanted = {prompt: row for prompt, row in first.items() if prompt not in known}
    bad: dict[str, str] = {}
    if wanted:
        made, not_finite = forward.run(teacher, samples, list(wanted.values()))
        for at, prompt in enumerate(wanted):
            if at in not_finite:
                bad[prompt] = not_finite[at]
                continue
            known[prompt] = {name: values[at] for name, values in made.items()}
            teacher.memo.put(prompt, {name: values[at].copy() for name, values in made.items()})
    teacher.computed += len(wanted)
    return known, bad


def _row_position_invariant(forward: BatchedForward, teacher: LoadedTeacher, samples: TeacherSamples, row: int) -> bool:
    """Return whether a prompt gives the same bits at every row of a batch; tried once after a teacher is loaded.

    Only then may outputs of an earlier chunk be reused, since stored bytes must not depend on the memo. Bits are
    compared as computed: a narrower stored type would hide a difference for one prompt, and not for another.
    """
    if teacher.row_position_invariant is None:
        wide = {name: (output, output.dtype or "float32") for name, (output, _) in forward.outputs.items()}
        made, _ = replace(forward, outputs=wide).run(teacher, samples, [row] * forward.batch_size)
        bits = [np.stack(list(values)).reshape(len(values), -1).view(np.uint8) for values in made.values()]
        teacher.row_position_invariant = all(bool((rows == rows[:1]).all()) for rows in bits)
    return teacher.row_position_invariant


class SharedColumn:
    """Reads a column of prompt encodings as if every row stored its own.

    >>> states = SharedColumn(cache, "t5_states")          # doctest: +SKIP
    >>> states.read([5, 3, 9]).shape                       # doctest: +SKIP
    (3, 128, 768)
    """

    def __init__(self, cache: Cache, column: str) -> None:
        if f"{column}{SHARED_ROW_SUFFIX}" not in cache.columns:
            shared = [
                name.removesuffix(SHARED_ROW_SUFFIX) for name in cache.columns if name.endswith(SHARED_ROW_SUFFIX)
            ]
            if column in cache.columns:
                raise ValueError(f"'{column}' of '{cache.root}' is stored for every row: cache.read([…], ['{column}'])")
            raise ColumnNotFound(cache.root, column, shared)
        self.cache, self.column = cache, column
        self._layer = next(name for name in cache.generation.recipes if column in _names(cache, name))
        teacher = cache.recipe(self._layer).fields.get("teacher") or {}
        is_ragged = teacher.get("ragged") and column == f"{teacher.get('name')}_states"
        self._padded = int(teacher["max_length"]) if is_ragged else 0  # the length to which rows are filled up
        stored = cache.column(column)
        self.shape = (self._padded, *stored.shape) if is_ragged else stored.shape  # of a row as `read` returns it
        self.dtype = stored.array_dtype

    @property
    def empty(self) -> Array:
        """The encoding of the empty prompt, `(*shape)`, of a layer that was built with `empty_prompt=True`."""
        constants = self.cache.constants(self._layer)
        if f"{self.column}{EMPTY}" not in constants:
            raise ColumnNotFound(self.cache.root, f"{self.column}{EMPTY}", list(constants))
        values = constants[f"{self.column}{EMPTY}"].copy()  # which can be written to, unlike the mapped one
        return self._filled(Ragged.of([values], values.dtype, values.shape[1:]), 0)[0] if self._padded else values

    def read(self, rows: ArrayLike) -> Array:
        """Return `(rows, *shape)`; floats of absent rows are NaN, never 0. States of real tokens only are padded."""
        numbers = np.asarray(rows, np.int64)
        held = np.asarray(
            self.cache.read(numbers, [f"{self.column}{SHARED_ROW_SUFFIX}"])[f"{self.column}{SHARED_ROW_SUFFIX}"]
        )
        starts = self.cache.chunk_starts
        first = starts[np.searchsorted(starts, numbers, side="right") - 1]
        found = self.cache.read(first + held.astype(np.int64), [self.column])[self.column]
        assert isinstance(found, Ragged)
        absent = np.nan if found.values.dtype.kind in "fV" else 0
        if self._padded:
            return self._filled(found, absent)
        values = np.full((len(numbers), *found.values.shape[1:]), absent, found.values.dtype)
        values[found.lengths > 0] = found.values
        return values

    def _filled(self, found: Ragged, absent: float) -> Array:
        lengths = found.lengths.astype(np.int64)
        values = np.zeros((len(found), self._padded, *found.values.shape[1:]), found.values.dtype)
        values[np.arange(self._padded) < lengths[:, None]] = found.values
        values[lengths == 0] = absent
        return values


def _names(cache: Cache, layer: str) -> list[str]:
    return [column.name for column in cache.recipe(layer).columns]


def shared(cache: Cache, column: str) -> SharedColumn:
    """Return a reader of a column that is stored once for equal prompts."""
    return SharedColumn(cache, column)
