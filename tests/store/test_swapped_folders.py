"""Somebody else exchanges a folder of a cache for a link while forebay works in it: nothing outside is touched."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.errors import ForebayError
from forebay.store import LocalStore, Missing

ROUNDS = 1500

# Exchanges a folder and a link, each time in one step, until it is killed.
SWAPPER = """
import ctypes, os, sys
libc, here, exchange = ctypes.CDLL(None, use_errno=True), -100, 2
folder, link = map(os.fsencode, sys.argv[1:])
while True:
    for _ in range(2):
        if libc.renameat2(here, folder, here, link, exchange):
            sys.exit(os.strerror(ctypes.get_errno()))
    print(flush=True)
"""


def canaries(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody else with the names that a cache uses, which must stay as it is."""
    folder = tmp_path / "outside"
    for name in ("raw/value", "raw/key", "value", "key"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"precious")
    before, entries = canaries(folder), sorted(folder.rglob("*"))
    yield folder
    assert canaries(folder) == before
    assert sorted(folder.rglob("*")) == entries


@pytest.mark.parametrize("name", ["layers", "layers/raw"])
@pytest.mark.parametrize("verb", ["create", "replace", "delete", "read"])
def test_a_folder_that_is_swapped_for_a_link_leads_nowhere(tmp_path: Path, outside: Path, name: str, verb: str) -> None:
    root, link = tmp_path / "root", tmp_path / "link"
    (root / "layers/raw").mkdir(parents=True)
    link.symlink_to(outside / "raw" if name == "layers/raw" else outside)
    store = LocalStore(root)
    store.replace("layers/raw/value", [b"ours"])
    acts: dict[str, Callable[[int], object]] = {
        "create": lambda number: store.create(f"layers/raw/{number}", [b"ours"]),
        "replace": lambda number: store.replace("layers/raw/value", [b"ours"]),
        "delete": lambda number: store.delete("layers/raw/key"),
        "read": lambda number: check_ours(store, name),
    }
    command = [sys.executable, "-c", SWAPPER, str(root / name), str(link)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as swapper:
        assert swapper.stdout is not None
        try:
            for number in range(ROUNDS):
                assert swapper.stdout.readline() == "\n"  # it has swapped them, and does so meanwhile
                with suppress(ForebayError, OSError, Missing):
                    acts[verb](number)
        finally:
            swapper.kill()


def check_ours(store: LocalStore, name: str) -> None:
    """A layer's folder may be a link to be read; no other folder may."""
    assert store.read("layers/raw/value") in ((b"ours",) if name == "layers" else (b"ours", b"precious"))
    assert all(entry.size == 4 for entry in store.entries("layers/raw/") if name == "layers")


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


def test_a_failed_write_names_the_value_and_not_its_temporary_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("layers/raw/value", [b"x"])
    code = (
        "import resource, signal, sys\n"
        "from forebay.store import LocalStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))\n"
        "for write in (LocalStore(sys.argv[1]).create, LocalStore(sys.argv[1]).replace):\n"
        "    try:\n"
        "        write('layers/raw/other', [bytes(1 << 20)])\n"
        "    except OSError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all(line.endswith(f"File too large: '{tmp_path}/layers/raw/other'") for line in said)
