"""What every script of `benchmarks.trials` does alike: the verbs by which the trials drive a tool.

    trial_NAME.py build OUT TOKENIZER FILE…            the tool's own build step
    trial_NAME.py build_part OUT TOKENIZER PART PARTS FILE…   one of several builders, where the tool documents a way
    trial_NAME.py merge OUT                            and what joins the parts
    trial_NAME.py bucket OUT TOKENIZER FILE…           the build step, into a bucket
    trial_NAME.py begin OUT TOKENIZER FILE…            the build step of what will grow
    trial_NAME.py append OUT TOKENIZER FILE…           more data, by the tool's own means
    trial_NAME.py repair OUT                           where the tool has a repair
    trial_NAME.py batch OUT                            what the first batch has
    trial_NAME.py read OUT                             every row of an epoch
    trial_NAME.py train OUT BATCHES STATES SAVE        under torchrun: some batches, from a state, then save one
    trial_NAME.py grow OUT STATES                      half an epoch, wait for a line on stdin, the rest, another epoch

A script defines `build`, `append`, `loader`, `tokens` and, where they differ from those here, `save` and `load`. Rows
are named by a hash of their tokens; the answer is the last line on stdout, as JSON.
"""

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GLOBAL_BATCH = 16


def main() -> None:
    peer = sys.modules["__main__"]
    try:
        answer = _answer(peer, sys.argv[1], sys.argv[2:])
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(1 if "error" in answer else 0)  # a tool's threads must not keep the process


def _answer(peer: ModuleType, verb: str, words: list[str]) -> dict[str, Any]:
    match verb, words:
        case "build" | "append", [out, tokenizer, *files]:
            return {"report": getattr(peer, verb)(files, out, tokenizer)}
        case "begin" | "bucket", [out, tokenizer, *files]:
            return {"report": getattr(peer, verb, peer.build)(files, out, tokenizer)}
        case "build_part", [out, tokenizer, part, parts, *files]:
            return {"report": peer.build_part(files, out, tokenizer, int(part), int(parts))}
        case "repair", [out]:
            return {"report": peer.repair(out)}
        case "merge", [out]:
            return {"report": peer.merge(out)}
        case "batch", [out]:
            return _described(next(iter(peer.loader(out, GLOBAL_BATCH, 0, 1))), peer.tokens)
        case "read", [out]:
            return {"rows": _rows(peer, peer.loader(out, GLOBAL_BATCH, 0, 1))}
        case "train", [out, batches, states, save]:
            return _train(peer, out, int(batches), states, save)
        case "grow", [out, states]:
            return _grow(peer, out, states)
    raise SystemExit(__doc__)


def _ranks() -> tuple[int, int]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return int(os.environ.get("RANK", "0")), world


def _train(peer: ModuleType, out: str, batches: int, states: str, save: str) -> dict[str, Any]:
    """Rows of this rank: `batches` of them, or all that are left. States are one file per rank in a folder."""
    rank, world = _ranks()
    loader = peer.loader(out, GLOBAL_BATCH // world, rank, world)
    if states:
        own = Path(states, f"{rank}.pt")
        kept = torch.load(own if own.exists() else Path(states, "0.pt"), weights_only=False)
        _load(peer, loader, kept)
    rows, iterator = [], iter(loader)
    for _, batch in zip(range(batches), iterator, strict=False):
        rows.extend(_names(peer.tokens(batch)))
    if save:
        Path(save).mkdir(exist_ok=True)
        torch.save(_save(peer, loader), Path(save, f"{rank}.pt"))
    answer = {"rows": rows}
    Path(os.environ["TRIAL_ANSWERS"], f"{rank}.json").write_text(json.dumps(answer))
    if world > 1:
        torch.distributed.barrier()  # no rank ends while another still reads
    return answer


def _grow(peer: ModuleType, out: str, states: str) -> dict[str, Any]:
    loader = peer.loader(out, GLOBAL_BATCH, 0, 1)
    batches = iter(loader)
    before = [name for _ in range(8) for name in _names(peer.tokens(next(batches)))]
    if states:
        Path(states).mkdir(exist_ok=True)
        torch.save(_save(peer, loader), Path(states, "0.pt"))
    print("ready", flush=True)
    sys.stdin.readline()
    rest = _rows(peer, batches)
    return {"before": before, "rest": rest, "next": _rows(peer, loader)}


def _save(peer: ModuleType, loader: Any) -> Any:
    return peer.save(loader) if hasattr(peer, "save") else loader.state_dict()


def _load(peer: ModuleType, loader: Any, state: Any) -> None:
    if hasattr(peer, "load"):
        peer.load(loader, state)
    else:
        loader.load_state_dict(state)


def _rows(peer: ModuleType, batches: Iterable[Any]) -> list[str]:
    return [name for batch in batches for name in _names(peer.tokens(batch))]


def _names(tokens: torch.Tensor) -> Iterator[str]:
    for row in tokens.to(torch.int64).numpy():
        yield hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()


def _described(batch: Any, tokens_of: Any) -> dict[str, Any]:
    """The names in a batch, and those by which documents can be told apart: neither constant nor the tokens again."""
    tokens = tokens_of(batch).to(torch.int64)
    if not isinstance(batch, dict):
        return {"keys": ["tokens"], "tells": [], "shape": list(tokens.shape)}
    tells = []
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            continue
        values = value.to(torch.int64)
        is_copy = values.shape == tokens.shape and torch.equal(values, tokens)
        is_alike = bool((values == values[0]).all())
        if not (is_copy or is_alike):
            tells.append(key)
    return {"keys": list(batch), "tells": tells, "shape": list(tokens.shape)}
