"""The samples of a chunk as a teacher gets them: ids, columns, prompts, their noise, and the values of t.

buckets   .05   .15   .25   .35   .45  …  .95
                             ├──────▲──┤             t = 0.42: low = 3, alpha = 0.7

A t below the first bucket counts as the first, one above the last as the last. Buckets are exact in any float type: a t
within one rounding step of a bucket in its type *is* that bucket.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from forebay.columns import Array, Columns, Ragged
from forebay.errors import RecipeInvalid
from forebay.order.coins import philox
from forebay.order.shuffle import key_of
from forebay.source import Failure

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_UNIT = 2.0**-32


def noise_keys(ids: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the noise key of each sample: the xxh3 hash of its id."""
    return np.array([xxhash.xxh3_64_intdigest(one) for one in ids], np.uint64)


def normal(
    seed: int, keys: NDArray[np.uint64], buckets: NDArray[np.int64], shape: tuple[int, ...], purpose: str = "noise"
) -> NDArray[np.float32]:
    """Return standard normal numbers `(samples, *shape)` for every (sample, bucket), by Philox and Box–Muller."""
    count = prod(shape)
    key = key_of("teacher", seed, purpose)
    draws = np.arange(-(-count // 4), dtype=np.uint64)
    rows = keys[:, None]
    counter = (rows & _LOW, rows >> _HALF, buckets.astype(np.uint64)[:, None], draws)
    a, b, c, d = philox(counter, (key % 2**32, key >> 32))
    numbers = np.stack([*_pair(a, b), *_pair(c, d)], axis=-1)
    return numbers.reshape(len(keys), 4 * len(draws))[:, :count].reshape(len(keys), *shape)


def _pair(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    radius = np.sqrt(-2.0 * np.log((a + np.uint64(1)) * _UNIT))
    angle = b * (2.0 * np.pi * _UNIT)
    return (radius * np.cos(angle)).astype(np.float32), (radius * np.sin(angle)).astype(np.float32)


SHARED_ROW_SUFFIX = "_row"  # of the column with the row that holds a value stored once for equal prompts
NOT_FINITE = "not-finite"  # the failure reason of a row whose numbers are NaN or infinite
_PRESENT = ".present"


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Where prompts are: a column of text, or a key of the JSON object in it."""

    column: str
    key: str | None = None

    @property
    def where(self) -> str:
        return f"'{self.column}'" if self.key is None else f"'{self.key}' of '{self.column}'"

    def of(self, row: Array) -> str | None:
        """Return the prompt in a row's bytes; None if there is none."""
        try:
            text = row.tobytes().decode()
            record = {self.key: text} if self.key is None else json.loads(text)
        except ValueError:
            return None
        prompt = record.get(self.key) if isinstance(record, dict) else None
        return prompt if isinstance(prompt, str) else None


def class_in(row: Array, key: str) -> int | None:
    """Return the class number in a row: its only number, or the value of a key of its JSON; None if there is none."""
    try:
        values = json.loads(row.tobytes()) if key else row.reshape(-1).tolist()
    except ValueError:
        return None
    if key:
        values = [values.get(key)] if isinstance(values, dict) else []
    return values[0] if len(values) == 1 and type(values[0]) is int else None


@dataclass(frozen=True, slots=True, eq=False)
class TeacherSamples:
    """The rows of a chunk, as read for a teacher."""

    ids: tuple[str, ...]
    keys: NDArray[np.uint64]
    columns: Columns
    prompts: tuple[str, ...]
    present: NDArray[np.bool_]  # False where an input is absent, there is no prompt, or a result is not finite
    failures: tuple[Failure, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, bad: Mapping[int, str], reason: str = NOT_FINITE) -> "TeacherSamples":
        """Return the samples with some rows absent: by default, because the teacher's numbers are not finite."""
        if not bad:
            return self
        present = self.present.copy()
        present[list(bad)] = False
        failed = tuple(Failure(self.ids[row], reason, detail) for row, detail in sorted(bad.items()))
        return replace(self, present=present, failures=(*self.failures, *failed))

    def take(self, column: str, rows: Sequence[int]) -> Array | Ragged:
        """Return a column at some rows: an array, or `Ragged` if the column is declared ragged, whatever its lengths.

        Values stored once for equal prompts are repeated for every row.
        """
        values, numbers = self.columns[column], np.asarray(rows, np.int64)
        if not isinstance(values, Ragged):
            return values[numbers]
        pointer = self.columns.get(f"{column}{SHARED_ROW_SUFFIX}")
        holders = numbers if pointer is None else np.asarray(pointer)[numbers]
        return Ragged.of([values[row] for row in holders.tolist()], values.values.dtype, values.values.shape[1:])


def read_samples(rows: Columns, ids: str, prompts: Prompts | None) -> TeacherSamples:
    """Read the samples of a chunk's rows; a sample without a prompt, if one is needed, is a failure.

    `ids` is the column of sample ids, empty for a teacher that needs none.
    """
    count = next(map(len, rows.values()), 0)
    raw = _ids(rows, ids) if ids else [f"row {row} of its chunk".encode() for row in range(count)]
    texts = tuple(one.decode("utf-8", "surrogateescape") for one in raw)
    bits = [np.asarray(values, np.bool_) for name, values in rows.items() if name.endswith(_PRESENT)]
    present = np.logical_and.reduce([np.ones(len(raw), np.bool_), *bits])
    texts_found = [prompts.of(rows[prompts.column][row]) for row in range(len(raw))] if prompts else []
    spoken = np.array([prompt is not None for prompt in texts_found], np.bool_) if prompts else present
    detail = f"no text in {prompts.where}" if prompts else ""
    failures = tuple(Failure(texts[row], "no-prompt", detail) for row in np.flatnonzero(present & ~spoken).tolist())
    return TeacherSamples(
        texts, noise_keys(raw), rows, tuple(prompt or "" for prompt in texts_found), present & spoken, failures
    )


def _ids(rows: Columns, column: str) -> list[bytes]:
    names = rows[column]
    if not isinstance(names, Ragged) or names.values.dtype != np.uint8:
        raise RecipeInvalid(
            f"column '{column}' does not hold sample ids", hint="name the column that does, as in ids='id'"
        )
    return [names[row].tobytes() for row in range(len(names))]


def prompt_hash(prompt: str) -> int:
    """Return the hash of a prompt, which is stored with its encoding."""
    value: int = xxhash.xxh3_64_intdigest(prompt.encode("utf-8", "surrogatepass"))
    return value


BUCKETS: tuple[float, ...] = tuple(round(0.05 + 0.1 * step, 2) for step in range(10))
_ROUNDING = 1e-6  # a t that arithmetic put this far outside of 0 to 1, or one step of its type, counts as the end


class Neighbors(NamedTuple):
    """The two buckets around each t: t = `(1 - alpha) · bucket[low] + alpha · bucket[low + 1]`."""

    low: NDArray[np.int64]
    alpha: NDArray[np.float32]


def check_buckets(buckets: Iterable[float]) -> tuple[float, ...]:
    """Return buckets as plain floats; raise RecipeInvalid unless they rise within [0, 1]."""
    try:
        grid = tuple(float(t) for t in buckets)
    except (TypeError, ValueError) as error:
        raise RecipeInvalid(f"buckets must be a list of numbers (got {buckets!r:.60})") from error
    rises = all(one < other for one, other in pairwise(grid))
    if not grid or not rises or not all(0 <= t <= 1 for t in grid):
        shown = ", ".join(f"{t:g}" for t in grid[:4])
        raise RecipeInvalid(f"buckets must be one or more rising numbers from 0 to 1 (got {shown}…)")
    return grid


def neighbors(buckets: ArrayLike, t: ArrayLike) -> Neighbors:
    """Return the buckets around each t, on an even or uneven grid.

    >>> neighbors(BUCKETS, [0.42, 0.0, 1.0, 0.15]).low.tolist()
    [3, 0, 8, 1]
    """
    return Grid(buckets).neighbors(t)


class Grid:
    """Buckets prepared for lookups of t in any float type."""

    def __init__(self, buckets: ArrayLike) -> None:
        self.buckets = np.asarray(buckets, np.float64)
        self._written: dict[np.dtype[Any], _Written] = {}

    def neighbors(self, t: ArrayLike) -> Neighbors:
        """Return the buckets around each t. Kept short, as it runs for every small batch."""
        times = np.asarray(t)
        if times.ndim == 0:
            one = self.neighbors(times[None])
            return Neighbors(one.low.reshape(()), one.alpha.reshape(()))
        written = self._written.get(times.dtype) or self._write(times.dtype)
        if times.size and (times.min() < -written.rounding or times.max() > 1 + written.rounding):
            raise ValueError(
                f"t must be from 0 to 1 (got {times.min():g} to {times.max():g}); divide the steps of a scheduler by "
                "their number"
            )
        if len(self.buckets) == 1:
            return self._alone(times)
        inside = np.maximum(np.minimum(times.astype(np.float64), written.last), written.first)
        low = written.inner.searchsorted(inside, side="right")
        alpha = (inside - written.nodes[low]) / written.gaps[low]
        alpha[alpha <= written.near_low[low]] = 0.0
        alpha[alpha >= written.near_high[low]] = 1.0
        if not alpha.max(initial=0.0) <= 1:
            raise _not_a_number(alpha)
        return Neighbors(low, alpha.astype(np.float32))

    def mirrored(self) -> "Grid":
        """Return the buckets for time that runs the other way; its bucket i is bucket n - 1 - i of this grid."""
        # Rounded, so that 1 - 0.95 is the 0.05 that a caller writes: a bucket stays exact at its node.
        return Grid(np.round(1 - self.buckets[::-1], 12))

    def _alone(self, times: NDArray[Any]) -> Neighbors:
        """Return the only bucket, whatever t is."""
        if np.isnan(times).any():
            raise _not_a_number(times)
        return Neighbors(np.zeros(times.shape, np.int64), np.zeros(times.shape, np.float32))

    def _write(self, dtype: np.dtype[Any]) -> "_Written":
        return self._written.setdefault(dtype, _Written.of(self.buckets, dtype))


class _Written(NamedTuple):
    """A grid rounded to a float type, unless two buckets would become equal in it."""

    nodes: NDArray[np.float64]
    inner: NDArray[np.float64]  # without the ends: a search in it gives the number of the lower node
    gaps: NDArray[np.float64]
    first: float
    last: float
    near_low: NDArray[np.float64]  # the share of a gap that is one step of the type at its lower node
    near_high: NDArray[np.float64]
    rounding: float  # how far outside of 0 to 1 rounding may put a t

    @classmethod
    def of(cls, buckets: NDArray[np.float64], dtype: np.dtype[Any]) -> "_Written":
        floats = np.dtype(np.float64) if dtype.kind in "biu" else dtype
        if not (np.diff(buckets.astype(floats).astype(np.float64)) > 0).all():
            floats = np.dtype(np.float64)
        nodes = buckets.astype(floats)
        steps = np.spacing(nodes).astype(np.float64)
        nodes = nodes.astype(np.float64)
        gaps = np.diff(nodes)
        # Where nodes are one step apart, no number lies between them: each is nearest to itself.
        near_low, near_high = np.minimum(steps[:-1] / gaps, 0.25), np.maximum(1 - steps[1:] / gaps, 0.75)
        rounding = 0.0 if dtype.kind in "biu" else max(_ROUNDING, float(np.spacing(dtype.type(1))))
        return cls(nodes, nodes[1:-1].copy(), gaps, float(nodes[0]), float(nodes[-1]), near_low, near_high, rounding)


def _not_a_number(times: NDArray[Any]) -> ValueError:
    return ValueError(f"t[{int(np.isnan(times).argmax())}] is not a number; t must be from 0 to 1")
