"""Threads of a loader, in real processes: they end with it, whatever ends it."""

import json
import signal
from pathlib import Path

import pytest
from tests.helpers.processes import PythonProcess, script_environment
from tests.helpers.token_caches import NumberedTokens, grow_cache, interleaved, numbers_of, token_cache, write_numbers

import forebay as fb
from forebay.torch import Loader, TokenBatch

ROWS = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("threads"), ROWS, chunk_rows=20, codec="lz4")


def start(command: str, *more: object) -> PythonProcess:
    env = script_environment() | {"PYTHONWARNINGS": "error"}
    return PythonProcess("-m", "tests.torch.loader_process", command, *map(str, more), env=env)


def said(process: PythonProcess) -> str:
    """All that it printed, once it has ended well and without a word of complaint."""
    out, err = process.communicate()
    # Of a group made with backend "cpu:gloo", torch itself warns once the module of FSDP is imported. On a machine with
    # much other work, a rank may wait so long for another that it prints for whom.
    expected = ("(function hasHooks)", "to iterate this loader, for at most")
    err = "".join(line for line in err.splitlines(keepends=True) if not any(each in line for each in expected))
    assert (process.returncode, err) == (0, ""), out
    return out


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("leave-in-the-middle", "left\n"),
        ("transform-raises", "raised in its turn\n"),
        ("transform-sleeps", "asleep\n"),
        ("fork-in-the-middle", "both went on\n"),
        ("fork-and-leave", "four children\n"),
        ("leave-nothing", "nothing left\n"),
    ],
)
def test_threads_end_with_whatever_ends_the_loader(root: Path, command: str, answer: str) -> None:
    assert said(start(command, root)) == answer


def test_ctrl_c_stops_training_at_once_and_it_can_go_on(root: Path) -> None:
    process = start("wait-for-interrupt", root)
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    *_, interrupted, ended = said(process).splitlines()
    assert interrupted.startswith("interrupted ")
    assert ended == "ended"


@pytest.mark.slow
def test_ranks_that_know_each_other_grow_together(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 11)
    grow_cache(tmp_path, 11, 6)
    (first, generations), (second, same) = map(json.loads, answers("grow-together", root, tmp_path))
    assert generations == same == [fb.open_cache(root).generation.number]
    for epoch in zip(first, second, strict=True):
        starts = range(0, 17, 2)
        assert sorted(row for batch in interleaved(starts, epoch) for row in batch) == list(range(17))
    alone = Loader(fb.open_cache(root, generation=0), global_batch_size=2, growth="within", drop_last=False)
    assert interleaved(range(0, 17, 2), [first[0], second[0]]) == numbers_of(alone)


@pytest.mark.slow
def test_what_is_published_after_rank_0_ended_its_epoch_waits_for_the_next(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 11)
    assert [json.loads(each) for each in answers("grow-after-the-first", root, tmp_path)] == [[1, [0]]] * 2
    assert fb.open_cache(root).generation.number > 0


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 11 rows in generation 0, of 17 in generation 1."""
    folder = tmp_path_factory.mktemp("grown")
    token_cache(folder, 11)
    grow_cache(folder, 11, 6)
    return folder / "cache"


def answers(command: str, root: Path, folder: Path, ranks: int = 2, *more: object) -> list[str]:
    """What every rank printed."""
    printed: list[str] = json.loads(said(start("in-ranks", ranks, command, root, folder / "meeting", *more)))
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 8])
def test_ranks_that_opened_different_generations_are_refused_on_every_rank(
    grown: Path, tmp_path: Path, world: int
) -> None:
    for answer in answers("open-apart", grown, tmp_path, world, world):
        assert f"generations is [0] on rank 0 and [1] on rank {world - 1}" in answer
        assert "open the same generation on every rank" in answer


@pytest.mark.slow
def test_ranks_with_another_seed_batch_size_or_position_are_refused(grown: Path, tmp_path: Path) -> None:
    for answer in answers("read-apart", grown, tmp_path):
        options, position, batches = json.loads(answer)
        assert "global_batch_size is 2 on rank 0 and 4 on rank 1" in options
        assert "seed is 0 on rank 0 and 1 on rank 1" in options
        assert "generation" not in options, "they opened the same one"
        assert "position is 2 on rank 0 and 4 on rank 1" in position
        assert "labels is 'shifted' on rank 0 and 'unshifted' on rank 1" in batches
        assert "max_documents is None on rank 0 and 9 on rank 1" in batches
        assert "columns is [] on rank 0 and ['documents'] on rank 1" in batches


@pytest.mark.slow
def test_ranks_whose_buckets_take_other_turns_are_refused(grown: Path, tmp_path: Path) -> None:
    (told, first), (same, second) = map(json.loads, answers("take-other-turns", grown, tmp_path))
    assert told == same
    *seeds, labels = told
    for seed, message in enumerate(seeds, 1):
        assert f"BucketLoader.seed is 0 on rank 0 and {seed} on rank 1" in message
    assert "loaders[0].labels is 'shifted' on rank 0 and 'unshifted' on rank 1" in labels
    assert len(first) == len(second) > 2
    assert len({number for batch in first + second for number in batch}) == 2 * len(first)


@pytest.mark.slow
def test_a_loader_of_one_rank_hangs_nobody_and_changes_no_reduction(grown: Path, tmp_path: Path) -> None:
    first, second = map(json.loads, answers("one-rank-only", grown, tmp_path))
    assert first.startswith("waited 0.2 s for rank 1 of 2 to iterate this loader")
    assert "pass ranks=Ranks(0, 1)" in first
    assert second.startswith("rank 1 of 2 iterates this loader too late: the others waited 0.2 s and gave up")


@pytest.mark.slow
def test_ranks_of_the_environment_need_a_process_group_or_a_generation_by_number(grown: Path, tmp_path: Path) -> None:
    assert answers("join-later", grown, tmp_path) == ["compared\n"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_rank_0_is_named_when_it_is_gone(grown: Path, tmp_path: Path, store: str) -> None:
    assert answers("lose-rank-0", grown, tmp_path, 2, store) == ["", "[0]\n"]


@pytest.mark.slow
def test_ranks_with_other_recipes_or_micro_batches_are_refused(tmp_path: Path) -> None:
    roots = [token_cache(tmp_path / f"rows-{rank}", 6, rows_per_block=2 + rank) for rank in range(2)]
    write_numbers(tmp_path / "rows-2" / "raw" / "a.txt", range(50, 56))
    other = NumberedTokens(rows_per_block=2)
    fb.build(tmp_path / "rows-2" / "cache", fb.sources.lines(tmp_path / "rows-2" / "raw"), other, workers=0)
    for rank, root in enumerate([*roots, tmp_path / "rows-2" / "cache"]):
        root.rename(tmp_path / str(rank))
    for answer in answers("other-recipes", tmp_path, tmp_path):
        recipes, steps, content, mixed = json.loads(answer)
        assert "batches: content of the cache is [" in content
        assert "batches: content of the cache of mixture[1].spans[0] is [" in mixed
        assert "recipe[0].tokens is" in recipes
        assert "micro_batches is 1 on rank 0 and 2 on rank 1" in steps


@pytest.mark.slow
def test_data_parallel_ranks_of_a_mesh_share_batches(grown: Path, tmp_path: Path) -> None:
    found = [json.loads(answer) for answer in answers("split-in-two-ways", grown, tmp_path, 4)]
    alone = list(
        Loader(
            fb.open_cache(grown),
            global_batch_size=4,
            collate=TokenBatch(fb.open_cache(grown), derive=["num_label_tokens"]),
        )
    )
    counts = [int(batch["num_label_tokens"]) for batch in alone]
    for (data, tensor), rows, summed, apart, missing in found:
        (twin,) = [other for (at, part), other, *_ in found if at == data and part != tensor]
        (other,) = [other for (at, part), other, *_ in found if at != data and part == tensor]
        assert rows == twin
        assert summed == counts
        pairs = [rows, other] if data == 0 else [other, rows]
        assert interleaved(range(0, 16, 4), pairs) == numbers_of(alone)
        assert f"seed is 0 on rank {tensor} and 1 on rank {2 + tensor}" in apart, "as the whole world counts them"
        assert missing.startswith(f"waited 0.2 s for rank {2 + tensor} of a group of 2 ") or data == 1


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_is_raised_again_by_the_next_iteration_which_skips_no_batch(root: Path, threads: int) -> None:
    def fail_at_third(batch: dict, coins: object) -> dict:
        if int(batch["tokens"][0, 0]) == 8:
            raise ValueError("the third batch")
        return batch

    loader = Loader(fb.open_cache(root), global_batch_size=4, shuffle=None, threads=threads, transform=fail_at_third)
    batches = iter(loader)
    assert [int(next(batches)["tokens"][0, 0]) for _ in range(2)] == [0, 4]
    for _ in range(3):
        with pytest.raises(ValueError, match="the third batch"):
            next(iter(loader))
    assert loader.position == 8
