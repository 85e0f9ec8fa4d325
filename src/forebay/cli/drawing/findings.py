"""What a check found, and what a repair did."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cache.records import Bad, RefreshReport, RepairReport, VerifyReport
from forebay.cli.drawing.pieces import BUILD_ANEW, facts, listing, next_command, stale_files, title
from forebay.cli.words import command_line, counted, human_bytes, in_ranges, printable


def draw_verify(report: VerifyReport) -> RenderableType:
    verdict = ("sound", "bold green") if report.sound else ("not sound", "bold red")
    speed = human_bytes(report.checked_bytes / max(report.seconds, 1e-3))
    checked = f"{counted(report.chunks, 'chunk')}, {human_bytes(report.checked_bytes)} at {speed}/s"
    head = title(report.root, f"generation {report.generation}", checked, "")
    parts: list[RenderableType] = [Text.assemble(head, " · ", verdict)]
    parts += [facts([("cache id", printable(report.cache_id)), ("digest", report.digest)])]
    parts += listing("bad", map(_bad_row, report.bad), "bold red")
    parts += listing("missing", _missing_rows(report), "bold red")
    parts += stale_files(report.stale)
    parts += listing("foreign files, left alone", ((key,) for key in report.foreign), "yellow")
    parts += [facts((f"layer {layer}", f"{counted(gap, 'chunk')} not built yet") for layer, gap in report.gaps.items())]
    if report.source_note:
        parts.append(Text(f"note: {printable(report.source_note)}", style="yellow"))
    return Group(*parts, _next_step(report))


def draw_repair(report: RepairReport) -> RenderableType:
    if not (report.restored or report.replaced or report.failed):
        return title(report.root, "nothing to repair")
    parts: list[RenderableType] = [title(report.root, f"generation {report.generation}")]
    parts += listing("restored, byte for byte", ((key,) for key in report.restored), "green")
    parts += listing("replaced by other bytes", report.replaced.items(), "yellow")
    parts += listing("failed", report.failed.items(), "bold red")
    return Group(*parts, next_command(command_line("verify", report.root)))


def draw_refresh(report: RefreshReport) -> RenderableType:
    notes = listing("notes", ((note,) for note in report.notes), "yellow")
    if not (report.changed or report.dropped or report.chunks or report.layers or report.missing):
        same = f"{counted(report.touched, 'file')} with the same content noted" if report.touched else ""
        return Group(title(report.root, "nothing to refresh", *filter(None, [same])), *notes)
    parts: list[RenderableType] = [title(report.root, f"generation {report.generation}")]
    parts += listing("changed files", report.changed.items(), "yellow")
    parts += listing("dropped files", ((path,) for path in report.dropped), "yellow")
    made = f"{counted(len(report.chunks), 'chunk')}: {in_ranges(report.chunks)}" if report.chunks else "nothing"
    rows = (
        f"{report.rows:,}" if report.rows == report.rows_before else f"{report.rows:,}, before {report.rows_before:,}"
    )
    parts += [facts([("made again", made), ("rows", rows)])]
    parts += [
        facts(
            (f"layer {layer}", f"{counted(len(chunks), 'chunk')} made again") for layer, chunks in report.layers.items()
        )
    ]
    parts += listing("layers that lack chunks now", report.missing.items(), "bold red")
    return Group(*parts, *notes, next_command(command_line("gaps" if report.missing else "verify", report.root)))


def _bad_row(bad: Bad) -> tuple[str, str, str]:
    return bad.key, ", ".join(_where(bad)), bad.problem


def _where(bad: Bad) -> Iterator[str]:
    if bad.chunk >= 0:
        yield f"layer {bad.layer} chunk {bad.chunk}"
    if bad.column:
        yield f"column {bad.column}"
    if bad.block >= 0:
        yield f"block {bad.block}"
    if bad.start >= 0:
        yield f"bytes {bad.start:,} to {bad.stop:,}"


def _missing_rows(report: VerifyReport) -> Iterator[tuple[str, str]]:
    for layer, chunks in report.missing.items():
        yield f"layer {layer}", f"{counted(len(chunks), 'chunk')}: {in_ranges(chunks)}"


def _next_step(report: VerifyReport) -> Text:
    if report.bad or report.missing:
        return next_command(command_line("repair", report.root))
    if not report.sound:
        return next_command(command_line("refresh", report.root)) if report.refreshable else BUILD_ANEW
    return next_command(command_line("gaps" if report.gaps else "peek", report.root))
