"""The tagger as people run it: it learns, goes on after a kill, and tags files in onnxruntime as it does in torch."""

import importlib.util
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from tests.helpers.processes import REPOSITORY, PythonProcess

import forebay as fb
from forebay.images import prepared_row
from forebay.torch import CacheDataset, ImageBatch, Split, padding_leaks

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples" / "train_tagger.py"
STEP = re.compile(r"^step (\d+) epoch (\d+) batch (\w+) loss (\S+)$", re.MULTILINE)
SAVED_EVERY, KILLED_AT = 5, 13
TOLERANCE = 1e-5  # of a score: float32 sums in another order


class Runs(NamedTuple):
    """What was printed by a run that nothing happened to, by one that was killed, and by one that went on from it."""

    folder: Path
    whole: str
    killed: str
    resumed: str


def start_training(folder: Path, *options: str) -> PythonProcess:
    sizes = ["--pictures", "160", "--epochs", "6", "--save-every", str(SAVED_EVERY)]
    return PythonProcess(str(EXAMPLE), str(folder), *sizes, *options)


def printed_until_killed(process: PythonProcess) -> str:
    """Kill it, with no warning, once it has printed a certain step."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {KILLED_AT} "):
            process.send_signal(signal.SIGKILL)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == -signal.SIGKILL, errors
    return "".join(lines)


def printed_to_the_end(process: PythonProcess) -> str:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return out


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than such small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("tagger")
    whole = start_training(folder / "whole", "--export")
    killed = printed_until_killed(start_training(folder / "killed"))
    resumed = printed_to_the_end(start_training(folder / "killed"))
    return Runs(folder / "whole", printed_to_the_end(whole), killed, resumed)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tagger", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cache(runs: Runs) -> fb.Cache:
    return fb.open_cache(runs.folder / "cache")


@pytest.fixture(scope="module")
def tagger(runs: Runs, example: ModuleType, cache: fb.Cache) -> torch.nn.Module:
    """The trained model, from its checkpoint."""
    saved = torch.load(runs.folder / "tagger.pt", weights_only=True)["tagger"]
    tagger = example.Tagger(len(saved["head.bias"]))
    tagger.load_state_dict(saved)
    return tagger.eval().requires_grad_(False)


def steps(printed: str) -> list[tuple[str, ...]]:
    return STEP.findall(printed)


def test_the_loss_falls_on_pictures_seen_and_not_seen(runs: Runs) -> None:
    losses = [float(loss) for *_, loss in steps(runs.whole)]
    assert len(losses) > 3 * KILLED_AT
    assert mean(losses[-5:]) < 0.6 * mean(losses[:5])
    held_out = [float(loss) for loss in re.findall(r"held out: loss (\S+),", runs.whole)]
    assert held_out[-1] < 0.75 * held_out[0]
    colors = [float(share) for share in re.findall(r"and (\S+)% of colors right", runs.whole)]
    assert colors[-1] > 75  # of four; 25 by chance


def test_a_killed_run_goes_on_with_the_batches_and_losses_it_would_have_had(runs: Runs) -> None:
    whole, saved = steps(runs.whole), KILLED_AT // SAVED_EVERY * SAVED_EVERY
    assert steps(runs.killed) == whole[: len(steps(runs.killed))]
    assert f"resumed at step {saved}, " in runs.resumed
    assert steps(runs.resumed) == whole[saved:]


def test_onnxruntime_tags_the_files_held_out_as_torch_tags_their_rows(runs: Runs, cache: fb.Cache) -> None:
    names = {bytes(row["id"]).decode() for row in CacheDataset(cache, selection=Split("validation"), columns=["id"])}
    tagged = dict(re.findall(r"^(\d+\.png) (.*)$", runs.whole, re.MULTILINE))
    assert tagged.keys() == names
    assert "BUT IN TORCH" not in runs.whole
    assert sum(len(tags.split(", ")) == 3 for tags in tagged.values()) > len(names) / 2
    difference = re.search(r"^onnxruntime differs by (\S+) at most", runs.whole, re.MULTILINE)
    assert difference is not None
    assert float(difference[1]) < TOLERANCE


def test_onnxruntime_scores_pictures_of_any_shape_as_torch_does(
    runs: Runs, example: ModuleType, cache: fb.Cache, tagger: torch.nn.Module
) -> None:
    session = onnxruntime.InferenceSession(runs.folder / "tagger.onnx", providers=["CPUExecutionProvider"])
    bird = example.draw_bird(random.Random("not seen before"))[0]
    for size in ((64, 64), (9, 300), (300, 9), (33, 32), (700, 500), (63, 65)):
        picture = bird.resize(size, Image.Resampling.BICUBIC)
        batch = ImageBatch(cache, **example.VALUES)([prepared_row(picture, cache)])
        expected = tagger(batch["pixels"], batch["token_mask"])[0].sigmoid().numpy()
        found = session.run(None, {"image": np.asarray(picture)})[0][0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        assert np.argsort(found)[::-1][:3].tolist() == np.argsort(expected)[::-1][:3].tolist()


def test_the_tagger_does_not_see_padding(example: ModuleType, cache: fb.Cache, tagger: torch.nn.Module) -> None:
    batch = ImageBatch(cache, **example.VALUES)([cache[row] for row in range(4)])
    pixels, box, ignored = batch["pixels"], batch["box"], batch["token_mask"]
    assert not padding_leaks(lambda images: tagger(images, ignored), pixels, box, example.PATCH, tolerance=0.0)
    seen = padding_leaks(lambda images: tagger(images, torch.zeros_like(ignored)), pixels, box, example.PATCH)
    assert seen  # without the mask it would
