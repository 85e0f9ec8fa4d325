"""How far a cache is.

caches/raw · generation 3 · unfinished
raw  ██████████████████████░░░░░░██████████  30 of 34 chunks · 1,762 rows
"""

import os
from collections.abc import Collection, Iterator
from itertools import islice

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cache.records import GONE, ClaimStatus, Gaps, LayerStatus, Status
from forebay.cli.drawing.pieces import BUILD_ANEW, facts, listing, next_command, stale_files, title
from forebay.cli.words import command_line, counted, in_ranges, printable

CELLS = 40
NAMED_FILES = 5  # in a command to go on with; run again, status names the next ones


def draw_status(status: Status) -> RenderableType:
    published = "nothing published yet" if status.generation is None else f"generation {status.generation}"
    parts: list[RenderableType] = [title(status.root, published, "complete" if status.complete else "unfinished")]
    for layer in status.layers:
        parts += [_layer_line(layer), facts(_layer_facts(layer))]
    parts += listing("claims", (row for claim in status.claims for row in _claim_rows(claim)))
    parts += _failed(status)
    parts += stale_files(status.stale)
    parts += listing("source files that could not be read and were left out", status.unreadable.items(), "yellow")
    parts += listing("sources that grew", ((path,) for path in status.grown))
    parts += listing("foreign files, left alone", ((key,) for key in status.foreign), "yellow")
    if status.source_note:
        parts.append(Text(f"note: {printable(status.source_note)}", style="yellow"))
    return Group(*parts, *_next_step(status))


def draw_gaps(gaps: Gaps) -> RenderableType:
    counts = f"{gaps.present:,} of {counted(gaps.planned, 'chunk')} there"
    if not (gaps.missing or gaps.unlisted):
        return title(gaps.root, f"layer {gaps.layer}", counts, "no gaps")
    return Group(
        title(gaps.root, f"layer {gaps.layer}", counts),
        facts([("missing", in_ranges(gaps.missing)), ("unlisted", in_ranges(gaps.unlisted))]),
        next_command(fill_command(gaps)),
    )


def fill_command(gaps: Gaps) -> str:
    """What builds whatever is missing, from the source and the recipe that the cache keeps."""
    if gaps.kind == "teacher":
        return command_line("build", "teachers", gaps.root)
    return command_line("build", gaps.root, "--layer", gaps.layer)


def presence(planned: int, missing: Collection[int], suspect: Collection[int], cells: int = CELLS) -> Text:
    """Chunks as a row of cells: there, partly there, not there, suspect."""
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


def _layer_line(layer: LayerStatus) -> Text:
    counts = f"{layer.present:,} of {counted(layer.planned, 'chunk')} · {counted(layer.rows, 'row')}"
    picture = presence(layer.planned, layer.missing, layer.suspect)
    return Text.assemble((layer.layer, "bold"), "  ", picture, f"  {counts}")


def _layer_facts(layer: LayerStatus) -> Iterator[tuple[str, str | Text]]:
    yield "missing", in_ranges(layer.missing)
    if layer.lost:
        yield "lost", Text(f"{in_ranges(layer.lost)} (published, but the file is gone)", style="bold red")
    yield "suspect", Text(in_ranges(layer.suspect), style="bold red")
    if layer.unlisted:
        yield "unlisted", f"{in_ranges(layer.unlisted)} (not published yet: `build` checks and publishes them)"
    if layer.failures:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in layer.reasons.items())
        yield "failed", f"{layer.failures:,} of {counted(layer.samples, 'sample')}: {reasons}"


def _claim_rows(claim: ClaimStatus) -> Iterator[tuple[str, ...]]:
    """Whose a claim is, and below that, where there is room for it, why it failed."""
    yield f"{claim.layer} chunk {claim.chunk}", claim.state, f"{claim.host}, process {claim.pid}"
    if claim.reason:
        yield "", "", claim.reason


def _failed(status: Status) -> list[RenderableType]:
    rows = [(one.sample, one.reason, one.detail, f"{one.layer} chunk {one.chunk}") for one in status.failed_samples]
    more = status.failed_samples_left_out
    if not more:
        return listing("failed samples", rows)
    every = command_line("status", status.root, "--failures", "all")
    return [*listing("the first failed samples", rows), Text.assemble(f"  … and {more:,} more: ", (every, "cyan"))]


def _next_step(status: Status) -> Iterator[Text]:
    if any(layer.suspect for layer in status.layers):
        yield next_command(command_line("verify", status.root))
    elif any(layer.lost for layer in status.layers):
        yield next_command(command_line("repair", status.root))
    elif not status.refreshable and (status.needs_source or any(how != GONE for how in status.stale.values())):
        yield BUILD_ANEW
    elif any(how != GONE for how in status.stale.values()):
        yield next_command(command_line("refresh", status.root))
    elif status.needs_source:
        without = command_line("refresh", status.root, "--drop-missing")
        yield Text.assemble("next: put the old files back, or leave their samples out: ", (without, "cyan"))
    elif not status.complete:
        yield next_command(command_line("gaps", status.root))
    elif status.grown and status.source_root:
        files = (os.path.normpath(os.path.join(status.source_root, path)) for path in status.grown)
        yield next_command(command_line("grow", status.root, *islice(files, NAMED_FILES)))
