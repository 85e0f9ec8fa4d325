"""Lines of the resume table that change the number of processes under `torchrun`: two, then one, then two."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest
import torch
from tests.helpers.processes import REPOSITORY, script_environment
from tests.helpers.resume_table import (
    BATCH,
    EPOCH,
    ROWS,
    STEPS,
    STOP,
    Run,
    Step,
    Train,
    line,
    loader_steps,
    new_dataset,
    new_loader,
    step_of,
    world_size,
)
from tests.helpers.token_caches import token_cache
from tests.integration.test_resume_table import (
    lightning_rows,
    lightning_run,
    train_accelerate,
    train_accelerate_dataset,
    train_transformers,
)
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forebay as fb
from forebay.torch import Loader


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("tokens"), ROWS))


def in_order(shares: Iterable[Step]) -> Step:
    """The rows of a step and their random choices, whichever rank had them."""
    return tuple(map(list, zip(*sorted(pair for share in shares for pair in zip(*share, strict=True)), strict=True)))


def torchrun(count: int, function: Train, cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    """Steps `first` to `last` of a training function, in as many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    arguments = [function.__module__, function.__name__, cache.root, folder, first, last]
    run = subprocess.run(
        [*command, "-m", "tests.helpers.torchrun_steps", *map(str, arguments)],
        env=script_environment() | {"OMP_NUM_THREADS": "1"}, cwd=REPOSITORY,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    shares = json.loads((folder / "steps.json").read_text())
    assert len(shares) == count
    assert len({len(rows) for share in shares for rows, _ in share}) == 1, "ranks have equal shares"
    return [in_order(step) for step in zip(*shares, strict=True)]


def on_other_world_sizes(function: Train, whole: list[Step], cache: fb.Cache, folder: Path) -> Run:
    """Two processes, stopped in the second epoch; then one, stopped in the third; then two again."""
    legs = [
        torchrun(count, function, cache, folder, first, last)
        for count, first, last in ((2, 0, STOP), (1, STOP, STOP + EPOCH), (2, STOP + EPOCH, STEPS))
    ]
    return [in_order([step]) for step in whole], legs[0], legs[1] + legs[2]


def train_wrapped(model: torch.nn.Module, loader: Loader, folder: Path, first: int, last: int) -> list[Step]:
    """Train from the checkpoint of step `first`, and write that of step `last`."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    if first:
        state = {"model": get_model_state_dict(model), "loader": loader}
        dcp.load(state, checkpoint_id=folder / f"step-{first}")
        set_model_state_dict(model, state["model"])
    for batch in loader.forever(last - first):
        seen.append(step_of(batch))
        optimizer.zero_grad()
        model(batch["coin"].float().unsqueeze(1)).sum().backward()
        optimizer.step()
    states = [{} for _ in range(world_size())]
    distributed.all_gather_object(states, loader.state_dict())
    assert all(state == states[0] for state in states)
    assert len(json.dumps(states[0])) < 1000
    dcp.save({"model": get_model_state_dict(model), "loader": loader}, checkpoint_id=folder / f"step-{last}")
    return seen


def train_ddp(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    model = DistributedDataParallel(torch.nn.Linear(1, 2))
    return train_wrapped(model, new_loader(cache), folder, first, last)


def train_fsdp(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    mesh = init_device_mesh("cpu", (world_size(),), mesh_dim_names=("dp",))
    model = fully_shard(torch.nn.Linear(1, 2), mesh=mesh)
    return train_wrapped(model, new_loader(cache, ranks=mesh["dp"]), folder, first, last)


@line
def test_ddp_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    return on_other_world_sizes(train_ddp, loader_steps(cache), cache, tmp_path)


@line
def test_fsdp_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    return on_other_world_sizes(train_fsdp, loader_steps(cache), cache, tmp_path)


def train_lightning(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    return lightning_run(lightning_rows(cache), folder, last, folder / "last.ckpt" if first else None)


@line
def test_lightning_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    return on_other_world_sizes(train_lightning, loader_steps(cache), cache, tmp_path)


@line
def test_accelerate_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    return on_other_world_sizes(train_accelerate, loader_steps(cache), cache, tmp_path)


@line
def test_accelerate_skips_batches_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    whole = train_accelerate_dataset(cache, tmp_path, 0, STEPS)
    return on_other_world_sizes(train_accelerate_dataset, whole, cache, tmp_path)


@line
def test_transformers_trainer_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    whole = train_transformers(cache, tmp_path / "whole", 0, STEPS)
    return on_other_world_sizes(train_transformers, whole, cache, tmp_path)


def train_stateful(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    stateful, rank = import_module("torchdata.stateful_dataloader"), int(os.environ.get("RANK", "0"))
    samplers, dataset = import_module("torchdata.stateful_dataloader.sampler"), new_dataset(cache)
    sampler = samplers.StatefulDistributedSampler(dataset, num_replicas=world_size(), rank=rank, seed=3)
    loader = stateful.StatefulDataLoader(dataset, batch_size=BATCH // world_size(), sampler=sampler)
    if first:
        loader.load_state_dict(torch.load(folder / f"step-{first}.pt"))
    seen: list[Step] = []
    for epoch in range(first // EPOCH, -(-last // EPOCH)):
        sampler.set_epoch(epoch)
        dataset.set_epoch(epoch)
        seen += map(step_of, islice(loader, last - first - len(seen)))
    if rank == 0:
        torch.save(loader.state_dict(), folder / f"step-{last}.pt")
    return seen


@line
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated, please do not call:UserWarning")
def test_stateful_dataloader_on_other_world_sizes(cache: fb.Cache, tmp_path: Path) -> Run:
    return on_other_world_sizes(train_stateful, train_stateful(cache, tmp_path, 0, STEPS), cache, tmp_path)
