"""The way from a teacher that is data to the modules that run it: taken when it is loaded, so that no torch is needed
to describe, estimate or read."""

from importlib import import_module
from typing import Any

from forebay.errors import LibraryMissing
from forebay.teachers.protocol import Loaded, Teacher

ROOM = "forebay.torch.teachers"


def load_by(module: str, name: str, teacher: Teacher, device: str, dtype: str) -> Loaded:
    """A teacher loaded by a class of the room that runs them."""
    loaded: Loaded = getattr(runner(module), name)(teacher, device, dtype)
    return loaded


def runner(module: str) -> Any:
    """A module of the room that runs teachers."""
    try:
        return import_module(f"{ROOM}.{module}")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(str(missing.name), "running a teacher", "teachers") from missing
