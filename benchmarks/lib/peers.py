"""Peers: other libraries, each in its own environment outside the repository, timed by a script of `benchmarks/peers`.

An environment sees the packages of this one: every peer runs with the same torch, and nothing is downloaded twice.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

SCRIPTS = Path(__file__).parents[1] / "peers"


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    script: str
    packages: tuple[str, ...] = ()  # empty: it runs in the environment of forebay
    home: str = ""  # the environment that it shares with other scripts; default: its own


class Reading(msgspec.Struct, frozen=True):
    """The speed of one configuration of a peer."""

    configuration: str
    rows_per_second: float
    first_batch_seconds: float


class PeerFailed(Exception):
    """A peer that cannot be installed or does not run."""


def python_of(peer: Peer, environments: Path) -> Path:
    """The interpreter of a peer's environment, created on first use."""
    if not peer.packages:
        return Path(sys.executable)
    folder = environments / (peer.home or Path(peer.script).stem)
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "with_ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        _output(peer, [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages])
        (folder / "complete").touch()
    return python


def run_peer(peer: Peer, environments: Path, *arguments: object) -> str:
    """The output of a peer's script."""
    return _output(peer, [python_of(peer, environments), SCRIPTS / peer.script, *arguments])


def readings(peer: Peer, environments: Path, data: Path, seconds: float, configuration: str = "") -> list[Reading]:
    """All configurations of a peer, or one of them, each timed for so long."""
    lines = run_peer(peer, environments, "read", data, seconds, configuration).splitlines()
    return [msgspec.convert(json.loads(line), Reading) for line in lines if line.startswith("{")]


def installed(peer: Peer, environments: Path) -> str:
    """Names and versions that were measured."""
    if not peer.packages:
        return f"torch {version('torch')}"
    script = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    names = [package.partition("==")[0] for package in peer.packages]
    return _output(peer, [python_of(peer, environments), "-c", script, *names]).strip()


def _output(peer: Peer, command: Sequence[object]) -> str:
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": ""}
    run = subprocess.run([str(word) for word in command], env=quiet, capture_output=True, text=True, check=False)
    if run.returncode:
        raise PeerFailed(f"{peer.name}: {(run.stderr.strip() or run.stdout.strip() or 'no output').splitlines()[-1]}")
    return run.stdout
