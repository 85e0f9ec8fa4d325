"""Draw a cache for `info`: a tree of source, layers, counts, figures and short fingerprints.

documents      3,649
tokens         4,950,877
padding share  0.7%
rows by use    ····▁···▁▁▁▁▁▁▁▁▁▁▁▁█  90.1% are in the last
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from forebay.cache.reports import LayerSummary, MadeWith, Summary
from forebay.cli.render.drawing import draw, shown_fields
from forebay.kinds import WRONG
from forebay.preview.console import facts, title
from forebay.preview.words import counted, human_bytes, printable

SHORT = 12  # characters of a fingerprint
_HEIGHTS = "▁▂▃▄▅▆▇█"
_NOTHING = "·"


def _figures(layer: LayerSummary) -> RenderableType | None:
    """The recipe's counts and ratios, or None if there are none or an untrusted cache has other values."""
    values = {**layer.statistics, **layer.figures}
    try:
        return facts((*shown_fields(_without_lists(values)), *_histograms(values))) if any(values.values()) else None
    except WRONG:
        return None


def _without_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, list)}


def _histograms(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, counts in values.items():
        if isinstance(counts, list) and counts:
            last = counts[-1] / max(1, sum(counts))
            yield name.replace("_", " "), f"{small_bars(counts)}  {last:.1%} are in the last"


def small_bars(counts: Sequence[int]) -> str:
    """A histogram on one line; a count above 0 is always visible.

    >>> small_bars([0, 1, 50, 100])
    '·▁▄█'
    """
    highest = max(counts, default=0)
    return "".join(_HEIGHTS[-(-count * 8 // highest) - 1] if count else _NOTHING for count in counts)


SHOWN_RANGES = 20  # of chunks; `--json` has all
SHOWN_CHARS = 200  # of a field: a vocabulary of tags is long
UNSET: tuple[object, ...] = (None, False, 0, "", [])  # values of recipe fields that only --json has


@draw.register
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
        tree.add(_named("built with", _values(versions) + _chunk_ranges(summary, versions)))
    if unknown := _chunk_ranges(summary, {}):
        tree.add(_named("built with", f"not recorded{unknown}"))
    return tree


def _chunk_ranges(summary: Summary, versions: Mapping[str, str]) -> str:
    """The chunks that were made with some versions of libraries; nothing if all were made with the same."""
    versioned = [(layer.layer, one) for layer in summary.layers for one in layer.made_with]
    shown = "; ".join(f"{name} {_shown_ranges(one)}" for name, one in versioned if one.versions == versions)
    is_same = bool(versions) and all(one.versions == versions for _, one in versioned)
    return f": chunks of {shown}" if shown and not is_same else ""


def _shown_ranges(group: MadeWith) -> str:
    """
    >>> _shown_ranges(MadeWith(versions={}, count=4, chunks=((0, 2), (7, 7))))
    '0–2, 7'
    """
    shown = ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in group.chunks[:SHOWN_RANGES])
    return f"{shown} and more, {group.count:,} in all" if len(group.chunks) > SHOWN_RANGES else shown


def _add_layer(tree: Tree, layer: LayerSummary, is_base: bool) -> None:
    branch = tree.add(_named("layer", f"{layer.layer} (base)" if is_base else layer.layer))
    recipe = branch.add(_named("recipe", f"{layer.kind} {layer.fingerprint[:SHORT]}"))
    for name, value in layer.fields.items():
        if value not in UNSET:
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
