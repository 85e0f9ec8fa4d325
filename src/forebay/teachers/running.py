"""The way from a teacher that is data to the module that runs it: reached when it is loaded, so that no torch is needed
to describe, estimate or read."""

from importlib import import_module

from forebay.teachers.protocol import Loaded, Teacher

ROOM = "forebay.torch.teachers"


def load_by(module: str, name: str, teacher: Teacher, device: str, dtype: str) -> Loaded:
    """A teacher loaded by a class of the room that runs them."""
    loaded: Loaded = getattr(import_module(f"{ROOM}.{module}"), name)(teacher, device, dtype)
    return loaded
