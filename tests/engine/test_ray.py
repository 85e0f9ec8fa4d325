"""A real Ray cluster on this machine: the same bytes as local workers, whatever nodes die.

Starting three nodes takes a while, so one test of them is in every run; the others run with `make test-long`.
"""

import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pytest
from tests.helpers.builders import chunk_digests, script_environment
from tests.helpers.obedient_recipes import NOTES, ObedientRecipe, makes, orders, write_orders
from tests.torch.taught import chunks_of, prompts_cache

import forebay as fb
from forebay.building import run
from forebay.engine.base import Died
from forebay.errors import EngineUnusable, LibraryMissing
from forebay.teachers import Clip, Lune, TeacherRecipe
from forebay.testing import EngineContract
from forebay.testing.engine_contract import Squares, stopping, wait_for_slots

ray = pytest.importorskip("ray")  # `make setup` installs it
Cluster = importlib.import_module("ray.cluster_utils").Cluster
RayEngine = importlib.import_module("forebay.engine.ray").RayEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.xdist_group("ray"),
]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notes")
    os.environ[NOTES] = str(folder)  # before the nodes start: they hand it on to their workers
    yield folder
    del os.environ[NOTES]


@pytest.fixture(scope="module")
def cluster(notes):
    started = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    for _ in range(2):
        started.add_node(**NODE)
    ray.init(address=started.address, log_to_driver=False, logging_level="error")
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def source(tmp_path, notes):
    (notes / "makes").unlink(missing_ok=True)
    return fb.sources.lines(write_orders(tmp_path / "source.txt", orders(24)))


def undisturbed(tmp_path, source, **fields):
    fb.build(tmp_path / "undisturbed", source, ObedientRecipe(**fields), workers=0)
    return chunk_digests(tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
class TestRayEngine(EngineContract):
    def make_engine(self):
        return RayEngine()


@pytest.mark.long
def test_a_build_on_a_cluster_has_the_bytes_of_a_local_one(tmp_path, cluster, notes, source):
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine="ray")
    assert report.built == 24
    assert {pid for pid, _ in makes(notes)} & {os.getpid()} == set()
    assert chunk_digests(tmp_path / "cache") == undisturbed(tmp_path, source)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_nodes_that_are_killed_cost_their_chunks_only(tmp_path, cluster, notes, kills):
    """A node is killed whenever eight more chunks were begun, and another is started in its place."""
    (notes / "makes").unlink(missing_ok=True)
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(12 * kills)))
    killed = []

    def kill_now_and_then(progress):
        if len(killed) < kills and len(makes(notes)) >= 8 * (len(killed) + 1):
            killed.append(next(iter(cluster.worker_nodes)))
            cluster.remove_node(killed[-1], allow_graceful=False)
            cluster.add_node(**NODE)

    recipe = ObedientRecipe(seconds=0.2)
    report = fb.build(tmp_path / "cache", source, recipe, engine=RayEngine(), workers=2, on_progress=kill_now_and_then)
    assert len(killed) == kills
    assert report.chunks == 12 * kills
    assert report.built + len(report.deaths) >= 12 * kills, "an actor can die between its chunk and its record"
    counts = Counter(chunk for _, chunk in makes(notes))
    assert counts.total() <= 12 * kills + 2 * len(report.deaths), "an actor computes a chunk while it writes another"
    assert max(counts.values()) <= 1 + len(report.deaths)
    assert 1 <= len(report.deaths) <= 2 * kills
    lost = [death for death in report.deaths if death.endswith("was lost: its node does not answer")]
    assert len(lost) == len(report.deaths), "no chunk is blamed, and none of this is an attempt at one"
    assert chunk_digests(tmp_path / "cache") == undisturbed(tmp_path, source, seconds=0.2)
    assert fb.status(tmp_path / "cache").claims == ()


@pytest.mark.long
def test_a_chunk_that_kills_its_actor_is_named_and_made_by_another(tmp_path, cluster, notes):
    (notes / "makes").unlink(missing_ok=True)
    source = fb.sources.lines(write_orders(tmp_path / "deadly.txt", orders(4, c2="die SIGKILL 1")))
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine="ray")
    assert report.built == 4
    (death,) = report.deaths
    assert death.endswith("while making chunk 2")


@pytest.mark.long
def test_a_driver_that_was_killed_is_started_again_and_makes_what_is_missing(tmp_path, cluster, notes, source):
    script = textwrap.dedent(
        f"""
        import forebay as fb
        from forebay.engine.ray import RayEngine
        from tests.helpers.obedient_recipes import ObedientRecipe
        source = fb.sources.lines({str(tmp_path / "source.txt")!r})
        engine = RayEngine({cluster.address!r})
        fb.build({str(tmp_path / "cache")!r}, source, ObedientRecipe(seconds=0.2), engine=engine)
        """
    )
    driver = subprocess.Popen([sys.executable, "-c", script], env=script_environment())
    deadline = time.monotonic() + 600
    while len(makes(notes)) < 6:
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(seconds=0.2), engine="ray")
    assert report.built + report.present == 24
    assert report.present >= 4
    assert chunk_digests(tmp_path / "cache") == undisturbed(tmp_path, source, seconds=0.2)


def poll_when_all_is_ready(engine):
    pending = list(engine._pending)
    assert ray.wait(pending, num_returns=len(pending), timeout=60)[1] == []
    return engine.poll(0)


def test_what_ray_raises_of_a_chunk_is_the_death_of_its_actor(cluster):
    """As where its memory monitor kills an actor: that is not an error of actors."""

    def out_of_memory():
        raise ray.exceptions.OutOfMemoryError("the node is running low on memory")

    with stopping(RayEngine()) as engine:
        engine.start(Squares(), 1)
        (slot,) = wait_for_slots(engine, 1)
        engine._pending[ray.remote(num_cpus=0, max_retries=0)(out_of_memory).remote()] = slot, 7
        (death,) = poll_when_all_is_ready(engine)
        assert isinstance(death, Died)
        assert (death.chunk, death.began, death.worker[:10]) == (7, True, f"actor {slot} on"[:10])
        assert "running low on memory" in death.reason


def test_more_than_any_node_has_is_refused_and_what_waits_for_it_says_so(tmp_path, cluster, source, monkeypatch):
    with pytest.raises(EngineUnusable, match="no node of the cluster at 'auto' has 2 CPU"):
        RayEngine(num_cpus=2).capacity()
    monkeypatch.setattr(run, "STALL_SECONDS", 0.1)
    notes = []

    def stop(progress):
        notes.append(progress.note)
        if "no worker has been ready" in progress.note:
            raise KeyboardInterrupt

    engine = RayEngine(num_cpus=2)
    with pytest.raises(fb.errors.BuildStopped):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine, workers=1, on_progress=stop)
    assert notes[-1].endswith("1 of 1 workers wait for resources of the cluster at 'auto'")


NO_CLUSTER = """
    from forebay.cli.settings import BuildSettings, engine_of
    for address in ("127.0.0.1:1", "bogus"):
        try:
            engine_of(BuildSettings(engine="ray", address=address)).capacity()
        except Exception as error:
            print(type(error).__name__, error)
    from ray._private.worker import print_to_stdstream  # what a node that dies makes it print
    said = "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL"
    print_to_stdstream({"lines": [said], "pid": "raylet", "is_err": False}, ignore_prefix=False)
"""


def test_no_cluster_at_the_address_is_one_line_and_ray_does_not_print_what_is_reported():
    command = [sys.executable, "-c", textwrap.dedent(NO_CLUSTER)]
    ended = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    assert len(lines) == 4, ended
    for line, address in zip(lines[::2], ("127.0.0.1:1", "bogus"), strict=True):
        assert line.startswith(f"EngineUnusable the engine 'ray' cannot be used: there is no cluster at '{address}' (")
    assert all("ray start --head" in line and "on one machine, leave out --engine" in line for line in lines[1::2])


def test_without_the_library_the_extra_is_named(tmp_path, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "forebay.engine.ray", raising=False)
    with pytest.raises(LibraryMissing, match=r"pip install 'forebay\[ray\]'"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine="ray")


@pytest.mark.long
def test_more_than_the_cluster_has_is_refused(tmp_path, cluster, source):
    with pytest.raises(EngineUnusable, match="0 GPU"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=RayEngine(num_gpus=1))


@pytest.mark.long
def test_the_command_line_takes_the_address_and_resources(tmp_path, cluster, source):
    command = [sys.executable, "-m", "forebay", "build", "raw", str(tmp_path / "source.txt"), "--into"]
    command += [str(tmp_path / "cache"), "--engine", "ray", "--address", cluster.address, "--num-cpus", "0.5", "--json"]
    ended = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["ok"], "Ray writes nothing beside the record"
    assert len(fb.open_cache(tmp_path / "cache")) == 48


@pytest.mark.long
def test_teachers_run_where_the_cluster_has_gpus(tmp_path, cluster, notes, tiny_models):
    """Nodes say that they have a GPU each; models run on the CPU, as there is none."""
    made = []
    nodes = [cluster.add_node(**NODE, num_gpus=1) for _ in range(2)]
    try:
        for engine in ("inline", RayEngine(num_gpus=1)):
            root = prompts_cache(tmp_path / str(len(made)))
            teachers = {"clip": Clip(model=tiny_models.clip), "lune": Lune(unet=tiny_models.unet)}
            recipes = {name: TeacherRecipe(teacher=teacher, batch_size=2) for name, teacher in teachers.items()}
            fb.build_layers(root, recipes, engine=engine)
            made.append({layer: chunks_of(root, layer) for layer in teachers})
    finally:
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
    assert made[0] == made[1]
