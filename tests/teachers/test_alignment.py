"""Alignment: what layers of teachers must be like, checked row by row, and a few rows computed again."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from tests.cli.running import run
from tests.teachers.own_teachers import SENTENCES, Letters, Overflowing, Ramp, prompt_cache

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


def expected_cache(folder: Path) -> fb.Cache:
    root = prompt_cache(folder)
    teachers = {"ramp": Ramp(), "words": Letters(), "sol": GeometricSol(side=7)}
    fb.build_layers(root, {layer: TeacherRecipe(teacher=teacher) for layer, teacher in teachers.items()})
    return fb.open_cache(root)


MET = [
    "ramp.dim=6", "ramp.t=linspace(0.05,0.95,10)", "ramp.range=-1e6..1e6", "ramp.present=100%", "ramp.dtype=float16",
    "words.dim=8", "words.dtype=float16", "sol.spatial=7x7", "sol.stats=4", "sol_stats.range=0..1", "t=same",
    "ramp.t=.05,.15,.25,.35,.45,.55,.65,.75,.85,.95",
]  # fmt: skip
UNMET = {
    "ramp.dim=1280": "'ramp' is 6",
    "words.dim=5": "'letters' is 8",
    "sol.dim=4": "'sol_spatial' is 7",
    "sol.spatial=8x8": "its shape is 7x7",
    "ramp.t=linspace(0,1,10)": "its buckets are 0.05",
    "ramp.range=-1e-6..1e-6": "its values are from",
    "ramp.dtype=float32": "it is stored as float16",
    "ramp.direction=t0_data": "it is not recorded",
    "lune.dim=1280": "there is no teacher layer or column 'lune'",
    "sol.maps=8x8": "has no column 'sol_maps'",
}


def test_expectations_that_are_met_are_aligned_and_others_name_what_is_off(tmp_path: Path) -> None:
    cache = expected_cache(tmp_path)
    assert check_alignment(cache, recompute=0, expect=MET).aligned
    for text, problem in UNMET.items():
        found = check_alignment(cache, recompute=0, expect=[text])
        assert not found.aligned
        assert found.unmet[0].startswith(f"{text}: ")
        assert problem in found.unmet[0]


def test_the_profile_of_the_document_fails_on_another_cache(tmp_path: Path) -> None:
    """The four asserts of the document, and its ranges."""
    cache = expected_cache(tmp_path)
    unmet = check_alignment(cache, recompute=0, expect=["tinyflux"]).unmet
    assert [line.partition(":")[0] for line in unmet] == [
        "lune.dim=1280", "lune.t=linspace(0.05,0.95,10)", "lune.range=-10..10", "sol.spatial=8x8",
    ]  # fmt: skip


def test_buckets_that_differ_between_layers_and_absent_rows_are_off(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build_layers(
        root,
        {
            "ramp": TeacherRecipe(teacher=Ramp()),
            "sol": TeacherRecipe(teacher=GeometricSol(), buckets=(0.1, 0.2)),
            "letters": TeacherRecipe(teacher=Letters(), prompt_key="nowhere", batch_size=2),
        },
        max_failures=1.0,
    )
    cache = fb.open_cache(root)
    unmet = check_alignment(cache, recompute=0, expect=["t=same", "letters.present=50%"]).unmet
    assert unmet[0] == "t=same: buckets differ between ramp, sol"
    assert unmet[1].startswith("letters.present=50%: 0.00% of the rows")


def test_expectations_come_from_files_and_from_the_command_line(tmp_path: Path) -> None:
    root = expected_cache(tmp_path).root
    (tmp_path / "mine.txt").write_text("# what the student takes\nramp.dim=6   # wide\n\nsol.spatial=7x7\n")
    assert run("verify", root, "--expect", tmp_path / "mine.txt").out
    told = run("verify", root, "--align", "--expect", tmp_path / "mine.txt", "--expect", "ramp.dim=7", code=1)
    assert "ramp.dim=7: 'ramp' is 6" in told.out + told.err
    for wrong in ("lune", "dim=7", "ramp.dim=wide", "ramp.spatial=8by8", "ramp.range=5", "ramp.t=same", "=5"):
        assert "--expect" in run("verify", root, "--expect", wrong, code=2).err


class Curve(Teacher, frozen=True, kw_only=True, tag="curve"):
    """The square of t, or noise: what lies between two buckets is known."""

    timed: ClassVar[bool] = True

    noise_per: Literal["bucket", "sample"] = "sample"
    noise: float = 0.0
    name: str = "curve"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, (64,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        def squares(batch: Batch) -> Mapping[str, Array]:
            assert batch.t is not None
            noise = batch.noise((64,), per=self.noise_per)
            return {self.name: (1 - self.noise) * np.square(batch.t)[:, None] + self.noise * noise}

        return squares


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
