"""Every engine we ship keeps the contract."""

import pytest

from forebay.engine.base import Engine, InlineEngine
from forebay.engine.local import LocalEngine
from forebay.testing import EngineContract


class TestLocalEngine(EngineContract):
    def make_engine(self) -> Engine:
        return LocalEngine()


class TestInlineEngine(EngineContract):
    def make_engine(self) -> Engine:
        return InlineEngine()


class MisspeltEngine(InlineEngine):
    def resizes(self, slots: int) -> None:
        pass

    def usages(self) -> None:
        pass


def test_a_misspelt_method_fails_the_contract_of_an_engine():
    with pytest.raises(AssertionError) as caught:
        TestInlineEngine().test_every_public_name_is_a_method_of_an_engine(MisspeltEngine())
    assert "'resizes' (did you mean 'resize'?), 'usages' (did you mean 'usage'?)" in str(caught.value)
