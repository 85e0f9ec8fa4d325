"""A stranger's cache: every verb gives a clear error or the right rows, in 10 s and 1 GiB, and touches nothing outside.

The corpus is made by `tests.campaign.hostile`; every digest in it is right. A port that only the cache names
listens, and so does the user's own hub: neither may be called.
"""

import pytest
from tests.campaign.hostile import CRAFTED
from tests.campaign.syscalls import SUPPORTED
from tests.hostile.conftest import Corpus

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the campaign forks and watches children as Linux does")
WORLDS = ("raw-zstd", "tokens", "images", "chat", "preferences")
FORGED = ("raw-none", "raw-lz4", "raw-zstd", "tokens", "images")
BY_URL = ("chunk", "generation")  # crafts that every run meets in a bucket, where each takes seconds
OF_CHAT = ("templates",)  # crafts that change only caches with a chat template


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_a_crafted_cache_is_refused_or_read_right_by_verbs(corpus: Corpus, craft: str, every: int) -> None:
    # Another cache and another quarter of the verbs for every craft, so that each kind and each verb meets some.
    number = sorted(CRAFTED).index(craft)
    world = "chat" if craft in OF_CHAT else WORLDS[number % len(WORLDS)]
    found = corpus.crafted(craft, world, ["1"], part=[number % every, None, every])
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "craft", [each if each in BY_URL else pytest.param(each, marks=pytest.mark.long) for each in sorted(CRAFTED)]
)
def test_a_crafted_cache_that_is_named_by_a_url_is_refused_or_read_right(corpus: Corpus, craft: str) -> None:
    pytest.importorskip("obstore")
    world = "chat" if craft in OF_CHAT else WORLDS[(sorted(CRAFTED).index(craft) + 1) % len(WORLDS)]
    found = corpus.crafted(craft, world, ["1"], how="url")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_a_crafted_chat_cache_is_packed_again_or_refused(corpus: Corpus, craft: str) -> None:
    found = corpus.crafted(craft, "chat", ["1"], how="repack")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("count", [25, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("world", FORGED)
def test_forged_chunks_are_read_or_refused(corpus: Corpus, world: str, count: int) -> None:
    found = corpus.crafted("chunk", world, [str(seed) for seed in range(count)], how="read")
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_many_crafted_caches_are_refused_or_read_right_by_every_verb(corpus: Corpus, craft: str, world: str) -> None:
    found = corpus.crafted(craft, world, ["2", "3"])
    if world == "chat":
        found += corpus.crafted(craft, world, ["2"], how="repack")
    assert not found, "\n".join(found)
