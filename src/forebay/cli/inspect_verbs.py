"""`forebay info`, `status`, `gaps`, `verify`, `peek`, `view` and `doctor`: inspect without changing anything."""

import webbrowser
from importlib import import_module
from typing import Any, get_args

import click

from forebay import api, installation
from forebay.cache.catalog import read_cache_document
from forebay.cache.records import DoctorReport, Status
from forebay.cache.status import SHOWN_FAILURES, Depth
from forebay.cli.maintain_verbs import source_like_before
from forebay.cli.tier_verbs import through_tier
from forebay.cli.verb import (
    Finding,
    SizeType,
    cache_argument,
    complete_added_layer,
    complete_column,
    complete_file,
    complete_folder,
    complete_layer,
    local_only,
    show_now,
    shown_progress,
    source_option,
    verb,
)
from forebay.errors import ForebayError
from forebay.format.chunk import MAX_BLOCK_BYTES
from forebay.preview.peek import KINDS as PACKED
from forebay.preview.peek import PEEKED_ROWS, SHEET_ROWS
from forebay.preview.peek import peek as peek_rows
from forebay.preview.pictures import KIND as IMAGES
from forebay.preview.pictures import draw_features, draw_sheet, timed_layers
from forebay.preview.words import command_line, counted
from forebay.read.cache import open_cache
from forebay.store import open_store
from forebay.teachers import Alignment, check_alignment
from forebay.teachers.align import read_expectations


@verb()
@cache_argument
def info(cache: str) -> Any:
    """What is this cache? Its source, recipes, columns, counts and fingerprints.

    Example: forebay info caches/edu
    """
    return api.summarize(cache)


ALL = "all"


class ShownType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A count, or `all`."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        if value == ALL:
            return ALL
        if not str(value).isdecimal():
            self.fail(f"'{value}' is neither a count nor '{ALL}'", param, ctx)
        return int(value)


@verb()
@cache_argument
@click.option(
    "--failures",
    type=ShownType(),
    default=SHOWN_FAILURES,
    show_default=True,
    metavar=f"N|{ALL}",
    help="Number of failed samples to list.",
)
@click.option(
    "--depth",
    type=click.Choice(get_args(Depth)),
    default="chunks",
    show_default=True,
    help="index: open no chunk and leave the source alone, to poll a large cache.",
)
@source_option
def status(cache: str, failures: int | str, depth: Depth, check_source: bool) -> Any:
    """How far is the build, and does it need attention? Chunks, failures, stale sources.

    Reads no data. Counts chunks that are present, missing, suspect, lost or claimed; failed samples by reason; changed
    source files, and with --check-source new ones. Shows builders at work, and one that still plans. Exits 1 if a chunk
    is suspect or lost, a claim failed, a source file changed, or one was deleted before it was all built.

    \b
    Example: forebay status caches/edu
             forebay status caches/edu --failures all
             watch forebay status caches/edu --depth index
    """
    shown = None if isinstance(failures, str) else failures
    found = api.status(cache, check_source=check_source, failures=shown, depth=depth)
    if not _has_problems(found):
        return found
    return Finding(found, "NeedsAttention", f"'{cache}' has lost or suspect chunks, failed claims or a stale source")


def _has_problems(found: Status) -> bool:
    damaged = any(layer.suspect or layer.lost for layer in found.layers)
    return damaged or found.needs_source or any(claim.state == "failed" for claim in found.claims)


@verb()
@cache_argument
@click.option("--layer", shell_complete=complete_layer, help="Only show this layer.")
def gaps(cache: str, layer: str | None) -> Any:
    """Which chunks are missing, and which command builds them?

    Example: forebay gaps caches/edu
    """
    return api.gaps(cache, layer=layer)


@verb()
@cache_argument
@click.option("--full", is_flag=True, help="Also decode every row and hash the source.")
@click.option(
    "--align", is_flag=True, help="Also check teacher layers: shapes, buckets, ranges, and a few recomputed rows."
)
@click.option(
    "--expect",
    multiple=True,
    metavar="FACT|PROFILE|FILE",
    help="With --align, fail unless this holds: lune.dim=1280, sol.spatial=8x8, tinyflux (repeatable).",
)
@click.option(
    "--held-out",
    type=click.IntRange(min=0),
    default=0,
    metavar="ROWS",
    help="With --align, run timed teachers on this many rows halfway between buckets: the error of interpolation.",
)
@click.option("--cache-id", metavar="ID", help="Fail unless the cache has this id.")
@click.option(
    "--min-generation", type=click.IntRange(min=0), metavar="N", help="Fail if the newest generation is older."
)
@click.option(
    "--max-block-bytes",
    type=SizeType(),
    default=f"{MAX_BLOCK_BYTES >> 20}MiB",
    show_default=True,
    help="Largest decoded size of a compressed block, with --full.",
)
@click.option("--digest", metavar="SHA256", help="Fail unless the newest generation has this digest.")
@source_option
def verify(
    cache: str, full: bool, align: bool, expect: tuple[str, ...], held_out: int, check_source: bool, **pins: Any
) -> Any:
    """Is every published byte intact? Reads and checks all of them.

    Lists bad chunks with layer, column, block and byte range, missing chunks, foreign files and stale sources. Exits 1
    if something is damaged or stale. --align compares teacher layers with their recipes and, if the teacher's files are
    available, recomputes a few rows of each. --expect checks a fact of a layer: lune.dim is the width of the layer lune
    (mid-block features of a UNet), sol.spatial the size of the maps in sol (its attention). Prints the id of the cache
    and the digest of its generation; --cache-id, --min-generation and --digest detect a cache that was swapped or
    rolled back.

    \b
    Example: forebay verify caches/edu --full
             forebay verify caches/art --align --expect lune.dim=1280 --expect sol.spatial=8x8
    """
    align = align or bool(expect) or bool(held_out)
    try:
        read_expectations(expect)
    except ValueError as error:
        raise click.UsageError(f"--expect: {error}.") from error
    with shown_progress() as on_progress:
        report = api.verify(cache, check_source=check_source, full=full, **pins, on_progress=on_progress)
    checked = align and report.sound
    found = (
        check_alignment(open_cache(cache), held_out=held_out, check_source=check_source, expect=expect)
        if checked
        else Alignment(root=cache, layers=())
    )
    records = [report, found] if align else report
    if not report.sound:
        return Finding(records, "Damaged", f"'{cache}' is damaged or stale", command_line("repair", cache))
    if not found.aligned:
        how = "are not as expected" if found.unmet else "differ from their recipes"
        return Finding(records, "NotAligned", f"teacher layers of '{cache}' {how}")
    return records


@verb()
@cache_argument
@click.option(
    "--rows",
    "count",
    type=click.IntRange(min=1),
    help="Number of rows, starting at row 0.  [default: 3; 24 with --png]",
)
@click.option("-r", "--row", "chosen", type=click.IntRange(min=0), multiple=True, help="Row to show (repeatable).")
@click.option(
    "--column",
    "columns",
    multiple=True,
    shell_complete=complete_column,
    help="Column to show, of any layer (repeatable).",
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    shell_complete=complete_added_layer,
    help="Teacher layer to draw with --png (repeatable).",
)
@click.option(
    "--png",
    "sheet",
    metavar="FILE",
    shell_complete=complete_file,
    help="Draw images with boxes and tags, or teacher features over timesteps.",
)
@click.option(
    "--patch",
    type=click.IntRange(min=1),
    help="Patch size drawn with --png.  [default: 16, if it divides the size]",
)
@click.option(
    "--source",
    "paths",
    multiple=True,
    metavar="SOURCE",
    shell_complete=complete_file,
    help="Source to read the names of documents from.",
)
def peek(
    cache: str,
    count: int | None,
    chosen: tuple[int, ...],
    columns: tuple[str, ...],
    layers: tuple[str, ...],
    sheet: str | None,
    patch: int | None,
    paths: tuple[str, ...],
) -> Any:
    """Show rows: text, images, or the first values of arrays.

    Packed tokens are shown as documents and padding; --column shows the ids, --json every token and the whole text.
    --source reads the source to show the names of documents. Images are drawn in shades; --png draws them to a file,
    with the box outlined and ignored tokens in red. Teacher features are drawn over timesteps: mid-block features of a
    UNet (lune) as strips, statistics of its attention (sol) as lines, attention maps as heat maps.

    \b
    Example: forebay peek caches/edu --row 17
             forebay peek caches/photos --png sheet.png
             forebay peek caches/art --row 3 --layer lune --layer sol --png taught.png
    """
    opened = open_cache(through_tier(cache))
    kind = opened.recipe(opened.generation.base).kind
    drawn_layers = layers or (timed_layers(opened) if kind != IMAGES else ())
    if layers and not sheet:
        raise click.UsageError("--layer needs --png FILE; use --column to show values.")
    if (sheet and kind != IMAGES and not drawn_layers) or (patch and kind != IMAGES):
        raise click.UsageError(
            f"--png draws images and timed teacher layers, and --patch is for images; '{cache}' has {kind}: "
            "leave them out."
        )
    if sheet and columns:
        raise click.UsageError("--png draws whole images and --column shows one column; use one of them.")
    if patch and (not sheet or layers):
        raise click.UsageError("--patch needs --png FILE, and draws images only.")
    if paths and kind not in PACKED:
        raise click.UsageError(f"--source is for packed tokens; '{cache}' has {kind}.")
    rows = _rows(cache, len(opened), count or (SHEET_ROWS if sheet and not drawn_layers else PEEKED_ROWS), chosen)
    if sheet and drawn_layers:
        return draw_features(opened, rows, drawn_layers, sheet)
    if sheet:
        try:
            return draw_sheet(opened, rows, sheet, patch)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    source = source_like_before(cache, paths, {}) if paths else None
    return peek_rows(opened, rows, columns=columns or None, source=source)


def _rows(root: str, there: int, count: int, chosen: tuple[int, ...]) -> list[int]:
    beyond = [row for row in chosen if row >= there]
    if beyond:
        raise click.BadParameter(f"there is no row {beyond[0]:,}; '{root}' has {there:,}", param_hint="'--row'")
    return list(chosen) or list(range(min(count, there)))


PORT = 8765


@verb()
@click.argument("caches", nargs=-1, required=True, metavar="CACHE...", shell_complete=complete_folder)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--host",
    metavar="ADDRESS",
    help="Address to listen on, for other machines; the URL then has a secret token.  [default: 127.0.0.1]",
)
@click.option(
    "--bundle",
    metavar="OUT",
    shell_complete=complete_file,
    callback=local_only,
    help="Write a static page to this file and exit.",
)
@click.option(
    "--rows", type=click.IntRange(1, 1000), default=24, show_default=True, help="Rows of each cache in a --bundle."
)
@click.option(
    "--source",
    "paths",
    multiple=True,
    metavar="SOURCE",
    shell_complete=complete_file,
    help="Source of the first cache, to read the names of documents from.",
)
@click.option(
    "--statistics",
    multiple=True,
    metavar="FILE",
    shell_complete=complete_file,
    help="Statistics file that a running Loader writes (repeatable).",
)
def view(
    caches: tuple[str, ...],
    port: int,
    opens: bool,
    host: str | None,
    bundle: str | None,
    rows: int,
    paths: tuple[str, ...],
    statistics: tuple[str, ...],
) -> Any:
    """Show caches in the browser: chunks, rows, images, teachers, orders.

    Follows a build while it runs. Reads only, and listens on this machine only unless --host is passed. --bundle writes
    one page with sampled rows, which opens from a file or any web host.

    \b
    Example: forebay view caches/edu --open
             forebay view caches/edu caches/photos
             forebay view caches/edu --bundle edu.html
    """
    roots = [through_tier(cache) for cache in caches]
    for root in roots:
        read_cache_document(open_store(root))
    # uvicorn belongs to an extra.
    shown_caches: Any = import_module("forebay.viewer.shown_cache")
    shown_caches.survive_cut_files()
    source = source_like_before(caches[0], paths, {}) if paths else None
    shown = [
        shown_caches.ShownCache.of(root, source if number == 0 else None, statistics)
        for number, root in enumerate(roots)
    ]
    if bundle is not None:
        return import_module("forebay.viewer.bundle").write_bundle(shown, bundle, rows)
    server = _server(shown, host, port).start()
    try:
        show_now(server.viewing())
        if opens:
            webbrowser.open(str(server.address))
        server.wait()
    except KeyboardInterrupt:  # the way to end it
        pass
    finally:
        server.stop()
    click.get_current_context().exit()


def _server(shown: list[Any], host: str | None, port: int) -> Any:
    library = import_module("forebay.viewer.web_app")
    try:
        return library.Server(shown, host=host or library.LOOPBACK, port=port)
    except OSError as error:
        raise ForebayError(
            f"cannot listen on {host or library.LOOPBACK}, port {port}: {error.strerror}; choose another --port, or 0 "
            "for a free one"
        ) from error


@verb()
@click.argument("cache", required=False, shell_complete=complete_folder)
def doctor(cache: str | None) -> Finding | DoctorReport:
    """Check the installation, the machine, the disk and, if one is named, a cache.

    Lists versions, extras and the commands that install missing ones; the compiled loops and the system's libzstd,
    without which loaders are slower; CPU, memory and disk; whether credentials are set, never their values. Tries a
    create-only write next to CACHE, or in this folder. Exits 1 if there is a problem, each with the next command.

    \b
    Example: forebay doctor
             forebay doctor caches/edu
    """
    report = installation.doctor(cache)
    if not report.problems:
        return report
    first = report.problems[0]
    names = ", ".join(check.name for check in report.problems)
    return Finding(report, "ProblemsFound", f"{counted(len(report.problems), 'problem')}: {names}", first.command)
