"""What is counted while images are made into rows, and what the counts say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.columns import Array

_FLOAT32_BYTES = 4
_PLANES = 3


@dataclass(slots=True)
class Counts:
    """Sums over the rows of one chunk; they are summed over chunks."""

    images: int = 0
    source_bytes: int = 0
    content_pixels: int = 0
    original_pixels: int = 0
    scaled_down: int = 0
    aspects: float = 0.0  # width / height, summed
    tags: int = 0
    unknown_tags: int = 0

    def add(self, row: Mapping[str, Array], named: int, source_bytes: int) -> None:
        """One row more: `named` is how many tags its sample names, in the vocabulary or not."""
        (width, height), (box_width, box_height) = row["original_size"].tolist(), row["box"][2:].tolist()
        known = len(row["tags"])
        self.images += 1
        self.source_bytes += source_bytes
        self.content_pixels += box_width * box_height
        self.original_pixels += width * height
        self.scaled_down += (box_width, box_height) != (width, height)
        self.aspects += width / height
        self.tags += known
        self.unknown_tags += named - known

    def statistics(self) -> dict[str, int | float | list[int]]:
        return {name: getattr(self, name) for name in self.__slots__}


def image_figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
    images, canvas = statistics.get("images", 0), fields["size"] ** 2
    return {
        "mean_aspect": _ratio(statistics.get("aspects", 0.0), images),
        "padding_share": 1 - _ratio(statistics.get("content_pixels", 0), images * canvas) if images else 0.0,
        "scaled_down_share": _ratio(statistics.get("scaled_down", 0), images),
        "tags_per_image": _ratio(statistics.get("tags", 0), images),
        "bytes_per_image": _ratio(holds["bytes"], images),
        "share_of_source_bytes": _ratio(holds["bytes"], statistics.get("source_bytes", 0)),
        "share_of_float32": _ratio(holds["bytes"], images * canvas * _PLANES * _FLOAT32_BYTES),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
