"""Shares: every source has its part of every prefix, and each of its own positions exactly once, in order."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.feeding.shares import LARGEST, ChangingShares, Phase, Shares, whole_weights

weights = st.lists(
    st.one_of(st.integers(0, 10**6), st.floats(0, 1).map(lambda share: round(share, 6)), st.sampled_from([1e-9, 1.0])),
    min_size=1,
    max_size=12,
).filter(lambda some: sum(some) > 0)
positions = st.integers(0, 2**40)


def exact_shares(some: tuple[float, ...] | list[float]) -> list[Fraction]:
    whole = whole_weights(some)
    return [Fraction(weight, sum(whole)) for weight in whole]


@settings(deadline=None)
@given(weights, positions)
def test_at_any_prefix_every_source_is_off_by_less_than_two_rows(some: list[float], position: int) -> None:
    counts = Shares.of(some).counts(position)
    assert counts.sum() == position
    for count, share in zip(counts.tolist(), exact_shares(some), strict=True):
        assert abs(count - share * position) < 2


@settings(deadline=None)
@given(weights, positions, st.integers(0, 200))
def test_positions_of_a_source_follow_each_other_without_gap(some: list[float], start: int, length: int) -> None:
    shares = Shares.of(some)
    sources, places = shares.locate(np.arange(start, start + length))
    counts = shares.counts(start)
    for source, place in zip(sources.tolist(), places.tolist(), strict=True):
        assert place == counts[source]
        counts[source] += 1
    assert counts.tolist() == shares.counts(start + length).tolist()


@settings(deadline=None)
@given(weights, st.permutations(range(60)))
def test_a_position_is_located_alone_as_among_others(some: list[float], order: list[int]) -> None:
    shares = Shares.of(some)
    together = np.stack(shares.locate(np.arange(60)))
    shuffled = np.stack(shares.locate(np.array(order)))
    assert together[:, order].tolist() == shuffled.tolist()


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_whole_numbers_of_rows_come_out_exactly(rows: list[int]) -> None:
    shares = Shares.of(rows)
    assert shares.counts(sum(rows)).tolist() == rows
    assert shares.counts(3 * sum(rows)).tolist() == [3 * count for count in rows]


def test_the_sequence_is_what_it_always_was() -> None:
    sources, places = Shares.of([0.5, 0.3, 0.15, 0.05]).locate(np.arange(20))
    assert "".join(map(str, sources.tolist())) == GOLDEN_SOURCES
    assert "".join(map(str, places.tolist())) == GOLDEN_PLACES


GOLDEN_SOURCES = "10201020101030102010"
GOLDEN_PLACES = "00011213243506472859"


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_weights([3, 0, 6]) == (1, 0, 2)
    assert whole_weights([Fraction(1, 3), Fraction(1, 6)]) == (2, 1)


@settings(deadline=None)
@given(st.lists(st.floats(1e-12, 1), min_size=2, max_size=8))
def test_weights_too_fine_for_whole_numbers_keep_their_proportion(some: list[float]) -> None:
    whole = whole_weights(some)
    assert sum(whole) <= LARGEST
    total = sum(map(Fraction, map(str, some)))
    for weight, kept in zip(some, whole, strict=True):
        assert kept >= 1
        assert abs(Fraction(kept, sum(whole)) - Fraction(str(weight)) / total) < Fraction(len(some) + 1, LARGEST // 2)


changes = st.lists(st.tuples(st.integers(1, 500), st.lists(st.integers(0, 20), min_size=3, max_size=3)), max_size=4)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=3), changes, st.integers(0, 2500))
def test_weights_change_from_a_position_on_and_sources_go_on(
    first: list[int], later: list[tuple[int, list[int]]], prefix: int
) -> None:
    phases, start = [Phase(0, tuple(first))], 0
    for length, some in later:
        start += length
        if sum(some):
            phases.append(Phase(start, tuple(some)))
    shares = ChangingShares(phases)
    sources, places = shares.locate(np.arange(prefix))
    assert np.bincount(sources, minlength=3).tolist() == shares.counts(prefix).tolist()
    for source in range(3):
        assert places[sources == source].tolist() == list(range(int((sources == source).sum())))
    for phase, following in zip(phases, [*phases[1:], Phase(10**6, ())], strict=True):
        length = min(prefix, following.start) - phase.start
        if length > 0:
            within = np.bincount(sources[phase.start : phase.start + length], minlength=3)
            expected = [share * length for share in exact_shares(phase.weights)]
            assert all(abs(have - want) < 2 for have, want in zip(within.tolist(), expected, strict=True))


@settings(deadline=None)
@given(positions)
def test_a_change_leaves_what_came_before_it_as_it_was(start: int) -> None:
    whole = ChangingShares([Phase(0, (3, 1))])
    changed = ChangingShares([Phase(0, (3, 1)), Phase(start + 50, (1, 3))])
    before = np.arange(start, start + 50)
    assert np.stack(whole.locate(before)).tolist() == np.stack(changed.locate(before)).tolist()


def test_weights_and_phases_that_make_no_mixture_are_refused() -> None:
    for wrong in ([], [0, 0], [1, -1]):
        with pytest.raises(ValueError, match="weights must be at least 0"):
            Shares.of(wrong)
    with pytest.raises(ValueError, match=r"phases must start at 0 .* \(got \[5\]\)"):
        ChangingShares([Phase(5, (1,))])
    with pytest.raises(ValueError, match=r"\(got \[0, 4, 4\]\)"):
        ChangingShares([Phase(0, (1,)), Phase(4, (1,)), Phase(4, (1,))])
    with pytest.raises(ValueError, match="the same number of sources"):
        ChangingShares([Phase(0, (1,)), Phase(4, (1, 2))])
