"""Sources of samples: files, images, lines, text, JSON lines, Parquet, the hub, iterables and functions."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.sources.image_files import ImageSource, images
from forebay.sources.jsonl import JsonlSource, LineSource, jsonl, lines
from forebay.sources.manifests import ImageManifestSource, image_manifest
from forebay.sources.python import FunctionSource, documents, function
from forebay.sources.text import FileSource, TextSource, files, text

if TYPE_CHECKING:
    from forebay.sources.hub_datasets import HubSource, hub
    from forebay.sources.parquet_sources import ParquetImageSource, ParquetSource, parquet, parquet_images
# Sources with an optional library are imported on first use. No module may have the name of such a function:
# importing it would replace the function by the module.
_HOMES = {
    **dict.fromkeys(("HubSource", "hub"), "forebay.sources.hub_datasets"),
    **dict.fromkeys(("ParquetSource", "parquet"), "forebay.sources.parquet_sources"),
    **dict.fromkeys(("ParquetImageSource", "parquet_images"), "forebay.sources.parquet_sources"),
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


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.sources' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
