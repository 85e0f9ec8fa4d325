"""A cache as a tree: source, layers, counts, short fingerprints."""

from collections.abc import Callable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from forebay.cache.records import LayerSummary, Summary
from forebay.cli.drawing.image_figures import draw_image_figures
from forebay.cli.drawing.pieces import title
from forebay.cli.drawing.token_figures import draw_token_figures
from forebay.cli.words import counted, human_bytes, printable
from forebay.kinds import WRONG

SHORT = 12
# Kinds whose figures deserve more than a list of numbers.
FIGURES: dict[str, Callable[[LayerSummary], RenderableType]] = {
    "images": draw_image_figures,
    "tokens": draw_token_figures,
}
SHOWN_MARKS = 200  # of a field: a vocabulary of tags has many


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
        tree.add(_named("built with", _values(versions)))
    return tree


def _add_layer(tree: Tree, layer: LayerSummary, is_base: bool) -> None:
    role = "decides the rows" if is_base else "further columns"
    branch = tree.add(_named("layer", f"{layer.layer}, {role}"))
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
        branch.add(_named("statistics", _values(layer.statistics)))


def _figures(layer: LayerSummary) -> RenderableType | None:
    """The figures of a kind that has a drawing; None where a stranger's cache does not hold what the kind writes."""
    try:
        return FIGURES[layer.kind](layer) if layer.kind in FIGURES else None
    except WRONG:
        return None


def _field(value: object) -> str:
    text = _text(value)
    if len(text) <= SHOWN_MARKS:
        return text
    count = f", {len(value):,} in all" if isinstance(value, list) else ""
    return f"{text[:SHOWN_MARKS]}…{count}"


def _named(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), printable(value))


def _values(pairs: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in pairs.items() if value not in ([], ""))


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else _text(value)


def _text(value: object) -> str:
    """A value as text; a string that is empty or has blanks in it is quoted, to show where it begins and ends."""
    return repr(value) if isinstance(value, str) and value.split() != [value] else str(value)
