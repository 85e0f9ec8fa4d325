"""A hub in a process of its own, which serves one small data set; the first part of a path says how it misbehaves."""

import ctypes
import functools
import importlib
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from tests.hub.data_sets import documents, shard
from tests.hub.server import Drop, Flip, HubServer, IgnoreRange, Request, Spoiling, Status

import forebay as fb
from forebay.errors import ForebayError
from forebay.preview.words import harmless

_DIE_WITH_PARENT = 1  # of prctl


class SeededHub(HubServer):
    """`/SEED/…`: whether an answer breaks off, lies or fails follows from SEED; 0: never."""

    def __init__(self) -> None:
        super().__init__()
        self._answered: Counter[str] = Counter()  # by seed

    def next_spoiling(self, request: Request) -> Spoiling | None:
        _, seed, first, *_ = request.path.split("/")
        self._answered[seed] += 1
        draw = random.Random(f"{seed} {self._answered[seed]}")
        at, busy = draw.randrange(2000), Status(503, {"Retry-After": "0"})
        spoiling = draw.choice((None, None, Drop(at), Flip(at), busy, IgnoreRange()))
        if seed == "0" or (first == "api" and spoiling is not busy):  # a listing has no hash that could be compared
            return None
        return spoiling

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, dict[str, str], bytes]:
        return super().answer(path.split("/", 2)[2], query)


@functools.cache
def start_hub() -> tuple[str, str]:
    """The address and the commit of a hub, which ends with this process."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=_serve, args=(sender,), daemon=True).start()
    address, commit = receiver.recv()
    return address, commit


def _serve(sender: Connection) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # also where the parent is killed
    with SeededHub() as hub:
        commit = hub.add("org/set", {f"data/train-{name}.parquet": shard(documents(40, name)) for name in "ab"})
        sender.send((hub.address, commit))
        hub.go.wait()


def build_from_hub(root: Path, place: Path, seed: str, vocabulary: str) -> None:
    """Build tokens of the data set, with everything that downloads keep below `place`; an error is said in a line."""
    os.environ["HF_HOME"] = str(place / "home")
    shards = importlib.import_module("forebay.sources.hub_datasets")  # now: its library reads the environment at import
    patience = shards.RetryPolicy(retries=30, timeout=5, first_wait=0.001, longest_wait=0.05)
    address, commit = start_hub()
    spool = str(place / "spool")
    source = shards.HubSource("org/set", None, "train", "text", commit, f"{address}/{seed}", spool, patience)
    recipe = fb.TokenRecipe(tokenizer=vocabulary, sequence_length=64, chunk_rows=8)
    try:
        fb.build(root, source, recipe, workers=0, lease_seconds=0.3)
    except ForebayError as error:
        print(harmless(f"forebay: {error}"))
        sys.exit(1)
