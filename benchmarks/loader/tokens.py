"""Token batches: the loader next to memmap, LitData and Hugging Face Datasets on the same rows of 2,048 GPT-2 tokens.

The default shuffle (global for `none`, windows for zstd), batches of 32, everything in the page cache. Peers shuffle
all rows and yield int64 tokens alone.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import forebay as fb
from benchmarks.lib.files import into_memory, prepared
from benchmarks.lib.options import Options
from benchmarks.lib.peers import Peer, PeerFailed, readings, run_peer
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import forever, in_turn, rate_for
from benchmarks.lib.token_rows import PlainRows, TokenRows
from forebay.torch import Loader, TokenBatch

CASE = "loader.tokens"
BATCH = 32
LITDATA = Peer("LitData", "peer_litdata.py", ("litdata",))
DATASETS = Peer("Hugging Face Datasets, arrow", "peer_datasets.py")
GOALS = {
    ("tokens", "none", LITDATA.name): None,
    ("tokens, labels, positions", "none", LITDATA.name): 4.0,
    ("tokens, labels, positions", "none", DATASETS.name): 2.0,
    ("tokens, window shuffle", "zstd", DATASETS.name): 1.0,
}


def measure(options: Options) -> Iterator[Result]:
    data, seconds = TokenRows.of(options), 0.3 if options.is_quick else 2.0
    caches, plain = {codec: data.cache(codec) for codec in ("none", "zstd")}, data.plain()
    ours = {
        (name, codec): _batches(cache, name) for name in OPTIONS for codec, cache in caches.items()
    }  # fmt: skip
    theirs = {"memmap + DataLoader __getitems__": _memmap(plain), "the same by hand over memmap": _by_hand(plain)}
    _check_equal(caches["none"], plain)
    works = {key: partial(rate_for, batches, BATCH, seconds) for key, batches in (ours | theirs).items()}
    for work in works.values():
        work()  # every block is checked by now
    for peer in (LITDATA, DATASETS):
        try:
            works[peer.name] = _best_of(peer, data, options, seconds)
        except PeerFailed as failure:
            print(failure, flush=True)
    rates = in_turn(works, options.rounds)

    def against(name: str, codec: str, peer: str, equal: str, goal: float | None) -> Result:
        return compared(
            CASE, f"{name}, {codec}", peer, rates[name, codec], rates[peer], unit="rows/s", equal=equal, at_least=goal
        )  # fmt: skip

    for codec in caches:
        goal = 1.0 if codec == "none" else None
        yield against("tokens", codec, "memmap + DataLoader __getitems__", "same tensors", goal)
        goal = 1.5 if codec == "none" else None
        yield against("tokens, labels, positions", codec, "the same by hand over memmap", "same tensors", goal)
        for peer in (peer.name for peer in (LITDATA, DATASETS) if peer.name in rates):
            for name in OPTIONS:
                equal = "same rows" if name != "tokens, labels, positions" else "peer: tokens alone"
                yield against(name, codec, peer, equal, GOALS.get((name, codec, peer)))


OPTIONS = {
    "tokens": {"labels": None, "derive": ()},
    "tokens, window shuffle": {"labels": None, "derive": ()},
    "tokens, labels, positions": {},
}


def _batches(cache: fb.Cache, name: str) -> Iterator[object]:
    shuffle = "window" if "window" in name else "auto"
    collate = TokenBatch(cache, **OPTIONS[name])
    loader = Loader(cache, global_batch_size=BATCH, seed=0, shuffle=shuffle, collate=collate)
    return forever(lambda: iter(loader))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, plain: PlainRows) -> None:
        self.tokens = plain.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.tokens[rows])


def _memmap(plain: PlainRows) -> Iterator[object]:
    loader = DataLoader(Rows(plain), BATCH, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    return forever(lambda: (batch.to(torch.int64) for batch in loader))


def _by_hand(plain: PlainRows) -> Iterator[object]:
    order = np.random.default_rng(0).permutation(len(plain.tokens))
    batches = np.split(order[: len(order) // BATCH * BATCH], len(order) // BATCH)
    return forever(lambda: (derived(plain, rows) for rows in batches))


def derived(plain: PlainRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
    """A training batch from memmaps as one writes it by hand: flat over the batch, no Python per document."""
    tokens = plain.tokens[rows].astype(np.int64)
    pieces = [plain.lengths[plain.offsets[row] : plain.offsets[row + 1]] for row in rows.tolist()]
    lengths = np.concatenate(pieces).astype(np.int64)
    stops = np.cumsum(lengths)
    labels = np.empty_like(tokens)
    labels.ravel()[:-1] = tokens.ravel()[1:]
    labels.ravel()[stops - 1] = -100
    positions = (np.arange(tokens.size) - np.repeat(stops - lengths, lengths)).reshape(tokens.shape)
    arrays = {"tokens": tokens, "labels": labels, "positions": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check_equal(cache: fb.Cache, plain: PlainRows) -> None:
    ours = next(iter(Loader(cache, global_batch_size=BATCH, shuffle=None)))
    for name, tensor in derived(plain, np.arange(BATCH)).items():
        if not torch.equal(ours[name], tensor):
            raise AssertionError(f"{name} differ; timing them would compare different things")


def _best_of(peer: Peer, data: TokenRows, options: Options, seconds: float):  # type: ignore[no-untyped-def]
    """A call that times the fastest configuration of a peer in a fresh process."""
    written = prepared(
        data.folder / peer.name.partition(",")[0].replace(" ", "-"), str(data.rows),
        lambda folder: run_peer(peer, options.environments, "write", data.folder / "plain" / "tokens", folder),
    )  # fmt: skip
    into_memory(written)
    best = max(readings(peer, options.environments, written, seconds), key=lambda reading: reading.rows_per_second)

    def again() -> float:
        return readings(peer, options.environments, written, seconds, best.configuration)[0].rows_per_second

    return again
