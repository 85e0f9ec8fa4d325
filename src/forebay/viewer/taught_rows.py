"""Teacher outputs of a row: over all timesteps as they are stored, and at any t as training interpolates them."""

from collections.abc import Mapping

import numpy as np

from forebay.cache.catalog import presence_name
from forebay.columns import Array
from forebay.errors import ForebayError, NotFound
from forebay.read.cache import Cache
from forebay.records import Record
from forebay.teachers import SOL_STATS, Features
from forebay.teachers.recipe import T_BUCKETS
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

SHOWN_VALUES = 1024  # of a column at one timestep; of more, every n-th is shown
SAMPLED_ROWS = 4096  # of which the share of present ones is counted


class TaughtColumn(Record, frozen=True, kw_only=True):
    """A column of one row."""

    column: str
    shape: tuple[int, ...]  # at one timestep
    dtype: str
    values: list[list[float]]  # at t; one line, or the lines of a spatial map
    over: list[list[float]]  # a line of values per bucket; empty where the layer has no timesteps
    maps: list[list[list[float]]]  # a spatial map per bucket
    names: tuple[str, ...]  # of the values, where they have names
    step: int  # every n-th value is shown
    mean: float
    deviation: float
    least: float
    most: float
    norm: float


class TaughtRow(Record, frozen=True, kw_only=True):
    layer: str
    row: int
    teacher: str
    t: float
    buckets: list[float]
    low: int  # the bucket below t
    alpha: float  # the weight of the bucket above
    present: bool
    columns: tuple[TaughtColumn, ...]
    present_share: float | None  # of a sample of rows; None where a chunk of the layer is missing or damaged


def taught_row(shown: ShownCache, query: Query) -> TaughtRow:
    cache, layer = shown.at(), query.text("layer")
    if layer not in cache.generation.recipes or layer == cache.generation.base:
        raise BadQuery(f"'layer' must be one of {', '.join(further_layers(cache)) or 'none'} (got {layer[:80]!r})")
    row, t = query.whole("row", 0), query.share("t", 0.5)
    if row >= len(cache):
        raise IndexError(f"there is no row {row}; '{cache.root}' has {len(cache):,} rows")
    bits = presence_name(layer)
    present = bool(np.asarray(cache.read([row], [bits])[bits])[0])
    columns, buckets, low, alpha = _columns(cache, layer, row, t, present)
    return TaughtRow(
        layer=layer,
        row=row,
        teacher=_teacher(cache, layer),
        t=t,
        buckets=buckets,
        low=low,
        alpha=alpha,
        present=present,
        columns=columns,
        present_share=_present_share(cache, bits),
    )


def further_layers(cache: Cache) -> tuple[str, ...]:
    """The layers above the base, those over timesteps first."""
    timed = [layer for layer in cache.generation.recipes if T_BUCKETS in cache.constants(layer)]
    rest = (layer for layer in cache.generation.recipes if layer not in timed and layer != cache.generation.base)
    return (*timed, *rest)


def _columns(
    cache: Cache, layer: str, row: int, t: float, present: bool
) -> tuple[tuple[TaughtColumn, ...], list[float], int, float]:
    stored = [column.name for column in cache.recipe(layer).columns]
    whole = {name: np.asarray(values[0]) for name, values in cache.read([row], stored).items()} if present else {}
    try:
        features = Features(cache, layer)
    except NotFound:
        plain = {name: whole[name] for name in stored if name in whole}
        return tuple(_column(cache, name, values, None) for name, values in plain.items()), [], 0, 0.0
    if not present:
        return (), features.buckets.tolist(), 0, 0.0
    direction = features.time_direction
    interpolated = features.at([row], t, direction)
    between = features.between([row], t, direction)
    constants = cache.constants(layer)
    over = {name: whole.get(name, constants.get(name)) for name in features.columns}
    low = int(np.searchsorted(features.buckets, t, side="right")) - 1
    return (
        tuple(_column(cache, name, np.asarray(interpolated[name])[0], over[name]) for name in features.columns),
        features.buckets.tolist(),
        max(0, min(low, len(features.buckets) - 2)),
        float(between.alpha[0]),
    )


def _column(cache: Cache, name: str, at_t: Array, over: Array | None) -> TaughtColumn:
    wide = np.asarray(at_t, np.float32)
    flat = wide.reshape(-1)
    step = max(1, -(-len(flat) // SHOWN_VALUES))
    ragged = name in cache.columns and cache.column(name).ragged  # a value per label, not a place in a picture
    is_map = wide.ndim == 2 and max(wide.shape) <= 128 and not ragged
    lines = np.asarray(over, np.float32) if over is not None else np.zeros((0, 1), np.float32)
    named = name.endswith("_stats") and wide.shape == (len(SOL_STATS),)
    return TaughtColumn(
        column=name,
        shape=wide.shape,
        dtype=cache.column(name).dtype if name in cache.columns else str(np.asarray(over).dtype),
        values=_rounded(wide if is_map else flat[None, ::step]),
        over=[] if is_map or over is None else _rounded(lines.reshape(len(lines), -1)[:, ::step]),
        maps=[_rounded(one) for one in lines] if is_map else [],
        names=SOL_STATS if named else (),
        step=step,
        mean=float(flat.mean()) if len(flat) else 0.0,
        deviation=float(flat.std()) if len(flat) else 0.0,
        least=float(flat.min(initial=np.inf)) if len(flat) else 0.0,
        most=float(flat.max(initial=-np.inf)) if len(flat) else 0.0,
        norm=float(np.linalg.norm(flat.astype(np.float64))),
    )


def _rounded(values: Array) -> list[list[float]]:
    """Values with five digits, which a picture cannot tell from all of them."""
    rounded: list[list[float]] = [[float(f"{one:.5g}") for one in line] for line in values.tolist()]
    return rounded


def _present_share(cache: Cache, bits: str) -> float | None:
    rows = np.arange(0, len(cache), max(1, -(-len(cache) // SAMPLED_ROWS)))
    try:
        return float(np.asarray(cache.read(rows, [bits])[bits]).mean())
    except ForebayError:
        return None


def _teacher(cache: Cache, layer: str) -> str:
    fields: Mapping[str, object] = cache.recipe(layer).fields
    teacher = fields.get("teacher")
    return str(teacher.get("kind", "")) if isinstance(teacher, dict) else cache.recipe(layer).kind
