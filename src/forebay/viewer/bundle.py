"""A static page of caches: modules, style and the records of sampled rows in one file, which opens without a server.

Modules are joined in the order of their imports into one script, because a page opened from a file may load no module.
Records are the answers of the same functions that the server calls, under the same addresses.

`fb.view` shows the viewer inline in a notebook, by a server thread on this machine or as such a page.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import partial
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

import numpy as np

from forebay.preview.pictures import HTML, check_output
from forebay.read.cache import Cache
from forebay.records import Record, as_json
from forebay.source import Source
from forebay.store import Root
from forebay.viewer.image_rows import image_png
from forebay.viewer.page_records import RecordProblem, answer, cache_names, compared, guarded
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

ENTRY = "app.js"
T_SHOWN = (0.1, 0.3, 0.5, 0.7, 0.9)
THUMBNAIL, WHOLE = 224, 512  # pixels of a picture in the grid and alone
# Paths of two parts or more, with spaces if they are quoted, and not parts of URLs.
_PATH = re.compile(r"""(?<=['"`])/[^'"`\n]+/[^'"`\n]*(?=['"`])|(?<![\w/:.…*])/[^\s'"/]+/[^\s'"]*""")
_HAS_ROWS = re.compile(r"[?&]row=")
_IMPORT = re.compile(r"^import \{(.+?)\} from '\./([\w.]+)';\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)


class Bundle(Record, frozen=True, kw_only=True):
    """The records embedded in a static page."""

    records: dict[str, object]
    pictures: dict[str, str]
    rows: dict[int, list[int]]


class BundleReport(Record, frozen=True, kw_only=True):
    """A static page with sampled rows."""

    path: str
    caches: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]  # those of each cache that it carries
    bytes: int


def write_bundle(caches: Sequence[ShownCache], path: str, rows: int) -> BundleReport:
    """Write the page; an earlier page is replaced in one step, and no other file."""
    check_output(path, HTML)
    carried = collect(caches, rows)
    page = page_of(carried)
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "xb") as file:  # never through a link that somebody made
        file.write(page)
    os.replace(aside, path)
    return BundleReport(
        path=path,
        caches=tuple(shown.root for shown in caches),
        rows=tuple(tuple(carried.rows[number]) for number in range(len(caches))),
        bytes=len(page),
    )


def collect(caches: Sequence[ShownCache], rows: int) -> Bundle:
    """Every record that the pages ask for when they show `rows` rows of each cache."""
    records: dict[str, object] = {"api/caches.json": cache_names(caches)}
    pictures: dict[str, str] = {}
    sampled = {number: _sample(shown, rows) for number, shown in enumerate(caches)}
    for number, shown in enumerate(caches):
        name = cache_names([shown])[0]
        wanted = ["summary", "overview", "distribution", "chunks", "build", "training"]
        if name.kind == "images":
            wanted += [f"image?row={row}" for row in sampled[number]]
            pictures |= _pictures(shown, number, sampled[number])
        elif name.kind in ("tokens", "chat", "preferences"):
            wanted += [f"row?row={row}" for row in sampled[number]]
        wanted += [f"peek?row={row}" for row in sampled[number]] if name.kind != "images" else []
        wanted += [
            f"teacher?layer={layer}&row={row}&t={t}"
            for layer in name.taught
            for row in sampled[number][:8]
            for t in T_SHOWN
        ]
        records |= {_address(number, one): _answer(shown, one) for one in wanted}
    records["api/compare.json?a=0&b=" + str(min(1, len(caches) - 1))] = compared(caches, Query(()))
    public = {address: published(record, bool(_HAS_ROWS.search(address))) for address, record in records.items()}
    return Bundle(records=public, pictures=pictures, rows=sampled)


def published(record: object, has_rows: bool = False) -> object:
    """Return a record without the folders and host names of this machine; a path keeps its last part.

    The content of rows stays as it is.

    >>> published({"root": "/home/me/data", "patterns": ["*.jsonl"], "why": "no '/home/me/a.txt'", "host": "desk"})
    {'root': '…/data', 'patterns': ['*.jsonl'], 'why': "no '…/a.txt'", 'host': '…'}
    """
    plain = json.loads(as_json(record))
    if not has_rows or not isinstance(plain, dict):
        return _shortened(plain)
    return {name: _shortened(value) if name in ("root", "error") else value for name, value in plain.items()}


def _shortened(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {_shortened(key): _shortened(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if not isinstance(value, str):
        return value
    if name == "host":
        return "…"
    return _last_part(value) if value.startswith("/") else _PATH.sub(lambda path: _last_part(path[0]), value)


def _last_part(path: str) -> str:
    return f"…/{os.path.basename(path.rstrip('/'))}"


def _sample(shown: ShownCache, rows: int) -> list[int]:
    """Rows spread over a cache; empty if it has no rows or cannot be read."""
    count = cache_names([shown])[0].rows
    return np.unique(np.linspace(0, count - 1, min(rows, count)).astype(np.int64)).tolist() if count else []


def _address(number: int, wanted: str) -> str:
    name, _, query = wanted.partition("?")
    return f"api/{number}/{name}.json" + (f"?{query}" if query else "")


def _answer(shown: ShownCache, wanted: str) -> object:
    name, _, query = wanted.partition("?")
    try:
        return answer(shown, name, _query(query))
    except (BadQuery, IndexError) as error:
        return RecordProblem(error=str(error), kind=type(error).__name__, damaged=False)


def _query(text: str) -> Query:
    return Query(tuple((pair.partition("=")[0], pair.partition("=")[2]) for pair in text.split("&") if pair))


def _pictures(shown: ShownCache, number: int, rows: list[int]) -> dict[str, str]:
    pictures = {}
    for row in rows:
        for side in (THUMBNAIL, WHOLE):
            drawn = guarded(shown, partial(image_png, shown, _query(f"row={row}&side={side}")))
            if isinstance(drawn, bytes):
                text = base64.b64encode(drawn).decode()
                pictures[f"api/{number}/image.png?row={row}&side={side}"] = f"data:image/png;base64,{text}"
    return pictures


def page_of(bundle: Bundle) -> bytes:
    """The whole page; its policy allows its one script, its one style and pictures that it carries."""
    style, script = (STATIC / "style.css").read_text("utf-8"), joined_modules(ENTRY)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # No `<` in the data: it can neither end its element nor begin a comment.
    data = as_json(bundle).decode("utf-8").replace("<", "\\u003c")
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>forebay</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<header id="top"></header>\n<main id="content" tabindex="-1"></main>\n'
        f'<script type="application/json" id="bundle">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )
    return page.encode("utf-8", "surrogatepass")


def joined_modules(entry: str) -> str:
    """The modules that one imports, each once and after those that it needs, as one script.

    A module becomes a function that returns what the module exports, so that names of two modules never meet.
    """
    order: dict[str, str] = {}

    def visit(name: str) -> None:
        if name not in order:
            text = (STATIC / name).read_text("utf-8")
            for _, needed in _IMPORT.findall(text):
                visit(needed)
            order[name] = text

    visit(entry)
    return "\n".join(_as_function(name, text) for name, text in order.items())


def _as_function(name: str, text: str) -> str:
    exports = ", ".join(match for match in _EXPORT.findall(text))
    body = _IMPORT.sub(lambda match: f"const {{{match[1]}}} = {_variable(match[2])};\n", text)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"


def _variable(module: str) -> str:
    return f"module_{module.removesuffix('.js')}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


STATIC = files("forebay.viewer") / "static"
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
HEIGHT = 720
_FRAME = 'width="100%" style="border: 1px solid #8884; border-radius: 8px" referrerpolicy="no-referrer"'


class InlineView:
    """A viewer that a notebook shows below its cell. `url` opens it in a browser; `stop()` ends its server."""

    def __init__(self, caches: list[ShownCache], height: int) -> None:
        server: Any = import_module("forebay.viewer.web_app")  # uvicorn belongs to an extra
        self._server = server.Server(caches, token=True, framed=True).start()
        self._height = height
        self.url = str(self._server.address)

    def __repr__(self) -> str:
        return f"<viewer at {self.url}>"

    def _repr_html_(self) -> str:
        return f'<iframe src="{escape(self.url)}" height="{self._height}" {_FRAME}></iframe>'

    def stop(self) -> None:
        self._server.stop()


class StaticView:
    """A static copy of the pages, kept in the notebook's file; it needs no server and no library to be shown."""

    def __init__(self, caches: list[ShownCache], height: int, rows: int) -> None:
        self._page = page_of(collect(caches, rows)).decode("utf-8", "replace")
        self._height = height

    def __repr__(self) -> str:
        return f"<static view, {len(self._page):,} characters>"

    def _repr_html_(self) -> str:
        frame = f'height="{self._height}" sandbox="allow-scripts" {_FRAME}'
        return f'<iframe srcdoc="{escape(self._page)}" {frame}></iframe>'


def view(
    *caches: Cache | Root, source: Source | None = None, static: bool = False, rows: int = 24, height: int = HEIGHT
) -> InlineView | StaticView:
    """Show caches in the browser, or inline in a notebook.

    By default a thread of this process serves the pages on this machine, under an address with a secret token. With
    `static`, the pages are a copy with `rows` sampled rows of each cache: it stays in a saved notebook, and works where
    the browser cannot reach this process. `source` is read for the names of documents in packed tokens.
    """
    if not caches:
        raise TypeError("view needs a cache: fb.view(cache), or the path of one")
    shown = [ShownCache.of(cache, source) for cache in caches]
    return StaticView(shown, height, rows) if static else InlineView(shown, height)
