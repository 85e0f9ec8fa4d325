"""One Chromium for all tests of the viewer, small caches of each kind, and pages that record what went wrong."""

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from tests.helpers.image_caches import recipe as image_recipe
from tests.helpers.image_caches import write_pictures
from tests.teachers.own_teachers import Ramp, prompt_cache

import forebay as fb
from forebay.teachers import TeacherRecipe
from forebay.viewer.shown_cache import ShownCache
from forebay.viewer.web_app import Server

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-extensions",
    "--disable-features=Translate,OptimizationHints,site-per-process",
    "--renderer-process-limit=1",
]
WORDS = (
    """the pool in front of a turbine collects water once and leaves at full flow naïve café 你好 def f(x): return x"""
)
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e\x1b[31m\'"`${1}'
PRINTED = HOSTILE.split("\u202e")[0]
# Text below 4.5:1 against its background (WCAG AA): [text, ratio].
PALE_TEXT = r"""() => {
  const parse = (text) => { const parts = text.match(/[\d.]+/g).map(Number); return [...parts, 1].slice(0, 4); };
  const over = (top, under) => [0, 1, 2].map((at) => top[at] * top[3] + under[at] * (1 - top[3]));
  const linear = (one) => (one <= 10 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4);
  const light = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, share, at) => sum + share * linear(color[at]), 0);
  const upward = (element) => (element ? [...upward(element.parentElement), getComputedStyle(element)] : []);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility()) continue;
    if (element.disabled || element.closest('.skip')) continue;
    const styles = upward(element);
    const under = styles.reduce((below, style) => over(parse(style.backgroundColor), below), [255, 255, 255]);
    const clear = styles.reduce((share, style) => share * Number(style.opacity), 1);
    const ink = parse(styles.at(-1).color);
    const [low, high] = [light(over([...ink.slice(0, 3), ink[3] * clear], under)), light(under)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push([node.textContent.slice(0, 30), element.className, Math.round(100 * ratio) / 100]);
  }
  return found;
}"""
PATIENCE = 300_000  # milliseconds: on a loaded machine a page may take long


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, which `make test-slow` installs where it can."""
    chromium = which("chromium") or which("chromium-browser") or which("google-chrome")
    if chromium is None or find_spec("playwright") is None:
        missing = "chromium or playwright is missing: apt-get install chromium, pip install playwright"
        pytest.fail(missing) if "GITHUB_ACTIONS" in os.environ else pytest.skip(missing)
    with import_module("playwright.sync_api").sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE)
        yield opened
        opened.close()


class Pages:
    """Pages by width and colour scheme, each used again by the next test: a new one takes the browser two processes."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._windows: dict[tuple[int, str], Any] = {}
        self._idle: dict[tuple[int, str], list[Any]] = {}

    def take(self, width: int, scheme: str) -> Any:
        if self._idle.get((width, scheme)):
            return self._idle[width, scheme].pop()
        if (width, scheme) not in self._windows:
            size = {"width": width, "height": 900}
            self._windows[width, scheme] = self._browser.new_context(viewport=size, color_scheme=scheme)
        return self._windows[width, scheme].new_page()

    def put_back(self, page: Any, width: int, scheme: str) -> None:
        """Leave what a page shows, its requests and timers. Each server is another origin: no state is left."""
        page.goto("about:blank")
        self._idle.setdefault((width, scheme), []).append(page)


@pytest.fixture(scope="session")
def pages(browser: Any) -> Pages:
    return Pages(browser)


@dataclass
class Opened:
    """A page of a viewer, and everything that it reported or asked for."""

    page: Any
    server: Server
    problems: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listeners = {"console": self._note_message, "pageerror": self._note_error, "request": self._note_request}

    def _note_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _note_error(self, error: Any) -> None:
        self.problems.append(str(error))

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((str(self.server.address), "data:", "blob:")):
            self.foreign.append(request.url)

    def go(self, view: str) -> Any:
        """Show a view by its URL and wait until it is drawn."""
        address = f"#/{view}"
        if self.page.url == "about:blank":
            self.page.goto(f"{self.server.address}{address}", wait_until="commit")
        else:
            self.page.evaluate("(address) => { location.hash = address; }", address)
        self.page.wait_for_selector(f"[data-ready='{address}']")
        return self.page

    def ready(self, name: str) -> Any:
        """Wait for a page that a click leads to."""
        self.page.wait_for_selector(f"[data-page={name}][data-ready]")
        return self.page

    def text(self) -> str:
        return str(self.page.inner_text("body"))

    def check(self) -> None:
        """No error in the console, no request to another machine, nothing wider than the window."""
        assert self.problems == []
        assert self.foreign == []
        wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
        assert not self.page.evaluate(wider)


Open = Callable[..., Opened]


@pytest.fixture
def view(pages: Pages) -> Iterator[Open]:
    """Open a page on caches; when the test ends, nothing may have gone wrong on it."""
    opened: list[tuple[Opened, int, str]] = []

    def open_page(*roots: Any, width: int = 1200, scheme: str = "light", source: Any = None) -> Opened:
        server = Server([ShownCache.of(root, source) for root in roots]).start()
        found = Opened(pages.take(width, scheme), server)
        opened.append((found, width, scheme))
        found.page.set_default_timeout(PATIENCE)
        for event, take in found.listeners.items():
            found.page.on(event, take)
        return found

    yield open_page
    for found, width, scheme in opened:
        for event, take in found.listeners.items():
            found.page.remove_listener(event, take)
        pages.put_back(found.page, width, scheme)
        found.server.stop()
        assert found.problems == []
        assert found.foreign == []


def write_texts(folder: Path, files: int = 2, lines: int = 60, seed: int = 1) -> Path:
    """JSON lines of words, some of them hostile."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        texts = [" ".join(chance.choices(WORDS.split(), k=chance.randint(5, 60))) for _ in range(lines)]
        texts[3] = f"hostile {HOSTILE} end"
        (folder / f"part-{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="session")
def token_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token cache of a few chunks, and a failed sample."""
    folder = tmp_path_factory.mktemp("tokens")
    raw = write_texts(folder / "raw")
    with (raw / "part-1.jsonl").open("a") as file:
        file.write("{not json\n")
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=128, chunk_rows=8)
    fb.build(folder / "cache", fb.sources.jsonl(raw / "*.jsonl", text="text"), recipe, workers=0)
    return folder / "cache"


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    pictures = folder / "pictures"
    pictures.mkdir()
    write_pictures(pictures)
    fb.build(folder / "cache", fb.sources.images(pictures), image_recipe(), workers=0)
    return folder / "cache"


@pytest.fixture(scope="session")
def raw_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    (folder / "lines.txt").write_text("".join(f"line {number} {PRINTED}\n" for number in range(40)))
    fb.build(folder / "cache", fb.sources.lines(folder / "lines.txt"), fb.RawRecipe(), workers=0)
    return folder / "cache"


@pytest.fixture(scope="session")
def taught_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts with features over timesteps; one row has none."""
    prompts = (*(f"prompt {number} {'x' * number}" for number in range(20)), "gone!")
    root = prompt_cache(tmp_path_factory.mktemp("taught"), prompts, chunk_bytes=150)
    fb.build(root, None, TeacherRecipe(teacher=Ramp(width=24, ends="gone!")))
    return root
