"""The files of a model on the hub: downloaded once, checked at each use, and cached on disk.

{folder}/models/<hash of hub and name>/<commit>/…     files under their names in the commit
"""

import os
from dataclasses import replace

from forebay.errors import StoreUnavailable
from forebay.hub.download import download, mismatch
from forebay.hub.repository import HubFile, RemoteFile, Repository
from forebay.hub.session import RetryPolicy, not_found

_QUICK = 10.0  # seconds to check whether a cached model is still the newest


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
    commit = _newest_commit(repository)
    listed = [file for file in repository.listing(commit).files if _belongs(file, path, wanted)]
    if not listed:
        what = f"'{path}' of {repository.what}" if path else repository.what
        problem = "it has no such file, or no weights as .safetensors"
        raise not_found(what, problem, "check the name, or save the file and pass its path")
    local = os.path.join(os.path.abspath(repository.cache_folder("models")), repository.key(""), commit)
    for file in listed:
        target = os.path.join(local, file.path)
        if not os.path.isfile(target) or mismatch(target, file):
            download(HubFile(repository, commit, file), local)
    return os.path.join(local, path) if path else local


def _newest_commit(repository: Repository) -> str:
    """The commit of the main branch; if the hub does not answer quickly, the last known one."""
    known = repository.last_commit()
    if known is None:
        return repository.commit()
    quick = replace(repository.patience, retries=0, timeout=min(_QUICK, repository.patience.timeout))
    try:
        return replace(repository, patience=quick).commit()
    except StoreUnavailable:
        return known


def _belongs(file: RemoteFile, path: str, wanted: tuple[str, ...]) -> bool:
    """Whether a file is at `path`, or directly in the folder `path` with a wanted suffix."""
    inside, name = os.path.split(file.path)
    return file.path == path or (inside == path.rstrip("/") and name.endswith(wanted))
