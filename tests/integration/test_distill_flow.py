"""The example of distillation: caches in sequence, losses that fall, exact resume, inference without any teacher."""

import argparse
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import forebay as fb

EXAMPLE = Path(__file__).parents[2] / "examples" / "distill_flow.py"
STEPS = 40
STEP = re.compile(r"^step (\d+) (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLE.parent))  # as a script has it, for teacher_predictors
    spec = importlib.util.spec_from_file_location("distill_flow", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLE.parent))


@pytest.fixture(scope="module")
def prepared(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models, images and caches, built once; the first image has no caption. Small models run best on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("flow")
    example.draw_images(folder / "images" / "shapes", 24, offset=len("shapes"))
    (folder / "images" / "shapes" / "0000.json").write_text("{}")
    example.build_caches(folder, 24)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "flow")


def lines(example: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    example.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def losses(said: str, name: str) -> list[float]:
    return [float(dict(zip(*[iter(line.split())] * 2, strict=True))[name]) for _, line in STEP.findall(said)]


@pytest.mark.slow
def test_losses_fall_and_a_resumed_run_is_the_uninterrupted_one(
    example: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lines(example, capsys, folder, "--steps", STEPS)
    for name in ("flow", "lune", "sol"):
        found = losses(whole, name)
        assert len(found) == STEPS
        assert sum(found[-8:]) < 0.6 * sum(found[:8]), name
    (folder / "student-with-teachers.pt").unlink()
    halves = [lines(example, capsys, folder, "--steps", steps, "--save-every", 7) for steps in (STEPS // 2, STEPS)]
    assert "resumed at step 20" in halves[1]
    assert STEP.findall(halves[0]) + STEP.findall(halves[1]) == STEP.findall(whole)
    assert halves[1].splitlines()[-1] == whole.splitlines()[-1]  # and samples the same
    assert whole.count("0 made, 1 there before") == 9  # no layer is made twice


@pytest.mark.slow
def test_without_teachers_the_velocity_is_learnt_alone(
    example: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = lines(example, capsys, folder, "--steps", STEPS, "--without-teachers")
    assert "lune" not in STEP.findall(said)[0][1]
    found = losses(said, "flow")
    assert sum(found[-8:]) < 0.6 * sum(found[:8])


OPTIONS = argparse.Namespace(seed=0, without_teachers=False, batch=8, learning_rate=1e-3)


def test_rows_nobody_asked_the_teacher_about_are_absent_and_dropout_takes_others(
    example: ModuleType, prepared: Path
) -> None:
    run = example.Training(prepared, OPTIONS)
    absent = dropped = 0
    for batch in run.loader:
        lune, stats, spatial = run.taught(batch)
        strangers = batch["dataset_id"] == 1
        assert not lune.present[strangers].any()
        assert lune.values[strangers].isnan().all()
        assert torch.equal(stats.present, spatial.present)
        absent += int(strangers.sum())
        dropped += int((~lune.present[~strangers]).sum())
        run.done += 1
    assert absent == 24
    assert 0 < dropped < 12


def test_a_batch_has_all_that_a_step_needs(
    example: ModuleType, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader's threads read latents, text and features; the step reads nothing, and they are what the cache has."""
    run = example.Training(prepared, OPTIONS)
    batch = next(iter(run.loader))
    assert torch.equal(batch["lune.t"], batch["sol.t"])
    shapes = run.caches[0]
    here = batch["dataset_id"] == 0
    rows = batch["local_index"][here]
    assert torch.equal(batch["latents"][here], torch.from_numpy(shapes.read(rows.numpy(), ["latents"])["latents"]))
    for name in example.TEXT_COLUMNS:
        expected = torch.from_numpy(shapes.read(rows.numpy(), [name])[name])
        assert torch.equal(batch[name][here].nan_to_num(9), expected.nan_to_num(9))
    lune = fb.teachers.features(shapes, "lune").at(rows.numpy(), batch["lune.t"][here].numpy())["lune"]
    assert torch.allclose(batch["lune"][here], torch.from_numpy(lune), equal_nan=True)
    assert not batch["lune.present"][~here].any()

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a step must read no cache")

    monkeypatch.setattr(type(shapes), "read", refuse)
    assert run.step(batch)["loss"] > 0


def test_rows_without_latents_or_caption_do_not_reach_the_loss(example: ModuleType, prepared: Path) -> None:
    run = example.Training(prepared, OPTIONS)
    batch = next(iter(run.loader))
    half = torch.arange(8) < 4
    absent = {**batch, "latents": batch["latents"].clone(), "latents.present": half}
    absent["latents"][~half] = torch.nan
    assert all(torch.tensor(loss).isfinite() for loss in run.step(absent).values())
    assert all(weights.isfinite().all() for weights in run.student.parameters())
    for layer in ("clip", "t5"):
        assert run.step({**batch, f"{layer}.present": torch.zeros(8, dtype=torch.bool)}) == {}


def test_inference_asks_no_teacher(example: ModuleType, prepared: Path) -> None:
    run = example.Training(prepared, OPTIONS)
    run.loader = None
    latents = run.sample(3, steps=4)
    assert latents.shape == (3, 4, 16, 16)
    assert latents.isfinite().all()  # the first row has no caption, and is left out
    assert not run.caches[0].read([0], ["t5.present"])["t5.present"].any()


def test_the_caches_of_the_example_are_sound(prepared: Path) -> None:
    for name in ("shapes", "unseen"):
        assert fb.verify(prepared / "caches" / name, full=True).sound
