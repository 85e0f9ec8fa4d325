"""Draw a record with rich: `draw` registers a function for each type of record that is more than its fields.

Any other record is its name and its fields: `first_epoch_bytes` 3200000 is shown as `first epoch bytes  3.2 MB`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import singledispatch
from typing import Any

from rich.console import Group, RenderableType

from forebay.cache.reports import CleanReport, DropReport
from forebay.preview.console import facts, listing, next_command, title
from forebay.preview.words import command_line, counted, human_bytes, human_time, in_ranges, printable
from forebay.records import Record

NAMES = ("root", "destination", "path")  # fields whose value is the title, the first that a record has
SHOWN_ITEMS = 20
NEXT: dict[type[Any], Callable[[Any], str]] = {
    DropReport: lambda report: command_line("clean", report.root, "--keep-generations", "1"),
    CleanReport: lambda report: (
        command_line("clean", report.root, "--keep-generations", "1") if report.kept_bytes else ""
    ),
}


@singledispatch
def draw(record: Any) -> RenderableType:
    """A record as a title, its fields and the next command."""
    fields = {one: getattr(record, one) for one in record.__struct_fields__}
    name = next((fields.pop(one) for one in NAMES if one in fields), "estimate")
    parts: list[RenderableType] = [title(name), facts(shown_fields(fields))]
    for field, value in fields.items():
        if _are_records(value):
            rows = value.items() if isinstance(value, Mapping) else ((_line(one),) for one in value)
            parts += listing(field.replace("_", " "), ((name, *map(repr, more)) for name, *more in rows))
    if not any(fields.values()):
        return title(name, "nothing to do")
    command = NEXT.get(type(record), lambda _: "")(record)
    return Group(*parts, *([next_command(command)] if command else []))


@draw.register(list)
@draw.register(tuple)
def _(records: Any) -> RenderableType:
    return Group(*map(draw, records))


def shown_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values as people read them, without fields that are empty or zero."""
    for name, value in fields.items():
        if value and not _are_records(value):
            yield name.replace("_", " "), shown_value(name, value)


def shown_value(name: str, value: Any) -> str:
    """A value in the unit of its name.

    >>> shown_value("freed_bytes", 4490000), shown_value("first_epoch_seconds", 200.0), shown_value("hit_rate", 0.5)
    ('4.5 MB', '3 min 20 s', '50.0%')
    >>> shown_value("bytes_per_token", 0.384), shown_value("bytes_per_image", 104968.0)
    ('0.38', '105.0 kB')
    >>> shown_value("chunks", 1200), shown_value("missing", (1, 2, 5)), shown_value("by_kind", {"prompt": 3})
    ('1,200', '1–2, 5', 'prompt 3')
    >>> shown_value("ranks_per_node", 8)
    '8'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(key))} {shown_value(name, one)}" for key, one in value.items() if one)
    if isinstance(value, list | tuple):
        return _shown_items(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    if "_per_" in name and isinstance(value, float) and ("bytes" not in name or value < 1000):
        return f"{value:,.2f}"
    if "bytes" in name or name == "bandwidth":
        return human_bytes(value) + ("/s" if name == "bandwidth" else "")
    if name.endswith(("seconds", "latency")):
        return human_time(value)
    if name.endswith(("share", "rate", "utilization")):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _shown_items(values: Sequence[Any]) -> str:
    if all(isinstance(value, int) for value in values):
        return in_ranges(values) if list(values) == sorted(set(values)) else ", ".join(map(str, values))
    more = f" and {len(values) - SHOWN_ITEMS:,} more" if len(values) > SHOWN_ITEMS else ""
    return ", ".join(printable(str(value)) for value in values[:SHOWN_ITEMS]) + more


def _are_records(value: Any) -> bool:
    many = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return any(isinstance(one, Record) for one in many)


def _line(record: Record) -> str:
    """The fields of a record in a listing; counts have their noun."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    return " · ".join(
        counted(value, name.removesuffix("s"))
        if isinstance(value, int) and "bytes" not in name
        else shown_value(name, value)
        for name, value in fields
    )
