"""Small chunks with one leaf forged, and every sum and digest made right again: rows or an error, nothing else."""

import json

import pytest
from tests.helpers.processes import PythonProcess

# Per kind; `python -m tests.integration.fuzz_process zstd 2 5000` tries more.
MUTATIONS = [25, pytest.param(300, marks=pytest.mark.long)]


@pytest.mark.parametrize("mutations", MUTATIONS)
@pytest.mark.parametrize("kind", ["none", "lz4", "zstd", "tokens", "presence"])
def test_a_forged_leaf_gives_rows_or_says_which_chunk_is_corrupt(kind: str, mutations: int) -> None:
    ran = PythonProcess("-m", "tests.integration.fuzz_process", kind, "1", str(mutations))
    out, err = ran.communicate()
    last = err.splitlines()[-1:]
    assert ran.returncode == 0, f"ended with {ran.returncode} at: {last}"
    *unexpected, summary = map(json.loads, out.splitlines())
    assert unexpected == []
    assert sum(summary["endings"].values()) == mutations
    assert summary["endings"]["ChunkCorrupt"] > mutations // 5
    assert summary["megabytes"] < 1000
