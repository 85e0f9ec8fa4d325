"""Hostile sources and hubs: a clear error or the right rows, in 10 s and 1 GiB, with nothing outside touched."""

import pytest
from tests.campaign.syscalls import SUPPORTED
from tests.hostile.answers import ANSWERS
from tests.hostile.conftest import Corpus
from tests.hostile.inputs import INPUTS

LONG = pytest.mark.long
SLOW = (
    *("line in .bz2", "line in .xz"),  # bounded where "line in .gz" is
    *(
        "line of runs in .gz",
        "line of other letters in .gz",
        "parquet of short words",
        "parquet in four bytes",
        "parquet page in four bytes",
        "parquet page in two bytes",
        "parquet page of long words",
    ),  # as "text in four bytes"
    *(
        "parquet of the longest texts",
        "text of one word",
        "text of spaces",
        "text of long words",
    ),  # as "parquet of one word"
)
PATIENT = ("a terabyte", "readme is deep", "readme of aliases", "redirect to a file", "shard is noise")  # with pauses
pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the campaign forks and watches children as Linux does")


@pytest.mark.parametrize("name", [pytest.param(each, marks=LONG) if each in SLOW else each for each in sorted(INPUTS)])
def test_a_hostile_input_is_refused_or_read_within_bounds(corpus: Corpus, name: str) -> None:
    found = corpus.input(name)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in PATIENT else each for each in sorted(ANSWERS)]
)
def test_a_hub_that_lies_is_refused_within_bounds(corpus: Corpus, name: str) -> None:
    found = corpus.answer(name)
    assert not found, "\n".join(found)
