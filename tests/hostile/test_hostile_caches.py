"""A stranger's cache: every verb gives a clear error or the right rows, in 10 s and 1 GiB, and touches nothing outside.

The corpus is made by `forebay.testing.campaign.hostile`; every digest in it is right. A port that only the cache names
listens, and so does the user's own hub: neither may be called.
"""

import pytest
from tests.hostile.conftest import Corpus

from forebay.testing.campaign.hostile import CRAFTED
from forebay.testing.campaign.syscalls import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the campaign forks and watches children as Linux does")
WORLDS = ("raw-zstd", "tokens", "images")
SEEDS = 2


@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_a_crafted_cache_is_refused_or_read_right_by_every_verb(corpus: Corpus, craft: str) -> None:
    # Another cache for every craft and seed, so that all kinds are met without running everything on each.
    first = sorted(CRAFTED).index(craft)
    found: list[str] = []
    for seed in range(SEEDS):
        found += corpus.crafted(craft, WORLDS[(first + seed) % len(WORLDS)], [str(1 + seed)])
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_many_crafted_caches_are_refused_or_read_right_by_every_verb(corpus: Corpus, craft: str, world: str) -> None:
    found = corpus.crafted(craft, world, [str(number) for number in range(10, 50)])
    assert not found, "\n".join(found)
