"""Wrong arguments, states and batches raise where they are passed, in terms of the call."""

import json
from collections.abc import Callable
from datetime import timedelta
from os.path import basename
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.token_caches import grow_cache, token_cache

import forebay as fb
from forebay.errors import StateMismatch
from forebay.torch import (
    CacheDataset,
    Ingredient,
    Loader,
    Mixture,
    Ranks,
    Schedule,
    Split,
    TokenBatch,
    Where,
    masks_on_device,
)
from forebay.torch.distill import TeacherDropout, Warmup


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("tokens"), 20))


def loader(source: Any, **options: Any) -> Loader:
    return Loader(source, **{"global_batch_size": 4, "threads": 0, **options})


def mixture(tokens: fb.Cache) -> Mixture:
    return Mixture.of([Ingredient(tokens, weight=1), Ingredient(tokens, weight=2)], seed=3)


REFUSED: dict[str, tuple[Callable[[fb.Cache], object], str]] = {
    "a path of a dataset": (lambda cache: CacheDataset(Path("edu")), r"fb.open_cache\('edu'\)"),
    "a dataset": (lambda cache: loader(CacheDataset(cache)), "reads a cache or a Mixture, not a CacheDataset"),
    "a path in a mixture": (lambda cache: Mixture.of([Ingredient("edu", weight=1)]), r"fb.open_cache\('edu'\)"),
    "caches as a mixture": (lambda cache: Mixture.of([cache, cache]), r"Ingredient\(cache, weight=0.7\)"),
    "a side": (lambda cache: loader(cache, selection="train"), r"pass a rule: Split\('train'\)"),
    "a side of a dataset": (lambda cache: CacheDataset(cache, selection="train"), r"pass a rule: Split\('train'\)"),
    "one column": (lambda cache: loader(cache, columns="tokens"), r"columns is 'tokens'; pass a list of names"),
    "one column to read": (lambda cache: cache.read([0], "tokens"), r"pass \['tokens'\]"),
    "one column of a filter": (lambda cache: Where("any", np.any, "tokens"), r"pass a list of names: \['tokens'\]"),
    "one layer": (lambda cache: fb.open_cache(cache.root, layers="tokens"), r"pass a list of names: \['tokens'\]"),
    "one derived": (
        lambda cache: loader(cache, collate=TokenBatch(cache, derive="positions")),
        r"derive is 'positions'; pass a list of names",
    ),
    "a word for a flag": (lambda cache: loader(cache, drop_last="no"), "drop_last must be True or False"),
    "a word for on_device": (lambda cache: TokenBatch(cache, on_device="no"), "on_device must be True or False"),
    "a number for a flag": (lambda cache: loader(cache, restart=1), "restart must be True or False"),
    "a state as text": (
        lambda cache: loader(cache).load_state_dict(json.dumps(loader(cache).state_dict())),
        r"the state is a str; .* json.loads\(text\)",
    ),
    "a batch that is none": (
        lambda cache: next(iter(loader(cache, transform=lambda batch, coins: None))),
        "the transform returned a NoneType; return the batch",
    ),
    "a row that is none": (
        lambda cache: CacheDataset(cache, transform=lambda batch, coins: None)[0],
        "the transform returned a NoneType",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_of_another_type_is_refused(tokens: fb.Cache, mistake: str) -> None:
    call, problem = REFUSED[mistake]
    with pytest.raises(TypeError, match=problem):
        call(tokens)


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("seed", lambda cache: Split("train", seed=1.5)),
        ("seed", lambda cache: loader(cache, seed=1.5)),
        ("threads", lambda cache: loader(cache, threads=1.5)),
        ("global_batch_size", lambda cache: loader(cache, global_batch_size=1.5)),
        ("epoch_rows", lambda cache: Mixture.of([Ingredient(cache, weight=1)], epoch_rows=1.5)),
    ],
)
def test_part_of_a_number_is_an_error(tokens: fb.Cache, option: str, call: Callable[[fb.Cache], object]) -> None:
    with pytest.raises(ValueError, match=rf"{option} must be a whole number of at least \d \(got 1.5\)"):
        call(tokens)


CANVAS = {"pixels": torch.zeros(1, 3, 32, 32), "box": torch.tensor([[0, 0, 32, 16]])}
NUMBERS: dict[str, Callable[[fb.Cache, Any], object]] = {
    "warm_cache nodes": lambda cache, wrong: fb.warm_cache(cache.root, "/dev/null/tier", nodes=wrong),
    "warm_cache node": lambda cache, wrong: fb.warm_cache(cache.root, "/dev/null/tier", node=wrong),
    "warm_cache ranks_per_node": lambda cache, wrong: fb.warm_cache(cache.root, "/dev/null/tier", ranks_per_node=wrong),
    "warm_cache seed": lambda cache, wrong: fb.warm_cache(cache.root, "/dev/null/tier", seed=wrong),
    "estimate_remote tier_bytes": lambda cache, wrong: fb.estimate_remote(cache.root, tier_bytes=wrong),
    "peek rows": lambda cache, wrong: fb.peek(cache, wrong),
    "windowed window": lambda cache, wrong: fb.masks.windowed(fb.masks.causal_spans(6), wrong),
    "Ranks world_size": lambda cache, wrong: Ranks(0, wrong),
    "Ranks rank": lambda cache, wrong: Ranks(wrong, 2),
    "Schedule effective_batch": lambda cache, wrong: Schedule(9, epochs=1, effective_batch=wrong),
    "Schedule epochs": lambda cache, wrong: Schedule(9, epochs=wrong, effective_batch=1),
    "Ingredient repeat": lambda cache, wrong: Mixture.of([Ingredient(cache, repeat=wrong)]),
    "Warmup weight": lambda cache, wrong: Warmup(wrong, 10),
    "Warmup steps": lambda cache, wrong: Warmup(0.1, wrong),
    "TeacherDropout seed": lambda cache, wrong: TeacherDropout(seed=wrong),
    "estimate_teachers rows": lambda cache, wrong: fb.teachers.estimate_teachers({}, wrong),
    "check_alignment recompute": lambda cache, wrong: fb.teachers.check_alignment(cache, recompute=wrong),
    "check_alignment held_out": lambda cache, wrong: fb.teachers.check_alignment(cache, held_out=wrong),
    "function slices": lambda cache, wrong: fb.sources.function(basename, wrong),
    "hub download_retries": lambda cache, wrong: fb.sources.hub("a/b", revision="0" * 40, download_retries=wrong),
    "hub download_timeout": lambda cache, wrong: fb.sources.hub("a/b", revision="0" * 40, download_timeout=wrong),
    "fit_many size": lambda cache, wrong: fb.images.fit_many([[3, 3]], wrong),
    "masks_on_device patch": lambda cache, wrong: masks_on_device(CANVAS, wrong),
    "masks_on_device threshold": lambda cache, wrong: masks_on_device(CANVAS, 16, wrong),
    "Latents size": lambda cache, wrong: fb.TeacherRecipe(teacher=fb.teachers.Latents(vae="v", size=wrong)),
    "Lune guidance": lambda cache, wrong: fb.TeacherRecipe(teacher=fb.teachers.Lune(unet="u", guidance=wrong * 1e10)),
}


@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_number_that_is_negative_or_not_finite_is_an_error(tokens: fb.Cache, argument: str, wrong: float) -> None:
    with pytest.raises((ValueError, fb.errors.ForebayError), match=r"must be|is not a size|Expected `"):
        NUMBERS[argument](tokens, wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "60", timedelta(seconds=60)])
def test_a_timeout_of_ranks_is_seconds(tokens: fb.Cache, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout of Ranks must be a number of seconds above 0 \(got "):
        loader(tokens, ranks=Ranks(0, 1, timeout=wrong))


def test_a_position_behind_the_epoch_is_refused(tokens: fb.Cache) -> None:
    with pytest.raises(StateMismatch, match="position: 21 then, at most 20 now"):
        loader(tokens).load_state_dict(loader(tokens).state_dict() | {"position": 21})


def test_a_dict_that_is_no_state_is_refused(tokens: fb.Cache) -> None:
    for wrong in ({}, {"version": 3, "epoch": 0, "position": 0}):
        with pytest.raises(ValueError, match=r"the state is not what state_dict\(\) returned: .*(stream|version)"):
            loader(tokens).load_state_dict(wrong)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"generations": []}, "length >= 1"),
        ({"generations": "0"}, r"Expected `array`, got `str` - at `.*generations`"),
        ({"chunks": None}, r"chunks`"),
        ({"window": {"rows": "many"}}, r"window"),
        ({"shuffle": "window"}, "shuffle 'window' needs a window"),
        ({"shuffle": "best"}, r"Invalid enum value 'best' - at `.*shuffle`"),
        ({"automatic": 1}, "Expected `bool`"),
    ],
)
def test_a_damaged_state_names_the_field(tokens: fb.Cache, change: dict[str, Any], problem: str) -> None:
    state = loader(tokens).state_dict()
    with pytest.raises(ValueError, match=problem):
        loader(tokens).load_state_dict({**state, "stream": {**state["stream"], **change}})
    of_mixture = loader(mixture(tokens)).state_dict()
    first, second = of_mixture["stream"]["mixture"]
    spans = {"spans": [{**first["spans"][0], **change}]}
    with pytest.raises(ValueError, match=problem):
        loader(mixture(tokens)).load_state_dict(
            {**of_mixture, "stream": {**of_mixture["stream"], "mixture": [spans, second]}}
        )


def test_a_state_without_a_field_is_refused_by_name(tokens: fb.Cache) -> None:
    for source in (tokens, mixture(tokens)):
        state = loader(source).state_dict()
        for name in state["stream"]:
            kept = {other: value for other, value in state["stream"].items() if other != name}
            with pytest.raises((ValueError, StateMismatch), match=r"missing required field|what is read"):
                loader(source).load_state_dict({**state, "stream": kept})
        for wrong in (None, []):
            with pytest.raises(ValueError, match=r"Expected `object`.*at `\$\.stream`"):
                loader(source).load_state_dict({**state, "stream": wrong})
        assert loader(source).state_dict() == state


def test_the_state_of_a_mixture_is_none_of_a_cache(tokens: fb.Cache) -> None:
    one, many = loader(tokens), loader(mixture(tokens))
    with pytest.raises(StateMismatch, match="what is read: a mixture then, one cache now"):
        one.load_state_dict(many.state_dict())
    with pytest.raises(StateMismatch, match="what is read: one cache then, a mixture of 2 now"):
        many.load_state_dict(one.state_dict())


def test_a_state_knows_a_filter_by_the_rows_it_chose(tokens: fb.Cache) -> None:
    def filtered(remainder: int) -> Loader:
        chosen = Where("some", lambda columns: columns["tokens"][:, 0] % 2 == remainder, ["tokens"])
        return loader(tokens, selection=chosen, drop_last=False)

    state = filtered(0).state_dict()
    filtered(0).load_state_dict(state)
    with pytest.raises(StateMismatch, match="selected"):
        filtered(1).load_state_dict(state)


def test_there_is_no_moving_to_a_generation_that_is_not_there(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 20)
    reading = loader(fb.open_cache(root))
    for wrong in (9, -1):
        with pytest.raises(ValueError, match=f"generation is {wrong}; .* at generation 0, and the newest is 0"):
            reading.move_to(wrong)
    grow_cache(tmp_path, 20, 10)
    reading.move_to(1)


def test_objects_tell_what_they_are(tokens: fb.Cache) -> None:
    reading = loader(tokens, selection=Split("train", fraction=0.5))
    next(iter(reading))
    assert f"% of the rows: train of 0.5, seed 0, by auto) of {tokens!r}, global order, seed 0 in batches of 4" in repr(
        reading
    )
    assert f"at row 4 of {reading.stream.size(0)} of epoch 0>" in repr(reading)
    assert repr(mixture(tokens)) == (
        f"<Mixture of 1 × '{tokens.root}', 2 × '{tokens.root}'; 40 rows in an epoch, seed 3>"
    )
    assert repr(Schedule(1000, epochs=2, effective_batch=4)) == "<Schedule at step 0 of 500, warm-up of 12>"
