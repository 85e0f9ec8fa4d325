"""Run chunks on a Ray cluster: an actor for each slot computes one and may be writing another. None is restarted."""

import socket
import sys
import time
from contextlib import redirect_stdout, suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay.engine.base import ChunkWorker, Died, Done, EngineUsage, Event, Failed, Task, TaskDocument, set_up_process
from forebay.errors import EngineUnusable

PROBE_SECONDS, CONNECT_SECONDS = 120.0, 5.0


class Maker(ChunkWorker):
    """An actor. A node is tried by making one too."""

    compute = ray.method(concurrency_group="compute")(ChunkWorker.compute)
    write = ray.method(concurrency_group="write")(ChunkWorker.write)

    def __init__(self, document: bytes, threads: int) -> None:
        set_up_process(threads)  # a `runtime_env` starts slower
        super().__init__(document)


class RayEngine:
    """Actors of a Ray cluster, each with `num_cpus` and `num_gpus`. `address="auto"` is the cluster of this machine."""

    def __init__(self, address: str = "auto", num_cpus: float = 1, num_gpus: float = 0) -> None:
        self.address = address
        self._wanted = {"CPU": num_cpus, "GPU": num_gpus}
        actor_class: Any = ray.remote(max_restarts=0, concurrency_groups={"compute": 1, "write": 1})(Maker)
        self._actor_class = actor_class.options(num_cpus=num_cpus, num_gpus=num_gpus)
        self._actors: dict[int, Any] = {}  # by slot
        self._pending: dict[Any, tuple[int, int | None]] = {}  # reference -> slot, and chunk if it is being written
        self._document, self._threads, self._size, self._next_slot = b"", max(1, int(num_cpus)), 0, 0

    def capacity(self) -> int:
        self._connect()
        found = ray.cluster_resources()
        slots = min((int(found.get(name, 0) // each) for name, each in self._wanted.items() if each), default=1)
        if not slots:
            has = ", ".join(f"{found.get(name, 0):g} {name}" for name in self._wanted)
            raise EngineUnusable("ray", f"the cluster at '{self.address}' has {has}", "ask for less per chunk")
        return slots

    def preload(self, document: TaskDocument, slots: int) -> None: ...  # actors are started with their task

    def start(self, task: Task, slots: int) -> None:
        """Open the task on every node before any work: a folder may not be shared, a package may be missing."""
        self._connect()
        self._document = task.document().encode()
        self.resize(slots)  # actors start while the nodes are tried
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        probes = [next(iter(self._pending))]  # a single node is tried by its actor, unless others have all its CPUs
        if len(nodes) != 1 or not ray.wait(probes, timeout=CONNECT_SECONDS)[0]:
            remote: Any = ray.remote(num_cpus=0, max_retries=0)(lambda *arguments: bool(Maker(*arguments)))
            places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
            probes = [remote.options(scheduling_strategy=at).remote(self._document, self._threads) for at in places]
        try:
            for node, probe in zip(nodes, probes, strict=True):
                _check_node(node["NodeManagerHostname"], probe)
        except BaseException:  # actors of this task must not be given the next one
            self.stop()
            raise

    def idle(self) -> list[int]:
        return sorted(self._actors.keys() - {slot for slot, chunk in self._pending.values() if chunk is None})

    def submit(self, slot: int, chunk: int) -> None:
        self._pending[self._actors[slot].compute.remote(chunk)] = slot, None
        self._pending[self._actors[slot].write.remote()] = slot, chunk

    def poll(self, timeout: float) -> list[Event]:
        if not self._pending:
            time.sleep(timeout)
            return []
        pending = list(self._pending)
        ray.wait(pending, timeout=timeout)  # for one; then take all that are ready: a free slot must not wait in line
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
            self._pending[self._actors[slot].__ray_ready__.remote()] = slot, None

    def usage(self) -> EngineUsage:
        return EngineUsage(workers=len(self._actors))

    def stop(self) -> None:
        self._pending.clear()  # what is under way is lost
        self.resize(0)

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

    def _take(self, reference: Any) -> Event | None:
        slot, chunk = self._pending[reference]
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            chunks, text = self._end(slot), " ".join(str(error).split())
            if "node has died" in text or "node was terminated" in text:
                return Died(None, f"actor {slot}", "was lost with its node", tuple(chunks))
            at = chunks[-1] if chunks else None  # it died alone, perhaps of this one
            return Died(at, f"actor {slot}", f"died ({text[-160:]})", tuple(chunks[:-1]), began=at is not None)
        del self._pending[reference]
        return None if chunk is None else msgspec.msgpack.decode(answer, type=Done | Failed)

    def _end(self, slot: int) -> list[int]:
        """End an actor; return the chunks that it has not written, in order."""
        ray.kill(self._actors.pop(slot))
        references = [reference for reference, (at, _) in self._pending.items() if at == slot]
        return [chunk for reference in references if (chunk := self._pending.pop(reference)[1]) is not None]


def _check_node(name: str, probe: Any) -> None:
    try:
        with suppress(NodeDiedError, TaskUnschedulableError):  # it is gone by now
            ray.get(probe, timeout=PROBE_SECONDS)
    except RayError as error:  # it does not answer, or has no forebay
        problem = f"node '{name}' cannot begin: {str(error).strip().splitlines()[-1]}"
        advice = "install the same packages as here ('forebay[ray]'), and name a cache that every node reaches"
        raise EngineUnusable("ray", problem, advice) from error
