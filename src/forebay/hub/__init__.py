"""Talking to the Hugging Face hub: what a repository holds, and its bytes, checked.

`huggingface_hub` knows the address, the token and the HTTP client; it lists without a timeout and keeps all it
downloads, so asking, downloading and range reads are here.
"""

from forebay.errors import LibraryMissing

try:
    import huggingface_hub as _huggingface_hub  # noqa: F401  # first, so that the sentence below is the one that is read
except ModuleNotFoundError as missing:
    raise LibraryMissing("huggingface_hub", "reading from the Hugging Face hub", "remote") from missing

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
