"""How much memory reading takes, measured in a process of its own."""

import subprocess
import sys

_SCRIPT = """
import gc, sys
import forebay as fb
from forebay.source import samples_of
from forebay.testing.kind_contracts import parts_of

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

source = {source}
parts = parts_of(source, {every}, {every})
gc.collect()
before = resident("VmRSS")
samples = size = 0
for part in parts:
    for sample in samples_of(source, part):
        samples, size = samples + 1, size + len(sample.data)
        del sample  # what is done with it is no matter of the source
print(samples, size, resident("VmHWM") - before)
"""


def measure_reading(source: str, every: int) -> tuple[int, int, int]:
    """Samples, their length, and by how many bytes the peak of memory is above what planning left."""
    script = _SCRIPT.format(source=source, every=every)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    samples, size, peak = map(int, run.stdout.split())
    return samples, size, peak
