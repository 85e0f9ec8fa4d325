"""Settings in the words of the old cache script, translated: in a flat table, at the top of a file, or in our sections.

[cache_config]                       [build]
parallel_workers = 4         ──▶     workers = 4

Every key that was translated is said once. One without effect is accepted, and says why it has none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.cli.old_names import KEYS, OldKey, in_toml

FLAT_SECTIONS = ("cache_config", "CACHE_CONFIG")


@dataclass(frozen=True, slots=True)
class Place:
    """A key of a settings file, and where in the file it is written."""

    key: str
    names: tuple[str, ...]


class Refused(Exception):
    """An old key cannot be taken as it is."""

    def __init__(self, place: Place, problem: str) -> None:
        self.place, self.problem = place, problem
        super().__init__(problem)


@dataclass(slots=True)
class Modern:
    """A settings document in our words only: its sections, where each translated key came from, and what to say."""

    sections: dict[str, Any]
    origins: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, place: Place, value: Any) -> None:
        """One old key, put where it belongs now."""
        old = KEYS[place.key]
        if not old.section:
            self.notes.append(f"'{place.key}' has no effect here: {old.remark}")
            return
        section = self.sections.setdefault(old.section, {})
        if old.key in section:
            raise Refused(place, f"'{place.key}' is '{old.key}' in [{old.section}], which is set too; keep one of them")
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
        modern.take(place, value)
    if flat:
        modern.sections.setdefault("recipe", {}).setdefault("kind", "tokens")
    return modern


def _old_places(flat: Mapping[str, Any], sections: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    for name, value in flat.items():
        if name in KEYS:
            yield Place(name, (name,)), value
        elif not isinstance(value, dict):
            raise Refused(Place(name, (name,)), f"'{name}' is a section; write [{name}] on a separate line")
        else:
            yield from ((_known(Place(key, (name, key))), inner) for key, inner in value.items())
    for name, section in sections.items():
        inner = dict(section) if isinstance(section, dict) else {}
        yield from ((Place(key, (name, key)), inner[key]) for key in inner if _is_old(name, key))


def _known(place: Place) -> Place:
    if place.key not in KEYS:
        raise Refused(place, f"unknown key '{place.key}' in [{place.names[0]}]; known: {', '.join(KEYS)}")
    return place


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _is_old(section: str, key: str) -> bool:
    """Whether a key of one of our sections is an old name; some names stayed, and where they are is right."""
    return key in KEYS and (KEYS[key].section, KEYS[key].key) != (section, key)


def _written(old: OldKey, value: Any) -> str:
    return f"{old.key} = {in_toml(value)} in [{old.section}]" + (f" ({old.remark})" if old.remark else "")
