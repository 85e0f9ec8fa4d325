"""`forebay status`, `info`, `peek` and `view`: look at a cache without changing anything."""

import os
import sys
import webbrowser
from importlib import import_module
from typing import Any, get_args

import click

from forebay import api
from forebay.cache.catalog import read_cache_document
from forebay.cache.reports import Status
from forebay.cache.status import SHOWN_FAILURES, Depth
from forebay.cli.keep_verbs import source_like_before
from forebay.cli.machine_verbs import through_tier
from forebay.cli.options import (
    Parsed,
    WrongUsage,
    cache_argument,
    complete_file,
    complete_folder,
    local_only,
    network_option,
    option,
    whole,
)
from forebay.cli.output import Finding, is_json, show_now
from forebay.cli.verb import verb
from forebay.errors import ForebayError, NotFound
from forebay.preview.peek import KINDS as PACKED
from forebay.preview.peek import PEEKED_ROWS, SHEET_ROWS
from forebay.preview.peek import peek as peek_rows
from forebay.preview.pictures import KIND as IMAGES
from forebay.preview.pictures import draw_sheet
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.store import open_store


@verb()
@cache_argument
def info(cache: str) -> Any:
    """Show the source, recipes, columns, counts and fingerprints of a cache.

    Example: forebay info caches/edu
    """
    return api.info(cache)


ALL = "all"
PORT = 8765


def _count(text: str) -> str | int:
    """A count, or `all`."""
    if text == ALL:
        return ALL
    if not text.isdecimal():
        raise ValueError(f"'{text}' is neither a count nor '{ALL}'")
    return int(text)


@verb()
@cache_argument
@option(
    "--failures",
    type=Parsed("count", _count),
    default=SHOWN_FAILURES,
    show_default=True,
    metavar=f"N|{ALL}",
    help="Number of failed samples to list.",
)
@option(
    "--depth",
    type=click.Choice(get_args(Depth)),
    default="chunks",
    show_default=True,
    help="index: read only the index, to poll a large cache.",
)
@network_option
def status(cache: str, failures: int | str, depth: Depth, allow_network: bool) -> Any:
    """Show health and progress: missing chunks, failures, stale sources, builders.

    Reads no data. Lists missing ranges in the order in which they will be built, with the time and space that they
    need, and the command that builds them. Exits 1 if a chunk is suspect or lost, a source file changed, or was deleted
    before all of it was built. With --allow-network, also searches the source for new files.

    \b
    Example: forebay status caches/edu
             forebay status caches/edu --failures all
             watch forebay status caches/edu --depth index
    """
    shown = None if isinstance(failures, str) else failures
    report = api.status(cache, allow_network=allow_network, failures=shown, depth=depth)
    if not _has_problems(report):
        return report
    return Finding(report, "NeedsAttention", f"'{cache}' has lost or suspect chunks, or a stale source")


def _has_problems(report: Status) -> bool:
    return any(layer.suspect or layer.lost for layer in report.layers) or report.needs_source


@verb()
@cache_argument
@option("--rows", "count", type=whole(1), help="Number of rows from row 0.  [default: 3; 24 with --png]")
@option("-r", "--row", "chosen", type=whole(0), multiple=True, help="Row to show (repeatable).")
@option("--column", "columns", multiple=True, help="Column of any layer (repeatable).")
@option("--png", "sheet", metavar="FILE", shell_complete=complete_file, help="Draw images to this file.")
@option("--patch", type=whole(1), help="Patch size drawn with --png.  [default: 16, if it divides the size]")
@option(
    "--source",
    "paths",
    multiple=True,
    metavar="SOURCE",
    shell_complete=complete_file,
    help="Source from which to read the names of documents.",
)
def peek(cache: str, count: int | None, chosen: tuple[int, ...], sheet: str | None, **shown: Any) -> Any:
    """Show rows: text, images, or the first values of arrays.

    Packed tokens are shown as documents and padding; --column shows the ids, --json every token and the whole text.
    --source adds the names of documents. --png draws images to a file, with boxes outlined and ignored tokens in red.
    `forebay view` draws teacher features.

    \b
    Example: forebay peek caches/edu --row 17
             forebay peek caches/photos --png sheet.png
    """
    opened = open_cache(through_tier(cache))
    kind = opened.recipe(opened.generation.base).kind
    _check_peek(cache, kind, sheet, shown)
    rows = _rows(opened, count or (SHEET_ROWS if sheet else PEEKED_ROWS), chosen)
    if sheet:
        try:
            return draw_sheet(opened, rows, sheet, shown["patch"])
        except ValueError as error:
            raise WrongUsage(str(error)) from error
    source = source_like_before(cache, shown["paths"]) if shown["paths"] else None
    try:
        return peek_rows(opened, rows, columns=shown["columns"] or None, source=source)
    except NotFound as error:
        if shown["columns"]:
            raise WrongUsage(error.message, error.hint) from error
        raise


def _check_peek(cache: str, kind: str, sheet: str | None, shown: dict[str, Any]) -> None:
    """Reject options that do not fit the kind of the cache or each other."""
    if (sheet or shown["patch"]) and kind != IMAGES:
        hint = f"draw other rows in the browser: forebay view {cache}"
        raise WrongUsage(f"'{cache}' has {kind}; --png and --patch are for images", hint)
    if sheet and shown["columns"]:
        raise WrongUsage("--png draws whole images and --column shows one column", "use one of them")
    if shown["patch"] and not sheet:
        raise WrongUsage("--patch needs --png FILE")
    if shown["paths"] and kind not in PACKED:
        raise WrongUsage(f"--source is for packed tokens; '{cache}' has {kind}", "leave it out")


def _rows(cache: Cache, count: int, chosen: tuple[int, ...]) -> list[int]:
    beyond = [row for row in chosen if row >= len(cache)]
    if beyond:
        raise WrongUsage(f"there is no row {beyond[0]:,}; '{cache.root}' has {len(cache):,}", "rows start at 0")
    return list(chosen) or list(range(min(count, len(cache))))


@verb()
@click.argument("caches", nargs=-1, required=True, metavar="CACHE...", shell_complete=complete_folder)
@option("--port", type=whole(0, 65535), default=PORT, show_default=True, help="Port; 0 takes a free one.")
@option("--no-open", is_flag=True, help="Print the address, do not open a browser.")
@option(
    "--host",
    metavar="ADDRESS",
    help="Address to listen on, for other machines; the URL then has a secret token.  [default: 127.0.0.1]",
)
@option(
    "--bundle",
    metavar="OUT",
    shell_complete=complete_file,
    callback=local_only,
    help="Write a static page to this file and exit.",
)
@option("--rows", type=whole(1, 1000), default=24, show_default=True, help="Rows of each cache in a --bundle.")
@option(
    "--source",
    "paths",
    multiple=True,
    metavar="SOURCE",
    shell_complete=complete_file,
    help="Source of the first cache, from which to read the names of documents.",
)
@option(
    "--statistics",
    multiple=True,
    metavar="FILE",
    shell_complete=complete_file,
    help="Statistics file that a running Loader writes (repeatable).",
)
def view(caches: tuple[str, ...], bundle: str | None, rows: int, **options: Any) -> Any:
    """Show caches in the browser: chunks, rows, images, teachers, orders.

    Follows a running build. Reads only, and listens on this machine only unless --host is passed. --bundle writes
    one page with sampled rows, which opens from a file or any web host.

    \b
    Example: forebay view caches/edu
             forebay view caches/edu caches/photos
             forebay view caches/edu --bundle edu.html
    """
    shown = _shown_caches(caches, options["paths"], options["statistics"])
    if bundle is not None:
        return import_module("forebay.viewer.bundle").write_bundle(shown, bundle, rows)
    server = _server(shown, options["host"], options["port"]).start()
    try:
        show_now(server.viewing())
        if not options["no_open"] and options["host"] is None and _can_open():
            webbrowser.open(str(server.address))
        server.wait()
    except KeyboardInterrupt:  # the way to end it
        pass
    finally:
        server.stop()
    click.get_current_context().exit()


def _shown_caches(caches: tuple[str, ...], paths: tuple[str, ...], statistics: tuple[str, ...]) -> list[Any]:
    roots = [through_tier(cache) for cache in caches]
    for root in roots:
        read_cache_document(open_store(root))
    library: Any = import_module("forebay.viewer.shown_cache")  # uvicorn belongs to an extra
    source = source_like_before(caches[0], paths) if paths else None
    return [library.ShownCache.of(root, None if number else source, statistics) for number, root in enumerate(roots)]


def _can_open() -> bool:
    """Whether a person sees a browser that opens now: there is a display, and the output is not for a program."""
    has_display = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return has_display and not is_json()


def _server(shown: list[Any], host: str | None, port: int) -> Any:
    library = import_module("forebay.viewer.web_app")
    try:
        return library.Server(shown, host=host or library.LOOPBACK, port=port)
    except OSError as error:
        raise ForebayError(
            f"cannot listen on {host or library.LOOPBACK}, port {port}: {error.strerror}",
            hint="choose another --port, or 0 for a free one",
        ) from error
