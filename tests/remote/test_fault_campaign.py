"""Four builders on one bucket while about every third answer is lost, doubled, late, short or wrong.

- races: processes create the same keys at once with different values. Each key has one creator that was answered True,
  and its value is there.
- builds: four processes write one cache at a time. Builders that give up are started again, as a user would. Afterwards
  every chunk has the bytes of a local build, every chunk of every generation exists, and the newest generation lists
  all chunks.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.remote.servers import request, s3_environment

import forebay as fb
from forebay.cache.catalog import generation_numbers, load_generation
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.store import open_store

BUILDERS = 4
RECIPE = fb.RawRecipe(chunk_bytes=4000)
RACE_KEYS = 40
MOST_STARTS = 12  # of one builder on one cache
FAULTS = [
    ("lost-reply", "create", 0.12),
    ("reset-after", "create", 0.08),
    ("conflict", "create", 0.06),
    ("lost-reply", "write", 0.05),
    ("flipped-bit", "read", 0.08),
    ("short-body", "read", 0.08),
    ("stale-listing", "list", 0.05),
    ("short-body", "list", 0.05),
    ("reset-before", "any", 0.05),
    ("reset-after", "any", 0.03),
    ("server-error", "any", 0.08),
    ("throttled", "any", 0.05),
    ("latency", "any", 0.05),
]


def faults(seed: int) -> list[Fault]:
    return [
        Fault(kind, operation, probability=probability, seed=seed + number, seconds=0.02)
        for number, (kind, operation, probability) in enumerate(FAULTS)
    ]


@pytest.mark.parametrize(
    "answers", [pytest.param(100, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.long)]
)
def test_bucket_with_many_wrong_answers_has_one_creator_per_key_and_every_chunk(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    source = tmp_path / "source.txt"
    source.write_text("".join(f"line {number:05d} of the source of the campaign\n" for number in range(1200)))
    fb.build(tmp_path / "local", fb.sources.lines(source), RECIPE, workers=0)
    expected, caches = chunks_of(str(tmp_path / "local")), 0
    with FaultProxy(s3) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        bucket = f"campaign{answers}"
        request("PUT", f"{s3}/{bucket}")
        while sum(proxy.injected.values()) < answers:
            url = f"s3://{bucket}/{caches}"
            proxy.set_faults(faults(100 * caches))
            wins = in_processes(race, [(f"{url}-race", number) for number in range(BUILDERS)])
            starts = 1
            while None in in_processes(build, [(url, str(source))] * BUILDERS) and starts < MOST_STARTS:
                starts += 1
            proxy.set_faults([])
            check_race(f"{url}-race", wins)
            check_cache(url, expected)
            caches += 1
        assert len(proxy.injected) >= 8


def chunks_of(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {entry.key: store.read(entry.key) for entry in store.entries("layers/") if layout.parse_chunk(entry.key)}


def race(url: str, number: int) -> dict[int, bool]:
    """Which keys this process created."""
    store = open_store(url)
    with ThreadPoolExecutor(8) as pool:
        created = pool.map(lambda key: store.create(f"race/{key}", [b"%d of %d" % (number, key)]), range(RACE_KEYS))
        return dict(enumerate(created))


def check_race(url: str, wins: list[dict[int, bool] | None]) -> None:
    store = open_store(url)
    for key in range(RACE_KEYS):
        winners = [number for number, won in enumerate(wins) if won is not None and won[key]]
        values = {b"%d of %d" % (number, key) for number in winners}
        # A racer that gave up, and said so, may have been the first.
        assert values == {store.read(f"race/{key}")} or (not values and None in wins)


def build(url: str, source: str) -> int:
    return fb.build(url, fb.sources.lines(source), RECIPE, workers=0).built


def check_cache(url: str, expected: dict[str, bytes]) -> None:
    store = open_store(url)
    assert chunks_of(url) == expected
    numbers = generation_numbers(store)
    assert numbers == list(range(len(numbers)))
    for number in numbers:
        generation = load_generation(store, number)
        folder, table = generation.folder("raw"), generation.table("raw")
        assert {layout.chunk(folder, chunk) for chunk in table.chunks.tolist()} <= expected.keys()
    assert len(load_generation(store).table("raw").chunks) == len(expected)


def in_processes(act: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> list[Any]:
    """What each process returned, None where it raised an error of forebay's."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=answer, args=(answers, at, act, task)) for at, task in enumerate(tasks)]
    for process in processes:
        process.start()
    results = sorted((answers.get(timeout=1800) for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
    assert [trace for _, _, trace in results if trace] == []
    return [value for _, value, _ in results]


def answer(answers: Any, at: int, act: Callable[..., Any], task: tuple[Any, ...]) -> None:
    try:
        answers.put((at, act(*task), ""))
    except ForebayError:
        answers.put((at, None, ""))
    except BaseException:
        answers.put((at, None, traceback.format_exc()))
