"""Pictures and pages are written to new names, or over earlier ones of their kind."""

from pathlib import Path

import pytest

from forebay.errors import ForebayError
from forebay.preview.pictures import HTML, PNG, check_output


def test_a_new_name_and_an_earlier_picture_are_written(tmp_path: Path) -> None:
    check_output(str(tmp_path / "new.png"), PNG)
    (tmp_path / "old.png").write_bytes(PNG + b"\r\n")
    check_output(str(tmp_path / "old.png"), PNG)


@pytest.mark.parametrize("kind", [PNG, HTML])
def test_a_file_of_another_kind_a_link_and_a_folder_are_not(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    (tmp_path / "page").write_bytes(kind)
    (tmp_path / "link").symlink_to(tmp_path / "page")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    for name in ("data.jsonl", "link", "dangling", "folder"):
        with pytest.raises(ForebayError, match="is not overwritten\nhint: name another file"):
            check_output(str(tmp_path / name), kind)
