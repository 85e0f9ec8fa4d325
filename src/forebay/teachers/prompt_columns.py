"""Outputs that depend on the prompt only: computed and stored once per distinct prompt of a chunk.

row         0     1     2     3
prompt      cat   dog   cat   cat
states      ■     ■     ·     ·        a ragged column: one value, or none
states_row  0     1     0     0        the row of this chunk that holds it
"""

from collections.abc import Mapping

import numpy as np

from forebay.columns import DTYPES, Array, Column, Dtype, Ragged
from forebay.errors import not_found
from forebay.read.cache import Cache
from forebay.teachers.batched_forward import BatchedForward, LoadedTeacher
from forebay.teachers.protocol import Output
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX, TeacherSamples, prompt_hash

PROMPT = "_prompt"  # suffix of the column with the hash of each row's prompt
EMPTY = "_empty"  # suffix of the constant with the encoding of the empty prompt


def shared_columns(outputs: Mapping[str, tuple[Output, Dtype]], name: str) -> tuple[Column, ...]:
    """Return the columns that store outputs of prompts."""
    columns: list[Column] = [Column(name=f"{name}{PROMPT}", dtype="uint64")]
    for output, dtype in outputs.values():
        index, shape = f"{output.name}{SHARED_ROW_SUFFIX}", output.shape
        values = Column(name=output.name, dtype=dtype, shape=shape, ragged=output.ragged, rows_per_block=1, index=index)
        columns += [values, Column(name=index, dtype="uint32")]
    return tuple(columns)


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
    """Return the outputs of every prompt, and the prompts that are not finite."""
    results, not_finite = forward.run(teacher, samples, list(first.values()))
    outputs: dict[str, Mapping[str, Array]] = {}
    bad: dict[str, str] = {}
    for at, prompt in enumerate(first):
        if at in not_finite:
            bad[prompt] = not_finite[at]
        else:
            outputs[prompt] = {name: values[at] for name, values in results.items()}
    return outputs, bad


def empty_prompt(cache: Cache, column: str) -> Array:
    """Return the encoding of the empty prompt, of a layer that was built with `empty_prompt=True`."""
    constants = cache.constants(cache.layer_of(column))
    if f"{column}{EMPTY}" not in constants:
        raise not_found("column", f"{column}{EMPTY}", cache.root, list(constants))
    return constants[f"{column}{EMPTY}"].copy()  # which can be written to, unlike the mapped one
