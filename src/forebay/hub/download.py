"""Download files by `hf_hub_download`, and check their size and hash against the listing.

A shard is downloaded into a scratch folder that is named after its process, `.tmp-<process>-…`. A killed process leaves
its folder; the next process removes it.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from huggingface_hub import hf_hub_download
from huggingface_hub.utils.tqdm import silent_tqdm

from forebay.errors import StoreFull
from forebay.hub.repository import HubFile, RemoteFile
from forebay.hub.session import wrong_bytes
from forebay.store.owners import is_left_behind, is_temporary, temporary_name

_BLOCK = 1 << 20


def download(file: HubFile, folder: str) -> str:
    """Download a file into a folder, below its path in the repository. The local path of the checked file."""
    owner, listed = file.repository, file.listed

    def attempt() -> str:
        path = hf_hub_download(
            owner.name,
            listed.path,
            repo_type=owner.kind,
            revision=file.commit,
            local_dir=folder,
            endpoint=owner.address,
            token=False,  # `forebay.hub.session` adds it
            force_download=True,  # otherwise the library retries by itself, and copies from its own cache
            tqdm_class=silent_tqdm,
        )
        problem = mismatch(path, listed)
        if problem:
            os.unlink(path)
            raise wrong_bytes(file.what, problem)
        return path

    try:
        return owner.request(attempt, file.what, listed.size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        message = f"not enough disk space at '{folder}': {listed.size:,} bytes are needed, {free:,} are free"
        raise StoreFull(message, hint="free some space and run the same command to resume") from error


def mismatch(path: str, file: RemoteFile) -> str:
    """How a local file differs from the listing; empty if size and hash are right."""
    size, digest = os.path.getsize(path), file.new_hash()
    if size != file.size:
        return f"it has {size:,} bytes, but {file.size:,} are listed"
    with open(path, "rb", buffering=0) as content:
        while piece := content.read(_BLOCK):
            digest.update(piece)
    value = digest.hexdigest()
    return "" if value == file.identity else f"its hash is {value}, but {file.identity} is listed"


@contextmanager
def scratch_folder(parent: str) -> Iterator[str]:
    """A new folder of this process, removed at the end."""
    path = os.path.join(parent, temporary_name())
    os.makedirs(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(parent: str) -> None:
    """Remove the scratch folders of processes that ended without removing theirs."""
    names = os.listdir(parent) if os.path.isdir(parent) else []
    for path in (os.path.join(parent, name) for name in names if is_temporary(name)):
        with suppress(OSError):  # removed by another process
            if is_left_behind(os.path.basename(path), os.lstat(path).st_mtime):
                shutil.rmtree(path, ignore_errors=True)  # does not follow or remove a link
