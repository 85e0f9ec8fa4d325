"""The files of a model on the hub: downloaded once, checked, and kept on disk.

{folder}/models/<hash>                       a file that is whole and checked
{folder}/model-folders/<name>/<commit>/…     links to them, as the commit names them
"""

import os
import secrets
from dataclasses import replace

from forebay.errors import HubNotFound, HubUnreachable
from forebay.hub.http import RetryPolicy
from forebay.hub.repository import HubFile, RemoteFile, Repository
from forebay.hub.spool import take

_TOKENIZER = "tokenizer.json"
_TOKENIZERS = "tokenizers"  # where they are kept
_QUICK = 10.0  # seconds to ask whether a tokenizer that is here is still the newest


def tokenizer_json(
    name: str,
    revision: str | None = None,
    *,
    folder: str | None = None,
    endpoint: str | None = None,
    patience: RetryPolicy | None = None,
) -> bytes:
    """The bytes of a model's `tokenizer.json`, checked; without the network, those that were seen last."""
    repository = Repository(name, "model", endpoint, folder, patience or RetryPolicy())
    commit = newest_commit(repository, revision, _TOKENIZERS)
    file = repository.listing(commit).file(_TOKENIZER)
    if file is None:
        advice = "save one with the `tokenizers` library, and give the path of that file"
        raise HubNotFound(f"the tokenizer of {repository.what}", f"it has no file '{_TOKENIZER}'", advice)
    held = take(HubFile(repository, commit, file), repository.place(_TOKENIZERS))
    try:
        with open(held.path, "rb") as content:
            return content.read()
    finally:
        held.keep()


def newest_commit(repository: Repository, revision: str | None, files: str) -> str:
    """The commit of a revision; where the hub does not answer at once, the last known whose `files` may be here."""
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
    """The path of a folder of a model, or of one file; of a folder, the files whose names end in one of `wanted`."""
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
    """The file that is named, or one that lies in the folder that is, not below it."""
    inside, name = os.path.split(file.path)
    return file.path == path or (inside == path.rstrip("/") and name.endswith(wanted))


def _link(file: HubFile, files: str, place: str) -> None:
    held = take(file, files)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _link_to(os.path.abspath(held.path), place)
    finally:
        held.keep()


def _link_to(target: str, place: str) -> None:
    """Have a link at a place; one that leads elsewhere (another hub named the same commit) is replaced."""
    if os.path.islink(place):
        if os.readlink(place) == target:
            return
        aside = f"{place}.{secrets.token_hex(4)}"
        os.symlink(target, aside)
        os.replace(aside, place)
        return
    try:
        os.symlink(target, place)
    except FileExistsError:  # made by another process, or it is not ours
        if not os.path.islink(place):
            raise
