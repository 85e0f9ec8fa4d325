"""Worker processes: their deaths are reported and made good, and they never outlive their builder."""

import fcntl
import gc
import json
import os
import random
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time
import types
import weakref
from array import array
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.builders import (
    children_of,
    chunk_count,
    chunk_digests,
    ending,
    is_running,
    patient,
    script_environment,
    start_builder,
    wait_until,
)
from tests.recipes import NOTES, HesitantStore, LengthLayer, ObedientRecipe, makes, orders, write_orders

import forebay as fb
from forebay.building import planning
from forebay.building.task import preload_document
from forebay.engine.base import WORKER, ChunkWorker, Died, Done, Failed, MemoryGovernor, TaskDocument
from forebay.engine.local import LocalEngine, WorkerSeed
from forebay.errors import BuildFailed, MemoryTooSmall, RecipeInvalid
from forebay.format import layout
from forebay.testing.engine_contract import run_chunks, wait_for_slots


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


def source_of(tmp_path: Path, lines: list[str]) -> fb.Source:
    return fb.sources.lines(write_orders(tmp_path / "source.txt", lines))


def undisturbed_digests(tmp_path: Path, source: fb.Source) -> dict[str, str]:
    """What a build without any orders followed would be: the orders were followed already."""
    fb.build(tmp_path / "undisturbed", source, ObedientRecipe(), workers=0)
    return chunk_digests(tmp_path / "undisturbed")


@pytest.mark.parametrize("cause", ["SIGKILL", "SIGSEGV"])
def test_a_worker_that_dies_is_reported_with_its_chunk_and_replaced_and_the_chunk_is_made(tmp_path, notes, cause):
    source = source_of(tmp_path, orders(6, c3=f"die {cause} 2"))
    seen = []
    report = fb.build(
        tmp_path / "cache", source, ObedientRecipe(), workers=2, on_progress=lambda now: seen.append(now.note)
    )
    assert report.made == 6
    assert len(report.deaths) == 2
    for death in report.deaths:
        assert "chunk 3" in death
        assert cause in death
        assert death in seen
    tries = [pid for pid, chunk in makes(notes) if chunk == 3]
    assert len(set(tries)) == 3
    assert [pid for pid in tries[:2] if f"worker {pid}" in "".join(report.deaths)] == tries[:2]
    assert chunk_digests(tmp_path / "cache") == undisturbed_digests(tmp_path, source)
    assert fb.status(tmp_path / "cache").claims == ()


def test_a_worker_writes_a_chunk_while_it_makes_the_next(tmp_path, notes):
    source = source_of(tmp_path, orders(5))
    report = fb.build(HesitantStore(tmp_path / "cache", chunks=5), source, ObedientRecipe(), workers=1)
    assert report.made == 5
    assert chunk_digests(tmp_path / "cache") == undisturbed_digests(tmp_path, source)


@pytest.mark.parametrize(("chunks", "claimed"), [(6, {0, 1}), (2, {0})])
def test_the_next_chunk_is_claimed_while_a_worker_computes_but_not_the_last_one(tmp_path, notes, chunks, claimed):
    source, root, seen = source_of(tmp_path, orders(chunks)), tmp_path / "cache", []

    def look(progress):
        if progress.phase == "building":
            seen.append({layout.parse_claim(str(key.relative_to(root)))[0] for key in root.glob("claims/*/*")})

    assert fb.build(root, source, ObedientRecipe(), workers=1, on_progress=look).made == chunks
    assert seen[0] == claimed
    assert fb.status(root).claims == ()


def test_a_chunk_is_not_blamed_for_the_next_one_that_kills_its_worker(tmp_path, notes):
    source = source_of(tmp_path, orders(4, c3="die SIGKILL 3"))
    root = tmp_path / "cache"
    with pytest.raises(BuildFailed, match=r"chunk 3: .*SIGKILL.*3 tries") as caught:
        fb.build(HesitantStore(root, chunks=4, deadly=3), source, ObedientRecipe(), workers=1)
    assert set(caught.value.failed) == {3}
    assert [chunk for _, chunk in makes(notes)].count(
        2
    ) == 4  # lost with its worker three times, as often as is allowed
    assert fb.gaps(root)[0].missing == (3,)
    assert fb.build(root, source, ObedientRecipe(), workers=1).made == 1
    assert chunk_digests(root) == undisturbed_digests(tmp_path, source)


@pytest.mark.parametrize(("cause", "says"), [("die SIGKILL 3", "SIGKILL"), ("raise OSError 3", "OSError")])
def test_a_chunk_that_fails_three_times_is_recorded_with_its_reason_and_all_others_are_published(
    tmp_path, notes, cause, says
):
    source = source_of(tmp_path, orders(6, c3=cause))
    with pytest.raises(BuildFailed, match=rf"chunk 3: .*{says}.*3 tries") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=2)
    assert set(caught.value.failed) == {3}
    assert [chunk for _, chunk in makes(notes)].count(3) == 3
    status = fb.status(tmp_path / "cache")
    assert [(claim.chunk, claim.state) for claim in status.claims] == [(3, "failed")]
    assert says in status.claims[0].reason
    assert (status.layers[0].missing, status.layers[0].listed) == ((3,), 5)

    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=2)
    assert (report.made, report.present) == (1, 5)
    assert chunk_digests(tmp_path / "cache") == undisturbed_digests(tmp_path, source)
    assert fb.status(tmp_path / "cache").claims == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_input_output_error_is_tried_again(tmp_path, notes, workers):
    source = source_of(tmp_path, orders(4, c1="raise OSError 2"))
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=workers)
    assert report.made == 4
    assert [chunk for _, chunk in makes(notes)].count(1) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_recipe_fails_its_chunk_at_once_and_the_others_go_on(tmp_path, notes, workers):
    source = source_of(tmp_path, orders(6, c2="raise ValueError 1"))
    with pytest.raises(BuildFailed, match=r"chunk 2: ValueError: as line source.txt@1000 says"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=workers)
    assert sorted(chunk for _, chunk in makes(notes)) == [0, 1, 2, 3, 4, 5]
    assert fb.gaps(tmp_path / "cache")[0].missing == (2,)
    assert len(fb.open_cache(tmp_path / "cache")) == 10


def test_bad_chunks_at_the_beginning_do_not_keep_good_ones_from_being_made(tmp_path, notes):
    bad = {f"c{chunk}": "raise ValueError 9" for chunk in range(4)}
    source = source_of(tmp_path, orders(9, **bad))
    with pytest.raises(BuildFailed) as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    assert set(caught.value.failed) == {0, 1, 2, 3}
    assert fb.gaps(tmp_path / "cache")[0].missing == (0, 1, 2, 3)


def test_a_recipe_that_fails_on_everything_is_not_tried_on_everything(tmp_path, notes):
    bad = {f"c{chunk}": "raise ValueError 9" for chunk in range(60)}
    source = source_of(tmp_path, orders(60, **bad))
    with pytest.raises(BuildFailed, match="as line"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    assert 3 <= len(makes(notes)) < 60


def test_workers_that_cannot_even_begin_end_the_build(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    source = source_of(tmp_path, orders(2))
    with pytest.raises(BuildFailed, match="exit code 1"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=1, on_progress=patient())


def test_a_recipe_that_workers_cannot_import_is_named(tmp_path, notes, monkeypatch):
    module = types.ModuleType("only_here")
    module.__dict__["OnlyHere"] = type("OnlyHere", (ObedientRecipe,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    source = source_of(tmp_path, orders(2))
    with pytest.raises(BuildFailed, match="No module named 'only_here'") as caught:
        fb.build(tmp_path / "cache", source, module.OnlyHere(), workers=1, on_progress=patient(60))
    assert len(str(caught.value).splitlines()) == 1
    fb.build(tmp_path / "cache", source, module.OnlyHere(), workers=0)
    assert fb.status(tmp_path / "cache").complete


def test_workers_end_with_a_builder_that_is_killed(tmp_path, notes):
    stuck = tmp_path / "stuck"
    write_orders(tmp_path / "source.txt", orders(40, c7=f"stop {stuck} 1"))
    builder = start_builder(
        tmp_path / "cache", tmp_path / "source.txt", notes, {"seconds": 0.05}, workers=2, lease_seconds=5
    )
    wait_until(stuck.exists)
    wait_until(lambda: chunk_count(tmp_path / "cache") > 8)
    workers = children_of(builder.pid)
    assert len(workers) == 2
    builder.kill()
    builder.communicate()
    wait_until(lambda: not any(map(is_running, workers)), 10, "workers outlived their builder")
    after = chunk_count(tmp_path / "cache")
    report = fb.build(
        tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), ObedientRecipe(seconds=0.05), workers=2
    )
    assert (report.made, report.present) == (40 - after, after)


def test_workers_are_gone_when_a_build_returns(tmp_path, notes):
    before = set(children_of(os.getpid()))
    seen: set[int] = set()
    fb.build(
        tmp_path / "cache",
        source_of(tmp_path, orders(6)),
        ObedientRecipe(),
        workers=2,
        on_progress=lambda progress: seen.update(progress.pids),
    )
    assert len(seen) == 2
    assert set(children_of(os.getpid())) == before


def run_script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, script, tmp_path], env=script_environment(), capture_output=True, text=True, timeout=600
    )


def test_a_script_without_a_main_guard_builds_with_workers(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"some words\n" * 500)
    ended = run_script(
        tmp_path,
        """
        import sys
        import forebay as fb
        print("once")
        source = fb.sources.lines(sys.argv[1] + "/source.txt")
        report = fb.build(sys.argv[1] + "/cache", source, fb.RawRecipe(chunk_bytes=2000), workers=2)
        print(report.made == report.chunks > 3)
        """,
    )
    assert (ended.stdout, ended.stderr) == ("once\nTrue\n", "")


def test_a_recipe_defined_in_the_script_itself_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"some words\n" * 500)
    ended = run_script(
        tmp_path,
        """
        import sys
        import forebay as fb
        class Mine(fb.RawRecipe, frozen=True): pass
        source = fb.sources.lines(sys.argv[1] + "/source.txt")
        try:
            fb.build(sys.argv[1] + "/cache", source, Mine(), workers=2)
        except fb.errors.RecipeInvalid as error:
            print(error)
        print(fb.build(sys.argv[1] + "/cache", source, Mine(), workers=0).made)
        """,
    )
    assert ended.stderr == ""
    first, second = ended.stdout.splitlines()
    assert first.startswith("Mine is defined in the script itself")
    assert "move it to a module" in first
    assert "workers=0" in first
    assert second == "1"


def test_a_store_in_memory_is_refused_by_worker_processes(tmp_path):
    source = source_of(tmp_path, orders(2))
    with pytest.raises(RecipeInvalid, match="workers=0"):
        fb.build(fb.MemoryStore(), source, ObedientRecipe(), workers=2)


def test_an_interrupt_from_the_terminal_stops_cleanly_and_a_rerun_goes_on(tmp_path, notes):
    write_orders(tmp_path / "source.txt", orders(40))
    builder = start_builder(tmp_path / "cache", tmp_path / "source.txt", notes, {"seconds": 0.05}, workers=2)
    wait_until(lambda: chunk_count(tmp_path / "cache") > 3)
    workers = children_of(builder.pid)
    builder.send_signal(signal.SIGINT)
    ended = ending(builder)
    assert ended["error"] == "BuildStopped"
    assert "run the same command to resume" in ended["text"]
    assert not any(map(is_running, workers))
    present = chunk_count(tmp_path / "cache")
    assert 3 < present < 40
    status = fb.status(tmp_path / "cache")
    assert (status.claims, status.layers[0].listed) == ((), present)
    assert not list((tmp_path / "cache").rglob(".tmp-*"))
    report = fb.build(
        tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), ObedientRecipe(seconds=0.05), workers=2
    )
    assert (report.made, report.present) == (40 - present, present)
    assert sum(1 for _ in makes(notes)) <= 40 + 2


def test_a_layer_is_made_by_workers_as_it_is_in_process(tmp_path, notes):
    source = source_of(tmp_path, orders(6))
    for name, workers in (("one", 0), ("two", 2)):
        fb.build(tmp_path / name, source, ObedientRecipe(), workers=0)
        report = fb.build(tmp_path / name, None, LengthLayer(), workers=workers)
        assert (report.made, report.rows, report.failures) == (6, 12, 6)
    assert chunk_digests(tmp_path / "one") == chunk_digests(tmp_path / "two")
    rows = fb.open_cache(tmp_path / "two").read(range(12), columns=["lengths.present"])
    assert rows["lengths.present"].tolist() == [True, False] * 6


@dataclass(frozen=True)
class Numbered:
    """A task whose record is the number of the worker; chunk 9 kills it."""

    worker: int = 0

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_numbered", body={WORKER: self.worker})

    def begin(self, chunk: int) -> Callable[[], int]:
        if chunk == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: self.worker


def open_numbered(body: Mapping[str, int]) -> Numbered:
    return Numbered(body[WORKER])


def test_workers_are_numbered_and_the_number_of_a_dead_one_is_used_again():
    engine = LocalEngine()
    with closing(engine):
        engine.start(Numbered(), 2)
        numbers = []
        for round_ in range(2):
            for place, slot in enumerate(wait_for_slots(engine, 2)):
                engine.submit(slot, 2 * round_ + place)
            heard = run_chunks(engine, [2 * round_, 2 * round_ + 1], given=2)
            numbers.append(sorted(event.record for event in heard.values()))
            engine.submit(wait_for_slots(engine, 2)[0], 9)
            assert isinstance(run_chunks(engine, [9], given=1)[9], Died)
    assert numbers == [[0, 1], [0, 1]]


def test_one_poll_takes_all_that_a_worker_has_sent():
    with closing(LocalEngine()) as engine:
        engine.start(Numbered(), 1)
        engine.submit(wait_for_slots(engine, 1)[0], 0)
        (worker,) = engine._workers.values()
        done = msgspec.msgpack.encode(Done(0, 0, 0.0, 0))
        while unread_bytes(worker.pipe.fileno()) < len(done):  # "ready" and "computed" are shorter than "done"
            time.sleep(0.01)
        assert [type(event) for event in engine.poll(0)] == [Done]


def unread_bytes(descriptor: int) -> int:
    found = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]


LOADED: list[int] = []  # in a process that has loaded something


@dataclass(frozen=True)
class Forked:
    """A task whose record is the parent of the worker, its own number, and where what it uses was loaded."""

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_forked", body={})

    def begin(self, chunk: int) -> Callable[[], tuple[int, int, list[int]]]:
        if chunk == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: (os.getppid(), os.getpid(), LOADED)


def open_forked(body: Mapping[str, int]) -> Forked:
    return Forked()


def load(body: Mapping[str, int]) -> None:
    LOADED.append(os.getpid())
    np.random.random()  # now the process has the generator that its children would share
    for _ in range(body.get("threads", 0)):
        threading.Thread(target=time.sleep, args=[600], daemon=True).start()
    time.sleep(body.get("seconds", 0))


def seeded(**body: int) -> LocalEngine:
    """An engine whose workers are started from a process that has loaded something."""
    engine = LocalEngine()
    engine.preload(TaskDocument(opener="tests.engine.test_workers:load", body=body), 2)
    return engine


def one_chunk_of_each(engine: LocalEngine) -> list[tuple[int, int, list[int]]]:
    for chunk, slot in enumerate(wait_for_slots(engine, 2)):
        engine.submit(slot, chunk)
    return [event.record for event in run_chunks(engine, [0, 1], given=2).values()]


linux_only = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="workers are forked on Linux only")


@linux_only
def test_what_several_workers_load_is_loaded_once_and_they_are_forked():
    with closing(seeded()) as engine:
        engine.start(Forked(), 2)
        (seed, one, loaded), (other_seed, two, other_loaded) = one_chunk_of_each(engine)
        assert [seed] == [other_seed] == loaded == other_loaded
        assert len({os.getpid(), seed, one, two}) == 4
        assert sorted(engine.usage().pids) == sorted([one, two])
        engine.submit(wait_for_slots(engine, 2)[0], 9)
        died = run_chunks(engine, [9], given=1)[9]
        assert isinstance(died, Died)
        assert died.reason.startswith("killed by SIGKILL")
        assert died.worker in (f"worker {one}", f"worker {two}")
        assert {record[0] for record in one_chunk_of_each(engine)} == {seed}
        engine.stop()
        engine.start(Forked(), 2)
        assert {record[0] for record in one_chunk_of_each(engine)} == {seed}
    assert not any(map(is_running, (seed, one, two)))


@linux_only
def test_a_build_by_forked_workers_has_the_bytes_of_one_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "LONG_WORK_BYTES", 0)  # otherwise nothing is loaded before the build is planned
    forked, fork = [], WorkerSeed.fork
    monkeypatch.setattr(WorkerSeed, "fork", lambda *asked: forked.append(asked) or fork(*asked))
    lines = (json.dumps({"text": f"document {number}, " * (number % 90 + 1)}) for number in range(400))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source, recipe = fb.sources.jsonl(tmp_path / "a.jsonl"), fb.TokenRecipe(sequence_length=64, chunk_size=200)
    for name, workers in (("one", 0), ("two", 2)):
        assert fb.build(tmp_path / name, source, recipe, workers=workers).made > 4
    assert len(forked) == 2
    assert chunk_digests(tmp_path / "one", "tokens") == chunk_digests(tmp_path / "two", "tokens")


@linux_only
@pytest.mark.parametrize("encoder", ["fastokens", "tokenizers"])
def test_a_process_that_has_loaded_a_tokenizer_is_forked(monkeypatch, encoder):
    for name in (*LIMITS, "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    with closing(LocalEngine()) as engine:
        engine.preload(preload_document(fb.TokenRecipe(encoder=encoder)), 2)
        engine.start(Imported(), 2)
        assert [encoder in record for record in one_chunk_of_each(engine)] == [True, True]


@dataclass(frozen=True)
class Imported:
    """A task whose record is what a worker has imported."""

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_imported", body={})

    def begin(self, chunk: int) -> Callable[[], list[str]]:
        return lambda: list(sys.modules)


def open_imported(body: Mapping[str, int]) -> Imported:
    return Imported()


@linux_only
def test_a_process_with_threads_is_not_forked():
    with closing(seeded(threads=1)) as engine:
        engine.start(Forked(), 2)
        (seed, one, loaded), (other_seed, two, _) = one_chunk_of_each(engine)
        assert seed == other_seed
        assert one != two
        assert loaded == []


@linux_only
def test_where_processes_may_not_be_watched_none_is_forked(monkeypatch):
    def forbidden(number: int) -> int:
        raise PermissionError(1, "a container forbids it")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    with closing(seeded()) as engine:
        engine.start(Forked(), 2)
        (parent, one, loaded), (other_parent, two, _) = one_chunk_of_each(engine)
        assert parent == other_parent == os.getpid()
        assert (loaded, one != two) == ([one], True)


@linux_only
def test_workers_are_started_without_a_seed_that_was_killed():
    with closing(seeded()) as engine:
        engine.start(Forked(), 2)
        (seed, *_), _ = one_chunk_of_each(engine)
        os.kill(seed, signal.SIGKILL)
        for slot in wait_for_slots(engine, 2):
            engine.submit(slot, 9)
            assert isinstance(run_chunks(engine, [9], given=1)[9], Died)
        while any(record[0] != os.getpid() for record in one_chunk_of_each(engine)):
            pass  # who was asked for before the death was known died at birth


@linux_only
def test_workers_of_a_seed_that_was_lost_end_without_a_signal_to_what_may_be_another_process(monkeypatch):
    with closing(seeded()) as engine:
        engine.start(Forked(), 2)
        (seed, one, _), (_, two, _) = one_chunk_of_each(engine)
        os.kill(seed, signal.SIGKILL)
        wait_until(lambda: not is_running(seed))
        sent: list[int] = []
        monkeypatch.setattr(os, "kill", lambda number, _: sent.append(number))
        engine.stop()
        assert sent == []
        monkeypatch.undo()
        wait_until(lambda: not is_running(one) and not is_running(two))


@linux_only
def test_a_seed_that_is_killed_while_it_loads_is_no_death_of_the_workers_that_wait_for_it():
    with closing(seeded(seconds=600)) as engine:
        engine.start(Forked(), 4)
        for chunk, slot in enumerate(engine.idle()):
            engine.submit(slot, chunk)
        engine._seed._process.kill()
        done = run_chunks(engine, range(4), given=4)
        assert [type(done[chunk]) for chunk in range(4)] == [Done] * 4
        assert {event.record[0] for event in done.values()} == {os.getpid()}


@linux_only
def test_a_seed_reports_exit_codes_also_where_its_builder_ignores_those_of_children():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        engine = seeded()
    finally:
        signal.signal(signal.SIGCHLD, before)
    with closing(engine):
        engine.start(Forked(), 2)
        (seed, *_), _ = one_chunk_of_each(engine)
        engine.submit(wait_for_slots(engine, 2)[0], 9)
        assert isinstance(run_chunks(engine, [9], given=1)[9], Died)
        assert {record[0] for record in one_chunk_of_each(engine)} == {seed}


@linux_only
def test_a_forked_worker_without_standard_error_ends_well():
    command = (
        "from tests.engine.test_workers import *; from forebay.engine.local import Worker; "
        "worker = Worker(b'null', seeded()._seed); "
        "worker.send(TaskDocument(opener='nowhere:nothing', body={}).encode()); print(worker.process.wait())"
    )
    ended = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, command],
        env=script_environment(), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout == "0\n"


@linux_only
def test_workers_that_are_not_forked_yet_are_not_waited_for_when_an_engine_is_closed():
    with closing(seeded(seconds=600)) as engine:
        engine.start(Forked(), 2)
        assert engine.usage().workers == 2


@linux_only
def test_until_workers_are_forked_the_process_that_loads_for_them_is_measured_and_counts_as_on_this_machine():
    with closing(seeded(seconds=600)) as engine:
        engine.start(Forked(), 2)
        assert engine._seed is not None
        assert engine.usage().pids == (engine._seed.pid,)
        MemoryGovernor(1 << 40, workers=2, heaviest=0).check_before(engine)
        with pytest.raises(MemoryTooSmall):
            MemoryGovernor(1 << 20, workers=2, heaviest=0).check_before(engine)


@dataclass(frozen=True)
class Drawn:
    """A task whose record is a number drawn from each of the two global generators."""

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_drawn", body={})

    def begin(self, chunk: int) -> Callable[[], tuple[int, int, int]]:
        return lambda: (os.getppid(), int(np.random.randint(1 << 62)), random.getrandbits(62))


def open_drawn(body: Mapping[str, int]) -> Drawn:
    return Drawn()


@linux_only
def test_forked_workers_draw_different_random_numbers():
    with closing(seeded()) as engine:
        engine.start(Drawn(), 2)
        one, other = one_chunk_of_each(engine)
        assert one[0] == other[0]  # both are forked from the seed
        assert one[1] != other[1]
        assert one[2] != other[2]


@linux_only
@pytest.mark.parametrize(
    "code",
    ["e = seeded(seconds=3600); pids = [e._seed._process.pid]",
     "e = seeded(); e.start(Forked(), 2); pids = one_chunk_of_each(e)[0][:2]"],
    ids=["loading", "with workers"],
)  # fmt: skip
def test_a_seed_and_its_workers_end_with_their_builder(code: str):
    code = f"from tests.engine.test_workers import *; {code}; print(*pids, flush=True); time.sleep(3600)"
    started = subprocess.Popen(
        [sys.executable, "-c", code], env=script_environment(), stdout=subprocess.PIPE, text=True
    )
    with started:
        pids = [int(number) for number in started.stdout.readline().split()]
        started.kill()
    assert pids
    wait_until(lambda: not any(map(is_running, pids)))


LIMITS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Threads:
    """A task whose record is how many threads a worker tells libraries to start."""

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_threads", body={})

    def begin(self, chunk: int) -> Callable[[], list[str | None]]:
        return lambda: [os.environ.get(name) for name in LIMITS]


def open_threads(body: Mapping[str, int]) -> Threads:
    return Threads()


@pytest.mark.parametrize(("own", "found"), [(None, ["1", "1", "1"]), ("3", ["1", "3", "1"])])
def test_a_worker_has_one_thread_unless_the_user_says_otherwise(monkeypatch, own, found):
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("FASTOKENS_BPE_THREADS", own)
    with closing(LocalEngine()) as engine:
        engine.start(Threads(), 1)
        engine.submit(wait_for_slots(engine, 1)[0], 0)
        assert run_chunks(engine, [0], given=1)[0].record == found


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class Probing:
    """A task whose record is whether garbage is collected as it is made, and whether its own is gone by its writing.

    The record of chunk 9 is one that cannot be sent.
    """

    def begin(self, chunk: int) -> Callable[[], list[bool] | int]:
        loop, is_collecting = weakref.ref(Loop()), gc.isenabled()
        return lambda: 2**70 if chunk == 9 else [is_collecting, loop() is None]


def open_probing(body: Mapping[str, int]) -> Probing:
    return Probing()


@pytest.fixture
def worker():
    yield ChunkWorker(TaskDocument(opener="tests.engine.test_workers:open_probing", body={}).encode())
    gc.enable()  # which a worker, a process of its own, leaves off
    gc.unfreeze()


def test_garbage_is_collected_between_chunks_only(worker):
    for chunk in range(2):
        worker.compute(chunk)
        assert msgspec.msgpack.decode(worker.write(), type=Done | Failed).record == [False, True]


def test_a_chunk_is_not_computed_to_the_end_before_the_last_one_is_written(worker):
    worker.compute(0)
    computing = threading.Thread(target=worker.compute, args=(1,), daemon=True)
    computing.start()
    computing.join(0.3)
    assert computing.is_alive()
    worker.write()
    computing.join(60)
    assert not computing.is_alive()


def test_a_worker_whose_record_cannot_be_sent_does_not_hang(worker):
    worker.compute(9)
    with pytest.raises(OverflowError):
        worker.write()
    computing = threading.Thread(target=worker.compute, args=(1,), daemon=True)
    computing.start()
    computing.join(60)
    assert not computing.is_alive()
