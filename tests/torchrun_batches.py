"""What every process of `torchrun` does in a test: take batches, and tell which rows the global ones were made of.

`torchrun … -m tests.torchrun_batches '{"root": …, "take": 5, "batch": 8, "state": … or null, "answer": PATH}'`
"""

import json
import sys
from itertools import islice
from pathlib import Path

import torch.distributed as dist

import forebay as fb
from forebay.torch import Loader


def main(text: str) -> None:
    task = json.loads(text)
    dist.init_process_group("gloo")
    loader = Loader(fb.open_cache(task["root"]), global_batch_size=task["batch"], seed=task["seed"])
    if task["state"] is not None:
        loader.load_state_dict(task["state"])
    batches = [batch["tokens"][:, 0].tolist() for batch in islice(loader, task["take"])]
    shares: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, batches)
    states: list[dict] = [{} for _ in shares]
    dist.all_gather_object(states, loader.state_dict())
    if dist.get_rank() == 0:
        Path(task["answer"]).write_text(json.dumps({"shares": shares, "states": states}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
