"""Run chunks: in worker processes or in this process."""

from forebay.engine.base import InlineEngine
from forebay.engine.local import LocalEngine

__all__ = ["InlineEngine", "LocalEngine"]
