"""Selections: places among the selected rows and row numbers lead to each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.order.selected_rows import BLOCK_ROWS, Selection, packed_bytes

lengths = st.one_of(st.integers(0, 40), st.sampled_from([BLOCK_ROWS - 1, BLOCK_ROWS, 3 * BLOCK_ROWS + 5]))


def pack_bits(chosen: np.ndarray) -> np.ndarray:
    """Pack bools into bits, padded with zeros to whole blocks."""
    bits = np.zeros(packed_bytes(len(chosen)), np.uint8)
    packed = np.packbits(chosen, bitorder="little")
    bits[: len(packed)] = packed
    return bits


def bits_of(chosen: np.ndarray) -> Selection:
    return Selection(pack_bits(chosen), len(chosen))


def check(selection: Selection, chosen: np.ndarray) -> None:
    """A selection agrees with its definition: one truth per row."""
    rows = np.flatnonzero(chosen)
    assert len(selection) == len(rows)
    assert selection.total == len(chosen)
    assert selection.rows(np.arange(len(rows))).tolist() == rows.tolist()
    assert selection.rows(np.arange(len(rows))[::-1]).tolist() == rows[::-1].tolist()
    everywhere = np.arange(len(chosen) + 1)
    assert selection.before(everywhere).tolist() == np.concatenate([[0], np.cumsum(chosen)]).tolist()
    middle = len(chosen) // 3
    assert selection.mask(middle, len(chosen)).tolist() == chosen[middle:].tolist()


@settings(deadline=None)
@given(lengths, st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_single_rows_are_selected_as_defined(length: int, density: float, seed: int) -> None:
    chosen = np.random.default_rng(seed).random(length) < density
    check(bits_of(chosen), chosen)


@pytest.mark.parametrize("chosen", [np.zeros(10_000, bool), np.ones(10_000, bool), np.arange(10_000) == 9_999])
def test_none_all_and_the_last_row_alone(chosen: np.ndarray) -> None:
    check(bits_of(chosen), chosen)


def test_a_row_costs_one_bit() -> None:
    assert bits_of(np.ones(1_000_000, bool)).bits.nbytes <= 1_000_000 / 8 + BLOCK_ROWS / 8


def test_the_digest_tells_selections_apart() -> None:
    chosen = np.arange(100) % 3 == 0
    other = chosen.copy()
    other[99] ^= True
    assert bits_of(chosen).digest == bits_of(chosen.copy()).digest
    assert bits_of(chosen).digest != bits_of(other).digest
    assert bits_of(chosen).digest != bits_of(np.append(chosen, False)).digest


def test_bits_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bits must have 640 bytes for 5,000 rows \(got 128\)"):
        Selection(pack_bits(np.ones(10, bool)), 5_000)
