"""One epoch from a bucket by a peer: `peer.py epoch URL FOLDER LIMIT WORKERS` prints one line of JSON.

The folder is where the peer keeps what it fetched, at most LIMIT bytes of it (0: no limit). Time begins after imports.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from harness import BATCH, TOKENS

Opened = Callable[[str, str, int, int], Iterable[torch.Tensor]]


def main(write: Callable[[np.ndarray, str], None], opened: Opened) -> None:
    match sys.argv[1:]:
        case ["write", rows, folder]:
            write(TOKENS.rows_of(rows), folder)
        case ["epoch", url, folder, limit, workers]:
            started, first, count = time.perf_counter(), 0.0, 0
            for batch in opened(url, folder, int(limit), int(workers)):
                if not count:
                    first = time.perf_counter() - started
                    TOKENS.check(batch)
                count += 1
            spent = time.perf_counter() - started
            print(json.dumps({"first": first, "seconds": spent, "rows": count * BATCH}), flush=True)
        case _:
            sys.exit(__doc__)
