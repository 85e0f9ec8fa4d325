"""What a layer of images holds, in figures.

images   5,000, 4,712 of them scaled down; width / height 1.25 on average
padding  29.9 % of the canvas, not stored
tags     3.4 for an image, of 120; 17 that are not in the vocabulary
stored   421.9 kB for an image: 0.18 × a float32 canvas, 3.59 × the source
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from forebay.cache.records import LayerSummary
from forebay.cli.drawing.pieces import facts
from forebay.cli.words import human_bytes


def draw_image_figures(layer: LayerSummary) -> RenderableType:
    return facts(_figures(layer.fields, layer.statistics, layer.figures) if layer.rows else ())


def _figures(
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
    ('3.4 for an image, of 120; 17 that are not in the vocabulary', 'none')
    """
    if not vocabulary and not unknown:
        return "none"
    foreign = f"; {unknown:,} that are not in the vocabulary" if unknown else ""
    return f"{per_image:.1f} for an image, of {vocabulary:,}{foreign}"


def _stored(figures: Mapping[str, Any]) -> str:
    shares = (
        f"{figures['share_of_float32']:.2f} × a float32 canvas, {figures['share_of_source_bytes']:.2f} × the source"
    )
    return f"{human_bytes(figures['bytes_per_image'])} for an image: {shares}"
