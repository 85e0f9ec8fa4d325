"""A viewer that runs while somebody damages, removes or replaces the cache that it shows: it answers, and never dies.

The server runs in another process, because a map of a file that was cut short ends the process that touches it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.running import run
from tests.helpers.builders import REPOSITORY, script_environment
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay.errors import ModelUnusable

pytest.importorskip("uvicorn")

SERVER = """
import sys
from forebay.viewer.web_app import Server
from forebay.viewer.shown_cache import ShownCache
import http.client, json
server = Server([ShownCache.of(sys.argv[1])]).start()
for line in sys.stdin:
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=600)
    connection.request("GET", line.strip())
    answer = connection.getresponse()
    print(json.dumps([answer.status, json.loads(answer.read())]), flush=True)
    connection.close()
server.stop()
"""
RECORDS = ("caches", "0/summary", "0/overview", "0/chunks", "0/row", "0/peek", "0/training", "0/build", "compare")
QUERIES = {"0/row": "?row=3", "0/peek": "?row=3", "compare": "?a=0&b=0"}


def cut(root: Path) -> None:
    for path in root.rglob("*.safetensors"):
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.truncate(100)


def cut_chunks(root: Path) -> None:
    cut(root / "layers")


def spoil(root: Path) -> None:
    for path in [each for each in root.rglob("*") if each.is_file()]:
        path.chmod(0o644)
        path.write_bytes(b"\0\xff{" * 2000)


def become_a_file(root: Path) -> None:
    root.rename(root.with_name("gone"))
    root.write_text("not a cache")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "chunks are cut": (cut_chunks, "its file has 100 bytes"),
    "everything is cut": (cut, "is corrupt"),
    "everything is spoilt": (spoil, "is corrupt"),
    "it is moved": (lambda root: root.rename(root.with_name("gone")), "there is no cache"),
    "it is a file": (become_a_file, "there is no cache"),
}


class Viewer:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, record: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"/api/{record}.json{QUERIES.get(record, '')}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the viewer ended with {self._process.wait()} at {record}"
        status, found = json.loads(answer)
        assert status == 200, found
        return found


def viewing(root: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, str(root)],
        env=script_environment(),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_cache_that_is_damaged_while_it_is_shown_is_named_and_the_viewer_stays(tmp_path: Path, damage: str) -> None:
    root = token_cache(tmp_path, 40)
    act, said = DAMAGE[damage]
    with viewing(root) as process:
        viewer = Viewer(process)
        before = {record: viewer.ask(record) for record in RECORDS}
        assert before["0/row"]["tokens"]
        act(root)
        after = {record: viewer.ask(record) for record in RECORDS}
        assert said in after["0/row"]["error"]
        assert viewer.ask("caches")
        process.communicate()


@pytest.mark.slow
def test_a_cache_that_is_replaced_while_it_is_shown_is_the_new_one_everywhere(tmp_path: Path) -> None:
    root = token_cache(tmp_path / "first", 40)
    other = token_cache(tmp_path / "other", 12, codec="zstd")
    with viewing(root) as process:
        viewer = Viewer(process)
        assert viewer.ask("caches")[0]["rows"] == 40
        root.rename(tmp_path / "gone")
        other.rename(root)
        assert viewer.ask("0/row")["tokens"]
        assert viewer.ask("caches")[0]["rows"] == 12
        assert viewer.ask("0/summary")["rows"] == 12
        process.communicate()


def test_a_cache_of_tokens_that_keeps_no_tokenizer_is_named(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 5)  # its recipe is a test's own, of the kind "tokens"
    with pytest.raises(ModelUnusable, match="keeps no tokenizer\nhint: read its rows as numbers"):
        fb.open_cache(root).text(0)
    assert "ids, not text: " in run("peek", root).out
