"""A folder as a store: what a writer that was killed, or ran out of room, leaves behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.store import Entry, LocalStore

WRITER = """
import sys
from forebay.store import LocalStore

class Endless:
    def __len__(self):
        return 2
    def __iter__(self):
        yield bytes(3_000_000)
        print("half written", flush=True)
        sys.stdin.read()
        yield b"the other half"

LocalStore(sys.argv[1]).create("layers/x/000000.safetensors", Endless())
"""

KILLED_AFTER_LINK = """
import os, signal, sys
from forebay.store import LocalStore
os.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
LocalStore(sys.argv[1]).create("layers/x", [b"whole"])
"""

NO_ROOM = """
import errno, resource, signal, sys
from forebay.store import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = LocalStore(sys.argv[1])
for write in (store.create, store.replace):
    try:
        write("layers/x", [bytes(1 << 19), bytes(1 << 20)])
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def wait_until_zombie(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)


@pytest.fixture
def writer(tmp_path):
    """A real process in the middle of writing a value."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half written\n"
        yield process
        process.kill()


def test_the_file_of_a_live_writer_is_neither_a_key_nor_a_leftover(tmp_path, writer):
    store = LocalStore(tmp_path)
    assert [path.stat().st_size for path in files_below(tmp_path)] == [3_000_000]
    assert list(store.keys("")) == []
    assert list(store.leftovers()) == []


def test_the_file_of_a_killed_writer_is_a_leftover_and_never_a_key(tmp_path, writer):
    writer.send_signal(signal.SIGKILL)
    wait_until_zombie(writer.pid)
    store = LocalStore(tmp_path)
    (as_zombie,) = store.leftovers()
    writer.wait()
    (leftover,) = store.leftovers()
    assert leftover == as_zombie == Entry(leftover.key, 3_000_000)
    assert list(store.keys("")) == list(store.keys("layers/x/")) == []
    store.delete(leftover.key)
    assert files_below(tmp_path) == []


def test_a_writer_that_goes_on_publishes_the_whole_value(tmp_path, writer):
    writer.communicate("")
    assert writer.returncode == 0
    assert list(LocalStore(tmp_path).keys("")) == [Entry("layers/x/000000.safetensors", 3_000_014)]
    assert len(files_below(tmp_path)) == 1


def test_a_writer_killed_after_publishing_leaves_a_sound_value(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_LINK, tmp_path])
    assert killed.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert store.read("layers/x") == b"whole"
    for leftover in list(store.leftovers()):
        store.delete(leftover.key)
    assert [path.name for path in files_below(tmp_path)] == ["x"]
    assert store.read("layers/x") == b"whole"


def test_a_write_that_finds_no_room_leaves_nothing_and_says_so(tmp_path):
    said = subprocess.run([sys.executable, "-c", NO_ROOM, tmp_path], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["EFBIG", "EFBIG"]
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("name", [".tmp-0123456789ab-7-7-beefbeef", ".tmp-of somebody else"])
def test_a_temporary_file_of_another_host_is_a_leftover_after_a_day(tmp_path, name):
    (tmp_path / "layers").mkdir()
    temporary = tmp_path / "layers" / name
    temporary.write_bytes(b"abc")
    store = LocalStore(tmp_path)
    assert list(store.leftovers()) == []
    yesterday = time.time() - 25 * 3600
    os.utime(temporary, (yesterday, yesterday))
    assert list(store.leftovers()) == [Entry(f"layers/{name}", 3)]
    assert list(store.keys("")) == []


def test_a_value_is_a_plain_file_under_its_key(tmp_path):
    LocalStore(tmp_path / "root").create("a/b/c.json", [b"{", b"}"])
    assert (tmp_path / "root/a/b/c.json").read_bytes() == b"{}"
    assert (tmp_path / "root/a/b/c.json").stat().st_nlink == 1


def test_it_travels_as_its_address(tmp_path):
    store = LocalStore(tmp_path)
    store.create("a", [b"x"])
    again = pickle.loads(pickle.dumps(store))
    assert again.address == store.address == str(tmp_path)
    assert again.read("a") == b"x"


def test_it_knows_the_room_left_before_its_folder_exists(tmp_path):
    free = LocalStore(tmp_path / "not" / "there").free_bytes()
    assert free is not None
    assert free > 0
    assert not (tmp_path / "not").exists()


def test_reading_a_folder_leaves_no_descriptor_open(tmp_path):
    store = LocalStore(tmp_path)
    store.create("folder/key", [b"x"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(KeyError):
            store.read("folder")
        with pytest.raises(KeyError):
            store.map("folder")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_was_made_but_whose_answer_was_lost_is_a_creation(tmp_path, monkeypatch):
    link = os.link

    def lossy(source, target, **options):
        link(source, target, **options)
        link(source, target, **options)  # the file system asks again, and finds its own work

    monkeypatch.setattr(os, "link", lossy)
    store = LocalStore(tmp_path)
    assert store.create("key", [b"value"])
    monkeypatch.undo()
    assert store.read("key") == b"value"
    assert not store.create("key", [b"another"])
