"""Lists of chunks that builders leave to each other: what is stale, forged or twice there is never published."""

import errno
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import chunk_count, ending, patient, start_builder, wait_until
from tests.building.test_requests import (
    LAYER,
    AskedStore,
    about,
    beat,
    handed_keys,
    left_by_another,
    lister_beat,
    other,
    source_of,
)
from tests.recipes import NOTES, ObedientRecipe, makes, orders, write_orders
from tests.warm_process import WarmProcess

import forebay as fb
from forebay.building import builder, layer_build
from forebay.cache import publish
from forebay.cache.catalog import generation_numbers, load_generation
from forebay.cache.claims import BuilderBeat, OtherBuilders, read_claims
from forebay.cache.plan import load_plan
from forebay.cache.publish import builder_versions, handed_chunks
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import decode_handed
from forebay.format.tensors import VARIABLE
from forebay.recipe import versions_of
from forebay.store import LocalStore, MemoryStore, base
from forebay.store.base import this_process

KEY = "00" * 32


@pytest.mark.parametrize("is_there", [True, False], ids=["at work", "gone"])
def test_with_a_key_a_chunk_that_is_in_a_list_and_was_made_again_is_listed_once(tmp_path, monkeypatch, is_there):
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    store, source = MemoryStore(), source_of(tmp_path, 8)
    records = left_by_another(store, source, 3)
    store.create(layout.handed(other(1), 1), about(store).encode(records, KEY.encode()))
    if not is_there:
        store.delete(layout.builder(other(1)))
    fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.5)
    assert load_generation(store).table(LAYER).chunks.tolist() == list(range(8))


def test_a_list_that_was_made_with_another_recipe_is_not_taken_although_it_is_signed(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    store, source = MemoryStore(), source_of(tmp_path, 4)
    records = left_by_another(store, source, 3)
    fb.build(plain := MemoryStore(), source, ObedientRecipe(codec="none"), workers=0)
    assert load_plan(plain).digests == load_plan(store).digests, "nothing else tells them apart"
    own = about(store)
    told = msgspec.structs.replace(own, recipe=load_generation(plain).recipe(LAYER).fingerprint)
    for number, one in enumerate((told, own)):
        store.create(layout.handed(other(1), number), one.encode(records, KEY.encode()))
    assert [*handed_chunks(store, own, {}, lambda owner: True)] == [layout.handed(other(1), 1)]


def dead_owner() -> str:
    mine = this_process()
    return str(mine).replace(f"-{mine.pid}-", "-999999999-")


@pytest.mark.parametrize("has_beat", [True, False])
def test_a_list_of_a_dead_builder_is_not_believed_but_removed_and_its_chunks_are_hashed(
    tmp_path, monkeypatch, has_beat
):
    """The chunks were made again since, with other bytes: the list has digests that are those of no file."""
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    store, source = MemoryStore(), source_of(tmp_path, 8)
    records = left_by_another(store, source, 3)
    store.delete(layout.builder(other(1)))
    stale = [msgspec.structs.replace(record, sha256=b"\0" * 32, chunk=record.chunk + 4) for record in records]
    store.create(layout.handed(dead_owner(), 1), about(store).encode(stale, None))
    if has_beat:
        text = msgspec.json.encode(BuilderBeat(beat=1, host="here", pid=999999999, layer=LAYER))
        store.create(layout.builder(dead_owner()), [text])
    fb.build(store, source, ObedientRecipe(), workers=0)
    fb.build(alone := MemoryStore(), source, ObedientRecipe(), workers=0)
    assert load_generation(store).table(LAYER).records() == load_generation(alone).table(LAYER).records()
    assert list(store.entries(layout.BUILDERS)) == []


def forged(name: str, records: list[ChunkRecord]) -> list[ChunkRecord]:
    """What a stranger may write without a key; only `unknown` names a file that is not there."""
    first = records[0]
    change = msgspec.structs.replace
    match name:
        case "statistic":
            return [change(first, statistics={"bytes": [1, 2, 3]})]
        case "nan":
            return [change(first, statistics={"bytes": float("nan")})]
        case "beyond":
            return [change(first, chunk=100 + one.chunk) for one in records]
        case "revision":
            return [change(one, revision=10**8) for one in records]
        case _:
            return [change(first, statistics={"made.by": 2**62})]


@pytest.mark.parametrize("name", ["statistic", "nan", "beyond", "revision", "maker"])
@pytest.mark.parametrize("publish_seconds", [0.0, 60.0])
def test_a_forged_list_stops_no_build_and_no_other_command(tmp_path, monkeypatch, name, publish_seconds):
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", publish_seconds)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    root, source = tmp_path / "cache", source_of(tmp_path, 8)
    store = LocalStore(root)
    records = left_by_another(store, source, 3)
    store.create(layout.handed(other(1), 1), about(store).encode(forged(name, records), None))
    store.create(layout.handed(other(1), 2), [b"\0" * 5000])
    (root / layout.handed(other(1), 3)).mkdir()
    (root / layout.handed(other(1), 4)).symlink_to("/dev/zero")
    fb.build(root, source, ObedientRecipe(), workers=0, lease_seconds=0.5)
    assert load_generation(store).table(LAYER).chunks.tolist() == list(range(8))
    assert fb.status(root).complete
    assert fb.verify(root, full=True).sound
    fb.copy(root, tmp_path / "copy")
    fb.clean(root, lease_seconds=0.2)


def test_the_first_builder_lists_what_others_left_also_while_it_makes_nothing_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.1)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    go_on, root = tmp_path / "go", tmp_path / "cache"
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4, c3=f"await {go_on} 2")))
    go_on.touch()
    store = LocalStore(root)
    records = left_by_another(store, source, 3)
    go_on.unlink()
    store.create(layout.handed(other(1), 1), about(store).encode(records, None))
    patience = patient(8)

    def see(progress: fb.Progress) -> None:
        if generation_numbers(store):
            go_on.touch()
        elif not go_on.exists():
            beat(store, 1, time.monotonic_ns())
            patience(progress)

    fb.build(root, source, ObedientRecipe(), workers=1, on_progress=see, lease_seconds=0.5)
    assert len(load_generation(store, 0).table(LAYER)) == 3
    assert len(load_generation(store).table(LAYER)) == 4


class Builders:
    """Processes that hand over ten times a second."""

    def __init__(self, folder: Path, chunks: int, **by_chunk: str) -> None:
        self.root, self.notes, self.chunks = folder / "cache", folder / "notes", chunks
        self.notes.mkdir()
        self.path = write_orders(folder / "source.txt", orders(chunks, **by_chunk))
        self.running: list[WarmProcess] = []

    def start(self, processes: int = 1, publish_seconds: float = 0.1, lease_seconds: float = 1.5, **build: Any) -> None:
        for _ in range(processes):
            self.running.append(
                start_builder(
                    self.root,
                    self.path,
                    self.notes,
                    {"seconds": 0.05},
                    workers=1,
                    publish_seconds=publish_seconds,
                    lease_seconds=lease_seconds,
                    **build,
                )
            )

    def lists(self) -> list[Path]:
        return list(self.root.glob("builders/*.[0-9]*.safetensors"))

    def wait_for_lists(self) -> bool:
        """Whether there are lists before all is made."""
        wait_until(lambda: self.lists() or chunk_count(self.root) == self.chunks, 120)
        return chunk_count(self.root) < self.chunks

    def signal(self, process: WarmProcess, number: signal.Signals) -> WarmProcess:
        process.send_signal(number)
        self.running.remove(process)
        return process

    def lister(self) -> WarmProcess:
        by_name = sorted(self.root.glob("builders/*.json"))
        return next(one for beat in by_name for one in self.running if f"-{one.pid}-" in beat.name)

    def end(self) -> list[dict[str, Any]]:
        answers = [ending(one, 120) for one in self.running]
        assert all("report" in answer for answer in answers), answers
        return [answer["report"] for answer in answers]

    def check(self) -> Counter[int]:
        """How often each chunk was made; the cache is that of one builder, and nothing else is left."""
        fb.build(alone := MemoryStore(), fb.sources.lines(self.path), ObedientRecipe(seconds=0.05), workers=0)
        made = load_generation(LocalStore(self.root)).table(LAYER).records()
        assert made == load_generation(alone).table(LAYER).records()
        assert list(self.root.glob("builders/*")) == list(self.root.glob("claims/*/*")) == []
        assert fb.verify(self.root, full=True).sound
        assert fb.status(self.root).complete
        return Counter(chunk for _, chunk in makes(self.notes))


def test_builders_whose_lister_is_killed_again_and_again_list_every_chunk_once(tmp_path):
    builders, killed = Builders(tmp_path, 100), 0
    builders.start(4)
    while killed < 3 and builders.wait_for_lists():  # a fast machine may have made all by then
        builders.signal(builders.lister(), signal.SIGKILL).communicate()
        killed += 1
        builders.start()
        wait_until(lambda: not builders.lists() or chunk_count(builders.root) == builders.chunks, 120)
    builders.end()
    made = builders.check()
    assert killed
    assert made.total() - len(made) <= 2 * killed, "what the killed ones were making"


def test_a_lister_that_stops_for_longer_than_a_lease_and_continues_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    builders = Builders(tmp_path, 100)
    builders.start(4)
    assert builders.wait_for_lists()
    stopped = builders.signal(builders.lister(), signal.SIGSTOP)
    try:
        builders.end()
    finally:
        stopped.send_signal(signal.SIGCONT)
    builders.running = [stopped]
    builders.end()
    builders.check()


def test_with_a_key_a_cache_whose_builders_were_all_killed_while_they_handed_over_is_finished(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    builders = Builders(tmp_path, 100)
    builders.start(4)
    assert builders.wait_for_lists()
    killed = [builders.signal(builders.lister(), signal.SIGKILL)]  # first, as it would list them
    killed += [builders.signal(one, signal.SIGKILL) for one in list(builders.running)]
    for one in killed:
        one.communicate()
    assert builders.lists()
    builders.start(publish_seconds=60.0)
    builders.end()
    builders.check()


def test_lists_are_taken_of_builders_at_work_with_a_heartbeat_that_are_not_too_large_and_read_once(
    tmp_path, monkeypatch
):
    store = AskedStore()
    records = left_by_another(store, source_of(tmp_path, 4), 3)
    beat(store, 2)
    for number in (1, 2, 3):  # the third has no heartbeat
        store.create(layout.handed(other(number), 1), about(store).encode(records, None))
    first, second = layout.handed(other(1), 1), layout.handed(other(2), 1)
    found = handed_chunks(store, about(store), {}, lambda owner: True)
    assert found == {first: records, second: records}
    store.forget()
    assert handed_chunks(store, about(store), found, lambda owner: owner != other(2)) == {first: records}
    assert store.count("read", layout.BUILDERS) == 0
    monkeypatch.setattr(publish, "_MOST_HANDED_BYTES", 100)
    assert handed_chunks(store, about(store), {}, lambda owner: True) == {}


def test_a_builder_is_at_work_while_its_counter_moves(tmp_path):
    store = MemoryStore()
    beat(store, 1)
    others = OtherBuilders(store, LAYER, lease_seconds=0.0)
    assert not OtherBuilders(store, LAYER).is_at_work(dead_owner())
    assert not others.is_at_work(other(1)), "a lease has passed since it moved"
    assert OtherBuilders(store, LAYER).is_at_work(other(1))


def test_who_lists_for_others_is_none_that_has_been_silent_for_a_lease():
    store = MemoryStore()
    lister_beat(store)
    versions = builder_versions(versions_of(ObedientRecipe()))
    assert OtherBuilders(store, LAYER).is_there_lister(versions)
    assert not OtherBuilders(store, LAYER, lease_seconds=0.0).is_there_lister(versions)


def test_claims_are_released_once_the_list_they_were_kept_for_is_gone(tmp_path, monkeypatch):
    """With a key, nobody believes a file that is not listed: its claim keeps others from making it again."""
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    store, listed, claimed = MemoryStore(), [], []

    def lists(progress: fb.Progress) -> None:
        if keys := handed_keys(store):
            made = {
                LAYER: [record for one in keys for record in decode_handed(store.view(one), "", one, KEY.encode())[1]]
            }
            publish.publish(store, made, about(store).versions, None, load_plan(store), {})
            listed.extend(record.chunk for record in made[LAYER])
            for one in keys:
                store.delete(one)
        if progress.phase == "building" and len(listed) >= 20:
            claimed.append(len(read_claims(store, LAYER)))

    lister_beat(store)
    fb.build(store, source_of(tmp_path, 40), ObedientRecipe(), workers=0, on_progress=lists)
    assert min(claimed) < 20, "chunks that are listed stay claimed until the end"


def test_who_waits_reads_the_header_of_a_generation_that_lists_too_little(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(builder, "WAIT_SECONDS", 0.05)
    store, source, sizes = AskedStore(), source_of(tmp_path, 40), []
    records = left_by_another(store, source, 30)
    patience = patient(60)

    def look(progress: fb.Progress) -> None:
        patience(progress)
        beat(store, 1, time.monotonic_ns())
        if progress.phase != "waiting":
            return
        if not sizes:
            publish.publish(store, {LAYER: records[:3]}, about(store).versions, None, load_plan(store), {})
            store.forget()
        key = layout.generation(generation_numbers(store)[-1])
        sizes.append(store.bytes_read[key] / len(store.read(key)))
        store.forget()
        if len(sizes) == 20:
            store.delete(layout.builder(other(1)))

    fb.build(store, source, ObedientRecipe(), workers=0, on_progress=look, lease_seconds=600)
    assert any(0 < size < 1 for size in sizes), "the header is read"
    assert max(sizes) < 1, "the whole of it is read"


KILLED_AFTER = {"once it ended": None, "at once": 0.0, "after a grace that is too short": 0.1}


@pytest.mark.parametrize("grace", KILLED_AFTER.values(), ids=KILLED_AFTER.keys())
@pytest.mark.parametrize("who", ["lister", "another"])
def test_a_builder_that_gets_sigterm_while_lists_are_handed_over_loses_what_was_under_way_only(
    tmp_path, monkeypatch, who, grace
):
    """With a key, whatever is not listed is made again: each chunk that was lost would be counted twice."""
    monkeypatch.setenv(VARIABLE, KEY)
    builders = Builders(tmp_path, 100)
    builders.start(
        4, lease_seconds=20.0
    )  # on a busy machine one may be silent for seconds, and what it made is not taken
    assert builders.wait_for_lists()
    lister = builders.lister()
    stopped = lister if who == "lister" else next(one for one in builders.running if one is not lister)
    builders.signal(stopped, signal.SIGTERM)
    if grace is not None:
        time.sleep(grace)
        stopped.kill()
    out, _ = stopped.communicate()
    builders.end()
    made = builders.check()
    if grace is None:
        assert '"BuildStopped"' in out
        assert made.total() - len(made) <= 2, "the chunk that it made, and the one that it had claimed"


def test_builders_that_all_get_sigterm_list_what_they_made_and_are_continued(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    builders = Builders(tmp_path, 100)
    builders.start(4)
    assert builders.wait_for_lists()
    stopped = [builders.signal(one, signal.SIGTERM) for one in list(builders.running)]
    assert all('"BuildStopped"' in one.communicate()[0] for one in stopped)
    listed = len(load_generation(LocalStore(builders.root)).table(LAYER))
    assert chunk_count(builders.root) - listed <= 4, "what was written when its worker was stopped"
    assert builders.lists() == []
    builders.start(2)
    builders.end()
    made = builders.check()
    assert made.total() - len(made) <= 8


def test_a_lister_in_which_too_many_samples_fail_ends_and_the_others_list_all(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    builders = Builders(tmp_path, 100, **{f"c{chunk}": "fail" for chunk in range(0, 100, 2)})
    builders.start(max_failures=6)
    wait_until(lambda: list(builders.root.glob("builders/*.json")))
    builders.start(3)
    (limited, *_) = builders.running
    assert builders.wait_for_lists()
    answer = ending(limited, 120)
    builders.running.remove(limited)
    assert answer["error"] == "TooManyFailures"
    builders.end()
    made = builders.check()
    assert made.total() - len(made) <= 2


def test_lists_of_thousands_of_dead_builders_hide_none_of_those_at_work_and_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    store, source, alive = AskedStore(), source_of(tmp_path, 8), "zz-1-1"
    records = left_by_another(store, source, 3)
    store.delete(layout.builder(other(1)))
    dead = dead_owner().rpartition("-")[0]
    for number in range(12_000):
        store.create(layout.handed(f"{dead}-{number}", 1), [b"a list"])
        if number % 100 == 0:
            text = msgspec.json.encode(BuilderBeat(beat=1, host="here", pid=999999999, layer=LAYER))
            store.create(layout.builder(f"{dead}-{number}"), [text])
    store.create(layout.handed(alive, 1), about(store).encode(records, None))
    store.create(layout.builder(alive), [msgspec.json.encode(BuilderBeat(beat=1, host="x", pid=1, layer=LAYER))])
    store.forget()
    report = fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=30)
    assert (report.made, report.present) == (5, 3)
    first = [layout.chunk(LAYER, chunk) for chunk in range(3)]
    assert not [key for verb, key in store.asked if verb == "read" and key in first], "the list was not taken"
    assert not [key for verb, key in store.asked if verb == "read" and dead in key], "a list of the dead was read"
    assert [entry.key for entry in store.entries(layout.BUILDERS) if dead in entry.key] == []


def test_clocks_that_are_set_by_hours_while_lists_are_handed_over_change_nothing(tmp_path, monkeypatch):
    """Two hosts set their clocks, to both sides, and files get any time: nobody is taken for dead, or waited for."""
    monkeypatch.setenv(VARIABLE, KEY)
    builders, is_set = Builders(tmp_path, 100), tmp_path / "set"
    for hours in (5.0, -7.0):
        builders.start(clock=(hours, str(is_set)))
    builders.start(2)
    assert builders.wait_for_lists()
    is_set.touch()
    for number, path in enumerate([*builders.root.glob("builders/*"), *builders.root.glob("claims/*/*")]):
        with suppress(FileNotFoundError):
            os.utime(path, (at := time.time() + (-1) ** number * 3600 * (3 + number), at))
    builders.end()
    assert builders.check() == Counter(range(100))


class Faulty(AskedStore):
    """A store in which some requests fail: those whose verb and key are named, each as often as is said."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: Counter[tuple[str, str]] = Counter()
        self.failed: list[str] = []

    def _fail(self, verb: str, key: str) -> None:
        for name, text in self.failing:
            if name == verb and text in key and self.failing[name, text] > 0:
                self.failing[name, text] -= 1
                self.failed.append(key)
                raise OSError(errno.EIO, "the disk failed", key)

    def create(self, key, data, **options):
        created = super().create(key, data, **options)
        self._fail("create", key)  # once it has acted
        return created

    def read(self, key, start=0, stop=None):
        self._fail("read", key)
        return super().read(key, start, stop)

    def delete(self, key, **options):
        self._fail("delete", key)
        super().delete(key, **options)

    def entries(self, prefix):
        self._fail("list", prefix)
        return super().entries(prefix)


@pytest.mark.parametrize(
    ("verb", "below", "times"),
    [
        ("create", layout.GENERATIONS, 2),
        ("list", layout.GENERATIONS, 3),
        ("list", layout.BUILDERS, 3),
        ("delete", ".000001.", 3),
        ("delete", ".000001.", 1000),
        ("read", ".json", 3),
    ],
)
def test_a_store_that_fails_while_lists_are_published_stops_no_build_and_loses_nothing(
    tmp_path, monkeypatch, verb, below, times
):
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(base, "PAUSES", (0.0, 0.0, 0.0, 0.0))
    store, source, alive = Faulty(), source_of(tmp_path, 8), "zz-1-1"
    records = left_by_another(store, source, 3)
    store.delete(layout.builder(other(1)))
    store.create(layout.handed(alive, 1), about(store).encode(records, KEY.encode()))
    store.create(layout.builder(alive), [msgspec.json.encode(BuilderBeat(beat=1, host="x", pid=1, layer=LAYER))])
    is_late, seen = verb in ("list", "read"), []
    store.failing[verb, below] = 0 if is_late else times

    def fail_from_now_on(progress: fb.Progress) -> None:
        if progress.phase == "building" and is_late and not seen:
            seen.append(progress)
            store.failing[verb, below] = times

    report = fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.5, on_progress=fail_from_now_on)
    assert store.failed
    assert report.rows == 16
    assert load_generation(store).table(LAYER).records()[:3] == records
    store.failing.clear()
    assert fb.verify(store, full=True).sound
