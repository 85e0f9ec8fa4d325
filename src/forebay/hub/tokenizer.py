"""The `tokenizer.json` of a model, kept on disk once it was seen."""

import os
from dataclasses import replace

from forebay.errors import HubNotFound, HubUnreachable
from forebay.hub.hub_file import HubFile
from forebay.hub.patience import Patience
from forebay.hub.repository import Repository
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
    patience: Patience | None = None,
) -> bytes:
    """The bytes of a model's `tokenizer.json`, checked; without the network, those that were seen last."""
    repository = Repository(name, "model", endpoint, folder, patience or Patience())
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
