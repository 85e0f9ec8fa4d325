"""What builders ask of the store: as little for a chunk, however many there are of chunks and of builders."""

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from tests.recipes import NOTES, ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.building import builder, layer_build
from forebay.cache.catalog import generation_numbers, load_generation
from forebay.cache.claims import BuilderBeat, Claims, OtherBuilders, read_builder, read_claims
from forebay.cache.plan import Plan, load_plan
from forebay.cache.publish import builder_versions, handed_chunks, publish
from forebay.engine import InlineEngine
from forebay.engine.base import Task
from forebay.errors import BuildStopped, IndexCorrupt
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import HandedChunks, decode_handed
from forebay.format.tensors import VARIABLE
from forebay.recipe import fingerprint, versions_of
from forebay.sources.source_settings import text_format
from forebay.store import LocalStore, MemoryStore
from forebay.store.base import Entry, this_process

LAYER = "obedient"


class AskedStore(MemoryStore):
    """Notes what is asked for: the verb, and the key or the prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []
        self.bytes_read: Counter[str] = Counter()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        value = super().read(key, start, stop)
        self.asked.append(("read", key))
        self.bytes_read[key] += len(value)
        return value

    def view(self, key, *, expect=None):
        value = super().view(key, expect=expect)
        self.asked.append(("read", key))
        self.bytes_read[key] += len(value)
        return value

    def entries(self, prefix: str) -> Iterator[Entry]:
        self.asked.append(("list", prefix))
        return super().entries(prefix)

    def forget(self) -> None:
        self.asked.clear()
        self.bytes_read.clear()

    def count(self, verb: str, below: str) -> int:
        return sum(asked == verb and key.startswith(below) for asked, key in self.asked)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


def source_of(folder: Path, chunks: int) -> fb.Source:
    return fb.sources.lines(write_orders(folder / "source.txt", orders(chunks)))


def other(number: int) -> str:
    return f"0123456789ab-{number}-1"


def beat(store, number: int, counter: int = 1, **progress) -> None:
    text = msgspec.json.encode(BuilderBeat(beat=counter, host=f"node{number}", pid=number, layer=LAYER, **progress))
    store.replace(layout.builder(other(number)), [text])


def test_who_lists_what_it_made_reads_no_plan_and_lists_no_chunk_files(tmp_path):
    store = AskedStore()
    fb.build(store, source_of(tmp_path, 6), ObedientRecipe(), workers=0)
    records, plan = load_generation(store).table(LAYER).records(), load_plan(store)
    store.delete(layout.generation(0))
    store.forget()
    listed = publish(store, {LAYER: records}, {}, None, plan, {})
    assert len(listed.table(LAYER)) == 6
    assert store.count("list", layout.LAYERS) == 0
    assert store.bytes_read[layout.plan_segment(0)] == 0
    assert store.count("read", layout.GENERATIONS) == 0, "nothing is read back"
    assert load_generation(store).same_content(listed)


def test_a_build_that_publishes_often_reads_its_plan_no_more_often(tmp_path, monkeypatch):
    reads = []
    for seconds in (1000.0, 0.0):
        monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", seconds)
        folder = tmp_path / str(seconds)
        folder.mkdir()
        store = AskedStore()
        fb.build(store, source_of(folder, 30), ObedientRecipe(), workers=0)
        size = store.head(layout.plan_segment(0)).size
        reads.append((store.bytes_read[layout.plan_segment(0)] // size, store.count("list", layout.LAYERS)))
    assert len(list(store.entries(layout.GENERATIONS))) > 10
    assert reads[0][0] == reads[1][0]
    assert reads[1][1] <= reads[0][1] + 2, "chunk files are listed only where more than a few were made since"


def test_a_plan_that_is_damaged_while_a_new_cache_is_built_is_noticed_when_the_build_ends(tmp_path):
    store, damaged = MemoryStore(), []

    def damage(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done >= 2 and not damaged:
            content = bytearray(store.read(layout.plan_segment(0)))
            content[len(content) // 2] ^= 255
            damaged.append(store.replace(layout.plan_segment(0), [bytes(content)]))

    with pytest.raises(IndexCorrupt, match="plan/000000"):
        fb.build(store, source_of(tmp_path, 6), ObedientRecipe(), workers=0, on_progress=damage)
    assert damaged


def test_bits_of_a_plan_that_rot_in_a_folder_are_noticed_when_the_build_ends(tmp_path):
    """Nothing but its bytes says so: size, time and file are the same."""
    root, source, damaged = tmp_path / "cache", source_of(tmp_path, 6), []
    fb.build(root, source, ObedientRecipe(), workers=0, end_chunk=1)
    segment = root / layout.plan_segment(0)

    def damage(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done >= 3 and not damaged:
            before, content = segment.stat(), bytearray(segment.read_bytes())
            content[len(content) // 2] ^= 255
            segment.chmod(0o644)
            with segment.open("r+b") as file:
                damaged.append(file.write(content))
            os.utime(segment, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(IndexCorrupt, match="plan/000000"):
        fb.build(root, source, ObedientRecipe(), workers=0, on_progress=damage)
    assert damaged
    assert load_generation(LocalStore(root)).table(LAYER).chunks.tolist() == list(range(6))


@pytest.mark.parametrize("how", ["damaged", "exchanged"])
def test_a_plan_that_is_damaged_after_it_was_listed_is_noticed_when_the_build_ends_and_all_chunks_are_listed(
    tmp_path, how
):
    store, other, whole, damaged = MemoryStore(), MemoryStore(), MemoryStore(), []
    (tmp_path / "other").mkdir()
    fb.build(other, source_of(tmp_path / "other", 3), ObedientRecipe(), workers=0)
    source = source_of(tmp_path, 6)
    fb.build(whole, source, ObedientRecipe(), workers=0)
    fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=1)

    def damage(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done >= 3 and not damaged:
            content = bytearray((other if how == "exchanged" else store).read(layout.plan_segment(0)))
            content[len(content) // 2] ^= 255 if how == "damaged" else 0
            damaged.append(store.replace(layout.plan_segment(0), [bytes(content)]))

    with pytest.raises(IndexCorrupt, match="plan/000000"):
        fb.build(store, source, ObedientRecipe(), workers=0, on_progress=damage)
    assert damaged
    assert len(fb.open_cache(store)) == len(fb.open_cache(whole))


def test_a_segment_of_a_known_plan_that_was_written_anew_is_read(tmp_path):
    first, second = MemoryStore(), MemoryStore()
    fb.build(first, source_of(tmp_path, 3), ObedientRecipe(), workers=0)
    known = load_plan(first)
    write_orders(tmp_path / "source.txt", orders(5))
    fb.build(second, fb.sources.lines(tmp_path / "source.txt"), ObedientRecipe(), workers=0)
    found = load_plan(second, known)
    assert (len(known), len(found), found.digests) == (3, 5, load_plan(second).digests)
    again = load_plan(first, known)
    assert again.segments[0] is known.segments[0]
    assert load_plan(first, Plan((), ())).digests == known.digests


def test_a_builder_that_begins_reads_heartbeats_until_it_finds_one_at_work():
    store = AskedStore()
    for number in range(12):
        beat(store, number)
    store.forget()
    assert OtherBuilders(store, LAYER).is_any_at_work()
    assert store.count("read", layout.BUILDERS) == 1
    assert not OtherBuilders(store, "another").is_any_at_work()


def test_chunks_that_others_hold_are_asked_for_again_only_where_their_claims_changed():
    store, owners = AskedStore(), {}
    for chunk in range(6):
        beat(store, chunk)
        owners[chunk] = json.dumps({"owner": other(chunk), "host": f"node{chunk}", "pid": chunk}).encode()
        store.create(layout.claim(LAYER, chunk, 1), [owners[chunk]])
    claims = Claims(store, LAYER, "here", lease_seconds=1000.0)
    assert not any(claims.take(chunk) for chunk in range(6))
    store.forget()
    assert claims.still_held(range(6)) == set(range(6))
    assert store.asked == [("list", layout.claims_folder(LAYER))], "one request, however many are waited for"
    store.delete(layout.claim(LAYER, 2, 1))
    failed = {"owner": other(4), "host": "node4", "pid": 4, "state": "failed", "reason": "it broke"}
    store.replace(layout.claim(LAYER, 4, 1), [json.dumps(failed).encode()])
    assert claims.still_held(range(6)) == {0, 1, 3, 5}
    assert claims.take(2)
    assert not claims.take(4)
    assert claims.failure(4) == "it broke"


def test_the_claims_of_a_silent_builder_are_not_held_any_more(monkeypatch):
    store = MemoryStore()
    beat(store, 1)
    store.create(layout.claim(LAYER, 0, 1), [json.dumps({"owner": other(1), "host": "node1", "pid": 1}).encode()])
    claims = Claims(store, LAYER, "here", lease_seconds=0.0)
    now = Claims(store, LAYER, "here", lease_seconds=1000.0)
    assert not now.take(0)
    assert now.still_held([0]) == {0}
    now.pulses.lease_seconds = 0.0
    assert now.still_held([0]) == set()
    assert claims.take(0)


def test_of_generations_that_follow_each_other_a_builder_that_waits_reads_the_last(tmp_path):
    store, source, waits = AskedStore(), source_of(tmp_path, 8), []
    fb.build(store, source, ObedientRecipe(), workers=0)
    table = load_generation(store).table(LAYER)
    store.delete(layout.generation(0))
    publish(store, {LAYER: table.records()[:2]}, {}, None, None, {})
    beat(store, 1)

    def another_lists(progress: fb.Progress) -> None:
        if progress.phase != "waiting":
            return
        waits.append(progress)
        if len(waits) == 1:
            store.forget()
        if len(waits) <= 6:
            publish(store, {LAYER: table.records()[2 : 2 + len(waits)]}, {}, None, None, {})
            read = [key for verb, key in store.asked if verb == "read" and key.startswith(layout.GENERATIONS)]
            assert layout.generation(len(waits)) not in read

    fb.build(store, source, ObedientRecipe(), workers=0, on_progress=another_lists)
    assert len(waits) > 6
    by_waiting = Counter(key for verb, key in store.asked if verb == "read" and key.startswith(layout.GENERATIONS))
    # `publish` of the other reads each once, to add to it; this builder the last to wait for it, and to publish.
    assert [by_waiting[layout.generation(number)] for number in range(7)] == [1, 1, 1, 1, 1, 1, 2]


def test_near_the_end_a_builder_among_others_claims_nothing_ahead(tmp_path, notes):
    root, seen = tmp_path / "cache", []
    source = source_of(tmp_path, 6)
    beat(LocalStore(root), 1, workers=8)

    def look(progress: fb.Progress) -> None:
        if progress.phase == "building":
            seen.append({layout.parse_claim(str(key.relative_to(root)))[0] for key in root.glob("claims/*/*")})
            LocalStore(root).delete(layout.builder(other(1)))

    assert fb.build(root, source, ObedientRecipe(), workers=1, on_progress=look).made == 6
    assert seen[0] == {0}, "eight others can make all of the rest"


def test_what_others_make_outside_the_range_of_a_builder_is_not_counted_as_its_own(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    root, go_on = tmp_path / "cache", tmp_path / "go"
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(12, c0=f"await {go_on} 1")))
    shown: list[tuple[int, set[int]]] = []
    beats = itertools.count(1)

    def look(progress: fb.Progress) -> None:
        if progress.phase != "building":
            return
        counter = next(beats)
        beat(LocalStore(root), 1, counter=counter, workers=1, made=0 if counter == 1 else 6)
        found = read_claims(LocalStore(root), LAYER)
        held = {layout.parse_claim(key)[0] for key, claim in found.items() if claim.state == "working"}
        shown.append((progress.done, held))
        if counter == 20:
            LocalStore(root).delete(layout.builder(other(1)))
            go_on.touch()

    beat(LocalStore(root), 1)
    report = fb.build(root, source, ObedientRecipe(), workers=1, lease_seconds=0.3, end_chunk=5, on_progress=look)
    assert report.made == 6
    assert shown[:20] == [(0, {0, 1})] * 20, "chunk 0 is not made yet, and nobody else makes the others"


def test_a_claim_on_a_chunk_that_was_not_begun_is_given_back_when_others_could_make_it(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    root, go_on = tmp_path / "cache", tmp_path / "go"
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(6, c0=f"await {go_on} 1")))
    seen: list[set[int]] = []
    beats = itertools.count(1)
    deadline = time.monotonic() + 30  # of a wait for what does not come where the code is wrong

    def look(progress: fb.Progress) -> None:
        if progress.phase != "building":
            return
        found = read_claims(LocalStore(root), LAYER)
        held = {layout.parse_claim(key)[0] for key, claim in found.items() if claim.state == "working"}
        if held != {0}:
            beat(LocalStore(root), 1, counter=next(beats), workers=8)
        if not seen or held != seen[-1]:
            seen.append(held)
        if held == {0} or time.monotonic() > deadline:
            LocalStore(root).delete(layout.builder(other(1)))
            go_on.touch()

    report = fb.build(root, source, ObedientRecipe(), workers=1, lease_seconds=0.3, on_progress=look)
    assert seen[:2] == [{0, 1}, {0}]
    assert report.made == 6
    assert fb.status(root).claims == ()


def test_status_of_the_index_opens_no_chunk_and_leaves_the_source_alone(tmp_path, monkeypatch):
    store, source = AskedStore(), source_of(tmp_path, 6)
    fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=3)
    beat(store, 1, made=2, seconds=1.0)
    store.forget()
    monkeypatch.setattr(os, "stat", lambda *_, **__: pytest.fail("the source was asked"))
    found = fb.status(store, depth="index")
    assert (found.layers[0].present, found.layers[0].missing, found.builders[0].host) == (4, (4, 5), "node1")
    assert [key for verb, key in store.asked if verb == "read" and layout.parse_chunk(key)] == []
    monkeypatch.undo()
    fb.status(store)
    assert [key for verb, key in store.asked if verb == "read" and layout.parse_chunk(key)] != []


def test_a_claim_is_held_until_a_generation_lists_its_chunk(tmp_path, monkeypatch):
    """With a key, a file that no generation lists counts for nothing; without one, its name is enough."""
    monkeypatch.setenv(VARIABLE, "00" * 32)
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    store, seen = MemoryStore(), []

    def look(progress: fb.Progress) -> None:
        if progress.phase == "building":
            made = {parsed[0] for entry in store.entries(layout.LAYERS) if (parsed := layout.parse_chunk(entry.key))}
            claimed = {layout.parse_claim(entry.key)[0] for entry in store.entries(layout.CLAIMS)}
            numbers = generation_numbers(store)
            listed = set(load_generation(store, numbers[-1]).table(LAYER).chunks.tolist()) if numbers else set()
            seen.append((made - listed, claimed))

    fb.build(store, source_of(tmp_path, 60), ObedientRecipe(), workers=0, on_progress=look)
    assert all(unlisted <= claimed for unlisted, claimed in seen)
    assert max(len(unlisted) for unlisted, _ in seen) >= 3, "some wait until there are enough for a generation"


class TaskNoted(InlineEngine):
    """Keeps the document that workers would get."""

    def start(self, task: Task, slots: int) -> None:
        self.document = task.document().encode()
        super().start(task, slots)


def test_workers_get_the_same_few_bytes_however_many_files_and_chunks_are_planned(tmp_path):
    sizes = []
    for count in (2, 60):
        for number in range(count):
            write_orders(tmp_path / f"raw{count}" / f"{number}.txt", orders(2))
        engine = TaskNoted()
        cache = LocalStore(tmp_path / f"cache{count}")
        report = fb.build(cache, fb.sources.lines(tmp_path / f"raw{count}"), ObedientRecipe(), engine=engine)
        assert report.chunks >= count
        sizes.append(len(engine.document))
    assert abs(sizes[1] - sizes[0]) < 16, "but for the digits of names"


def test_a_build_asks_for_the_times_of_a_file_once_and_again_when_it_is_planned_or_read(tmp_path, monkeypatch):
    for number in range(12):
        write_orders(tmp_path / "raw" / f"{number:02d}.txt", orders(2))
    asked, stat = Counter(), os.stat

    def counted(path, *rest, **options):
        asked[os.path.basename(path)] += os.fspath(path).endswith(".txt") if isinstance(path, str | Path) else 0
        return stat(path, *rest, **options)

    monkeypatch.setattr(os, "stat", counted)
    source, store = fb.sources.lines(tmp_path / "raw"), MemoryStore()
    for chunk, times in ((0, 2), (1, 1)):  # a new build, which plans; one that is resumed
        asked.clear()
        assert fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=chunk).made == 1
        assert [asked[f"{number:02d}.txt"] for number in range(2, 12)] == [times] * 10


@pytest.mark.parametrize("paths", [["raw"], ["raw/*.jsonl"], ["raw/0.jsonl", "raw/1.jsonl.gz"]])
def test_finding_the_format_of_a_source_asks_for_the_times_of_no_file(tmp_path, monkeypatch, paths):
    (tmp_path / "raw").mkdir()
    for name in ("0.jsonl", "1.jsonl.gz", "README"):
        (tmp_path / "raw" / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("forebay.sources.paths.look", lambda *_: pytest.fail("a file was looked at"))
    assert text_format(paths) == "jsonl"


class Interrupting(MemoryStore):
    """A store in which a builder is interrupted when it writes its second chunk."""

    chunks = 0

    def create(self, key, data, **options):
        is_chunk = layout.parse_chunk(key) is not None
        self.chunks += is_chunk
        if is_chunk and self.chunks == 2:
            raise KeyboardInterrupt
        return super().create(key, data, **options)


@pytest.mark.parametrize("others", [0, 1])
def test_a_builder_that_is_stopped_beside_others_keeps_the_names_of_its_claims(tmp_path, others):
    """Else a request to delete one, repeated by the store, could delete the claim of who took the chunk at once."""
    store, source = Interrupting(), source_of(tmp_path, 4)
    for at in range(others):
        beat = msgspec.json.encode(BuilderBeat(beat=1, host="elsewhere", pid=1, layer=LAYER))
        store.replace(layout.builder(f"0123456789ab-1-{at}"), [beat])
    with pytest.raises(BuildStopped):
        fb.build(store, source, ObedientRecipe(), workers=0)
    assert [claim.state for claim in read_claims(store, LAYER).values()] == ["returned"] * others
    for owner in range(others):
        store.delete(layout.builder(f"0123456789ab-1-{owner}"))
    assert fb.build(store, source, ObedientRecipe(), workers=0).generation is not None
    assert read_claims(store, LAYER) == {}


class RepeatsDeletes(MemoryStore):
    """A store that gets every request to delete a claim once more, later, as after an answer that was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[str] = []

    def create(self, key, data, **options):
        created = super().create(key, data, **options)
        if created and layout.parse_claim(key):
            while self.late:
                super().delete(self.late.pop())
        return created

    def delete(self, key, **options):
        super().delete(key, **options)
        if layout.parse_claim(key):
            self.late.append(key)


def test_requests_to_delete_a_claim_that_come_twice_make_no_chunk_twice(tmp_path, notes):
    store, source = RepeatsDeletes(), source_of(tmp_path, 12)
    with ThreadPoolExecutor(3) as pool:
        recipe = ObedientRecipe(seconds=0.01)
        list(pool.map(lambda _: fb.build(store, source, recipe, workers=0), range(3)))
    made = Counter(line.split()[1] for line in (notes / "makes").read_text().splitlines())
    assert set(made.values()) == {1}
    assert len(made) == 12


LISTER = "0-1-1"  # comes before every other builder by name


def lister_beat(store, counter: int = 1, **other_fields) -> None:
    versions = builder_versions(versions_of(ObedientRecipe()))
    fields = {"layer": LAYER, "versions": versions, "lists": True, **other_fields}
    text = msgspec.json.encode(BuilderBeat(beat=counter, host="first", pid=1, **fields))
    store.replace(layout.builder(LISTER), [text])


def handed_keys(store) -> list[str]:
    return [entry.key for entry in store.entries(layout.BUILDERS) if layout.parse_handed(entry.key)]


def about(store) -> HandedChunks:
    recipe = fingerprint(ObedientRecipe())
    return HandedChunks(LAYER, recipe, load_plan(store).digests, builder_versions(versions_of(ObedientRecipe())))


@pytest.mark.parametrize("key", [None, "00" * 32])
def test_a_builder_leaves_its_chunks_to_the_first_one_to_list_and_waits_for_it(tmp_path, monkeypatch, key):
    if key is not None:
        monkeypatch.setenv(VARIABLE, key)
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    store, shown, listed = MemoryStore(), [], []

    def lists(progress: fb.Progress) -> None:
        if progress.phase == "building":
            shown.append((generation_numbers(store), len(handed_keys(store))))
        if progress.phase == "waiting" and (keys := handed_keys(store)):
            secret = None if key is None else key.encode()
            found = [decode_handed(store.view(one), "", one, secret) for one in keys]
            assert {one.plan for one, _ in found} == {load_plan(store).digests}
            made = {LAYER: [record for _, records in found for record in records]}
            publish(store, made, about(store).versions, None, load_plan(store), {})
            listed.append(len(made[LAYER]))
            for one in keys:
                store.delete(one)

    lister_beat(store)
    report = fb.build(store, source_of(tmp_path, 40), ObedientRecipe(), workers=0, on_progress=lists)
    assert (report.made, report.failed) == (40, {})
    assert shown[-1][0] == [], "it listed nothing itself while it worked"
    assert shown[-1][1] >= 3
    assert sum(listed) == 40, "the other lists all"
    assert len(generation_numbers(store)) == len(listed)
    assert len(load_generation(store).table(LAYER)) == 40
    assert handed_keys(store) == []
    assert list(store.entries(layout.CLAIMS)) == []


@pytest.mark.parametrize("ends", ["it ends", "it does nothing"])
def test_chunks_that_were_left_to_a_builder_that_does_not_list_them_are_listed_by_who_made_them(
    tmp_path, monkeypatch, ends
):
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    store, handed = AskedStore(), []

    def look(progress: fb.Progress) -> None:
        handed.append(len(handed_keys(store)))
        if progress.phase == "waiting" and ends == "it ends":
            store.delete(layout.builder(LISTER))

    lister_beat(store)
    report = fb.build(store, source_of(tmp_path, 20), ObedientRecipe(), workers=0, on_progress=look, lease_seconds=0.5)
    assert max(handed) >= 2
    assert (report.made, len(load_generation(store).table(LAYER))) == (20, 20)
    assert handed_keys(store) == []
    assert store.count("read", layout.layer_folder(LAYER) + "0") == 0, "no chunk is read to be adopted"


@pytest.mark.parametrize(
    "beat_fields",
    [{"lists": False}, {"layer": "other"}, {"versions": {"numpy": "0.1"}}],
    ids=["earlier", "layer", "versions"],
)
def test_chunks_are_not_left_to_a_builder_that_could_not_list_them(tmp_path, monkeypatch, beat_fields):
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    store, seen = MemoryStore(), []

    def look(progress: fb.Progress) -> None:
        seen.append(len(handed_keys(store)))
        if progress.phase == "waiting" or progress.done == 20:
            store.delete(layout.builder(LISTER))

    lister_beat(store, **beat_fields)
    fb.build(store, source_of(tmp_path, 20), ObedientRecipe(), workers=0, on_progress=look, lease_seconds=0.5)
    assert set(seen) == {0}
    assert len(load_generation(store).table(LAYER)) == 20


def left_by_another(store, source, chunks: int) -> list[ChunkRecord]:
    """A cache whose first chunks another builder has made and left to be listed; it is still at work."""
    whole = MemoryStore()
    fb.build(whole, source, ObedientRecipe(), workers=0)
    for entry in whole.entries(""):
        is_late = layout.parse_generation(entry.key) is not None or (layout.parse_chunk(entry.key) or (0,))[0] >= chunks
        if not is_late or entry.key.startswith(layout.PLAN):
            store.create(entry.key, [whole.read(entry.key)])
    beat(store, 1)
    return load_generation(whole).table(LAYER).records()[:chunks]


def test_the_first_builder_lists_what_another_left_without_reading_its_chunks(tmp_path, monkeypatch):
    store, source = AskedStore(), source_of(tmp_path, 8)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    records = left_by_another(store, source, 3)
    store.create(layout.handed(other(1), 1), about(store).encode(records, None))
    store.create(layout.handed(other(1), 2), [b"no list"])
    store.forget()
    report = fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.5)
    assert (report.made, report.present) == (5, 3)
    assert load_generation(store).table(LAYER).records()[:3] == records
    assert handed_keys(store) == [layout.handed(other(1), 2)]
    first = [layout.chunk(LAYER, chunk) for chunk in range(3)]
    assert not [key for verb, key in store.asked if verb == "read" and key in first]


WITH_NOTHING_TO_LIST = {"done": 8, "total": 8, "made": 2}


@pytest.mark.parametrize("busy", [{}, WITH_NOTHING_TO_LIST | {"done": 7}, WITH_NOTHING_TO_LIST | {"unlisted": 1}])
def test_what_a_dead_builder_left_is_listed_as_soon_as_no_other_could_list_it(tmp_path, monkeypatch, busy):
    """Builders that had all ended their work would wait for one another, for a lease."""
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(builder, "WAIT_SECONDS", 0.05)
    store, source, waits = MemoryStore(), source_of(tmp_path, 8), []
    left_by_another(store, source, 3)
    beat(store, 1, **busy)

    def end_the_other(progress: fb.Progress) -> None:
        waits.append(progress.phase == "waiting")
        assert sum(waits) < 60, "it waits for a builder that has nothing to list"
        if sum(waits) == 10:
            beat(store, 1, 2, **WITH_NOTHING_TO_LIST)

    report = fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=600, on_progress=end_the_other)
    assert (report.made, report.present) == (5, 3)
    assert sum(waits) >= 10, "it has not waited for a builder that could list what is left"
    assert len(load_generation(store).table(LAYER)) == 8


def test_a_builder_that_waits_for_others_says_at_once_that_it_has_nothing_to_list(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    store, source, seen, waits = MemoryStore(), source_of(tmp_path, 8), [], itertools.count()
    left_by_another(store, source, 3)

    def look(progress: fb.Progress) -> None:
        own = read_builder(store, str(this_process()))
        if progress.phase == "waiting" and own is not None and own.done == own.total == 8:
            seen.append(own.unlisted)
            store.delete(layout.builder(other(1)))
        assert progress.phase != "waiting" or next(waits) < 8, "it has said nothing"

    fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=600, on_progress=look)
    assert seen[0] == 0


@pytest.mark.parametrize("forged", ["no tag", "another plan"])
def test_chunks_that_somebody_else_claims_to_have_left_are_not_listed(tmp_path, monkeypatch, forged):
    monkeypatch.setenv(VARIABLE, "00" * 32)
    store, source = MemoryStore(), source_of(tmp_path, 8)
    records = left_by_another(store, source, 3)
    own = about(store)
    told = own if forged == "no tag" else msgspec.structs.replace(own, plan=("00" * 32,))
    store.create(layout.handed(other(1), 1), told.encode(records, None if forged == "no tag" else b"\0" * 32))
    assert handed_chunks(store, own, {}, lambda owner: True) == {}


def test_clean_removes_what_a_dead_builder_left_to_be_listed(tmp_path):
    root = tmp_path / "cache"
    fb.build(root, source_of(tmp_path, 4), ObedientRecipe(), workers=0)
    store, mine = LocalStore(root), this_process()
    dead = str(mine).replace(f"-{mine.pid}-", "-999999999-")
    for owner in (dead, str(mine)):
        store.create(layout.handed(owner, 1), about(store).encode(load_generation(store).table(LAYER).records(), None))
    fb.clean(root)
    assert handed_keys(store) == [layout.handed(str(mine), 1)]
