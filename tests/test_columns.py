"""Columns: what a recipe may declare, and rows of different lengths."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import columns
from forebay.columns import DTYPES, Column, Ragged, join
from forebay.errors import RecipeInvalid


def test_every_type_has_a_tag_of_its_own_and_the_size_its_name_says():
    assert len({tag for tag, _ in DTYPES.values()}) == len(DTYPES) == 13
    for name, (_, dtype) in DTYPES.items():
        bits = "".join(filter(str.isdigit, name)) or "8"
        assert dtype.itemsize * 8 == int(bits)
        assert dtype.newbyteorder("<") == dtype


@pytest.mark.parametrize("name", ["", "a.b", ".", "a/b", "__metadata__"])
def test_a_name_that_would_not_fit_into_a_file_is_refused(name):
    with pytest.raises(RecipeInvalid, match="column name"):
        Column(name=name, dtype="uint8")


def test_a_negative_shape_or_block_is_refused():
    with pytest.raises(RecipeInvalid, match=r"'x' has a negative side in its shape \(3, -1\)"):
        Column(name="x", dtype="uint8", shape=(3, -1))
    with pytest.raises(RecipeInvalid, match="'x' has rows_per_block -1; 0 means automatic"):
        Column(name="x", dtype="uint8", rows_per_block=-1)


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        (Column(name="x", dtype="uint8"), 65536),
        (Column(name="x", dtype="float64", shape=(2,)), 4096),
        (Column(name="x", dtype="bfloat16", shape=(3, 3)), 3640),
        (Column(name="x", dtype="float32", shape=(1 << 20,)), 1),
        (Column(name="x", dtype="float32", shape=(0,)), 65536),
        (Column(name="x", dtype="float32", ragged=True), 64),
        (Column(name="x", dtype="float32", rows_per_block=7), 7),
        (Column(name="x", dtype="float32", ragged=True, rows_per_block=7), 7),
    ],
)
def test_a_block_has_the_rows_declared_or_as_many_as_fill_64_kib(column, rows):
    assert column.block_rows == rows


@given(st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=6))
def test_ragged_rows_read_back_one_by_one(rows):
    ragged = Ragged.of([np.array(row, np.uint8) for row in rows], np.dtype("u1"))
    assert [ragged[number].tolist() for number in range(len(ragged))] == rows
    assert [ragged[number - len(rows)].tolist() for number in range(len(ragged))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.nbytes == sum(map(len, rows)) + 8 * (len(rows) + 1)


@given(st.lists(st.binary(max_size=5), max_size=6))
def test_ragged_bytes_read_back(rows):
    ragged = Ragged.of_bytes(rows)
    assert [ragged[number].tobytes() for number in range(len(ragged))] == rows


def test_ragged_rows_may_have_a_shape_even_where_there_are_none():
    assert Ragged.of([], np.dtype("f4"), (2, 3)).values.shape == (0, 2, 3)
    assert Ragged.of([np.zeros((4, 2, 3), "f4")], np.dtype("f4"), (2, 3))[0].shape == (4, 2, 3)


@pytest.mark.parametrize("row", [2, -3])
def test_a_row_that_is_not_there_is_an_index_error(row):
    with pytest.raises(IndexError, match=f"there is no row {row}; there are 2 rows"):
        Ragged.of_bytes([b"a", b"b"])[row]


def test_the_examples_hold():
    assert doctest.testmod(columns, extraglobs={"np": np}).failed == 0


def test_offsets_of_files_are_joined_as_whole_numbers():
    """What `Cache.chunks` returns has the uint64 offsets of the file."""
    pieces = [Ragged(np.array([1, 2, 3]), np.array(offsets, np.uint64)) for offsets in ([0, 1, 3], [0, 0, 3])]
    joined = join(pieces)
    assert joined.offsets.dtype == np.int64
    assert joined.offsets.tolist() == [0, 1, 3, 3, 6]


@pytest.mark.parametrize("shape", [(10**30,), (2**40, 2**40), (0, 2**60), (1,) * 17])
def test_a_shape_that_no_array_could_have_is_refused(shape):
    with pytest.raises(RecipeInvalid, match="column 'x' has rows of"):
        Column(name="x", dtype="uint8", shape=shape)


@given(st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=6), st.integers(-1, 0))
def test_padded_rows_are_the_rows_and_then_the_value(rows: list[list[int]], value: int):
    ragged = Ragged.of([np.array(row, np.int64) for row in rows], np.dtype("i8"))
    wide, lengths = ragged.padded(value)
    width = max(map(len, rows), default=0)
    assert wide.shape == (len(rows), width)
    assert wide.tolist() == [row + [value] * (width - len(row)) for row in rows]
    assert lengths.tolist() == [len(row) for row in rows]


def test_padded_rows_keep_type_and_shape_of_their_values_and_need_not_start_at_zero():
    values = np.arange(12, dtype=np.float16).reshape(6, 2)
    wide, _ = Ragged(values, np.array([1, 2, 4], np.uint64)).padded(np.nan)
    assert (wide.dtype, wide.shape) == (values.dtype, (2, 2, 2))
    assert wide[1].tolist() == values[2:4].tolist()
    assert np.isnan(wide[0, 1]).all()
