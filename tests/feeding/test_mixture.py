"""Mixture: every cache has its share of every prefix, each of its rows once per pass, and a resume changes nothing."""

import json
import sys
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.batch_transforms import tell_coins
from tests.helpers.cache_files import chunk_path
from tests.helpers.forged_caches import list_again
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.token_caches import NumberedTokens, grow_cache, interleaved, token_cache, write_numbers
from tests.teachers.own_teachers import Ramp

import forebay as fb
from forebay.errors import CacheNotFound, RecipeInvalid, StateMismatch
from forebay.teachers import TeacherRecipe
from forebay.torch import Ingredient, Loader, Mixture, Ranks, Split, StoredBatch, Window, change_weights, open_mixture

SIZES = (40, 7, 23)
examples = settings(deadline=None, max_examples=scaled(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
weights = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[fb.Cache]:
    return [fb.open_cache(token_cache(tmp_path_factory.mktemp(f"size-{size}"), size)) for size in SIZES]


def weighted(caches: list[fb.Cache], some: list[float], **options: object) -> Mixture:
    return Mixture.of([Ingredient(cache, weight) for cache, weight in zip(caches, some, strict=True)], **options)


def loader_of(mixture: Mixture, batch_size: int, **options: object) -> Loader:
    return Loader(mixture, global_batch_size=batch_size, threads=0, **options)


def rows_of(batch: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """(dataset, row) of a batch, which its tokens confirm."""
    assert batch["tokens"][:, 0].tolist() == batch["local_index"].tolist()
    return list(zip(batch["dataset_id"].tolist(), batch["local_index"].tolist(), strict=True))


def epochs_of(loader: Loader, count: int = 1) -> list[list[tuple[int, int]]]:
    """The rows of all batches of some epochs."""
    return [rows_of(batch) for _ in range(count) for batch in loader]


@examples
@given(weights, st.integers(1, 17), st.integers(0, 99))
def test_the_share_of_every_cache_tracks_its_weight_within_one_batch(
    caches: list[fb.Cache], some: list[int], batch_size: int, seed: int
) -> None:
    loader = loader_of(weighted(caches, some, seed=seed, epoch_rows=300), batch_size, drop_last=False)
    rows = [row for batch in epochs_of(loader) for row in batch]
    assert len(rows) == 300
    seen = np.cumsum([[dataset == each for each in range(3)] for dataset, _ in rows], axis=0)
    for number, counts in enumerate(seen.tolist(), start=1):
        for count, weight in zip(counts, some, strict=True):
            assert abs(count - Fraction(weight * number, sum(some))) < max(2, batch_size)


@examples
@given(weights, st.integers(0, 99))
def test_every_pass_through_a_cache_has_each_of_its_rows_once(
    caches: list[fb.Cache], some: list[int], seed: int
) -> None:
    rows = [
        row for batch in epochs_of(loader_of(weighted(caches, some, seed=seed, epoch_rows=100), 10), 3) for row in batch
    ]
    for dataset, size in enumerate(SIZES):
        own = [row for each, row in rows if each == dataset]
        passes = [own[at : at + size] for at in range(0, len(own), size)]
        assert all(sorted(one) == list(range(size)) for one in passes[:-1])
        assert all(len(set(one)) == len(one) for one in passes[-1:])
        if size > 20 and len(passes) > 2:
            assert passes[0] != passes[1]


@examples
@given(
    weights,
    st.integers(0, 99),
    st.sampled_from([(4, 1, 1), (12, 1, 4), (12, 4, 2), (6, 3, 1), (8, 2, 8)]),
    st.integers(0, 30),
    st.integers(1, 12),
)
def test_stopped_anywhere_it_goes_on_with_any_number_of_ranks_and_batch_size(
    caches: list[fb.Cache], some: list[int], seed: int, sizes: tuple[int, int, int], stop: int, later_batch: int
) -> None:
    batch_size, before, after = sizes
    mixture = weighted(caches, some, seed=seed, epoch_rows=96)
    whole = [row for batch in epochs_of(loader_of(mixture, batch_size), 3) for row in batch]

    def rank_rows(
        rank: int, world: int, size: int, state: str | None, count: int | None
    ) -> tuple[list[int], list[list[tuple[int, int]]], str]:
        """Where the batches start, and what this rank has of them: so many, or to the end of the third epoch."""
        loader = loader_of(weighted(caches, some, seed=seed, epoch_rows=96), size, ranks=Ranks(rank, world))
        if state is not None:
            loader.load_state_dict(json.loads(state))
        starts, found = [], []
        while loader.epoch < 3 and len(found) != count:
            for batch in loader:
                starts.append(loader.position - size)
                found.append(rows_of(batch))
                if len(found) == count:
                    break
        return starts, found, json.dumps(loader.state_dict())

    def global_rows(world: int, size: int, state: str | None, count: int | None) -> tuple[list, str]:
        starts, found, states = zip(*(rank_rows(rank, world, size, state, count) for rank in range(world)), strict=True)
        assert len(set(states)) == 1, "all ranks have the same state"
        return [row for batch in interleaved(starts[0], found) for row in batch], states[0]

    began, state = global_rows(before, batch_size, None, stop)
    assert began == whole[: len(began)]
    went_on, _ = global_rows(after, after * later_batch, state, None)
    position = json.loads(state)["position"]
    if (96 - position) % (after * later_batch) == 96 % (after * later_batch) == 0:
        assert began + went_on == whole
    else:  # another batch size leaves another rest of an epoch out
        kept = (96 - position) // (after * later_batch) * after * later_batch
        assert went_on[:kept] == whole[len(began) : len(began) + kept]


def test_repeats_give_every_row_so_often_in_an_epoch(caches: list[fb.Cache]) -> None:
    mixture = Mixture.of([Ingredient(cache, repeat=repeat) for cache, repeat in zip(caches, (1, 3, 2), strict=True)])
    assert mixture.size(0) == 40 + 21 + 46
    for _ in range(2):
        rows = [row for batch in epochs_of(loader_of(mixture, 7, drop_last=False)) for row in batch]
        counts = [np.bincount([row for each, row in rows if each == dataset]).tolist() for dataset in range(3)]
        assert counts == [[1] * 40, [3] * 7, [2] * 23]


def test_a_part_of_a_repeat_is_a_part_of_the_rows(caches: list[fb.Cache]) -> None:
    mixture = Mixture.of([Ingredient(caches[0], repeat=0.5), Ingredient(caches[1], repeat=1)])
    rows = [row for batch in epochs_of(loader_of(mixture, 1), 2) for row in batch]
    halves = [sorted(row for each, row in rows[at : at + 27] if each == 0) for at in (0, 27)]
    assert sorted(halves[0] + halves[1]) == list(range(40)), "two epochs make one pass"


def test_weights_change_from_a_step_on_and_the_state_keeps_them(caches: list[fb.Cache]) -> None:
    loader = loader_of(weighted(caches, [1, 0, 1], epoch_rows=200), 10)
    before = [rows_of(batch) for _, batch in zip(range(6), loader, strict=False)]
    change_weights(loader, [0, 1, 3])
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["stream"]["phases"] == [[0, [1, 0, 1]], [60, [0, 1, 3]]]
    after = epochs_of(loader)
    assert [sum(dataset == each for batch in before for dataset, _ in batch) for each in range(3)] == [30, 0, 30]
    assert [sum(dataset == each for batch in after for dataset, _ in batch) for each in range(3)] == [0, 35, 105]
    passes = [row for batch in before + after for dataset, row in batch if dataset == 2]
    assert sorted(passes[:23]) == list(range(23)), "a cache goes on where it was"
    resumed = loader_of(weighted(caches, [1, 0, 1], epoch_rows=200), 10)
    resumed.load_state_dict(state)
    assert epochs_of(resumed) == after
    assert epochs_of(resumed) == epochs_of(loader), "in the next epoch too"


def test_planned_changes_are_changes_made_at_that_row(caches: list[fb.Cache]) -> None:
    planned = loader_of(weighted(caches, [1, 0, 1], epoch_rows=200, changes=[(60, [0, 1, 3])]), 10)
    changed = loader_of(weighted(caches, [1, 0, 1], epoch_rows=200), 10)
    first = [rows_of(batch) for _, batch in zip(range(6), changed, strict=False)]
    change_weights(changed, [0, 1, 3])
    assert epochs_of(planned, 2) == first + epochs_of(changed, 2)


def test_training_tensors_are_those_of_the_cache_each_row_is_from(caches: list[fb.Cache]) -> None:
    for batch in loader_of(weighted(caches, [1, 1, 1]), 9):
        for at, (dataset, row) in enumerate(rows_of(batch)):
            own = caches[dataset][row]
            assert batch["tokens"][at].tolist() == own["tokens"].tolist()
            lengths = batch["seq_lens"][at]
            assert lengths[lengths > 0].tolist() == own["seq_lens"].tolist()
            assert batch["labels"][at].tolist() == fb.masks.labels([own["tokens"]], [own["seq_lens"]])[0].tolist()


def test_each_pass_and_each_cache_has_coins_of_its_own(caches: list[fb.Cache]) -> None:
    mixture = weighted([caches[1], caches[1], caches[2]], [1, 1, 1], epoch_rows=60)
    loader = loader_of(mixture, 10, transform=tell_coins)
    coins = [
        (dataset, row, coin)
        for batch in loader
        for (dataset, row), coin in zip(rows_of(batch), batch["coin"].tolist(), strict=True)
    ]
    assert len({coin for _, _, coin in coins}) == 60


def test_selections_hold_in_a_mixture(caches: list[fb.Cache]) -> None:
    rule = Split("train", fraction=0.6)
    mixture = Mixture.of([Ingredient(caches[0], 1, selection=rule), Ingredient(caches[2], 1)])
    rows = [row for batch in epochs_of(loader_of(mixture, 5), 3) for row in batch]
    chosen = rule.select(caches[0])
    assert {row for dataset, row in rows if dataset == 0} == set(chosen.rows(np.arange(len(chosen))).tolist())
    assert {row for dataset, row in rows if dataset == 1} == set(range(23))


def test_a_state_is_small_and_belongs_to_its_mixture(caches: list[fb.Cache]) -> None:
    loader = loader_of(weighted(caches, [5, 3, 2]), 10)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1200
    for other, differs in [
        (weighted(caches, [5, 3, 2], seed=1), "seed: 0 then, 1 now"),
        (weighted(caches, [5, 3, 3]), r"weights: \[5, 3, 2\] then, \[5, 3, 3\] now"),
        (weighted(caches, [5, 3, 2], epoch_rows=50), "epoch_rows: None then, 50 now"),
        (weighted(caches[:2], [5, 3], epoch_rows=70), "mixture: 3 caches then, 2 caches now"),
        (weighted([caches[0], caches[2], caches[1]], [5, 3, 2]), "cache_id"),
    ]:
        with pytest.raises(StateMismatch, match=differs):
            loader_of(other, 10).load_state_dict(state)


@pytest.mark.parametrize("epoch_rows", [60, None])
@pytest.mark.parametrize("share", ["weight", "repeat"])
@pytest.mark.parametrize("taken", [0, 3, 4, 11])
def test_made_anew_on_a_grown_cache_it_ends_the_pass_it_is_in_and_takes_the_new_rows_up(
    tmp_path: Path, caches: list[fb.Cache], share: str, epoch_rows: int | None, taken: int
) -> None:
    root = token_cache(tmp_path, 20)

    def mixture() -> Mixture:
        ingredients = [Ingredient(fb.open_cache(root), **{share: 2}), Ingredient(caches[1], **{share: 1})]
        return Mixture.of(ingredients, epoch_rows=epoch_rows)

    def passes(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        return tuple([row for each, row in rows if each == dataset] for dataset in range(2))

    def loader() -> Loader:
        return loader_of(mixture(), 6, drop_last=False)

    whole = [row for batch in epochs_of(loader(), 9) for row in batch]
    running = loader()
    rows = [row for batch in take(running, taken) for row in batch]
    begun = -(-len([each for each, _ in rows if each == 0]) // 20) * 20
    state = json.loads(json.dumps(running.state_dict()))
    grow_cache(tmp_path, 20, 15)
    for batches in (4, 4, 14):  # a state of the resumed mixture resumes, too: within the pass, and after it
        resumed = loader()
        resumed.load_state_dict(state)
        rows += [row for batch in take(resumed, batches) for row in batch]
        state = json.loads(json.dumps(resumed.state_dict()))
    assert [each for each, _ in rows] == [each for each, _ in whole[: len(rows)]], "shares stay as they were"
    (grown, other), (grown_before, other_before) = passes(rows), passes(whole)
    assert grown[:begun] == grown_before[:begun], "the pass ends as it began"
    assert sorted(grown[begun : begun + 35]) == list(range(35)), "the next has all rows"
    assert other == other_before[: len(other)], "a cache that did not grow is not touched"


def test_a_running_mixture_takes_new_rows_up_from_the_next_epoch_on(tmp_path: Path, caches: list[fb.Cache]) -> None:
    root, told = token_cache(tmp_path, 20), []

    def mixture() -> Mixture:
        return weighted([fb.open_cache(root), caches[1]], [2, 1], epoch_rows=24)

    pinned, running = loader_of(mixture(), 6), loader_of(mixture(), 6, growth="epoch", on_growth=told.append)
    rows = [row for batch in epochs_of(running) for row in batch]
    grow_cache(tmp_path, 20, 15)
    rows += [row for batch in epochs_of(running) for row in batch]
    assert [(each.old_rows, each.new_rows) for each in told] == [(20, 35)]
    rows += [row for batch in take(running, 3) for row in batch]
    resumed = loader_of(mixture(), 6, growth="epoch")
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    rest = take(running, 9)
    assert take(resumed, 9) == rest, "a state of the grown mixture resumes"
    rows += [row for batch in rest for row in batch]
    whole = [row for batch in epochs_of(pinned, 5) for row in batch]
    assert [each for each, _ in rows] == [each for each, _ in whole], "shares and the length of an epoch stay"
    grown, before = ([row for each, row in some if each == 0] for some in (rows, whole))
    assert grown[:40] == before[:40], "the pass that began ends as it was"
    assert sorted(grown[40:75]) == list(range(35)), "the next has all rows"
    assert [row for each, row in rows if each] == [row for each, row in whole if each]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"growth": "epoch", "restart": True}, "restart=True"),
        ({"growth": "within"}, "growth='epoch'"),
        ({"on_growth": print}, "on_growth cannot be passed with a Mixture"),
    ],
)
def test_growth_that_a_mixture_does_not_have_is_an_error(caches: list[fb.Cache], options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        loader_of(weighted(caches, [1, 1, 1]), 10, **options)


def python_calls(loader: Loader, batches: int) -> int:
    """How many Python functions run while batches are made in this thread, from the first on."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    taken = iter(loader)
    next(taken)  # maps files, checks blocks
    sys.setprofile(count)
    try:
        for _ in range(batches):
            next(taken)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("options", [{}, {"columns": ["documents", "row_id"]}])
def test_a_row_costs_no_python(tmp_path: Path, options: dict) -> None:
    caches = [fb.open_cache(token_cache(tmp_path / str(rows), rows, chunk_rows=400)) for rows in (301, 290)]
    list(loader_of(weighted(caches, [2, 1]), 64, drop_last=False, **options))  # checks blocks
    few, many = (loader_of(weighted(caches, [2, 1]), size, prefetch=1, **options) for size in (16, 64))
    assert python_calls(many, 2) < python_calls(few, 2) + 48, "the rows of two batches differ by 96"


def take(loader: Loader, count: int) -> list[list[tuple[int, int]]]:
    """The rows of the next batches, over as many epochs as that takes."""
    found: list[list[tuple[int, int]]] = []
    while len(found) < count:
        found += [rows_of(batch) for batch in islice(loader, count - len(found))]
    return found


@pytest.mark.parametrize(
    "options",
    [{"seed": 5}, {"shuffle": None}, {"shuffle": Window(rows=8)}, {"selection": Split("train")}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_mixture_decides_cannot_be_asked_of_its_loader(caches: list[fb.Cache], options: dict) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name} cannot be passed with a Mixture, .*; pass it to the Mixture$"):
        loader_of(weighted(caches, [1, 1, 1], seed=3), 10, **options)
    loader_of(weighted(caches, [1, 1, 1], seed=3), 10, seed=3)


class Spoken(NumberedTokens, frozen=True, kw_only=True):
    """Tokens of some tokenizer."""

    tokenizer: str

    def dependencies(self) -> dict[str, str]:
        return {"tokenizer.json": self.tokenizer}


def test_caches_of_two_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    source = fb.sources.lines(write_numbers(tmp_path / "raw" / "a.txt", range(20)))
    for name, digest in (("gpt2", "aa"), ("bpe", "bb"), ("gpt2 again", "aa")):
        fb.build(tmp_path / name, source, Spoken(tokenizer=digest), workers=0)
    one, other, same = (fb.open_cache(tmp_path / name) for name in ("gpt2", "bpe", "gpt2 again"))
    weighted([one, same], [1, 1])
    problem = r"the SHA-256 of 'tokenizer.json' is aa in '.*gpt2' but bb in '.*bpe'; mix only caches"
    with pytest.raises(ValueError, match=problem):
        weighted([one, same, other], [1, 1, 1])


def test_caches_whose_teachers_gave_other_columns_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("red cat\nblue dog\n")
    for name, width in (("six", 6), ("five", 5)):
        fb.build(tmp_path / name, fb.sources.lines(tmp_path / "a.txt"), fb.RawRecipe(), workers=0)
        fb.build(tmp_path / name, None, TeacherRecipe(teacher=Ramp(width=width), batch_size=2))
    told = r"column 'ramp' is rows of shape \(10, 6\).* in '.*six' but rows of shape \(10, 5\).* in '.*five'"
    with pytest.raises(ValueError, match=told):
        Mixture.of([Ingredient(fb.open_cache(tmp_path / name, layers=["ramp"]), weight=1) for name in ("six", "five")])
    Mixture.of([Ingredient(fb.open_cache(tmp_path / name), weight=1) for name in ("six", "five")])


def test_numbers_of_numpy_leave_the_state_json_and_equal(caches: list[fb.Cache]) -> None:
    plain = weighted(caches, [5, 3, 2], seed=3, window=Window(rows=8), epoch_rows=50, changes=[(60, [1, 1, 1])])
    options = {"seed": np.int64(3), "window": Window(rows=np.int32(8)), "epoch_rows": np.int64(50)}
    odd = weighted(caches, list(np.array([5, 3, 2])), changes=[(np.int64(60), np.ones(3, np.int64))], **options)
    assert json.loads(json.dumps(odd.state())) == json.loads(json.dumps(plain.state()))
    assert Split("train", fraction=np.float64(0.7), seed=np.int64(2)).digest == Split("train", 0.7, 2).digest


def test_what_makes_no_mixture_is_refused(tmp_path: Path, caches: list[fb.Cache]) -> None:
    with pytest.raises(ValueError, match="a mixture needs at least one cache"):
        Mixture.of([])
    with pytest.raises(ValueError, match="all have a weight, or all a repeat"):
        Mixture.of([Ingredient(caches[0], weight=1), Ingredient(caches[1], repeat=1)])
    with pytest.raises(ValueError, match="weights must be"):
        weighted(caches, [1, -1, 2])
    with pytest.raises(ValueError, match="epoch_rows must be a whole number of at least 1"):
        weighted(caches, [1, 1, 1], epoch_rows=0)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.txt").write_text("1\n")
    fb.build(tmp_path / "empty", fb.sources.lines(tmp_path / "none"), NumberedTokens(), workers=0)
    chunk = chunk_path(tmp_path / "empty", "tokens", 0)
    list_again(tmp_path / "empty", "tokens", 0, chunk.read_bytes(), rows=0)  # as early versions could publish it
    with pytest.raises(ValueError, match="empty' has no rows"):
        weighted([caches[0], fb.open_cache(tmp_path / "empty")], [1, 1])
    longer = fb.open_cache(token_cache(tmp_path, 5, sequence_length=16))
    with pytest.raises(ValueError, match=r"column 'tokens' is rows of shape \(8,\) in .* but rows of shape \(16,\) in"):
        weighted([caches[0], longer], [1, 1])
    narrow = fb.open_cache(token_cache(tmp_path / "narrow", 5, length_dtype="uint16"))
    with pytest.raises(ValueError, match=r"'seq_lens' is .* type uint32 in .* type uint16 in"):
        weighted([caches[0], narrow], [1, 1])


def test_tokens_of_different_types_make_batches_of_one_type(tmp_path: Path, caches: list[fb.Cache]) -> None:
    """Whichever caches the rows that are read together come from."""
    wide = fb.open_cache(token_cache(tmp_path, 5, token_dtype="uint32"))
    both = weighted([caches[0], wide], [15, 1])
    raw = loader_of(both, 1, collate=StoredBatch(both, ["tokens"]), prefetch=1)
    assert {batch["tokens"].dtype for batch in raw} == {torch.uint32}


MIXTURE = """
seed = 3
epoch_rows = 120

[[cache]]
root = "edu/cache"
weight = 0.75
split = "train"
fraction = 0.6

[[cache]]
root = "code/cache"
weight = 0.25

[[change]]
from_row = 60
weights = [0.5, 0.5]
"""


def test_a_mixture_is_read_from_a_file_wherever_one_stands(tmp_path: Path) -> None:
    edu, code = (fb.open_cache(token_cache(tmp_path / name, rows)) for name, rows in (("edu", 30), ("code", 12)))
    (tmp_path / "mixture.toml").write_text(MIXTURE)
    opened = open_mixture(tmp_path / "mixture.toml")
    made = Mixture.of(
        [Ingredient(edu, 0.75, selection=Split("train", fraction=0.6)), Ingredient(code, 0.25)],
        seed=3,
        epoch_rows=120,
        changes=[(60, (0.5, 0.5))],
    )
    assert opened.state() == made.state()
    assert epochs_of(loader_of(opened, 6)) == epochs_of(loader_of(made, 6))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("weight = 0.25", "wieght = 0.25", r"(?s)unknown field `wieght` - at .*\[\[cache\]\] has root, weight"),
        ("weight = 0.25", 'weight = "much"', r"Expected `float \| null`, got `str` - at `\$.cache\[1\].weight`"),
        ("weight = 0.25", "repeat = 2", "all have a weight, or all a repeat"),
        ("[0.5, 0.5]", "[0.5]", "the same number of sources"),
        ("seed = 3", "seed = ", "not valid TOML"),
        ("seed = 3", "seed = " + "[" * 5000, "not valid TOML: maximum recursion depth"),
        ("fraction = 0.6", "fraction = 60", "fraction must be above 0"),
        ('split = "train"', "", "fraction.* of .* without a split"),
        ("weight = 0.25", "weight = nan", r"weights must be finite \(got \[.*nan\]\)"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    for name in ("edu", "code"):
        write_numbers(tmp_path / name / "raw" / "a.txt", range(12))
        fb.build(tmp_path / name / "cache", fb.sources.lines(tmp_path / name / "raw"), NumberedTokens(), workers=0)
    path = tmp_path / "mixture.toml"
    path.write_text(MIXTURE.replace(old, new))
    with pytest.raises(RecipeInvalid, match=problem) as raised:
        open_mixture(path)
    assert str(raised.value).startswith(str(path))


def test_a_file_or_cache_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeInvalid, match=r"nowhere\.toml: cannot be read"):
        open_mixture(tmp_path / "nowhere.toml")
    (tmp_path / "mixture.toml").write_text(MIXTURE)
    with pytest.raises(CacheNotFound, match="edu/cache"):
        open_mixture(tmp_path / "mixture.toml")


def test_a_change_of_weights_names_every_cache(caches: list[fb.Cache]) -> None:
    loader = loader_of(weighted(caches, [1, 1, 1]), 4)
    with pytest.raises(ValueError, match=r"pass one weight per cache: 3 \(got 2\)"):
        change_weights(loader, [0.5, 0.5])
