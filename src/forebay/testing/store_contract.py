"""The guarantees of every store, as tests to inherit.

`make_store` gives a fresh store. A store that other processes can open inherits `SharedStoreContract` instead, and
gives `reopen`, a picklable function that opens it there: the races are then run between real processes as well. Public
names that forebay does not call are listed in `helpers`: any other that `Store` does not have is taken for a misspelled
one.
"""

import hashlib
import multiprocessing
import multiprocessing.dummy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import StoreRefused
from forebay.store.base import BadCopy, Buffer, Entry, Expected, Missing, Store, holds
from forebay.testing.kind_contracts import check_names

Reopen = Callable[[], Store]
RACERS = 4
ROUNDS = 12
RACE_BYTES = 200_000
THREADS, PROCESSES = multiprocessing.dummy, multiprocessing.get_context("spawn")


class StoreContract:
    helpers: tuple[str, ...] = ()  # public names of the store that forebay does not call

    def make_store(self, folder: Path) -> Store:
        """A fresh, empty store; `folder` does not exist yet and may be used."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make_store(tmp_path / "store")

    def test_every_public_name_is_a_method_of_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.address
        check_names(type(store), "methods of a store", [Store], self.helpers)

    def test_an_empty_store_has_no_keys(self, store: Store) -> None:
        assert list(store.entries("")) == list(store.entries("layers/")) == list(store.leftovers()) == []
        free = store.free_bytes()
        assert free is None or free > 0

    def test_the_second_creator_gets_false_and_nothing_changes(self, store: Store) -> None:
        assert store.create("a", [b"first"])
        assert not store.create("a", [b"second, and longer"])
        assert holds(store, "a")
        assert store.read("a") == b"first"
        assert list(store.entries("")) == [Entry("a", 5)]

    def test_a_missing_key_is_missing(self, store: Store) -> None:
        store.create("folder/key", [b"x"])
        for missing in ("nothing", "folder/nothing", "folder/key/below", "folder"):
            with pytest.raises(Missing):
                store.read(missing)
            with pytest.raises(Missing):
                store.read(missing, 0, 1)
            with pytest.raises(Missing):
                store.view(missing)
            assert store.head(missing) is None
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
            lambda: store.view(key),
            lambda: store.create(key, [b"x"]),
            lambda: store.replace(key, [b"x"]),
            lambda: store.delete(key),
            lambda: store.head(key),
        ):
            with pytest.raises(StoreRefused):
                act()
        assert list(store.entries("")) == [Entry("a/b", 5)]

    @pytest.mark.parametrize(
        ("start", "stop", "expected"),
        [(0, None, b"0123456789"), (4, None, b"456789"), (2, 5, b"234"), (5, 5, b""), (7, 3, b""), (8, 100, b"89"),
         (10, None, b""), (50, None, b""), (50, 60, b"")],
    )  # fmt: skip
    def test_a_range_is_cut_short_at_the_end(self, store: Store, start: int, stop: int | None, expected: bytes) -> None:
        store.create("digits", [b"0123456789"])
        assert store.read("digits", start, stop) == expected

    def test_a_map_is_read_only_and_outlives_the_replacement_and_the_deletion_of_its_key(self, store: Store) -> None:
        store.create("mapped", [bytes(range(256)) * 100])
        view = store.view("mapped")
        assert (view.readonly, view.contiguous, view.format, view.itemsize) == (True, True, "B", 1)
        assert view == store.read("mapped")
        store.replace("mapped", [b"new"])
        store.delete("mapped")
        assert view == bytes(range(256)) * 100

    def test_the_head_of_a_value_is_its_entry_and_its_etag_changes_with_the_value_only(self, store: Store) -> None:
        store.create("a/b", [b"value"])
        (listed,) = store.entries("")
        head = store.head("a/b")
        assert head == listed == Entry("a/b", 5)
        assert head.etag == listed.etag == etag_of(store, "a/b") != ""
        assert (head.written is None) == (listed.written is None)
        store.replace("a/b", [b"other"])
        assert etag_of(store, "a/b") != head.etag

    def test_a_value_is_replaced_only_if_it_is_the_expected_one(self, store: Store) -> None:
        store.create("a", [b"one"])
        first = etag_of(store, "a")
        assert store.replace("a", [b"two"], if_etag=first)
        assert not store.replace("a", [b"three"], if_etag=first)
        assert not store.replace("missing", [b"three"], if_etag=first)
        assert store.read("a") == b"two"
        assert [entry.key for entry in store.entries("")] == ["a"]

    def test_of_many_threads_that_replace_the_same_value_one_wins(self, store: Store) -> None:
        store.create("a", [b"one"])
        won = run_racers(THREADS, replace_once, lambda: store)
        assert won.count(True) == 1
        assert store.read("a") == racer_value(won.index(True))

    def test_a_value_is_deleted_only_if_it_is_the_expected_one(self, store: Store) -> None:
        store.create("a", [b"one"])
        first = etag_of(store, "a")
        store.replace("a", [b"two"])
        store.delete("a", if_etag=first)
        assert store.read("a") == b"two"
        store.delete("a", if_etag=etag_of(store, "a"))
        store.delete("a", if_etag=first)
        assert store.head("a") is None

    def test_a_view_is_the_expected_value_the_original_or_an_error(self, store: Store) -> None:
        value = bytes(range(256)) * 40
        store.create("a/b", [value])
        digest = hashlib.sha256(value).digest()
        assert store.view("a/b", expect=Expected(len(value), digest)) == value
        for expect in (Expected(len(value) + 1, digest), Expected(len(value), hashlib.sha256(b"other").digest())):
            try:
                assert store.view("a/b", expect=expect) == value
            except BadCopy as error:
                assert (error.key, bool(error.problem)) == ("a/b", True)  # noqa: PT017

    def test_a_rejected_value_stays_where_it_is(self, store: Store) -> None:
        store.create("a/b", [b"value"])
        store.reject("a/b", "its block 3 is bad")
        store.reject("missing", "it is bad")
        assert store.read("a/b") == bytes(store.view("a/b")) == b"value"

    def test_folders_are_the_next_parts_of_keys(self, store: Store) -> None:
        for name in ("b", "a/2", "a/1/x", "a/1/y", "a-b/0", "ab/0", "a/c/d/e"):
            store.create(name, [b"x"])
        assert store.folders("") == ["a", "a-b", "ab"]
        assert store.folders("a/") == ["1", "c"]
        assert store.folders("a/c/") == ["d"]
        assert store.folders("a/1/") == store.folders("none/") == []

    def test_a_local_path_has_the_value(self, store: Store) -> None:
        store.create("a/b", [b"value"])
        path, root = store.local_path("a/b"), store.local_path("")
        assert (path is None) == (root is None)
        if path is not None:
            assert root is not None
            assert Path(path).read_bytes() == b"value"
            assert Path(root, "a/b").samefile(path)

    def test_replace_makes_and_changes_a_value(self, store: Store) -> None:
        for value in (b"one", b"a longer one", b"2"):
            store.replace("claim", [value], durable=value != b"2")
            assert store.read("claim") == value
        assert list(store.entries("")) == [Entry("claim", 1)]
        assert list(store.leftovers()) == []
        assert not store.create("claim", [b"other"], durable=False)

    def test_keys_come_by_prefix_and_in_order(self, store: Store) -> None:
        names = ["b", "a/2", "a/10", "a/1/x", "a-b/0", "a.json", "ab/0", "a/1.json", "z/y/x/w"]
        for size, name in enumerate(names):
            store.create(name, [bytes(size)])
        for prefix in ("", "a", "a/", "a/1", "a/1/", "a-", "a.", "ab", "z/y/", "z/y/x/w", "z/y/x/w/", "none", "b/"):
            matching = [name for name in sorted(names) if name.startswith(prefix)]
            assert list(store.entries(prefix)) == [Entry(name, names.index(name)) for name in matching], prefix

    def test_a_deleted_key_is_gone_and_deleting_again_is_no_error(self, store: Store) -> None:
        store.create("a/gone", [b"x"])
        store.create("a/stays", [b"y"])
        store.delete("a/gone")
        store.delete("a/gone")
        store.delete("never/was/there")
        assert [entry.key for entry in store.entries("")] == ["a/stays"]
        assert store.create("a/gone", [b"again"])
        assert store.read("a/gone") == b"again"

    @pytest.mark.parametrize("empty", [[], [b""], [b"", memoryview(b""), bytearray()]])
    def test_an_empty_value_is_a_value(self, store: Store, empty: list[Buffer]) -> None:
        assert store.create("empty", empty)
        assert store.read("empty") == store.read("empty", 0, 10) == bytes(store.view("empty")) == b""
        assert list(store.entries("")) == [Entry("empty", 0)]
        assert not store.create("empty", [b"x"])

    def test_buffers_of_every_kind_and_size_are_joined_in_order(self, store: Store) -> None:
        buffers: list[Buffer] = [b"bytes ", bytearray(b"bytearray "), memoryview(b"--view--")[2:6], b"", b" end"]
        store.create("joined", buffers)
        assert store.read("joined") == b"bytes bytearray view end"
        pieces = [index.to_bytes(3, "big") for index in range(5000)]
        store.create("many", pieces)
        assert store.read("many") == b"".join(pieces)
        piece = bytes(range(256)) * 4096 * 4
        store.create("large", [piece] * 6)
        assert store.view("large") == piece * 6
        assert store.read("large", len(piece) - 1, len(piece) + 1) == piece[-1:] + piece[:1]

    def test_a_value_whose_writing_fails_is_never_seen(self, store: Store) -> None:
        with pytest.raises(Interrupted):
            store.create("half", FailingBuffers())
        with pytest.raises(Interrupted):
            store.replace("half", FailingBuffers())
        assert list(store.entries("")) == []
        assert list(store.leftovers()) == []
        assert store.create("half", [b"whole"])

    def test_of_many_threads_that_create_one_key_exactly_one_wins(self, store: Store) -> None:
        check_race(store, run_racers(THREADS, race, lambda: store))

    def test_readers_see_a_whole_value_while_threads_replace_it(self, store: Store) -> None:
        check_readers(store, THREADS, lambda: store)


class SharedStoreContract(StoreContract):
    """For stores that several processes have open at once."""

    def reopen(self, store: Store) -> Reopen:
        """How another process opens the same store."""
        raise NotImplementedError

    def test_of_many_processes_that_create_one_key_exactly_one_wins(self, store: Store) -> None:
        check_race(store, run_racers(PROCESSES, race, self.reopen(store)))

    def test_readers_see_a_whole_value_while_processes_replace_it(self, store: Store) -> None:
        check_readers(store, PROCESSES, self.reopen(store))


class Interrupted(Exception):
    """Stands for any error while a value is written."""


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


def etag_of(store: Store, key: str) -> str:
    head = store.head(key)
    assert head is not None
    return head.etag


def racer_value(racer: int) -> bytes:
    """A value that contains its writer, and reveals truncation."""
    return bytes([racer]) * (RACE_BYTES + racer)


def race(reopen: Reopen, barrier: Any, racer: int, answers: Any) -> None:
    """Answer with the rounds that a racer won."""
    store, value, won = reopen(), memoryview(racer_value(racer)), []
    for turn in range(ROUNDS):
        barrier.wait(60)
        if store.create(f"race/{turn}", [value[:1000], value[1000:]]):
            won.append(turn)
    answers.put((racer, won))


def check_race(store: Store, won: Sequence[list[int]]) -> None:
    assert sorted(turn for turns in won for turn in turns) == list(range(ROUNDS))
    for racer, turns in enumerate(won):
        for turn in turns:
            assert store.read(f"race/{turn}") == racer_value(racer)
    assert [entry.key for entry in store.entries("")] == sorted(f"race/{turn}" for turn in range(ROUNDS))
    assert list(store.leftovers()) == []


def replace_or_read(reopen: Reopen, barrier: Any, racer: int, answers: Any) -> None:
    """Half of the racers replace, the other half read; the answer is the number of values that were not whole."""
    store = reopen()
    barrier.wait(60)
    broken = 0
    for turn in range(ROUNDS):
        if racer % 2 == 0:
            store.replace("seen", [racer_value((racer * ROUNDS + turn) % 256)])
            continue
        values = [store.read("seen"), bytes(store.view("seen")), store.read("seen"), store.read("seen")]
        broken += sum(value != racer_value(value[0]) for value in values)
    answers.put((racer, broken))


def check_readers(store: Store, context: Any, reopen: Reopen) -> None:
    store.replace("seen", [racer_value(0)])
    assert run_racers(context, replace_or_read, reopen) == [0] * RACERS
    assert list(store.leftovers()) == []


def replace_once(reopen: Reopen, barrier: Any, racer: int, answers: Any) -> None:
    """Answer whether a racer replaced the value that all of them saw."""
    store = reopen()
    etag = etag_of(store, "a")
    barrier.wait(60)
    answers.put((racer, store.replace("a", [racer_value(racer)], if_etag=etag)))


def run_racers(context: Any, target: Callable[..., None], reopen: Reopen) -> list[Any]:
    """Return the answers of `RACERS` threads or fresh processes, in the order of their numbers."""
    barrier, answers = context.Barrier(RACERS), context.Queue()
    racers = [context.Process(target=target, args=(reopen, barrier, racer, answers)) for racer in range(RACERS)]
    for racer in racers:
        racer.start()
    by_racer = dict(answers.get(timeout=120) for _ in racers)
    for racer in racers:
        racer.join()
    return [by_racer[racer] for racer in range(RACERS)]
