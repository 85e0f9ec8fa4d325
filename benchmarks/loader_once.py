"""What can be measured once per process: the first batch, the batch after a resume, and the memory used.

python -m benchmarks.loader_once ROOT COLUMN…     prints one line of JSON; without columns, whole training batches
"""

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import forebay as fb
from forebay.torch import Loader

BATCH = 32
READ_BATCHES = 20_000


def main(root: str, *columns: str) -> None:
    started = time.perf_counter()
    loader = _loader(root, columns)
    next(iter(loader))
    first = time.perf_counter() - started

    at_ninety_percent = loader.state_dict() | {"position": len(loader) * BATCH // 10 * 9}
    resumed = _loader(root, columns)
    started = time.perf_counter()
    resumed.load_state_dict(at_ninety_percent)
    next(iter(resumed))
    resume = time.perf_counter() - started

    del loader, resumed  # what is measured is one loader that reads for long
    for _ in islice(_loader(root, columns), READ_BATCHES):
        pass
    found = {"first_seconds": first, "resume_seconds": resume, "anonymous_bytes": _anonymous_bytes()}
    print(json.dumps(found), flush=True)


def _loader(root: str, columns: tuple[str, ...]) -> Loader:
    return Loader(
        fb.open_cache(root), global_batch_size=BATCH, columns=columns or None, collate="stored" if columns else None
    )


def _anonymous_bytes() -> int:
    """Memory that is no page of a file, as the kernel counts it."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
