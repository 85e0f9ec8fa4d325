"""Every engine we ship keeps the contract."""

from forebay.engine.base import Engine, InlineEngine
from forebay.engine.local import LocalEngine
from forebay.testing import EngineContract


class TestLocalEngine(EngineContract):
    def make_engine(self) -> Engine:
        return LocalEngine()


class TestInlineEngine(EngineContract):
    def make_engine(self) -> Engine:
        return InlineEngine()
