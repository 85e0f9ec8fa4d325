"""The files of a model on the hub: downloaded once, checked at each use, and cached on disk.

{folder}/models/<hash of hub and name>.json           the newest known commit and its files
{folder}/models/<hash of hub and name>/<commit>/…     files under their names in the commit
"""

import hashlib
import os
from dataclasses import replace

import msgspec

from forebay.errors import Damaged, StoreUnavailable
from forebay.hub.download import download, mismatch
from forebay.hub.repository import HubFile, RemoteFile, Repository
from forebay.hub.session import not_found
from forebay.store import LocalStore, Missing, Store
from forebay.store.retries import RetryPolicy

_QUICK = 10.0  # seconds to check whether a cached model is still the newest


class _Listing(msgspec.Struct, frozen=True):
    commit: str
    files: tuple[RemoteFile, ...]


def tokenizer_json(
    name: str, *, folder: str | None = None, endpoint: str | None = None, patience: RetryPolicy | None = None
) -> bytes:
    """The bytes of a model's `tokenizer.json`, checked; without a network, the newest cached ones."""
    path = model_files(name, "tokenizer.json", (), folder=folder, endpoint=endpoint, patience=patience)
    with open(path, "rb") as content:
        return content.read()


def model_files(
    name: str,
    path: str,
    wanted: tuple[str, ...],
    *,
    folder: str | None = None,
    endpoint: str | None = None,
    patience: RetryPolicy | None = None,
) -> str:
    """The local path of a model's folder or file; of a folder, only files that end in one of `wanted`."""
    repository = Repository(name, "model", endpoint, folder, patience or RetryPolicy())
    store = LocalStore(repository.cache_folder("models"))
    key = hashlib.sha256(f"{repository.address}\n{name}".encode()).hexdigest()[:16]
    newest = _newest(repository, store, f"{key}.json")
    matching = [file for file in newest.files if _belongs(file, path, wanted)]
    if not matching:
        what = f"'{path}' of {repository.what}" if path else repository.what
        problem = "it has no such file, or no weights as .safetensors"
        raise not_found(what, problem, "check the name, or save the file and pass its path")
    local = os.path.join(store.local_path(key), newest.commit)
    for file in matching:
        target = os.path.join(local, file.path)
        if not os.path.isfile(target) or mismatch(target, file):
            download(HubFile(repository, newest.commit, file), local)
    return os.path.join(local, path) if path else local


def _newest(repository: Repository, store: Store, key: str) -> _Listing:
    """The files of the main branch; if the hub does not answer quickly, those that were listed last."""
    known = _recall(store, key)
    if known is not None:
        quick = replace(repository.patience, retries=0, timeout=min(_QUICK, repository.patience.timeout))
        repository = replace(repository, patience=quick)
    try:
        commit = repository.commit()
        if known is not None and commit == known.commit:
            return known
        newest = _Listing(commit, repository.files(commit))
    except StoreUnavailable:
        if known is None:
            raise
        return known
    content = msgspec.json.encode(newest)
    store.replace(key, [hashlib.sha256(content).digest(), content], durable=False)
    return newest


def _recall(store: Store, key: str) -> _Listing | None:
    """The listing on disk; None if it is missing or damaged."""
    try:
        stored = store.read(key)
        content = stored[32:]
        return msgspec.json.decode(content, type=_Listing) if hashlib.sha256(content).digest() == stored[:32] else None
    except (Missing, Damaged, msgspec.DecodeError):
        return None


def _belongs(file: RemoteFile, path: str, wanted: tuple[str, ...]) -> bool:
    """Whether a file is at `path`, or directly in the folder `path` with a wanted suffix."""
    inside, name = os.path.split(file.path)
    return file.path == path or (inside == path.rstrip("/") and name.endswith(wanted))
