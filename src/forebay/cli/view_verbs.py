"""`forebay view`: caches in the browser, from a server on this machine or as a static page."""

import webbrowser
from importlib import import_module
from typing import Any

import click

from forebay.cache.catalog import read_cache_document
from forebay.cli.grow_verbs import source_like_before
from forebay.cli.options import complete_file, complete_folder, local_only
from forebay.cli.remote_verbs import through_tier
from forebay.cli.show import show_result
from forebay.cli.verb import verb
from forebay.errors import ForebayError
from forebay.store import open_store

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
        show_result(server.viewing())  # now, not when it ends
        if opens:
            webbrowser.open(str(server.address))
        server.wait()
    except KeyboardInterrupt:  # the way to end it
        pass
    finally:
        server.stop()
    click.get_current_context().exit()


def _server(shown: list[Any], host: str | None, port: int) -> Any:
    library = import_module("forebay.viewer.server")
    try:
        return library.Server(shown, host=host or library.LOOPBACK, port=port)
    except OSError as error:
        raise ForebayError(
            f"cannot listen on {host or library.LOOPBACK}, port {port}: {error.strerror}; choose another --port, or 0 "
            "for a free one"
        ) from error
