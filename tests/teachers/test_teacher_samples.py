"""The samples of a chunk as a teacher gets them."""

import numpy as np
import pytest

from forebay.columns import Ragged
from forebay.teachers.protocol import Batch
from forebay.teachers.teacher_samples import TeacherSamples


def states(lengths: list[int]) -> TeacherSamples:
    """A column of token states, each prompt's own, of these lengths."""
    count = len(lengths)
    columns = {
        "states": Ragged.of([np.full((length, 4), length, np.float32) for length in lengths], np.dtype("f4"), (4,)),
        "states_row": np.arange(count, dtype=np.uint32),
    }
    ids = tuple(str(row) for row in range(count))
    return TeacherSamples(ids, np.zeros(count, np.uint64), columns, (), np.ones(count, np.bool_), ())


@pytest.mark.parametrize("lengths", [[3, 2], [1, 1], [1, 2]])
def test_ragged_states_are_taken_as_ragged_rows_of_any_length(lengths: list[int]) -> None:
    taken = states(lengths).take("states", [1, 0])
    assert isinstance(taken, Ragged)
    assert [taken[row].shape for row in range(2)] == [(lengths[1], 4), (lengths[0], 4)]


def test_a_value_stored_once_for_equal_prompts_is_one_array() -> None:
    columns = {
        "pooled": Ragged.of([np.ones((1, 4)), np.ones((0, 4))], np.dtype("f4"), (4,)),
        "pooled_row": np.zeros(2, np.uint32),
    }
    samples = TeacherSamples(("a", "b"), np.zeros(2, np.uint64), columns, (), np.ones(2, np.bool_), ())
    taken = {name: samples.take(name, [1, 0, 1]) for name in columns}
    batch = Batch(("b", "a", "b"), taken, (), None, np.zeros(3, np.int64), np.zeros(3, np.uint64), 0)
    assert batch.array("pooled").shape == (3, 4)
