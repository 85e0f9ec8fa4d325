"""Finding a batch that memory holds, before the first chunk: the size asked for, or half of it, or half of that."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from forebay.errors import MemoryTooSmall

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


def fit_batch(asked: int, limit_bytes: int | None, attempt: Callable[[int], object]) -> int:
    """The largest of `asked`, `asked / 2`, … that `attempt` runs without running out of memory.

    With a limit, the most that this process holds meanwhile, where that can be told, is kept below it. On a device with
    memory of its own, running out of that is what halves a batch.
    """
    size = asked
    while True:
        try:
            peak = _peak_of(attempt, size)
            if limit_bytes is None or peak <= limit_bytes:
                return size
            if size == 1:
                raise MemoryTooSmall(limit_bytes, peak)
        except Exception as error:
            if size == 1 or not is_out_of_memory(error):
                raise
        size //= 2


def _peak_of(attempt: Callable[[int], object], size: int) -> int:
    """The most memory held during a try."""
    with suppress(OSError):  # where the peak cannot be forgotten, it is that of the whole process
        _CLEAR.write_text(_FORGET_PEAK)
    attempt(size)
    return peak_bytes()


def is_out_of_memory(error: Exception) -> bool:
    """Devices say it in types of their own, which all name it."""
    own = error.__cause__ or error
    named = f"{type(own).__name__}: {own}".lower()
    return isinstance(own, MemoryError) or "out of memory" in named or "can't allocate memory" in named


def peak_bytes() -> int:
    """The most memory this process has held since it was last forgotten; 0 where the system does not tell."""
    if not _STATUS.exists():
        return 0
    return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) * 1024
