"""Small facts about the hub, kept on disk by name: a commit behind a revision, the files of a commit."""

import hashlib
import os
import secrets


def kept_path(folder: str, *names: str) -> str:
    """Where a fact about these names is kept.

    >>> kept_path("/spool/listings", "HuggingFaceFW/fineweb-edu", "main")
    '/spool/listings/789d721ca3574786'
    """
    return os.path.join(folder, hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])


def read_kept(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def keep(path: str, content: bytes) -> None:
    """Write aside, then move: a reader sees the whole fact or none."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(aside, "xb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        if os.path.exists(aside):
            os.unlink(aside)
        raise
