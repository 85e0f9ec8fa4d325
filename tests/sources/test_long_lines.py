"""A line of any length is in memory a few times over, not more."""

import json
import tracemalloc

import pytest
from tests.sources.measured import measure_reading
from tests.sources.written import write

import forebay as fb
from forebay.source import samples_of
from forebay.testing.kind_contracts import parts_of

LENGTH = 30_000_000
# The last number is how often a long line may be in memory: 2 or 3 times, and what the allocator keeps.
KINDS = {
    "lines": ("lines({path})", lambda text: text.replace("\n", " ").encode() + b"\n", 2.3),
    "text": ("text({path}, separator='|')", lambda text: text.encode() + b"|", 2.3),
    "jsonl": ("jsonl({path})", lambda text: json.dumps({"text": text}).encode() + b"\n", 3.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_line_takes_a_small_multiple_of_its_size(tmp_path, kind, ending):
    call, line, times = KINDS[kind]
    content = line("some words and\n an escape " * (LENGTH // 26))
    path = write(tmp_path, f"a.txt{ending}", content * 2)
    samples, _, peak = measure_reading("fb.sources." + call.format(path=repr(str(path))), every=1 << 20)
    assert samples == 2
    assert peak < times * len(content)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("behind", [b"", b"{broken\n"])
def test_while_a_long_document_is_worked_on_it_is_in_memory_once(tmp_path, kind, behind):
    call, line, _ = KINDS[kind]
    path = write(tmp_path, "a.txt", line("some words " * 500_000) + behind)
    source = eval("fb.sources." + call.format(path=repr(str(path))), {"fb": fb})
    (part, *_) = parts_of(source, 1 << 40, 1 << 40)
    tracemalloc.start()
    try:
        sample = next(iter(samples_of(source, part)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * len(sample.data)
