"""The samples of a chunk as a teacher gets them: ids, columns, prompts, and their noise."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.columns import Array, Columns, Ragged
from forebay.errors import RecipeInvalid
from forebay.order.bijection import key_of
from forebay.order.coins import philox
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
    found = np.stack([*_pair(a, b), *_pair(c, d)], axis=-1)
    return found.reshape(len(keys), 4 * len(draws))[:, :count].reshape(len(keys), *shape)


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
            found = {self.key: text} if self.key is None else json.loads(text)
        except ValueError:
            return None
        prompt = found.get(self.key) if isinstance(found, dict) else None
        return prompt if isinstance(prompt, str) else None


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The rows of a chunk, as read for a teacher."""

    ids: tuple[str, ...]
    keys: NDArray[np.uint64]
    columns: Columns
    prompts: tuple[str, ...]
    present: NDArray[np.bool_]  # False where an input is absent, there is no prompt, or a result is not finite
    failures: tuple[Failure, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, bad: Mapping[int, str]) -> "Samples":
        """Return the samples with some rows absent, because the teacher's numbers for them are not finite."""
        if not bad:
            return self
        present = self.present.copy()
        present[list(bad)] = False
        failed = tuple(Failure(self.ids[row], NOT_FINITE, detail) for row, detail in sorted(bad.items()))
        return replace(self, present=present, failures=(*self.failures, *failed))

    def take(self, column: str, rows: Sequence[int]) -> Array | Ragged:
        """Return a column at some rows; values stored once for equal prompts are repeated for every row."""
        values = self.columns[column]
        if not isinstance(values, Ragged):
            return values[np.asarray(rows, np.int64)]
        if f"{column}{SHARED_ROW_SUFFIX}" not in self.columns:
            return Ragged.of([values[row] for row in rows], values.values.dtype, values.values.shape[1:])
        holders = np.asarray(self.columns[f"{column}{SHARED_ROW_SUFFIX}"])[np.asarray(rows, np.int64)]
        held = values.values[values.offsets[holders].astype(np.int64)]
        shared: Array = held.reshape(len(rows), *values.values.shape[1:])
        return shared


def read_samples(rows: Columns, ids: str, prompts: Prompts | None) -> Samples:
    """Read the samples of a chunk's rows; a sample without a prompt, if one is needed, is a failure."""
    names = rows[ids]
    if not isinstance(names, Ragged) or names.values.dtype != np.uint8:
        raise RecipeInvalid(f"column '{ids}' does not hold sample ids; name the column that does, as in ids='id'")
    raw = [names[row].tobytes() for row in range(len(names))]
    texts = tuple(one.decode("utf-8", "surrogateescape") for one in raw)
    bits = [np.asarray(values, np.bool_) for name, values in rows.items() if name.endswith(_PRESENT)]
    present = np.logical_and.reduce([np.ones(len(raw), np.bool_), *bits])
    found = [prompts.of(rows[prompts.column][row]) for row in range(len(raw))] if prompts else []
    spoken = np.array([prompt is not None for prompt in found], np.bool_) if prompts else present
    detail = f"no text in {prompts.where}" if prompts else ""
    failures = tuple(Failure(texts[row], "no-prompt", detail) for row in np.flatnonzero(present & ~spoken).tolist())
    return Samples(texts, noise_keys(raw), rows, tuple(prompt or "" for prompt in found), present & spoken, failures)


def prompt_hash(prompt: str) -> int:
    """Return the hash of a prompt, which is stored beside its encoding."""
    value: int = xxhash.xxh3_64_intdigest(prompt.encode("utf-8", "surrogatepass"))
    return value
