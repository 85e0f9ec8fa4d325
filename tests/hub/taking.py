"""A process that takes the file `a.parquet` of `org/set` from a hub, reads it, and lets go when told by a file."""

import hashlib
from pathlib import Path

from tests.helpers.builders import wait_until

from forebay.hub import HubFile, Repository, RetryPolicy, ScratchFolder, download


def main(address: str, folder: str) -> None:
    owner = Repository("org/set", "dataset", address, f"{folder}/kept", RetryPolicy(timeout=30, first_wait=0.01))
    commit = owner.commit()
    file = owner.listing(commit).file("a.parquet")
    assert file is not None
    with ScratchFolder(f"{folder}/spool") as scratch:
        path = download(HubFile(owner, commit, file), scratch.path)
        print(hashlib.sha256(Path(path).read_bytes()).hexdigest(), flush=True)
        wait_until(Path(folder, "let-go").exists)
