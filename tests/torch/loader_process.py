"""What the tests of the loader's threads run in processes of their own, so that a hang or a crash is a failed test.

python -m tests.torch.loader_process COMMAND ROOT …
"""

import gc
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.helpers.token_caches import grow_cache, numbers_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import forebay as fb
from forebay.columns import Columns
from forebay.errors import StateMismatch
from forebay.order.coins import Coins
from forebay.torch import BucketLoader, Ingredient, Loader, Mixture, Ranks, TokenBatch, Where, current_ranks, ranks

Batch = dict[str, torch.Tensor]


def feeding_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("forebay")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def loader(root: str, **options: object) -> Loader:
    return Loader(fb.open_cache(root), global_batch_size=2, prefetch=6, **options)  # type: ignore[arg-type]


def leave_in_the_middle(root: str) -> None:
    """The interpreter exits while batches are made and an iterator is alive."""
    batches = iter(loader(root, threads=3))
    next(batches)
    assert len(feeding_threads()) == 3
    sys.modules["kept"] = batches  # type: ignore[assignment]  # alive until the very end
    print("left")


def transform_raises(root: str) -> None:
    """An error in a transform arrives at its batch, after those before it; no thread stays."""

    def refuse(batch: Batch, coins: Coins) -> Batch:
        if 7 in batch["tokens"][:, 0].tolist():
            raise ValueError("no sevens")
        return batch

    good = numbers_of(loader(root, threads=0))
    before = next(number for number, rows in enumerate(good) if 7 in rows)
    for threads in (0, 1, 3):
        failing = loader(root, threads=threads, transform=refuse)
        taken: list[list[int]] = []
        with pytest.raises(ValueError, match="no sevens"):
            taken.extend(batch["tokens"][:, 0].tolist() for batch in failing)
        assert taken == good[:before], (threads, len(taken), before)
        assert failing.position == 2 * before
        assert not feeding_threads()
    print("raised in its turn")


def transform_sleeps_for_ever(root: str) -> None:
    """A transform that does not return does not keep the interpreter from exiting."""

    def sleep(batch: Batch, coins: Coins) -> Batch:
        time.sleep(3600)
        return batch

    batches = iter(loader(root, transform=sleep))
    threading.Thread(target=lambda: next(batches), daemon=True).start()
    time.sleep(0.2)
    print("asleep", flush=True)


def wait_for_interrupt(root: str) -> None:
    """Trains until Ctrl-C; says what is left then."""

    def slow(batch: Batch, coins: Coins) -> Batch:
        time.sleep(0.02)
        return batch

    running = loader(root, transform=slow, drop_last=True)
    try:
        while True:
            for _ in running:
                print(running.position, flush=True)
    except KeyboardInterrupt:
        state = running.state_dict()
        gc.collect()
        print("interrupted", state["position"], flush=True)
    taken = numbers_of(running)
    assert len(taken) == (running.stream.size(0) - state["position"]) // 2, "it goes on from where it stood"
    del running
    assert not feeding_threads()
    print("ended", flush=True)


def fork_in_the_middle(root: str) -> None:
    """Parent and child go on from where the parent stood, each with threads of its own."""
    expected = numbers_of(loader(root, threads=0))
    running = loader(root, threads=2)
    batches = iter(running)
    taken = numbers_of([next(batches) for _ in range(3)])
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            assert not feeding_threads()
            rest = numbers_of(batches)
            assert taken + rest == expected, "the child"
            del batches, running
            assert not feeding_threads()
            sys.exit(7)  # through every exit handler
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7
    assert taken + numbers_of(batches) == expected, "the parent"
    print("both went on")


def fork_and_leave(root: str) -> None:
    """A child that does not touch the loader exits, although it was forked while batches were made."""
    batches = iter(loader(root, threads=3))
    for _ in range(4):
        next(batches)
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7
    print("four children")


def leave_nothing(root: str) -> None:
    """Epochs run to the end, broken off, dropped, failed: no thread and no file stays.

    After a whole epoch the threads have begun the next one; they end with the loader.
    """
    feeding = loader(root, threads=3)
    list(feeding)
    files = open_files()
    for turn in range(30):
        for _ in feeding:
            if turn % 2:
                break
        batches = iter(feeding)
        if turn % 3:
            next(batches)
        del batches
        assert len(feeding_threads()) == (0 if turn % 2 or turn % 3 else 3), turn
    list(feeding)
    assert len(feeding_threads()) == 3
    del feeding
    assert not feeding_threads()
    assert open_files() == files
    print("nothing left")


def join(meeting: str, rank: str, world: int = 2, backend: str = "gloo") -> None:
    options = {"rank": int(rank), "world_size": world, "timeout": timedelta(seconds=600)}
    distributed.init_process_group(backend, init_method=f"file://{meeting}", **options)


def report(answer: object) -> None:
    """Print an answer once all ranks have come here."""
    distributed.barrier()
    distributed.destroy_process_group()
    print(json.dumps(answer))


def refusal(feeding: Iterable[Any]) -> str:
    """Return why a loader has no first batch."""
    with pytest.raises(StateMismatch) as raised:
        next(iter(feeding))
    return str(raised.value)


def reduced(rank: str) -> float:
    """A reduction of the user's, in the type that a hidden collective of whole numbers would corrupt silently."""
    total = torch.tensor([1.5 + int(rank)], dtype=torch.float64)
    distributed.all_reduce(total)
    return float(total)


def grow_together(root: str, meeting: str, rank: str) -> None:
    """Two ranks that torch.distributed knows take up what was published, when the first of them says so."""
    join(meeting, rank, backend="cpu:gloo")
    growing = Loader(fb.open_cache(root, generation=0), global_batch_size=2, growth="within", drop_last=False)
    rows = [weighed_numbers(islice(growing, 1000) if rank == "0" else growing) for _ in range(2)]
    assert reduced(rank) == 4.0
    distributed.destroy_process_group()
    print(json.dumps([rows, growing.state_dict()["stream"]["generations"]]))


def grow_after_the_first(root: str, meeting: str, rank: str) -> None:
    """Rank 0 ends its epoch before something is published, rank 1 after that."""
    join(meeting, rank)
    growing = Loader(fb.open_cache(root), global_batch_size=2, growth="epoch")
    batches = iter(growing)
    next(batches)  # compared with the other rank
    if rank == "0":
        list(batches)
    distributed.barrier()
    if rank == "1":
        grow_cache(Path(root).parent, 100, 6)
        list(batches)
    report([growing.epoch, growing.state_dict()["stream"]["generations"]])


def open_apart(root: str, meeting: str, rank: str, world: str) -> None:
    """Ranks of which the last opened another generation."""
    join(meeting, rank, int(world))
    generation = 1 if int(rank) == int(world) - 1 else 0
    feeding = Loader(fb.open_cache(root, generation=generation), global_batch_size=2 * int(world), drop_last=False)
    report(refusal(feeding))


def other_recipes(root: str, meeting: str, rank: str) -> None:
    """Ranks whose caches have equal rows, of recipes that differ; then ranks with other micro-batches."""
    join(meeting, rank)
    own = fb.open_cache(Path(root) / ("2" if int(rank) else "0"))  # the same recipe, other lines
    mixture = Mixture.of([Ingredient(fb.open_cache(Path(root) / "1"), weight=1), Ingredient(own, weight=1)])
    loaders = [
        Loader(fb.open_cache(Path(root) / rank), global_batch_size=2),
        Loader(fb.open_cache(Path(root) / "0"), global_batch_size=4, micro_batches=1 + int(rank)),
        Loader(own, global_batch_size=2),
        Loader(mixture, global_batch_size=2),
    ]
    report([refusal(each) for each in loaders])


def read_apart(root: str, meeting: str, rank: str) -> None:
    """Ranks with other seeds and batch sizes; then one that loads another state."""
    join(meeting, rank)
    cache = fb.open_cache(root)
    options_differ = refusal(Loader(cache, global_batch_size=2 + 2 * int(rank), seed=int(rank)))
    feeding = Loader(cache, global_batch_size=2)
    batches = iter(feeding)
    for _ in range(1 + int(rank)):
        next(batches)
    feeding.load_state_dict(feeding.state_dict())
    positions_differ = refusal(feeding)
    options: dict[str, Any] = {}
    if int(rank):
        options = {"collate": TokenBatch(cache, labels="unshifted", max_documents=9), "columns": ["documents"]}
    report([options_differ, positions_differ, refusal(Loader(cache, global_batch_size=2, **options))])


def leaves(rest: int, columns: Columns) -> NDArray[np.bool_]:
    """Whether the number of a row leaves a rest when it is divided by two."""
    found: NDArray[np.bool_] = np.asarray(columns["tokens"])[:, 0] % 2 == rest
    return found


def take_other_turns(root: str, meeting: str, rank: str) -> None:
    """Ranks whose buckets have other seeds; then the same ones, of which the loaders differ."""
    join(meeting, rank)
    cache, told = fb.open_cache(root), []

    def buckets(**options: Any) -> list[Loader]:
        return [
            Loader(
                cache,
                global_batch_size=2,
                selection=Where(f"n % 2 == {rest}", partial(leaves, rest), ["tokens"]),
                **options,
            )
            for rest in range(2)
        ]

    for seed in range(1, 6):
        told.append(refusal(BucketLoader(buckets(), seed=seed * int(rank))))
    collate = TokenBatch(cache, labels="unshifted" if int(rank) else "shifted")
    told.append(refusal(BucketLoader(buckets(collate=collate))))
    same = BucketLoader(buckets(), seed=3)
    rows = [batch["tokens"][:, 0].tolist() for batch in same]
    report([told, rows])


def one_rank_only(root: str, meeting: str, rank: str) -> None:
    """A loader that rank 0 alone makes: it pairs with nobody's reduction."""
    join(meeting, rank)
    cache, told = fb.open_cache(root), ""
    training = Loader(cache, global_batch_size=2)
    next(iter(training))
    if rank == "0":
        own = Loader(cache, global_batch_size=2, shuffle=None, ranks=Ranks(0, 1))
        assert sum(1 for _ in own) == len(cache) // 2
        joint = Loader(cache, global_batch_size=2, ranks=current_ranks(timeout=0.2))
    assert reduced(rank) == 4.0
    if rank == "0":
        told = refusal(joint)
    assert reduced(rank) == 4.0
    if rank == "1":  # it comes when rank 0 has given up
        told = refusal(Loader(cache, global_batch_size=2))
    assert sum(1 for _ in training) == len(cache) // 2 - 1
    report(told)


def lose_rank_0(root: str, meeting: str, rank: str, store: str) -> None:
    """Rank 0 is gone before its first batch; where it keeps the store of the group, the store is gone, too."""
    kept = shared_store(meeting, rank) if store == "tcp" else distributed.FileStore(meeting, 2)
    distributed.init_process_group("gloo", store=kept, rank=int(rank), world_size=2, timeout=timedelta(seconds=600))
    feeding = Loader(fb.open_cache(root), global_batch_size=2, ranks=current_ranks(timeout=0.2))
    distributed.barrier()
    if rank == "0":
        os._exit(0)
    ranks._GRACE = 0.3
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where torch writes the stacks of its own errors
    with pytest.raises(StateMismatch) as raised:
        next(iter(feeding))
    print(json.dumps(raised.value.facts["ranks"]), flush=True)
    os._exit(0)


def shared_store(meeting: str, rank: str) -> distributed.TCPStore:
    """A store in the process of rank 0, on any free port."""
    place = Path(meeting)
    if rank == "0":
        store = distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        place.with_suffix(".aside").write_text(str(store.port))
        place.with_suffix(".aside").rename(place)
        return store
    while not place.exists():
        time.sleep(0.01)
    return distributed.TCPStore("127.0.0.1", int(place.read_text()), 2, False)


def split_in_two_ways(root: str, meeting: str, rank: str) -> None:
    """Four ranks, two of them data-parallel and two tensor-parallel; then the data-parallel process group."""
    join(meeting, rank, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cache = fb.open_cache(root)
    collate = TokenBatch(cache, derive=["num_label_tokens"])
    by_mesh, by_group = (
        Loader(cache, global_batch_size=4, collate=collate, ranks=part) for part in (mesh["dp"], mesh["dp"].get_group())
    )
    rows, counts = [], []
    for batch, same in zip(by_mesh, by_group, strict=True):
        assert torch.equal(batch["tokens"], same["tokens"])
        rows.append(batch["tokens"][:, 0].tolist())
        counts.append(int(by_mesh.sum_over_ranks(batch["num_label_tokens"])))
    apart = refusal(Loader(cache, global_batch_size=4, seed=mesh.get_local_rank("dp"), ranks=mesh["dp"]))
    with pytest.raises(ValueError, match=r"ranks along tp share a model and need the same rows.*mesh\['dp'\]"):
        Loader(cache, global_batch_size=4, ranks=mesh)
    with pytest.raises(ValueError, match=r"ranks along tp share a model .* or ranks=Ranks\(0, 1\) where there is none"):
        Loader(cache, global_batch_size=4, ranks=mesh["tp"])
    missing = ""
    if mesh.get_local_rank("dp") == 0:
        missing = refusal(Loader(cache, global_batch_size=4, ranks=current_ranks(mesh["dp"], timeout=0.2)))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    assert Loader(cache, global_batch_size=4, ranks=replicated).ranks.world_size == 4
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    assert Loader(cache, global_batch_size=4, ranks=alone).ranks.world_size == 4
    report([mesh.get_coordinate(), rows, counts, apart, missing])


def join_later(root: str, meeting: str, rank: str) -> None:
    """Ranks of the environment, compared once there is a process group."""
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="call init_process_group\\(\\) first, or open one by number"):
        Loader(fb.open_cache(root), global_batch_size=2)
    feeding = Loader(fb.open_cache(root, generation=int(rank)), global_batch_size=2)
    join(meeting, rank)
    with pytest.raises(StateMismatch, match="generations is"):
        next(iter(feeding))
    distributed.barrier()
    distributed.destroy_process_group()
    print("compared")


def weighed_numbers(batches: Iterable[Batch]) -> list[list[int]]:
    """The numbers of the rows of every batch, without those that fill it up."""
    return [batch["tokens"][batch["row_weight"] > 0, 0].tolist() for batch in batches]


COMMANDS: dict[str, Callable[..., None]] = {
    "grow-together": grow_together,
    "grow-after-the-first": grow_after_the_first,
    "open-apart": open_apart,
    "read-apart": read_apart,
    "take-other-turns": take_other_turns,
    "one-rank-only": one_rank_only,
    "join-later": join_later,
    "lose-rank-0": lose_rank_0,
    "other-recipes": other_recipes,
    "split-in-two-ways": split_in_two_ways,
    "leave-in-the-middle": leave_in_the_middle,
    "transform-raises": transform_raises,
    "transform-sleeps": transform_sleeps_for_ever,
    "wait-for-interrupt": wait_for_interrupt,
    "fork-in-the-middle": fork_in_the_middle,
    "fork-and-leave": fork_and_leave,
    "leave-nothing": leave_nothing,
}


def in_ranks(ranks: str, command: str, root: str, meeting: str, *more: str) -> None:
    """Run a command in one process per rank, forked here: importing torch takes seconds. Print what each printed."""
    printed, answers = [], []
    for rank in range(int(ranks)):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: numpy has threads, which are idle here
            child = os.fork()
        if not child:
            os.dup2(writing, sys.stdout.fileno())
            return COMMANDS[command](root, meeting, str(rank), *more)
        os.close(writing)
        printed.append(reading)
    for descriptor in printed:
        with open(descriptor) as file:
            answers.append(file.read())
    assert [os.wait()[1] for _ in printed] == [0] * len(printed)
    print(json.dumps(answers))


if __name__ == "__main__":
    (COMMANDS | {"in-ranks": in_ranks})[sys.argv[1]](*sys.argv[2:])
