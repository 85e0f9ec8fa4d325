"""Builders of teacher layers killed again and again: the files of the layer are those of an unbroken build.

A builder is a fork of this process, so that torch is imported once; it loads its model anew. After its first chunk it
kills itself at one of the next function calls, so that where it dies does not depend on the machine.
"""

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.tiny_models import TinyModels
from tests.torch.taught import chunks_of, recipe

import forebay as fb
from forebay.cache.records import Progress
from forebay.teachers import Clip, Lune, TeacherRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_CALLS = 20_000  # about two chunks
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
    first: list[int] = []
    left = calls

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_to_count(progress: Progress) -> None:
        if progress.phase == "building":
            first.append(progress.done)
            if progress.done > first[0]:
                sys.setprofile(count)

    fb.build(root, None, lune, on_progress=begin_to_count)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # pytest-xdist has threads
@pytest.mark.parametrize("kills", [3, 60])
def test_a_teacher_layer_has_the_same_bytes_after_any_number_of_kills(
    tmp_path: Path, tiny_models: TinyModels, kills: int, record_property: Callable[[str, object], None]
) -> None:
    whole, broken = (prompts(tmp_path / name, 12 * kills, tiny_models) for name in ("whole", "broken"))
    chunks = len(fb.open_cache(whole).chunk_numbers)
    lune = recipe(Lune(unet=tiny_models.unet), batch_size=2)
    fork = multiprocessing.get_context("fork")
    calls = random.Random(kills)
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
    record_property("told", f"{kills} kills, {left} of {chunks} chunks left for the last builder")
