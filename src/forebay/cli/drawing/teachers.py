"""What teachers take, and whether their layers are aligned."""

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cli.drawing.pieces import facts, listing, next_command, title
from forebay.cli.words import command_line, counted, human_bytes
from forebay.teachers import Alignment, LayerAlignment, TeacherEstimate


def draw_teacher_estimate(estimate: TeacherEstimate) -> RenderableType:
    rows = (
        (size.column, f"{size.dtype} {list(size.shape)}", human_bytes(size.row_bytes), human_bytes(size.bytes))
        for size in estimate.columns
    )
    total = f"{human_bytes(estimate.row_bytes)} a row, {human_bytes(estimate.bytes)} in all"
    free = "" if estimate.free_bytes is None else human_bytes(estimate.free_bytes)
    head = title(counted(estimate.rows, "row"), total)
    return Group(head, *listing("column, rows of it, bytes of a row, of all", rows), facts([("free", free)]))


def draw_alignment(found: Alignment) -> RenderableType:
    verdict = ("aligned", "bold green") if found.aligned else ("not aligned", "bold red")
    head = Text.assemble(title(found.root, counted(len(found.layers), "layer") + " of teachers"), " · ", verdict)
    return Group(head, *map(_layer, found.layers), next_command(command_line("peek", found.root)))


def _layer(found: LayerAlignment) -> RenderableType:
    grid = f"{len(found.buckets)} buckets, {found.buckets[0]:g} to {found.buckets[-1]:g}" if found.buckets else "none"
    usual = "" if found.usual_buckets or not found.buckets else " (not the usual ten)"
    parts: list[RenderableType] = [
        facts(
            [
                (f"layer {found.layer}", found.teacher),
                ("rows", f"{found.checked_rows:,} checked, {found.recomputed_rows:,} computed again"),
                ("timesteps", f"{grid}{usual}"),
                *((name, f"{list(shape)}") for name, shape in found.columns.items()),
                *((f"range of {name}", f"{low:.4g} to {high:.4g}") for name, (low, high) in found.ranges.items()),
            ]
        )
    ]
    parts += listing("problems", ((problem,) for problem in found.problems), "bold red")
    parts += listing("notes", ((note,) for note in found.notes), "yellow")
    return Group(*parts)
