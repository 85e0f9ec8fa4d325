"""The reports that verbs return; the command line and the viewer show them as they are."""

from collections.abc import Callable
from typing import Literal

import msgspec

from forebay.records import Record

GONE = "is gone"  # how a source file differs that is not there any more


class Progress(Record, frozen=True, kw_only=True):
    """Progress of a long job."""

    phase: Literal["planning", "building", "repairing", "waiting", "publishing", "verifying", "copying", "warming"]
    done: int
    total: int
    unit: str = "chunks"
    rows: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: int = 0  # samples that could not be made
    tokens: int = 0  # in the chunks made so far, where rows have tokens
    utilization: float | None = None  # the share of their places that hold tokens
    seconds: float = 0.0
    workers: int = 0
    busy: int = 0
    pids: tuple[int, ...] = ()
    note: str = ""
    waiting_for: tuple[str, ...] = ()  # the machines that hold the remaining chunks
    total_bytes: int = 0  # while planning, of all source files, of which `read_bytes` are done; 0: not known
    samples: int = 0  # in the chunks made so far
    raw_bytes: int = 0  # of these chunks before compression, if the recipe counts them
    source_bytes: int = 0  # while building, of all chunks to make, of which `read_bytes` are read
    downloads: bool = False  # whether the source is on another machine
    memory_limit: int | None = None


OnProgress = Callable[[Progress], None]


class BuildReport(Record, frozen=True, kw_only=True):
    """The result of a build."""

    only_in_table = (
        *("samples", "built_statistics", "statistics", "figures", "built_rows", "built_failures"),
        *("built_elsewhere", "layer_reasons", "tokens_per_second"),
    )

    root: str
    layer: str
    chunks: int  # planned, or in the range asked for
    built: int
    present: int  # were there already, or made by another builder meanwhile
    failed: dict[int, str]
    rows: int
    failures: int
    samples: int
    written_bytes: int
    seconds: float
    generation: int | None
    deaths: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    built_statistics: dict[str, int | float] = {}  # sums over the chunks that this build made
    statistics: dict[str, int | float] = {}  # sums over all chunks of the layer
    figures: dict[str, object] = {}  # what the recipe derives from them: shares, ratios
    reasons: dict[str, int] = {}  # why samples failed, in the chunks that this build made
    built_rows: int = 0  # in the chunks that this build made; `rows`, `samples` and `failures` are of the whole layer
    built_failures: int = 0
    adopted: int = 0  # of `present`: files that an interrupted build left, checked and listed
    built_elsewhere: int = 0  # of `present`: listed or held by other builders, meanwhile
    layer_reasons: dict[str, int] = {}  # why samples failed, in all chunks of the layer
    tokens_per_second: float | None = None  # that this build made in its time; None where it made none


class ImportReport(Record, frozen=True, kw_only=True):
    """The result of an import: its rows, and the report of each layer."""

    root: str
    old: str
    rows: int
    layers: dict[str, BuildReport]


class Problem(Record, frozen=True, kw_only=True):
    """One difference from the published state."""

    key: str
    problem: str
    layer: str = ""
    chunk: int = -1
    column: str = ""
    block: int = -1
    start: int = -1
    stop: int = -1


class VerifyReport(Record, frozen=True, kw_only=True):
    """The result of a check of a cache."""

    in_ranges = ("missing",)

    root: str
    generation: int
    cache_id: str
    digest: str  # SHA-256 of the generation: `open_cache` can be held to it
    chunks: int
    checked_bytes: int
    seconds: float
    bad: tuple[Problem, ...]
    missing: dict[str, tuple[int, ...]]  # published, but the file is gone
    gaps: dict[str, int]  # planned, but not published yet
    foreign: tuple[str, ...]
    stale: dict[str, str]
    source_checked: bool
    source_note: str = ""  # why the source, or what of it, was not checked
    source_root: str = ""  # the folder or URL that names of source files are relative to
    reusable: bool = True  # False if `build --reuse` rejects it, because its recipe deduplicates
    sound: bool = True  # every published byte is right and nothing is stale; raw data that is gone makes no cache wrong

    def __post_init__(self) -> None:
        """Set `sound`: a field and not a property, so that JSON has it."""
        wrong = self.bad or self.missing or any(how != GONE for how in self.stale.values())
        msgspec.structs.force_setattr(self, "sound", not wrong)


class RepairReport(Record, frozen=True, kw_only=True):
    """The result of a repair."""

    root: str
    restored: tuple[str, ...]  # the very bytes that were published are back
    replaced: dict[str, str]  # key -> why other bytes had to be published
    failed: dict[str, str]
    generation: int | None
    notes: tuple[str, ...] = ()


class ClaimStatus(Record, frozen=True, kw_only=True):
    layer: str
    chunk: int
    host: str
    pid: int
    state: str  # working or abandoned


class BuilderStatus(Record, frozen=True, kw_only=True):
    """A builder, as of its last heartbeat."""

    layer: str
    host: str
    pid: int
    state: str  # working, or abandoned: known to be dead, or silent for a lease where it is observed for as long
    phase: str = "building"  # or planning, waiting
    done: int = 0  # chunks, or files while planning
    total: int = 0
    built: int  # chunks
    chunks_per_second: float
    eta_seconds: float | None  # until the layer is complete, at the speed of all its builders
    workers: int
    cpu_percent: float
    memory_bytes: int


class FailedSample(Record, frozen=True, kw_only=True):
    layer: str
    chunk: int
    sample: str
    reason: str
    detail: str


class LayerStatus(Record, frozen=True, kw_only=True):
    in_ranges = ("missing", "suspect", "lost", "unlisted")

    layer: str
    kind: str = ""  # of its recipe
    planned: int
    present: int
    listed: int
    missing: tuple[int, ...]  # in the order in which `build` makes them
    suspect: tuple[int, ...]  # size or head is not what was published
    lost: tuple[int, ...]  # published, but the file is gone
    rows: int
    samples: int
    failures: int
    reasons: dict[str, int]
    unlisted: tuple[int, ...] = ()  # present, and not in the newest generation: not published yet, or not sound
    missing_bytes: int | None = None  # estimated from the listed chunks; None: nothing is listed, or nothing is missing
    missing_seconds: float | None = None  # at the pace at which the files that exist were written


class Status(Record, frozen=True, kw_only=True):
    """Progress and health of a cache."""

    root: str
    generation: int | None
    complete: bool
    layers: tuple[LayerStatus, ...]
    claims: tuple[ClaimStatus, ...]
    builders: tuple[BuilderStatus, ...]
    failed_samples: tuple[FailedSample, ...]  # the first few, unless more were asked for
    failed_samples_left_out: int
    source_root: str  # the folder that names of source files are relative to; empty where there is none
    stale: dict[str, str]
    grown: tuple[str, ...]
    source_checked: bool
    new: tuple[str, ...] = ()  # source files that a pattern of the cache names and no chunk is planned from
    source_note: str = ""  # why the source, or what of it, was not checked
    reusable: bool = True  # False if `build --reuse` rejects it, because its recipe deduplicates
    foreign: tuple[str, ...] = ()  # files that are not of this cache, which are left alone

    @property
    def needs_source(self) -> bool:
        """Whether a source file is another, or one that is gone is still to be read."""
        return any(how != GONE or not self.complete for how in self.stale.values())


class MadeWith(Record, frozen=True, kw_only=True):
    """Chunks of a layer that were made with the same versions of libraries."""

    versions: dict[str, str]  # empty where nobody can tell
    count: int
    chunks: tuple[tuple[int, int], ...]  # ranges: the first and the last of each


class LayerSummary(Record, frozen=True, kw_only=True):
    layer: str
    kind: str
    fingerprint: str
    fields: dict[str, object]
    columns: tuple[str, ...]
    chunks: int
    rows: int
    bytes: int
    failures: int
    statistics: dict[str, int | float | list[int]]
    figures: dict[str, object] = {}  # what the recipe's kind derives from the statistics
    made_with: tuple[MadeWith, ...] = ()


class Summary(Record, frozen=True, kw_only=True):
    """The facts about a cache."""

    root: str
    cache_id: str
    base: str
    generation: int
    generations: int
    digest: str  # SHA-256 of the generation: `open_cache` can be held to it
    planned_chunks: int
    rows: int
    bytes: int
    source: dict[str, object]
    source_files: int
    layers: tuple[LayerSummary, ...]
    versions: tuple[dict[str, str], ...]
    tagged: bool
    metadata: dict[str, object] = {}  # the base layer's facts under the names that hand-made caches of its kind use


class Estimate(Record, frozen=True, kw_only=True):
    """The size and time of a build, estimated from a sample."""

    files: int
    source_weight: int
    unit: str
    sampled_weight: int
    chunks: int
    rows: int
    raw_bytes: int
    stored_bytes: int
    seconds: float
    workers: int
    failures: int
    statistics: dict[str, int]  # what the recipe counts, scaled
    free_bytes: int | None
    fits: bool
    failure_reason: str = ""  # the most frequent one
    failure_example: str = ""
    all_failed: bool = False  # every sample that was tried
    notes: tuple[str, ...] = ()


class DryRun(Record, frozen=True, kw_only=True):
    """The work that a build would do; `planned` and `missing` are None if there is no plan."""

    in_ranges = ("missing",)

    root: str
    layer: str
    kind: str
    planned: int | None
    missing: tuple[int, ...] | None
    estimate: Estimate


class RemoteEstimate(Record, frozen=True, kw_only=True):
    """The downloads of training from a remote cache, for the busiest node."""

    root: str
    generation: int
    chunks: int
    bytes: int
    nodes: int
    ranks_per_node: int
    lanes: int
    node_chunks: int
    node_bytes: int  # needed in every epoch: a tier of this size makes later epochs free of downloads
    mixed_bytes: int  # of chunks that are open at a time, and take disk space where the tier does not keep them
    tier_bytes: int | None
    first_epoch_bytes: int
    first_epoch_requests: int
    later_epoch_bytes: int
    later_epoch_requests: int
    hit_rate: float  # in later epochs
    bandwidth: float  # bytes per second
    latency: float  # seconds
    batch_size: int
    first_batch_chunks: int
    first_batch_bytes: int
    first_batch_seconds: float
    first_epoch_seconds: float  # of downloads
    later_epoch_seconds: float


class TierFill(Record, frozen=True, kw_only=True):
    """The result of filling a tier for a cache."""

    root: str
    tier: str
    chunks: int
    bytes: int
    fetched_chunks: int
    fetched_bytes: int
    refused_chunks: int  # the tier or its disk is full
    seconds: float


class TierShare(Record, frozen=True, kw_only=True):
    """What a tier keeps of one cache."""

    address: str  # empty if unknown
    chunks: int
    bytes: int


class TierContents(Record, frozen=True, kw_only=True):
    """The caches that a tier keeps chunks of."""

    path: str
    bytes: int
    caches: tuple[TierShare, ...]


class TierClean(Record, frozen=True, kw_only=True):
    """The files removed from a tier."""

    path: str
    caches: tuple[str, ...]  # their addresses
    freed_bytes: int


class CleanReport(Record, frozen=True, kw_only=True):
    """The files removed by `clean`."""

    root: str
    temporary: tuple[str, ...]
    claims: tuple[str, ...]
    superseded: tuple[str, ...]
    generations: tuple[int, ...]
    freed_bytes: int
    kept_generations: int = 0  # before the newest
    kept_bytes: int = 0  # of chunks that only these list
    withdrawn: tuple[int, ...] = ()  # segments of the plan that were given up


class DropReport(Record, frozen=True, kw_only=True):
    """The result of dropping layers; `clean` with `keep_generations` frees their files."""

    root: str
    layers: tuple[str, ...]
    chunks: int
    bytes: int
    generation: int | None


class CopyReport(Record, frozen=True, kw_only=True):
    root: str
    destination: str
    copied: int
    present: int
    copied_bytes: int
    generation: int
    seconds: float
