"""What every store promises, as tests to inherit.

`make_store` gives a fresh store. A store that other processes can open inherits `SharedStoreContract` instead, and
gives `reopen`, a picklable function that opens it there: the races are then run between real processes as well.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import NotForebay, StoreRefused
from forebay.store.base import MAX_DOCUMENT_BYTES, Buffer, Entry, Missing, Store, holds, read_document

Reopen = Callable[[], Store]
RACERS = 4
ROUNDS = 12
RACE_BYTES = 200_000


class StoreContract:
    def make_store(self, folder: Path) -> Store:
        """A fresh, empty store; `folder` does not exist yet and may be used."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make_store(tmp_path / "store")

    def test_it_is_a_store_with_an_address(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.address

    def test_what_is_created_is_read_back(self, store: Store) -> None:
        assert store.create("a/b.bin", [b"forebay"])
        assert store.read("a/b.bin") == b"forebay"
        assert holds(store, "a/b.bin")

    def test_the_second_creator_is_told_so_and_nothing_changes(self, store: Store) -> None:
        assert store.create("a", [b"first"])
        assert not store.create("a", [b"second, and longer"])
        assert store.read("a") == b"first"
        assert list(store.keys("")) == [Entry("a", 5)]

    def test_a_missing_key_is_missing(self, store: Store) -> None:
        store.create("folder/key", [b"x"])
        for missing in ("nothing", "folder/nothing", "folder/key/below", "folder"):
            with pytest.raises(Missing):
                store.read(missing)
            with pytest.raises(Missing):
                store.read(missing, 0, 1)
            with pytest.raises(Missing):
                store.map(missing)
            assert not holds(store, missing)

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/etc/passwd", "a//b", "a/", "..", "../a", "a/../../b", "a/..", ".", "./a", "a/./b", "a\0b", "a\\b",
         "..\\b", "a/b/c/d/e", "x" * 256, "a/" + "é" * 128],
    )  # fmt: skip
    def test_a_key_that_could_lead_elsewhere_is_refused(self, store: Store, key: str) -> None:
        store.create("a/b", [b"value"])
        for act in (
            lambda: store.read(key),
            lambda: store.read(key, 0, 1),
            lambda: store.map(key),
            lambda: store.create(key, [b"x"]),
            lambda: store.replace(key, [b"x"]),
            lambda: store.delete(key),
            lambda: holds(store, key),
        ):
            with pytest.raises(StoreRefused):
                act()
        assert list(store.keys("")) == [Entry("a/b", 5)]

    def test_a_document_has_a_largest_size(self, store: Store) -> None:
        store.create("small", [b"{}"])
        store.create("large", [bytes(MAX_DOCUMENT_BYTES), b"x"])
        assert read_document(store, "small") == b"{}"
        with pytest.raises(NotForebay, match="'large'"):
            read_document(store, "large")
        with pytest.raises(Missing):
            read_document(store, "nothing")

    @pytest.mark.parametrize(
        ("start", "stop", "expected"),
        [
            (0, None, b"0123456789"),
            (4, None, b"456789"),
            (2, 5, b"234"),
            (5, 5, b""),
            (7, 3, b""),
            (8, 100, b"89"),
            (10, None, b""),
            (50, None, b""),
            (50, 60, b""),
        ],
    )
    def test_a_range_is_cut_short_at_the_end(self, store: Store, start: int, stop: int | None, expected: bytes) -> None:
        store.create("digits", [b"0123456789"])
        assert store.read("digits", start, stop) == expected

    def test_a_map_is_read_only_and_equals_what_is_read(self, store: Store) -> None:
        store.create("mapped", [bytes(range(256)) * 100])
        view = store.map("mapped")
        assert view.readonly
        assert view.contiguous
        assert (view.format, view.itemsize) == ("B", 1)
        assert view == store.read("mapped")

    def test_a_map_outlives_the_replacement_and_the_deletion_of_its_key(self, store: Store) -> None:
        store.create("kept", [b"old" * 5000])
        view = store.map("kept")
        store.replace("kept", [b"new"])
        store.delete("kept")
        assert view == b"old" * 5000

    def test_replace_makes_and_changes_a_value(self, store: Store) -> None:
        store.replace("claim", [b"one"])
        assert store.read("claim") == b"one"
        store.replace("claim", [b"a longer one"])
        store.replace("claim", [b"2"])
        assert store.read("claim") == b"2"
        assert list(store.keys("")) == [Entry("claim", 1)]

    def test_keys_come_by_prefix_and_in_order(self, store: Store) -> None:
        names = ["b", "a/2", "a/10", "a/1/x", "a-b/0", "a.json", "ab/0", "a/1.json", "z/y/x/w"]
        for size, name in enumerate(names):
            store.create(name, [bytes(size)])
        for prefix in ("", "a", "a/", "a/1", "a/1/", "a-", "a.", "ab", "z/y/", "z/y/x/w", "z/y/x/w/", "none", "b/"):
            found = [name for name in sorted(names) if name.startswith(prefix)]
            assert list(store.keys(prefix)) == [Entry(name, names.index(name)) for name in found], prefix

    def test_an_empty_store_has_no_keys(self, store: Store) -> None:
        assert list(store.keys("")) == list(store.keys("layers/")) == list(store.leftovers()) == []

    def test_a_deleted_key_is_gone_and_deleting_again_is_no_error(self, store: Store) -> None:
        store.create("a/gone", [b"x"])
        store.create("a/stays", [b"y"])
        store.delete("a/gone")
        store.delete("a/gone")
        store.delete("never/was/there")
        assert [entry.key for entry in store.keys("")] == ["a/stays"]
        assert store.create("a/gone", [b"again"])
        assert store.read("a/gone") == b"again"

    @pytest.mark.parametrize("empty", [[], [b""], [b"", memoryview(b""), bytearray()]])
    def test_an_empty_value_is_a_value(self, store: Store, empty: list[Buffer]) -> None:
        assert store.create("empty", empty)
        assert store.read("empty") == store.read("empty", 0, 10) == bytes(store.map("empty")) == b""
        assert list(store.keys("")) == [Entry("empty", 0)]
        assert not store.create("empty", [b"x"])

    def test_buffers_of_every_kind_are_joined(self, store: Store) -> None:
        buffers: list[Buffer] = [b"bytes ", bytearray(b"bytearray "), memoryview(b"--view--")[2:6], b"", b" end"]
        store.create("joined", buffers)
        assert store.read("joined") == b"bytes bytearray view end"

    def test_many_buffers_are_joined_in_order(self, store: Store) -> None:
        pieces = [index.to_bytes(3, "big") for index in range(5000)]
        store.create("many", pieces)
        assert store.read("many") == b"".join(pieces)

    def test_a_large_value_is_whole(self, store: Store) -> None:
        piece = bytes(range(256)) * 4096 * 4
        store.create("large", [piece] * 6)
        assert store.map("large") == piece * 6
        assert store.read("large", len(piece) - 1, len(piece) + 1) == piece[-1:] + piece[:1]

    def test_a_value_whose_writing_fails_is_never_seen(self, store: Store) -> None:
        with pytest.raises(Interrupted):
            store.create("half", FailingBuffers())
        with pytest.raises(Interrupted):
            store.replace("half", FailingBuffers())
        assert list(store.keys("")) == []
        assert list(store.leftovers()) == []
        assert store.create("half", [b"whole"])

    def test_a_live_store_has_no_leftovers(self, store: Store) -> None:
        store.create("a/b", [b"x"])
        store.replace("a/b", [b"y"])
        assert list(store.leftovers()) == []

    def test_free_bytes_is_a_count_or_unknown(self, store: Store) -> None:
        free = store.free_bytes()
        assert free is None or free > 0

    def test_of_many_threads_that_create_one_key_exactly_one_wins(self, store: Store) -> None:
        barrier = threading.Barrier(RACERS)
        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(lambda racer: race(store, barrier, racer), range(RACERS)))
        check_race(store, won)

    def test_readers_see_a_whole_value_while_threads_replace_it(self, store: Store) -> None:
        store.replace("seen", [racer_value(0)])
        with ThreadPoolExecutor(3) as pool:
            writers = [pool.submit(replace_often, store, writer) for writer in range(2)]
            while not all(writer.done() for writer in writers):
                check_whole(store.read("seen"))
                check_whole(bytes(store.map("seen")))
            for writer in writers:
                writer.result()


class SharedStoreContract(StoreContract):
    """For stores that several processes have open at once."""

    def reopen(self, store: Store) -> Reopen:
        """How another process opens the same store."""
        raise NotImplementedError

    def test_of_many_processes_that_create_one_key_exactly_one_wins(self, store: Store) -> None:
        check_race(store, in_processes(race_in_process, self.reopen(store)))

    def test_readers_see_a_whole_value_while_processes_replace_it(self, store: Store) -> None:
        store.replace("seen", [racer_value(0)])
        for seen in in_processes(replace_in_process, self.reopen(store)):
            for value in seen:
                check_whole(value)
        assert list(store.leftovers()) == []


class Interrupted(Exception):
    """What stands for any trouble while a value is written."""


class FailingBuffers(Sequence[Buffer]):
    """Two buffers, of which only the first can be had."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            return b"the first half"
        raise Interrupted

    def __iter__(self) -> Iterator[Buffer]:
        yield self[0]
        yield self[1]


def racer_value(racer: int) -> bytes:
    """A value that says who wrote it, and that shows when it is not whole."""
    return bytes([racer]) * (RACE_BYTES + racer)


def check_whole(value: bytes) -> None:
    assert value == racer_value(value[0])


def race(store: Store, barrier: Any, racer: int) -> list[int]:
    """The rounds that a racer won."""
    value = memoryview(racer_value(racer))
    won = []
    for turn in range(ROUNDS):
        barrier.wait(60)
        if store.create(f"race/{turn}", [value[:1000], value[1000:]]):
            won.append(turn)
    return won


def race_in_process(reopen: Reopen, barrier: Any, racer: int, answers: Any) -> None:
    answers.put((racer, race(reopen(), barrier, racer)))


def check_race(store: Store, won: Sequence[list[int]]) -> None:
    assert sorted(turn for turns in won for turn in turns) == list(range(ROUNDS))
    for racer, turns in enumerate(won):
        for turn in turns:
            assert store.read(f"race/{turn}") == racer_value(racer)
    assert [entry.key for entry in store.keys("")] == sorted(f"race/{turn}" for turn in range(ROUNDS))
    assert list(store.leftovers()) == []


def replace_often(store: Store, writer: int) -> None:
    for turn in range(ROUNDS):
        store.replace("seen", [racer_value((writer * ROUNDS + turn) % 256)])


def replace_in_process(reopen: Reopen, barrier: Any, racer: int, answers: Any) -> None:
    """Half of the racers replace, the other half read; the answer is what did not look whole, and one that did."""
    store = reopen()
    barrier.wait(60)
    if racer % 2 == 0:
        replace_often(store, racer)
        answers.put((racer, []))
        return
    seen = {store.read("seen") for _ in range(ROUNDS * 4)}
    answers.put((racer, [value for value in seen if value != racer_value(value[0])] or [seen.pop()]))


def in_processes(target: Callable[..., None], reopen: Reopen) -> list[Any]:
    """The answers of `RACERS` fresh processes, in the order of their numbers."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(RACERS), context.Queue()
    start = partial(context.Process, target=target)
    racers = [start(args=(reopen, barrier, number, answers)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    found = dict(answers.get(timeout=120) for _ in racers)
    for racer in racers:
        racer.join()
    answers.close()
    answers.join_thread()
    return [found[number] for number in range(RACERS)]
