"""The files of a model on the hub: downloaded once, checked, and cached on disk.

{folder}/models/<hash>                       a complete, checked file
{folder}/model-folders/<name>/<commit>/…     links to these files under their names in the commit
"""

import os
import secrets
from dataclasses import replace

from forebay.errors import HubNotFound, HubUnreachable
from forebay.hub.download import acquire
from forebay.hub.http import RetryPolicy
from forebay.hub.repository import HubFile, RemoteFile, Repository

_TOKENIZER = "tokenizer.json"
_TOKENIZERS = "tokenizers"  # their folder in the disk cache
_QUICK = 10.0  # seconds to check whether a cached tokenizer is still the newest


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
    commit = newest_commit(repository, revision, _TOKENIZERS)
    file = repository.listing(commit).file(_TOKENIZER)
    if file is None:
        advice = "save one with the `tokenizers` library and pass its path"
        raise HubNotFound(f"the tokenizer of {repository.what}", f"it has no file '{_TOKENIZER}'", advice)
    spooled = acquire(HubFile(repository, commit, file), repository.place(_TOKENIZERS))
    try:
        with open(spooled.path, "rb") as content:
            return content.read()
    finally:
        spooled.release()


def newest_commit(repository: Repository, revision: str | None, files: str) -> str:
    """The commit of a revision; if the hub does not answer quickly, the last known one if `files` are cached."""
    known = repository.last_commit(revision)
    if known is None or not os.path.exists(repository.place(files)):
        return repository.commit(revision)
    quick = replace(repository.patience, retries=0, timeout=min(_QUICK, repository.patience.timeout))
    try:
        return replace(repository, patience=quick).commit(revision)
    except HubUnreachable:
        return known


_FILES, _FOLDERS = "models", "model-folders"


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
    commit = newest_commit(repository, None, _FILES)
    listed = [file for file in repository.listing(commit).files if _belongs(file, path, wanted)]
    if not listed:
        what = f"'{path}' of {repository.what}" if path else repository.what
        raise HubNotFound(what, "it has no such file, or no weights as .safetensors", "check the name of the folder")
    place = os.path.join(repository.place(_FOLDERS), name.replace("/", "--"), commit)
    for file in listed:
        _link(HubFile(repository, commit, file), repository.place(_FILES), os.path.join(place, file.path))
    return os.path.join(place, path) if path else place


def _belongs(file: RemoteFile, path: str, wanted: tuple[str, ...]) -> bool:
    """Whether a file is at `path`, or directly in the folder `path` with a wanted suffix."""
    inside, name = os.path.split(file.path)
    return file.path == path or (inside == path.rstrip("/") and name.endswith(wanted))


def _link(file: HubFile, files: str, place: str) -> None:
    spooled = acquire(file, files)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _link_to(os.path.abspath(spooled.path), place)
    finally:
        spooled.release()


def _link_to(target: str, place: str) -> None:
    """Make a link; one with another target (another hub has the same commit) is replaced."""
    if os.path.islink(place):
        if os.readlink(place) == target:
            return
        aside = f"{place}.{secrets.token_hex(4)}"
        os.symlink(target, aside)
        os.replace(aside, place)
        return
    try:
        os.symlink(target, place)
    except FileExistsError:  # made by another process, or not a link
        if not os.path.islink(place):
            raise
