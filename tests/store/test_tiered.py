"""A local tier: each chunk fetched once, verified before it has a name, kept until the tier is full."""

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_key, chunk_path
from tests.helpers.token_caches import token_cache
from tests.store.far_stores import FarFolder, Spoiling

import forebay as fb
from forebay.cache.catalog import read_cache_document
from forebay.errors import ChunkCorrupt, Damaged, StoreRefused, StoreUnavailable, TierUnusable
from forebay.feeding.tiers import clean_tier, tier_contents
from forebay.format import layout
from forebay.store import LocalStore
from forebay.store import tier_folder as folder_module
from forebay.store.base import BadCopy, Expected
from forebay.store.owners import temporary_name
from forebay.store.tier_folder import TierFolder, cache_name
from forebay.store.tiered import TieredStore

ROWS, CHUNK = 60, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("far"), ROWS, chunk_rows=CHUNK)  # 12 chunks


@pytest.fixture
def far(root: Path, tmp_path: Path) -> FarFolder:
    copied = tmp_path / "far"
    fb.copy(root, copied)
    return FarFolder(copied)


def tiered(far: LocalStore, tmp_path: Path, limit: int | None = None) -> TieredStore:
    return TieredStore(LocalStore(tmp_path / "tier"), far, limit_bytes=limit)


def tokens_of(cache: fb.Cache) -> np.ndarray:
    return cache.read(np.arange(len(cache)), ["tokens"])["tokens"]


def chunk_sizes(root: Path) -> list[int]:
    return [path.stat().st_size for path in sorted((root / "layers").glob("tokens.*/0*.safetensors"))]


def kept_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "tier" / "caches").glob("*/chunks/*"))


def test_a_tier_serves_the_rows_of_the_cache_and_fetches_each_chunk_once(
    root: Path, far: FarFolder, tmp_path: Path
) -> None:
    cache = fb.open_cache(tiered(far, tmp_path))
    assert np.array_equal(tokens_of(cache), tokens_of(fb.open_cache(root)))
    assert Counter(far.reads).most_common(1)[0][1] == 1
    assert len(far.reads) == ROWS // CHUNK
    again = fb.open_cache(tiered(far, tmp_path))
    assert np.array_equal(tokens_of(again), tokens_of(cache))
    assert len(far.reads) == ROWS // CHUNK
    assert again.store.transfers().hits == ROWS // CHUNK
    assert {path.name for path in kept_files(tmp_path)} == {
        hashlib.sha256(path.read_bytes()).hexdigest() for path in kept_files(tmp_path)
    }


def test_open_cache_takes_a_tier_and_its_size(root: Path, tmp_path: Path) -> None:
    cache = fb.open_cache(root, tier=tmp_path / "tier", tier_bytes="1GB")
    assert len(tokens_of(cache)) == ROWS
    assert len(kept_files(tmp_path)) == ROWS // CHUNK
    with pytest.raises(ValueError, match="tier_bytes='1GB' needs the folder of a tier"):
        fb.open_cache(root, tier_bytes="1GB")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_full_tier_keeps_what_it_has_and_lets_the_rest_pass(
    root: Path, far: FarFolder, tmp_path: Path, share: float
) -> None:
    limit = int(sum(chunk_sizes(root)) * share)
    for epoch in range(3):
        cache = fb.open_cache(tiered(far, tmp_path, limit))
        before = cache.store.transfers()
        assert np.array_equal(tokens_of(cache), tokens_of(fb.open_cache(root)))
        kept = kept_files(tmp_path)
        assert sum(path.stat().st_size for path in kept) <= limit
        assert len(kept) == int(ROWS // CHUNK * share)
        if epoch:
            assert cache.store.transfers().hits - before.hits == len(kept)
    assert not list((tmp_path / "tier" / "caches").glob("*/parts/*"))
    assert cache.store.tier.used_bytes() == sum(path.stat().st_size for path in kept)


FOLDERS = ("caches/{id}/chunks", "caches/{id}/parts", "caches/{id}/documents", "caches/{id}", "caches")
FILES = ("caches/{id}/parts/{sha}", "caches/{id}/chunks/{sha}", "tier.lock", "forebay-tier.json")


@pytest.mark.parametrize("place", [*FOLDERS, *FILES, *(f"hard {place}" for place in FILES)])
def test_nothing_is_written_or_removed_through_a_link_in_the_tier_of_a_stranger(
    root: Path, far: FarFolder, tmp_path: Path, place: str
) -> None:
    """A stranger's tier and cache could otherwise overwrite any file that is named by its SHA-256."""
    generation = fb.open_cache(root).generation
    sha = generation.table("tokens").digests["sha256"][0].tobytes().hex()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / sha).write_text("precious")
    tiered(far, tmp_path)
    link = tmp_path / "tier" / place.removeprefix("hard ").format(id=cache_name(far.address), sha=sha)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    if place.startswith("hard "):
        link.hardlink_to(outside / sha)
    else:
        link.symlink_to(outside / sha if place in FILES else outside)
    with suppress(TierUnusable, StoreRefused, Damaged):
        assert np.array_equal(tokens_of(fb.open_cache(tiered(far, tmp_path))), tokens_of(fb.open_cache(root)))
    assert {path.name: path.read_text() for path in outside.iterdir()} == {sha: "precious"}


@pytest.mark.parametrize("known", [b"", b"\xff", b"s3://bucket/other", None])
def test_an_address_that_a_stranger_wrote_stops_nobody(far: FarFolder, tmp_path: Path, known: bytes | None) -> None:
    tokens_of(fb.open_cache(tiered(far, tmp_path)))
    (place,) = (tmp_path / "tier" / "caches").iterdir()
    other = place.with_name("0" * 32) / "documents" / "address"
    other.parent.mkdir(parents=True)
    if known is None:
        with other.open("wb") as file:
            file.truncate(1 << 40)  # no memory holds it
    else:
        other.write_bytes(bytes(32) + known)
    tier = TierFolder(tmp_path / "tier").opened()
    unknown, kept = tier.caches()
    assert (unknown.address, unknown.chunks) == ("", 0)
    assert (kept.address, kept.chunks) == (str(far.address), ROWS // CHUNK)
    assert tier.clean(kept.name) == kept.bytes


STRIDES = [pytest.param(29, id="some"), pytest.param(1, id="every", marks=pytest.mark.long)]


@pytest.mark.parametrize("stride", STRIDES)
def test_a_byte_that_flips_on_the_wire_is_fetched_again_and_never_served(tmp_path: Path, stride: int) -> None:
    small = token_cache(tmp_path / "one", CHUNK, chunk_rows=CHUNK)
    key, right = chunk_key(small, "tokens", 0), chunk_path(small, "tokens", 0).read_bytes()
    expect, far = Expected(len(right), hashlib.sha256(right).digest()), Spoiling(small, times=0)
    store = tiered(far, tmp_path)
    for count, offset in enumerate(range(0, len(right), stride), 1):
        far.offset, far.times = offset, 1
        assert bytes(store.view(key, expect=expect)) == right
        assert (len(far.reads), store.transfers().retries, far.times) == (2 * count, count, 0)
        (kept,) = kept_files(tmp_path)
        assert kept.read_bytes() == right
        store.reject(key, "start again")


@pytest.mark.parametrize("stride", STRIDES)
def test_a_byte_that_flips_in_the_tier_is_never_served(tmp_path: Path, stride: int) -> None:
    """Bytes that no row comes from, as padding, may stay as they are."""
    small = token_cache(tmp_path / "one", CHUNK, chunk_rows=CHUNK)
    right = fb.open_cache(small)[0:CHUNK]
    far = FarFolder(small)
    fb.open_cache(tiered(far, tmp_path))[0:CHUNK]
    (kept,) = kept_files(tmp_path)
    good = kept.read_bytes()
    fetched, store = 0, tiered(far, tmp_path)
    for offset in range(0, len(good), stride):
        spoilt = bytearray(good)
        spoilt[offset] ^= 0x10
        kept.write_bytes(spoilt)
        cache, before = fb.open_cache(store), store.transfers().misses
        found = cache[0:CHUNK]
        assert all(np.array_equal(found[name].values, right[name].values) for name in ("seq_lens", "documents"))
        assert np.array_equal(found["tokens"], right["tokens"])
        fetched += store.transfers().misses - before
        assert kept.read_bytes() in (good, bytes(spoilt))
        assert kept.read_bytes() == good or store.transfers().misses == before
    assert fetched > 0.2 * len(good) / stride, "flips in the head and in blocks are found"


def test_an_object_that_is_bad_itself_is_named_with_its_digest(far: FarFolder, tmp_path: Path) -> None:
    path = chunk_path(Path(far.address), "tokens", 3)
    path.chmod(0o644)
    spoilt = bytearray(path.read_bytes())
    spoilt[-1] ^= 1
    path.write_bytes(spoilt)
    cache = fb.open_cache(tiered(far, tmp_path))
    with pytest.raises(ChunkCorrupt, match=r"000003.*was fetched twice, and its SHA-256 is [0-9a-f]{64}"):
        tokens_of(cache)
    assert far.reads.count(chunk_key(Path(far.address), "tokens", 3)) == 2
    assert len(fb.open_cache(tiered(far, tmp_path)).read([0], ["tokens"])["tokens"]) == 1
    assert hashlib.sha256(spoilt).hexdigest() not in [each.name for each in kept_files(tmp_path)]


def first_chunk(far: LocalStore) -> tuple[str, bytes, Expected]:
    """(key, bytes, what is expected) of a chunk."""
    key = chunk_key(Path(far.address), "tokens", 0)
    value = Path(far.local_path(key) or "").read_bytes()
    return key, value, Expected(len(value), hashlib.sha256(value).digest())


def test_a_short_or_long_file_in_the_tier_is_not_handed_out(far: FarFolder, tmp_path: Path) -> None:
    """Whoever maps it need not find out by its content."""
    key, value, expect = first_chunk(far)
    tiered(far, tmp_path).view(key, expect=expect)
    (kept,) = kept_files(tmp_path)
    for spoilt in (value[:-1], value + b"x", b""):
        kept.write_bytes(spoilt)
        assert tiered(far, tmp_path).view(key, expect=expect) == value
        assert kept.read_bytes() == value
    assert len(far.reads) == 4


def test_a_chunk_is_synced_before_it_gets_its_name(
    far: FarFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, value, expect = first_chunk(far)
    seen: list[tuple[str, int]] = []
    sync, publish = os.fsync, TierFolder.publish

    def synced(descriptor: int) -> None:
        seen.append(("sync", os.fstat(descriptor).st_size))
        sync(descriptor)

    def published(tier: TierFolder, cache: str, sha256: bytes) -> None:
        seen.append(("publish", 0))
        publish(tier, cache, sha256)

    store = tiered(far, tmp_path)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(TierFolder, "publish", published)
    store.view(key, expect=expect)
    assert seen.index(("sync", len(value))) < seen.index(("publish", 0))


def test_a_fetch_that_fails_gives_its_room_back(far: FarFolder, tmp_path: Path) -> None:
    key, value, expect = first_chunk(far)
    store = tiered(far, tmp_path, limit=len(value))
    with pytest.raises(BadCopy, match="was fetched twice"):
        store.view(key, expect=Expected(len(value), bytes(32)))
    assert store.tier.used_bytes() == 0
    assert not list((tmp_path / "tier").rglob("parts/*"))
    assert store.view(key, expect=expect) == value
    assert len(kept_files(tmp_path)) == 1  # there is room for it


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_process_forked_while_a_thread_fetches_can_read(far: FarFolder, tmp_path: Path) -> None:
    key, value, expect = first_chunk(far)
    store = tiered(far, tmp_path)
    with store._lock:  # as by a thread that the forked process does not have
        child = multiprocessing.get_context("fork").Process(target=store.view, args=(key,), kwargs={"expect": expect})
        child.start()
        child.join(60)
        hangs = child.is_alive()
        child.kill()
        child.join()
    assert not hangs
    assert [path.read_bytes() for path in kept_files(tmp_path)] == [value]


def test_a_warm_tier_works_without_the_far_store(root: Path, far: FarFolder, tmp_path: Path) -> None:
    tokens_of(fb.open_cache(tiered(far, tmp_path)))
    Path(f"{far.address}.offline").touch()
    cache = fb.open_cache(tiered(far, tmp_path))
    assert np.array_equal(tokens_of(cache), tokens_of(fb.open_cache(root)))
    fresh = TieredStore(LocalStore(tmp_path / "other"), far)
    with pytest.raises(StoreUnavailable, match="cut off"):
        fb.open_cache(fresh)


def test_an_earlier_cache_at_the_same_address_is_not_opened_offline(far: FarFolder, tmp_path: Path) -> None:
    fb.open_cache(tiered(far, tmp_path))
    (kept,) = (tmp_path / "tier" / "caches").glob("*/documents/generations*")
    shutil.copy(kept, kept.with_name(kept.name.replace("000000", "000007")))  # as of a cache with more generations
    rows = tokens_of(fb.open_cache(tiered(far, tmp_path)))
    Path(f"{far.address}.offline").touch()
    cache = fb.open_cache(tiered(far, tmp_path))
    assert cache.generation.number == 0
    assert np.array_equal(tokens_of(cache), rows)


def test_a_document_that_is_damaged_in_the_tier_is_not_served_offline(far: FarFolder, tmp_path: Path) -> None:
    tokens_of(fb.open_cache(tiered(far, tmp_path)))
    Path(f"{far.address}.offline").touch()
    for path in (tmp_path / "tier" / "caches").glob("*/documents/generations*"):
        spoilt = bytearray(path.read_bytes())
        spoilt[len(spoilt) // 2] ^= 1
        path.write_bytes(spoilt)
    with pytest.raises(StoreUnavailable):
        fb.open_cache(tiered(far, tmp_path))


def test_a_newer_generation_is_seen_as_soon_as_the_far_store_answers(far: FarFolder, tmp_path: Path) -> None:
    fb.open_cache(tiered(far, tmp_path))
    Path(f"{far.address}.offline").touch()
    assert fb.open_cache(tiered(far, tmp_path)).generation.number == 0
    Path(f"{far.address}.offline").unlink()
    newer = fb.open_cache(far).generation.number
    assert fb.open_cache(tiered(far, tmp_path)).generation.number == newer


def test_caches_share_a_tier_and_are_cleaned_one_by_one(tmp_path: Path) -> None:
    stores = []
    for number in range(2):
        root = token_cache(tmp_path / f"cache-{number}", 20, chunk_rows=CHUNK)
        stores.append(tiered(FarFolder(root), tmp_path))
        tokens_of(fb.open_cache(stores[-1]))
    tier = TierFolder(tmp_path / "tier").begin()
    first, second = tier.caches()
    assert (first.chunks, second.chunks) == (4, 4)
    assert sorted([first.address, second.address]) == sorted(store.address for store in stores)
    mine = tmp_path / "tier" / "caches" / first.name / "chunks" / "notes.txt"
    mine.write_text("not a chunk")
    assert tier.clean(first.name) == first.bytes
    assert mine.read_text() == "not a chunk"
    assert [each.chunks for each in tier.caches() if each.name == second.name] == [4]
    assert len(tokens_of(fb.open_cache(stores[0]))) == 20


def test_cleaning_leaves_what_is_being_fetched_and_names_of_others(tmp_path: Path) -> None:
    tier, parts = TierFolder(tmp_path / "tier").begin(), tmp_path / "tier" / "caches" / "a" / "parts"
    with tier.filling("a", bytes(32)) as part:
        assert tier.admit(part, 100)
        (parts / "notes.txt").write_text("mine")
        tier.clean("a")
        assert sorted(path.name for path in parts.iterdir()) == [bytes(32).hex(), "notes.txt"]
        assert tier.used_bytes() == 100
    tier.clean("a")
    assert [path.name for path in parts.iterdir()] == ["notes.txt"]
    assert tier.used_bytes() == 0


def test_a_folder_with_other_files_is_not_made_a_tier(far: FarFolder, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "thesis.txt").write_text("mine")
    with pytest.raises(TierUnusable, match="it has files and is not a tier\nhint: choose an empty folder"):
        tiered(far, tmp_path)
    assert os.listdir(tmp_path / "tier") == ["thesis.txt"]


def test_a_tier_on_a_network_file_system_is_refused(
    far: FarFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "file_system", lambda path: "nfs4")
    with pytest.raises(
        TierUnusable, match=r"network file system \(nfs4\), and a tier is a local disk\nhint: choose a folder"
    ):
        tiered(far, tmp_path)


def test_a_folder_that_another_process_is_making_a_tier_of_is_one(far: FarFolder, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / temporary_name()).write_bytes(b"half of a marker")
    assert len(fb.open_cache(tiered(far, tmp_path))) == ROWS


def test_nothing_is_admitted_below_the_free_space_reserve(
    root: Path, far: FarFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "RESERVE_SHARE", 1.0)
    monkeypatch.setattr(folder_module, "RESERVE_BYTES", 1 << 60)
    store = tiered(far, tmp_path)
    assert np.array_equal(tokens_of(fb.open_cache(store)), tokens_of(fb.open_cache(root)))
    assert kept_files(tmp_path) == []


def test_a_full_disk_is_one_line(tmp_path: Path, root: Path) -> None:
    code = (
        "import resource, sys, forebay as fb\n"
        "cache = fb.open_cache(sys.argv[1], tier=sys.argv[2], tier_bytes=0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"  # a write beyond it fails as on a full disk
        "try:\n    cache[0]\nexcept fb.errors.StoreFull as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(root), str(tmp_path / "tier")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "the disk of the tier is full" in done.stdout
    assert done.stdout.count("\n") == 2


def test_a_warm_tier_is_used_when_its_disk_is_full(
    root: Path, far: FarFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_of(fb.open_cache(tiered(far, tmp_path)))
    newer = json.dumps({"name": "stories"}).encode()
    far.replace("recipes/other.json", [newer])  # a document that the tier has no room for

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forebay.store.local._write_all", full)
    store = tiered(far, tmp_path)
    assert np.array_equal(tokens_of(fb.open_cache(store)), tokens_of(fb.open_cache(root)))
    assert store.read("recipes/other.json") == store.read("recipes/other.json") == newer
    assert store.transfers().fetched == 0


class SlowChunks(FarFolder):
    def sent(self, key: str, start: int, value: bytes) -> bytes:
        if layout.parse_chunk(key):
            time.sleep(0.2)  # time for others to ask as well
        return value


def test_threads_of_a_process_fetch_a_passing_chunk_once(root: Path, far: FarFolder, tmp_path: Path) -> None:
    key, value, expect = first_chunk(far)
    slow = SlowChunks(far.address)
    store, together = tiered(slow, tmp_path, limit=0), threading.Barrier(8, timeout=600)
    found: list[memoryview] = []

    def view() -> None:
        together.wait()
        found.append(store.view(key, expect=expect))

    threads = [threading.Thread(target=view) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slow.reads == [key]
    assert all(one == value for one in found)


def read_in_a_process(far: FarFolder, tier: str, results: "multiprocessing.Queue[tuple[int, bytes]]") -> None:
    cache = fb.open_cache(TieredStore(LocalStore(tier), far))
    tokens = tokens_of(cache)
    results.put((cache.store.transfers().fetched, tokens.tobytes()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_processes_of_a_machine_fetch_each_chunk_once(root: Path, far: FarFolder, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[int, bytes]] = context.Queue()
    arguments = (far, str(tmp_path / "tier"), results)
    processes = [context.Process(target=read_in_a_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    assert sum(fetched for fetched, _ in found) == ROWS // CHUNK
    assert {tokens for _, tokens in found} == {tokens_of(fb.open_cache(root)).tobytes()}


SLOW_FILLER = """
import sys, time, numpy as np, forebay as fb
from tests.store.far_stores import FarFolder
from forebay.store import LocalStore
from forebay.store import tiered
tiered.RANGE_BYTES = 512
class Slow(FarFolder):
    def sent(self, key, start, value):
        time.sleep(0.002)
        return value
print("ready", flush=True)
cache = fb.open_cache(tiered.TieredStore(LocalStore(sys.argv[2]), Slow(sys.argv[1])))
cache.read(np.arange(len(cache)), ["tokens"])
"""


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.long)])
def test_a_killed_filler_leaves_nothing_wrong(root: Path, far: FarFolder, tmp_path: Path, kills: int) -> None:
    right, dice = tokens_of(fb.open_cache(root)), random.Random(3)
    for number in range(kills):
        tier = tmp_path / f"tier-{number}"
        filler = subprocess.Popen(
            [sys.executable, "-c", SLOW_FILLER, far.address, str(tier)], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        assert filler.stdout is not None
        filler.stdout.readline()
        end = time.monotonic() + 600
        while not list(tier.glob("caches/*/*/*")) and time.monotonic() < end and filler.poll() is None:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.15))
        os.kill(filler.pid, signal.SIGKILL)
        filler.wait()
        filler.stdout.close()
        for path in tier.glob("caches/*/chunks/*"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        store = TieredStore(LocalStore(tier), far)
        assert np.array_equal(tokens_of(fb.open_cache(store)), right)
        assert store.tier.used_bytes() == sum(chunk_sizes(root))
        assert not list(tier.glob("caches/*/parts/*"))


@pytest.mark.parametrize(("address", "spelled"), [("far", "./far/"), ("memory://tiers/far", "memory://tiers/far/")])
def test_a_cache_has_one_share_of_a_tier_in_any_spelling_and_from_any_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, spelled: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fb.copy(root, address)
    opened = [fb.open_cache(one, tier=tmp_path / "tier") for one in (address, spelled)]
    monkeypatch.chdir("/")
    if address == "far":  # a store in memory stays in its process
        opened.append(pickle.loads(pickle.dumps(opened[0])))
    for cache in opened:
        tokens_of(cache)
    (share,) = tier_contents(tmp_path / "tier").caches
    monkeypatch.chdir(tmp_path)
    assert clean_tier(tmp_path / "tier", spelled).caches == (share.address,)


def test_a_tiered_store_and_its_cache_are_pickled_by_address(root: Path, far: FarFolder, tmp_path: Path) -> None:
    cache = pickle.loads(pickle.dumps(fb.open_cache(tiered(far, tmp_path))))
    assert np.array_equal(tokens_of(cache), tokens_of(fb.open_cache(root)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("lock", ["room", "part"])
def test_a_process_forked_while_a_thread_has_a_lock_does_not_keep_it(tmp_path: Path, lock: str) -> None:
    tier = TierFolder(tmp_path / "tier").begin()
    is_locked, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with tier._taken() if lock == "room" else tier.filling("cache", bytes(32)):
            is_locked.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    is_locked.wait(60)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    may_end.set()
    thread.join()
    freed = threading.Thread(target=lambda: (tier.used_bytes(), tier.filling("cache", bytes(32)).__enter__()))
    freed.daemon = True
    try:
        freed.start()
        freed.join(20)
        assert not freed.is_alive(), "the forked process holds the lock"
    finally:
        child.kill()
        child.join()
        freed.join(20)


def test_a_forged_size_does_not_make_a_tier_ask_for_ever(far: FarFolder, tmp_path: Path) -> None:
    store, key = tiered(far, tmp_path, limit=1 << 20), chunk_key(Path(far.address), "tokens", 0)
    with pytest.raises(BadCopy):
        store.view(key, expect=Expected(1 << 40, bytes(32)))
    assert len(far.reads) == 2, "the object ends in its first range, both times"


def test_a_document_is_fetched_no_further_than_its_readers_allow(far: FarFolder, tmp_path: Path) -> None:
    huge = Path(far.address) / layout.CACHE
    huge.chmod(0o644)
    os.truncate(huge, 1 << 40)
    with pytest.raises(Damaged, match="more than"):
        read_cache_document(tiered(far, tmp_path))


def test_threads_that_meet_the_same_bad_copy_all_get_the_rows(root: Path, far: FarFolder, tmp_path: Path) -> None:
    right = tokens_of(fb.open_cache(root))
    cache = fb.open_cache(tiered(far, tmp_path))
    tokens_of(cache)
    for kept in kept_files(tmp_path):
        spoilt = bytearray(kept.read_bytes())
        spoilt[4096:] = bytes(byte ^ 1 for byte in spoilt[4096:])
        kept.write_bytes(spoilt)
    cache = fb.open_cache(tiered(far, tmp_path))
    met, reject = threading.Barrier(2, timeout=600), cache._drop_copy

    def together(error: ChunkCorrupt) -> None:
        met.wait()
        reject(error)

    cache._drop_copy = together  # both threads have met the bad copy before either drops it
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: cache.read([0], ["tokens"])["tokens"], range(2)))
    assert all(np.array_equal(rows, right[:1]) for rows in found)
