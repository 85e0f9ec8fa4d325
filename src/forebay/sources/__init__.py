"""Where samples come from: files as they are, lines of files, documents of text files, JSON lines and the hub."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.sources.files import FileSource, files
from forebay.sources.jsonl import JsonlSource, jsonl
from forebay.sources.lines import LineSource, lines
from forebay.sources.text import TextSource, text

if TYPE_CHECKING:
    from forebay.sources.hub_shards import HubSource, hub

# What needs an optional library is imported when it is first used. No module here may be named as such a function:
# importing it would put the module in the function's place.
_HOMES = dict.fromkeys(("HubSource", "hub"), "forebay.sources.hub_shards")

__all__ = [
    "FileSource",
    "HubSource",
    "JsonlSource",
    "LineSource",
    "TextSource",
    "files",
    "hub",
    "jsonl",
    "lines",
    "text",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.sources' has no attribute '{name}'")
