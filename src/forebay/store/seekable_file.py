"""The position of a remote file that is read by ranges."""

import io
import os


class SeekableFile(io.RawIOBase):
    """A file of a known size. A subclass reads from `position` on and moves it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = max(0, base + offset)
        return self.position
