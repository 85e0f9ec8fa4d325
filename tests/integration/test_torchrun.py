"""Real processes under torchrun, on gloo: however many they are, the global batches are the same."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.builders import REPOSITORY, script_environment
from tests.token_caches import token_cache

import forebay as fb
from forebay.torch import Loader

ROWS, BATCH, SEED = 200, 8, 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("torchrun"), ROWS)


@pytest.fixture(scope="module")
def uninterrupted(root: Path) -> list[list[int]]:
    """The rows of every global batch of an epoch, as one process without torchrun has them."""
    return rows_of(Loader(fb.open_cache(root), global_batch_size=BATCH, seed=SEED))


@pytest.fixture(scope="module")
def stopped(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two processes that stop after seven batches."""
    return run_processes(2, root, tmp_path_factory.mktemp("stopped"), take=7)


def run_processes(
    count: int, root: Path, folder: Path, *, take: int, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    task = {"root": str(root), "batch": BATCH, "seed": SEED, "take": take, "state": state}
    task["answer"] = str(folder / "answer.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    run = subprocess.run(
        [*command, "-m", "tests.torchrun_batches", json.dumps(task)],
        env=script_environment() | {"OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(Path(task["answer"]).read_text())
    return answer


def rows_of(loader: Loader) -> list[list[int]]:
    return [sorted(batch["tokens"][:, 0].tolist()) for batch in loader]


def global_batches(answer: dict[str, Any]) -> list[list[int]]:
    return [sorted(row for share in shares for row in share) for shares in zip(*answer["shares"], strict=True)]


def test_two_processes_share_the_batches_of_one(stopped: dict[str, Any], uninterrupted: list[list[int]]) -> None:
    assert global_batches(stopped) == uninterrupted[:7]
    assert all(len(batch) == BATCH // 2 for share in stopped["shares"] for batch in share)


def test_all_processes_have_the_same_small_state(stopped: dict[str, Any]) -> None:
    first, second = stopped["states"]
    assert first == second
    assert len(json.dumps(first)) < 1000


@pytest.mark.long
def test_four_processes_go_on_with_the_same_batches(
    root: Path, stopped: dict[str, Any], uninterrupted: list[list[int]], tmp_path: Path
) -> None:
    resumed = run_processes(4, root, tmp_path, take=ROWS, state=stopped["states"][0])
    assert global_batches(stopped) + global_batches(resumed) == uninterrupted
    assert len(resumed["shares"]) == 4


def test_one_process_goes_on_with_the_same_batches(
    root: Path, stopped: dict[str, Any], uninterrupted: list[list[int]]
) -> None:
    loader = Loader(fb.open_cache(root), global_batch_size=BATCH, seed=SEED)
    loader.load_state_dict(stopped["states"][1])
    assert global_batches(stopped) + rows_of(loader) == uninterrupted
