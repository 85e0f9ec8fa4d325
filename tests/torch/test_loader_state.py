"""Where a loader stands: small, exact, O(1) to come back to, and refused where it does not belong."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.token_caches import NumberedTokens, grow_cache, numbers_of, token_cache, write_numbers

import forebay as fb
from forebay.columns import Array
from forebay.errors import EngineUnusable, StateMismatch
from forebay.feeding.selection import Split
from forebay.order.window import Window
from forebay.torch import Loader, Located, Ranks


@pytest.fixture
def cache(tmp_path: Path) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path, 30))


def test_a_state_is_a_few_hundred_bytes_of_json(cache: fb.Cache) -> None:
    loader = Loader(cache, global_batch_size=4, shuffle="window", selection=Split("train"))
    next(iter(loader))
    text = json.dumps(loader.state_dict())
    assert len(text) < 600
    again = Loader(cache, global_batch_size=4, shuffle="window", selection=Split("train"))
    again.load_state_dict(json.loads(text))
    assert again.state_dict() == loader.state_dict()


def test_the_state_is_behind_what_was_yielded_not_behind_what_was_made_ahead(cache: fb.Cache) -> None:
    loader = Loader(cache, global_batch_size=4, prefetch=7)
    batches = iter(loader)
    assert loader.position == 0
    next(batches)
    assert loader.position == 4
    rest = numbers_of(Loader(cache, global_batch_size=4))[1:]
    assert numbers_of(batches) == rest


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_takes_the_positions_with_its_remainder_also_after_a_resume_in_between(
    cache: fb.Cache, rank: int
) -> None:
    """A resume with more ranks may begin at a position that is not a multiple of their number."""
    whole = [number for batch in numbers_of(Loader(cache, global_batch_size=1)) for number in batch]
    before = Loader(cache, global_batch_size=2)
    batches = iter(before)
    for _ in range(5):
        next(batches)
    after = Loader(cache, global_batch_size=4, ranks=Ranks(rank, 4))
    after.load_state_dict(before.state_dict())
    (position,) = [position for position in range(10, 14) if position % 4 == rank]
    assert numbers_of([next(iter(after))]) == [[whole[position]]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"shuffle": None}, "shuffle: global then, sequential now"),
        ({"selection": Split("train", 0.5)}, "selection: None then, train of 0.5, seed 0, by auto now"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(cache: fb.Cache, options: dict[str, object], named: str) -> None:
    state = Loader(cache, global_batch_size=4).state_dict()
    with pytest.raises(StateMismatch, match=named):
        Loader(cache, global_batch_size=4, **options).load_state_dict(state)  # type: ignore[arg-type]


def test_a_state_of_another_cache_is_refused(cache: fb.Cache, tmp_path: Path) -> None:
    other = fb.open_cache(token_cache(tmp_path / "other", 31))
    with pytest.raises(StateMismatch, match=r"cache_id: .* then, .* now; chunks: \['"):
        Loader(other, global_batch_size=4).load_state_dict(Loader(cache, global_batch_size=4).state_dict())


def test_a_cache_that_was_built_again_takes_the_state_of_the_first(tmp_path: Path) -> None:
    """Its id is another, and it was published in other steps; the rows are the same."""
    token_cache(tmp_path, 25)
    grow_cache(tmp_path, 25, 15)
    grown = Loader(fb.open_cache(tmp_path / "cache"), global_batch_size=4)
    batches = iter(grown)
    next(batches)
    state = json.loads(json.dumps(grown.state_dict()))
    rest = numbers_of(batches)
    fb.build(tmp_path / "again", fb.sources.lines(tmp_path / "raw"), NumberedTokens(), workers=0)
    again = Loader(fb.open_cache(tmp_path / "again"), global_batch_size=4)
    assert again.state_dict()["stream"]["generations"] != state["stream"]["generations"]
    again.load_state_dict(state)
    assert numbers_of(again) == rest


def test_a_state_of_a_copy_that_grew_otherwise_is_refused(tmp_path: Path) -> None:
    token_cache(tmp_path / "one", 30)
    shutil.copytree(tmp_path / "one" / "cache", tmp_path / "other" / "cache")
    states = []
    for name, numbers in (("one", range(100, 120)), ("other", range(200, 220))):
        raw = write_numbers(tmp_path / name / "more" / "b.txt", numbers)
        fb.update(tmp_path / name / "cache", fb.sources.lines(raw), recipe=NumberedTokens(), workers=0)
        states.append(Loader(fb.open_cache(tmp_path / name / "cache"), global_batch_size=4).state_dict())
    assert states[0]["stream"]["generations"] == states[1]["stream"]["generations"]
    with pytest.raises(StateMismatch, match="chunks"):
        Loader(fb.open_cache(tmp_path / "other" / "cache"), global_batch_size=4).load_state_dict(states[0])


def test_a_state_of_a_generation_that_is_gone_or_newer_is_refused_by_number(cache: fb.Cache, tmp_path: Path) -> None:
    loader = Loader(cache, global_batch_size=4)
    next(iter(loader))
    grow_cache(tmp_path, 30, 10)
    newer = Loader(fb.open_cache(tmp_path / "cache"), global_batch_size=4).state_dict()
    with pytest.raises(StateMismatch, match="generation: 1 then, 0 now"):
        Loader(cache, global_batch_size=4).load_state_dict(newer)
    fb.clean(tmp_path / "cache", keep_generations=1)
    with pytest.raises(StateMismatch, match=r"generation 0 of .* which no longer exists"):
        Loader(fb.open_cache(tmp_path / "cache"), global_batch_size=4).load_state_dict(loader.state_dict())


def test_a_state_of_another_version_or_with_other_numbers_is_refused(cache: fb.Cache) -> None:
    loader = Loader(cache, global_batch_size=4, shuffle="window")
    with pytest.raises(StateMismatch, match="version of the state: 2 then, 3 now"):
        loader.load_state_dict({**loader.state_dict(), "version": 2})
    for field, number in product(("epoch", "position"), (-4, 3.7, True, "3", None)):
        with pytest.raises(ValueError, match=rf"the state is not what state_dict\(\) returned: .*`\$\.{field}`"):
            loader.load_state_dict({**loader.state_dict(), field: number})


class CountingStream:
    """A stream of many rows that notes the positions it is asked for."""

    def __init__(self, cache: fb.Cache, rows: int) -> None:
        self.caches, self.selections, self.seed, self._rows = (cache,), (None,), 0, rows
        self.asked: list[int] = []

    def size(self, epoch: int) -> int:
        return self._rows

    def locate(self, epoch: int, positions: Array) -> Located:
        self.asked += positions.tolist()
        return Located(positions % len(self.caches[0]), tags={"position": positions})

    def state(self) -> dict[str, object]:
        return {"rows": self._rows}

    def restored(self, state: object, epoch: int, position: int) -> "CountingStream":
        return self


def test_resuming_far_into_an_epoch_looks_at_no_row_before_it(cache: fb.Cache) -> None:
    stream = CountingStream(cache, 100_000_000)
    loader = Loader(stream, global_batch_size=4, threads=0, prefetch=1)
    loader.load_state_dict({"version": 3, "epoch": 3, "position": 90_000_000, "stream": stream.state()})
    batch = next(iter(loader))
    assert batch["position"].tolist() == [90_000_000, 90_000_001, 90_000_002, 90_000_003]
    assert min(stream.asked) == 90_000_000
    assert len(stream.asked) <= 8192


def test_a_gap_filled_meanwhile_moves_no_row_of_the_running_epoch(tmp_path: Path) -> None:
    """Chunks 0 and 2 are there when training begins; chunk 1, published later, changes the row numbers."""
    write_numbers(tmp_path / "raw" / "a.txt", range(15))
    root, source = tmp_path / "cache", fb.sources.lines(tmp_path / "raw")
    fb.build(root, source, NumberedTokens(), workers=0, start_chunk=0, end_chunk=0)
    fb.build(root, source, NumberedTokens(), workers=0, start_chunk=2, end_chunk=2)
    loader = Loader(fb.open_cache(root), global_batch_size=2)
    expected = numbers_of(Loader(fb.open_cache(root), global_batch_size=2))
    assert sorted(row for batch in expected for row in batch) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    first = numbers_of([next(iter(loader))])
    fb.build(root, source, NumberedTokens(), workers=0)
    resumed = Loader(fb.open_cache(root), global_batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed.stream.caches[0]) == 15
    assert first + numbers_of(resumed) == expected
    assert np.unique(numbers_of(resumed)).tolist() == sorted(set(range(15)) - missing_of(resumed))


def missing_of(loader: Loader) -> set[int]:
    """The row that a dropped last batch of an odd number of rows leaves out, of the epoch before."""
    epoch = Loader(loader.stream.caches[0], global_batch_size=1)
    epoch.epoch = loader.epoch - 1
    return set(numbers_of(epoch)[-1])


def test_a_window_that_fewer_ranks_cannot_keep_decoded_is_refused_on_resume(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 1280, codec="zstd", chunk_rows=20)
    window = Window(rows=20, unit=2, lanes=64)
    options: dict[str, Any] = {"global_batch_size": 64, "shuffle": window}
    cache = fb.open_cache(root, memory=5000)
    many = Loader(cache, ranks=Ranks(0, 64), **options)
    next(iter(many))
    with pytest.raises(EngineUnusable, match="a shuffle window of 20 rows in 64 lanes"):
        Loader(cache, **options)
    small = Loader(cache, **options | {"shuffle": Window(rows=2, unit=2, lanes=1)})
    with pytest.raises(EngineUnusable, match="a shuffle window of 20 rows in 64 lanes"):
        small.load_state_dict(many.state_dict())
