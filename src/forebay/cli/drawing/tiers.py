"""Tiers of single rows: what they hold, what a check found, what was filled and emptied."""

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cli.drawing.pieces import facts, listing, next_command, title
from forebay.cli.words import command_line, counted, human_bytes, human_time
from forebay.tiers.records import RecipeShare, TierClearReport, TierSummary, TierVerifyReport, WarmReport

SHORT = 12
_SHOWN_BAD = 20


def draw_tier(summary: TierSummary) -> RenderableType:
    parts: list[RenderableType] = [title(summary.path, counted(summary.values, "value"), human_bytes(summary.bytes))]
    parts.append(
        facts(
            [
                ("file", f"{human_bytes(summary.file_bytes)}, of which {human_bytes(summary.free_bytes)} are free"),
                ("tagged", counted(summary.tagged, "value") if summary.tagged else ""),
                ("readers", f"{summary.dead_readers:,} dead, let go" if summary.dead_readers else ""),
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
        parts.append(Text(f"{more}what is bad is never served, and is made again when it is next read"))
    return Group(*parts)


def draw_tier_clear(report: TierClearReport) -> RenderableType:
    removed = f"{counted(report.removed, 'value')} removed"
    room = (
        f"{human_bytes(report.freed_bytes)} freed"
        if report.freed_bytes
        else f"its file keeps its size{': another process has it open' if report.in_use else ''}"
    )
    return title(report.path, removed, room)


def draw_warm(report: WarmReport) -> RenderableType:
    rate = report.samples / max(report.seconds, 1e-3)
    parts: list[RenderableType] = [title(report.path, counted(report.samples, "sample"), f"{rate:,.0f} samples/s")]
    parts.append(
        facts(
            [
                ("rows", f"{report.made:,} made, {report.present:,} were there"),
                ("written", f"{human_bytes(report.written_bytes)} in {human_time(report.seconds)}"),
                ("left", f"{counted(report.left, 'sample')}, as the tier takes no more" if report.left else ""),
            ]
        )
    )
    reasons = sorted(report.failures.items())
    parts += listing(
        "no image", ((why, f"{count:,}", report.examples.get(why, "")) for why, count in reasons), "yellow"
    )
    parts += listing("not written", ((why, f"{count:,}") for why, count in report.dropped.items()), "bold red")
    parts += listing("bad values, made again", ((why, f"{count:,}") for why, count in report.bad.items()), "yellow")
    parts += listing("workers lost", ((death,) for death in report.deaths), "yellow")
    return Group(*parts, next_command(command_line("tier", "stats", report.path)))


def _recipe_row(share: RecipeShare) -> tuple[str, ...]:
    libraries = ", ".join(f"{name} {version}" for name, version in share.made_with.items())
    return share.fingerprint[:SHORT], counted(share.values, "value"), human_bytes(share.bytes), libraries
