"""Who runs the chunks."""

from forebay.engine.local import InlineEngine, LocalEngine

__all__ = ["InlineEngine", "LocalEngine"]
