"""Globs matched name by name, as a shell does: case-sensitive, with `**` for any number of folders."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from typing import NamedTuple


class Glob(NamedTuple):
    """The parts of a glob. A state is the number of parts matched so far.

    Matching takes time in proportion to both lengths: globs may come from a hub.
    """

    parts: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Glob":
        """The glob of some parts, without a `**` after another.

        >>> Glob.of(["data", "**", "**"]).matches(["data", "en", "0.txt"])
        (True, True)
        >>> Glob.of(["data", "*"]).matches(["data", "en", "0.txt"])  # it matches the folder
        (True, False)
        """
        return cls(tuple(name for at, name in enumerate(names) if not (at and name == names[at - 1] == "**")))

    def closure(self, state: int) -> frozenset[int]:
        """A state, and the one beyond a `**` that stands for no folder."""
        is_any = state < len(self.parts) and self.parts[state] == "**"
        return frozenset([state]) | (self.closure(state + 1) if is_any else frozenset())

    def after(self, states: frozenset[int], name: str) -> frozenset[int]:
        """The states after one more name; empty if it does not match."""
        reached: set[int] = set()
        for state in states:
            part = self.parts[state] if state < len(self.parts) else ""
            if part == "**":
                reached |= frozenset() if is_hidden(name) else self.closure(state)
            elif fnmatchcase(name, part) and (part.startswith(".") or not name.startswith(".")):
                reached |= self.closure(state + 1)
        return frozenset(reached)

    def matches(self, names: Sequence[str]) -> tuple[bool, bool]:
        """Whether a file or one of its folders matches, and whether the file itself does."""
        states = self.closure(0)
        inside, is_match = self.is_end(states), False
        for at, name in enumerate(names):
            states = self.after(states, name)
            is_match = self.is_end(states)
            if not (states or (inside and not is_hidden(name))):
                return False, False
            if at < len(names) - 1:
                inside = inside or is_match
        return inside or is_match, is_match

    def is_end(self, states: frozenset[int]) -> bool:
        return len(self.parts) in states

    def fixed_names(self, states: frozenset[int]) -> set[str] | None:
        """The only names that can match; None if a wildcard decides."""
        names = {self.parts[state] for state in states if state < len(self.parts)}
        return None if any(map(has_magic, names)) else names


def is_hidden(name: str) -> bool:
    """Whether a name is left out of folders unless it is named."""
    return name.startswith(".") or name == "__pycache__"
