"""A refresh of a file whose cuts moved is listed whole or not at all, wherever it stops and whatever runs next."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.building.test_refresh import assert_clean, edit, expected, numbers
from tests.building.test_refresh_failed import KILLED, refresh, source, stale
from tests.layer_recipes import LengthLayer, LineRecipe, number_cache, write_lines

import forebay as fb
from forebay.errors import BuildFailed, BuildStopped, SourceChanged
from forebay.format.tensors import VARIABLE
from forebay.recipe import Rows
from forebay.source import Sample

OLD = list(range(20))


class FailingAt(LineRecipe, frozen=True, kw_only=True):
    """The same recipe, which fails or stops at a chunk with one line in it."""

    def make(self, samples: Iterable[Sample]) -> Rows:
        lines = list(samples)
        if any(b"000009" in line.data for line in lines):
            raise ValueError("in no mood")
        return LineRecipe.make(self, lines)


class WaitingAt(LineRecipe, frozen=True, kw_only=True):
    """The same recipe, which does not end with one line as long as a file is there."""

    def make(self, samples: Iterable[Sample]) -> Rows:
        lines = list(samples)
        while any(b"000009" in line.data for line in lines) and os.path.exists(os.environ["HELD"]):
            time.sleep(0.02)
        return LineRecipe.make(self, lines)


class StoppedAt(LineRecipe, frozen=True, kw_only=True):
    def make(self, samples: Iterable[Sample]) -> Rows:
        lines = list(samples)
        if any(b"000009" in line.data for line in lines):
            raise KeyboardInterrupt
        return LineRecipe.make(self, lines)


def moved(folder: Path) -> tuple[Path, Path]:
    """A cache with a line more at the beginning of a file: all its chunks have other samples now."""
    root, raw = number_cache(folder), folder / "raw"
    edit(raw / "a.txt", b"000001\n", b"000001\n000100\n")
    return root, raw


def half_made(folder: Path) -> tuple[Path, Path]:
    """The same after a refresh that could not make one chunk."""
    root, raw = moved(folder)
    with pytest.raises(BuildFailed, match=r"chunk 2: .*in no mood.*run the same command again"):
        refresh(root, FailingAt())
    assert sorted(path.name for path in (root / "layers/numbers").glob("*.r1.*")) == [
        "000000.r1.safetensors",
        "000001.r1.safetensors",
    ]
    return root, raw


def assert_as_before(root: Path) -> None:
    """Nothing of the refresh is served, and every verb that reports says that it is not finished."""
    assert numbers(root) == OLD
    fb.copy(root, root.with_name("copied"))
    assert numbers(root.with_name("copied")) == OLD
    assert stale(root) == {"a.txt"}
    assert not fb.status(root, source=source(root)).complete
    assert fb.verify(root).gaps == {"numbers": 3}


def assert_finished(root: Path, raw: Path) -> None:
    assert sorted(numbers(root)) == sorted(expected(raw))
    assert numbers(root, generation=0) == OLD
    assert_clean(root, raw)


@pytest.mark.parametrize("key", [None, "a secret"])
def test_a_failed_chunk_leaves_the_rows_of_before_until_a_rerun_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key:
        monkeypatch.setenv(VARIABLE, key)
    root, raw = half_made(tmp_path)
    assert numbers(root) == OLD
    if not key:
        assert_as_before(root)
    made = (root / "layers/numbers/000000.r1.safetensors").stat().st_ino
    refresh(root)
    assert (root / "layers/numbers/000000.r1.safetensors").stat().st_ino == made  # kept, not made again
    assert_finished(root, raw)


def test_a_refresh_that_the_user_stops_leaves_the_rows_of_before(tmp_path: Path) -> None:
    root, raw = moved(tmp_path)
    with pytest.raises(BuildStopped):
        refresh(root, StoppedAt())
    assert_as_before(root)
    refresh(root)
    assert_finished(root, raw)


def test_builds_repairs_and_cleaning_in_between_list_nothing_of_it(tmp_path: Path) -> None:
    root, raw = half_made(tmp_path)
    assert fb.clean(root).superseded == ()
    part = fb.build(root, source(root), LineRecipe(), workers=0, start_chunk=0, end_chunk=1)
    assert (part.made, part.present) == (0, 2)
    assert any("of a refresh that is not finished" in note for note in part.notes)
    assert fb.build(root, None, LengthLayer(), workers=0).made == 2  # of the chunks that do not change
    repaired = fb.repair(root, source=source(root), recipe=LineRecipe(), workers=0)
    assert repaired.failed.keys() == {"a.txt"}
    fb.drop(root, "length")
    assert_as_before(root)
    os.remove(root / "layers/numbers/000000.r1.safetensors")
    (root / "layers/numbers/000001.r1.safetensors").write_bytes(b"not a chunk")
    refresh(root)
    assert_finished(root, raw)


def test_chunks_that_a_cache_grows_by_do_not_bring_half_of_a_refresh_with_them(tmp_path: Path) -> None:
    root, raw = half_made(tmp_path)
    write_lines(raw / "c.txt", 30, 4)
    with pytest.raises(BuildFailed, match="in no mood"):
        fb.grow(root, source(root), recipe=FailingAt(), workers=0)
    assert numbers(root) == [*OLD, 30, 31, 32, 33]
    (root / "layers/numbers/000000.safetensors").unlink()
    failed = fb.repair(root, source=source(root), recipe=LineRecipe(), workers=0).failed
    assert "run `forebay refresh" in failed["layers/numbers/000000.safetensors"]
    fb.build(root, source(root), LineRecipe(), workers=0)
    assert sorted(numbers(root)) == sorted(expected(raw))
    assert fb.verify(root, source=source(root), full=True).sound


def test_a_part_that_is_made_but_not_listed_is_not_called_complete(tmp_path: Path) -> None:
    root, raw = moved(tmp_path)
    refresh(root)
    for path in sorted((root / "generations").iterdir())[1:]:
        path.unlink()  # as a kill between the last chunk and the generation leaves it
    (layer,) = fb.status(root, source=source(root)).layers
    assert (layer.missing, layer.unlisted) == ((), (0, 1, 2))
    assert_as_before(root)
    assert fb.gaps(root)[0].unlisted == (0, 1, 2)
    refresh(root)
    assert_finished(root, raw)


def test_an_unfinished_cache_is_refreshed_in_what_it_has(tmp_path: Path) -> None:
    root, raw = tmp_path / "cache", tmp_path / "raw"
    write_lines(raw / "a.txt", 0, 20)
    fb.build(root, source(root), LineRecipe(), workers=0, end_chunk=1)
    edit(raw / "a.txt", b"000001\n", b"000001\n000100\n")
    refresh(root)
    assert numbers(root) == expected(raw)[: len(numbers(root))]
    fb.build(root, source(root), LineRecipe(), workers=0)
    assert numbers(root) == expected(raw)
    assert_clean(root, raw)


def test_a_refresh_killed_before_any_write_serves_all_of_it_or_nothing(tmp_path: Path) -> None:
    root, raw = moved(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, str(root)], capture_output=True, check=True)
    killed = sorted(tmp_path.glob("killed-*"), key=lambda path: int(path.name.removeprefix("killed-")))
    assert 10 < len(killed) < 39
    for each in killed:  # a build of something else lists what it finds
        with suppress(SourceChanged):  # it was killed before it wrote to the plan
            fb.build(each, source(each), LineRecipe(), workers=0, start_chunk=4)
    found = [numbers(each) for each in killed]
    assert all(rows in (OLD, expected(raw)) for rows in found)
    assert found[-1] == expected(raw)
    for each in killed[::3]:
        refresh(each)
        assert_finished(each, raw)


REFRESH = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be started where it is ignored
import forebay as fb
from tests.building.test_refresh_whole import WaitingAt, source
root = Path(sys.argv[1])
fb.refresh(root, source=source(root), recipes={"numbers": WaitingAt()}, workers=2)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_builder_with_workers_that_ends_in_the_middle_leaves_the_rows_of_before(tmp_path: Path, sent: int) -> None:
    root, raw = moved(tmp_path)
    held = tmp_path / "held"
    held.touch()
    running = subprocess.Popen(
        [sys.executable, "-c", REFRESH, str(root)], env={**os.environ, "HELD": str(held)}, stderr=subprocess.PIPE
    )
    try:
        while len(list((root / "layers/numbers").glob("*.r1.*"))) < 2:
            assert running.poll() is None, running.communicate()
            time.sleep(0.02)
        running.send_signal(sent)
        running.communicate()
    finally:
        held.unlink()
    assert running.returncode != 0
    fb.build(root, source(root), LineRecipe(), workers=0, start_chunk=4)
    assert_as_before(root)
    refresh(root, lease_seconds=0.2)
    assert_finished(root, raw)
