"""Who runs the chunks."""

from forebay.engine.inline import InlineEngine
from forebay.engine.local import LocalEngine

__all__ = ["InlineEngine", "LocalEngine"]
