"""A refresh that fails or is killed: nothing empty is published, old rows stay stale, and the next refresh works."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.building.test_refresh import assert_clean, edit, expected, numbers
from tests.layer_recipes import LineRecipe, number_cache, write_lines

import forebay as fb
from forebay.building.refresh_cache import amend_plan
from forebay.cache.catalog import Snapshot
from forebay.errors import BuildFailed, ChunkFailed, NothingMade, SourceEmpty
from forebay.format import layout
from forebay.format.tensors import VARIABLE
from forebay.recipe import Rows
from forebay.source import Sample

AMENDMENT = "plan/000001.safetensors"


class FailingRecipe(LineRecipe, frozen=True, kw_only=True):
    """The same recipe, on a machine where no chunk can be made."""

    def make(self, samples: Iterable[Sample]) -> Rows:
        raise ValueError("in no mood")


class DroppingRecipe(LineRecipe, frozen=True, kw_only=True):
    """The same recipe, which finds nothing in any sample."""

    def make(self, samples: Iterable[Sample]) -> Rows:
        list(samples)
        return LineRecipe.make(self, ())


def refresh(root: Path, recipe: LineRecipe | None = None, **options):
    return fb.refresh(root, source=source(root), recipes={"numbers": recipe or LineRecipe()}, workers=0, **options)


def source(root: Path) -> fb.Source:
    return fb.sources.lines(root.parent / "raw")


def files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and path.parts[-3] != "claims")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def stale(root: Path) -> set[str]:
    """What every verb that reports says is stale; they agree."""
    status = fb.status(root, source=source(root))
    report, full = (fb.verify(root, source=source(root), full=each) for each in (False, True))
    assert report.stale.keys() == full.stale.keys() == status.stale.keys()
    assert report.sound is full.sound is not bool(report.stale)
    return set(report.stale)


@pytest.mark.parametrize("key", [None, "a secret"])
def test_a_source_truncated_to_nothing_is_refused_by_name_and_leaves_the_cache_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key:
        monkeypatch.setenv(VARIABLE, key)
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    before, contents = files(root), {path: path.read_bytes() for path in raw.iterdir()}
    for path in contents:
        path.write_bytes(b"")
    with pytest.raises(
        SourceEmpty, match=r"no sample is left: 'a.txt' has 0 bytes, .*put the old content back"
    ) as error:
        refresh(root)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert files(root) == before
    assert stale(root) == {"a.txt", "b.txt"}
    for path, content in contents.items():
        path.write_bytes(content)
    assert_clean(root, raw)


def test_files_that_are_all_gone_are_not_dropped_to_an_empty_cache(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    before = files(root)
    for path in raw.iterdir():
        path.unlink()
    kept = fb.sources.lines(raw / "*.txt")
    with pytest.raises(SourceEmpty, match=r"no sample is left: 'a.txt' is gone"):
        fb.refresh(root, source=kept, recipes={"numbers": LineRecipe()}, workers=0, drop_missing=True)
    assert files(root) == before


@pytest.mark.parametrize(
    ("content", "recipe", "error"),
    [
        (b"000001\n" * 9, DroppingRecipe(), SourceEmpty),
        (b"none\n" * 3, LineRecipe(), NothingMade),
        (b"none\n" * 60, LineRecipe(), ChunkFailed),
    ],
)
def test_a_source_of_which_no_row_is_made_publishes_nothing_and_leaves_nothing(
    tmp_path: Path, content: bytes, recipe: LineRecipe, error: type[Exception]
) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    before, rows = files(root), expected(raw)
    for path in raw.iterdir():
        path.write_bytes(content)
    with pytest.raises(error):
        refresh(root, recipe)
    assert files(root) == before
    assert numbers(root) == rows
    assert stale(root) == {"a.txt", "b.txt"}
    write_lines(raw / "a.txt", 100, 9)
    write_lines(raw / "b.txt", 200, 9)
    refresh(root)
    assert numbers(root) == expected(raw)
    assert_clean(root, raw)


@pytest.mark.parametrize("key", [None, "a secret"])
def test_a_refresh_whose_chunks_all_fail_takes_its_amendment_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key:
        monkeypatch.setenv(VARIABLE, key)
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    before, content = files(root), (raw / "a.txt").read_bytes()
    edit(raw / "a.txt", b"000004\n", b"000777\n")
    with pytest.raises(BuildFailed, match="in no mood"):
        refresh(root, FailingRecipe())
    assert {name: value for name, value in files(root).items() if name != layout.SEEN} == before
    assert stale(root) == {"a.txt"}
    now = (raw / "a.txt").read_bytes()
    (raw / "a.txt").write_bytes(content)
    assert stale(root) == set()
    (raw / "a.txt").write_bytes(now)
    assert len(refresh(root).chunks) == 1
    assert numbers(root) == expected(raw)
    assert_clean(root, raw)


def test_an_amendment_of_which_something_was_made_stays_and_is_listed_with_the_rest(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000001\n", b"000111\n")
    edit(raw / "b.txt", b"000019\n", b"no line\n")

    class Choosy(LineRecipe, frozen=True, kw_only=True):
        def make(self, samples: Iterable[Sample]) -> Rows:
            lines = list(samples)
            if any(b"no line" in line.data for line in lines):
                raise ValueError("in no mood")
            return LineRecipe.make(self, lines)

    with pytest.raises(BuildFailed, match="in no mood"):
        refresh(root, Choosy())
    assert (root / AMENDMENT).exists()
    assert numbers(root) == list(range(20))
    assert stale(root) == {"a.txt", "b.txt"}
    edit(raw / "b.txt", b"no line\n", b"000999\n")
    refresh(root)
    assert numbers(root) == expected(raw)
    assert_clean(root, raw)


def test_rows_of_an_amendment_that_nobody_made_are_stale_until_a_refresh(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000004\n", b"000777\n")
    os.utime(raw / "b.txt", ns=(1, 1))  # looks different, and is the same
    amend_plan(Snapshot.take(fb.LocalStore(root)), source(root))  # as far as a refresh that was killed early came
    assert stale(root) == {"a.txt"}
    write_lines(raw / "c.txt", 30, 4)
    assert fb.grow(root, source(root), recipe=LineRecipe(), workers=0).made == 2
    assert sorted(numbers(root)) == sorted(expected(raw))
    assert stale(root) == set()


KILLED = """
import os, signal, shutil, sys
from pathlib import Path
from forebay.store.local import LocalStore
from tests.building.test_refresh_failed import refresh

left = 0

def killing(deed):
    def counted(self, *args, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return deed(self, *args, **options)
    return counted

for name in ("create", "replace", "delete"):
    setattr(LocalStore, name, killing(getattr(LocalStore, name)))
for left in range(1, 40):
    root = Path(sys.argv[1]).with_name(f"killed-{left}")
    shutil.copytree(sys.argv[1], root)
    pid = os.fork()
    if not pid:
        refresh(root)
        os._exit(0)
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        break
"""


@pytest.mark.parametrize("gives_rows", [True, False])
def test_a_refresh_killed_before_any_write_hides_nothing_and_is_finished_by_the_next(
    tmp_path: Path, gives_rows: bool
) -> None:
    raw, root = tmp_path / "raw", tmp_path / "cache"
    write_lines(raw / "a.txt", 0, 5)
    fb.build(root, fb.sources.lines(raw), LineRecipe(), workers=0)
    (raw / "a.txt").write_bytes(b"000777\n" * 5 if gives_rows else b"no line\n" * 5)
    subprocess.run([sys.executable, "-c", KILLED, str(root)], capture_output=True, check=gives_rows)
    killed = sorted(tmp_path.glob("killed-*"), key=lambda path: int(path.name.removeprefix("killed-")))
    assert 5 < len(killed) < 39  # some were, and the last one came to its end
    for each in killed:
        is_new = set(numbers(each)) == {777}
        assert is_new or numbers(each) == [0, 1, 2, 3, 4]
        assert stale(each) == (set() if is_new else {"a.txt"})
    assert is_new is gives_rows
    if not gives_rows:
        write_lines(raw / "a.txt", 100, 9)
    for each in killed:
        refresh(each)
        assert numbers(each) == expected(raw)
        assert fb.verify(each, source=source(each), full=True).sound
        assert fb.status(each, source=source(each)).complete
