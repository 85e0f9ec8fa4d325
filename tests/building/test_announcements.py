"""One builder lists, reads back what it listed, and announces it; others believe it only if all of it fits."""

import itertools
import threading
import time

import msgspec
import pytest
from tests.building.test_handed_lists import Builders
from tests.building.test_requests import LAYER, AskedStore, about, handed_keys, lister_beat, source_of
from tests.recipes import NOTES, ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.building import builder, layer_build
from forebay.cache import publish as announcing
from forebay.cache.catalog import generation_numbers, load_generation
from forebay.cache.claims import BuilderBeat
from forebay.cache.plan import load_plan
from forebay.cache.publish import publish
from forebay.errors import BuildFailed, IndexCorrupt
from forebay.format import layout
from forebay.format.generation import LayerTotals, ListedLayer, decode_handed, decode_listed
from forebay.format.tensors import VARIABLE, hmac_key
from forebay.store import LocalStore, MemoryStore
from forebay.store.base import this_process

KEY = "00" * 32
LAST = "zz-1-1"  # comes behind every other builder by name


def own() -> str:
    return layout.listed(str(this_process()))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_build, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(builder, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(builder, "ANNOUNCE_TICKS", 2)


def listed_by_another(store, announce):
    """A listener to the progress of a builder: another one lists all of its chunks, and announces it by `announce`."""
    announced = []

    def listen(progress: fb.Progress) -> None:
        if progress.phase != "waiting" or announced or not (keys := handed_keys(store)):
            return
        made = {LAYER: [record for one in keys for record in decode_handed(store.view(one), "", one, hmac_key())[1]]}
        publish(store, made, about(store).versions, None, load_plan(store), {})
        for one in keys:
            store.delete(one)
        announced.append(announce(ListedLayer.of(load_generation(store), about(store))))

    return listen


def test_a_builder_that_has_an_announcement_reads_none_of_the_generation_and_reports_the_same(tmp_path):
    store, source = AskedStore(), source_of(tmp_path, 40)

    def announce(listed: ListedLayer) -> None:
        store.replace(own(), listed.encode(None))
        store.forget()

    lister_beat(store)
    report = fb.build(store, source, ObedientRecipe(), workers=0, on_progress=listed_by_another(store, announce))
    newest = generation_numbers(store)[-1]
    assert store.bytes_read[layout.generation(newest)] == 32, "the digest at its end"
    assert store.count("list", layout.LAYERS) == 0
    assert store.bytes_read[layout.plan_segment(0)] == 0
    alone = fb.build(MemoryStore(), source, ObedientRecipe(), workers=0)
    facts = ("chunks", "made", "rows", "samples", "failures", "statistics", "figures", "failed", "notes")
    assert [getattr(report, name) for name in facts] == [getattr(alone, name) for name in facts]
    assert (report.rows, report.generation) == (80, newest)
    assert own() not in [entry.key for entry in store.entries(layout.BUILDERS)]


FOR_EVER = 10**9  # ticks


def soon(listen, most: int = 12):
    """A listener that fails the test of a builder that waits on: the pauses between its looks double."""
    waits = itertools.count()

    def listen_for_a_while(progress: fb.Progress) -> None:
        assert progress.phase != "waiting" or next(waits) < most, "it still waits"
        listen(progress)

    return listen_for_a_while


WRONG = {
    "another digest": {"digest": "00" * 32},
    "another generation": {"generation": 99},
    "other chunks": {"revisions": "00" * 32},
    "another limit": {"max_failures": 3},
}


@pytest.mark.parametrize("how", [*WRONG, "another plan", "a flipped bit", "no tag", "an older generation", "no rows"])
def test_a_builder_reads_the_generation_itself_if_an_announcement_does_not_fit(tmp_path, monkeypatch, how):
    if how == "no tag":
        monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(builder, "ANNOUNCE_TICKS", FOR_EVER)
    store, said = MemoryStore(), []

    def announce(listed: ListedLayer) -> None:
        rows = 0 if how == "no rows" else 12345
        totals = LayerTotals(chunks=40, rows=rows, samples=1, failures=0, size=1, statistics={}, reasons={})
        changes = WRONG.get(how, {}) | {"totals": totals}
        if how == "another plan":
            changes["made"] = msgspec.structs.replace(listed.made, plan=("00" * 32,))
        data = bytearray(b"".join(map(bytes, msgspec.structs.replace(listed, **changes).encode(None))))
        data[data.index(b"12345") if how == "a flipped bit" else -1] ^= how == "a flipped bit"
        said.append(store.replace(own(), [bytes(data)]))
        if how == "an older generation":
            newest = load_generation(store)
            store.create(layout.generation(newest.number + 1), newest.numbered(newest.number + 1).encode(None))

    lister_beat(store)
    limit = 5 if how == "another limit" else None
    report = fb.build(
        store,
        source_of(tmp_path, 40),
        ObedientRecipe(),
        workers=0,
        on_progress=soon(listed_by_another(store, announce)),
        max_failures=limit,
    )
    assert said
    assert (report.rows, report.samples, report.generation) == (80, 80, generation_numbers(store)[-1])
    assert load_generation(store).max_failures == limit


def test_a_plan_that_is_damaged_is_noticed_by_a_builder_that_has_an_announcement(tmp_path):
    store = MemoryStore()

    def announce(listed: ListedLayer) -> None:
        store.replace(own(), listed.encode(None))
        content = bytearray(store.read(layout.plan_segment(0)))
        content[len(content) // 2] ^= 255
        store.replace(layout.plan_segment(0), [bytes(content)])

    lister_beat(store)
    with pytest.raises(IndexCorrupt, match="plan/000000"):
        fb.build(
            store,
            source_of(tmp_path, 40),
            ObedientRecipe(),
            workers=0,
            on_progress=listed_by_another(store, announce),
        )


def beat_of_last(store, **fields) -> None:
    alike = {"layer": LAYER, "versions": about(store).versions, "lists": True} | fields
    text = msgspec.json.encode(BuilderBeat(beat=1, host="last", pid=1, **alike))
    store.replace(layout.builder(LAST), [text])


def begun(tmp_path):
    """(A cache of which one chunk is made, its source)."""
    store, source = AskedStore(), source_of(tmp_path, 8)
    fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=0)
    return store, source


def test_the_builder_that_lists_announces_what_it_has_read_back(tmp_path):
    store, source = begun(tmp_path)
    beat_of_last(store)
    report = fb.build(store, source, ObedientRecipe(), workers=0)
    newest = load_generation(store)
    found = decode_listed(memoryview(store.read(layout.listed(LAST))), "", "", None)
    assert found == ListedLayer.of(newest, about(store))
    assert (found.totals.rows, found.totals.chunks, found.generation) == (report.rows, 8, report.generation)


@pytest.mark.parametrize(
    "fields", [{"lists": False}, {"versions": {"numpy": "0.1"}}, {"layer": "other"}], ids=["range", "versions", "layer"]
)
def test_builders_that_work_on_something_else_get_no_announcement(tmp_path, fields):
    store, source = begun(tmp_path)
    beat_of_last(store, **fields)
    fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.5)
    assert layout.listed(LAST) not in [entry.key for entry in store.entries(layout.BUILDERS)]


def test_a_generation_that_lists_a_part_is_not_announced(tmp_path):
    store, source = begun(tmp_path)
    beat_of_last(store)
    fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.5, end_chunk=4)
    assert layout.listed(LAST) not in [entry.key for entry in store.entries(layout.BUILDERS)]


class FlipsGenerations(AskedStore):
    """A store that damages what is published."""

    def create(self, key, data, **options):
        whole = bytearray(b"".join(map(bytes, data)))
        whole[-min(100, len(whole))] ^= layout.parse_generation(key) is not None
        return super().create(key, [bytes(whole)], **options)


def test_a_generation_that_was_damaged_while_it_was_written_is_not_announced(tmp_path):
    store, source = begun(tmp_path)
    store.__class__ = FlipsGenerations
    beat_of_last(store)
    with pytest.raises(IndexCorrupt, match="generations/"):
        fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.5)
    assert layout.listed(LAST) not in [entry.key for entry in store.entries(layout.BUILDERS)]


def test_what_builders_at_work_in_processes_report_is_the_whole_cache(tmp_path):
    builders = Builders(tmp_path, 60)
    builders.start(4)
    reports = builders.end()
    assert builders.check().total() == 60
    newest = generation_numbers(LocalStore(builders.root))[-1]
    assert {report["rows"] for report in reports} == {120}
    assert {report["generation"] for report in reports} <= {newest - 1, newest}
    assert sum(report["made"] for report in reports) == 60


def test_nothing_is_left_for_a_builder_that_ended_before_it_could_read_an_announcement(tmp_path):
    store, _ = begun(tmp_path)
    beat_of_last(store)
    announcing.announce(store, load_generation(store), about(store), ["yy-1-1", LAST])
    assert layout.listed(LAST) in [entry.key for entry in store.entries(layout.BUILDERS)]
    assert layout.listed("yy-1-1") not in [entry.key for entry in store.entries(layout.BUILDERS)]


def test_an_announcement_that_cannot_be_read_does_not_end_a_build(tmp_path):
    class Denying(MemoryStore):
        def read(self, key, start=0, stop=None):
            if key == own() and (key in denied or not denied.append(key)):
                raise PermissionError(13, "denied", key)
            return super().read(key, start, stop)

    store, denied = Denying(), []
    lister_beat(store)
    listen = listed_by_another(store, lambda listed: store.replace(own(), listed.encode(None)))
    report = fb.build(store, source_of(tmp_path, 8), ObedientRecipe(), workers=0, on_progress=soon(listen))
    assert denied
    assert (report.rows, report.generation) == (16, generation_numbers(store)[-1])


def test_sums_that_are_not_finite_are_not_announced_and_do_not_end_a_build(tmp_path, monkeypatch):
    make = ObedientRecipe.make

    def with_large_statistic(self, *arguments, **options):
        rows = make(self, *arguments, **options)
        rows.statistics["bytes"] = 1.7e308
        return rows

    monkeypatch.setattr(ObedientRecipe, "make", with_large_statistic)
    store, source = begun(tmp_path)
    beat_of_last(store)
    report = fb.build(store, source, ObedientRecipe(), workers=0)
    assert (report.rows, report.statistics["bytes"]) == (16, float("inf"))
    assert layout.listed(LAST) not in [entry.key for entry in store.entries(layout.BUILDERS)]


def test_a_builder_of_which_a_chunk_failed_waits_for_no_announcement(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setattr(builder, "ANNOUNCE_TICKS", FOR_EVER)
    store, listed = MemoryStore(), []
    lister_beat(store)
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(8, c3="raise ValueError 99")))
    listen = soon(listed_by_another(store, listed.append))
    with pytest.raises(BuildFailed, match="ValueError"):
        fb.build(store, source, ObedientRecipe(), workers=0, on_progress=listen)
    assert listed


def test_a_builder_waits_for_an_announcement_once_although_generations_follow_each_other(tmp_path):
    store, looks = MemoryStore(), itertools.count()
    lister_beat(store)
    listen = listed_by_another(store, lambda listed: None)

    def publish_again(progress: fb.Progress) -> None:
        listen(progress)
        if progress.phase == "waiting" and generation_numbers(store) and next(looks) % 2:
            newest = load_generation(store)
            store.create(layout.generation(newest.number + 1), newest.numbered(newest.number + 1).encode(None))

    report = fb.build(store, source_of(tmp_path, 8), ObedientRecipe(), workers=0, on_progress=soon(publish_again, 60))
    assert report.rows == 16


def test_nothing_is_waited_for_where_no_announcement_could_fit(tmp_path):
    store, _ = begun(tmp_path)
    assert announcing.Announcement(store, about(store), "00" * 32, None, 1000.0).is_awaited()
    assert not announcing.Announcement(store, about(store), "", None, 1000.0).is_awaited()


def test_builders_that_have_been_silent_for_a_lease_get_no_announcement(tmp_path):
    class Noting(AskedStore):
        def replace(self, key, data, **options):
            replaced.append(key)
            return super().replace(key, data, **options)

    store, source = begun(tmp_path)
    store.__class__, replaced = Noting, []
    beat_of_last(store)
    fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.1, on_progress=lambda _: time.sleep(0.1))
    assert len(load_generation(store).table(LAYER)) == 8
    assert layout.builder(LAST) in replaced
    assert layout.listed(LAST) not in replaced


def test_announcements_are_written_in_several_threads(tmp_path):
    class Meeting(MemoryStore):
        def replace(self, key, data, **options):
            if key.endswith(".listed.safetensors"):
                together.wait()
            return super().replace(key, data, **options)

    store, _ = begun(tmp_path)
    store.__class__, together = type("MeetingStore", (Meeting, AskedStore), {}), threading.Barrier(4, timeout=30.0)
    for number in range(4):
        store.create(layout.builder(f"zz-{number + 1}-1"), [b"{}"])
    announcing.announce(store, load_generation(store), about(store), [f"zz-{number + 1}-1" for number in range(4)])
    found = [store.read(layout.listed(f"zz-{number + 1}-1")) for number in range(4)]
    assert len(set(found)) == 1
    assert decode_listed(memoryview(found[0]), "", "", None).totals.chunks == 1
