"""Builders of teacher layers killed again and again: the files of the layer are those of an unbroken build."""

import multiprocessing
import random
import signal
from pathlib import Path

import pytest
import torch
from tests.helpers.builders import die_after
from tests.helpers.processes import PythonProcess
from tests.helpers.tiny_models import TinyModels
from tests.teachers.own_teachers import Noisy, prompt_cache
from tests.torch.taught import chunks_of, recipe

import forebay as fb
from forebay.teachers import Clip, Lune, TeacherRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_CALLS = 52_000  # about two chunks of a UNet's layer
MOST_PLAIN_CALLS = 2_000
WORDS = ("red cat", "blue dog", "two dog", "a house", "the hill", "a house on the hill")


def prompts(folder: Path, count: int, models: TinyModels) -> Path:
    """A cache of a few prompts a chunk, with their states."""
    folder.mkdir()
    lines = (f"{WORDS[number % len(WORDS)]} {number}\n" for number in range(count))
    (folder / "prompts.txt").write_text("".join(lines))
    root = folder / "cache"
    fb.build(root, fb.sources.lines(folder / "prompts.txt"), fb.RawRecipe(chunk_rows=2), workers=0)
    fb.build(root, None, recipe(Clip(model=models.clip), batch_size=2))
    return root


def build_until_killed(root: Path, lune: TeacherRecipe, calls: int) -> None:
    torch.set_num_threads(1)
    fb.build(root, None, lune, on_progress=die_after(calls))


KILLED = """
import sys
from tests.helpers.builders import die_after
from tests.teachers.own_teachers import Noisy
import forebay as fb
from forebay.teachers import TeacherRecipe
recipe = TeacherRecipe(teacher=Noisy(), batch_size=2, device="cpu")
fb.build(sys.argv[1], None, recipe, on_progress=die_after(int(sys.argv[2])))
"""


def test_the_chunks_of_three_killed_builders_are_those_of_one(tmp_path: Path) -> None:
    """Without a model. `-m long` has more kills, of a UNet's builders."""
    sentences = tuple(f"prompt {number}" for number in range(36))
    whole, broken = (prompt_cache(tmp_path / name, sentences, chunk_bytes=30) for name in ("whole", "broken"))
    chunks, calls = len(fb.open_cache(whole).chunk_numbers), random.Random(3)
    for _ in range(3):
        builder = PythonProcess("-c", KILLED, str(broken), str(calls.randrange(1, MOST_PLAIN_CALLS)))
        assert (builder.communicate()[1], builder.returncode) == ("", -signal.SIGKILL)
    assert 1 <= len(chunks_of(broken, "noisy")) < chunks
    for root in (whole, broken):
        fb.build(root, None, TeacherRecipe(teacher=Noisy(), batch_size=2))
    assert chunks_of(broken, "noisy") == chunks_of(whole, "noisy")
    assert len(chunks_of(broken, "noisy")) == chunks
    assert fb.verify(broken, full=True).sound


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # pytest-xdist has threads
@pytest.mark.parametrize("seed", [1, 2])
def test_a_teacher_layer_has_the_same_bytes_after_thirty_kills(
    tmp_path: Path, tiny_models: TinyModels, seed: int
) -> None:
    """A builder is a fork of this process, so that torch is imported once; it loads its model anew."""
    kills = 30
    whole, broken = (prompts(tmp_path / name, 12 * kills, tiny_models) for name in ("whole", "broken"))
    chunks = len(fb.open_cache(whole).chunk_numbers)
    lune = recipe(Lune(unet=tiny_models.unet), batch_size=2)
    fork = multiprocessing.get_context("fork")
    calls = random.Random(seed)
    ends = []
    for _ in range(kills):
        builder = fork.Process(target=build_until_killed, args=(broken, lune, calls.randrange(1, MOST_CALLS)))
        builder.start()
        builder.join()
        ends.append(builder.exitcode)
    left = chunks - len(chunks_of(broken, "lune"))
    assert ends == [-signal.SIGKILL] * kills
    assert left > 0
    fb.build(broken, None, lune)
    fb.build(whole, None, lune)
    assert chunks_of(broken, "lune") == chunks_of(whole, "lune")
    assert len(chunks_of(broken, "lune")) == chunks
    assert fb.verify(broken, full=True).sound
    print(f"{kills} kills, {left} of {chunks} chunks left for the last builder")
