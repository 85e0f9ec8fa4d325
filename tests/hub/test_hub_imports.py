"""The hub is an extra: nothing else needs it, and without it the error is the install line."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("library", ["huggingface_hub", "httpx2", "pyarrow"])
def test_a_missing_library_is_named_with_its_install_line(library):
    code = f"import sys; sys.modules[{library!r}] = None\n"
    code += "import forebay as fb\ntry: fb.sources.hub('org/set')\nexcept fb.errors.ForebayError as error: print(error)"
    said = run(code)
    assert said.startswith("reading ")
    assert "pip install 'forebay[" in said


def test_a_library_that_is_too_old_is_named_with_its_install_line():
    code = "import sys, types; old = types.ModuleType('huggingface_hub'); old.__version__ = '1.9.2'\n"
    code += "sys.modules['huggingface_hub'] = old\nimport forebay as fb\n"
    code += "try: fb.sources.hub('org/set')\nexcept fb.errors.ForebayError as error: print(error)"
    said = run(code)
    assert said.startswith("reading from the Hugging Face hub needs 'huggingface_hub>=2.4'")
    assert "pip install 'forebay[remote]'" in said


def test_other_sources_do_not_import_it():
    code = "import sys, forebay as fb; fb.sources.lines, fb.build; "
    assert run(code + "print([n for n in ('huggingface_hub', 'httpx2', 'pyarrow') if n in sys.modules])") == "[]"
