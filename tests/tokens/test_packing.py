"""Packing against its definition, written out slowly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.tokens import pack_best_fit, split_documents

lengths_and_capacity = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
)
documents_and_capacity = st.tuples(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 64))


def packed_slowly(lengths: list[int], capacity: int) -> list[list[int]]:
    """Longest first, the earlier of equals first; each where it leaves least room, of equals where that is oldest."""
    bins: list[list[int]] = []
    room: list[int] = []
    since: list[int] = []  # when a bin got the room it has
    for time, item in enumerate(sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))):
        fitting = [at for at in range(len(bins)) if room[at] >= lengths[item]]
        at = min(fitting, key=lambda at: (room[at], since[at]), default=len(bins))
        if at == len(bins):
            bins, room, since = [*bins, []], [*room, capacity], [*since, time]
        bins[at].append(item)
        room[at] -= lengths[item]
        since[at] = time
    return sorted(sorted(items) for items in bins)


@given(lengths_and_capacity)
def test_every_item_goes_where_it_leaves_least_room(case):
    lengths, capacity = case
    bins = pack_best_fit(np.array(lengths, np.int64), capacity)
    groups = [np.flatnonzero(bins == number).tolist() for number in range(bins.max(initial=-1) + 1)]
    assert groups == packed_slowly(lengths, capacity)


@given(documents_and_capacity)
def test_the_pieces_of_a_document_follow_each_other_and_leave_nothing_out(case):
    lengths, capacity = case
    pieces = split_documents(np.array(lengths, np.int64), capacity)
    for document, length in enumerate(lengths):
        own = pieces.document == document
        assert pieces.length[own].sum() == length
        assert (pieces.offset[own] == np.cumsum(pieces.length[own]) - pieces.length[own]).all()
        assert (pieces.length[own][:-1] == capacity).all()
    assert ((pieces.length > 0) & (pieces.length <= capacity)).all()


@pytest.mark.parametrize("length", [0, 8, -1])
def test_a_length_that_fits_no_bin_is_refused(length):
    with pytest.raises(ValueError, match="must be 1 to 7"):
        pack_best_fit(np.array([3, length]), 7)


def test_padding_is_a_third_of_a_percent_at_most_for_eight_thousand_rows_of_real_looking_lengths():
    lengths = np.random.default_rng(0).lognormal(6.4, 1.1, 3500).astype(np.int64) + 1
    pieces = split_documents(lengths, 512)
    rows = pack_best_fit(pieces.length, 512).max() + 1
    assert 1 - lengths.sum() / (rows * 512) < 0.0035
