"""On what a folder rests. LMDB needs locks and shared maps that network file systems do not give."""

import os

import psutil

from forebay.errors import TierUnusable

NETWORK = frozenset((
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "davfs", "gfs", "gfs2", "glusterfs",
    "gpfs", "lustre", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "smb2", "smb3", "smbfs",
    "vboxsf", "virtiofs", "vmhgfs", "webdav", "wekafs",
))  # fmt: skip
# Programs serve these; most of them stand for something remote (sshfs, s3fs, gcsfuse, juicefs), a few for a disk.
_SERVED = ("fuse", "macfuse", "osxfuse")
_LOCAL_DISKS = frozenset(("fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.ext2"))


def file_system_of(path: str) -> tuple[str, str]:
    """The type of the file system that holds a path, and where it is mounted; both empty where nobody tells."""
    where = os.path.realpath(path)
    mounts = [(len(mount.mountpoint), number, mount) for number, mount in enumerate(psutil.disk_partitions(all=True))]
    holding = [mount for mount in mounts if _is_below(where, mount[2].mountpoint)]
    if not holding:
        return "", ""
    _, _, mount = max(holding, key=lambda found: found[:2])  # of two at one place, the later hides the earlier
    return mount.fstype.lower(), mount.mountpoint


def is_network(kind: str) -> bool:
    """
    >>> is_network("nfs4"), is_network("fuse.sshfs"), is_network("fuseblk"), is_network("ext4")
    (True, True, False, False)
    """
    return kind in NETWORK or (kind.startswith(_SERVED) and kind not in _LOCAL_DISKS)


def refuse_network(path: str) -> None:
    """Refuse a folder in which two machines, or even two processes, would not see each other's locks."""
    kind, mounted_at = file_system_of(path)
    if is_network(kind):
        raise TierUnusable(
            path,
            f"it is on a network file system ({kind}, mounted at '{mounted_at}'), where LMDB's locks do not hold",
            "choose a folder on a disk of this machine; every machine needs its own tier",
        )


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
