"""Generations: immutable, derived from chunks, consistent whoever publishes at the same time."""

import multiprocessing
import os
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from tests.builders import chunk_digests
from tests.recipes import ObedientRecipe, TogetherStore, orders, write_orders

import forebay as fb
from forebay.building.begin import prepare_base
from forebay.building.builder import Build, BuildOptions
from forebay.building.layer_build import base_workplace, build_chunks
from forebay.building.planning import SourceListing
from forebay.cache.catalog import UNPUBLISHED, Snapshot, generation_numbers, load_generation, newest_generation
from forebay.cache.plan import load_plan
from forebay.cache.publish import publish
from forebay.engine import InlineEngine
from forebay.errors import IndexCorrupt
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.store import LocalStore

LAYER = "obedient"


def prepared(root: Path, chunks: int) -> LocalStore:
    """A cache with a plan and no chunks."""
    source = fb.sources.lines(write_orders(root.parent / "source.txt", orders(chunks)))
    store = LocalStore(root)
    prepare_base(Snapshot.take(store), SourceListing(source, store), ObedientRecipe(), LAYER, lambda *progress: None)
    return store


def build(root: Path, chunks: int, **options):
    source = fb.sources.lines(write_orders(root.parent / "source.txt", orders(chunks)))
    os.utime(root.parent / "source.txt", (1, 1))
    return fb.build(root, source, ObedientRecipe(), workers=0, **options)


def bytes_of_generations(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "generations").iterdir())}


def build_one_then_publish_with_all(root: str, chunk: int, barrier, adopts) -> None:
    store = TogetherStore(root, layout.generation(0), barrier)  # each is about to publish the first one
    plan = load_plan(store)
    source = fb.sources.lines(Path(root).parent / "source.txt")
    job = base_workplace(Snapshot(store, None), SourceListing(source, store), ObedientRecipe(), LAYER, plan).job
    encoded = job.encode(chunk)
    assert store.create(layout.chunk(LAYER, chunk), encoded.buffers)
    made = {} if adopts is None else {LAYER: [encoded.record(encoded.sha256())]}
    publish(store, made, {"made by": str(chunk)}, planned=plan, adopts=adopts)


def test_a_damaged_cache_document_is_named_and_not_published(tmp_path):
    store = prepared(tmp_path / "cache", 1)
    document = tmp_path / "cache" / "cache.json"
    document.write_bytes(document.read_bytes().replace(b"format_version", b"formaT_version"))
    with pytest.raises(IndexCorrupt, match=r"cache\.json"):
        publish(store, {}, {})
    assert generation_numbers(store) == []


@pytest.mark.parametrize("versions", [{}, {"another library": "2.0"}], ids=["alike", "another"])
def test_a_chunk_that_a_second_builder_also_holds_for_its_own_is_listed_once(tmp_path, versions):
    """A bucket that loses the name of a write may tell both of them so, if their bytes are equal."""
    build(tmp_path / "cache", 3)
    store, before = LocalStore(tmp_path / "cache"), bytes_of_generations(tmp_path / "cache")
    listed = load_generation(store)
    assert publish(store, {LAYER: listed.table(LAYER).records()}, versions).number == listed.number
    assert bytes_of_generations(tmp_path / "cache") == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("count", [5, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("adopts", [None, {}], ids=["whatever is there", "its own"])
def test_many_who_publish_at_once_end_in_one_sequence_whose_newest_lists_everything(tmp_path, count, adopts):
    store = prepared(tmp_path / "cache", count)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)
    builders = [
        context.Process(target=build_one_then_publish_with_all, args=(str(tmp_path / "cache"), chunk, barrier, adopts))
        for chunk in range(count)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(600)
    assert [builder.exitcode for builder in builders] == [0] * count
    numbers = generation_numbers(store)
    assert numbers == list(range(len(numbers)))
    listed = [set(load_generation(store, number).table(LAYER).chunks.tolist()) for number in numbers]
    assert all(earlier < later for earlier, later in pairwise(listed))
    assert listed[-1] == set(range(count))
    build(tmp_path / "alone", count)
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "alone")
    assert fb.verify(tmp_path / "cache", full=True).sound


def test_generations_appear_while_a_build_runs_and_can_be_opened(tmp_path):
    store = prepared(tmp_path / "cache", 6)
    source = fb.sources.lines(tmp_path / "source.txt")
    listing = SourceListing(source, store)
    place = base_workplace(Snapshot.take(store), listing, ObedientRecipe(), LAYER, load_plan(store))
    rows: list[int] = []

    def look(progress: fb.Progress) -> None:
        rows.append(len(fb.open_cache(tmp_path / "cache")))

    terms = BuildOptions(workers=1, host=socket.gethostname(), versions={}, publish_seconds=0.0, on_progress=look)
    build_chunks(place, place.chunks, InlineEngine(), terms)
    assert rows == [2, 4, 6, 8, 10, 12]


def test_nothing_is_published_during_a_build_before_its_time(tmp_path):
    seen = []
    build(
        tmp_path / "cache",
        6,
        on_progress=lambda progress: seen.append(newest_generation(LocalStore(tmp_path / "cache"))),
    )
    assert seen
    assert set(seen) == {None}


def test_a_generation_never_changes_whatever_comes_after(tmp_path):
    root = tmp_path / "cache"
    before: dict[str, bytes] = {}
    for end in (1, 3, 5):
        build(root, 6, end_chunk=end)
        now = bytes_of_generations(root)
        assert now.items() >= before.items()
        assert len(now) == len(before) + 1
        before = now
    (root / "layers" / LAYER / "000002.safetensors").unlink()
    build(root, 6)
    fb.clean(root)
    assert bytes_of_generations(root).items() >= before.items()


def test_a_pinned_generation_shows_the_same_rows_after_the_build_went_on(tmp_path):
    build(tmp_path / "cache", 6, start_chunk=3, end_chunk=4)
    pinned = fb.open_cache(tmp_path / "cache")
    before = [bytes(pinned[row]["id"]) for row in range(len(pinned))]
    build(tmp_path / "cache", 6)
    assert len(fb.open_cache(tmp_path / "cache")) == 12
    for cache in (pinned, fb.open_cache(tmp_path / "cache", generation=pinned.generation.number)):
        assert [bytes(cache[row]["id"]) for row in range(len(cache))] == before


def test_a_cache_without_chunks_publishes_nothing(tmp_path):
    store = prepared(tmp_path / "cache", 3)
    assert publish(store, {}, {}).number == UNPUBLISHED
    assert generation_numbers(store) == []


def test_chunks_that_no_generation_lists_are_adopted_with_the_record_that_their_maker_had(tmp_path):
    build(tmp_path / "cache", 4)
    first = newest_generation(LocalStore(tmp_path / "cache"))
    for path in (tmp_path / "cache/generations").iterdir():
        path.unlink()
    again = publish(LocalStore(tmp_path / "cache"), {}, {})
    assert first is not None
    assert again.table(LAYER).records() == first.table(LAYER).records()


@pytest.mark.parametrize("content", [b"", b"not a chunk", bytes(8192)])
def test_a_file_that_is_no_chunk_is_not_listed(tmp_path, content):
    build(tmp_path / "cache", 4, end_chunk=1)
    store = LocalStore(tmp_path / "cache")
    store.create(layout.chunk(LAYER, 3), [content])
    skipped: set[str] = set()
    assert publish(store, {}, {}, skipped).table(LAYER).chunks.tolist() == [0, 1]
    assert skipped == {layout.chunk(LAYER, 3)}


def test_the_chunk_of_another_slice_is_not_listed_under_its_name(tmp_path):
    build(tmp_path / "cache", 4, end_chunk=1)
    store = LocalStore(tmp_path / "cache")
    store.create(layout.chunk(LAYER, 3), [store.read(layout.chunk(LAYER, 0))])
    assert publish(store, {}, {}).table(LAYER).chunks.tolist() == [0, 1]


def test_a_generation_under_the_number_of_another_is_refused(tmp_path):
    build(tmp_path / "cache", 4)
    folder = tmp_path / "cache/generations"
    (folder / "000007.safetensors").write_bytes((folder / "000000.safetensors").read_bytes())
    with pytest.raises(IndexCorrupt, match="it is generation 0"):
        fb.open_cache(tmp_path / "cache")


def test_a_generation_says_which_library_versions_made_its_chunks(tmp_path):
    build(tmp_path / "cache", 4)
    newest = newest_generation(LocalStore(tmp_path / "cache"))
    assert newest is not None
    assert {"python", "numpy", "zstd", "lz4"} <= set(newest.versions[0])


def test_a_chunk_whose_report_an_interrupt_cuts_short_is_listed(tmp_path, monkeypatch):
    made = Build._made

    def interrupted(build: Build, chunk: int, record: ChunkRecord | None) -> None:
        if chunk == 2:
            raise KeyboardInterrupt
        made(build, chunk, record)

    monkeypatch.setattr(Build, "_made", interrupted)
    with pytest.raises(fb.errors.BuildStopped):
        build(tmp_path / "cache", 5)
    status = fb.status(tmp_path / "cache")
    assert (status.claims, status.layers[0].listed) == ((), 3)
    assert len(list((tmp_path / "cache" / "layers" / LAYER).glob("0*.safetensors"))) == 3
