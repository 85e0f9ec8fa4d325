"""Small chunks with one leaf forged, and every sum and digest made right again: rows or an error, nothing else."""

import json
import subprocess
import sys

import pytest
from tests.builders import REPOSITORY, script_environment

MUTATIONS = 60  # per kind; `python -m tests.integration.fuzz_process zstd 2 5000` tries more


@pytest.mark.parametrize("kind", ["none", "lz4", "zstd", "tokens", "presence"])
def test_a_forged_leaf_gives_rows_or_says_which_chunk_is_corrupt(kind: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.integration.fuzz_process", kind, "1", str(MUTATIONS)],
        env=script_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    last = ran.stderr.splitlines()[-1:]
    assert ran.returncode == 0, f"ended with {ran.returncode} at: {last}"
    *unexpected, summary = map(json.loads, ran.stdout.splitlines())
    assert unexpected == []
    assert sum(summary["endings"].values()) == MUTATIONS
    assert summary["endings"]["ChunkCorrupt"] > MUTATIONS // 5
    assert summary["megabytes"] < 1000
