"""Token caches come out the same whatever happens on the way, and give every document back."""

import gzip
import json
import random
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.builders import chunk_count, chunk_digests, wait_until
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.errors import BuildFailed
from forebay.tokens import decode, load_vocabulary

FIELDS = {"tokenizer": "gpt2", "sequence_length": 64, "chunk_rows": 96}
RECIPE = fb.TokenRecipe(**FIELDS)
WORDS = "the of water pool turbine <|endoftext|> café 𝔘nicode 你好 \n\n \t x=1; it's 😀 "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts of many lengths in three files, one of them compressed."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    pieces = WORDS.split(" ")
    texts = [" ".join(chance.choices(pieces, k=1 + int(chance.expovariate(1 / 60)))) or "x" for _ in range(1500)]
    texts[17] = texts[5] = texts[1400]
    lines = [json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(lines[:600]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[600:1000]).encode()))
    (folder / "c.jsonl").write_text("".join(lines[1000:]), encoding="utf-8")
    return folder, texts


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("reference") / "cache"
    fb.build(root, fb.sources.jsonl(corpus[0]), RECIPE, workers=0)
    assert len(chunk_digests(root)) > 10
    return chunk_digests(root)


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory):
    """A cache that two workers made; who changes it takes a copy."""
    root = tmp_path_factory.mktemp("built") / "cache"
    fb.build(root, fb.sources.jsonl(corpus[0]), RECIPE, workers=2)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "mode"), [(1, "inverse"), (3, "forward")])
def test_chunks_are_the_same_for_any_number_of_workers_in_either_direction(corpus, reference, tmp_path, workers, mode):
    fb.build(tmp_path / "cache", fb.sources.jsonl(corpus[0]), RECIPE, workers=workers, mode=mode)
    assert chunk_digests(tmp_path / "cache") == reference


def test_ranges_built_by_three_builders_at_once_make_one_cache(corpus, reference, tmp_path):
    ends = [(0, 3), (4, 7), (8, 10_000)]
    builders = [start_tokens(corpus[0], tmp_path / "cache", start_chunk=a, end_chunk=b, workers=0) for a, b in ends]
    for builder in builders:
        _, err = builder.communicate(timeout=600)
        assert builder.returncode == 0, err
    assert chunk_digests(tmp_path / "cache") == reference
    assert fb.status(tmp_path / "cache").complete


@pytest.mark.slow
def test_a_build_that_is_killed_again_and_again_comes_out_the_same(corpus, reference, tmp_path):
    root = tmp_path / "cache"
    landed = []
    for aim in (1, 3, 5):
        builder = start_tokens(corpus[0], root, workers=2, pause=0.3)
        wait_until(lambda aim=aim: chunk_count(root) >= aim, what=f"the build never came to {aim} chunks")
        builder.kill()
        builder.communicate()
        landed.append(chunk_count(root))
    assert landed[0] < len(reference), "it was killed in the middle"
    fb.build(root, fb.sources.jsonl(corpus[0]), RECIPE, workers=2, lease_seconds=1.0)
    assert chunk_digests(root) == reference


@pytest.mark.slow
def test_every_document_comes_back_from_its_pieces(corpus, built):
    assert texts_of(built) == corpus[1]


@pytest.mark.slow
def test_equal_documents_are_left_out_once_whatever_the_workers_and_growth_knows_them(corpus, tmp_path):
    folder, texts = corpus
    recipe = fb.TokenRecipe(**FIELDS, deduplicate=True)
    one, two = tmp_path / "one", tmp_path / "two"
    for root, workers in [(one, 0), (two, 2)]:
        fb.build(root, fb.sources.jsonl(folder), recipe, workers=workers)
    assert chunk_digests(one) == chunk_digests(two)
    distinct = list(dict.fromkeys(texts))
    assert texts_of(one) == distinct
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"text": text}) + "\n" for text in [texts[3], "quite new", texts[1499]]))
    fb.update(one, fb.sources.jsonl(folder, more), workers=0)
    assert texts_of(one) == [*distinct, "quite new"]
    (layer,) = fb.info(one).layers
    assert layer.statistics["duplicates"] == len(texts) - len(distinct) + 2


@pytest.mark.slow
def test_growing_adds_documents_and_moves_none(corpus, reference, built, tmp_path):
    root, more = shutil.copytree(built, tmp_path / "cache"), tmp_path / "more.jsonl"
    more.write_text(json.dumps({"text": "appended later"}) + "\n")
    fb.update(root, fb.sources.jsonl(corpus[0], more), workers=1)
    grown = chunk_digests(root)
    assert {name: grown[name] for name in reference} == reference
    assert texts_of(root) == [*corpus[1], "appended later"]


@pytest.mark.slow
def test_a_chunk_rebuilt_by_repair_is_the_same_to_the_last_byte(reference, built, tmp_path):
    root = shutil.copytree(built, tmp_path / "cache")
    victim = root / sorted(reference)[3]
    damaged = bytearray(victim.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    victim.write_bytes(damaged)
    assert not fb.verify(root).sound
    fb.repair(root, workers=1)
    assert chunk_digests(root) == reference


@pytest.mark.slow
def test_bad_lines_are_listed_with_file_and_line_and_the_rest_is_made(tmp_path):
    source = tmp_path / "bad.jsonl"
    lines = [b'{"text": "fine"}', b"{broken", b'{"text": null}', b'{"text": "\xff"}', b'{"other": 1}', b'{"text": ""}',
             b'{"text": 5}', b'{"text": "also fine"}']  # fmt: skip
    source.write_bytes(b"\n".join(lines) + b"\n")
    report = fb.build(tmp_path / "cache", fb.sources.jsonl(source), RECIPE, workers=1)
    assert (report.samples, report.failures) == (8, 6)
    found = {
        (failed.sample.partition("@")[0], failed.reason) for failed in fb.status(tmp_path / "cache").failed_samples
    }
    reasons = ("bad-json", "null", "not-utf8", "no-text", "empty", "not-text")
    assert found == {("bad.jsonl", reason) for reason in reasons}
    details = {failed.reason: failed.detail for failed in fb.status(tmp_path / "cache").failed_samples}
    assert [
        details[reason].partition(":")[0] for reason in ("bad-json", "null", "not-utf8", "no-text", "empty", "not-text")
    ] == [f"line {number}" for number in range(2, 8)]
    assert texts_of(tmp_path / "cache") == ["fine", "also fine"]


def test_a_document_too_long_stops_its_chunk_with_a_sentence(tmp_path):
    source = tmp_path / "long.jsonl"
    source.write_text(json.dumps({"text": "word " * 500}) + "\n")
    recipe = fb.TokenRecipe(**FIELDS, long="error")
    with pytest.raises(fb.errors.ForebayError, match=r"document 'long\.jsonl@0' has \d+ tokens; rows hold 64"):
        fb.build(tmp_path / "cache", fb.sources.jsonl(source), recipe, workers=1)


def texts_of(root: Path) -> list[str]:
    """Every document of a cache, put together from its pieces, in the order of the source."""
    cache, vocabulary = fb.open_cache(root), load_vocabulary("gpt2")
    pieces = defaultdict(list)
    rows = cache.read(np.arange(len(cache)))
    for row, name in enumerate(cache.row_ids(np.arange(len(cache)))):
        begin = 0
        for length, (document, offset) in zip(
            rows["seq_lens"][row].tolist(), rows["documents"][row].tolist(), strict=True
        ):
            pieces[name.chunk, document].append((offset, rows["tokens"][row, begin : begin + length]))
            begin += length
    texts = []
    for key in sorted(pieces):
        tokens = np.concatenate([ids for _, ids in sorted(pieces[key], key=lambda piece: piece[0])])
        assert np.flatnonzero(tokens == 50256).tolist() == [len(tokens) - 1]
        texts.append(decode(vocabulary, tokens[:-1]))
    return texts


def start_tokens(source: Path, root: Path, pause: float = 0.0, **build):
    """A builder of tokens that runs by itself; it takes a moment after every sign of life, so that it can be killed."""
    script = (
        "import sys, json, time, forebay as fb\n"
        "source, root, fields, build, pause = json.loads(sys.argv[1])\n"
        "fb.build(root, fb.sources.jsonl(source), fb.TokenRecipe(**fields), lease_seconds=1.0,\n"
        "         on_progress=lambda progress: time.sleep(pause), **build)\n"
    )
    return PythonProcess("-c", script, json.dumps([str(source), str(root), FIELDS, build, pause]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_tokenizer_that_changes_while_chunks_are_made_is_in_none_of_them(corpus, reference, tmp_path, workers):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(load_vocabulary("gpt2").json)

    document = json.loads(load_vocabulary("gpt2").json)
    words = document["model"]["vocab"]
    words["the"], words["of"] = words["of"], words["the"]
    swapped = json.dumps(document)

    def swap_two_words(progress):
        if progress.phase != "planning" and progress.done >= 2:
            path.write_text(swapped)

    recipe = fb.TokenRecipe(**FIELDS | {"tokenizer": str(path)})
    with pytest.raises(BuildFailed, match=r"differs in: tokenizer\.json"):
        fb.build(tmp_path / "cache", fb.sources.jsonl(corpus[0]), recipe, workers=workers, on_progress=swap_two_words)
    made = chunk_digests(tmp_path / "cache")
    assert 2 <= len(made) < len(reference)
    assert made.items() <= reference.items()
