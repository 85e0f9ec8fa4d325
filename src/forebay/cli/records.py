"""What only the command line answers with: rows to look at, a build not made, a demo."""

import msgspec

from forebay.cache.records import Estimate


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One value of a row: bytes that are UTF-8 as `text`, anything else as its first `values`."""

    dtype: str
    shape: tuple[int, ...]
    text: str | None = None
    values: list[object] | None = None


class PeekedRow(msgspec.Struct, frozen=True, kw_only=True):
    row: int
    chunk: int
    row_in_chunk: int
    columns: dict[str, Cell]


class Peek(msgspec.Struct, frozen=True, kw_only=True):
    """A few rows as a person would read them."""

    root: str
    generation: int
    rows: int
    shown: tuple[PeekedRow, ...]


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a build would do; `planned` and `missing` are None where there is no plan yet."""

    root: str
    layer: str
    kind: str
    planned: int | None
    missing: tuple[int, ...] | None
    estimate: Estimate


class DemoStep(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    exit_code: int
    seconds: float


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    root: str
    steps: tuple[DemoStep, ...]
    seconds: float
