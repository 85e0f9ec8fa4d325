"""The flags and keys of the hand-made cache script that forebay replaces, and their replacements.

Settings files may use the old keys, `forebay build` recognizes the old flags, and the guide shows the table.

[cache_config]                       [build]
parallel_workers = 4         ──▶     workers = 4

Every translated key is reported once. A key without effect is accepted and reported with the reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from forebay.cli.verb import Command


@dataclass(frozen=True, slots=True)
class OldKey:
    """A key of the old configuration: its new section, key and values; no section if it has no effect."""

    section: str = ""
    key: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)  # old value -> new value; empty: unchanged
    remark: str = ""

    def translated(self, value: Any) -> Any:
        """The new value for an old one; raises `KeyError` for an invalid value."""
        return self.values[in_toml(value)] if self.values else value


@dataclass(frozen=True, slots=True)
class OldFlag:
    """A flag of the old script: the verb that replaces it, or the same flag."""

    verb: str = ""
    remark: str = ""


KEYS: dict[str, OldKey] = {
    "sequence_length": OldKey("recipe", "sequence_length", remark="tokens in a row"),
    "compression": OldKey(
        "recipe", "codec", {"true": "zstd", "false": "none"}, 'codec = "lz4" also works, and is larger by about a third'
    ),
    "chunk_size": OldKey("recipe", "chunk_size", remark="rows in a chunk"),
    "validation": OldKey(remark="every block is checked when it is first read, always"),
    "parallel_workers": OldKey("build", "workers", remark="worker processes"),
    "memory_limit": OldKey("build", "memory_limit", remark="for the builder and its workers together"),
    "compression_level": OldKey(
        "recipe", "level", {'"fast"': "fast", '"default"': "default", '"max"': "max"}, "fast, default or max"
    ),
    "streaming": OldKey(remark="a source is always read part by part, whatever its size"),
    "deduplicate": OldKey(
        "recipe", "deduplicate", remark="compares a 128-bit hash; the first of equal documents stays"
    ),
    "optimize_packing": OldKey(remark="rows are always packed best fit"),
    "io_threads": OldKey(remark="every worker writes its own chunks, one file at a time"),
    "write_buffer": OldKey(remark="a chunk is assembled in memory and written at once"),
    "sync_frequency": OldKey(remark="every chunk is synced before it is published"),
    "download_retries": OldKey("source", "download_retries", remark="for hub: sources; local files need none"),
    "download_timeout": OldKey("source", "download_timeout", remark="for hub: sources; local files need none"),
    "chunk_download": OldKey(remark="the hub is always read shard by shard, and a broken download is resumed"),
}
FLAGS: dict[str, OldFlag] = {
    "--mode": OldFlag(remark="inverse checks existing chunks, then fills gaps from the end"),
    "--start-chunk": OldFlag(remark="the first chunk to build"),
    "--end-chunk": OldFlag(remark="the last chunk to build, inclusive"),
    "--resume": OldFlag(remark="a build always resumes where it stopped"),
    "--estimate-space": OldFlag("estimate", "takes the kind, the sources and the flags of build"),
    "--cleanup": OldFlag("clean", "never removes data in use"),
    "--validate": OldFlag("verify", "checks every byte against its checksum"),
    "--repair": OldFlag("repair", "restores exactly what is damaged"),
}


def in_toml(value: Any) -> str:
    """
    >>> in_toml(True), in_toml("fast"), in_toml(5)
    ('true', '"fast"', '5')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def naming_verbs(command: Command) -> Command:
    """Add hidden old flags that fail and name the verb that replaces them."""
    for flag, old in FLAGS.items():
        if old.verb:
            option = click.option(
                flag, is_flag=True, hidden=True, expose_value=False, is_eager=True, callback=_name_verb
            )
            command = option(command)
    return command


def naming_places(command: Command) -> Command:
    """Add every old flag, hidden, to the group of all verbs; each fails and names its replacement."""
    for flag, old in FLAGS.items():
        callback = _name_verb if old.verb else _name_place
        option = click.option(flag, is_flag=True, hidden=True, expose_value=False, is_eager=True, callback=callback)
        command = option(command)
    return command


def _name_place(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        flag = param.opts[0]
        raise click.UsageError(f"{flag} is an option of build: forebay build tokens SOURCE… --into CACHE {flag}", ctx)


def _name_verb(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        flag = param.opts[0]
        verb = FLAGS[flag].verb
        rest = ("tokens", "SOURCE…", "--into", "CACHE") if verb == "estimate" else ("CACHE",)
        raise click.UsageError(f"{flag} is now a command: forebay {verb} {' '.join(rest)}", ctx)


FLAT_SECTIONS = ("cache_config", "CACHE_CONFIG")


@dataclass(frozen=True, slots=True)
class SettingsKey:
    """A key of a settings file, and its full name there."""

    key: str
    names: tuple[str, ...]


class Refused(Exception):
    """An old key cannot be translated."""

    def __init__(self, place: SettingsKey, problem: str) -> None:
        self.place, self.problem = place, problem
        super().__init__(problem)


@dataclass(slots=True)
class Modern:
    """A settings document with new keys only: its sections, the origin of each translated key, and notes."""

    sections: dict[str, Any]
    origins: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def translate(self, place: SettingsKey, value: Any) -> None:
        """Translate one old key."""
        old = KEYS[place.key]
        if not old.section:
            self.notes.append(f"'{place.key}' has no effect: {old.remark}")
            return
        section = self.sections.setdefault(old.section, {})
        if old.key in section:
            raise Refused(
                place, f"'{place.key}' is now '{old.key}' in [{old.section}], which is also set; keep one of them"
            )
        try:
            section[old.key] = old.translated(value)
        except KeyError as error:
            known = ", ".join(map(str, old.values))
            raise Refused(place, f"'{place.key}' cannot be {in_toml(value)} (one of: {known})") from error
        self.origins[old.section, old.key] = place.names
        self.notes.append(f"'{place.key}' is now {_written(old, section[old.key])}")


def modernized(document: Mapping[str, Any]) -> Modern:
    """A settings document with every old key translated."""
    flat = {name: value for name, value in document.items() if name in FLAT_SECTIONS or name in KEYS}
    modern = Modern({name: _copied(value) for name, value in document.items() if name not in flat})
    for place, value in _old_places(flat, modern.sections):
        if len(place.names) > 1 and place.names[0] in modern.sections:
            del modern.sections[place.names[0]][place.key]
        modern.translate(place, value)
    if flat:
        modern.sections.setdefault("recipe", {}).setdefault("kind", "tokens")
    return modern


def _old_places(flat: Mapping[str, Any], sections: Mapping[str, Any]) -> Iterator[tuple[SettingsKey, Any]]:
    for name, value in flat.items():
        if name in KEYS:
            yield SettingsKey(name, (name,)), value
        elif not isinstance(value, dict):
            raise Refused(SettingsKey(name, (name,)), f"'{name}' is a section; write [{name}] on a separate line")
        else:
            yield from ((_known(SettingsKey(key, (name, key))), inner) for key, inner in value.items())
    for name, section in sections.items():
        inner = dict(section) if isinstance(section, dict) else {}
        yield from ((SettingsKey(key, (name, key)), inner[key]) for key in inner if _is_old(name, key))


def _known(place: SettingsKey) -> SettingsKey:
    if place.key not in KEYS:
        raise Refused(place, f"unknown key '{place.key}' in [{place.names[0]}]; known: {', '.join(KEYS)}")
    return place


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _is_old(section: str, key: str) -> bool:
    """Whether a key is an old name; some names are still valid in their section."""
    return key in KEYS and (KEYS[key].section, KEYS[key].key) != (section, key)


def _written(old: OldKey, value: Any) -> str:
    return f"{old.key} = {in_toml(value)} in [{old.section}]" + (f" ({old.remark})" if old.remark else "")
