"""Other tools for the same text, in an environment of their own that is made once, outside the repository."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forebay.tokens.vocabulary import PACKAGE, gpt2_json

REQUIRED = ("datasets", "trl", "tiktoken", "torch")  # trl imports torch
REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "benchmarks" / "peers"


def peers_python(folder: Path) -> Path:
    """The interpreter of the peers' environment, made if it is not there."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"==> installing {', '.join(REQUIRED)} into {folder} (a few minutes, once)", flush=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        constraints = str(REPOSITORY / "constraints.txt")
        _run([str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, *REQUIRED])
        done.touch()
    return python


def versions(python: Path) -> str:
    code = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    return _run([str(python), "-c", code, *REQUIRED, "tokenizers"]).strip()


def trl_packing(python: Path, files: list[Path], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=files[0].parent) as scratch:
        tokenizer = Path(scratch, "tokenizer.json")
        tokenizer.write_bytes(gpt2_json())
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": scratch, "TOKENIZERS_PARALLELISM": "false"}
        command = [str(python), str(SCRIPTS / "trl_packing.py"), str(tokenizer), scratch, *map(str, files)]
        return _answer(_run(command, environment | quiet))


def tiktoken_memmap(python: Path, files: list[Path], environment: dict[str, str]) -> dict[str, Any]:
    data = Path(next(iter(find_spec(PACKAGE).submodule_search_locations)), "data")
    with tempfile.TemporaryDirectory(dir=files[0].parent) as scratch:
        given = [str(data / "vocab.bpe"), str(data / "encoder.json"), scratch, *map(str, files)]
        return _answer(_run([str(python), str(SCRIPTS / "tiktoken_memmap.py"), *given], environment))


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    finished = subprocess.run(command, env=environment or dict(os.environ), capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} …: {finished.stderr.strip()[-2000:]}")
    return finished.stdout


def _answer(output: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer
