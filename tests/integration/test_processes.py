"""A cache read by many threads and by other processes; each in a process of its own, so that a crash is seen."""

from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_path
from tests.helpers.layer_recipes import stored_cache
from tests.helpers.processes import PythonProcess, script_environment

import forebay as fb
from forebay.columns import Array, Column, Ragged
from forebay.format.chunk_file import ChunkFile

NUMBERED = (
    Column(name="plain", dtype="int64", shape=(3,), rows_per_block=4),
    Column(name="other", dtype="int64", rows_per_block=5),
    Column(name="packed", dtype="int64", codec="zstd", rows_per_block=4),
    Column(name="ragged", dtype="int64", ragged=True, rows_per_block=3),
)


def run(*arguments: object) -> str:
    """The output of a command of `reading_process`, which must end well."""
    env = script_environment() | {"PYTHONWARNINGS": "error"}
    process = PythonProcess("-m", "tests.integration.reading_process", *map(str, arguments), env=env)
    out, err = process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out


def numbered_chunks(chunks: int, rows: int) -> list[dict[str, Array | Ragged]]:
    """Rows that say in every column which row they are."""
    made: list[dict[str, Array | Ragged]] = []
    for chunk in range(chunks):
        numbers = np.arange(chunk * rows, (chunk + 1) * rows, dtype=np.int64)
        made.append(
            {
                "plain": np.stack([numbers, numbers, numbers], axis=1),
                "other": numbers * 2,
                "packed": numbers * 3,
                "ragged": Ragged(np.repeat(numbers, numbers % 3), np.concatenate([[0], np.cumsum(numbers % 3)])),
            }
        )
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes") / "cache"
    stored_cache(fb.LocalStore(path), NUMBERED, numbered_chunks(40, 25))
    return path


@pytest.mark.parametrize("max_maps", [1, pytest.param(2, marks=pytest.mark.long), 9])
def test_many_threads_read_right_rows_while_maps_are_closed_under_them(root: Path, max_maps: int) -> None:
    reads = int(run("hammer", root, 8, 1, max_maps).split()[0])
    assert reads >= 8, "every thread has read"


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_other_processes_read_the_same_rows(root: Path, method: str) -> None:
    assert run("children", root, method) == "same rows\n"


def test_a_forked_process_checks_what_its_parent_had_checked(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    stored_cache(fb.LocalStore(path), NUMBERED, numbered_chunks(2, 25))
    chunk = chunk_path(path, "stored", 0)
    position = ChunkFile(memoryview(chunk.read_bytes()), "").tensors["plain"].start
    said = run("fork-checks-again", path, chunk, position)
    assert f"block 0 of column 'plain' in chunk 0 of layer 'stored' in '{path}'" in said


def test_memory_of_its_own_does_not_grow_with_the_rows_read(tmp_path: Path) -> None:
    chunk = {"x": np.random.default_rng(0).integers(0, 255, (2048, 4096), np.uint8)}
    stored_cache(fb.LocalStore(tmp_path / "cache"), [Column(name="x", dtype="uint8", shape=(4096,))], [chunk] * 16)
    early, late = map(int, run("anonymous-memory", tmp_path / "cache").split())
    assert late - early < 4 * 1024 * 1024, "128 MiB were read"
