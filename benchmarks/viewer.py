"""The viewer under load: `python -m benchmarks.viewer [REQUESTS]`.

row             one row of 2,048 packed tokens, with texts, labels and blocks, from a warm server
overview, map   of an index of 100,000 chunks, from a warm server
drawing         the same map in Chromium: from the click to the painted frame, and drawn again
memory          anonymous memory of the server while it answers many requests
"""

import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any

import forebay as fb
from benchmarks.many_chunks import many_chunks

SERVE = """
import sys
from forebay.viewer.web_app import Server
from forebay.viewer.shown_cache import ShownCache
server = Server([ShownCache.of(root) for root in sys.argv[1:]]).start()
print(server.address.port, flush=True)
sys.stdin.read()
server.stop()
"""
WORDS = "the pool in front of a turbine collects water once and leaves at full flow while training reads rows"


def main(requests: int) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        tokens = _tokens(Path(folder) / "tokens")
        many = many_chunks(Path(folder) / "many", 100_000, 100_000, files=100_000)
        command = [sys.executable, "-c", SERVE, str(tokens), str(many)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            try:
                _measure(port, server.pid, len(fb.open_cache(tokens)), requests)
            finally:
                server.communicate()


def _measure(port: int, pid: int, rows: int, requests: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    chance = random.Random(0)

    def ask(path: str) -> float:
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content[:200]
        return time.perf_counter() - began

    def row() -> float:
        return ask(f"/api/0/row.json?row={chance.randrange(rows)}")

    ask("/api/0/row.json?row=0")
    _say("row of 2,048 tokens", [row() for _ in range(100)])
    for name in ("summary", "overview", "chunks"):
        ask(f"/api/1/{name}.json")
        _say(f"{name} of 100,000 chunks", [ask(f"/api/1/{name}.json") for _ in range(10)])
    connection.close()  # the server closes one that is idle
    _draw(port)
    used = []
    for number in range(requests):
        if number % max(1, requests // 5) == requests // 10:
            used.append(_anonymous(pid))
        ask("/api/1/chunks.json") if number % 10 else row()
    shown = ", ".join(f"{one / 1e6:.1f}" for one in (*used, _anonymous(pid)))
    print(f"memory over {requests:,} requests, one in ten a row, the others the map: {shown} MB")


OPEN = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const began = performance.now();
  location.hash = '#/1/chunks';
  while (!document.querySelector('[data-page=chunks][data-ready]')) await frame();
  await frame();
  await frame();
  return (performance.now() - began) / 1000;
}"""
REDRAW = """async () => {
  const canvas = document.querySelector('canvas.map');
  const began = performance.now();
  canvas.parentElement.parentElement.dispatchEvent(new Event('scroll'));
  canvas.getContext('2d').getImageData(0, 0, 1, 1);  // waits until all of it is drawn
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return (performance.now() - began) / 1000;
}"""


def _draw(port: int) -> None:
    chromium = which("chromium")
    if chromium is None:
        print("drawing: not measured, chromium is missing")
        return
    with import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page: Any = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/#/0/overview")
        opened = []
        for _ in range(10):
            page.evaluate("location.hash = '#/0/overview'")
            page.wait_for_selector("[data-page=overview][data-ready]")
            opened.append(page.evaluate(OPEN))
        _say("from a click to 100,000 cells", opened)
        _say("100,000 cells drawn again", [page.evaluate(REDRAW) for _ in range(20)])
        browser.close()


def _say(name: str, seconds: list[float]) -> None:
    worst = sorted(seconds)[int(0.95 * (len(seconds) - 1))]
    print(f"{name}  median {1000 * median(seconds):.1f} ms, 95 % below {1000 * worst:.1f} ms")


def _anonymous(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _tokens(folder: Path) -> Path:
    folder.mkdir(parents=True)
    chance = random.Random(1)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(1500):
            file.write(json.dumps({"text": " ".join(chance.choices(WORDS.split(), k=chance.randint(20, 900)))}) + "\n")
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=2048, chunk_size=200)
    fb.build(folder / "cache", fb.sources.jsonl(folder / "a.jsonl", text="text"), recipe, workers=0)
    return folder / "cache"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
