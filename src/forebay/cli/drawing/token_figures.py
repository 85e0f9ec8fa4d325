"""What a layer of packed tokens holds, in figures.

documents    3,649, 2,197 of them split
tokens       4,950,877 stored of 4,950,877
padding      0.67 %
rows by use  ····▁···▁▁▁▁▁▁▁▁▁▁▁▁█  90.1 % full
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from forebay.cache.records import LayerSummary
from forebay.cli.drawing.pieces import facts

_HEIGHTS = "▁▂▃▄▅▆▇█"
_NOTHING = "·"


def draw_token_figures(layer: LayerSummary) -> RenderableType:
    return facts(_figures(layer.statistics, layer.figures) if layer.chunks else ())


def _figures(counts: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
    """A histogram on one line: something is never drawn as nothing.

    >>> small_bars([0, 1, 50, 100])
    '·▁▄█'
    """
    highest = max(counts, default=0)
    return "".join(_HEIGHTS[-(-count * 8 // highest) - 1] if count else _NOTHING for count in counts)
