"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import forebay

MODULES = [
    module.name for module in pkgutil.walk_packages(forebay.__path__, "forebay.") if "__main__" not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
