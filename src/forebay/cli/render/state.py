"""Draw the state of caches, tiers and teacher layers for `status` and `tier`.

caches/raw · generation 3 · unfinished
raw  ██████████████████████░░░░░░██████████  30 of 34 chunks · 1,762 rows

"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from forebay.cache.reports import GONE, BuilderStatus, ClaimStatus, LayerStatus, Status
from forebay.cli.render.drawing import draw
from forebay.preview.console import (
    beginning,
    facts,
    listing,
    next_command,
    repair_command,
    reuse_command,
    stale_files,
    title,
)
from forebay.preview.words import command_line, counted, human_bytes, human_time, in_ranges, printable
from forebay.store.base import is_url
from forebay.teachers import Alignment, LayerAlignment

CELLS, LEAST_CELLS = 40, 5
NAMED_FILES = 5  # in the suggested command; the next `status` names the others


@draw.register
def draw_status(status: Status) -> RenderableType:
    published = "nothing published yet" if status.generation is None else f"generation {status.generation}"
    is_damaged = any(layer.suspect or layer.lost for layer in status.layers)
    state = "damaged" if is_damaged else "complete" if status.complete else "unfinished"
    parts: list[RenderableType] = [title(status.root, published, state)]
    for layer in status.layers:
        at_work = any(one.layer == layer.layer and one.state == "working" for one in status.builders)
        parts += [_LayerLine(layer), facts(_layer_facts(layer, at_work))]
    parts += _builders(status.builders)
    parts += listing("claims", _claim_rows(status.claims))
    parts += _failed(status)
    parts += stale_files(status.stale)
    parts += listing("sources that grew", ((path,) for path in status.grown))
    parts += beginning("new source files, not in the cache", [(path,) for path in status.new], "")
    parts += listing("foreign files, left alone", ((key,) for key in status.foreign), "yellow")
    if status.source_note:
        parts.append(Text(f"note: {printable(status.source_note)}", style="yellow"))
    return Group(*parts, *_next_step(status))


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
    yield "to build", _gap_estimate(layer) if layer.missing else ""
    if layer.lost:
        yield "lost", Text(f"{_chunks(layer.lost)} (published, but the file is missing)", style="bold red")
    yield "suspect", Text(_chunks(layer.suspect), style="bold red")
    if layer.unlisted:
        who = "running builders publish them" if at_work else "`build` checks and publishes them"
        yield "unlisted", f"{_chunks(layer.unlisted)} (not published yet: {who})"
    if layer.failures:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in layer.reasons.items())
        yield "failed", f"{layer.failures:,} of {counted(layer.samples, 'sample')}: {reasons}"


def _gap_estimate(layer: LayerStatus) -> str:
    """The order in which missing chunks are built, and what they need at the size and pace of those that exist."""
    needs = [human_bytes(layer.missing_bytes)] if layer.missing_bytes is not None else []
    needs += [f"{human_time(layer.missing_seconds)}"] if layer.missing_seconds is not None else []
    needed = f"about {' and '.join(needs)}, " if needs else ""
    return f"{needed}in this order (--mode inverse: from the last)"


def _builders(builders: Collection[BuilderStatus]) -> list[RenderableType]:
    """Two lines for each builder, which fit a terminal of 80 columns."""
    lines = [Text(line) for who, how in map(_builder, builders) for line in (f"  {who}", f"    {how}")]
    return [Text("builders"), *lines] if lines else []


def _builder(one: BuilderStatus) -> tuple[str, str]:
    """
    >>> from forebay.cache.reports import BuilderStatus as B
    >>> _builder(B(layer="raw", host="node3", pid=7, state="working", built=412, chunks_per_second=0.5,
    ...            eta_seconds=90.0, workers=8, cpu_percent=790.0, memory_bytes=2_000_000_000))
    ('node3, process 7 · raw · working', '412 chunks · 30 chunks/min · CPU 790% · 2.0 GB · ETA 1 min 30 s')
    """
    speed = one.chunks_per_second
    rate = f"{speed:,.1f} chunks/s" if speed >= 1 else f"{60 * speed:,.3g} chunks/min"
    use = f"CPU {one.cpu_percent:.0f}%", human_bytes(one.memory_bytes)
    eta = [f"ETA {human_time(one.eta_seconds)}"] if one.eta_seconds is not None else []
    head = printable(f"{one.host}, process {one.pid} · {one.layer or one.phase} · {one.state}")
    if one.phase == "planning":
        return head, f"{one.done:,} of {counted(one.total, 'file')}"
    return head, " · ".join([counted(one.built, "chunk"), rate, *use, *eta])


def _claim_rows(claims: Iterable[ClaimStatus]) -> Iterator[tuple[str, ...]]:
    """The owners of claims, each with its chunks."""
    chunks: dict[tuple[str, str, str], list[int]] = {}
    for one in claims:
        chunks.setdefault((one.layer, one.state, f"{one.host}, process {one.pid}"), []).append(one.chunk)
    for (layer, state, owner), numbers in chunks.items():
        yield f"{layer} chunk{'s' if len(numbers) > 1 else ''} {in_ranges(sorted(numbers))}", state, owner


def _failed(status: Status) -> list[RenderableType]:
    rows = [(one.sample, one.reason, one.detail, f"{one.layer} chunk {one.chunk}") for one in status.failed_samples]
    more = status.failed_samples_left_out
    if not more:
        return listing("failed samples", rows)
    every = command_line("status", status.root, "--failures", "all")
    left_out = f"… and {more:,} more" if rows else "which samples"
    return [*listing("the first failed samples", rows), Text.assemble(f"  {left_out}: ", (every, "cyan"))]


def _next_step(status: Status) -> Iterator[Text]:
    unfinished = next((one for one in status.layers if one.missing or one.unlisted or one.listed < one.planned), None)
    if any(layer.suspect for layer in status.layers):
        yield next_command(command_line("verify", status.root))
    elif any(layer.lost for layer in status.layers):
        yield repair_command(status.root, status.source_root, GONE in status.stale.values())
    elif any(how != GONE for how in status.stale.values()):
        yield reuse_command(status.root, status.reusable)
    elif status.needs_source:
        yield Text.assemble("next: restore the deleted files, or ", reuse_command(status.root, status.reusable))
    elif unfinished is not None and unfinished is status.layers[0]:
        yield next_command(command_line("build", status.root))
    elif unfinished is not None and unfinished.kind == "teacher":
        yield next_command(command_line("build", "teachers", status.root))
    elif (status.grown or status.new) and status.source_root:
        added = (_source_path(status.source_root, path) for path in (*status.grown, *status.new))
        yield next_command(command_line("update", status.root, *islice(added, NAMED_FILES)))


def _source_path(root: str, path: str) -> str:
    return f"{root}/{path}" if is_url(root) else os.path.normpath(os.path.join(root, path))


@draw.register
def draw_alignment(report: Alignment) -> RenderableType:
    verdict = ("aligned", "bold green") if report.aligned else ("not aligned", "bold red")
    head = Text.assemble(title(report.root, counted(len(report.layers), "layer") + " of teachers"), " · ", verdict)
    off = listing("not as expected", ((one,) for one in report.unmet), "red")
    return Group(head, *map(_layer, report.layers), *off, next_command(command_line("peek", report.root)))


def _layer(report: LayerAlignment) -> RenderableType:
    buckets = report.buckets
    grid = f"{len(buckets)} buckets, {buckets[0]:g} to {buckets[-1]:g}" if buckets else "none"
    usual = "" if report.usual_buckets or not buckets else " (not the default ten)"
    parts: list[RenderableType] = [
        facts(
            [
                (f"layer {report.layer}", report.teacher),
                ("rows", f"{report.checked_rows:,} checked, {report.recomputed_rows:,} recomputed"),
                ("timesteps", f"{grid}{usual}"),
                *((name, f"{list(shape)}") for name, shape in report.columns.items()),
                *((f"range of {name}", f"{low:.4g} to {high:.4g}") for name, (low, high) in report.ranges.items()),
            ]
        )
    ]
    parts += listing("between buckets", ((str(one),) for one in report.interpolation))
    parts += listing("problems", ((problem,) for problem in report.problems), "bold red")
    parts += listing("notes", ((note,) for note in report.notes), "yellow")
    return Group(*parts)
