"""The source of a cache that is there, with other data in it: what `grow` reads."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from forebay import sources
from forebay.cache.prepare import begun_plan
from forebay.cache.publish import read_cache_document
from forebay.cli.source_paths import HUB, is_on_hub
from forebay.kinds import reopen_source
from forebay.source import Source
from forebay.sources.paths import named_below, refuse_url
from forebay.store import open_store

# What a data set on the hub is known by; a newer revision of it is the same data set.
HUB_IDENTITY = ("subset", "split", "text", "endpoint")


def source_like_before(cache: str, paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """Other data, read as the plan's source reads its own; `download` says how, where it is on the hub."""
    described = _described(cache)
    if described["kind"] == "hub":
        return _on_hub(cache, described, paths, download)
    if described["kind"] == "image_manifest":
        return _with_manifest(cache, described, paths)
    if "patterns" not in described:
        raise click.UsageError(
            f"'{cache}' was built from a source of kind '{described['kind']}', which no path names; grow it in Python: "
            f"fb.grow({cache!r}, source)"
        )
    if any(map(is_on_hub, paths)) or download:
        raise click.UsageError(f"'{cache}' was built from files, and grows by files; the hub needs a separate cache.")
    root, patterns = named_below(paths, None)
    return reopen_source({**described, "root": root, "patterns": list(patterns)})


def _described(cache: str) -> Mapping[str, Any]:
    store = open_store(cache)
    read_cache_document(store)
    return begun_plan(store).source


def _with_manifest(cache: str, described: Mapping[str, Any], paths: Sequence[str]) -> Source:
    """The manifest with further lines, wherever it is now; the images stay where they are."""
    if len(paths) != 1 or is_on_hub(paths[0]):
        raise click.UsageError(
            f"'{cache}' was built from one manifest, and grows by its further lines: name that file."
        )
    refuse_url(paths[0])
    return reopen_source({**described, "manifest": os.path.relpath(os.path.abspath(paths[0]), described["root"])})


def _on_hub(cache: str, described: Mapping[str, Any], paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """The same data set at another revision: one source must read all that the plan has.

    Naming the data set allows to contact the user's hub. Another that only the cache names, the user has to name too.
    """
    own = f"{HUB}{described['name']}"
    if list(paths) != [own]:
        raise click.UsageError(f"'{cache}' was built from {own}, and grows by a newer revision of it: name {own}.")
    repository = sources.HubSource.from_description(described).repository
    if not repository.asked.is_named:
        raise click.UsageError(
            f"'{cache}' was built from the hub at {repository.address}, which is not yours; name it with "
            f"HF_ENDPOINT={repository.address} if you trust it: your token is sent there."
        )
    return sources.hub(described["name"], **{name: described[name] for name in HUB_IDENTITY}, **download)
