"""A hub that lies: crafted commits, listings, names, sizes, pages, redirects, READMEs and shards."""

import json
import multiprocessing
import random
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from tests.campaign.oracle import Trial, as_record
from tests.campaign.trial import remove, run_verb
from tests.hub.data_sets import README, documents, shard
from tests.hub.server import HubServer

Answer = tuple[int, dict[str, str], bytes]
SHARD = "data/a/0.parquet"


def _listing(*entries: dict[str, Any], link: dict[str, str] | None = None) -> Answer:
    return 200, link or {}, json.dumps(entries).encode()


def _entry(path: str, size: Any = 1, oid: Any = "a" * 40, **more: Any) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": size, "oid": oid, **more}


def _next_page(number: int) -> dict[str, str]:
    return {"Link": f'<https://x.invalid/?cursor={number}>; rel="next"'}


_pages = count()
# name -> what the path of a request has in it, and what is answered to such a request
ANSWERS: dict[str, tuple[str, Callable[[], Answer]]] = {
    "commit is a path": ("/revision/", lambda: (200, {}, b'{"sha": "../../../outside"}')),
    "commit is deep": ("/revision/", lambda: (200, {}, b"[" * 100_000)),
    "commit is noise": ("/revision/", lambda: (200, {}, bytes(range(256)))),
    "commit is an escape": ("/revision/", lambda: (200, {}, b'{"sha": "\\u001b[31m"}')),
    "names": ("/tree/", lambda: _listing(_entry("../../x.parquet"), _entry("/etc/passwd"), _entry("data/a\0.parquet"))),
    "sizes": ("/tree/", lambda: _listing(_entry(SHARD, 2**70), _entry("data/a/1.parquet", -1))),
    "a terabyte": ("/tree/", lambda: _listing(_entry(SHARD, 2**40, lfs={"oid": "b" * 64, "size": 2**40}))),
    "hash is a path": ("/tree/", lambda: _listing(_entry(SHARD, 9, "../../../outside"))),
    "endless pages": ("/tree/", lambda: _listing(_entry(f"data/{next(_pages)}.txt"), link=_next_page(next(_pages)))),
    "a long answer": ("/tree/", lambda: (200, {}, b" " * (300 << 20))),
    "redirects for ever": ("/tree/", lambda: (302, {"Location": "/api/datasets/org/set/tree/main"}, b"")),
    "redirect to a file": ("/resolve/", lambda: (302, {"Location": "file:///etc/passwd"}, b"")),
    "error is an escape": ("/revision/", lambda: (403, {"X-Error-Message": "\x1b[31mRED"}, b"")),
    "readme is deep": ("README.md", lambda: (200, {}, b"---\nconfigs: " + b"[" * 100_000 + b"\n---\n")),
    "readme of aliases": ("README.md", lambda: (200, {}, _aliases())),
    "shard is noise": (SHARD, lambda: (200, {}, random.Random(1).randbytes(5000))),
    "nothing": ("/", lambda: (200, {}, b"")),
}


def _aliases() -> bytes:
    """A README of 1 kB that stands for 9 to the 9th entries."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return ("---\n" + "\n".join(lines) + "\nconfigs: *a9\n---\n").encode()


def meet_answers(name: str, folder: Path) -> list[dict[str, Any]]:
    """Ask a hub that lies, by the verbs that ask one; what was found."""
    folder.mkdir()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    lying = multiprocessing.get_context("fork").Process(target=_lie, args=(name, sender), daemon=True)
    lying.start()
    address = receiver.recv()
    try:
        trial = Trial(folder, "0", ())
        asked = ("tokens", "hub:org/set", "--download-retries", "1", "--download-timeout", "2")
        into = ("--into", str(folder / "cache"), "--workers", "0", "--spool", str(folder / "spool"))
        for command in (("estimate", *asked), ("build", *asked, *into)):
            trial.cause = f"{name}: {command[0]}"
            trial.judge(command[0], run_verb(*command, first=lambda: setattr(constants, "ENDPOINT", address)))
            trial.expect_untouched()
        return [as_record(each, name, "0") for each in trial.findings]
    finally:
        lying.kill()
        lying.join()
        remove(folder)


def _lie(name: str, sender: Connection) -> None:
    words, answer = ANSWERS[name]
    with HubServer() as hub:
        hub.add("org/set", {"README.md": README.encode(), SHARD: shard(documents(20, "a"))})
        usual = hub.answer
        hub.answer = lambda path, query: answer() if words in path else usual(path, query)  # type: ignore[method-assign]
        sender.send(hub.address)
        hub.go.wait()
