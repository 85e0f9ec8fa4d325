"""Builders on a bucket while answers are injected.

    python -m tests.remote.fault_campaign [--answers N] [--first 0]

Two parts, both behind the fault proxy of `tests.helpers.fault_proxy` in front of an S3 server on loopback:

- races: processes create the same keys at once with different values. Each key has one creator that was answered True,
  and its value is there. An answer of True for a value that is not there is a *wrong mine*.
- builds: four builders, each a process, write one cache at a time. Builders that give up are started again, as a user
  would. Afterwards every chunk has the SHA-256 of a local build, every chunk of every generation exists, the newest
  generation lists all chunks, and nobody printed a traceback.

"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.remote.servers import request, s3_environment, s3_server

import forebay as fb
from forebay.cache.catalog import generation_numbers, load_generation
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.store import open_store

BUILDERS = 4
CHUNK_BYTES = 4000
RACE_KEYS = 40
MOST_STARTS = 12  # of one builder on one cache


def faults(seed: int) -> list[Fault]:
    """About every third answer is wrong."""
    return [
        Fault("lost-reply", "create", probability=0.12, seed=seed),
        Fault("reset-after", "create", probability=0.08, seed=seed + 1),
        Fault("conflict", "create", probability=0.06, seed=seed + 2),
        Fault("lost-reply", "write", probability=0.05, seed=seed + 3),
        Fault("flipped-bit", "read", probability=0.08, seed=seed + 4),
        Fault("short-body", "read", probability=0.08, seed=seed + 5),
        Fault("stale-listing", "list", probability=0.05, seed=seed + 6),
        Fault("short-body", "list", probability=0.05, seed=seed + 7),
        Fault("reset-before", probability=0.05, seed=seed + 8),
        Fault("reset-after", probability=0.03, seed=seed + 9),
        Fault("server-error", probability=0.08, seed=seed + 10),
        Fault("throttled", probability=0.05, seed=seed + 11),
        Fault("latency", probability=0.05, seed=seed + 12, seconds=0.02),
    ]


@dataclass
class Outcome:
    """What a campaign found; all but the counts must be zero."""

    injected: dict[str, int] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    caches: int = 0
    chunks: int = 0
    creations: int = 0
    restarts: int = 0  # of builders that gave up with an error, which is allowed
    wrong_mine: int = 0
    without_winner: int = 0
    lost_chunks: int = 0
    wrong_chunks: int = 0
    orphan_generations: int = 0
    tracebacks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        wrong = self.wrong_mine + self.without_winner + self.lost_chunks + self.wrong_chunks + self.orphan_generations
        return wrong == 0 and not self.tracebacks


def campaign(
    folder: Path,
    answers: int,
    on_round: Callable[[Outcome], None] = lambda outcome: None,
    first: int = 0,
) -> Outcome:
    """Run rounds of races and builds until enough answers were injected; `first` is the seed of the first round."""
    source = folder / "source.txt"
    source.write_text("".join(f"line {number:05d} of the source of the campaign\n" for number in range(1200)))
    expected = _built_here(source, folder / "local")
    outcome, begun = Outcome(), time.monotonic()
    with s3_server(str(folder)) as server, FaultProxy(server) as proxy:
        os.environ.update(s3_environment(proxy.url))
        request("PUT", f"{server}/campaign")
        while sum(proxy.injected.values()) < answers:
            seed = 100 * (first + outcome.caches)
            url = f"s3://campaign/{outcome.caches}"
            proxy.set_faults(faults(seed))
            wins = _in_processes(_race, [(f"{url}-race", number) for number in range(BUILDERS)], outcome)
            _build_together(url, str(source), outcome)
            proxy.set_faults([])
            _check_race(f"{url}-race", wins, outcome)
            _check_cache(url, expected, outcome)
            outcome.caches += 1
            outcome.injected, outcome.requests = dict(proxy.injected), dict(proxy.requests)
            outcome.seconds = time.monotonic() - begun
            on_round(outcome)
    return outcome


def _built_here(source: Path, root: Path) -> dict[str, bytes]:
    fb.build(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=CHUNK_BYTES), workers=0)
    store = open_store(root)
    return {entry.key: store.read(entry.key) for entry in store.entries("layers/") if layout.parse_chunk(entry.key)}


def _race(url: str, number: int) -> dict[int, bool]:
    """The keys that this process created."""
    store = open_store(url)

    def create(key: int) -> tuple[int, bool]:
        return key, store.create(f"race/{key}", [b"%d of %d" % (number, key)])

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(create, range(RACE_KEYS)))


def _check_race(url: str, wins: list[dict[int, bool] | None], outcome: Outcome) -> None:
    store = open_store(url)
    for key in range(RACE_KEYS):
        winners = [number for number, won in enumerate(wins) if won is not None and won[key]]
        value = store.read(f"race/{key}")
        outcome.creations += 1
        outcome.wrong_mine += sum(value != b"%d of %d" % (number, key) for number in winners)
        # A racer that gave up, and said so, may have been the first.
        outcome.without_winner += not winners and all(won is not None for won in wins)


def _build(url: str, source: str) -> int:
    recipe = fb.RawRecipe(chunk_bytes=CHUNK_BYTES)
    return fb.build(url, fb.sources.lines(source), recipe, workers=0).built


def _build_together(url: str, source: str, outcome: Outcome) -> None:
    for _ in range(MOST_STARTS):
        made = _in_processes(_build, [(url, source)] * BUILDERS, outcome)
        if None not in made:
            return
        outcome.restarts += made.count(None)


def _check_cache(url: str, expected: dict[str, bytes], outcome: Outcome) -> None:
    store = open_store(url)
    there = {entry.key for entry in store.entries("layers/") if layout.parse_chunk(entry.key)}
    outcome.chunks += len(expected)
    outcome.lost_chunks += len(expected.keys() - there)
    outcome.wrong_chunks += len(there - expected.keys())
    outcome.wrong_chunks += sum(store.read(key) != expected[key] for key in there & expected.keys())
    numbers = generation_numbers(store)
    if not numbers:
        outcome.lost_chunks += len(expected)
        return
    for number in numbers:
        generation = load_generation(store, number)
        folder, table = generation.folder("raw"), generation.table("raw")
        listed = {layout.chunk(folder, chunk) for chunk in table.chunks.tolist()}
        outcome.orphan_generations += not listed <= there
    newest = load_generation(store).table("raw")
    outcome.lost_chunks += len(expected) - len(newest.chunks)
    outcome.orphan_generations += numbers != list(range(len(numbers)))


def _in_processes(act: Callable[..., Any], tasks: list[tuple[Any, ...]], outcome: Outcome) -> list[Any]:
    """What each process returned, None where it raised an error of forebay's."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_told, args=(answers, at, act, task)) for at, task in enumerate(tasks)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    for _ in processes:
        at, value, trace = answers.get(timeout=1800)
        found[at] = value
        outcome.tracebacks += [trace] if trace else []
    for process in processes:
        process.join()
    return [found[at] for at in range(len(tasks))]


def _told(answers: Any, at: int, act: Callable[..., Any], task: tuple[Any, ...]) -> None:
    try:
        answers.put((at, act(*task), ""))
    except ForebayError as error:
        print(f"builder {at} gave up: {error}", file=sys.stderr)
        answers.put((at, None, ""))
    except BaseException:
        answers.put((at, None, traceback.format_exc()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000, help="Injected answers to reach.")
    parser.add_argument("--first", type=int, default=0, help="Seed of the first round; others follow.")
    parser.add_argument("--json", type=Path, help="File to write the outcome to.")
    options = parser.parse_args()

    def show(outcome: Outcome) -> None:
        print(
            f"{outcome.caches:4d} caches  {sum(outcome.injected.values()):7,} injected  "
            f"{outcome.restarts} restarts  {outcome.seconds:6.0f} s  {'clean' if outcome.is_clean else 'WRONG'}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(asdict(outcome), indent=1))

    with tempfile.TemporaryDirectory() as folder:
        outcome = campaign(Path(folder), options.answers, show, options.first)
    print(json.dumps(asdict(outcome), indent=1))
    raise SystemExit(0 if outcome.is_clean else 1)


if __name__ == "__main__":
    main()
