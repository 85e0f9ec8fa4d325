"""The guarantees of every engine, as tests to inherit: a subclass creates an engine, which runs a few small chunks."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest

from forebay.engine.base import Died, Done, Engine, Event, Failed, TaskDocument
from forebay.errors import RecipeInvalid
from forebay.source import files_changed
from forebay.testing.kind_contracts import check_names

AnyEngine = TypeVar("AnyEngine", bound=Engine)
PATIENCE = 120.0  # seconds until a chunk counts as forgotten
RAISED: dict[int, Exception] = {
    101: OSError(errno.EIO, "the disk says no"),
    102: OSError(errno.ENOSPC, "the disk is full"),
    103: files_changed("cache", {"a.txt": "changed"}),
    104: ValueError("a recipe may raise anything"),
}
DEADLY = 200  # the chunk that kills the process which computes it, unless that is the one of the test


@dataclass(frozen=True)
class Squares:
    """A task: the record of a chunk is the square of its number and the process that computed it."""

    fails_in: str = "begin"
    tester: int = field(default_factory=os.getpid)

    def document(self) -> TaskDocument:
        return TaskDocument(opener="forebay.testing.engine_contract:open_squares", body=asdict(self))

    def begin(self, chunk: int) -> Callable[[], tuple[int, int]]:
        if self.fails_in == "begin":
            _fail(chunk)
        if chunk == DEADLY and os.getpid() != self.tester:
            os.kill(os.getpid(), signal.SIGKILL)
        return partial(self._finish, chunk, os.getpid())

    def _finish(self, chunk: int, pid: int) -> tuple[int, int]:
        _fail(chunk)
        return chunk * chunk, pid


def open_squares(body: Mapping[str, Any]) -> Squares:
    return Squares(**body)


@dataclass(frozen=True)
class Homebound(Squares):
    """A task without a document: only an engine in this process can run it."""

    def document(self) -> TaskDocument:
        raise RecipeInvalid("it has no document")


def _fail(chunk: int) -> None:
    if chunk in RAISED:
        raise RAISED[chunk]


def run_chunks(engine: Engine, chunks: Sequence[int], submitted: int = 0) -> dict[int, Event]:
    """The outcome of each chunk, once all but the first `submitted` were given to idle slots."""
    waiting, heard, deadline = list(chunks[submitted:]), dict[int, Event](), time.monotonic() + PATIENCE
    while len(heard) < len(chunks):
        assert time.monotonic() < deadline, f"nothing was heard of chunks {sorted(set(chunks) - heard.keys())}"
        for slot in engine.idle():
            if waiting:
                engine.submit(slot, waiting.pop(0))
        for event in engine.poll(0.2):
            assert event.chunk is not None, event
            assert event.chunk not in heard, f"chunk {event.chunk} was reported twice"
            heard[event.chunk] = event
    return heard


def wait_for_slots(engine: Engine, slots: int) -> list[int]:
    """The idle slots, once there are as many; a worker that dies before it has a chunk is replaced."""
    deadline = time.monotonic() + PATIENCE
    while len(engine.idle()) < slots:
        assert time.monotonic() < deadline, f"{slots} slots are not idle: {engine.idle()}"
        for event in engine.poll(0.1):
            assert isinstance(event, Died), event
            assert (event.chunk, event.lost) == (None, ()), event
    return engine.idle()


@contextmanager
def stopping(engine: AnyEngine) -> Iterator[AnyEngine]:
    """Stop an engine at the end."""
    try:
        yield engine
    finally:
        engine.stop()


class EngineContract:
    helpers: tuple[str, ...] = ()  # public names of the engine that forebay does not call

    def make_engine(self) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with stopping(self.make_engine()) as engine:
            yield engine

    def test_every_public_name_is_a_method_of_an_engine(self, engine: Engine) -> None:
        check_names(type(engine), "methods of an engine", [Engine], self.helpers)

    def test_every_chunk_is_made_once_and_its_record_comes_back(self, engine: Engine) -> None:
        with _started(engine, 2):
            heard = run_chunks(engine, range(7))
            usage = engine.usage()
        records = {chunk: event.record for chunk, event in heard.items() if isinstance(event, Done)}
        assert {chunk: record[0] for chunk, record in records.items()} == {chunk: chunk**2 for chunk in range(7)}
        assert 1 <= usage.workers <= 2
        assert usage.in_process == ({record[1] for record in records.values()} == {os.getpid()})

    @pytest.mark.parametrize("where", ["begin", "finish"])
    def test_what_a_chunk_raises_is_reported_by_its_kind_and_the_others_are_made(
        self, engine: Engine, where: str
    ) -> None:
        with _started(engine, 1, where):
            heard = run_chunks(engine, [*RAISED, 5])
        failed = {chunk: event.kind for chunk, event in heard.items() if isinstance(event, Failed)}
        assert failed == {101: "io", 102: "disk-full", 103: "source-changed", 104: "error"}
        assert isinstance(heard[5], Done)
        changed = heard[103]
        assert isinstance(changed, Failed)
        assert changed.files == {"a.txt": "changed"}

    def test_a_slot_with_a_chunk_is_not_idle_before_it_is_polled(self, engine: Engine) -> None:
        assert engine.capacity() >= 1
        with _started(engine, 1):
            assert engine.poll(0.01) == []
            (slot,) = wait_for_slots(engine, 1)
            engine.submit(slot, 3)
            assert slot not in engine.idle()
            assert isinstance(run_chunks(engine, [3], submitted=1)[3], Done)

    def test_it_makes_chunks_after_it_was_given_more_slots_and_fewer(self, engine: Engine) -> None:
        with _started(engine, 1):
            for slots in (2, 1):
                engine.resize(slots)
                assert all(isinstance(event, Done) for event in run_chunks(engine, range(4)).values())
                _wait_for_workers(engine, slots)
            assert not engine.poll(0)

    def test_the_worker_that_a_chunk_kills_is_reported_with_it_and_replaced(self, engine: Engine) -> None:
        with _started(engine, 1):
            assert isinstance(run_chunks(engine, [5])[5], Done)
            death = run_chunks(engine, [DEADLY])[DEADLY]
            assert isinstance(death, Done if engine.usage().in_process else Died)
            if isinstance(death, Died):
                assert death.began
                assert death.worker
                assert death.reason
                assert death.lost == ()
            assert isinstance(run_chunks(engine, [6])[6], Done)

    def test_a_task_without_a_document_is_run_in_this_process_or_refused(self, engine: Engine) -> None:
        try:
            engine.start(Homebound(), 1)
        except RecipeInvalid:
            return
        assert engine.usage().in_process
        assert isinstance(run_chunks(engine, [4])[4], Done)

    def test_stopping_ends_its_processes_and_running_chunks(self, engine: Engine) -> None:
        engine.start(Squares(), 2)
        engine.submit(wait_for_slots(engine, 1)[0], 1)
        others = [pid for pid in engine.usage().pids if pid != os.getpid()]
        engine.stop()
        engine.stop()
        assert not any(_is_running(pid) for pid in others)
        with _started(engine, 1):  # another task
            assert isinstance(run_chunks(engine, [2])[2], Done)


def _wait_for_workers(engine: Engine, slots: int) -> None:
    """Wait until there are as many workers as slots; this process is always one."""
    deadline, expected = time.monotonic() + PATIENCE, 1 if engine.usage().in_process else slots
    while engine.usage().workers != expected:
        assert time.monotonic() < deadline, f"{expected} workers were wanted: {engine.usage()}"
        assert engine.poll(0.1) == []


@contextmanager
def _started(engine: Engine, slots: int, fails_in: str = "begin") -> Iterator[None]:
    engine.start(Squares(fails_in=fails_in), slots)
    try:
        yield
    finally:
        engine.stop()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
