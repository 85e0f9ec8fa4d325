"""Arguments of the verbs: wrong values are rejected before anything is written."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.layer_recipes import LengthLayer, layered_cache

import forebay as fb
from forebay.errors import RecipeInvalid
from forebay.format.generation import Generation


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{number}\n" for number in range(30)))
    return path


WRONG: dict[str, list[Any]] = {
    "max_failures": [-1, -0.5, "5", math.nan, 2.0, True],
    "lease_seconds": [0, -1, 1e-9, 1e308, "5", math.nan, math.inf, True],
    "workers": [-1, "2", 1.5, True],
    "memory_limit": [-1, 0, "16GB", 1.5, True],
    "start_chunk": [-1, "1", 1.5, True],
    "end_chunk": [-1, "1"],
    "replace": ["no"],
    "copy": ["no"],
    "mode": ["backward"],
    "engine": ["thread", 3],
    "on_progress": [3],
    "progress": ["yes", 1, []],
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option in WRONG for value in WRONG[option]])
def test_build_rejects_a_wrong_value_before_it_writes(tmp_path: Path, lines: Path, option: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{option} .*must be .*\(got "):
        fb.build(tmp_path / "cache", fb.sources.lines(lines), fb.RawRecipe(), **{"workers": 0, option: value})
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("layer", ["", "a/b", "../up", "-x", "ä", 3])
def test_build_rejects_a_wrong_layer_name_before_it_writes(tmp_path: Path, lines: Path, layer: Any) -> None:
    with pytest.raises(RecipeInvalid, match="is not a valid layer name"):
        fb.build(tmp_path / "cache", fb.sources.lines(lines), fb.RawRecipe(), layer=layer, workers=0)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("limit", [-1, -0.5, "5", math.nan])
def test_update_with_a_wrong_limit_leaves_the_cache_readable(tmp_path: Path, lines: Path, limit: Any) -> None:
    fb.build(tmp_path / "cache", fb.sources.lines(lines), fb.RawRecipe(), workers=0)
    with lines.open("a") as file:
        file.write("more\n")
    with pytest.raises(ValueError, match="max_failures must be a count"):
        fb.update(tmp_path / "cache", fb.sources.lines(lines), workers=0, max_failures=limit)
    assert len(fb.open_cache(tmp_path / "cache")) == 30


def test_a_numpy_integer_is_a_count(tmp_path: Path, lines: Path) -> None:
    recipe = fb.RawRecipe(max_sample_bytes=1)  # of 30 lines, 20 have two characters
    fb.build(tmp_path / "a", fb.sources.lines(lines), recipe, workers=np.int64(0), max_failures=np.int64(20))
    assert fb.open_cache(tmp_path / "a").generation.max_failures == {"raw": 20}
    with pytest.raises(fb.errors.TooManyFailures):
        fb.build(tmp_path / "b", fb.sources.lines(lines), recipe, workers=0, max_failures=np.int64(19))


def test_build_layers_rejects_a_wrong_value_before_it_drops_a_layer(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    with pytest.raises(ValueError, match="max_failures must be"):
        fb.build_layers(root, {"length": LengthLayer(times=3)}, replace=["length"], workers=0, max_failures=-1)
    assert fb.open_cache(root, layers=["length"]).read([4], ["times"])["times"].tolist() == [8]


OTHERS: dict[str, Callable[[Path], object]] = {
    "keep_generations": lambda root: fb.clean(root, keep_generations=0),
    "lease_seconds": lambda root: fb.clean(root, lease_seconds=-1),
    "unpublished": lambda root: fb.clean(root, unpublished="no"),  # type: ignore[arg-type]
    "failures": lambda root: fb.status(root, failures=-1),
    "max_block_bytes": lambda root: fb.verify(root, max_block_bytes="1MB"),  # type: ignore[arg-type]
    "full": lambda root: fb.verify(root, full="no"),  # type: ignore[arg-type]
    "min_generation": lambda root: fb.verify(root, min_generation=-1),
    "cache_id": lambda root: fb.verify(root, cache_id=3),  # type: ignore[arg-type]
    "digest": lambda root: fb.verify(root, digest=5),  # type: ignore[arg-type]
    "sign": lambda root: fb.copy(root, root.parent / "copy", sign="no"),  # type: ignore[arg-type]
    "generation": lambda root: fb.info(root, generation=-1),
    "bandwidth": lambda root: fb.estimate_remote(root, bandwidth=0),
    "latency": lambda root: fb.estimate_remote(root, latency=-1),
    "nodes": lambda root: fb.estimate_remote(root, nodes=True),
    "batch_size": lambda root: fb.estimate_remote(root, batch_size=1.5),  # type: ignore[arg-type]
    "workers": lambda root: fb.repair(root, workers=-1),
}


@pytest.mark.parametrize("option", OTHERS)
def test_other_verbs_reject_a_wrong_value(tmp_path: Path, option: str) -> None:
    root = layered_cache(tmp_path)
    with pytest.raises((ValueError, TypeError), match=rf"^{option} must be .* \(got "):
        OTHERS[option](root)


def test_copy_rejects_a_key_that_is_not_bytes_without_showing_it(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^old_key must be bytes, and at least one$"):
        fb.copy(layered_cache(tmp_path), tmp_path / "copy", old_key="secret")  # type: ignore[arg-type]


def test_repair_and_drop_reject_what_is_no_recipe_and_no_name(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    with pytest.raises(TypeError, match="a recipe is needed"):
        fb.repair(root, recipe="tokens")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not the class RawRecipe"):
        fb.build(tmp_path / "new", tmp_path, fb.RawRecipe, workers=0)  # type: ignore[arg-type]
    with pytest.raises(RecipeInvalid, match="is not a valid layer name"):
        fb.drop(root, ["length"])  # type: ignore[arg-type]


def test_copy_without_reuse_is_an_error(tmp_path: Path, lines: Path) -> None:
    with pytest.raises(fb.errors.ForebayError, match="no cache to copy chunks from"):
        fb.build(tmp_path / "cache", fb.sources.lines(lines), fb.RawRecipe(), copy=True, workers=0)
    assert not (tmp_path / "cache").exists()


def test_a_generation_that_its_reader_rejects_is_not_encoded(tmp_path: Path) -> None:
    generation = fb.open_cache(layered_cache(tmp_path)).generation
    wrong = Generation(**{**vars_of(generation), "max_failures": {generation.base: -1}})
    with pytest.raises(RecipeInvalid, match="is not published, because it is malformed"):
        wrong.encode(None)


def vars_of(generation: Generation) -> dict[str, Any]:
    return {name: getattr(generation, name) for name in Generation.__dataclass_fields__}
