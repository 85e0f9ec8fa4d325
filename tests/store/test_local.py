"""A folder as a store: what a writer that was killed, or ran out of room, leaves behind."""

import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.errors import Damaged, ForebayError, StoreRefused
from forebay.store import Entry, LocalStore, Missing
from forebay.store.base import holds

WRITER = """
import sys
from forebay.store import LocalStore

class Endless:
    def __len__(self):
        return 2
    def __iter__(self):
        yield bytes(3 << 20)
        yield b"more"
        print("half written", flush=True)
        sys.stdin.read()
        yield b"the other half"

LocalStore(sys.argv[1]).create("layers/x/000000.safetensors", Endless())
"""

KILLED_AFTER_LINK = """
import os, signal, sys
from forebay.store import LocalStore
os.unlink = lambda path, **_: os.kill(os.getpid(), signal.SIGKILL)
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
        print(errno.errorcode[error.errno], error.filename)
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
    assert [path.stat().st_size for path in files_below(tmp_path)] == [3 << 20]
    assert list(store.entries("")) == []
    assert list(store.leftovers()) == []


def test_the_file_of_a_killed_writer_is_a_leftover_and_never_a_key(tmp_path, writer):
    writer.send_signal(signal.SIGKILL)
    wait_until_zombie(writer.pid)
    store = LocalStore(tmp_path)
    (as_zombie,) = store.leftovers()
    writer.wait()
    (leftover,) = store.leftovers()
    assert leftover == as_zombie == Entry(leftover.key, 3 << 20)
    assert list(store.entries("")) == list(store.entries("layers/x/")) == []
    store.delete(leftover.key)
    assert files_below(tmp_path) == []


def test_a_writer_that_goes_on_publishes_the_whole_value(tmp_path, writer):
    writer.communicate("")
    assert writer.returncode == 0
    assert list(LocalStore(tmp_path).entries("")) == [Entry("layers/x/000000.safetensors", (3 << 20) + 18)]
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


def test_a_write_without_space_leaves_nothing_and_names_the_value_not_its_temporary_file(tmp_path):
    ran = subprocess.run([sys.executable, "-c", NO_ROOM, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"EFBIG {tmp_path}/layers/x"] * 2
    assert files_below(tmp_path) == []


def test_a_temporary_file_of_another_host_is_a_leftover_after_a_day(tmp_path):
    name = ".tmp-0123456789ab-7-7-beefbeef"
    (tmp_path / "layers").mkdir()
    temporary = tmp_path / "layers" / name
    temporary.write_bytes(b"abc")
    store = LocalStore(tmp_path)
    assert list(store.leftovers()) == []
    yesterday = time.time() - 25 * 3600
    os.utime(temporary, (yesterday, yesterday))
    assert list(store.leftovers()) == [Entry(f"layers/{name}", 3)]
    assert list(store.entries("")) == []


@pytest.mark.parametrize(
    "name",
    [".tmp-of somebody else", ".tmp-", ".tmp-0123456789ab-7-7-beefbee", ".tmp-0123456789ab-7-7-beefbeef.txt",
     ".tmp-0123456789ab-7-beefbeef", ".tmp-0123456789ab-²-7-beefbeef", "x.tmp-0123456789ab-7-7-beefbeef"],
)  # fmt: skip
def test_a_name_that_only_looks_temporary_is_never_a_leftover(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    os.utime(tmp_path / name, (0, 0))
    assert list(LocalStore(tmp_path).leftovers()) == []
    assert [entry.key for entry in LocalStore(tmp_path).entries("")] == [name]


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


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_below(folder)}


@pytest.fixture
def outside(tmp_path):
    """A folder of somebody else, which must stay as it is."""
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    for name in ("000000.1.json", "thesis.txt", ".tmp-0123456789ab-7-7-beefbeef", "deep/more.txt"):
        (folder / name).write_bytes(b"precious")
        os.utime(folder / name, (0, 0))
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "name", ["claims/raw", "claims", "generations", "plan", "layers", "layers/raw", "layers/raw/sub"]
)
def test_a_linked_folder_is_neither_read_nor_written_through(tmp_path, outside, name):
    root = tmp_path / "root"
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(outside)
    store = LocalStore(root)
    assert list(store.entries("")) == list(store.leftovers()) == []
    for act in (
        lambda: store.read(f"{name}/thesis.txt"),
        lambda: store.view(f"{name}/thesis.txt"),
        lambda: list(store.entries(f"{name}/")),
        lambda: store.create(f"{name}/new", [b"x"]),
        lambda: store.replace(f"{name}/thesis.txt", [b"x"]),
        lambda: store.delete(f"{name}/thesis.txt"),
    ):
        with pytest.raises(StoreRefused, match=f"'{name}' is a symbolic link"):
            act()


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    store = LocalStore(tmp_path / "root")
    assert store.create("layers/raw/x", [b"value"])
    assert list(store.entries("")) == [Entry("layers/raw/x", 5)]
    store.delete("layers/raw/x")
    assert files_below(tmp_path / "real") == []


@pytest.mark.parametrize("target", ["outside/thesis.txt", "nowhere", "root/key"])
def test_a_link_in_place_of_a_value_is_an_error_and_is_not_followed(tmp_path, outside, target):
    root = tmp_path / "root"
    root.mkdir()
    (root / "key").symlink_to(tmp_path / target)
    store = LocalStore(root)
    assert list(store.entries("")) == []
    for act in (lambda: store.read("key"), lambda: store.view("key"), lambda: store.create("key", [b"x"])):
        with pytest.raises(Damaged, match=r"key' is not a file forebay wrote: it is a symbolic link"):
            act()
    store.delete("key")
    assert (root / "key").is_symlink()
    store.replace("key", [b"whole"])
    assert store.read("key") == b"whole"
    assert not (root / "key").is_symlink()


def test_a_folder_in_place_of_a_value_is_no_value_and_stays(tmp_path):
    store = LocalStore(tmp_path)
    store.create("000000.json/inside", [b"x"])
    with pytest.raises(Missing):
        store.read("000000.json")
    for act in (lambda: store.create("000000.json", [b"x"]), lambda: store.replace("000000.json", [b"x"])):
        with pytest.raises(Damaged, match="it is a folder, not a regular file"):
            act()
    store.delete("000000.json")
    assert snapshot(tmp_path) == {"000000.json/inside": b"x"}


def make_special(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_a_special_file_in_place_of_a_value_is_an_error_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    try:
        make_special(Path("key"), kind)
    except PermissionError:
        pytest.skip("only root makes devices")
    store = LocalStore(tmp_path)
    assert list(store.entries("")) == []
    for act in (
        lambda: store.read("key"), lambda: store.read("key", 0, 1), lambda: store.view("key"),
        lambda: holds(store, "key"), lambda: store.create("key", [b"x"]),
    ):  # fmt: skip
        with pytest.raises(Damaged, match=", not a regular file"):
            act()
    store.replace("key", [b"whole"])
    assert store.read("key") == b"whole"


def test_links_in_a_circle_and_deep_folders_end(tmp_path):
    (tmp_path / "layers/raw").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "layers/raw" / name).symlink_to(tmp_path / "layers/raw")
        (tmp_path / "layers" / name).symlink_to(tmp_path / "layers")
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "layers/raw/x").write_bytes(b"1")
    deep = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=deep)
        below = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    store = LocalStore(tmp_path)
    assert Entry("layers/raw/x", 1) in store.entries("")
    assert list(store.leftovers()) == []
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_a_file_in_place_of_a_folder_is_said(tmp_path):
    (tmp_path / "layers").write_bytes(b"not a folder")
    with pytest.raises(StoreRefused, match="layers' is not a folder\nhint: move it away"):
        LocalStore(tmp_path).create("layers/raw/x", [b"x"])
    with pytest.raises(Missing):
        LocalStore(tmp_path).read("layers/raw/x")
    LocalStore(tmp_path).delete("layers/raw/x")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_is_said(tmp_path, monkeypatch, code):
    def refused(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(
        StoreRefused, match=r"does not support hard links .*\nhint: choose a folder on another file system"
    ):
        LocalStore(tmp_path).create("key", [b"value"])
    assert files_below(tmp_path) == []


def test_a_file_system_that_syncs_no_folders_is_good_enough(tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files_only(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_only)
    assert LocalStore(tmp_path / "new").create("a/b", [b"value"])


def test_buffers_of_any_size_are_written_whole(tmp_path):
    sizes = [5, 0, (3 << 20) + 7, 1, 1 << 20, *[1] * 2000, (1 << 20) - 1]
    data = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    store = LocalStore(tmp_path)
    assert store.create("x", data)
    assert store.read("x") == b"".join(data)


def test_a_relative_root_stays_where_it_was_when_the_process_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("cache")
    store.create("layers/x", [b"one"])
    monkeypatch.chdir("/")
    assert store.read("layers/x") == b"one"
    assert Path(store.local_path("layers/x")).read_bytes() == b"one"
    assert Path(store.local_path("")).is_dir()


def test_working_leaves_no_descriptor_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store.create("layers/raw/value", [b"x"])
        store.replace("layers/raw/value", [b"x"])
        store.delete("layers/raw/value")
        store.delete("layers/none/value")
        assert list(store.entries("")) == list(store.entries("layers/")) == list(store.leftovers()) == []
        (tmp_path / "root/generations").symlink_to(tmp_path)
        for act in (lambda: store.read("generations/x"), lambda: store.replace("generations/x", [b"x"])):
            with pytest.raises(ForebayError):
                act()
        (tmp_path / "root/generations").unlink()
        next(store.entries(""), None)
    assert len(os.listdir("/proc/self/fd")) == before
