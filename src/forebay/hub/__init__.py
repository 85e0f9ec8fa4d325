"""The Hugging Face hub: list repositories, download files, and check what arrives.

`huggingface_hub` provides the address, the token and the HTTP client. It lists without a timeout and keeps every
download, so requests, downloads and range reads are implemented here.
"""

from forebay.errors import LibraryMissing

try:  # first, so that this error is the one that is raised
    import httpx2 as _httpx2  # noqa: F401
    import huggingface_hub as _huggingface_hub

    # Other libraries may install an older version with another HTTP client.
    if tuple(int(part) for part in _huggingface_hub.__version__.split(".")[:2] if part.isdecimal()) < (2, 4):
        raise LibraryMissing("huggingface_hub>=2.4", "reading from the Hugging Face hub", "remote")
except ModuleNotFoundError as missing:
    library = missing.name or "huggingface_hub"
    raise LibraryMissing(library, "reading from the Hugging Face hub", "remote") from missing

from forebay.hub.download import RangeFile, SpooledFile, acquire, clear, model_files, sweep, tokenizer_json
from forebay.hub.http import RetryPolicy
from forebay.hub.repository import HubFile, RemoteFile, Repository, RepositoryListing, parquet_shards

__all__ = [
    "HubFile",
    "RangeFile",
    "RemoteFile",
    "Repository",
    "RepositoryListing",
    "RetryPolicy",
    "SpooledFile",
    "acquire",
    "clear",
    "model_files",
    "parquet_shards",
    "sweep",
    "tokenizer_json",
]
