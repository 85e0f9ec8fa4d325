"""What builds, copies, cleanings and demos did."""

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cache.records import BuildReport, CleanReport, CopyReport, RekeyReport
from forebay.cli.drawing.pieces import facts, listing, next_command, title
from forebay.cli.records import DemoReport
from forebay.cli.words import command_line, counted, human_bytes, human_time, printable


def draw_build(report: BuildReport) -> RenderableType:
    made = f"{report.made:,} made, {report.present:,} were there, {report.chunks:,} asked for"
    parts: list[RenderableType] = [title(report.root, f"layer {report.layer}", f"generation {report.generation}")]
    parts.append(
        facts(
            [
                ("chunks", made),
                ("rows", f"{report.rows:,}"),
                ("failed", f"{report.failures:,} of {counted(report.samples, 'sample')}" if report.failures else ""),
                ("written", f"{human_bytes(report.written_bytes)} in {human_time(report.seconds)}"),
            ]
        )
    )
    parts += listing("workers lost", ((death,) for death in report.deaths), "yellow")
    parts += listing("notes", ((note,) for note in report.notes), "yellow")
    return Group(*parts, next_command(command_line("status" if report.failures else "verify", report.root)))


def draw_copy(report: CopyReport) -> RenderableType:
    copied = f"{counted(report.copied, 'chunk')} copied, {report.present:,} were there"
    size = f"{human_bytes(report.copied_bytes)} in {human_time(report.seconds)}"
    head = title(report.destination, f"generation {report.generation}", copied, size)
    return Group(head, next_command(command_line("repair", report.root, "--from", report.destination)))


def draw_rekey(report: RekeyReport) -> RenderableType:
    checked = f"{human_bytes(report.checked_bytes)} checked in {human_time(report.seconds)}"
    signed = len(report.tagged) - len(report.already)
    done = f"{counted(signed, 'generation')} signed with the new key"
    if not signed:
        done = f"nothing changed: {counted(len(report.already), 'generation')} are signed with this key already"
    parts: list[RenderableType] = [title(report.root, done, checked)]
    parts += [facts([("cache id", printable(report.cache_id)), ("digest", report.digest)])]
    if report.digest_before not in ("", report.digest):
        parts += [facts([("before", f"{report.digest_before} (change a pin of the digest)")])]
    parts += listing("removed", ((f"generation {number}", why) for number, why in report.removed.items()), "yellow")
    return Group(*parts, next_command(command_line("verify", report.root)))


def draw_clean(report: CleanReport) -> RenderableType:
    parts: list[RenderableType] = [title(report.root, f"{human_bytes(report.freed_bytes)} freed")]
    parts += listing("temporary files of dead writers", ((key,) for key in report.temporary))
    parts += listing("claims of dead builders", ((key,) for key in report.claims))
    parts += listing("replaced chunks", ((key,) for key in report.superseded))
    parts += listing("old generations", ((str(number),) for number in report.generations))
    return Group(*parts) if len(parts) > 1 else title(report.root, "nothing to clean")


def draw_demo(report: DemoReport) -> RenderableType:
    done = f"{counted(len(report.steps), 'command')} did what they should in {human_time(report.seconds)}"
    return Group(
        Text(done, style="bold green"),
        facts([("cache", report.root if report.kept else "removed; --keep or --into leaves it")]),
    )
