"""Sources from strings, in Python and on the command line: paths, globs, `hub:org/name` and bucket URLs."""

import os
from collections.abc import Mapping, Sequence
from glob import has_magic
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import msgspec

from forebay.building.layers import begun_plan
from forebay.cache.catalog import read_cache_document
from forebay.cache.plan import Plan
from forebay.errors import SourceInvalid
from forebay.kinds import reopen_source
from forebay.recipe import hooks_of
from forebay.source import Source
from forebay.sources.bucket_files import relative_url
from forebay.sources.paths import named_below
from forebay.sources.source_settings import HUB, TEXT_SUFFIXES, SourceSettings, is_on_hub
from forebay.sources.walking import without_stream_suffix
from forebay.store.base import Store, is_url

Path = str | os.PathLike[str]
AnySource = Source | Path | Sequence[Path]
HUB_IDENTITY = ("subset", "split", "text", "endpoint")  # the fields that identify a data set, apart from its revision


def settings_class(recipe: object) -> type[SourceSettings] | None:
    """The options by which strings become a source for a recipe or its class; None if it is not made from samples."""
    name = hooks_of(recipe).source_settings if "chunk_target" in dir(recipe) else ""
    return resolve_name(name) if name else None


def new_source(recipe: object, source: AnySource, **options: Any) -> Source:
    """The source of a new cache; `options` are those of `forebay build KIND`."""
    if isinstance(source, Source):
        return source
    paths, settings = _paths(source), settings_class(recipe)
    if settings is None:
        raise SourceInvalid(
            f"{type(recipe).__name__} has no sources that strings name (got {paths[0]!r})",
            hint="pass a source, such as fb.sources.files('data')",
        )
    return msgspec.convert({"paths": paths, **options}, settings).open()


def source_like(store: Store, source: AnySource, **download: Any) -> Source:
    """A source like that of a cache, for other paths; `download` has the options for the hub."""
    if isinstance(source, Source):
        return source
    paths = _paths(source)
    read_cache_document(store)
    plan = begun_plan(store)
    described, root = plan.source, store.address
    if described["kind"] == "hub":
        return _on_hub(root, described, paths, download)
    if described["kind"] == "image_manifest":
        return _with_manifest(root, described, paths)
    if "patterns" not in described:
        raise SourceInvalid(
            f"'{root}' was built from a source of kind '{described['kind']}', which has no path",
            hint=f"pass the source itself in Python: fb.update({root!r}, source)",
        )
    if any(map(is_on_hub, paths)) or download:
        raise SourceInvalid(f"'{root}' was built from files, not from the hub", hint="use a separate cache for the hub")
    _check_suffixes(root, plan, paths)
    below, patterns = named_below(paths, None)
    return reopen_source({**described, "root": below, "patterns": list(patterns)})


def _paths(source: object) -> tuple[str, ...]:
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(
            f"source must be paths, globs, 'hub:org/name' or URLs, or a source such as "
            f"fb.sources.jsonl('data/*.jsonl') (got {type(source).__name__})"
        )
    if not paths:
        raise SourceInvalid("source is an empty list", hint="pass at least one path")
    return tuple(map(os.fspath, paths))


def _check_suffixes(root: str, plan: Plan, paths: Sequence[str]) -> None:
    """Refuse a file that a build would read in another format; in folders and globs, the source chooses by suffix."""
    kind = plan.source["kind"]
    own = [suffix for suffix, known in TEXT_SUFFIXES.items() if known == kind]
    if not own or all(map(has_magic, paths)):
        return
    planned = {_suffix(path) for path in plan.files}
    for path in paths:
        if not os.path.isdir(path) and not has_magic(path) and _suffix(path) not in {"", *own, *planned}:
            raise SourceInvalid(
                f"'{path}' ends in {_suffix(path)}, and '{root}' was built from {kind} files ({', '.join(own)})",
                hint="pass files of that format, or build a separate cache from this one",
            )


def _suffix(path: str) -> str:
    return os.path.splitext(without_stream_suffix(path))[1].lower()


def _with_manifest(cache: str, described: Mapping[str, Any], paths: Sequence[str]) -> Source:
    """The manifest with more lines, at its present path; the images must not move."""
    root = str(described["root"])
    if len(paths) != 1 or is_on_hub(paths[0]) or is_url(paths[0]) != is_url(root):
        raise SourceInvalid(f"'{cache}' was built from one manifest below '{root}'", hint="pass that file")
    manifest = relative_url(paths[0], root) if is_url(root) else os.path.relpath(os.path.abspath(paths[0]), root)
    return reopen_source({**described, "manifest": manifest})


def _on_hub(cache: str, described: Mapping[str, Any], paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """The same data set at another revision.

    Naming the data set allows contacting the user's hub, but not another hub that is recorded in the cache.
    """
    own = f"{HUB}{described['name']}"
    if list(paths) != [own]:
        raise SourceInvalid(
            f"'{cache}' was built from {own} and is updated with a newer revision of it", hint=f"pass {own}"
        )
    stored: Any = reopen_source(described)
    repository = stored.repository
    if not repository.gets_token:
        raise SourceInvalid(
            f"'{cache}' was built from the hub at {repository.address}, which is not your endpoint",
            hint=f"if you trust it, set HF_ENDPOINT={repository.address}: your token will be sent there",
        )
    sources: Any = import_module("forebay.sources")  # the hub has an optional library
    source: Source = sources.hub(described["name"], **{name: described[name] for name in HUB_IDENTITY}, **download)
    return source
