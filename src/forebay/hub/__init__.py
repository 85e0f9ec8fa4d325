"""Talking to the Hugging Face hub: what a repository holds, and its bytes, checked.

`huggingface_hub` knows the address, the token and the HTTP client; it lists without a timeout and keeps all it
downloads, so asking, downloading and range reads are here.
"""

from forebay.errors import LibraryMissing

try:  # first, so that the sentence below is the one that is read
    import httpx2 as _httpx2  # noqa: F401
    import huggingface_hub as _huggingface_hub

    # Other libraries bring an older one, which asks with another client.
    if tuple(int(part) for part in _huggingface_hub.__version__.split(".")[:2] if part.isdecimal()) < (2, 4):
        raise LibraryMissing("huggingface_hub>=2.4", "reading from the Hugging Face hub", "remote")
except ModuleNotFoundError as missing:
    library = missing.name or "huggingface_hub"
    raise LibraryMissing(library, "reading from the Hugging Face hub", "remote") from missing

from forebay.hub.dataset_shards import parquet_shards
from forebay.hub.download import RangeFile
from forebay.hub.http import RetryPolicy
from forebay.hub.models import model_files, tokenizer_json
from forebay.hub.repository import HubFile, Listing, RemoteFile, Repository
from forebay.hub.spool import Held, clear, sweep, take

__all__ = [
    "Held",
    "HubFile",
    "Listing",
    "RangeFile",
    "RemoteFile",
    "Repository",
    "RetryPolicy",
    "clear",
    "model_files",
    "parquet_shards",
    "sweep",
    "take",
    "tokenizer_json",
]
