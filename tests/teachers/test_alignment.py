"""Alignment: what layers of teachers must be like, checked row by row, and a few rows computed again."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from tests.teachers.own_teachers import SENTENCES, Letters, Ramp, prompt_cache

import forebay as fb
from forebay.columns import Array
from forebay.teachers import BUCKETS, Batch, GeometricSol, Loaded, Output, Teacher, TeacherRecipe, check_alignment

MOOD = {"add": 0.0}  # what `Moody` depends on without saying so


class OddSol(Teacher, frozen=True, kw_only=True, tag="odd-sol"):
    """Statistics below zero, and maps that do not sum to one."""

    timed: ClassVar[bool] = True

    def outputs(self) -> tuple[Output, ...]:
        return (Output("sol_stats", (4,)), Output("sol_spatial", (8, 8)))

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {
            "sol_stats": np.full((len(batch), 4), -0.5),
            "sol_spatial": np.full((len(batch), 8, 8), 0.25),
        }


class Moody(Teacher, frozen=True, kw_only=True, tag="moody"):
    def outputs(self) -> tuple[Output, ...]:
        return (Output("moody", (3,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return self._answer

    def _answer(self, batch: Batch) -> Mapping[str, Array]:
        return {"moody": batch.noise((3,)) + np.float32(MOOD["add"])}


def test_what_was_built_is_aligned(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build_layers(
        root,
        {
            "ramp": TeacherRecipe(teacher=Ramp()),
            "letters": TeacherRecipe(teacher=Letters(), batch_size=2),
            "sol": TeacherRecipe(teacher=GeometricSol()),
        },
    )
    found = check_alignment(fb.open_cache(root), recompute=6)
    assert found.aligned
    layers = {layer.layer: layer for layer in found.layers}
    assert layers["ramp"].buckets == BUCKETS
    assert layers["ramp"].usual_buckets
    assert layers["ramp"].columns == {"ramp": (10, 6)}
    low, high = layers["ramp"].ranges["ramp"]
    assert low == min(map(len, SENTENCES))
    assert high >= max(map(len, SENTENCES)) + 4
    assert [layers[name].recomputed_rows for name in ("ramp", "letters", "sol")] == [6, 6, 0]
    assert [layer.checked_rows for layer in found.layers] == [10, 10, 10]


def test_values_outside_their_range_and_maps_without_their_sum_are_told(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=OddSol()))
    (layer,) = check_alignment(fb.open_cache(root)).layers
    assert layer.problems == (
        "'sol_stats' must be from 0 to 1 (found -0.5 to -0.5)",
        "maps of 'sol_spatial' must sum to 1 (found 1 ± 15)",
    )


def test_rows_that_come_out_otherwise_are_told(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Moody()))
    MOOD["add"] = 0.5
    try:
        (layer,) = check_alignment(fb.open_cache(root)).layers
    finally:
        MOOD["add"] = 0.0
    assert layer.problems[0].startswith("recomputed values of 'moody' differ by up to 0.5")


def test_a_teacher_that_fails_when_it_is_asked_again_is_told(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Moody(), device="cpu"))
    MOOD["add"] = np.inf
    try:
        (layer,) = check_alignment(fb.open_cache(root)).layers
    finally:
        MOOD["add"] = 0.0
    assert "recomputed, sample 'prompts.txt" in layer.problems[0]
    assert "has NaN or infinity in 'moody', as float16" in layer.problems[0]


def test_a_layer_of_other_prompts_is_told(tmp_path: Path) -> None:
    """The same ids, and other words behind them."""
    one = prompt_cache(tmp_path / "one")
    other = prompt_cache(tmp_path / "other", tuple(sentence.replace("red", "tan") for sentence in SENTENCES))
    fb.build(one, None, TeacherRecipe(teacher=Letters()), layer="words")
    shutil.copytree(one / "layers/words", other / "layers/words")
    fb.build(other, None, TeacherRecipe(teacher=Letters()), layer="words")
    (layer,) = check_alignment(fb.open_cache(other), recompute=0).layers
    assert layer.problems == ("a row was made of another prompt than the base layer holds now",)
    assert not check_alignment(fb.open_cache(other)).aligned
