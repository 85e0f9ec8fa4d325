"""How few calls lie between a mapped file and the training loop: docs/architecture.md draws them."""

from pathlib import Path

import pytest
from tools.walk import frames

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.mark.usefixtures("one_thread")
def test_at_most_seven_calls_lie_between_a_mapped_file_and_a_batch(tmp_path: Path) -> None:
    calls = frames(tmp_path)
    assert len(calls) <= 7, calls
    drawing = ARCHITECTURE.read_text()
    for call in calls:
        module, function = call.split(": ")
        assert f"{module.replace('.', '/')} " in drawing, module
        assert function in drawing, function
