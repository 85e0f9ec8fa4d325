"""The raw recipe keeps bytes, and says so to a source of anything else."""

import pytest

import forebay as fb
from forebay.errors import RecipeInvalid
from forebay.source import Annotated, Sample


@pytest.mark.parametrize("data", [Annotated(b"pixels", {}), "text"])
def test_a_sample_that_is_not_bytes_is_refused_by_name(data: object) -> None:
    with pytest.raises(
        RecipeInvalid, match=r"keeps bytes, and sample 'a.png' of its source is of type (Annotated|str)\nhint:"
    ):
        fb.RawRecipe().make([Sample("a.png", data)])
