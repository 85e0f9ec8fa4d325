"""Alignment: what layers of teachers must be like, checked row by row, and a few rows computed again."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
from tests.cli.running import run
from tests.teachers.own_teachers import SENTENCES, Letters, Overflowing, Ramp, prompt_cache

import forebay as fb
from forebay.columns import Array
from forebay.teachers import BUCKETS, Batch, GeometricSol, Loaded, Output, Teacher, TeacherRecipe, check_alignment

pytestmark = pytest.mark.slow

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
    assert layers["ramp"].dtypes == {"ramp": "float16"}
    assert layers["ramp"].present == 1
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


def expected_cache(folder: Path) -> fb.Cache:
    root = prompt_cache(folder)
    teachers = {"ramp": Ramp(), "words": Letters(), "sol": GeometricSol(side=7)}
    fb.build_layers(root, {layer: TeacherRecipe(teacher=teacher) for layer, teacher in teachers.items()})
    return fb.open_cache(root)


def test_a_cache_that_differs_from_the_document_does_not_meet_its_profile(tmp_path: Path) -> None:
    """The four asserts of the document."""
    cache = expected_cache(tmp_path)
    found = check_alignment(cache, recompute=0, expect="tinyflux")
    assert not found.aligned
    assert found.unmet == (
        "there is no teacher layer 'lune'; there are ramp, sol, words",
        "'sol_spatial' must have the shape (8, 8) at a bucket (found (7, 7))",
    )
    told = run("verify", cache.root, "--expect", "tinyflux", code=1)
    assert "no teacher layer 'lune'" in told.out + told.err
    with pytest.raises(ValueError, match="expect"):
        check_alignment(cache, expect="flux")  # type: ignore[arg-type]


def curves(folder: Path) -> Path:
    root = prompt_cache(folder)
    how = {"buckets": (0.0, 0.5, 1.0), "stored": "float32", "batch_size": 4}
    layers = {
        "curve": TeacherRecipe(teacher=Curve(), **how),
        "shared": TeacherRecipe(teacher=Curve(noise=1.0, name="shared"), **how),
        "drawn": TeacherRecipe(teacher=Curve(noise=1.0, noise_per="bucket", name="drawn"), **how),
        "letters": TeacherRecipe(teacher=Letters(), batch_size=2),
        "sol": TeacherRecipe(teacher=GeometricSol()),
    }
    fb.build_layers(root, layers)
    return root


class Curve(Teacher, frozen=True, kw_only=True, tag="curve"):
    """The square of t, or noise: what lies between two buckets is known."""

    timed: ClassVar[bool] = True

    noise_per: Literal["bucket", "sample"] = "sample"
    noise: float = 0.0
    name: str = "curve"

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, (64,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        def squares(batch: Batch) -> Mapping[str, Array]:
            assert batch.t is not None
            noise = batch.noise((64,), per=self.noise_per)
            return {self.name: (1 - self.noise) * np.square(batch.t)[:, None] + self.noise * noise}

        return squares


def test_the_error_of_interpolation_is_measured_where_nothing_is_stored(tmp_path: Path) -> None:
    """Between 0, ¼ and 1 a square is off by 1/16 halfway; with noise of its own, a middle is off by √1.5."""
    root = curves(tmp_path)
    found = check_alignment(fb.open_cache(root), recompute=0, held_out=6)
    errors = {layer.layer: layer.interpolation for layer in found.layers}
    assert found.aligned
    assert (errors["letters"], errors["sol"]) == ((), ())
    (curve,), (shared,), (drawn,) = (errors[name] for name in ("curve", "shared", "drawn"))
    computed = np.array([0.25, 0.75]) ** 2
    assert curve.rows == 6
    assert np.isclose(curve.error, np.sqrt(2 * (1 / 16) ** 2 / np.square(computed).sum()))
    assert np.isclose(curve.worst, (1 / 16) / computed[0])
    assert curve.worst_t == 0.25
    assert shared.error == 0, "one noise for all buckets"
    assert 1.1 < drawn.error < 1.35
    assert check_alignment(fb.open_cache(root), recompute=0).layers[0].interpolation == ()


def test_the_command_line_reports_the_error_of_interpolation(tmp_path: Path) -> None:
    root = curves(tmp_path)
    out = " ".join(run("verify", root, "--held-out", 6).out.split())
    assert "interpolation error of 'curve' halfway between buckets: 15.6%, at most 100.0% at t = 0.25 (6 rows)" in out


class Doubled(Teacher, frozen=True, kw_only=True, tag="doubled"):
    """Twice what another teacher made of the prompt, its length; it raises for that of another prompt."""

    timed: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("overflowing", "overflowing_row", "data")

    def outputs(self) -> tuple[Output, ...]:
        return (Output("doubled", (1,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        def doubled(batch: Batch) -> Mapping[str, Array]:
            lengths = batch.array("overflowing")
            assert lengths[:, 0].tolist() == [len(row) for row in batch.rows("data")]
            return {"doubled": 2 * lengths}

        return doubled


def test_rows_are_recomputed_with_the_inputs_of_their_own_chunk(tmp_path: Path) -> None:
    """Inputs are stored once for equal prompts, at a row of the chunk; an absent input makes an absent row."""
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Overflowing(word="cat"), batch_size=2))
    fb.build(root, None, TeacherRecipe(teacher=Doubled(), buckets=(0.0, 1.0), batch_size=2, stored="float32"))
    found = check_alignment(fb.open_cache(root), recompute=8, held_out=8)
    doubled = next(layer for layer in found.layers if layer.layer == "doubled")
    assert (doubled.problems, doubled.present, doubled.recomputed_rows) == ((), 0.7, 8)
    assert [(one.error, one.rows) for one in doubled.interpolation] == [(0.0, 6)]


def test_a_layer_without_any_row_is_not_aligned(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Letters(), prompt_key="caption"))
    (layer,) = check_alignment(fb.open_cache(root)).layers
    assert layer.problems == ("none of its 10 rows is present",)
    run("verify", root, "--align", code=1)
