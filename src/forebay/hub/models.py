"""The files of a model on the hub: downloaded once, checked at each use, and cached on disk.

{folder}/models/<hash>                       a complete, checked file
{folder}/model-folders/<name>/<commit>/…     links to these files under their names in the commit
"""

import os
import secrets
from dataclasses import replace

from forebay.errors import StoreUnavailable
from forebay.hub.download import ScratchFolder, download, mismatch, sweep
from forebay.hub.repository import HubFile, RemoteFile, Repository
from forebay.hub.session import RetryPolicy, not_found

_TOKENIZER = "tokenizer.json"
_FILES, _FOLDERS = "models", "model-folders"
_QUICK = 10.0  # seconds to check whether a cached model is still the newest


def tokenizer_json(
    name: str,
    revision: str | None = None,
    *,
    folder: str | None = None,
    endpoint: str | None = None,
    patience: RetryPolicy | None = None,
) -> bytes:
    """The bytes of a model's `tokenizer.json`, checked; without a network, the newest cached ones."""
    repository = Repository(name, "model", endpoint, folder, patience or RetryPolicy())
    commit = _newest_commit(repository, revision)
    file = repository.listing(commit).file(_TOKENIZER)
    if file is None:
        hint = "save one with the `tokenizers` library and pass its path"
        raise not_found(f"the tokenizer of {repository.what}", f"it has no file '{_TOKENIZER}'", hint)
    with open(_cached_file(HubFile(repository, commit, file)), "rb") as content:
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
    commit = _newest_commit(repository, None)
    listed = [file for file in repository.listing(commit).files if _belongs(file, path, wanted)]
    if not listed:
        what = f"'{path}' of {repository.what}" if path else repository.what
        raise not_found(what, "it has no such file, or no weights as .safetensors", "check the name of the folder")
    local = os.path.join(repository.cache_folder(_FOLDERS), name.replace("/", "--"), commit)
    for file in listed:
        _link(_cached_file(HubFile(repository, commit, file)), os.path.join(local, file.path))
    return os.path.join(local, path) if path else local


def _newest_commit(repository: Repository, revision: str | None) -> str:
    """The commit of a revision; if the hub does not answer quickly, the last known one if files are cached."""
    known = repository.last_commit(revision)
    if known is None or not os.path.exists(repository.cache_folder(_FILES)):
        return repository.commit(revision)
    quick = replace(repository.patience, retries=0, timeout=min(_QUICK, repository.patience.timeout))
    try:
        return replace(repository, patience=quick).commit(revision)
    except StoreUnavailable:
        return known


def _belongs(file: RemoteFile, path: str, wanted: tuple[str, ...]) -> bool:
    """Whether a file is at `path`, or directly in the folder `path` with a wanted suffix."""
    inside, name = os.path.split(file.path)
    return file.path == path or (inside == path.rstrip("/") and name.endswith(wanted))


def _cached_file(file: HubFile) -> str:
    folder = os.path.abspath(file.repository.cache_folder(_FILES))
    path = os.path.join(folder, file.listed.identity)
    if not os.path.isfile(path) or mismatch(path, file.listed):
        sweep(folder)
        with ScratchFolder(folder) as scratch:
            os.replace(download(file, scratch.path), path)
    return path


def _link(target: str, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = f"{path}.{secrets.token_hex(4)}"
    os.symlink(target, aside)
    os.replace(aside, path)  # one link may lead elsewhere: another hub can have the same commit
