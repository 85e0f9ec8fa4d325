"""Pictures of what teachers said, and caches of the old format."""

from rich.console import Group, RenderableType

from forebay.cache.records import ImportReport
from forebay.cli.drawing.pieces import facts, next_command, title
from forebay.cli.records import TaughtSheet
from forebay.cli.words import command_line, counted, printable


def draw_taught_sheet(sheet: TaughtSheet) -> RenderableType:
    head = title(sheet.root, f"generation {sheet.generation}", counted(sheet.rows, "row"))
    drawn = f"{printable(sheet.path)}, {counted(len(sheet.drawn), 'row')} of {', '.join(sheet.layers)}"
    absent = [(f"absent from {layer}", ", ".join(map(str, rows))) for layer, rows in sheet.absent.items()]
    return Group(head, facts([("picture", drawn), *absent]))


def draw_import(report: ImportReport) -> RenderableType:
    head = title(report.root, counted(report.rows, "row"), f"from {printable(report.old)}")
    layers = [(layer, _layer(built.made, built.present, built.failures)) for layer, built in report.layers.items()]
    return Group(head, facts(layers), next_command(command_line("verify", report.root)))


def _layer(made: int, present: int, absent: int) -> str:
    text = f"{counted(made, 'chunk')} made, {present:,} were there"
    return f"{text}; {counted(absent, 'row')} absent" if absent else text
