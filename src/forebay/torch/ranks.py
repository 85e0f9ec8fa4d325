"""Find this process's rank, and let the ranks of a loader compare what they read.

Ranks use the key-value store of the process group, never a collective: a loader that only some ranks have cannot be
paired with another's all_reduce. Every wait has a timeout, and its error names the ranks that are missing.

    rank r   ── <loader>/<question>/r ──▶ store ──▶ rank 0 compares ── <loader>/<question>/verdict ──▶ every rank

Loaders are numbered in the order of their first iteration, so every rank must iterate its loaders in the same order.
Those of a process group or a device mesh are numbered apart: the data-parallel ranks of a model that is also split by
tensors or stages compare themselves with each other only.
"""

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from forebay.errors import StateMismatch
from forebay.feeding.stream import Ranks

RANK_TIMEOUT = 600.0  # seconds; another rank may still be loading a model before its first batch
RankSource = Ranks | distributed.ProcessGroup | DeviceMesh | None
_GRACE = 30.0  # seconds that ranks wait longer than rank 0, which knows the missing ranks
_SHORTEST, _LONGEST = 0.005, 0.25  # seconds between two polls of the store
_SPLITS_MODEL = frozenset({"tp", "pp", "cp", "ep", "sp"})  # usual names of dimensions whose ranks need the same rows
_loaders: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)  # by the ranks that share them


def current_ranks(source: RankSource = None, timeout: float = RANK_TIMEOUT) -> Ranks:
    """Return the ranks: as passed, else from torch.distributed, else from torchrun's environment, else 0 of 1."""
    return source if isinstance(source, Ranks) else replace(_ranks(source), timeout=timeout)


def _ranks(source: RankSource) -> Ranks:
    if isinstance(source, distributed.ProcessGroup):
        return _among(distributed.get_process_group_ranks(source), "process group")
    if isinstance(source, DeviceMesh):
        return _among(_checked_mesh(source).mesh.flatten().tolist(), "device mesh")
    if source is not None:
        raise TypeError(f"ranks is {source!r}; pass Ranks(rank, world_size), a process group or mesh['dp']")
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size(), "group")
    return Ranks(_number_in("RANK", 0), _number_in("WORLD_SIZE", 1), "environment")


def local_rank() -> int:
    """Return the number of this process on its machine, as torchrun sets it."""
    return _number_in("LOCAL_RANK", 0)


def _number_in(variable: str, default: int) -> int:
    value = os.environ.get(variable, str(default))
    if not value.strip().isdecimal():
        raise ValueError(f"the environment variable {variable} is {value!r}; set a whole number, as torchrun does")
    return int(value)


def _checked_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Raise for a mesh in which several ranks share a model, and so need the same rows."""
    names = mesh.mesh_dim_names or ()
    splitting = [name for name, side in zip(names, mesh.mesh.shape, strict=False) if name in _SPLITS_MODEL and side > 1]
    if splitting:
        data = [name for name in names if name not in _SPLITS_MODEL]
        part = f"ranks=mesh[{', '.join(map(repr, data)) or repr('dp')}]"
        raise ValueError(
            f"the device mesh has the dimensions {', '.join(names)}, but ranks along {', '.join(splitting)} share a "
            f"model and need the same rows; pass the data-parallel part: {part}"
            + ("" if data else ", or ranks=Ranks(0, 1) where there is none")
        )
    return mesh


def _among(members: Sequence[int], argument: str) -> Ranks:
    rank = distributed.get_rank()
    if rank not in members:
        raise ValueError(f"rank {rank} is not in the {argument}, which has the ranks {list(members)}")
    return Ranks(members.index(rank), len(members), "group", tuple(members))


def sum_over(value: Tensor, ranks: Ranks, source: RankSource) -> Tensor:
    """Return the sum of a tensor over ranks: a collective, which all of them must call."""
    if ranks.world_size == 1:
        return value
    if ranks.known_by == "arguments":
        raise ValueError("ranks that were passed as numbers have no process group to sum over; pass ranks=group")
    if not distributed.is_initialized():
        raise ValueError(
            f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size} are set, but torch.distributed has no process group "
            "to sum over; call init_process_group() first"
        )
    total = value.clone()
    groups: list[distributed.ProcessGroup | None]
    if isinstance(source, DeviceMesh):
        groups = [*source.get_all_groups()]
    else:
        groups = [source if isinstance(source, distributed.ProcessGroup) else None]
    for group in groups:
        distributed.all_reduce(total, group=group)
    return total


class RankStore(Protocol):
    """The methods used of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Agreement:
    """Compares facts between the ranks of one loader. Ranks that were passed as arguments are not compared."""

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout of Ranks must be a number of seconds above 0 (got {timeout!r})")
        self._ranks, self._timeout = ranks, timeout
        self._name: str | None = None
        self._questions = itertools.count()

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise on every rank if a rank has other facts or is missing."""
        store = self._store()
        if store is None:
            return
        key = self._next_key()
        with self._naming_rank_0():
            store.set(f"{key}/{self._ranks.rank}", json.dumps(_flat(facts)))
            if self._ranks.rank == 0:
                store.set(f"{key}/verdict", json.dumps(self._compared(store, key)))
            verdict = json.loads(self._awaited(store, f"{key}/verdict"))
        if verdict["missing"]:
            raise self._missing(verdict["missing"], verdict["seconds"])
        if verdict["differs"]:
            differs = {name: (first, self._named(rank), other) for name, first, rank, other in verdict["differs"]}
            raise _different_batches(differs, self._named(0))

    def first(self, number: int) -> int:
        """Return the number of rank 0; every rank must call this."""
        store = self._store()
        if store is None:
            return number
        key = self._next_key()
        with self._naming_rank_0():
            if self._ranks.rank == 0:
                store.set(f"{key}/verdict", json.dumps(number))
            return int(json.loads(self._awaited(store, f"{key}/verdict")))

    @contextmanager
    def _naming_rank_0(self) -> Iterator[None]:
        """Report rank 0 if the store does not answer: its process usually hosts the store."""
        started = time.monotonic()
        try:
            yield
        except distributed.DistError as error:
            raise self._missing([0], round(time.monotonic() - started, 1)) from error

    def _named(self, rank: int) -> int:
        """Return the global number of a rank, as messages show it."""
        return self._ranks.members[rank] if self._ranks.members else rank

    def _missing(self, missing: Sequence[int], seconds: float) -> StateMismatch:
        ranks = self._ranks
        named, rank = [self._named(each) for each in missing], self._named(ranks.rank)
        world = f"a group of {ranks.world_size}" if ranks.members else str(ranks.world_size)
        listed = f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))} of {world}"
        message = f"waited {seconds:g} s for {listed} to iterate this loader"
        if rank in named:
            message = (
                f"rank {rank} of {world} iterates this loader too late: the others waited {seconds:g} s and gave up"
            )
        return StateMismatch(
            f"{message}; every rank must iterate the same loaders in the same order",
            hint="pass ranks=Ranks(0, 1) to a loader that only one rank has, or a larger timeout",
            ranks=named,
        )

    def _store(self) -> RankStore | None:
        """Return the store of the default process group, if these ranks are in it."""
        ranks = self._ranks
        if ranks.world_size == 1 or ranks.known_by == "arguments" or not distributed.is_initialized():
            return None
        group = distributed.group.WORLD
        if group is None:
            return None
        if not ranks.members and (group.rank(), group.size()) != (ranks.rank, ranks.world_size):
            return None
        store: RankStore = group.get_group_store()
        return store

    def _next_key(self) -> str:
        if self._name is None:
            members = self._ranks.members
            shared = f"ranks-{'-'.join(map(str, members))}/" if members else ""
            self._name = f"forebay/{shared}loader-{next(_loaders[members])}"
        return f"{self._name}/{next(self._questions)}"

    def _compared(self, store: RankStore, key: str) -> dict[str, Any]:
        """Return the missing ranks, or else the facts in which a rank differs from rank 0."""
        keys = [f"{key}/{rank}" for rank in range(self._ranks.world_size)]
        if not _wait_for(store, keys, self._timeout):
            missing = [rank for rank, rank_key in enumerate(keys) if not store.check([rank_key])]
            return {"missing": missing, "differs": [], "seconds": self._timeout}
        facts = [json.loads(store.get(rank_key)) for rank_key in keys]
        return {"missing": [], "differs": _differences(facts)}

    def _awaited(self, store: RankStore, key: str) -> bytes:
        if not _wait_for(store, [key], self._timeout + _GRACE):
            raise self._missing([0], self._timeout + _GRACE)
        return store.get(key)


def _wait_for(store: RankStore, keys: Sequence[str], seconds: float) -> bool:
    """Return whether the keys are set in time. It polls: a blocking wait would block other callers and Ctrl-C."""
    begun, pause = time.monotonic(), _SHORTEST
    while not store.check(list(keys)):
        waited = time.monotonic() - begun
        if waited >= seconds:
            return False
        time.sleep(min(pause, seconds - waited))
        pause = min(2 * pause, _LONGEST)
    return True


def _differences(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any, int, Any]]:
    """Return (name, value of rank 0, first rank that differs, its value) for each fact that differs."""
    differences = []
    for name in dict.fromkeys(name for rank_facts in facts for name in rank_facts):
        values = [rank_facts.get(name) for rank_facts in facts]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append((name, values[0], other, values[other]))
    return differences


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested facts to names such as `mixture[0].generations`, without cache ids, which differ in copies."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, before if name == "stream" else f"{before}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value):
                flat |= _flat(each, f"{before}{name}[{number}].")
        elif name in _WORDS:
            flat[f"{_WORDS[name]} of {before.removesuffix('.')}" if before else _WORDS[name]] = value
        elif name != "cache_id":
            flat[f"{before}{name}"] = value
    return flat


_WORDS = {"chunks": "content of the cache", "selected": "selected rows"}  # for fields of a state


def _different_batches(differs: Mapping[str, tuple[object, int, object]], first_rank: int) -> StateMismatch:
    """`differs` maps a name to the value of the first rank, another rank that differs, and its value."""
    shown = "; ".join(
        f"{name} is {first!r} on rank {first_rank} and {other!r} on rank {rank}"
        for name, (first, rank, other) in differs.items()
    )
    hint = "create the same loaders in the same order, and pass ranks=Ranks(0, 1) to one that only one rank has"
    if any("generations" in name or "content" in name for name in differs):
        hint = "open the same generation on every rank (fb.open_cache(root, generation=…))"
    return StateMismatch(f"the ranks of this loader would make different batches: {shown}", hint=hint)
