"""All chunks of a cache are read from their files in one way: the same field, the same separator."""

from pathlib import Path

import pytest
from tests.helpers.cache_files import chunk_path
from tests.sources.recipes import TextRecipe

import forebay as fb
from forebay.errors import ForebayError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The first chunk of a cache of the field `text`; the lines have another field too."""
    lines = [f'{{"text": "text {number:03d}", "other": "other {number:03d}"}}\n' for number in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), TextRecipe(), workers=0, end_chunk=0)
    return tmp_path / "cache"


def test_a_build_does_not_go_on_with_another_field(root):
    other = fb.sources.jsonl(root.parent / "a.jsonl", text="other")
    with pytest.raises(
        ForebayError, match="text='text' and cannot continue with text='other'\nhint: pass the same value again"
    ):
        fb.build(root, other, TextRecipe(), workers=0)


def test_neither_growth_nor_repair_reads_another_field(root):
    (root.parent / "b.jsonl").write_text('{"other": "more"}\n')
    other = fb.sources.jsonl(root.parent / "*.jsonl", text="other")
    with pytest.raises(ForebayError, match="cannot continue with text='other'"):
        fb.update(root, other, recipe=TextRecipe(), workers=0)
    (chunk_path(root, "test-text", 0)).unlink()
    mended = fb.repair(root, source=other, recipe=TextRecipe(), workers=0)
    assert "would have other content" in str(mended.failed)
    assert not mended.replaced


def test_documents_are_not_separated_otherwise_halfway(tmp_path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n" * 300)
    root, recipe = tmp_path / "cache", TextRecipe()
    fb.build(root, fb.sources.text(tmp_path / "a.txt", separator="\n"), recipe, workers=0, end_chunk=0)
    with pytest.raises(ForebayError, match=r"separator='\\n' and cannot continue with separator='\\n---\\n'"):
        fb.build(root, fb.sources.text(tmp_path / "a.txt", separator="\n---\n"), recipe, workers=0)
