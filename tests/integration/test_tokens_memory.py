"""What a worker holds while it makes token rows: bounded by a chunk, or by one document that is larger than a chunk."""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

import pytest
import zstandard
from tests.helpers.builders import children_of
from tests.helpers.processes import PythonProcess

MB = 1_000_000
# For words such as these: the line, its text, its ids, and some 250 MB that `fastokens` takes besides. Text that gives
# twice the tokens takes up to 950 MB.
LIMITS = {30 * MB: 340 * MB, 100 * MB: 700 * MB}
SENTENCE = (
    "Water that flows (see above) through the channel rises slowly; however, at the gate nothing moves before 1,024"
)

BUILD = """
import json, sys
import forebay as fb
recipe = fb.TokenRecipe(tokenizer="gpt2")
report = fb.build(sys.argv[2], fb.sources.jsonl(sys.argv[1], max_sample_bytes=256 << 20), recipe, workers=1)
figures = fb.info(sys.argv[2]).layers[0].statistics
print(json.dumps({"chunks": report.chunks, "failures": report.failures, **figures}))
"""


def build(source: Path, root: Path) -> tuple[dict[str, int], int]:
    """What a build with one worker came to, and the most that the worker ever held."""
    builder = PythonProcess("-c", BUILD, str(source), str(root))
    peak = watch_worker(builder)
    out, err = builder.communicate()
    assert builder.returncode == 0, err
    return json.loads(out), peak


def watch_worker(builder: "subprocess.Popen[str]") -> int:
    """The kernel's own mark of the most that a child held, looked at until the builder ends."""
    most = 0
    while builder.poll() is None:
        with contextlib.suppress(OSError):
            most = max([most, *map(peak_of, children_of(builder.pid))])
        time.sleep(0.02)
    return most


def peak_of(pid: int) -> int:
    """0 where the process is gone, or is not the worker yet but still a copy of the builder."""
    with contextlib.suppress(OSError, IndexError):
        if b"engine.local" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return 0


def words(size: int) -> str:
    """Text of so many bytes, in an order of words that does not repeat."""
    noise = random.Random(0)
    return " ".join(noise.choices(SENTENCE.split(), k=size // 3))[:size]


@pytest.mark.parametrize(
    ("size", "suffix"),
    [(30 * MB, ".jsonl.zst"), *(pytest.param(100 * MB, to, marks=pytest.mark.long) for to in (".jsonl", ".jsonl.zst"))],
)
def test_a_large_document_in_one_line_is_packed_within_the_limit(tmp_path, capsys, size, suffix):
    line = json.dumps({"text": words(MB) * (size // MB)}).encode() + b"\n"
    source = tmp_path / f"large{suffix}"
    source.write_bytes(line if suffix == ".jsonl" else zstandard.compress(line, 1))
    del line
    report, peak = build(source, tmp_path / "cache")
    with capsys.disabled():
        print(f"\na document of {size // MB} MB, {suffix}: the worker held at most {peak / MB:.0f} MB")
    assert report["characters"] == size
    assert (report["documents"], report["documents_split"], report["failures"]) == (1, 1, 0)
    assert report["tokens"] == report["tokens_in"] > size / 10
    assert size < peak < LIMITS[size]


@pytest.mark.slow
def test_the_peak_of_a_worker_does_not_grow_with_the_corpus(tmp_path, capsys):
    text = words(MB)
    lines = "".join(json.dumps({"text": text[at : at + 2000]}) + "\n" for at in range(0, MB, 2000))
    peaks = {}
    for size in (8, 24):
        source = tmp_path / f"{size}.jsonl"
        source.write_text(lines * size)
        report, peaks[size] = build(source, tmp_path / f"cache-{size}")
        assert report["documents"] == size * MB / 2000
    with capsys.disabled():
        print(f"\nthe worker held at most {peaks[8] / MB:.0f} MB for 8 MB, {peaks[24] / MB:.0f} MB for 24 MB")
    assert peaks[24] < peaks[8] + 16 * MB
