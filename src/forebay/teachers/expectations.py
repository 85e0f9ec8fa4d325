"""What a student expects of teacher layers, as lines that a check can fail: `lune.dim=1280`.

    lune.dim=1280                        width of the features: the last axis of the layer's columns of floats
    sol.spatial=8x8                      shape of the column sol_spatial, at one bucket
    lune.t=linspace(0.05,0.95,10)        buckets; also as a list, 0.1,0.5,0.9
    lune.range=-5..5                     smallest and largest value, of a layer or a column
    lune.present=99%                     share of rows that are present, at least
    lune.dtype=float16                   type on disk
    lune.direction=t0_noise              end of t that is noise
    t=same                               equal buckets in all layers that have some

A profile is the name of a list below, or a file with one expectation per line; `#` begins a comment.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_LINSPACE = re.compile(r"linspace\(([^,]+),([^,]+),(\d+)\)")
_LINE = re.compile(r"(?:(?P<subject>[\w-]+)\.)?(?P<fact>\w+)=(?P<value>\S.*)")
PROFILES: dict[str, tuple[str, ...]] = {
    "tinyflux": (
        "lune.dim=1280", "lune.t=linspace(0.05,0.95,10)", "lune.range=-10..10", "sol.stats=4", "sol.spatial=8x8",
        "sol.t=linspace(0.05,0.95,10)", "sol_stats.range=0..1", "sol_spatial.range=0..1", "t=same",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What is known of a layer: shapes, types and ranges by column."""

    shapes: Mapping[str, tuple[int, ...]]  # of one row, buckets first
    dtypes: Mapping[str, str]
    ranges: Mapping[str, tuple[float, float]]
    buckets: tuple[float, ...]
    direction: str
    present: float

    def shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of a column at one bucket."""
        return self.shapes[column][1 if self.buckets else 0 :]

    def features(self) -> list[str]:
        """Return the columns of floats, if there are any: not masks, and not what says where prompts are stored."""
        return [name for name, dtype in self.dtypes.items() if "float" in dtype] or list(self.shapes)


@dataclass(frozen=True, slots=True)
class Expectation:
    text: str
    subject: str  # a layer or a column; empty for all layers
    fact: str
    value: str


def read_expectations(texts: Iterable[str]) -> tuple[Expectation, ...]:
    """Return expectations from lines, names of profiles and paths of files."""
    return tuple(_parsed(line) for text in texts for line in _lines(text))


def _lines(text: str) -> Sequence[str]:
    if text in PROFILES:
        return PROFILES[text]
    if "=" in text:
        return [text]
    if not os.path.isfile(text):
        raise ValueError(
            f"'{text}' is neither an expectation, such as lune.dim=1280, nor a file, nor a profile: "
            f"{', '.join(PROFILES)}"
        )
    with open(text, encoding="utf-8") as file:
        lines = [line.partition("#")[0].strip() for line in file]
    return [line for line in lines if line]


def _parsed(line: str) -> Expectation:
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"an expectation is LAYER.FACT=VALUE, such as lune.dim=1280 (got '{line}')")
    one = Expectation(line.strip(), found["subject"] or "", found["fact"], found["value"].strip())
    if not one.subject and one.text != "t=same":
        raise ValueError(f"an expectation names a layer or a column, except for t=same (got '{line}')")
    if not one.subject:
        return one
    try:
        _READERS.get(one.fact, _shape)(one.value)
    except ValueError as error:
        facts = f"{', '.join(_READERS)}, or the name of a column with a shape such as 8x8"
        raise ValueError(f"'{line}' cannot be read: {error}; facts are {facts}") from error
    return one


def unmet(expected: Iterable[Expectation], layers: Mapping[str, LayerFacts]) -> list[str]:
    """Return a problem for each expectation that the layers do not meet."""
    return [f"{one.text}: {problem}" for one in expected if (problem := _problem(one, layers)) is not None]


def _problem(one: Expectation, layers: Mapping[str, LayerFacts]) -> str | None:
    if not one.subject:
        grids = {name: facts.buckets for name, facts in layers.items() if facts.buckets}
        return None if len(set(grids.values())) < 2 else f"buckets differ between {', '.join(sorted(grids))}"
    layer = next((name for name, facts in layers.items() if one.subject in (name, *facts.shapes)), None)
    if layer is None:
        return f"there is no teacher layer or column '{one.subject}'; there are {', '.join(layers) or 'none'}"
    facts = layers[layer]
    columns = [one.subject] if one.subject in facts.shapes else facts.features()
    if one.fact in _CHECKS:
        return _CHECKS[one.fact](one.value, facts, columns)
    column = f"{layer}_{one.fact}"
    if column not in facts.shapes:
        return f"layer '{layer}' has no column '{column}'; it has {', '.join(facts.shapes)}"
    return _differs("its shape", facts.shape(column), _shape(one.value))


def _dim(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    found = (_differs(f"'{column}'", facts.shape(column)[-1:], (int(value),)) for column in columns)
    return next((problem for problem in found if problem), None)


def _t(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    wanted = _buckets(value)
    if len(wanted) == len(facts.buckets) and np.allclose(wanted, facts.buckets, atol=1e-6):
        return None
    return f"its buckets are {', '.join(f'{t:g}' for t in facts.buckets) or 'none'}"


def _range(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    low, high = _interval(value)
    found = [facts.ranges[column] for column in columns if column in facts.ranges]
    if not found:
        return "no value was read"
    least, most = min(one[0] for one in found), max(one[1] for one in found)
    return None if low <= least and most <= high else f"its values are from {least:g} to {most:g}"


def _present(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    return None if facts.present >= _share(value) else f"{facts.present:.2%} of the rows are present"


def _dtype(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    others = {facts.dtypes[column] for column in columns} - {value}
    return f"it is stored as {', '.join(sorted(others))}" if others else None


def _direction(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    return None if facts.direction == value else f"it is {facts.direction or 'not recorded'}"


def _differs(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
    return None if found == wanted else f"{what} is {'x'.join(map(str, found)) or 'a number'}"


def _shape(value: str) -> tuple[int, ...]:
    return tuple(int(side) for side in value.split("x"))


def _buckets(value: str) -> tuple[float, ...]:
    spaced = _LINSPACE.fullmatch(value.replace(" ", ""))
    if spaced:
        return tuple(np.linspace(float(spaced[1]), float(spaced[2]), int(spaced[3])).tolist())
    return tuple(float(t) for t in value.split(","))


def _interval(value: str) -> tuple[float, float]:
    low, _, high = value.partition("..")
    return float(low), float(high)


def _share(value: str) -> float:
    return float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)


_READERS: dict[str, Callable[[str], object]] = {
    "dim": int, "t": _buckets, "range": _interval, "present": _share,
    "dtype": str, "direction": str,
}  # fmt: skip
_CHECKS: dict[str, Callable[[str, LayerFacts, Sequence[str]], str | None]] = {
    "dim": _dim, "t": _t, "range": _range, "present": _present, "dtype": _dtype, "direction": _direction,
}  # fmt: skip
