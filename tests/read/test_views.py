"""Columns that are computed as rows are read, absent rows, and rows of several caches in one table."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from tests.helpers.layer_recipes import stored_cache

import forebay as fb
from forebay.columns import Column, Columns, Ragged
from forebay.errors import NotFound, RecipeInvalid
from forebay.format import chunk
from forebay.order.coins import Coins
from forebay.read.columns import Slices
from forebay.read.rows import Located, RowReader, Table
from forebay.read.views import Dequantized, Filled, Padded, Plan, View
from forebay.store import LocalStore

ROWS = 6
NO_COINS = Coins(0, 0, np.zeros(ROWS, np.uint64))


class Quantized(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer that every third row lacks: int8 values with a scale, a label, and a ragged column."""

    kind: ClassVar[str] = "quantized"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("number",)

    def columns(self) -> tuple[Column, ...]:
        values, scale = Column(name="int8", dtype="int8", shape=(2, 3)), Column(name="scale", dtype="float16")
        label = Column(name="label", dtype="int64")
        return values, scale, label, Column(name="states", dtype="float32", shape=(2,), ragged=True)

    def make(self, rows: Columns) -> fb.Rows:
        numbers = np.asarray(rows["number"])
        present = numbers % 3 != 2
        states = [np.full((int(number) % 4, 2), number, np.float32) for number in numbers * present]
        columns = {
            "int8": np.repeat(numbers * present, 6).reshape(-1, 2, 3).astype(np.int8),
            "scale": (0.5 * present).astype(np.float16),
            "label": numbers * present,
            "states": Ragged.of(states, np.dtype(np.float32), (2,)),
        }
        return fb.Rows(columns, present=present)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    root = tmp_path_factory.mktemp("plain")
    stored_cache(LocalStore(root), (Column(name="number", dtype="int64"),), [{"number": np.arange(ROWS)}])
    return fb.open_cache(root)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    root = tmp_path_factory.mktemp("layered")
    stored_cache(LocalStore(root), (Column(name="number", dtype="int64"),), [{"number": np.arange(ROWS)}])
    fb.build(root, None, Quantized(), workers=0)
    return fb.open_cache(root)


def table(caches: list[fb.Cache], columns: list[str | View], sources: list[int] | None = None) -> Table:
    located = Located(np.arange(ROWS), None if sources is None else np.array(sources))
    return RowReader(caches, columns).read(located, NO_COINS)


def test_floats_of_absent_rows_are_nan_everywhere(layered: fb.Cache) -> None:
    absent = np.arange(ROWS) % 3 == 2
    for read in (layered.read(range(ROWS), ["scale", "label"]), layered.chunk(0, ["scale", "label"])):
        assert np.isnan(np.asarray(read["scale"])[absent]).all()
        assert (np.asarray(read["scale"])[~absent] == 0.5).all()
        assert not np.asarray(read["label"])[absent].any()
    assert np.array_equal(table([layered], ["scale"])["quantized.present"], ~absent)


def test_an_absent_row_of_integers_is_an_error_with_both_ways_out(layered: fb.Cache) -> None:
    message = r"row 2 of .* is absent from layer 'quantized', and 'label' \(int64\) .*Present\('quantized'\).*Filled"
    reader = RowReader([layered], ["label"])
    with pytest.raises(ValueError, match=message):
        reader.read(Located(np.arange(ROWS)), NO_COINS)
    with pytest.raises(ValueError, match=message):
        reader.check([None])
    present = reader.read(Located(np.array([0, 1, 3])), NO_COINS)
    assert present["label"].tolist() == [0, 1, 3]
    assert table([layered], [Filled("label", -100)])["label"].tolist() == [0, 1, -100, 3, 4, -100]


def test_a_dequantized_view_multiplies_by_the_scale_of_each_row(layered: fb.Cache) -> None:
    values = table([layered], [Dequantized("latents", "int8", "scale")])
    assert set(values) == {"latents", "quantized.present"}
    assert values["latents"].dtype == np.float32
    assert values["latents"][4].tolist() == [[2.0] * 3] * 2
    assert np.isnan(values["latents"][[2, 5]]).all()


def test_a_padded_view_fills_ragged_rows_up(layered: fb.Cache) -> None:
    padded = table([layered], [Padded("states", 4, value=9)])["states"]
    assert padded.shape == (ROWS, 4, 2)
    assert padded[3, :, 0].tolist() == [3, 3, 3, 9]
    assert padded[0].tolist() == [[9.0, 9.0]] * 4  # present, but empty
    assert np.isnan(padded[2]).all()
    with pytest.raises(ValueError, match="a row of 'states' has 3 values, more than length=2"):
        table([layered], [Padded("states", 2)])


@pytest.mark.parametrize("value", [300, -1, 0.5, float("nan"), float("inf")])
def test_a_fill_value_that_the_integers_cannot_hold_is_an_error(tmp_path: Path, value: float) -> None:
    columns = (Column(name="number", dtype="uint8"), Column(name="ids", dtype="uint8", ragged=True))
    rows = {"number": np.arange(2, dtype=np.uint8), "ids": Ragged.of([np.ones(1, np.uint8)] * 2, np.dtype("u1"))}
    stored_cache(LocalStore(tmp_path), columns, [rows])
    for view in (Filled("number", value), Padded("ids", 3, value)):
        with pytest.raises(ValueError, match=r"is uint8; pass a whole number from 0 to 255"):
            RowReader([fb.open_cache(tmp_path)], [view])


def test_padded_integers_of_a_cache_without_the_column_have_the_fill_value(tmp_path: Path, plain: fb.Cache) -> None:
    columns = (Column(name="number", dtype="int64"), Column(name="ids", dtype="int64", ragged=True))
    ids = Ragged.of([np.full(row, row) for row in range(ROWS)], np.dtype(np.int64))
    stored_cache(LocalStore(tmp_path), columns, [{"number": np.arange(ROWS), "ids": ids}])
    caches = [fb.open_cache(tmp_path), plain]
    joined = table(caches, [Padded("ids", 6, value=-100)], [0, 1, 0, 1, 0, 0])
    assert joined["ids"][:3].tolist() == [[-100] * 6, [-100] * 6, [2, 2, -100, -100, -100, -100]]


def test_a_view_of_integers_that_a_cache_lacks_is_an_error(layered: fb.Cache, plain: fb.Cache) -> None:
    class Doubled(View):
        name, reads = "doubled", ("int8",)

        def make(self, cache: fb.Cache, columns: Columns, plan: Plan) -> dict[str, np.ndarray | Ragged]:
            return {"doubled": np.asarray(columns["int8"]).astype(np.int64) * 2}

    with pytest.raises(ValueError, match=r"has no column 'doubled', and 'doubled' \(int64\) has no value"):
        RowReader([layered, plain], [Doubled()])


def test_rows_of_several_caches_are_joined_in_order(layered: fb.Cache, plain: fb.Cache) -> None:
    sources = [0, 1, 0, 1, 1, 0]
    columns = ["number", "scale", "states", Filled("label", -1), "row", "row_id"]
    joined = table([layered, plain], columns, sources)
    assert joined["number"].tolist() == joined["row"].tolist() == list(range(ROWS))
    assert joined["row_id"].tolist() == [[0, row] for row in range(ROWS)]
    assert joined["quantized.present"].tolist() == [True, False, False, False, False, False]
    assert np.isnan(joined["scale"]).tolist() == [False, *[True] * 5]
    assert joined["label"].tolist() == [0, -1, -1, -1, -1, -1]
    assert joined["states"].lengths.tolist() == [0] * ROWS
    with pytest.raises(NotFound, match="nowhere"):
        RowReader([layered, plain], ["nowhere"])


def test_a_view_next_to_the_stored_column_reads_its_own_part(layered: fb.Cache) -> None:
    class Half(View):
        name, reads = "half", ("int8",)

        def plan(self, cache: fb.Cache, coins: Coins) -> Plan:
            return Plan({"int8": Slices(np.arange(len(coins)) % 2, 1)})

        def make(self, cache: fb.Cache, columns: Columns, plan: Plan) -> dict[str, np.ndarray | Ragged]:
            return {"half": np.asarray(columns["int8"])[:, 0] + 1}

    rows = Located(np.array([0, 1, 3, 4]))
    read = RowReader([layered], ["int8", Half()]).read(rows, Coins(0, 0, np.zeros(4, np.uint64)))
    assert read["int8"].shape == (4, 2, 3)
    assert read["half"][:, 0].tolist() == [1, 2, 4, 5]


def test_a_view_reads_what_an_earlier_one_makes(layered: fb.Cache, plain: fb.Cache) -> None:
    @dataclass(frozen=True)
    class Halved(View):
        name: str = "halved"
        reads: ClassVar[tuple[str, ...]] = ("latents",)

        def make(self, cache: fb.Cache, columns: Columns, plan: Plan) -> dict[str, np.ndarray | Ragged]:
            return {"halved": np.asarray(columns["latents"]) / 2}

    views: list[str | View] = [Dequantized("latents", "int8", "scale"), Halved()]
    assert table([layered], views)["halved"][4].tolist() == [[1.0] * 3] * 2
    joined = table([layered, plain], views, [0, 1, 0, 1, 0, 1])["halved"]
    assert np.isnan(joined).all(axis=(1, 2)).tolist() == [False, True, True, True, False, True]
    with pytest.raises(NotFound, match="latents"):
        RowReader([layered], views[::-1])


def test_a_padded_view_of_what_an_earlier_view_makes(layered: fb.Cache) -> None:
    class Doubled(View):
        name, reads = "doubled", ("states",)

        def make(self, cache: fb.Cache, columns: Columns, plan: Plan) -> dict[str, np.ndarray | Ragged]:
            return {"doubled": Ragged(columns["states"].values * 2, columns["states"].offsets)}

    assert table([layered], [Doubled(), Padded("doubled", 4)])["doubled"][3, :, 0].tolist() == [6, 6, 6, 0]


@pytest.mark.parametrize("name", ["row", "row_id"])
def test_names_of_rows_are_no_names_of_stored_columns(name: str) -> None:
    with pytest.raises(RecipeInvalid, match=f"column name '{name}' is reserved"):
        Column(name=name, dtype="int64")


def test_equal_values_of_a_dictionary_column_are_stored_once_and_read_for_every_row(tmp_path: Path) -> None:
    columns = (
        Column(name="pooled", dtype="float32", shape=(2,), rows_per_block=1, index="pooled_row"),
        Column(name="states", dtype="uint8", ragged=True, codec="zstd", index="states_row"),
        Column(name="pooled_row", dtype="uint32"),
        Column(name="states_row", dtype="uint32"),
    )

    def chunk(*holders: int) -> Columns:
        index = np.array(holders, np.uint32)
        held = [row == holder for row, holder in enumerate(holders)]
        pooled = [np.full((int(one), 2), row, np.float32) for row, one in enumerate(held)]
        states = [np.full(row + 1 if one else 0, row, np.uint8) for row, one in enumerate(held)]
        ragged = {"pooled": Ragged.of(pooled, np.dtype(np.float32), (2,)), "states": Ragged.of(states, np.dtype("u1"))}
        return {**ragged, "pooled_row": index, "states_row": index}

    stored_cache(LocalStore(tmp_path), columns, [chunk(0, 1, 0), chunk(0, 0, 2)])
    cache = fb.open_cache(tmp_path)
    assert cache.default_columns == ("pooled", "states")
    read = cache.read([5, 2, 4, 0, 1], ["pooled", "states"])
    assert read["pooled"].tolist() == [[2, 2], [0, 0], [0, 0], [0, 0], [1, 1]]
    assert [row.tolist() for row in map(read["states"].__getitem__, range(5))] == [[2, 2, 2], [0], [0], [0], [1, 1]]
    assert np.asarray(cache.chunk(1, ["pooled"])["pooled"]).tolist() == [[0, 0], [0, 0], [2, 2]]
    assert fb.verify(tmp_path, full=True).sound


@pytest.mark.parametrize(("index", "message"), [(3, "reaches outside"), (2, "reaches outside")])
def test_a_forged_dictionary_index_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, message: str
) -> None:
    columns = (Column(name="value", dtype="float32", index="value_row"), Column(name="value_row", dtype="uint32"))
    values = Ragged(np.zeros(4, np.float32), np.array([0, 1, 2, 4]))  # row 2 has two values
    rows = {"value": values, "value_row": np.array([0, 1, index], np.uint32)}
    with pytest.raises(RecipeInvalid, match="the index 'value_row' of column 'value' reaches"):
        stored_cache(LocalStore(tmp_path / "built"), columns, [rows])
    with monkeypatch.context() as forger:
        forger.setattr(chunk, "dictionary_problem", lambda *_: None)
        stored_cache(LocalStore(tmp_path), columns, [rows])
    with pytest.raises(fb.errors.ChunkCorrupt, match=message):
        fb.open_cache(tmp_path).read([2], ["value"])
    (problem,) = fb.verify(tmp_path, full=True).bad
    assert "the index 'value_row' of column 'value' reaches" in problem.problem
