"""Run the one loaded teacher of this process, on as many samples at a time as fit in memory.

samples   a b c d e        batch_size 2, three buckets

one bucket at a time       [a b]₀ [a b]₁ [a b]₂  [c d]₀ …  [e e]₂
all timesteps at once      [a₀ a₁ a₂ b₀ b₁ b₂]  …  [e₀ e₁ e₂ e₀ e₁ e₂]

The last batch is filled up with its last sample, since kernels are not bit-equal across batch sizes.
"""

import gc
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.columns import DTYPES, Array, Dtype, Ragged
from forebay.errors import EngineUnusable, ForebayError, ModelUnusable
from forebay.teachers.protocol import ROOM, Batch, Loaded, Output, Teacher, runner
from forebay.teachers.teacher_samples import TeacherSamples


@dataclass(slots=True, eq=False)
class LoadedTeacher:
    """A loaded teacher and its counters."""

    name: str
    device: str
    loaded: Loaded
    forwards: int = 0

    def __call__(self, batch: Batch) -> Mapping[str, Array | Ragged]:
        self.forwards += 1
        return self.loaded(batch)

    def notes(self) -> tuple[str, ...]:
        where = "" if self.device == "auto" else f" onto {self.device}"
        return (f"'{self.name}' was loaded{where} and ran {self.forwards:,} forward batch(es)",)


@dataclass(slots=True)
class _TeacherSlot:
    """The one loaded teacher of this process."""

    key: Hashable = None
    teacher: LoadedTeacher | None = None


_slot = _TeacherSlot()


def load_once(teacher: Teacher, device: str, dtype: str) -> LoadedTeacher:
    """Return the loaded teacher; load it, and release another, unless it is already loaded."""
    key = (teacher, device, dtype, tuple(sorted(teacher.files().items())))
    if _slot.teacher is None or _slot.key != key:
        unload()
        loaded = teacher.load(resolved_device(device), dtype)
        _slot.teacher = LoadedTeacher(teacher.layer_name(), device, loaded)
        _slot.key = key
    return _slot.teacher


def resolved_device(device: str) -> str:
    """Return the device that "auto" stands for: a teacher gets the name of a device. Without torch it is the CPU."""
    if device != "auto":
        return device
    default: str = import_module(ROOM).default_device() if find_spec("torch") else "cpu"
    return default


def unload() -> tuple[str, ...]:
    """Release the loaded teacher, if any, and return notes on what it did."""
    teacher, _slot.teacher, _slot.key = _slot.teacher, None, None
    if teacher is None:
        return ()
    notes = teacher.notes()
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
        results: dict[str, Array] = {
            name: np.empty(len(rows), object)
            if output.ragged
            else np.empty((len(rows), *steps, *output.shape), DTYPES[dtype][1])
            for name, (output, dtype) in self.outputs.items()
        }
        bad: dict[int, str] = {}
        for at in range(0, len(rows), self.batch_size):
            some = slice(at, at + self.batch_size)
            batch = self._run_batch(teacher, samples, rows[some])
            bad |= {at + index: detail for index, detail in self._not_finite(batch).items()}
            for name, values in batch.items():
                results[name][some] = values if self.buckets else values[:, 0]
        return results, bad

    def _run_batch(self, teacher: LoadedTeacher, samples: TeacherSamples, rows: Sequence[int]) -> dict[str, Array]:
        filled = [*rows, *[rows[-1]] * (self.batch_size - len(rows))]
        every = np.arange(len(self.buckets)) if self.buckets else NO_BUCKETS
        turns = [every] if self.all_timesteps else [every[turn : turn + 1] for turn in range(len(every))]
        parts = [self._forward(teacher, samples, filled, turn) for turn in turns]
        return {name: np.concatenate([one[name] for one in parts], axis=1)[: len(rows)] for name in self.outputs}

    def _forward(
        self, teacher: LoadedTeacher, samples: TeacherSamples, rows: Sequence[int], buckets: NDArray[np.int64]
    ) -> dict[str, Array]:
        """Run one forward, every sample at each of these buckets: `(rows, buckets, *shape)` per output."""
        batch = self.batch(samples, np.repeat(rows, len(buckets)), np.tile(buckets, len(rows)))
        outputs = _outputs(teacher, batch)
        results = {}
        for name, (output, dtype) in self.outputs.items():
            if output.ragged:
                results[name] = _ragged_rows(teacher, batch, output, outputs.get(name), DTYPES[dtype][1])
                continue
            values, expected = np.asarray(outputs[name]) if name in outputs else None, (len(batch), *output.shape)
            if values is None or values.shape != expected:
                shape = None if values is None else values.shape
                raise _wrong_output(teacher.name, name, requested(batch.ids[0], batch.first_t), shape, expected)
            with np.errstate(over="ignore"):  # `_not_finite` finds overflows
                results[name] = values.astype(DTYPES[dtype][1]).reshape(len(rows), len(buckets), *output.shape)
        return results

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

    def _not_finite(self, results: Mapping[str, Array]) -> dict[int, str]:
        """Return the samples of a batch with a number that is not finite -> its first output and bucket."""
        bad: dict[int, str] = {}
        for name, values in results.items():
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
    teacher: LoadedTeacher, batch: Batch, output: Output, values: Array | Ragged | None, dtype: np.dtype[Any]
) -> Array:
    """Return the values of every sample of an untimed teacher as an array of arrays, `(samples, 1)`."""
    if not isinstance(values, Ragged) or (len(values), *values.values.shape[1:]) != (len(batch), *output.shape):
        shape = values.values.shape if isinstance(values, Ragged) else None if values is None else values.shape
        expected = (len(batch), *output.shape)
        raise _wrong_output(teacher.name, output.name, requested(batch.ids[0], None), shape, expected)
    rows = np.empty((len(batch), 1), object)
    with np.errstate(over="ignore"):  # `_not_finite` finds overflows
        for row in range(len(batch)):
            rows[row, 0] = values[row].astype(dtype)
    return rows


def _outputs(teacher: LoadedTeacher, batch: Batch) -> Mapping[str, Array | Ragged]:
    """Run a teacher; an error of a library is raised with the sample and its t."""
    try:
        return teacher(batch)
    except ForebayError:
        raise
    except Exception as error:  # a teacher may be any library, and each has its own errors
        problem = " ".join(str(error).split())[:300]
        asked = requested(batch.ids[0], batch.first_t)
        raise ModelUnusable(
            f"teacher '{teacher.name}' raised {type(error).__name__} on {asked}: {problem}",
            hint="check the inputs of its model, or pass a smaller batch_size if memory is short",
            sample=batch.ids[0],
        ) from error


def _wrong_output(
    teacher: str, column: str, sample: str, shape: tuple[int, ...] | None, expected: tuple[int, ...]
) -> ModelUnusable:
    returned = f"no '{column}'" if shape is None else f"'{column}' of shape {shape}"
    message = f"teacher '{teacher}' returned {returned} for {sample}; it declares the shape {expected}"
    return ModelUnusable(message, sample=sample)


def requested(sample: str, moment: float | None) -> str:
    return f"sample '{sample}'" if moment is None else f"sample '{sample}' at t = {moment:g}"


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
                raise EngineUnusable(
                    f"the memory limit of {limit_bytes:,} bytes is too small: one worker needs about {peak:,}",
                    hint="raise --memory-limit, or choose smaller chunks in the recipe",
                    needed=peak,
                )
        except (ModelUnusable, MemoryError, RuntimeError) as error:  # torch's error is a RuntimeError
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
