"""Orders: every row once an epoch, whatever the chunks and the window; lanes keep to their own blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.order.shuffle import GlobalOrder, Order, SequentialOrder
from forebay.order.window import Ordering, ShuffleQuality, Window, WindowOrder, shuffle_quality

GOLDEN_WINDOW = [3, 19, 2, 18, 1, 15, 9, 14, 8, 16, 0, 17, 12, 13, 11, 7, 10, 5, 4, 6]
GOLDEN_GLOBAL = [2, 16, 15, 0, 17, 4, 5, 1, 7, 14, 6, 18, 10, 3, 8, 9, 19, 12, 11, 13]


@st.composite
def windows(draw: st.DrawFn) -> tuple[np.ndarray, Window]:
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any))
    unit = draw(st.integers(1, 9))
    window = Window(
        rows=draw(st.integers(unit, 80)), unit=unit, chunks=draw(st.integers(1, 6)), lanes=draw(st.integers(1, 9))
    )
    return np.array(counts), window


@given(case=windows(), seed=st.integers(0, 2**32), epoch=st.integers(0, 5), part=st.integers(0, 2))
def test_a_window_shuffle_has_every_row_once(case: tuple[np.ndarray, Window], seed: int, epoch: int, part: int) -> None:
    order = WindowOrder(case[0], seed, case[1], part)
    rows = order.rows_at(epoch, np.arange(order.size))
    assert np.array_equal(np.sort(rows), np.arange(order.size))


@given(case=windows(), data=st.data())
def test_a_position_is_looked_up_alone_as_among_others(case: tuple[np.ndarray, Window], data: st.DataObject) -> None:
    order = WindowOrder(case[0], 3, case[1])
    positions = np.array(data.draw(st.lists(st.integers(0, order.size - 1), min_size=1, max_size=9)))
    singly = [
        int(WindowOrder(case[0], 3, case[1]).rows_at(1, positions[at : at + 1])[0]) for at in range(len(positions))
    ]
    assert order.rows_at(1, positions).tolist() == singly


@given(case=windows(), epoch=st.integers(0, 3))
def test_lanes_share_no_unit_but_the_one_at_their_edge(case: tuple[np.ndarray, Window], epoch: int) -> None:
    counts, window = case
    order = WindowOrder(counts, 0, window)
    units = unit_of(counts, window.unit)[order.rows_at(epoch, np.arange(order.size))]
    lanes = [set(units[lane :: window.lanes].tolist()) for lane in range(window.lanes)]
    shared = sum(map(len, lanes)) - len(set().union(*lanes))
    assert shared < window.lanes


@given(case=windows(), epoch=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_a_lane_has_the_same_rows_in_every_epoch(case: tuple[np.ndarray, Window], epoch: int, seed: int) -> None:
    counts, window = case
    order = WindowOrder(counts, seed, window)
    first, later = (order.rows_at(each, np.arange(order.size)) for each in (0, epoch))
    for lane in range(window.lanes):
        assert set(first[lane :: window.lanes].tolist()) == set(later[lane :: window.lanes].tolist())


@given(case=windows())
def test_a_unit_stays_within_one_window_of_its_lane(case: tuple[np.ndarray, Window]) -> None:
    counts, window = case
    order = WindowOrder(counts, 0, window)
    units = unit_of(counts, window.unit)[order.rows_at(0, np.arange(order.size))]
    for lane in range(window.lanes):
        places = units[lane :: window.lanes]
        for unit in np.unique(places).tolist():
            found = np.flatnonzero(places == unit)
            assert found[-1] - found[0] < window.rows + window.unit


@given(case=windows(), epoch=st.integers(0, 3))
def test_a_lane_reads_the_chunks_of_a_group_together(case: tuple[np.ndarray, Window], epoch: int) -> None:
    """A chunk that passes through a small tier is fetched once: it is not needed again after its group."""
    counts, window = case
    order = WindowOrder(counts, 0, window)
    chunk = np.repeat(np.arange(len(counts)), counts)[order.rows_at(epoch, np.arange(order.size))]
    for lane in range(window.lanes):
        places = chunk[lane :: window.lanes]
        spans = [np.flatnonzero(places == one)[[0, -1]] for one in np.unique(places).tolist()]
        longest = window.chunks * counts.max() + 2 * window.rows
        assert all(last - first < longest for first, last in spans)


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_a_node_needs_its_part_of_the_chunks_in_all_epochs(nodes: int) -> None:
    counts = np.full(640, 100)
    order = WindowOrder(counts, 3, Window(rows=50, unit=8))
    chunks = np.arange(order.size) // 100
    needed = set()
    for epoch in range(4):
        needed |= set(chunks[order.rows_at(epoch, np.arange(1, order.size, nodes))].tolist())
    assert 640 / nodes <= len(needed) <= 640 / nodes + 2


def test_most_chunks_stay_in_their_lane_when_a_cache_grows() -> None:
    window, lanes = Window(rows=50), []
    for chunks in (1000, 1100):
        rows = WindowOrder(np.full(chunks, 100), 3, window).rows_at(0, np.arange(chunks * 100))
        half = np.full(chunks * 100, -1)
        half[rows] = np.arange(chunks * 100) % 2
        lanes.append(half[:100_000])
    assert (lanes[0] == lanes[1]).mean() > 0.95


@pytest.mark.parametrize("order", [GlobalOrder(1000, 4), WindowOrder(np.full(10, 100), 4, Window(rows=40, lanes=4))])
def test_epochs_seeds_and_parts_have_orders_of_their_own(order: Order) -> None:
    ordering = Ordering("global", 4) if isinstance(order, GlobalOrder) else Ordering("window", 4, order.window)
    positions, counts = np.arange(1000), np.full(10, 100)
    found = [
        order.rows_at(0, positions),
        order.rows_at(1, positions),
        ordering.of(counts, part=1).rows_at(0, positions),
        Ordering(ordering.kind, 5, ordering.window).of(counts).rows_at(0, positions),
    ]
    assert np.array_equal(ordering.of(counts).rows_at(0, positions), found[0])
    for at, one in enumerate(found):
        assert all((one == other).mean() < 0.05 for other in found[:at])


def test_the_orders_are_the_same_in_every_release() -> None:
    window = WindowOrder(np.array([5, 3, 8, 4]), 1, Window(rows=4, unit=2, chunks=2, lanes=2))
    assert window.rows_at(2, np.arange(20)).tolist() == GOLDEN_WINDOW
    assert GlobalOrder(20, 1).rows_at(2, np.arange(20)).tolist() == GOLDEN_GLOBAL
    assert SequentialOrder(5).rows_at(2, np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_an_ordering_comes_back_from_its_state() -> None:
    window = Window(rows=8, unit=2)
    for ordering in (
        Ordering("global", 3),
        Ordering("global", 3, automatic=True),
        Ordering("sequential", 0),
        Ordering("window", 1, window),
    ):
        assert Ordering.of_state(ordering.state()) == ordering


@pytest.mark.parametrize("fields", [{"rows": 1, "unit": 2}, {"rows": 1, "lanes": 0}, {"rows": 2, "chunks": 0}])
def test_a_window_that_cannot_be_cut_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="unit, chunks and lanes must be at least 1, and rows at least unit"):
        Window(**fields)


def test_quality_is_1_for_a_global_shuffle_near_it_for_a_wide_window_and_low_without_shuffle() -> None:
    counts = np.full(64, 1000)
    whole = shuffle_quality(GlobalOrder(64_000, 0), counts, 16, 64)
    wide = shuffle_quality(WindowOrder(counts, 0, Window(rows=200, unit=16, lanes=16)), counts, 16, 64)
    narrow = shuffle_quality(WindowOrder(counts, 0, Window(rows=32, unit=16, lanes=2, chunks=1)), counts, 16, 64)
    none = shuffle_quality(SequentialOrder(64_000), counts, 16, 64)
    assert all(0.95 < figure < 1.05 for figure in (whole.chunks, whole.units, whole.travel))
    assert all(figure > 0.85 for figure in (wide.chunks, wide.units, wide.travel))
    assert none.chunks < narrow.chunks < 0.2
    assert none.units < narrow.units < 0.3
    assert none.travel < 0.001
    assert str(ShuffleQuality(0.5, 1.0, 0.25)).startswith("of a global shuffle: 50.0% of the chunks in a batch, 100.0%")


@pytest.mark.parametrize("chunks", [4, 8, 16, 19, 60])
@pytest.mark.parametrize("batch", [8, 16, 32])
def test_few_chunks_are_mixed_as_well_as_by_a_global_shuffle(chunks: int, batch: int) -> None:
    """Fewer chunks than lanes: neighboring lanes lie in one chunk."""
    counts = np.full(chunks, 2000)
    quality = shuffle_quality(WindowOrder(counts, 0, Window(rows=200, unit=16)), counts, 16, batch)
    assert quality.chunks > 0.97
    assert quality.units > 0.97
    assert quality.travel > 0.85


def test_the_figures_in_the_documentation_are_those_of_the_shuffle() -> None:
    """A million rows of 2,048 tokens in chunks of 8,000, blocks of 128 K tokens."""
    counts = np.full(125, 8000)
    order = WindowOrder(counts, 0, Window(rows=384, unit=64))
    large, small = (shuffle_quality(order, counts, 64, size) for size in (512, 32))
    assert large.chunks > 0.95
    assert 0.57 < large.units < 0.59
    assert small.chunks > 0.99
    assert small.units > 0.99


def unit_of(counts: np.ndarray, unit: int) -> np.ndarray:
    """The unit of every row, counted through all chunks."""
    units, first = [], 0
    for count in counts.tolist():
        units.append(first + np.arange(count) // unit)
        first += -(-count // unit)
    return np.concatenate(units)
