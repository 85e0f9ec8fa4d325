"""Splits and filters: a row stays on its side whatever happens to the cache, and a selection travels with its rows."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, number_cache, write_lines
from tests.helpers.token_caches import NumberedTokens, token_cache, write_numbers

import forebay as fb
from forebay.errors import NotFound
from forebay.torch import Split, Where

SIDES = ("train", "validation")

pytestmark = pytest.mark.filterwarnings(
    "ignore:the (train|validation) side of .* has .* of the rows instead of:UserWarning"
)


def selected(cache: fb.Cache, rule: Split | Where, column: str) -> list[int]:
    """The numbers that the selected rows tell."""
    selection = rule.select(cache)
    rows = selection.rows(np.arange(len(selection)))
    return np.asarray(cache.read(rows, [column])[column]).reshape(len(rows), -1)[:, 0].tolist()


def sides(root: Path, column: str, seed: int = 0, by: Any = "auto", fraction: float = 0.5) -> dict[int, str]:
    """The side of every number in a cache, each of which is on one."""
    cache = fb.open_cache(root)
    both = zip(SIDES, Split.pair(fraction, seed=seed, by=by), strict=True)
    found = {side: selected(cache, split, column) for side, split in both}
    assert sorted(found["train"] + found["validation"]) == sorted(set(found["train"] + found["validation"]))
    assert len(found["train"]) + len(found["validation"]) == len(cache)
    return {number: side for side, numbers in found.items() for number in numbers}


def number_root(folder: Path, end_chunk: int | None = None) -> Path:
    """Rows with sample ids; every seventh line makes no row, so that chunks differ in length."""
    path = folder / "raw" / "a.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{number:06d}\n" if number % 7 else "none..\n" for number in range(200)))
    fb.build(
        folder / "cache",
        fb.sources.lines(path.parent),
        LineRecipe(chunk_rows=9),
        workers=0,
        end_chunk=end_chunk,
        max_failures=1.0,
    )
    return folder / "cache"


def token_root(folder: Path, start_chunk: int = 0) -> Path:
    write_numbers(folder / "raw" / "a.txt", range(100))
    source = fb.sources.lines(folder / "raw")
    fb.build(folder / "cache", source, NumberedTokens(), workers=0, start_chunk=start_chunk)
    return folder / "cache"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(number_root(tmp_path_factory.mktemp("numbers")))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_root(tmp_path_factory.mktemp("tokens")))


@pytest.mark.parametrize("seed", [0, 1])
def test_split_by_chunk_no_chunk_is_on_both_sides(tokens: fb.Cache, seed: int) -> None:
    found = sides(Path(tokens.root), "tokens", seed, by="chunk")
    assert set(found.values()) == set(SIDES)
    for chunk in range(20):
        assert len({found[number] for number in range(5 * chunk, 5 * chunk + 5)}) == 1


@pytest.mark.parametrize("by", ["auto", "chunk"])
def test_neither_filling_a_gap_nor_growing_moves_a_row_to_the_other_side(tmp_path: Path, by: Any) -> None:
    root = token_root(tmp_path, start_chunk=7)
    before = sides(root, "tokens", by=by)
    fb.build(root, fb.sources.lines(tmp_path / "raw"), NumberedTokens(), workers=0)
    filled = sides(root, "tokens", by=by)
    write_numbers(tmp_path / "raw" / "0 sorts first.txt", range(100, 500))
    fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=NumberedTokens(), workers=0)
    grown = sides(root, "tokens", by=by)
    assert (len(before), len(filled), len(grown)) == (65, 100, 500)
    assert {number: filled[number] for number in before} == before
    assert {number: grown[number] for number in filled} == filled


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    """One chunk of documents that fill from a part of a row to three rows."""
    folder = tmp_path_factory.mktemp("packed")
    lengths = np.random.default_rng(0).integers(3, 90, 120).tolist()
    lines = [json.dumps({"text": " word" * length}) for length in lengths]
    (folder / "a.jsonl").write_text("\n".join(lines))
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=32)
    fb.build(folder / "cache", fb.sources.jsonl(folder / "a.jsonl"), recipe, workers=0)
    return fb.open_cache(folder / "cache")


class TestSmallCaches:
    """Few chunks, or one: a split between rows reaches the fraction, and keeps documents whole."""

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8, 0.9])
    def test_one_chunk_is_split_without_a_document_on_both_sides(
        self, packed: fb.Cache, seed: int, fraction: float
    ) -> None:
        assert len(packed.chunk_numbers) == 1
        train, validation = Split.pair(fraction, seed=seed)
        documents = []
        for split, wanted in ((train, fraction), (validation, 1 - fraction)):
            assert abs(split.share(packed) - wanted) < 0.05
            selection = split.select(packed)
            rows = packed.read(selection.rows(np.arange(len(selection))), ["documents"])["documents"]
            documents.append(set(rows.values[:, 0].tolist()))
        assert not documents[0] & documents[1]
        assert len(documents[0] | documents[1]) == 120
        assert train.share(packed) + validation.share(packed) == 1

    def test_a_cache_of_two_rows_has_one_on_each_side(self, tmp_path: Path) -> None:
        cache = fb.open_cache(token_cache(tmp_path, 2))
        for seed in range(5):
            assert [split.share(cache) for split in Split.pair(0.9, seed=seed)] == [0.5, 0.5]

    @pytest.mark.parametrize("rows", [175, 600])
    def test_some_and_many_chunks_reach_the_fraction(self, tmp_path: Path, rows: int) -> None:
        """35 chunks, all cut between rows; 120 chunks, of which the later ones are whole."""
        cache = fb.open_cache(token_cache(tmp_path, rows))
        for seed in range(5):
            assert abs(Split("train", 0.9, seed).share(cache) - 0.9) < 0.05

    @pytest.mark.filterwarnings("error")
    def test_a_share_far_from_the_fraction_is_a_warning_that_says_both(self, tokens: fb.Cache) -> None:
        shares = [Split("train", 0.9, seed, by="chunk").share(tokens) for seed in range(30)]
        far = max(range(30), key=lambda seed: abs(shares[seed] - 0.9))
        with pytest.warns(UserWarning, match=f"(?s)has {shares[far]:.1%} of the rows instead of 90.0%.*by chunk"):
            Split("train", 0.9, far, by="chunk").select(tokens)

    @pytest.mark.filterwarnings("error")
    def test_a_side_that_is_left_empty_is_a_warning_to_the_other(self, tmp_path: Path) -> None:
        cache = fb.open_cache(token_cache(tmp_path, 5))
        with pytest.warns(UserWarning, match=r"has 100.0% of the rows instead of 99.0%"):
            Split("train", 0.99, by="chunk").select(cache)
        with pytest.raises(NotFound):
            Split("validation", 0.99, by="chunk").select(cache)


def test_rows_with_sample_ids_are_split_one_by_one(numbers: fb.Cache) -> None:
    found = sides(Path(numbers.root), "number")
    mixed = [
        chunk for chunk in range(22) if len({found.get(9 * chunk + row, "none") for row in range(9)} - {"none"}) > 1
    ]
    assert len(mixed) > 15


def test_neither_growth_nor_a_filled_gap_nor_another_cache_moves_a_sample(tmp_path: Path) -> None:
    root = number_root(tmp_path, end_chunk=4)
    before = sides(root, "number")
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(chunk_rows=9), workers=0, start_chunk=9)
    with_gap = sides(root, "number")
    write_lines(tmp_path / "raw" / "b.txt", 500, 40)
    fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(chunk_rows=9), workers=0)
    after = sides(root, "number")
    assert len(before) < len(with_gap) < len(after)
    assert {number: after[number] for number in before} == before
    assert {number: after[number] for number in with_gap} == with_gap
    other = sides(number_cache(tmp_path / "other", rows=100), "number")
    shared = after.keys() & other.keys()
    assert len(shared) > 50
    assert {number: after[number] for number in shared} == {number: other[number] for number in shared}


def test_seed_and_fraction_make_other_splits(numbers: fb.Cache) -> None:
    small, large, other = (
        selected(numbers, Split("train", fraction=fraction, seed=seed), "number")
        for fraction, seed in [(0.5, 0), (0.8, 0), (0.8, 1)]
    )
    assert set(small) < set(large)
    assert set(large) != set(other)
    assert abs(len(large) / len(numbers) - 0.8) < 0.1


def test_a_split_is_of_the_rows_that_the_opened_layers_have(tmp_path: Path) -> None:
    root = number_root(tmp_path)
    whole = sides(root, "number")
    fb.build(root, None, LengthLayer(), workers=0, start_chunk=5, max_failures=1.0)
    cache = fb.open_cache(root, layers=["length"])
    for side in SIDES:
        rule = Split(side, fraction=0.5)
        assert all(whole[number] == side for number in selected(cache, rule, "number"))
    assert sum(len(Split(side, fraction=0.5).select(cache)) for side in SIDES) == len(cache)


def even(columns: dict[str, np.ndarray]) -> np.ndarray:
    return columns["number"] % 2 == 0


def test_a_filter_keeps_the_rows_that_pass(numbers: fb.Cache) -> None:
    assert selected(numbers, Where("even", even, ["number"]), "number") == [
        number for number in range(200) if number % 7 and number % 2 == 0
    ]


def test_a_predicate_is_asked_once_per_chunk_however_often_its_rule_is_applied(numbers: fb.Cache) -> None:
    asked = []

    def every(columns: dict[str, np.ndarray]) -> np.ndarray:
        asked.append(len(columns["number"]))
        return columns["number"] >= 0

    rule = Where("every", every, ["number"])
    assert [len(rule.select(cache)) for cache in (numbers, fb.open_cache(numbers.root))] == [len(numbers)] * 2
    assert len(asked) == len(numbers.chunk_numbers)
    Where("every", every, ["number"]).select(numbers)
    assert len(asked) == 2 * len(numbers.chunk_numbers), "a name alone says nothing of what a predicate does"


def test_a_filter_within_a_split_keeps_what_is_in_both(numbers: fb.Cache) -> None:
    split = Split("train", fraction=0.6)
    both = selected(numbers, Where("even", even, ["number"], within=split), "number")
    assert both == [number for number in selected(numbers, split, "number") if number % 2 == 0]


def test_a_predicate_must_answer_for_every_row(numbers: fb.Cache) -> None:
    with pytest.raises(TypeError, match=r"the predicate 'sum' returned int64 of shape \(\) for 9 rows"):
        Where("sum", lambda columns: columns["number"].sum(), ["number"]).select(numbers)


def test_a_predicate_that_raises_is_named_with_the_columns_it_had(numbers: fb.Cache) -> None:
    with pytest.raises(KeyError, match="length") as raised:
        Where("long", lambda columns: columns["length"] > 4, ["number"]).select(numbers)
    assert raised.value.__notes__ == ["raised by the predicate 'long', called with the columns ['number']"]


def test_an_empty_side_is_an_error_that_says_what_to_do(tokens: fb.Cache) -> None:
    with pytest.raises(NotFound, match=r"(?s)none of the 100 rows in 20 chunks .* choose another fraction"):
        Split("validation", fraction=1.0).select(tokens)
    with pytest.raises(NotFound, match=r"(?s)where never.* choose a predicate"):
        Where("never", lambda columns: np.zeros(len(columns["tokens"]), bool), ["tokens"]).select(tokens)


def test_what_is_no_split_is_refused(tokens: fb.Cache) -> None:
    with pytest.raises(ValueError, match="side must be 'train' or 'validation'"):
        Split("test")
    with pytest.raises(ValueError, match="by must be 'auto', 'chunk', 'document' or 'sample'"):
        Split("train", by="row")
    with pytest.raises(ValueError, match="fraction must be above 0 and up to 1"):
        Split("train", fraction=80)
    with pytest.raises(ValueError, match="names no column of sample ids"):
        Split("train", by="sample").select(tokens)


def test_a_pickled_selection_selects_the_same(numbers: fb.Cache) -> None:
    for rule in (Split("train"), Split("train", by="chunk"), Where("even", even, ["number"])):
        selection = rule.select(numbers)
        again = pickle.loads(pickle.dumps(selection))
        assert again.digest == selection.digest
        assert again.rows(np.arange(len(again))).tolist() == selection.rows(np.arange(len(selection))).tolist()


def test_rules_say_what_they_are_the_same_for_every_generation() -> None:
    assert Split("train").digest == "train of 0.8, seed 0, by auto"
    assert Where("even", even, ["number"], within=Split("validation")).digest == (
        "where even, within validation of 0.8, seed 0, by auto"
    )
