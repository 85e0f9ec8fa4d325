"""The static page, the notebook's view and the command: what they show without, or with, a server."""

import json
import re
import signal
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from tests.helpers.builders import script_environment, wait_until
from tests.viewer.conftest import PATIENCE

import forebay as fb
from forebay.cli.main import cli
from forebay.tokens.vocabulary import gpt2_json
from forebay.torch import Loader
from forebay.viewer.bundle import published, write_bundle
from forebay.viewer.shown_cache import ShownCache


@pytest.mark.slow
def test_a_bundle_opens_from_a_file_and_asks_for_nothing(
    browser: Any, token_root: Path, image_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    report = write_bundle([ShownCache.of(token_root), ShownCache.of(image_root)], str(path), rows=5)
    assert report.bytes == path.stat().st_size
    assert [len(rows) for rows in report.rows] == [5, 5]
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    problems: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url.split("#")[0][:60]))
    page.goto(f"{path.as_uri()}#/0/overview")
    page.wait_for_selector("[data-page=overview][data-ready]")
    assert fb.info(token_root).cache_id in page.inner_text("body")
    for view, words in {
        "0/chunks": "published",
        f"0/rows?row={report.rows[0][2]}": "this copy has 5 of",
        "0/training": "Which row comes when",
        "0/compare": "Chunks",
        "1/images": "this copy has 5 of",
        f"1/images?row={report.rows[1][1]}&one=1": "Layers",
        "0/rows?row=1": "does not carry this record" if 1 not in report.rows[0] else "Tokens",
    }.items():
        page.evaluate("(address) => { location.hash = address; }", f"#/{view}")
        page.wait_for_selector(f"[data-ready='#/{view}']")
        assert words in page.inner_text("body")
        assert page.evaluate("window.hacked") is None
    page.wait_for_timeout(50)
    assert problems == []
    assert {url for url in asked if not url.startswith("data:")} == {path.as_uri()[:60]}
    page.close()


def test_a_bundle_names_no_folder_and_no_host_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "private data"
    (folder / "raw").mkdir(parents=True)
    (folder / "raw" / "a.jsonl").write_text('{"text": "in /etc/passwd/x and /usr/lib"}\n{not json\n')
    (folder / "words.json").write_bytes(gpt2_json())
    source = fb.sources.jsonl(folder / "raw" / "*.jsonl", text="text")
    recipe = fb.TokenRecipe(tokenizer=str(folder / "words.json"), sequence_length=32)
    fb.build(folder / "cache", source, recipe, workers=0)
    write_bundle([ShownCache.of(folder / "cache")], str(tmp_path / "page.html"), rows=5)
    page = (tmp_path / "page.html").read_text()
    assert "private data" not in page
    assert str(tmp_path) not in page
    assert '"root":"…/raw","text":"text"' in page.replace('"patterns":["*.jsonl"],', "")
    assert "/etc/passwd/x and /usr/lib" in page
    assert published({"claims": [{"host": socket.gethostname()}]}) == {"claims": [{"host": "…"}]}
    assert published({"source": "s3://bucket/a/b", "why": "3 rows/s"}) == {
        "source": "s3://bucket/a/b",
        "why": "3 rows/s",
    }


@pytest.mark.slow
def test_a_notebook_shows_a_frame_that_only_its_token_opens(browser: Any, token_root: Path, tmp_path: Path) -> None:
    shown = fb.view(fb.open_cache(token_root), height=500)
    try:
        html = shown._repr_html_()
        assert 'height="500"' in html
        assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32,}/", html)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(shown.url)
        page.wait_for_selector("[data-page=overview][data-ready]")
        assert page.goto(shown.url.rsplit("/", 2)[0] + "/").status == 403
        page.close()
    finally:
        shown.stop()
    static = fb.view(token_root, static=True, rows=2)
    frame = tmp_path / "notebook.html"
    frame.write_text(f"<meta charset=utf-8>{static._repr_html_()}")
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(frame.as_uri())
    page.frame_locator("iframe").locator("[data-page=overview][data-ready]").wait_for()
    page.frame_locator("iframe").locator("nav >> text=Rows").click()
    page.frame_locator("iframe").locator(".tokens").wait_for()
    page.close()


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(token_root: Path, tmp_path: Path) -> None:
    written = tmp_path / "statistics.json"
    loader = Loader(fb.open_cache(token_root), global_batch_size=4, threads=0, statistics_file=written)
    for _ in zip(range(2), loader, strict=False):
        pass
    command = [sys.executable, "-m", "forebay", "view", str(token_root), "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--statistics", str(written)],
        env=script_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    text = ""
    while not text.endswith("\n}\n") and (line := process.stdout.readline()):
        text += line
    url = json.loads(text)["result"]["url"]
    assert url.startswith("http://127.0.0.1:")
    with urlopen(f"{url}api/0/statistics.json", timeout=600) as answer:
        (job,) = json.loads(answer.read())
    assert job["statistics"] == json.loads(written.read_text())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")


def test_the_command_names_what_is_wrong(token_root: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(cli, ["view", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "there is no cache" in missing.output
    done = runner.invoke(
        cli, ["view", str(token_root), "--bundle", str(tmp_path / "out.html"), "--rows", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["result"]["rows"][0] == [0, len(fb.open_cache(token_root)) - 1]


def test_the_page_weighs_little_and_names_no_other_machine() -> None:
    static = files("forebay.viewer") / "static"
    total = 0
    for entry in static.iterdir():
        text = entry.read_bytes()
        total += len(text)
        addresses = re.findall(rb"https?://[^'\" )]+", text)
        assert [one for one in addresses if not one.startswith(b"http://www.w3.org/")] == [], entry.name
        for unsafe in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval(", b"new Function"):
            assert unsafe not in text, entry.name
    assert total <= 150_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "display", "opens"), [([], ":9", True), (["--no-open"], ":9", False), ([], "", False)]
)
def test_view_opens_the_browser_where_there_is_a_display(
    token_root: Path, tmp_path: Path, options: list[str], display: str, opens: bool
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    environment = {**script_environment(), "BROWSER": f"{browser} %s", "DISPLAY": display, "WAYLAND_DISPLAY": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", "view", str(token_root), "--port", "0", *options],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    printed = next(line for line in process.stdout if "http://127.0.0.1:" in line)
    if opens:
        wait_until(opened.exists, what="no browser was opened")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert opened.exists() == opens
    assert not opens or opened.read_text().strip() in printed
