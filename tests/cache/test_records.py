"""Records: one line as text, a table in a notebook, and nothing in them that a browser would obey."""

from html.parser import HTMLParser
from pathlib import Path

from tests.teachers.own_teachers import Ramp, prompt_cache

import forebay as fb
from forebay.records import Record

NASTY = "<script>alert('&')</script>"


class Cells(HTMLParser):
    """The tags of a page, which must close in order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_text_of_others_is_only_text():
    class Report(Record, frozen=True, kw_only=True):
        name: str
        notes: tuple[str, ...]
        failed: dict[str, object]
        inner: tuple[Record, ...] = ()

    report = Report(name=NASTY, notes=(NASTY,) * 20, failed={NASTY: NASTY, "other": [NASTY]})
    for record in (report, Report(name="", notes=(), failed={}, inner=(report,))):
        cells = Cells(record._repr_html_())
        assert "script" not in cells.tags
        assert NASTY in cells.text
        assert "and 8 more" in cells.text


def test_features_name_their_layer_and_columns(tmp_path: Path):
    root = prompt_cache(tmp_path)
    fb.build(root, None, fb.TeacherRecipe(teacher=Ramp(name="ramp")))
    features = fb.teachers.features(fb.open_cache(root), "ramp")
    assert repr(features) == f"<Features of layer 'ramp' in '{root}', 10 buckets: {', '.join(features.columns)}>"
    assert Cells(features._repr_html_()).text[0] == "Features"
