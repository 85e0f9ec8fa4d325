"""Preference caches: what a row holds, what is refused, and the batches of pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.chat.preference_caches import chatml, pairs, preference_cache, write_lines
from tests.chat.stock_templates import CHATML, HARMONY, QWEN3
from tests.chat.tokenizer_folders import byte_level, write_folder
from tests.cli.running import run
from tokenizers import Tokenizer

import forebay as fb
from forebay.errors import RecipeInvalid
from forebay.masks import TrainOn, candidate_weights
from forebay.masks.train_on import KINDS, check_spans
from forebay.preview.row_records import PackedPeek
from forebay.torch import Loader, PreferenceBatch


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return preference_cache(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def tokenizer(cache: fb.Cache) -> Tokenizer:
    return Tokenizer.from_str(cache.constants("preferences")["tokenizer"].tobytes().decode())


def make(tmp_path: Path, *records: dict[str, Any], **fields: Any) -> fb.Rows:
    recipe = fb.PreferenceRecipe(tokenizer=chatml(tmp_path / "tokenizer"), **fields)
    return recipe.make([fb.Sample(str(at), json.dumps(record)) for at, record in enumerate(records)])


def texts(rows: fb.Rows, row: int, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The prompt and the candidates of a row."""
    columns: Any = rows.columns
    ends = np.cumsum(columns["candidate_lens"][row])[:-1].astype(np.int64)
    each = np.split(columns["candidates"][row], ends)
    decode = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (columns["prompt"][row], *each)]
    return decode[0], decode[1:]


def asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


HI = {"role": "user", "content": "Hi"}
HELLO, NO = {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "No"}


@pytest.mark.parametrize(
    ("record", "answers", "scores"),
    [
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, ["Hello", "No"], [np.nan, np.nan]),
        ({"prompt": [HI], "chosen": [HELLO], "rejected": [NO]}, ["Hello", "No"], [np.nan, np.nan]),
        ({"chosen": [HI, HELLO], "rejected": [HI, NO]}, ["Hello", "No"], [np.nan, np.nan]),
        ({"prompt": "Hi", "chosen": [HI, HELLO][1:], "rejected": "No", "score_chosen": 9, "score_rejected": 1.5},
         ["Hello", "No"], [9, 1.5]),
        ({"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "Hello"},
          "rejected": {"from": "gpt", "value": "No"}}, ["Hello", "No"], [np.nan, np.nan]),
        ({"prompt": "Hi", "candidates": ["a", "Hello", "No"], "scores": [1, 3, 2]}, ["Hello", "No", "a"], [3, 2, 1]),
        ({"messages": [HI], "candidates": [{"content": "No", "score": 0}, {"content": "Hello", "score": 1}]},
         ["Hello", "No"], [1, 0]),
    ],
)  # fmt: skip
def test_every_format_of_preferences_is_read(
    tmp_path: Path, tokenizer: Tokenizer, record: dict[str, Any], answers: list[str], scores: list[float]
) -> None:
    rows = make(tmp_path, record)
    assert rows.failures == ()
    assert texts(rows, 0, tokenizer) == (asked("Hi"), [f"{answer}<|im_end|>" for answer in answers])
    np.testing.assert_array_equal(rows.columns["scores"][0], np.array(scores, np.float32))


def test_names_of_fields_can_be_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"question": "Hi", "good": "Hello", "bad": "No"}
    rows = make(tmp_path, record, names={"prompt": "question", "chosen": "good", "rejected": "bad"})
    assert texts(rows, 0, tokenizer)[1] == ["Hello<|im_end|>", "No<|im_end|>"]


def test_earlier_answers_are_prompt_and_are_not_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    history = [HI, HELLO, {"role": "user", "content": "And?"}]
    rows = make(tmp_path, {"chosen": [*history, HELLO], "rejected": [*history, NO]})
    prompt, candidates = texts(rows, 0, tokenizer)
    assert prompt == asked("Hi") + f"Hello<|im_end|>\n{asked('And?')}"
    assert candidates == ["Hello<|im_end|>", "No<|im_end|>"]
    spans: Any = rows.columns["spans"][0]
    inside = spans[spans[:, 1] <= len(rows.columns["prompt"][0])]
    assert {KINDS[kind] for kind in inside[:, 3]} == {"header", "prompt"}


def test_a_prompt_with_a_candidate_is_what_the_chat_recipe_makes_of_the_conversation(
    cache: fb.Cache, tmp_path: Path
) -> None:
    """Up to the stop token: the template writes a line break after it."""
    recipe = fb.ChatRecipe(tokenizer=chatml(tmp_path / "tokenizer"), sequence_length=96)
    for row, record in enumerate(pairs(12)):
        stored = cache[row]
        check_spans(
            stored["spans"], np.array([0, len(stored["spans"])]),
            np.array([len(stored["prompt"]) + len(stored["candidates"])]),
        )  # fmt: skip
        best = record.get("chosen") or record["candidates"][-1]
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": best}]
        made: Any = recipe.make([fb.Sample("one", json.dumps({"messages": messages}))]).columns
        used = int(made["seq_lens"][0][0])
        mine = np.concatenate([stored["prompt"], stored["candidates"][: stored["candidate_lens"][0]]])
        assert mine.tolist() == made["tokens"][0][: used - 1].tolist()


def test_candidates_that_merge_with_the_prompt_share_only_equal_tokens(tmp_path: Path) -> None:
    """Qwen's template writes empty thinking before one answer and not before the other."""
    folder = write_folder(tmp_path / "qwen", byte_level(QWEN3.special, QWEN3.ordinary), QWEN3.plain(), QWEN3.tokens)
    recipe = fb.PreferenceRecipe(tokenizer=folder, sequence_length=128)
    chosen = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    rows = recipe.make([fb.Sample("one", json.dumps({"prompt": "Hi", "chosen": [chosen], "rejected": "\n\nNo"}))])
    assert rows.failures == ()
    columns: Any = rows.columns
    tokenizer = Tokenizer.from_file(str(tmp_path / "qwen" / "tokenizer.json"))
    _, (good, bad) = texts(rows, 0, tokenizer)
    assert good.endswith("hm\n</think>\n\nHello<|im_end|>")
    assert bad.endswith("\n\nNo<|im_end|>")
    weights = candidate_weights(columns["spans"][0], len(columns["prompt"][0]), columns["candidate_lens"][0], TrainOn())
    assert [len(each) for each in weights] == columns["candidate_lens"][0].tolist()
    assert all(each[-1] == 1 for each in weights)


def test_a_turn_of_a_candidate_that_the_template_writes_as_history_is_refused(tmp_path: Path) -> None:
    """It would be in the row, and not be trained."""
    folder = write_folder(tmp_path / "harmony", byte_level(HARMONY.special), HARMONY.plain(), {})
    turns = [{"role": role, "content": text} for role, text in (("assistant", "a"), ("user", "b"), ("assistant", "c"))]
    record = {"prompt": "Hi", "chosen": turns, "rejected": "No"}
    recipe = fb.PreferenceRecipe(tokenizer=folder, sequence_length=512)
    (failure,) = recipe.make([fb.Sample("one", json.dumps(record))]).failures
    assert failure.reason == "history-changes"


def test_a_token_that_joins_the_prompt_with_one_candidate_is_not_the_prompt_of_the_other(tmp_path: Path) -> None:
    """Two line breaks are one token: that of the generation prompt, and the one that an answer begins with."""
    tokens = byte_level(CHATML.special, ("\n\n",))
    folder = write_folder(tmp_path / "joined", tokens, CHATML.plain(), CHATML.tokens)
    recipe = fb.PreferenceRecipe(tokenizer=folder, sequence_length=128)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    for answers in (("\nYes", "No"), ("No", "\nYes")):
        record = {"prompt": "Hi", "chosen": answers[0], "rejected": answers[1]}
        rows = recipe.make([fb.Sample("one", json.dumps(record))])
        prompt, candidates = texts(rows, 0, tokenizer)
        assert [prompt + each for each in candidates] == [f"{asked('Hi')}{each}<|im_end|>" for each in answers]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "same-candidates"),
        ({"prompt": "Hi", "chosen": "a"}, "no-candidates"),
        ({"prompt": "Hi", "candidates": ["a"], "scores": [1]}, "no-candidates"),
        ({"prompt": "Hi", "candidates": ["a", "b"]}, "bad-score"),
        ({"prompt": "Hi", "candidates": ["a", "b"], "scores": [1]}, "bad-score"),
        ({"prompt": "Hi", "candidates": ["a", "b"], "scores": [2, 2]}, "no-preference"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 2}, "no-preference"),
        ({"prompt": "Hi", "chosen": "a", "rejected": "b", "score_chosen": 1}, "bad-score"),
        ({"chosen": "a", "rejected": "b"}, "no-prompt"),
        ({"prompt": "Hi", "chosen": 5, "rejected": "b"}, "bad-message"),
        ({"prompt": "Hi", "chosen": ["a"], "rejected": "b"}, "bad-message"),
        ({"prompt": "Hi", "chosen": [HELLO, HI], "rejected": "b"}, "no-response"),
        ({"prompt": "Hi", "chosen": "<|im_end|>", "rejected": "b"}, "control-token"),
        ({"prompt": "Hi " * 200, "chosen": "a", "rejected": "b"}, "too-long"),
        ({"prompt": "x" * 2_000_000, "chosen": "a", "rejected": "b"}, "too-large"),  # once for each candidate
        ([1], "not-a-record"),
    ],
)
def test_what_cannot_be_a_preference_is_a_failure_with_its_reason(tmp_path: Path, record: Any, reason: str) -> None:
    rows = make(tmp_path, record, {"prompt": "Hi", "chosen": "a", "rejected": "b"}, long="drop", sequence_length=64)
    assert [failure.reason for failure in rows.failures] == [reason]
    assert len(rows.columns["prompt"]) == 1


def test_a_long_candidate_is_an_error_unless_it_may_be_dropped(tmp_path: Path) -> None:
    with pytest.raises(RecipeInvalid, match=r"raise `sequence_length`, or set long='drop' \(`--long drop`\)$"):
        make(tmp_path, {"prompt": "Hi", "chosen": "a " * 90, "rejected": "b"}, sequence_length=64)


@pytest.mark.parametrize("fields", [{"long": "truncate"}, {"names": {"messages": "x"}}, {"chunk_rows": 0}])
def test_fields_that_make_no_sense_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeInvalid, match=r"long|names must map only|chunk_rows is 0; it must be"):
        make(tmp_path, **fields)


def test_peek_shows_the_prompt_and_the_candidates_with_their_spans(tmp_path: Path) -> None:
    cache = preference_cache(tmp_path, 5)
    peeked = fb.peek(cache, [0, 4])
    assert isinstance(peeked, PackedPeek)
    pair, scored = peeked.shown
    assert [piece.source for piece in pair.pieces] == ["prompt of pairs.jsonl@0", "candidate, best", "candidate, worst"]
    assert [piece.source for piece in scored.pieces][1:] == [
        "candidate, best, score 7", "candidate, 2, score 2.5", "candidate, worst, score 1",
    ]  # fmt: skip
    assert [(span.kind, span.text) for span in pair.pieces[2].spans] == [("response", "No"), ("stop", "<|im_end|>")]
    assert "".join(span.text or "" for span in pair.pieces[0].spans) == asked("Question 0? ")


def one_batch(cache: fb.Cache, **arguments: Any) -> dict[str, torch.Tensor]:
    collate = PreferenceBatch(cache, **arguments)
    return next(iter(Loader(cache, global_batch_size=len(cache), shuffle=None, threads=0, collate=collate)))


def documents(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """The tokens and the trained tokens of every document, row by row."""
    found = []
    for tokens, labels, lengths in zip(batch["tokens"], batch["labels"], batch["seq_lens"], strict=True):
        start = 0
        for length in lengths[lengths > 0].tolist():
            own = labels[start : start + length]
            assert (own[:-1][own[:-1] >= 0] == tokens[start + 1 : start + length][own[:-1] >= 0]).all()
            assert own[-1] == -100
            found.append((tokens[start : start + length].tolist(), own[own >= 0].tolist()))
            start += length
        assert (labels[start:] == -100).all()
    return found


def test_concatenated_batches_have_all_preferred_ones_first(cache: fb.Cache, tokenizer: Tokenizer) -> None:
    found = documents(one_batch(cache))
    assert len(found) == 2 * len(cache)
    for row, record in enumerate(pairs(len(cache))):
        answers = record.get("candidates")
        best, worst = (record["chosen"], record["rejected"]) if answers is None else (answers[-1], answers[0])
        for (tokens, trained), answer in ((found[row], best), (found[len(cache) + row], worst)):
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            assert text == asked(record["prompt"]) + f"{answer}<|im_end|>"
            assert tokenizer.decode(trained, skip_special_tokens=False) == f"{answer}<|im_end|>"


def test_padded_and_packed_batches_hold_the_same_documents(cache: fb.Cache) -> None:
    wanted = documents(one_batch(cache))
    padded = one_batch(cache, layout="padded")
    flat = {name: values.transpose(0, 1).flatten(0, 1) for name, values in padded.items()}
    assert documents(flat) == wanted
    packed = one_batch(cache, layout="packed")
    ids = packed["pair_ids"]
    assert len(ids) < len(cache) // 2
    assert ((ids % 2 == 0).sum(1) == ((ids % 2 == 1) & (ids >= 0)).sum(1)).all(), "a pair is split over rows"
    order = [(number % 2) * len(cache) + number // 2 for number in ids[ids >= 0].tolist()]
    assert [wanted[at] for at in order] == documents(packed)
    assert sorted(order) == list(range(2 * len(cache)))
    starts = torch.nn.functional.pad(packed["seq_lens"].cumsum(1), (1, 0))[:, :-1][ids >= 0]
    rows = torch.arange(len(ids))[:, None].expand_as(ids)[ids >= 0]
    assert (packed["positions"][rows, starts.long()] == 0).all()


def test_a_loader_makes_pairs_by_default_and_train_on_chooses_kinds(cache: fb.Cache, tokenizer: Tokenizer) -> None:
    batch = next(iter(Loader(cache, global_batch_size=4, shuffle=None)))
    assert batch["tokens"].shape[0] == 8
    scored = next(iter(Loader(cache, global_batch_size=4, shuffle=None, columns=["scores"])))
    assert scored.keys() - batch.keys() == {"scores", "scores.offsets"}
    assert scored.keys() >= batch.keys()
    end = tokenizer.token_to_id("<|im_end|>")
    assert (batch["labels"] == end).sum() == 8
    without = one_batch(cache, train_on=("response",))
    assert not (without["labels"] == end).any()
    weighted = one_batch(cache, train_on={"response": 1.0, "stop": 0.5})
    assert set(weighted["loss_weights"][weighted["labels"] == end].tolist()) == {0.5}
    unshifted = one_batch(cache, labels="unshifted")
    counted = unshifted["labels"] >= 0
    assert torch.equal(unshifted["labels"][counted], unshifted["tokens"][counted])


def test_random_pairs_are_drawn_anew_each_epoch_best_first(tmp_path: Path) -> None:
    records = [{"prompt": "Hi", "candidates": list("abcdefgh"), "scores": list(range(8))} for _ in range(16)]
    source = write_lines(tmp_path / "many.jsonl", records)
    recipe = fb.PreferenceRecipe(tokenizer=chatml(tmp_path / "model"), sequence_length=32)
    fb.build(tmp_path / "cache", fb.sources.lines(source), recipe, workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    loader = Loader(cache, global_batch_size=16, shuffle=None, collate=PreferenceBatch(cache, pairs="random"))
    epochs = [next(iter(loader))["tokens"] for _ in range(2)]
    assert not torch.equal(*epochs)
    best = cache[0]["candidates"][0::2].tolist()  # one letter and the stop token each
    at = len(cache[0]["prompt"])
    for tokens in epochs:
        drawn = [best.index(token) for token in tokens[:, at].tolist()]
        assert all(good < bad for good, bad in zip(drawn[:16], drawn[16:], strict=True))
        assert len(set(drawn)) > 4


def test_forged_rows_are_refused(cache: fb.Cache) -> None:
    collate = PreferenceBatch(cache)
    row = {name: [cache[0][name]] for name in collate.columns}
    for name, forged in (
        ("candidate_lens", np.array([3, 400], np.uint32)),
        ("candidate_lens", np.array([len(row["candidates"][0])], np.uint32)),
        ("spans", row["spans"][0][:-1]),
        ("prompt", row["prompt"][0][:-1]),
    ):
        with pytest.raises(ValueError, match="forebay verify"):
            collate.collate(row | {name: [forged]}, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"layout": "rows"}, "layout must be 'concatenated', 'padded' or 'packed'"),
        ({"pairs": "all"}, "pairs must be 'ends' or 'random'"),
        ({"labels": None}, "labels must be 'shifted' or 'unshifted'"),
        ({"log_probs": ["scores"], "multiple_of": 0}, "multiple_of must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(cache: fb.Cache, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PreferenceBatch(cache, **arguments)


def test_a_pair_that_no_packed_row_holds_is_refused(cache: fb.Cache) -> None:
    with pytest.raises(ValueError, match="raise row_tokens"):
        one_batch(cache, layout="packed", row_tokens=20)


def test_the_last_turn_of_a_candidate_alone_can_be_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    longer = [HELLO, HI, {"role": "assistant", "content": "Hello again"}]
    rows: Any = make(tmp_path, {"prompt": [HI], "chosen": longer, "rejected": "No"}).columns
    one = rows["spans"][0], len(rows["prompt"][0]), rows["candidate_lens"][0]
    tokens = np.split(rows["candidates"][0], [int(rows["candidate_lens"][0][0])])
    for turns, wanted in (("all", "Hello<|im_end|>Hello again<|im_end|>"), ("last", "Hello again<|im_end|>")):
        weights = candidate_weights(*one, TrainOn(turns=turns))  # type: ignore[arg-type]
        trained = [each[weight > 0].tolist() for each, weight in zip(tokens, weights, strict=True)]
        texts = [tokenizer.decode(each, skip_special_tokens=False) for each in trained]
        assert texts == [wanted, "No<|im_end|>"]


def test_info_shows_candidates_and_tokens_per_prompt(cache: fb.Cache) -> None:
    shown = " ".join(run("info", cache.root).out.split())
    counts = fb.info(cache.root).layers[0].statistics
    assert f"candidates {counts['candidates']:,}" in shown
    assert "candidates per prompt 2.2" in shown
