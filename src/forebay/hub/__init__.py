"""The Hugging Face hub: list repositories, download files, and check them.

`huggingface_hub` transfers the bytes. forebay decides who gets the token, retries, and compares every downloaded file
with the hash in the listing.
"""

from forebay.errors import LibraryMissing

try:  # first, so that this error is the one that is raised
    import httpx2 as _httpx2  # noqa: F401
    import huggingface_hub as _huggingface_hub

    # Other libraries may install an older version with another HTTP client.
    if tuple(int(part) for part in _huggingface_hub.__version__.split(".")[:2] if part.isdecimal()) < (2, 4):
        raise LibraryMissing(
            "reading from the Hugging Face hub needs 'huggingface_hub>=2.4', which is not installed",
            hint="pip install 'forebay[remote]'",
            extra="remote",
        )
except ModuleNotFoundError as missing:
    library = missing.name or "huggingface_hub"
    raise LibraryMissing(
        f"reading from the Hugging Face hub needs '{library}', which is not installed",
        hint="pip install 'forebay[remote]'",
        extra="remote",
    ) from missing

from forebay.hub.download import download, scratch_folder, sweep
from forebay.hub.models import model_files, tokenizer_json
from forebay.hub.repository import HubFile, RangeFile, RemoteFile, Repository
from forebay.hub.shards import parquet_shards
from forebay.store.retries import RetryPolicy

__all__ = [
    "HubFile",
    "RangeFile",
    "RemoteFile",
    "Repository",
    "RetryPolicy",
    "download",
    "model_files",
    "parquet_shards",
    "scratch_folder",
    "sweep",
    "tokenizer_json",
]
