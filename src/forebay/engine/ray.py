"""Run chunks on a Ray cluster: an actor for each slot computes one and may be writing another. None is restarted."""

import gc
import os
import socket
import sys
import time
from contextlib import redirect_stdout
from functools import cached_property
from queue import Queue
from typing import Any

import msgspec
import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay.engine.base import (
    THREADS,
    Died,
    Done,
    EngineUsage,
    Event,
    Failed,
    Finish,
    Task,
    TaskDocument,
    attempt_beginning,
)
from forebay.errors import EngineUnusable

PROBE_SECONDS, CONNECT_SECONDS = 120.0, 5.0


class Maker:
    """An actor: a thread computes the chunks of a slot, another writes them. A node is tried by making one too."""

    def __init__(self, document: bytes, threads: int = 1) -> None:
        for name in THREADS:  # as local workers have it; a `runtime_env` starts slower
            os.environ.setdefault(name, str(threads))
        self._maker = TaskDocument.decode(document).open()
        self._computed: Queue[Finish] = Queue()

    def compute(self, chunk: int) -> None:
        if gc.isenabled():  # as local workers do: garbage is collected between chunks only
            gc.freeze()
            gc.disable()
        finish = attempt_beginning(self._maker, chunk)
        self._computed.join()  # the one before is written
        self._computed.put(finish)
        del finish  # so that its buffers can be freed
        gc.collect()

    def write(self) -> bytes:
        event = self._computed.get()()
        self._computed.task_done()
        return msgspec.msgpack.encode(event)


class RayEngine:
    """Actors of a Ray cluster, each with `num_cpus` and `num_gpus`. `address="auto"` is the cluster of this machine."""

    def __init__(self, address: str = "auto", num_cpus: float = 1, num_gpus: float = 0) -> None:
        self.address = address
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._threads = max(1, int(num_cpus))
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}  # reference -> slot
        self._chunks: dict[int, list[int]] = {}  # slot -> what is written and computed there, in that order
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
        self._chunks[slot].append(chunk)
        actor = self._actors[slot]
        self._pending[actor.compute.options(concurrency_group="compute").remote(chunk)] = slot
        self._pending[actor.write.options(concurrency_group="write").remote()] = slot

    def poll(self, timeout: float) -> list[Event]:
        if not self._pending:
            time.sleep(timeout)
        ready = ray.wait(list(self._pending), timeout=timeout)[0] if self._pending else []
        events = [event for reference in ready if (event := self._take(reference)) is not None]
        self.resize(self._size)
        return events

    def resize(self, slots: int) -> None:
        self._size = slots
        done = [slot for slot in self.idle() if not self._chunks[slot]]
        for slot in done[: max(0, len(self._actors) - slots)]:
            self._end(slot)
        while len(self._actors) < self._size:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._actors[slot], self._chunks[slot] = self._actor_class.remote(self._document, self._threads), []
            self._pending[self._actors[slot].__ray_ready__.remote()] = slot

    @cached_property
    def _actor_class(self) -> Any:
        """Made once: Ray inspects the class for it, and `resize` runs after every poll."""
        groups = {"compute": 1, "write": 1}
        return ray.remote(max_restarts=0, concurrency_groups=groups, **self._resources)(Maker)

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
        slot = self._pending.pop(reference)
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            return _died(slot, self._end(slot), " ".join(str(error).split()))
        if not isinstance(answer, bytes):  # it has started, or computed a chunk
            self._idle.add(slot)
            return None
        event: Done | Failed = msgspec.msgpack.decode(answer, type=Done | Failed)
        self._chunks[slot].remove(event.chunk)
        return event

    def _end(self, slot: int) -> list[int]:
        ray.kill(self._actors.pop(slot))
        self._idle.discard(slot)
        self._pending = {one: kept for one, kept in self._pending.items() if kept != slot}
        return self._chunks.pop(slot)


def _died(slot: int, chunks: list[int], text: str) -> Died:
    """A node that is gone takes its chunks with it; an actor that dies alone may have died of the last one."""
    if "node has died" in text or "node was terminated" in text:
        return Died(None, f"actor {slot}", "was lost with its node", tuple(chunks))
    at = chunks[-1] if chunks else None
    return Died(at, f"actor {slot}", f"died ({text[-160:]})", tuple(chunks[:-1]), began=at is not None)
