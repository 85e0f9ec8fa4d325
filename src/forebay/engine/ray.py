"""Run chunks on a Ray cluster: an actor for each slot computes one and may be writing another. None is restarted."""

import socket
import sys
import time
from contextlib import redirect_stdout
from textwrap import shorten
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, RayError

from forebay.engine import base
from forebay.errors import EngineUnusable

CONNECT_SECONDS = 5.0


class Maker(base.ChunkWorker):
    """An actor."""

    compute = ray.method(concurrency_group="compute")(base.ChunkWorker.compute)
    write = ray.method(concurrency_group="write")(base.ChunkWorker.write)

    def where(self) -> str:
        return f"node '{socket.gethostname()}' ({ray.get_runtime_context().get_node_id()[:6]})"


class RayEngine:
    """Actors of a Ray cluster, each with `num_cpus` and `num_gpus`. `address="auto"` is the cluster of this machine."""

    def __init__(self, address: str = "auto", num_cpus: float = 1, num_gpus: float = 0) -> None:
        self.address = address
        self._each = {"CPU": num_cpus, "GPU": num_gpus}
        actor_class: Any = ray.remote(max_restarts=0, concurrency_groups={"compute": 1, "write": 1})(Maker)
        self._actor_class = actor_class.options(num_cpus=num_cpus, num_gpus=num_gpus)
        self._actors: dict[int, Any] = {}  # by slot
        self._nodes: dict[int, str] = {}  # slot -> node, once its actor has begun
        self._pending: dict[Any, tuple[int, int | None]] = {}  # reference -> slot, and chunk if it is being written
        self._document, self._threads, self._size, self._next_slot = b"", max(1, int(num_cpus)), 0, 0

    def capacity(self) -> int:
        """How many actors the nodes can hold."""
        self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        slots = sum(min(int(node.get(name, 0) // each) for name, each in self._each.items() if each) for node in nodes)
        if not slots:
            needs = " and ".join(f"{each:g} {name}" for name, each in self._each.items() if each)
            problem = f"no node of the cluster at '{self.address}' has {needs}"
            raise EngineUnusable(
                f"the engine 'ray' cannot be used: {problem}",
                hint="ask for less per chunk (num_cpus=, --num-cpus, --num-gpus)",
            )
        return slots

    def start(self, task: base.Task, slots: int) -> None:
        self._connect()
        self._document = task.document().encode()
        self.resize(slots)

    def idle(self) -> list[int]:
        return sorted(self._actors.keys() - {slot for slot, chunk in self._pending.values() if chunk is None})

    def submit(self, slot: int, chunk: int) -> None:
        self._pending[self._actors[slot].compute.remote(chunk)] = slot, None
        self._pending[self._actors[slot].write.remote()] = slot, chunk

    def poll(self, timeout: float) -> list[base.Event]:
        if not self._pending:
            time.sleep(timeout)
            return []
        ray.wait(pending := list(self._pending), timeout=timeout)  # for one; then take all: no free slot waits in line
        ready = ray.wait(pending, num_returns=len(pending), timeout=0)[0]
        taken = [self._take(one) for one in ready if one in self._pending]  # those of an actor found dead are removed
        self.resize(self._size)
        return [event for event in taken if event is not None]

    def resize(self, slots: int) -> None:
        self._size = slots
        done = sorted(self._actors.keys() - {slot for slot, _ in self._pending.values()})
        for slot in done[: max(0, len(self._actors) - slots)]:
            self._end(slot)
        while len(self._actors) < slots:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            self._actors[slot] = self._actor_class.remote(self._document, self._threads)
            self._pending[self._actors[slot].where.remote()] = slot, None

    def usage(self) -> base.EngineUsage:
        begun, slots = len(self._nodes), len(self._actors)
        waiting = f"{slots - begun} of {slots} workers wait for resources of the cluster at '{self.address}'"
        waiting = waiting if begun < slots else ""
        return base.EngineUsage(workers=len(self._actors), elsewhere=True, waiting=waiting)

    def stop(self) -> None:
        self._pending.clear()  # what is under way is lost
        self.resize(0)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        host, _, port = self.address.rpartition("/")[2].rpartition(":")
        try:
            if port.isdecimal():  # Ray ends the process itself where nobody listens
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            with redirect_stdout(sys.stderr):  # which belongs to the records of `--json`
                ray.init(address=self.address, log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, ValueError, RayError) as error:
            problem = f"there is no cluster at '{self.address}' ({shorten(str(error), 120, placeholder=' …')})"
            advice = "start one with `ray start --head`, or pass the address of one (address=, --address HOST:PORT); "
            raise EngineUnusable(
                f"the engine 'ray' cannot be used: {problem}", hint=advice + "on one machine, leave out --engine"
            ) from error

    def _take(self, reference: Any) -> base.Event | None:
        slot, chunk = self._pending[reference]
        try:
            answer = ray.get(reference)
        except RayError as error:
            return self._death(slot, error)
        del self._pending[reference]
        self._nodes.update({slot: answer} if isinstance(answer, str) else {})
        return None if chunk is None else msgspec.msgpack.decode(answer, type=base.Done | base.Failed)

    def _death(self, slot: int, error: RayError) -> base.Died:
        name = f"actor {slot} on {self._nodes[slot]}" if slot in self._nodes else f"actor {slot}"
        chunks, text = self._end(slot), str(error)
        if isinstance(error, ActorUnavailableError | NodeDiedError) or "node has died" in text:
            return base.Died(None, name, "was lost: its node does not answer", tuple(chunks))  # not of a chunk
        reason, at = f"died ({_first_and_last(text)})", chunks[-1] if chunks else None
        return base.Died(at, name, reason, tuple(chunks[:-1]), began=at is not None)

    def _end(self, slot: int) -> list[int]:
        """End an actor; return the chunks that it has not written, in order."""
        ray.kill(self._actors.pop(slot))
        self._nodes.pop(slot, None)
        references = [reference for reference, (at, _) in self._pending.items() if at == slot]
        return [chunk for reference in references if (chunk := self._pending.pop(reference)[1]) is not None]


def _first_and_last(text: str) -> str:
    """The first and the last line of a long error, one of which has the cause."""
    lines = [shorten(line, 200, placeholder=" …") for line in text.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
