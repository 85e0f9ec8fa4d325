"""Freshness: whether the files behind a plan are still what they were."""

import gzip
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.helpers.cache_files import chunk_key, chunk_path, layer_path
from tests.helpers.image_caches import TAGS, sample_id, write_pictures
from tests.helpers.layer_recipes import LineRecipe, flip, number_cache, tree, write_lines

import forebay as fb
from forebay.cache.source_check import SourceCheck
from forebay.cache.state import Index
from forebay.errors import SourceChanged, SourceUnreadable
from forebay.format import layout
from forebay.recipe import Rows
from forebay.source import Listing, Sample, SourceFile, samples_of
from forebay.sources import parquet_sources
from forebay.sources.jsonl import LineSource
from forebay.store.base import Buffer


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def fresh(root: Path, raw: Path):
    store, source = fb.LocalStore(root), fb.sources.lines(raw)
    return SourceCheck.of(Index.take(store), source).freshness()


class PlainSource(LineSource):
    """Lines on a file system that has neither ctimes nor inodes."""

    def look(self, path):
        return msgspec.structs.replace(LineSource.look(self, path), ctime_ns=0, inode=0)

    def listing(self, apart=""):
        return Listing([self.look(file.path) for file in LineSource.listing(self, apart).files], {})


def test_verify_and_status_say_what_they_cannot_tell_without_ctimes(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "raw/a.txt", 0, 12)
    root, source = tmp_path / "cache", PlainSource(str(tmp_path / "raw"), ("a.txt",))
    fb.build(root, source, LineRecipe(), workers=0)
    status = path.stat()
    flip(path, 30, 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for report in (fb.verify(root, source=source), fb.status(root, source=source)):
        assert report.stale == {}, "files that look as they did are not read"
        assert report.source_note.startswith("1 source files were compared by size and time only")
    full = fb.verify(root, source=source, full=True)
    assert (list(full.stale), full.source_note) == (["a.txt"], "")


def test_other_content_of_the_same_size_and_time_is_noticed_by_a_build(tmp_path: Path) -> None:
    root, path = number_cache(tmp_path), tmp_path / "raw/a.txt"
    status = path.stat()
    flip(path, 30, 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    source = fb.sources.lines(tmp_path / "raw")
    assert fb.status(root, source=source).stale.keys() == {"a.txt"}
    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content"):
        fb.build(root, source, LineRecipe(), workers=0)
    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content"):
        fb.update(root, source, recipe=LineRecipe(), workers=0)


def exchange(path: Path) -> None:
    """Other numbers of the same size, with the times put back."""
    status = path.stat()
    path.write_bytes(path.read_bytes().translate(bytes.maketrans(b"0123456789", b"5678901234")))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("made", [1, 3, 5], ids=["first", "middle", "last"])
def test_content_exchanged_during_a_build_with_its_times_put_back_ends_it(tmp_path: Path, made: int) -> None:
    write_lines(tmp_path / "raw/a.txt", 100000, 20)
    source = fb.sources.lines(tmp_path / "raw")
    exchanged: list[int] = []

    def listen(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done == made and not exchanged:
            exchanged.append(progress.done)
            exchange(tmp_path / "raw/a.txt")

    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content than was planned"):
        fb.build(tmp_path / "cache", source, LineRecipe(), workers=0, on_progress=listen)
    assert exchanged
    numbers = fb.open_cache(tmp_path / "cache").read(range(4 * made), columns=["number"])["number"]
    assert numbers.tolist() == list(range(100000, 100000 + 4 * made))  # all old
    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content than was planned"):
        fb.build(tmp_path / "cache", source, LineRecipe(), workers=0)


MOMENTS: dict[str, Callable[[], object]] = {}  # what happens once, while a chunk is made


def at_moments(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples; those of a chunk with what MOMENTS has for before the first is read, after it, and after the last."""
    moments = {} if samples.is_preview else MOMENTS
    moments.pop("before", str)()
    for sample in samples:
        moments.pop("while", str)()
        yield sample
    moments.pop("after", str)()


class WatchedLines(LineRecipe, frozen=True, kw_only=True):
    kind: ClassVar[str] = "watched-lines"

    def make(self, samples: Iterable[Sample]) -> Rows:
        return super().make(at_moments(samples))


class WatchedImages(fb.ImageRecipe, frozen=True, kw_only=True):
    kind: ClassVar[str] = "watched-images"

    def make(self, samples: Iterable[Sample]) -> Rows:
        return super().make(at_moments(samples))


class WatchedBytes(fb.RawRecipe, frozen=True, kw_only=True):
    kind: ClassVar[str] = "watched-bytes"

    def make(self, samples: Iterable[Sample]) -> Rows:
        texts = ((one.id, one.data) for one in at_moments(samples))
        return super().make(Sample(name, data.encode() if isinstance(data, str) else data) for name, data in texts)


def before_the_second_chunk(happens: Callable[[], object]) -> Callable[[fb.Progress], None]:
    """Listen to a build, and do something once, when its first chunk is made."""
    left = [happens]

    def listen(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done == 1 and left:
            left.pop()()

    return listen


@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_a_file_that_is_exchanged_before_while_or_after_it_is_read_leaves_no_chunk(tmp_path: Path, moment: str) -> None:
    path, root = tmp_path / "raw/a.txt", tmp_path / "cache"
    write_lines(path, 100000, 20)
    listen = before_the_second_chunk(lambda: MOMENTS.update({moment: lambda: exchange(path)}))
    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content than was planned"):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), WatchedLines(), workers=0, on_progress=listen)
    assert not MOMENTS
    assert [path.name for path in sorted((layer_path(root, "watched-lines")).glob("0*"))] == ["000000.safetensors"]


@pytest.mark.parametrize("kind", ["lines", "parquet"])
@pytest.mark.parametrize("returns", [True, False], ids=["put back after the chunk is read", "left"])
@pytest.mark.parametrize("is_link", [True, False], ids=["link", "folder"])
def test_a_path_that_leads_to_another_file_while_a_chunk_is_made_leaves_no_chunk(
    tmp_path: Path, kind: str, returns: bool, is_link: bool
) -> None:
    """Nobody touches the planned file, which looks as planned when it is back; nor is the other one kept open."""
    raw, other, root = tmp_path / "raw", tmp_path / "other", tmp_path / "cache"
    for folder, first in ((raw, 100000), (other, 200000)):
        for number in range(6):  # more than are kept open
            path = folder / f"{number}.{kind}"
            write_lines(path, first + 4 * number, 4)
            if kind == "parquet":
                pq.write_table(pa.table({"text": path.read_text().split()}), path)
            os.utime(path, ns=(10**18, 10**18))
    if is_link:
        raw.rename(tmp_path / "planned")
        raw.symlink_to("planned")

    def exchange_folders() -> None:
        raw.rename(tmp_path / "aside")
        other.rename(raw)
        (tmp_path / "aside").rename(other)

    def lead_elsewhere() -> None:
        exchange_folders()
        MOMENTS.update({"after": exchange_folders} if returns else {})

    source, recipe, listen = (
        getattr(fb.sources, kind)(raw),
        WatchedBytes(chunk_rows=4),
        before_the_second_chunk(lead_elsewhere),
    )
    if returns:
        fb.build(root, source, recipe, workers=0, on_progress=listen)
    else:
        with pytest.raises(SourceChanged, match="has other content than was planned"):
            fb.build(root, source, recipe, workers=0, on_progress=listen)
        return
    texts = fb.open_cache(root).read(range(24), columns=["data"])["data"]
    assert [int(bytes(text)) for text in texts] == list(range(100000, 100024))


def test_a_file_that_cannot_be_read_because_it_has_changed_is_named_as_changed(tmp_path: Path) -> None:
    path = tmp_path / "raw/a.txt.gz"
    write_lines(path, 100000, 20)
    path.write_bytes(gzip.compress(path.read_bytes()))
    MOMENTS["before"] = lambda: path.write_bytes(b"not compressed")
    with pytest.raises(SourceChanged, match=r"'a\.txt\.gz' has 14 bytes, \d+ were planned"):
        fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "raw"), WatchedLines(), workers=0)
    assert not MOMENTS


@pytest.mark.parametrize("becomes", ["pipe", "pipe that somebody writes to", "device"])
@pytest.mark.parametrize("kind", ["files", "lines", "lines.gz", "parquet", "images", "sidecar"])
def test_a_pipe_or_device_in_the_place_of_a_file_is_refused_and_neither_waited_for_nor_read(
    tmp_path: Path, kind: str, becomes: str
) -> None:
    folder = tmp_path / "raw"
    if kind in ("images", "sidecar"):
        folder.mkdir()
        source, recipe = fb.sources.images(write_pictures(folder, 1)), WatchedImages(size=32, tags=TAGS)
        path = folder / (sample_id(0) if kind == "images" else "000.json")
    else:
        path = folder / {"lines.gz": "a.txt.gz", "parquet": "a.parquet"}.get(kind, "a.txt")
        write_lines(path, 100000, 20)
        if kind == "lines.gz":
            path.write_bytes(gzip.compress(path.read_bytes()))
        if kind == "parquet":
            pq.write_table(pa.table({"text": path.read_text().split()}), path)
        source, recipe = getattr(fb.sources, kind.removesuffix(".gz"))(folder), WatchedBytes()

    with ExitStack() as writing:

        def exchange_for_it() -> None:
            path.unlink()
            if becomes == "device":
                return path.symlink_to("/dev/zero")
            os.mkfifo(path)
            if becomes != "pipe":
                writing.callback(os.close, os.open(path, os.O_RDWR))
            return None

        MOMENTS["before"] = exchange_for_it
        parquet_sources._opened.cache_clear()  # which planning left open
        with pytest.raises((SourceChanged, fb.errors.BuildFailed), match=r"not a regular file|changed"):
            fb.build(tmp_path / "cache", source, recipe, workers=0)
        assert not MOMENTS


class PlanNoticed(fb.LocalStore):
    """Does something once, right after a segment of the plan is written."""

    def __init__(self, path: Path, then: Callable[[], object]) -> None:
        super().__init__(path)
        self._then = [then]

    def create(self, key: str, data: Sequence[Buffer], **options) -> bool:
        created = super().create(key, data, **options)
        if layout.parse_segment(key) is not None and self._then:
            self._then.pop()()
        return created


@pytest.mark.parametrize("verb", ["build", "update"])
def test_content_that_changes_between_planning_and_work_is_refused_before_anything_is_made(
    tmp_path: Path, verb: str
) -> None:
    if verb == "update":
        number_cache(tmp_path)
    before, path = tree(tmp_path / "cache"), tmp_path / "raw/c.txt"
    write_lines(tmp_path / "raw/bb.txt", 300000, 20)  # work begins with what has not changed
    write_lines(path, 200000, 20)
    content, status = path.read_bytes(), path.stat()

    def shift() -> None:
        """The same size and times, but lines that begin elsewhere."""
        path.write_bytes(b"7" + content[:-1])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    store, source = PlanNoticed(tmp_path / "cache", shift), fb.sources.lines(tmp_path / "raw")
    with pytest.raises(SourceChanged, match=r"'c\.txt' has other content"):
        getattr(fb, verb)(store, source, recipe=LineRecipe(), workers=0)
    assert {key for key in tree(tmp_path / "cache") if layout.parse_chunk(key)} == set(
        filter(layout.parse_chunk, before)
    )


def test_content_exchanged_while_another_builder_works_ends_the_one_that_read_the_old(tmp_path: Path) -> None:
    """Of two builders, one has read the old content; whichever of them is last must not call the mixture a success."""
    write_lines(tmp_path / "raw/a.txt", 100000, 20)
    source = fb.sources.lines(tmp_path / "raw")
    root, other = tmp_path / "cache", list[str]()

    def listen(progress: fb.Progress) -> None:
        if progress.phase != "building" or progress.done != 2 or other:
            return
        exchange(tmp_path / "raw/a.txt")
        try:
            fb.build(root, source, LineRecipe(), workers=0, start_chunk=2)
            other.append("made")
        except SourceChanged:
            other.append("refused")

    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content than was planned"):
        fb.build(root, source, LineRecipe(), workers=0, end_chunk=1, on_progress=listen)
    assert other


def test_the_same_content_with_another_inode_and_ctime_goes_on(tmp_path: Path) -> None:
    root, path = number_cache(tmp_path), tmp_path / "raw/a.txt"
    shutil.copy2(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert list(fresh(root, tmp_path / "raw").now) == ["a.txt"]
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    assert fb.verify(root, source=fb.sources.lines(tmp_path / "raw"), full=True).sound


def test_a_smaller_file_is_changed_and_a_larger_one_grew_if_what_was_planned_holds(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (tmp_path / "raw/a.txt").write_bytes((tmp_path / "raw/a.txt").read_bytes()[:-7])
    (tmp_path / "raw/b.txt").write_bytes((tmp_path / "raw/b.txt").read_bytes() + b"000020\n")
    found = fresh(root, tmp_path / "raw")
    assert found.changed == {"a.txt": "has 63 bytes, 70 were planned"}
    assert found.grown == ("b.txt",)
    flip(tmp_path / "raw/b.txt", 3, 1)
    assert fresh(root, tmp_path / "raw").changed.keys() == {"a.txt", "b.txt"}


def test_hashing_all_files_keeps_only_those_that_look_different(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    touch(tmp_path / "raw/a.txt")
    check = SourceCheck.of(Index.take(fb.LocalStore(root)), fb.sources.lines(tmp_path / "raw"))
    assert list(check.freshness(full=True).now) == ["a.txt"]


class UnreadableLines(LineSource):
    """Lines on a disk with a bad sector."""

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        raise SourceUnreadable(f"'{file.path}' has a bad sector")


@pytest.mark.parametrize("full", [False, True])
def test_a_file_that_cannot_be_read_is_reported_and_ends_no_verify(tmp_path: Path, full: bool) -> None:
    root = number_cache(tmp_path)
    touch(tmp_path / "raw/a.txt")
    source = fb.sources.lines(tmp_path / "raw")
    unreadable = UnreadableLines(source.root, source.patterns)
    assert fb.verify(root, source=unreadable, full=full).stale["a.txt"] == "cannot be read: 'a.txt' has a bad sector"


def test_a_build_whose_source_cannot_be_compared_ends_with_the_read_error_and_reuses_no_less(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    touch(tmp_path / "raw/a.txt")
    write_lines(tmp_path / "raw/c.txt", 20, 30)
    source = fb.sources.lines(tmp_path / "raw")
    unreadable = UnreadableLines(source.root, source.patterns)
    builds: list[Callable[[], object]] = [
        lambda: fb.build(root, unreadable, LineRecipe(), workers=0),
        lambda: fb.update(root, unreadable, recipe=LineRecipe(), workers=0),
        lambda: fb.build(tmp_path / "new", unreadable, LineRecipe(), reuse=root, workers=0),
    ]
    for build in builds:
        with pytest.raises(SourceUnreadable, match="bad sector"):
            build()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("full", [False, True])
def test_a_compressed_file_is_judged_by_its_stored_bytes(tmp_path: Path, full: bool) -> None:
    (tmp_path / "raw").mkdir()
    path = tmp_path / "raw/a.txt.gz"
    path.write_bytes(gzip.compress(b"".join(b"%06d\n" % number for number in range(20)), mtime=0))
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(path), LineRecipe(), workers=0)
    touch(path)
    assert fb.verify(root, full=full).stale == {}
    flip(path, 20)
    touch(path)
    assert fb.verify(root, full=full).stale == {"a.txt.gz": "has other content than was planned"}


@pytest.mark.parametrize("damage", ["gone", "head", "empty"])
def test_a_damaged_chunk_does_not_hide_what_became_of_the_source(tmp_path: Path, damage: str) -> None:
    """Files restored from a backup have other times; a chunk lost with them must still come back."""
    root = number_cache(tmp_path)
    before = tree(root)
    path = chunk_path(root, "numbers", 0)
    if damage == "gone":
        path.unlink()
    elif damage == "head":
        flip(path, 12)
    else:
        path.write_bytes(b"")
    touch(tmp_path / "raw/a.txt")
    assert fb.verify(root).stale == {}
    assert fb.status(root).stale == {}
    assert fb.repair(root, recipe=LineRecipe(), workers=0).restored == (chunk_key(root, "numbers", 0),)
    assert tree(root) == before


def test_a_lost_chunk_is_not_replaced_by_rows_of_a_changed_file(tmp_path: Path) -> None:
    """With its only chunk gone nobody knows what a file was; other rows from a file that looks other are refused."""
    write_lines(tmp_path / "raw/a.txt", 0, 4)
    root, source = tmp_path / "cache", fb.sources.lines(tmp_path / "raw")
    fb.build(root, source, LineRecipe(), workers=0)
    key = chunk_key(root, "numbers", 0)
    (root / key).unlink()
    (tmp_path / "raw/a.txt").write_bytes(b"000009\n" * 4)
    touch(tmp_path / "raw/a.txt")
    report = fb.repair(root, source=source, recipe=LineRecipe(), workers=0)
    assert report.replaced == {}
    assert "would have other content than was published" in report.failed[key]
    assert not list((layer_path(root, "numbers")).glob("0*"))


def test_a_file_that_is_one_sample_and_grew_before_it_was_read_is_refused(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_bytes(b"planned")
    source = fb.sources.files(data)
    part = fb.Part(source.files()[0], 0, 7)
    (data / "a.txt").write_bytes(b"planned, and more")
    with pytest.raises(fb.errors.SourceChanged, match=r"(?s)a\.txt.*one sample"):
        list(samples_of(source, part))
