"""Real folders that behave as stores far away: they count requests, and can be cut off or spoil what they send."""

import threading
from pathlib import Path

from forebay.errors import StoreUnavailable
from forebay.store import LocalStore


class FarFolder(LocalStore):
    """A folder that counts the reads of chunks, and is out of reach while a file `offline` lies beside it."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.reads: list[str] = []
        self._counting = threading.Lock()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._check_reach()
        value = super().read(key, start, stop)
        if key.startswith("layers/") and key.endswith(".safetensors") and "constants" not in key:
            with self._counting:
                self.reads.append(key)
        return self.sent(key, start, value)

    def entries(self, prefix: str):
        self._check_reach()
        return super().entries(prefix)

    def head(self, key: str):
        self._check_reach()
        return super().head(key)

    def folders(self, prefix: str) -> list[str]:
        self._check_reach()
        return super().folders(prefix)

    def sent(self, key: str, start: int, value: bytes) -> bytes:
        """What arrives of what was read."""
        return value

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.address,))

    def _check_reach(self) -> None:
        if Path(f"{self.address}.offline").exists():
            raise StoreUnavailable(f"cannot answer in '{self.address}': it is cut off")


class Spoiling(FarFolder):
    """Flips one byte of a chunk on its way, the first `times` times."""

    def __init__(self, path: str | Path, offset: int = 0, times: int = 1) -> None:
        super().__init__(path)
        self.offset, self.times = offset, times

    def sent(self, key: str, start: int, value: bytes) -> bytes:
        if not key.startswith("layers/") or not key.endswith(".safetensors") or not self.times:
            return value
        if not start <= self.offset < start + len(value):
            return value
        self.times -= 1
        spoilt = bytearray(value)
        spoilt[self.offset - start] ^= 0x10
        return bytes(spoilt)
