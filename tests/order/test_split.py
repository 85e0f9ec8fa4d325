"""Splits: a name is on its side for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.columns import Ragged
from forebay.order.selected_rows import chunk_names, document_groups, on_training_side, sample_names

names = st.lists(st.binary(max_size=12), max_size=30)
seeds = st.integers(0, 2**64 - 1)
fractions = st.floats(0.01, 1.0)


def test_sides_are_what_they_always_were() -> None:
    chunks = on_training_side(chunk_names(np.arange(40)), 0.8, 0)
    assert "".join("tv"[not side] for side in chunks.tolist()) == GOLDEN_CHUNKS
    samples = on_training_side([b"a.png", "größe.png".encode(), b"", b"a.png"], 0.5, 7)
    assert samples.tolist() == GOLDEN_SAMPLES


GOLDEN_CHUNKS = "ttttttttttvttvtvttttttvvtvvtttttvtvttttt"
GOLDEN_SAMPLES = [True, True, False, True]


@settings(deadline=None)
@given(names, names, fractions, seeds)
def test_names_that_come_between_and_after_move_none(
    old: list[bytes], new: list[bytes], fraction: float, seed: int
) -> None:
    before = dict(zip(old, on_training_side(old, fraction, seed).tolist(), strict=True))
    mixed = [*new, *old, *new]
    after = dict(zip(mixed, on_training_side(mixed, fraction, seed).tolist(), strict=True))
    assert {name: after[name] for name in old} == before


@settings(deadline=None)
@given(names, fractions, fractions, seeds)
def test_a_larger_fraction_only_adds_to_the_training_side(
    some: list[bytes], one: float, other: float, seed: int
) -> None:
    small, large = (on_training_side(some, fraction, seed) for fraction in sorted((one, other)))
    assert not (small & ~large).any()


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_training_side_has_its_share(fraction: float, seed: int) -> None:
    assert abs(on_training_side(chunk_names(np.arange(20_000)), fraction, seed).mean() - fraction) < 0.02


def test_the_whole_is_a_fraction_too() -> None:
    assert on_training_side(chunk_names(np.arange(1000)), 1.0, 0).all()


def test_another_seed_is_another_split() -> None:
    one, other = (on_training_side(chunk_names(np.arange(10_000)), 0.5, seed) for seed in (0, 1))
    assert abs((one == other).mean() - 0.5) < 0.02


def test_a_sample_has_one_name_however_its_id_is_stored() -> None:
    ids = [b"ab", b"cd", b"ef"]
    fixed = np.frombuffer(b"".join(ids), np.uint8).reshape(3, 2)
    assert [bytes(name) for name in sample_names(fixed)] == ids
    assert [bytes(name) for name in sample_names(Ragged.of_bytes(ids))] == ids
    assert [bytes(name) for name in sample_names(np.array([1, 258], "<u2"))] == [b"\x01\x00", b"\x02\x01"]
    wide = Ragged(np.array([1, 258, 3], "<u2"), np.array([0, 2, 2, 3]))
    assert [bytes(name) for name in sample_names(wide)] == [b"\x01\x00\x02\x01", b"", b"\x03\x00"]
    assert list(sample_names(np.empty((0, 4), np.uint8))) == []


def test_what_is_no_fraction_or_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fraction must be above 0 and up to 1 \(got 0\.0\)"):
        on_training_side([], 0.0, 0)
    with pytest.raises(ValueError, match=r"\(got 80\)"):
        on_training_side([], 80, 0)
    with pytest.raises(ValueError, match=r"seed must be from 0 to below 2\*\*64 \(got -1\)"):
        on_training_side([], 0.8, -1)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=40))
def test_rows_are_in_one_group_if_documents_connect_them(rows: list[list[int]]) -> None:
    groups: list[set[int]] = []
    for documents in filter(None, map(set, rows)):
        apart = [group for group in groups if not group & documents]
        groups = [*apart, documents.union(*(group for group in groups if group & documents))]
    lowest = {document: min(group) for group in groups for document in group}
    expected = [lowest[row[0]] if row else -1 - number for number, row in enumerate(rows)]
    assert document_groups(pieces(rows)).tolist() == expected


@pytest.mark.parametrize("order", ["up", "down", "mixed"])
def test_a_chain_of_many_rows_is_one_group_and_takes_few_rounds(order: str) -> None:
    """Passing on the lowest document from row to row would take 100,000 rounds, and minutes."""
    numbers = np.arange(100_001)
    numbers = {"up": numbers, "down": numbers[::-1], "mixed": np.random.default_rng(0).permutation(numbers)}[order]
    chain = np.stack([numbers[:-1], numbers[1:]], axis=1)
    assert not document_groups(pieces(chain.tolist())).any()


def pieces(rows: list[list[int]]) -> Ragged:
    """The documents of rows, as a cache of tokens stores them."""
    flat = [document for row in rows for document in row]
    values = np.stack([np.array(flat, np.uint32), np.zeros(len(flat), np.uint32)], axis=1)
    return Ragged(values, np.cumsum([0, *map(len, rows)]))
