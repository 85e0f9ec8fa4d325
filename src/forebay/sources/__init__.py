"""Sources of samples: files, images, lines, text, JSON lines, Parquet, the hub, iterables and functions."""

from typing import TYPE_CHECKING

from forebay.exports import lazy_exports
from forebay.sources.image_files import ImageSource, images
from forebay.sources.jsonl import JsonlSource, LineSource, jsonl, lines
from forebay.sources.manifests import ImageManifestSource, image_manifest
from forebay.sources.python import FunctionSource, documents, function
from forebay.sources.text import FileSource, TextSource, files, text

# Sources with an optional library are imported on first use. No module may have the name of such a function:
# importing it would replace the function by the module.
if TYPE_CHECKING:
    from forebay.sources.hub_datasets import HubSource, hub
    from forebay.sources.parquet_sources import ParquetImageSource, ParquetSource, parquet, parquet_images
__getattr__ = lazy_exports(__name__, __file__)[0]
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
