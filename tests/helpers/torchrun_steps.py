"""What every process of `torchrun` does in a test of the resume table: call a function, and gather what it trained on.

`torchrun … -m tests.helpers.torchrun_steps MODULE FUNCTION CACHE FOLDER FIRST LAST` writes `FOLDER/steps.json`.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

import forebay as fb


def main(module: str, function: str, root: str, folder: str, first: str, last: str) -> None:
    dist.init_process_group("gloo")
    train = getattr(import_module(module), function)
    steps = train(fb.open_cache(root), Path(folder), int(first), int(last))
    shares: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, steps)
    if dist.get_rank() == 0:
        Path(folder, "steps.json").write_text(json.dumps(shares))
    dist.barrier()
    os._exit(0)  # freeing DDP can hang: torch joins a gloo thread that waits for the GIL


if __name__ == "__main__":
    main(*sys.argv[1:])
