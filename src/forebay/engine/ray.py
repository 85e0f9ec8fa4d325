"""Run chunks on a Ray cluster: one actor per slot, one chunk in flight each. Ray never restarts an actor."""

import os
import socket
import sys
import time
from contextlib import redirect_stdout
from typing import Any

import msgspec
import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay.engine.base import Died, Done, EngineUsage, Event, Failed, Task, TaskDocument, attempt_chunk
from forebay.errors import EngineUnusable

PROBE_SECONDS, CONNECT_SECONDS = 120.0, 5.0


class Maker:
    """An actor: makes the chunks of one slot. It is also made, and thrown away, where a node is tried."""

    def __init__(self, document: bytes) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # as local workers have it; a `runtime_env` starts slower
        self._maker = TaskDocument.decode(document).open()

    def make(self, chunk: int) -> bytes:
        return msgspec.msgpack.encode(attempt_chunk(self._maker, chunk))


class RayEngine:
    """Actors of a Ray cluster, each with `num_cpus` and `num_gpus`. `address="auto"` is the cluster of this machine."""

    def __init__(self, address: str = "auto", num_cpus: float = 1, num_gpus: float = 0) -> None:
        self.address = address
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, tuple[int, int | None]] = {}  # reference -> slot, its chunk; None: it starts
        self._idle: set[int] = set()
        self._size, self._next_slot, self._document = 0, 0, b""

    def capacity(self) -> int:
        self._connect()
        found, wanted = ray.cluster_resources(), {name[4:-1].upper(): each for name, each in self._resources.items()}
        slots = min((int(found.get(name, 0) // each) for name, each in wanted.items() if each), default=1)
        if not slots:
            has = ", ".join(f"{found.get(name, 0):g} {name}" for name in wanted)
            raise EngineUnusable("ray", f"the cluster at '{self.address}' has {has}", "ask for less per chunk")
        return slots

    def preload(self, document: TaskDocument, slots: int) -> None: ...  # actors are started with their task

    def start(self, task: Task, slots: int) -> None:
        self._connect()
        self._document = task.document().encode()
        probes = self._probes()
        self.resize(slots)  # actors start while the nodes are tried
        try:
            self._check_nodes(probes)
        except BaseException:  # actors of this task must not be given the next one
            self.stop()
            raise

    def idle(self) -> list[int]:
        return sorted(self._idle)

    def submit(self, slot: int, chunk: int) -> None:
        self._idle.discard(slot)
        self._pending[self._actors[slot].make.remote(chunk)] = (slot, chunk)

    def poll(self, timeout: float) -> list[Event]:
        if not self._pending:
            time.sleep(timeout)
        ready = ray.wait(list(self._pending), timeout=timeout)[0] if self._pending else []
        events = [event for reference in ready if (event := self._take(reference)) is not None]
        self.resize(self._size)
        return events

    def resize(self, slots: int) -> None:
        self._size = slots
        for slot in self.idle()[: max(0, len(self._actors) - slots)]:
            self._end(slot)
        remote: Any = ray.remote(max_restarts=0, **self._resources)(Maker)
        while len(self._actors) < self._size:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._actors[slot] = remote.remote(self._document)
            self._pending[self._actors[slot].__ray_ready__.remote()] = (slot, None)

    def usage(self) -> EngineUsage:
        return EngineUsage(workers=len(self._actors))

    def stop(self) -> None:
        self._size = 0
        for slot in list(self._actors):
            self._end(slot)

    close = stop

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        host, _, port = self.address.rpartition("/")[2].rpartition(":")
        try:
            if port.isdecimal():  # Ray ends the process itself where nobody listens
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            with redirect_stdout(sys.stderr):  # which belongs to the records of `--json`
                ray.init(address=self.address, log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, RayError) as error:
            problem = f"there is no cluster at '{self.address}' ({str(error).splitlines()[0][:120]})"
            advice = "start one with `ray start --head`, or pass the address of one (address=, --address HOST:PORT)"
            raise EngineUnusable("ray", problem, advice) from error

    def _probes(self) -> list[tuple[str, Any]]:
        """Open the task on every node before any work: a folder may not be shared, a package may be missing."""
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(lambda document: bool(Maker(document)))
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        places = (NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes)
        tried = (remote.options(scheduling_strategy=place).remote(self._document) for place in places)
        return [(node["NodeManagerHostname"], probe) for node, probe in zip(nodes, tried, strict=True)]

    def _check_nodes(self, probes: list[tuple[str, Any]]) -> None:
        for name, probe in probes:
            try:
                ray.get(probe, timeout=PROBE_SECONDS)
            except (NodeDiedError, TaskUnschedulableError):  # it is gone by now
                continue
            except RayError as error:  # it does not answer, or has no forebay
                problem = f"node '{name}' cannot begin: {str(error).strip().splitlines()[-1]}"
                advice = "install the same packages as here ('forebay[ray]'), and name a cache that every node reaches"
                raise EngineUnusable("ray", problem, advice) from error

    def _take(self, reference: Any) -> Event | None:
        slot, chunk = self._pending.pop(reference)
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            self._end(slot)
            return _died(slot, chunk, " ".join(str(error).split()))
        self._idle.add(slot)
        return None if chunk is None else msgspec.msgpack.decode(answer, type=Done | Failed)

    def _end(self, slot: int) -> None:
        ray.kill(self._actors.pop(slot))
        self._idle.discard(slot)
        self._pending = {one: kept for one, kept in self._pending.items() if kept[0] != slot}


def _died(slot: int, chunk: int | None, text: str) -> Died:
    """A node that is gone takes its chunks with it; an actor that dies alone may have died of its chunk."""
    if "node has died" in text or "node was terminated" in text:
        return Died(None, f"actor {slot}", "was lost with its node", () if chunk is None else (chunk,))
    return Died(chunk, f"actor {slot}", f"died ({text[-160:]})", began=chunk is not None)
