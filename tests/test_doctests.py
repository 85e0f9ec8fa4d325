"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import forebay

MODULES = [
    module.name for module in pkgutil.walk_packages(forebay.__path__, "forebay.") if "__main__" not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    module = importlib.import_module(name)
    if ">>>" in Path(str(module.__file__)).read_text(errors="replace"):  # looking for them takes longer
        assert doctest.testmod(module).failed == 0
