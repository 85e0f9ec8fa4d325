"""Draw a cache as a tree: source, layers, counts, figures, short fingerprints.

documents    3,649, 2,197 of them split
tokens       4,950,877 stored of 4,950,877
padding      0.67 %
rows by use  ····▁···▁▁▁▁▁▁▁▁▁▁▁▁█  90.1 % full

images   5,000, 4,712 of them scaled down; width / height 1.25 on average
padding  29.9 % of the canvas, not stored
tags     3.4 per image, of 120; 17 not in the vocabulary
stored   421.9 kB per image: 0.18 × a float32 canvas, 3.59 × the source
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from forebay.cache.records import LayerSummary, MadeWith, Summary
from forebay.kinds import WRONG
from forebay.preview.console import facts, title
from forebay.preview.words import counted, human_bytes, printable

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


SHORT = 12
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
    return f"{value:,}" if isinstance(value, int) else _text(value)


def _text(value: object) -> str:
    """A value as text; a string that is empty or contains blanks is quoted."""
    return repr(value) if isinstance(value, str) and value.split() != [value] else str(value)
