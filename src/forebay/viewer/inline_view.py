"""`fb.view`: the viewer inline in a notebook, by a server thread on this machine or as a static copy."""

from html import escape
from importlib import import_module
from typing import Any

from forebay.read.cache import Cache
from forebay.source import Source
from forebay.store import Root
from forebay.viewer.bundle import collect, page_of
from forebay.viewer.shown_cache import ShownCache

HEIGHT = 720
_FRAME = 'width="100%" style="border: 1px solid #8884; border-radius: 8px" referrerpolicy="no-referrer"'


class InlineView:
    """A viewer that a notebook shows below its cell. `url` opens it in a browser; `stop()` ends its server."""

    def __init__(self, caches: list[ShownCache], height: int) -> None:
        server: Any = import_module("forebay.viewer.server")  # uvicorn belongs to an extra
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
    *caches: Cache | Root,
    source: Source | None = None,
    static: bool = False,
    rows: int = 24,
    height: int = HEIGHT,
) -> InlineView | StaticView:
    """Show caches in the browser, inline where this is a notebook.

    By default a thread of this process serves the pages on this machine, under an address with a secret token. With
    `static`, the pages are a copy with `rows` sampled rows of each cache: it stays in a saved notebook, and works where
    the browser cannot reach this process. `source` is read for the names of documents in packed tokens.
    """
    if not caches:
        raise TypeError("view needs a cache: fb.view(cache), or the path of one")
    shown = [ShownCache.of(cache, source) for cache in caches]
    return StaticView(shown, height, rows) if static else InlineView(shown, height)
