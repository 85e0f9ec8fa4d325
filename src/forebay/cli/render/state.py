"""Draw the state of caches, tiers and teacher layers: what `status`, `gaps`, `tier` and `info` print.

caches/raw · generation 3 · unfinished
raw  ██████████████████████░░░░░░██████████  30 of 34 chunks · 1,762 rows

`draw_summary` draws a cache as a tree: source, layers, counts, figures, short fingerprints.

documents    3,649, 2,197 of them split
tokens       4,950,877 stored of 4,950,877
padding      0.67 %
rows by use  ····▁···▁▁▁▁▁▁▁▁▁▁▁▁█  90.1 % full

images   5,000, 4,712 of them scaled down; width / height 1.25 on average
padding  29.9 % of the canvas, not stored
tags     3.4 per image, of 120; 17 not in the vocabulary
stored   421.9 kB per image: 0.18 × a float32 canvas, 3.59 × the source
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from forebay.cache.records import (
    GONE,
    BuilderStatus,
    ClaimStatus,
    Gaps,
    LayerStatus,
    LayerSummary,
    MadeWith,
    PlannerStatus,
    RemoteEstimate,
    Status,
    Summary,
    TierClean,
    TierContents,
    TierFill,
)
from forebay.kinds import WRONG
from forebay.preview.console import (
    BUILD_ANEW,
    beginning,
    facts,
    listing,
    next_command,
    repair_command,
    source_allowed,
    stale_files,
    title,
)
from forebay.preview.words import command_line, counted, human_bytes, human_time, in_ranges, printable
from forebay.store.base import is_url
from forebay.teachers import Alignment, LayerAlignment, TeacherEstimate
from forebay.tiers.tier_value import RecipeShare, TierClearReport, TierSummary, TierVerifyReport, WarmReport

CELLS, LEAST_CELLS = 40, 5
NAMED_FILES = 5  # in the suggested command; the next `status` names the others


def draw_status(status: Status) -> RenderableType:
    published = "nothing published yet" if status.generation is None else f"generation {status.generation}"
    parts: list[RenderableType] = [title(status.root, published, "complete" if status.complete else "unfinished")]
    for layer in status.layers:
        at_work = any(one.layer == layer.layer and one.state == "working" for one in status.builders)
        parts += [_LayerLine(layer), facts(_layer_facts(layer, at_work))]
    parts += listing("planning", map(_planner, status.planners))
    parts += _builders(status.builders)
    parts += listing("claims", _claim_rows(status.claims))
    parts += _failed(status)
    parts += stale_files(status.stale)
    parts += listing("unreadable source files, skipped", status.unreadable.items(), "yellow")
    parts += listing("sources that grew", ((path,) for path in status.grown))
    parts += beginning("new source files, not in the cache", [(path,) for path in status.new], "")
    parts += listing("foreign files, left alone", ((key,) for key in status.foreign), "yellow")
    if status.source_note:
        parts.append(Text(f"note: {printable(status.source_note)}", style="yellow"))
    return Group(*parts, *_next_step(status))


def draw_gaps(gaps: Gaps) -> RenderableType:
    counts = f"{gaps.present:,} of {counted(gaps.planned, 'chunk')} present"
    if not (gaps.missing or gaps.unlisted):
        return title(gaps.root, f"layer {gaps.layer}", counts, "no gaps")
    return Group(
        title(gaps.root, f"layer {gaps.layer}", counts),
        facts([("missing", _chunks(gaps.missing)), ("unlisted", _chunks(gaps.unlisted))]),
        next_command(fill_command(gaps)),
    )


def fill_command(gaps: Gaps) -> str:
    """The command that builds missing chunks with the cache's own source and recipe."""
    if gaps.kind == "teacher":
        return command_line("build", "teachers", gaps.root)
    return command_line("build", gaps.root, "--layer", gaps.layer)


def presence(planned: int, missing: Collection[int], suspect: Collection[int], cells: int = CELLS) -> Text:
    """Chunks as a row of cells: present, partly present, missing, suspect."""
    gone, bad = set(missing), set(suspect)
    width = min(cells, planned)
    picture = Text()
    for cell in range(width):
        members = range(cell * planned // width, (cell + 1) * planned // width)
        picture.append(*_cell(members, gone, bad))
    return picture


def _cell(members: range, gone: set[int], bad: set[int]) -> tuple[str, str]:
    if any(chunk in bad for chunk in members):
        return "!", "bold red"
    absent = sum(chunk in gone for chunk in members)
    if absent == 0:
        return "█", "green"
    return ("░", "dim") if absent == len(members) else ("▒", "yellow")


@dataclass(frozen=True, slots=True)
class _LayerLine:
    """The name, the picture and the counts of a layer; the picture shrinks where the line would be too long."""

    layer: LayerStatus

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        layer = self.layer
        counts = f"{layer.present:,} of {counted(layer.planned, 'chunk')} · {counted(layer.rows, 'row')}"
        room = options.max_width - len(layer.layer) - len(counts) - 4
        picture = presence(layer.planned, layer.missing, layer.suspect, max(LEAST_CELLS, min(CELLS, room)))
        yield Text.assemble((layer.layer, "bold"), "  ", picture, f"  {counts}")


def _chunks(numbers: Collection[int]) -> str:
    """The count of chunks, then their numbers: a number alone could be either."""
    return f"{counted(len(numbers), 'chunk')}: {in_ranges(numbers)}" if numbers else ""


def _layer_facts(layer: LayerStatus, at_work: bool) -> Iterator[tuple[str, str | Text]]:
    yield "missing", _chunks(layer.missing)
    if layer.lost:
        yield "lost", Text(f"{_chunks(layer.lost)} (published, but the file is missing)", style="bold red")
    yield "suspect", Text(_chunks(layer.suspect), style="bold red")
    if layer.unlisted:
        who = "the builders at work publish them" if at_work else "`build` checks and publishes them"
        yield "unlisted", f"{_chunks(layer.unlisted)} (not published yet: {who})"
    if layer.failures:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in layer.reasons.items())
        yield "failed", f"{layer.failures:,} of {counted(layer.samples, 'sample')}: {reasons}"


def _builders(builders: Collection[BuilderStatus]) -> list[RenderableType]:
    """Two lines for each builder, which fit a terminal of 80 columns."""
    lines = [Text(line) for who, how in map(_builder, builders) for line in (f"  {who}", f"    {how}")]
    return [Text("builders"), *lines] if lines else []


def _builder(one: BuilderStatus) -> tuple[str, str]:
    """
    >>> from forebay.cache.records import BuilderStatus as B
    >>> _builder(B(layer="raw", host="node3", pid=7, state="working", made=412, chunks_per_second=0.5,
    ...            eta_seconds=90.0, workers=8, cpu_percent=790.0, memory_bytes=2_000_000_000))
    ('node3, process 7 · raw · working', '412 chunks · 30 chunks/min · CPU 790 % · 2.0 GB · ETA 1 min 30 s')
    """
    speed = one.chunks_per_second
    rate = f"{speed:,.1f} chunks/s" if speed >= 1 else f"{60 * speed:,.3g} chunks/min"
    use = f"CPU {one.cpu_percent:.0f} %", human_bytes(one.memory_bytes)
    eta = [f"ETA {human_time(one.eta_seconds)}"] if one.eta_seconds is not None else []
    head = printable(f"{one.host}, process {one.pid} · {one.layer} · {one.state}")
    return head, " · ".join([counted(one.made, "chunk"), rate, *use, *eta])


def _planner(one: PlannerStatus) -> tuple[str, ...]:
    """
    >>> from forebay.cache.records import PlannerStatus as P
    >>> _planner(P(host="node3", pid=7, state="working", files=3, total_files=12, bytes=200_000_000,
    ...            total_bytes=800_000_000, seconds=30.0, eta_seconds=90.0))
    ('node3, process 7 · working for 30 s', '3 of 12 files · 200.0 MB of 800.0 MB · ETA 1 min 30 s')
    """
    size = [f"{human_bytes(one.bytes)} of {human_bytes(one.total_bytes)}"] if one.total_bytes else []
    is_alive = one.state == "working"
    eta = [f"ETA {human_time(one.eta_seconds)}"] if one.eta_seconds is not None and is_alive else []
    since = f"{one.state} {'for' if is_alive else 'after'} {human_time(one.seconds)}"
    return f"{one.host}, process {one.pid} · {since}", " · ".join(
        [f"{one.files:,} of {counted(one.total_files, 'file')}", *size, *eta]
    )


def _claim_rows(claims: Iterable[ClaimStatus]) -> Iterator[tuple[str, ...]]:
    """The owners of claims, each with its chunks, and below them why they failed."""
    chunks: dict[tuple[str, str, str, str], list[int]] = {}
    for one in claims:
        alike = (one.layer, one.state, f"{one.host}, process {one.pid}", one.reason)
        chunks.setdefault(alike, []).append(one.chunk)
    for (layer, state, owner, reason), numbers in chunks.items():
        yield f"{layer} chunk{'s' if len(numbers) > 1 else ''} {in_ranges(sorted(numbers))}", state, owner
        if reason:
            yield "", "", reason


def _failed(status: Status) -> list[RenderableType]:
    rows = [(one.sample, one.reason, one.detail, f"{one.layer} chunk {one.chunk}") for one in status.failed_samples]
    more = status.failed_samples_left_out
    if not more:
        return listing("failed samples", rows)
    every = command_line("status", status.root, "--failures", "all")
    left_out = f"… and {more:,} more" if rows else "which samples"
    return [*listing("the first failed samples", rows), Text.assemble(f"  {left_out}: ", (every, "cyan"))]


def _next_step(status: Status) -> Iterator[Text]:
    if any(layer.suspect for layer in status.layers):
        yield next_command(command_line("verify", status.root))
    elif any(layer.lost for layer in status.layers):
        yield repair_command(status.root, status.source_root, GONE in status.stale.values(), status.refreshable)
    elif not status.refreshable and (status.needs_source or any(how != GONE for how in status.stale.values())):
        yield BUILD_ANEW
    elif any(how != GONE for how in status.stale.values()):
        yield next_command(command_line("refresh", status.root, *source_allowed(status.source_root)))
    elif status.needs_source:
        without = command_line("refresh", status.root, "--drop-missing", *source_allowed(status.source_root))
        yield Text.assemble("next: restore the old files, or drop their samples: ", (without, "cyan"))
    elif not status.complete and status.layers:
        yield next_command(command_line("gaps", status.root))
    elif any(one.state == "abandoned" for one in status.planners):
        yield Text("next: run the build again, which continues with what the planner has found")
    elif (status.grown or status.new) and status.source_root:
        added = (_source_path(status.source_root, path) for path in (*status.grown, *status.new))
        yield next_command(command_line("grow", status.root, *islice(added, NAMED_FILES)))


def _source_path(root: str, path: str) -> str:
    return f"{root}/{path}" if is_url(root) else os.path.normpath(os.path.join(root, path))


SHORT = 12
_SHOWN_BAD = 20


def draw_tier(summary: TierSummary) -> RenderableType:
    parts: list[RenderableType] = [title(summary.path, counted(summary.values, "value"), human_bytes(summary.bytes))]
    parts.append(
        facts(
            [
                ("file", f"{human_bytes(summary.file_bytes)}, of which {human_bytes(summary.free_bytes)} are free"),
                ("tagged", counted(summary.tagged, "value") if summary.tagged else ""),
                ("readers", f"{summary.dead_readers:,} dead, released" if summary.dead_readers else ""),
                ("unreadable", counted(summary.unreadable, "value") if summary.unreadable else ""),
            ]
        )
    )
    parts += listing("recipes", map(_recipe_row, summary.recipes))
    return Group(*parts, next_command(command_line("tier", "verify", summary.path)))


def draw_tier_verify(report: TierVerifyReport) -> RenderableType:
    verdict = ("sound", "bold green") if report.sound else ("not sound", "bold red")
    speed = human_bytes(report.checked_bytes / max(report.seconds, 1e-3))
    checked = f"{counted(report.values, 'value')}, {human_bytes(report.checked_bytes)} at {speed}/s"
    parts: list[RenderableType] = [Text.assemble(title(report.path, checked, ""), " · ", verdict)]
    parts += listing("bad", ((bad.key, bad.reason, bad.detail) for bad in report.bad[:_SHOWN_BAD]), "bold red")
    if report.bad:
        more = f"{len(report.bad) - _SHOWN_BAD:,} more; " if len(report.bad) > _SHOWN_BAD else ""
        parts.append(Text(f"{more}bad values are never served; they are rebuilt when next read"))
    return Group(*parts)


def draw_tier_clear(report: TierClearReport) -> RenderableType:
    removed = f"{counted(report.removed, 'value')} removed"
    room = (
        f"{human_bytes(report.freed_bytes)} freed"
        if report.freed_bytes
        else f"the file keeps its size{': another process has it open' if report.in_use else ''}"
    )
    return title(report.path, removed, room)


def draw_warm(report: WarmReport) -> RenderableType:
    rate = report.samples / max(report.seconds, 1e-3)
    parts: list[RenderableType] = [title(report.path, counted(report.samples, "sample"), f"{rate:,.0f} samples/s")]
    parts.append(
        facts(
            [
                ("rows", f"{report.made:,} built, {report.present:,} already present"),
                ("written", f"{human_bytes(report.written_bytes)} in {human_time(report.seconds)}"),
                ("left", f"{counted(report.left, 'sample')}: the tier is full" if report.left else ""),
            ]
        )
    )
    reasons = sorted(report.failures.items())
    parts += listing(
        "no image", ((why, f"{count:,}", report.examples.get(why, "")) for why, count in reasons), "yellow"
    )
    parts += listing("not written", ((why, f"{count:,}") for why, count in report.dropped.items()), "bold red")
    parts += listing("bad values, rebuilt", ((why, f"{count:,}") for why, count in report.bad.items()), "yellow")
    parts += listing("workers lost", ((death,) for death in report.deaths), "yellow")
    return Group(*parts, next_command(command_line("tier", "stats", report.path)))


def _recipe_row(share: RecipeShare) -> tuple[str, ...]:
    libraries = ", ".join(f"{name} {version}" for name, version in share.made_with.items())
    return share.fingerprint[:SHORT], counted(share.values, "value"), human_bytes(share.bytes), libraries


def draw_teacher_estimate(estimate: TeacherEstimate) -> RenderableType:
    rows = (
        (size.column, f"{size.dtype} {list(size.shape)}", human_bytes(size.row_bytes), human_bytes(size.bytes))
        for size in estimate.columns
    )
    total = f"{human_bytes(estimate.row_bytes)} per row, {human_bytes(estimate.bytes)} in total"
    free = "" if estimate.free_bytes is None else human_bytes(estimate.free_bytes)
    head = title(counted(estimate.rows, "row"), total)
    notes = listing("notes", ((note,) for note in estimate.notes))
    return Group(head, *listing("column, row, bytes per row, total", rows), facts([("free", free)]), *notes)


def draw_alignment(found: Alignment) -> RenderableType:
    verdict = ("aligned", "bold green") if found.aligned else ("not aligned", "bold red")
    head = Text.assemble(title(found.root, counted(len(found.layers), "layer") + " of teachers"), " · ", verdict)
    off = listing("not as expected", ((one,) for one in found.unmet), "red")
    return Group(head, *map(_layer, found.layers), *off, next_command(command_line("peek", found.root)))


def _layer(found: LayerAlignment) -> RenderableType:
    grid = f"{len(found.buckets)} buckets, {found.buckets[0]:g} to {found.buckets[-1]:g}" if found.buckets else "none"
    usual = "" if found.usual_buckets or not found.buckets else " (not the default ten)"
    parts: list[RenderableType] = [
        facts(
            [
                (f"layer {found.layer}", found.teacher),
                ("rows", f"{found.checked_rows:,} checked, {found.recomputed_rows:,} recomputed"),
                ("timesteps", f"{grid}{usual}"),
                *((name, f"{list(shape)}") for name, shape in found.columns.items()),
                *((f"range of {name}", f"{low:.4g} to {high:.4g}") for name, (low, high) in found.ranges.items()),
            ]
        )
    ]
    parts += listing("between buckets", ((str(one),) for one in found.interpolation))
    parts += listing("problems", ((problem,) for problem in found.problems), "bold red")
    parts += listing("notes", ((note,) for note in found.notes), "yellow")
    return Group(*parts)


def draw_remote_estimate(found: RemoteEstimate) -> RenderableType:
    nodes = counted(found.nodes, "node")
    if found.ranks_per_node > 1:
        nodes += f" with {found.ranks_per_node} ranks each"
    tier = "none: everything is kept" if found.tier_bytes is None else human_bytes(found.tier_bytes)
    first = f"{human_bytes(found.first_epoch_bytes)} in {counted(found.first_epoch_requests, 'request')}"
    later = f"{human_bytes(found.later_epoch_bytes)} in {counted(found.later_epoch_requests, 'request')}"
    shown = facts(
        [
            ("a node needs", f"{counted(found.node_chunks, 'chunk')}, {human_bytes(found.node_bytes)}, in every epoch"),
            ("limit of the tier", tier),
            ("first epoch", f"{first}, {human_time(found.first_epoch_seconds)} of downloads"),
            (
                "later epochs",
                f"{later}, {human_time(found.later_epoch_seconds)} of downloads; tier hit rate {found.hit_rate:.0%}",
            ),
            ("smallest tier", f"{human_bytes(found.node_bytes)} make later epochs free of downloads"),
            ("beside the tier", f"{human_bytes(found.mixed_bytes)} for chunks that pass through, if it is smaller"),
            (
                "first batch",
                f"{human_time(found.first_batch_seconds)}: {counted(found.first_batch_chunks, 'chunk')}, "
                f"{human_bytes(found.first_batch_bytes)}, for {found.batch_size:,} rows of all ranks",
            ),
        ]
    )
    whole = f"{counted(found.chunks, 'chunk')}, {human_bytes(found.bytes)}"
    return Group(title(found.root, whole, nodes, f"{human_bytes(found.bandwidth)}/s"), shown)


def draw_tier_fill(fill: TierFill) -> RenderableType:
    rate = f"{human_bytes(fill.fetched_bytes / max(fill.seconds, 1e-3))}/s"
    fetched = f"{counted(fill.fetched_chunks, 'chunk')}, {human_bytes(fill.fetched_bytes)} at {rate}"
    there = fill.chunks - fill.fetched_chunks - fill.refused_chunks
    shown = facts(
        [
            ("tier", fill.tier),
            ("fetched", fetched if fill.fetched_chunks else "nothing"),
            ("there before", counted(there, "chunk") if there > 0 else ""),
            ("not kept", f"{counted(fill.refused_chunks, 'chunk')}: the tier is full" if fill.refused_chunks else ""),
        ]
    )
    return Group(title(fill.root, counted(fill.chunks, "chunk"), human_bytes(fill.bytes)), shown)


def draw_tier_contents(contents: TierContents) -> RenderableType:
    rows = (
        (one.cache_id, counted(one.chunks, "chunk"), human_bytes(one.bytes), ", ".join(one.addresses))
        for one in contents.caches
    )
    parts = [title(contents.path, counted(len(contents.caches), "cache"), human_bytes(contents.bytes))]
    return Group(*parts, *listing("caches", rows))


def draw_tier_clean(report: TierClean) -> RenderableType:
    return title(
        report.path, f"{counted(len(report.caches), 'cache')} removed", f"{human_bytes(report.freed_bytes)} freed"
    )


_HEIGHTS = "▁▂▃▄▅▆▇█"
_NOTHING = "·"


def draw_token_figures(layer: LayerSummary) -> RenderableType:
    return facts(_token_figures(layer.statistics, layer.figures) if layer.chunks else ())


def _token_figures(counts: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "documents", _documents(counts)
    yield "tokens", _tokens(counts, figures)
    yield "padding", f"{100 * figures['padding_share']:.3f} %"
    yield "duplicates", f"{counts['duplicates']:,} left out" if counts.get("duplicates") else ""
    yield (
        "stored",
        (
            f"{figures['bytes_per_token']:.3f} bytes ({figures['bits_per_token']:.2f} bits) per token, "
            f"compression ratio {figures['compression_ratio']:.2f}"
        ),
    )
    yield (
        "text",
        (
            f"{figures['characters_per_token']:.2f} characters per token, "
            f"{figures['tokens_per_document']:,.0f} tokens per document"
        ),
    )
    yield "rows by use", _use(counts["rows_by_use"])


def draw_chat_figures(layer: LayerSummary) -> RenderableType:
    return facts(_chat_figures(layer.statistics, layer.figures) if layer.chunks else ())


def _chat_figures(counts: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    turns = f"{figures['turns_per_conversation']:.1f} assistant turns each"
    yield "conversations", f"{counts['conversations']:,}, {turns}"
    yield "long ones", f"{counts['documents_cut']:,} truncated, {counts['documents_dropped']:,} dropped"
    yield "generated", f"{100 * figures['generated_share']:.1f} % of the tokens"
    yield "by kind", _shares(figures["tokens_by_kind"], counts["tokens"])
    yield "by role", _shares(figures["tokens_by_role"], counts["tokens"])
    yield "across borders", f"{counts['tokens_straddling']:,} tokens" if counts["tokens_straddling"] else ""
    yield from (each for each in _token_figures(counts, figures) if each[0] != "documents")


def draw_preference_figures(layer: LayerSummary) -> RenderableType:
    return facts(_preference_figures(layer.statistics, layer.figures) if layer.chunks else ())


def _preference_figures(counts: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "prompts", f"{counts['pairs']:,}, {figures['tokens_per_prompt']:,.1f} tokens each"
    candidates = (
        f"{figures['candidates_per_prompt']:.1f} per prompt, {figures['tokens_per_candidate']:,.1f} tokens each"
    )
    yield "candidates", f"{counts['candidates']:,}, {candidates}"
    yield "by kind", _shares(figures["tokens_by_kind"], counts["tokens"])
    yield "by role", _shares(figures["tokens_by_role"], counts["tokens"])
    yield "stored", f"{figures['bytes_per_token']:.3f} bytes per token"


def _shares(counts: Mapping[str, int], total: int) -> str:
    """
    >>> _shares({"prompt": 300, "response": 100, "stop": 0}, 400)
    'prompt 300 (75.0 %), response 100 (25.0 %)'
    """
    return ", ".join(
        f"{name} {count:,} ({count / max(1, total):.1%})".replace("%", " %") for name, count in counts.items() if count
    )


def _documents(counts: Mapping[str, Any]) -> str:
    """
    >>> _documents({"documents": 1200, "documents_split": 30, "documents_cut": 0, "documents_dropped": 7})
    '1,200, 30 of them split, 7 more dropped'
    """
    words = {
        "of them split": counts["documents_split"],
        "of them cut off": counts["documents_cut"],
        "more dropped": counts.get("documents_dropped", 0),
    }
    return ", ".join([f"{counts['documents']:,}", *(f"{count:,} {word}" for word, count in words.items() if count)])


def _tokens(counts: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    dropped = counts["tokens_dropped"]
    lost = f"{dropped:,} dropped ({100 * figures['tokens_dropped_share']:.2f} %)" if dropped else "none dropped"
    return f"{counts['tokens_in']:,} in, {counts['tokens']:,} stored, {lost}"


def _use(rows: Sequence[int]) -> str:
    full = rows[-1] / max(1, sum(rows))
    return f"{small_bars(rows)}  empty to full; {100 * full:.1f} % of rows are full"


def small_bars(counts: Sequence[int]) -> str:
    """A histogram on one line; a count above 0 is always visible.

    >>> small_bars([0, 1, 50, 100])
    '·▁▄█'
    """
    highest = max(counts, default=0)
    return "".join(_HEIGHTS[-(-count * 8 // highest) - 1] if count else _NOTHING for count in counts)


def draw_image_figures(layer: LayerSummary) -> RenderableType:
    return facts(_image_figures(layer.fields, layer.statistics, layer.figures) if layer.rows else ())


def _image_figures(
    fields: Mapping[str, Any], counts: Mapping[str, Any], figures: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    aspect = f"width / height {figures['mean_aspect']:.2f} on average"
    yield "images", f"{counts['images']:,}, {counts['scaled_down']:,} of them scaled down; {aspect}"
    yield "padding", f"{100 * figures['padding_share']:.1f} % of the canvas, not stored"
    yield "tags", _tags(len(fields["tags"] or ()), counts["unknown_tags"], figures["tags_per_image"])
    yield "stored", _stored(figures)


def _tags(vocabulary: int, unknown: int, per_image: float) -> str:
    """
    >>> _tags(120, 17, 3.41), _tags(0, 0, 0.0)
    ('3.4 per image, of 120; 17 not in the vocabulary', 'none')
    """
    if not vocabulary and not unknown:
        return "none"
    foreign = f"; {unknown:,} not in the vocabulary" if unknown else ""
    return f"{per_image:.1f} per image, of {vocabulary:,}{foreign}"


def _stored(figures: Mapping[str, Any]) -> str:
    shares = (
        f"{figures['share_of_float32']:.2f} × a float32 canvas, {figures['share_of_source_bytes']:.2f} × the source"
    )
    return f"{human_bytes(figures['bytes_per_image'])} per image: {shares}"


# Kinds with a drawing of their figures.
FIGURES: dict[str, Callable[[LayerSummary], RenderableType]] = {
    "chat": draw_chat_figures,
    "preferences": draw_preference_figures,
    "images": draw_image_figures,
    "tokens": draw_token_figures,
}
SHOWN_RANGES = 20  # of chunks; `--json` has all
SHOWN_CHARS = 200  # of a field: a vocabulary of tags is long


def draw_summary(summary: Summary) -> RenderableType:
    tree = Tree(title(summary.root, f"{counted(summary.rows, 'row')}", human_bytes(summary.bytes)), guide_style="dim")
    tree.add(_named("id", summary.cache_id))
    tree.add(_named("source", f"{counted(summary.source_files, 'file')}, {_values(summary.source)}"))
    tree.add(_named("plan", counted(summary.planned_chunks, "chunk")))
    for layer in summary.layers:
        _add_layer(tree, layer, is_base=layer.layer == summary.base)
    tagged = ", tagged with a key" if summary.tagged else ""
    tree.add(_named("generation", f"{summary.generation}, {summary.generations:,} kept{tagged}"))
    tree.add(_named("digest", summary.digest))
    for versions in summary.versions:
        tree.add(_named("built with", _values(versions) + _made_chunks(summary, versions)))
    if unknown := _made_chunks(summary, {}):
        tree.add(_named("built with", f"not recorded{unknown}"))
    return tree


def _made_chunks(summary: Summary, versions: Mapping[str, str]) -> str:
    """The chunks that were made with some versions of libraries; nothing if all were made with the same."""
    made = [(layer.layer, one) for layer in summary.layers for one in layer.made_with]
    shown = "; ".join(f"{name} {_shown_ranges(one)}" for name, one in made if one.versions == versions)
    is_same = bool(versions) and all(one.versions == versions for _, one in made)
    return f": chunks of {shown}" if shown and not is_same else ""


def _shown_ranges(made: MadeWith) -> str:
    """
    >>> _shown_ranges(MadeWith(versions={}, count=4, chunks=((0, 2), (7, 7))))
    '0–2, 7'
    """
    shown = ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in made.chunks[:SHOWN_RANGES])
    return f"{shown} and more, {made.count:,} in all" if len(made.chunks) > SHOWN_RANGES else shown


def _add_layer(tree: Tree, layer: LayerSummary, is_base: bool) -> None:
    branch = tree.add(_named("layer", f"{layer.layer} (base)" if is_base else layer.layer))
    recipe = branch.add(_named("recipe", f"{layer.kind} {layer.fingerprint[:SHORT]}"))
    for name, value in layer.fields.items():
        recipe.add(_named(name, _field(value)))
    columns = branch.add(Text("columns"))
    for column in layer.columns:
        columns.add(Text(printable(column)))
    failed = f", {counted(layer.failures, 'sample')} failed" if layer.failures else ""
    counts = f"{counted(layer.chunks, 'chunk')}, {counted(layer.rows, 'row')}, {human_bytes(layer.bytes)}{failed}"
    branch.add(_named("holds", counts))
    figures = _figures(layer)
    if figures is not None:
        branch.add(Group(Text("figures"), figures))
    elif layer.statistics:
        branch.add(_named("statistics", _values({**layer.statistics, **layer.figures})))


def _figures(layer: LayerSummary) -> RenderableType | None:
    """The drawn figures of a layer; None if there is no drawing, or an untrusted cache has wrong statistics."""
    try:
        return FIGURES[layer.kind](layer) if layer.kind in FIGURES else None
    except WRONG:
        return None


def _field(value: object) -> str:
    text = _text(value)
    if len(text) <= SHOWN_CHARS:
        return text
    count = f", {len(value):,} in total" if isinstance(value, list) else ""
    return f"{text[:SHOWN_CHARS]}…{count}"


def _named(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), printable(value))


def _values(pairs: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in pairs.items() if value not in ([], ""))


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _text(value: object) -> str:
    """A value as a settings file has it; a string that is empty or contains blanks is quoted.

    >>> _text(None), _text(False), _text("a b"), _text("zstd")
    ('none', 'false', "'a b'", 'zstd')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and value.split() != [value] else str(value)
