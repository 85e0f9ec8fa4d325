"""What tiers tell: how reading went, and what is in a folder."""

import msgspec


class TierWarning(UserWarning):
    """Something about a tier that changes no row, but costs time."""


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How reading through the tiers went, in this process, since it began to read."""

    l1_hits: int
    l2_hits: int
    misses: int  # made from the source
    l1_values: int
    l1_bytes: int
    l1_evicted: int
    l2_read_bytes: int
    made_bytes: int
    compared: int  # values whose image or sidecar looked different: read again, and decoded only if its bytes changed
    bad: dict[str, int]  # values that were not served, by reason; each was a miss
    failures: dict[str, int]  # samples of which no row can be made, by reason
    written: int = 0  # this and all below: by the writer that all readers of one tier in a process share
    written_bytes: int = 0
    present: int = 0  # another process had written them meanwhile
    dropped: dict[str, int] = {}  # made, but never written, by reason
    lmdb_errors: dict[str, int] = {}  # what LMDB said instead of reading on
    queue_values: int = 0
    queue_bytes: int = 0
    writing_off: str = ""


class RecipeShare(msgspec.Struct, frozen=True, kw_only=True):
    """The values that one recipe made, as one set of libraries decodes."""

    fingerprint: str
    made_with: dict[str, str]
    values: int
    bytes: int


class TierSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a tier."""

    path: str
    values: int
    bytes: int
    tagged: int
    file_bytes: int
    free_bytes: int  # of the file, for values to come
    map_bytes: int
    dead_readers: int  # were found in the table, and let go
    recipes: tuple[RecipeShare, ...]
    unreadable: int  # values whose header says nothing; `forebay tier verify` says more


class BadKept(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is not as it was written."""

    key: str
    reason: str
    detail: str
    sample: str = ""


class TierVerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check of every value of a tier found."""

    path: str
    values: int
    checked_bytes: int
    seconds: float
    bad: tuple[BadKept, ...]

    @property
    def sound(self) -> bool:
        return not self.bad


class TierClearReport(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    removed: int
    freed_bytes: int
    in_use: bool  # by another process: its file keeps its size, and the room in it is used again


class WarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a warming did."""

    path: str
    samples: int
    made: int
    present: int
    failures: dict[str, int]
    examples: dict[str, str]  # the first failure of each reason
    bad: dict[str, int]
    dropped: dict[str, int]
    written_bytes: int
    seconds: float
    left: int = 0  # not tried, as the tier takes no more
    deaths: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every sample that is an image has its row in the tier."""
        return not (self.dropped or self.left)
