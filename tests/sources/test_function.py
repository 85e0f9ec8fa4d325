"""A function as a source: asked once for what is read, by any process, and never without a name."""

import subprocess
import sys

import pytest
from tests.sources import functions
from tests.sources.recipes import TextRecipe
from tests.sources.written import read_all, texts

import forebay as fb
from forebay.errors import BuildFailed, SourceChanged, SourceInvalid
from forebay.source import Failure


def test_documents_come_slice_by_slice_and_are_named_by_slice_and_place():
    source = fb.sources.function(functions.numbered, slices=6)
    seen = read_all(source)
    assert [sample.data for sample in seen] == [text for number in range(6) for text in functions.numbered(number)]
    assert seen[3].id == "tests.sources.functions:numbered/2#0"
    assert source.describe() == {
        "kind": "function", "function": "tests.sources.functions:numbered", "slices": 6, "version": "",
    }  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_is_built_and_grown_by_more_slices(tmp_path, workers):
    fb.build(tmp_path, fb.sources.function(functions.numbered, slices=9), TextRecipe(chunk_rows=5), workers=workers)
    fb.update(
        tmp_path, fb.sources.function(functions.numbered, slices=20), recipe=TextRecipe(chunk_rows=5), workers=workers
    )
    cache = fb.open_cache(tmp_path)
    stored = [bytes(cache[row]["text"]).decode() for row in range(len(cache))]
    assert stored == [text for number in range(20) for text in functions.numbered(number)]
    assert not fb.status(tmp_path).stale


def test_a_build_asks_for_every_slice_once(tmp_path):
    source, recipe = fb.sources.function(functions.numbered, slices=50), TextRecipe(chunk_rows=5)
    fb.build(tmp_path, source, recipe, workers=0, end_chunk=0)  # plans all, makes the first chunk
    functions.CALLS.clear()
    fb.build(tmp_path, source, recipe, workers=0)
    first = functions.CALLS[0]
    assert 0 < first < 5
    assert list(range(first, 50)) == functions.CALLS


def test_another_version_is_looked_at_again_and_other_documents_are_a_change(tmp_path, monkeypatch):
    fb.build(tmp_path, fb.sources.function(functions.changing, slices=2, version="1"), TextRecipe(), workers=0)
    again = fb.sources.function(functions.changing, slices=2, version="2")
    assert fb.build(tmp_path, again, TextRecipe(), workers=0).built == 0
    monkeypatch.setenv("FOREBAY_TEST_TEXT", "second")
    third = fb.sources.function(functions.changing, slices=3, version="3")
    with pytest.raises(SourceChanged, match="changing/0"):
        fb.update(tmp_path, third, recipe=TextRecipe(), workers=0)


def test_what_is_no_document_is_a_failure():
    seen = read_all(fb.sources.function(functions.mixed, slices=1))
    reasons = [one.reason if isinstance(one, Failure) else one.data for one in seen]
    assert reasons == ["fine", "null", "not-text", "not-text", "", "not-utf8", "not-text", "fine too"]
    assert seen[2].detail == "document 2: it is int, not str"
    assert seen[5].detail == "document 5: character 5 is half of a surrogate pair"


def test_a_function_that_returns_one_text_is_refused():
    with pytest.raises(SourceInvalid, match="returned str for slice 0\nhint: return an iterable"):
        read_all(fb.sources.function(functions.one_text, slices=1))


def test_a_chunk_whose_function_raises_fails_by_the_function_and_the_slice(tmp_path):
    source = fb.sources.function(functions.failing, slices=9)
    with pytest.raises(BuildFailed) as caught:
        fb.build(tmp_path, source, TextRecipe(chunk_rows=2), workers=0)
    (reason,) = caught.value.facts["failed"].values()
    assert "the function 'tests.sources.functions:failing' failed for slice 7: ValueError('no such day')" in reason
    assert len(fb.open_cache(tmp_path)) > 5


def test_what_a_function_meets_on_a_disk_or_a_network_names_it_and_may_be_tried_again():
    with pytest.raises(OSError, match="functions:unreachable' failed for slice 0: ConnectionResetError"):
        read_all(fb.sources.function(functions.unreachable, slices=1))


def test_a_cache_never_has_the_function_it_names_called(tmp_path):
    """Verbs leave the source unchecked, and what needs it says how to give it, in one line."""
    source, recipe = fb.sources.function(functions.numbered, slices=9), TextRecipe(chunk_rows=5)
    fb.build(tmp_path, source, recipe, workers=0)
    (damaged, *_) = sorted(tmp_path.glob("layers/*/000001.safetensors"))
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    functions.CALLS.clear()
    assert not fb.status(tmp_path).source_checked
    assert len(fb.verify(tmp_path, full=True).bad) == 1
    (words,) = fb.repair(tmp_path, recipe=recipe, workers=0).failed.values()
    assert "the Python function 'tests.sources.functions:numbered'" in words
    assert "source=fb.sources.function(tests.sources.functions.numbered, slices=9)" in words
    assert functions.CALLS == []
    assert len(fb.repair(tmp_path, source=source, recipe=recipe, workers=0).restored) == 1


def test_a_static_method_of_a_module_can_be_a_source():
    assert texts(fb.sources.function(functions.Books.pages, slices=2)) == ["page 0", "page 1"]


def test_what_has_no_name_to_import_is_refused():
    def local(slice_number: int) -> list[str]:
        return ["a"]

    for function, words in (
        (lambda slice_number: ["a"], "is a lambda"),
        (functions.nameless, "is a lambda"),
        (local, "inside another function"),
        (functions.Books().__str__, "cannot be imported|is not what its name imports"),
    ):
        with pytest.raises(SourceInvalid, match=words):
            fb.sources.function(function, slices=1)
    with pytest.raises(ValueError, match="slices must be a whole number of at least 1"):
        fb.sources.function(functions.numbered, slices=0)


def test_a_function_of_the_script_that_runs_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import forebay as fb\ndef pages(number):\n    return ['a']\n"
        "try:\n    fb.sources.function(pages, slices=1)\nexcept fb.errors.SourceInvalid as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "'__main__:pages' is defined in the script that runs" in run.stdout
    assert "a module that workers can import" in run.stdout
