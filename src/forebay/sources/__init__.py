"""Where samples come from: files, images, lines, text, JSON lines, Parquet, the hub, iterables and functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.sources.files import FileSource, files
from forebay.sources.function import FunctionSource, function
from forebay.sources.image_files import ImageSource, images
from forebay.sources.image_manifests import ImageManifestSource, image_manifest
from forebay.sources.jsonl import JsonlSource, jsonl
from forebay.sources.lines import LineSource, lines
from forebay.sources.spool import documents
from forebay.sources.text import TextSource, text

if TYPE_CHECKING:
    from forebay.sources.hub_shards import HubSource, hub
    from forebay.sources.parquet_files import ParquetSource, parquet
    from forebay.sources.parquet_pictures import ParquetImageSource, parquet_images

# What needs an optional library is imported when it is first used. No module here may be named as such a function:
# importing it would put the module in the function's place.
_HOMES = {
    **dict.fromkeys(("HubSource", "hub"), "forebay.sources.hub_shards"),
    **dict.fromkeys(("ParquetSource", "parquet"), "forebay.sources.parquet_files"),
    **dict.fromkeys(("ParquetImageSource", "parquet_images"), "forebay.sources.parquet_pictures"),
}

__all__ = [
    "FileSource",
    "FunctionSource",
    "HubSource",
    "ImageManifestSource",
    "ImageSource",
    "JsonlSource",
    "LineSource",
    "ParquetImageSource",
    "ParquetSource",
    "TextSource",
    "documents",
    "files",
    "function",
    "hub",
    "image_manifest",
    "images",
    "jsonl",
    "lines",
    "parquet",
    "parquet_images",
    "text",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.sources' has no attribute '{name}'")
