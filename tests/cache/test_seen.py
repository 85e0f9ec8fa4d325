"""What was hashed once is not hashed again: the record of content seen at a new time, which nothing depends on."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.layer_recipes import LineRecipe, flip, number_cache

import forebay as fb
from forebay.cache.plan import load_plan
from forebay.cache.source_check import Freshness, check_freshness
from forebay.format import layout
from forebay.source import SourceFile
from forebay.sources.jsonl import LineSource
from forebay.store import LocalStore, Store

KEY = "a key of enough bytes"


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often parts of each file are hashed."""
    counts: Counter[str] = Counter()
    digest = LineSource.digest

    def counted(source: LineSource, file: SourceFile, start: int, stop: int) -> int:
        counts[file.path] += 1
        return digest(source, file, start, stop)

    monkeypatch.setattr(LineSource, "digest", counted)
    return counts


@pytest.fixture
def root(tmp_path: Path, hashed: Counter[str]) -> Path:
    """A cache whose source was copied without its times."""
    root = number_cache(tmp_path)
    touch(tmp_path / "raw/b.txt")
    hashed.clear()
    return root


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def fresh(root: Path, store: Store | None = None) -> Freshness:
    store, source = store or LocalStore(root), fb.sources.lines(root.parent / "raw")
    table = fb.open_cache(root).generation.table("numbers")
    return check_freshness(store, source, load_plan(store), "numbers", table)


def test_the_same_content_at_a_new_time_is_hashed_once(root: Path, hashed: Counter[str]) -> None:
    fb.build(root, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)
    assert hashed["b.txt"] > 0
    hashed.clear()
    fb.build(root, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)
    assert not fb.status(root).stale
    assert fb.verify(root).stale == {}
    assert hashed == {}


def test_verify_full_hashes_whatever_was_seen(root: Path, hashed: Counter[str]) -> None:
    fresh(root)
    hashed.clear()
    fb.verify(root, full=True)
    assert set(hashed) == {"a.txt", "b.txt"}


def test_content_that_changes_after_it_was_seen_is_noticed(root: Path) -> None:
    assert not fresh(root).changed
    path = root.parent / "raw/b.txt"
    status = path.stat()
    flip(path, 3, 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert list(fresh(root).changed) == ["b.txt"]


def test_what_was_seen_is_compared_with_what_the_chunk_was_made_from(root: Path) -> None:
    """The record says what a file holds, not that the cache is fresh."""
    flip(root.parent / "raw/b.txt", 3, 1)
    other = root.parent / "other"
    fb.build(other, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)
    touch(root.parent / "raw/b.txt")
    assert not fresh(other).changed
    shutil.copy(other / layout.SEEN, root / layout.SEEN)
    assert list(fresh(root).changed) == ["b.txt"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "random", "huge", "folder", "pipe", "link"])
def test_a_record_that_cannot_be_used_is_ignored(root: Path, hashed: Counter[str], damage: str) -> None:
    fresh(root)
    hashed.clear()
    path, canary = root / layout.SEEN, root.parent / "canary"
    content = path.read_bytes()
    path.unlink()
    canary.write_bytes(content)
    if damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "link":
        path.symlink_to(canary)
    elif damage == "huge":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.write_bytes({"truncated": content[:-1], "empty": b"", "random": os.urandom(64)}[damage])
    assert not fresh(root).changed
    assert canary.read_bytes() == content


def test_with_a_key_nobody_else_can_say_that_content_was_seen(
    root: Path, hashed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_HMAC_KEY", KEY)
    shutil.rmtree(root)
    fb.build(root, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)
    touch(root.parent / "raw/b.txt")
    monkeypatch.setenv("FOREBAY_HMAC_KEY", KEY + "!")
    forged = _seen_with_another_key(root)
    monkeypatch.setenv("FOREBAY_HMAC_KEY", KEY)
    hashed.clear()
    (root / layout.SEEN).write_bytes(forged)
    assert not fresh(root).changed
    assert hashed["b.txt"] > 0
    hashed.clear()
    assert not fresh(root).changed
    assert hashed == {}


def _seen_with_another_key(root: Path) -> bytes:
    """The record that somebody without the key makes of the same files."""
    copy = root.parent / "copy"
    fb.build(copy, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)
    touch(root.parent / "raw/b.txt")
    fresh(copy)
    return (copy / layout.SEEN).read_bytes()


def test_a_cache_that_cannot_be_written_to_is_checked_as_ever(root: Path, hashed: Counter[str]) -> None:
    class ReadOnly(LocalStore):
        def replace(self, *arguments: object, **options: object) -> bool:
            raise PermissionError(30, "Read-only file system")

    assert not fresh(root, ReadOnly(root)).changed
    assert not (root / layout.SEEN).exists()


def test_the_record_is_known_kept_and_not_copied(root: Path, tmp_path: Path) -> None:
    fresh(root)
    content = (root / layout.SEEN).read_bytes()
    assert not fb.verify(root).foreign
    fb.clean(root)
    assert (root / layout.SEEN).read_bytes() == content
    fb.copy(root, tmp_path / "copy")
    assert not (tmp_path / "copy" / layout.SEEN).exists()


def test_what_others_have_seen_stays(root: Path, hashed: Counter[str]) -> None:
    fresh(root)
    touch(root.parent / "raw/a.txt")
    fresh(root)
    hashed.clear()
    fresh(root)
    assert hashed == {}


def test_a_path_that_is_no_text_is_seen_too(root: Path, hashed: Counter[str]) -> None:
    raw = root.parent / "raw"
    (raw / "b.txt").rename(raw / os.fsdecode(b"\xff.txt"))
    fb.build(root.parent / "other", fb.sources.lines(raw), LineRecipe(), workers=0)
    touch(raw / os.fsdecode(b"\xff.txt"))
    assert not fresh(root.parent / "other").changed
    hashed.clear()
    assert not fresh(root.parent / "other").changed
    assert hashed == {}
