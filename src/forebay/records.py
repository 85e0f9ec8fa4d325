"""Frozen records that verbs return, with a one-line repr, JSON, and a table in notebooks."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby
from typing import Any, ClassVar

import msgspec

SHOWN_CHARS, SHOWN_ITEMS = 60, 12  # of a value in a record's repr, and of a list in its table


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record with a repr of one line, and a table in notebooks."""

    only_in_table: ClassVar[tuple[str, ...]] = ()  # fields that the line leaves out
    in_ranges: ClassVar[tuple[str, ...]] = ()  # fields with numbers of chunks, which are ranges in JSON

    def __repr__(self) -> str:
        shown = {name: value for name, value in _facts(self).items() if name not in self.only_in_table}
        return f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in shown.items())})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, _facts(self))


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Rising numbers as ranges, with both ends.

    >>> ranges([0, 1, 2, 5, 7, 8])
    ((0, 2), (5, 5), (7, 8))
    """
    runs = ([number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    return tuple((run[0], run[-1]) for run in runs)


def as_json(records: object, indent: int | None = None) -> bytes:
    """Records as JSON, with chunk numbers as ranges, and file names that are not UTF-8 escaped."""
    plain = _plain(records)
    try:
        encoded = msgspec.json.encode(plain)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(plain), indent=indent).encode()
    return encoded if indent is None else msgspec.json.format(encoded, indent=indent)


def _plain(value: Any, is_chunks: bool = False) -> Any:
    if isinstance(value, Record):
        return {name: _plain(getattr(value, name), name in value.in_ranges) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: _plain(inner, is_chunks) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return ranges(value) if is_chunks else [_plain(inner) for inner in value]
    return value


def html_table(title: str, facts: Mapping[str, object]) -> str:
    """Names and values as a table; all content is escaped as text.

    >>> html_table("Report", {"root": "<b>", "rows": 1200})
    '<table><caption>Report</caption><tr><th>root</th><td>&lt;b&gt;</td></tr><tr><th>rows</th><td>1,200</td></tr></table>'
    """
    rows = (f"<tr><th>{escape(name)}</th><td>{_cell(value)}</td></tr>" for name, value in facts.items())
    return f"<table><caption>{escape(title)}</caption>{''.join(rows)}</table>"


def _facts(record: Record) -> dict[str, object]:
    """The fields that say something: neither empty nor None."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return {name: value for name, value in fields.items() if value not in (None, "", (), [], {})}


def _short(value: object) -> str:
    """
    >>> _short(0.2784757100000661), _short(("x" * 90,)), _short([1] * 90)
    ('0.2785', '<1 item>', '<90 items>')
    """
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    if len(text) <= SHOWN_CHARS:
        return text
    if isinstance(value, tuple | list | dict):
        return f"<{len(value)} item{'s' if len(value) > 1 else ''}>"
    return f"{text[:SHOWN_CHARS]}…"


def _cell(value: object) -> str:
    if isinstance(value, Record):
        return value._repr_html_()
    if isinstance(value, Mapping):
        value = [f"{name}: {inner if isinstance(inner, str) else _short(inner)}" for name, inner in value.items()]
    if isinstance(value, tuple | list):
        more = [f"and {len(value) - SHOWN_ITEMS:,} more"] if len(value) > SHOWN_ITEMS else []
        return "<br>".join(map(_cell, [*value[:SHOWN_ITEMS], *more]))
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else f"{value:.4g}" if isinstance(value, float) else escape(str(value))
