"""Run chunks: in worker processes or in this process."""

from forebay.engine.local import InlineEngine, LocalEngine

__all__ = ["InlineEngine", "LocalEngine"]
