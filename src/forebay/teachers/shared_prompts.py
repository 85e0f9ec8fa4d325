"""Outputs that depend on the prompt only: computed and stored once per distinct prompt of a chunk.

row         0     1     2     3
prompt      cat   dog   cat   cat
states      ■     ■     ·     ·        a ragged column: one value, or none
states_row  0     1     0     0        the row of this chunk that holds it
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from forebay.columns import DTYPES, Array, Column, Dtype, Ragged
from forebay.errors import ColumnNotFound
from forebay.read.cache import Cache
from forebay.teachers.batched_forward import BatchedForward, LoadedTeacher
from forebay.teachers.protocol import Output
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX, TeacherSamples, prompt_hash

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
    outputs, bad = _outputs(forward, teacher, samples, first) if teacher is not None and first else ({}, {})
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


def _outputs(
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
            raise ColumnNotFound(cache.root, f"{column}{SHARED_ROW_SUFFIX}", shared)
        self.cache, self.column = cache, column
        self._layer = next(name for name in cache.generation.recipes if column in _names(cache, name))
        teacher = cache.recipe(self._layer).fields.get("teacher") or {}
        is_ragged = teacher.get("ragged") and column == f"{teacher.get('name')}_states"
        self._padded = int(teacher["max_length"]) if is_ragged else 0  # the length to which rows are filled up

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
