"""Which class stands behind a teacher that a recipe names: the built-in ones here, others by entry point.

A class that was given from Python is known in this process from then on, so that its recipe reads back; none is ever
imported because a file names it.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import msgspec

from forebay.errors import RecipeInvalid, UnknownKind
from forebay.teachers.protocol import Teacher

TEACHERS = {
    "clip": ("forebay.teachers.encoders", "Clip"),
    "geometric-sol": ("forebay.teachers.geometric", "GeometricSol"),
    "hook": ("forebay.teachers.hook", "Hook"),
    "latents": ("forebay.teachers.encoders", "Latents"),
    "lune": ("forebay.teachers.unet", "Lune"),
    "sol": ("forebay.teachers.unet", "Sol"),
    "t5": ("forebay.teachers.encoders", "T5"),
}
_given: dict[str, type[Teacher]] = {}


def known_teacher(given: object) -> Teacher:
    """A teacher, or one from the fields that a recipe keeps of it."""
    if isinstance(given, Teacher):
        _given[given.tag()] = type(given)
        return _checked(type(given), msgspec.to_builtins(given))
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise RecipeInvalid(f"a teacher is expected, for instance fb.teachers.T5(model='…'), not {given!r:.60}")
    return _checked(teacher_class(given["kind"]), given)


def teacher_class(kind: str) -> type[Teacher]:
    if kind in TEACHERS:
        module, name = TEACHERS[kind]
        return _teacher(getattr(import_module(module), name))
    for entry in entry_points(group="forebay.teachers", name=kind):
        return _teacher(entry.load())
    if kind in _given:
        return _given[kind]
    raise UnknownKind("teacher", kind, sorted(TEACHERS))


def _checked(cls: type[Teacher], fields: Mapping[str, Any]) -> Teacher:
    """A teacher with fields of the types it declares: a word that is none of those it knows must not pass for one."""
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise RecipeInvalid(f"the teacher '{cls.tag()}' has a field of the wrong type: {error}") from error


def _teacher(found: Any) -> type[Teacher]:
    known: type[Teacher] = found
    return known
