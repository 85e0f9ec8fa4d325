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

from forebay.hub.hub_file import HubFile
from forebay.hub.listing import Listing, RemoteFile
from forebay.hub.model import model_files
from forebay.hub.patience import Patience
from forebay.hub.ranges import RangeFile
from forebay.hub.repository import Repository
from forebay.hub.shards import parquet_shards
from forebay.hub.spool import Held, clear, sweep, take
from forebay.hub.tokenizer import tokenizer_json

__all__ = [
    "Held",
    "HubFile",
    "Listing",
    "Patience",
    "RangeFile",
    "RemoteFile",
    "Repository",
    "clear",
    "model_files",
    "parquet_shards",
    "sweep",
    "take",
    "tokenizer_json",
]
