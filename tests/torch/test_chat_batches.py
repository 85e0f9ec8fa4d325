"""Batches of chat caches: labels by kind and turn, weights, isolation, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.chat.stock_templates import QWEN3
from tests.chat.tokenizer_folders import byte_level, write_folder
from tests.helpers.byte_tokens import ByteTokens
from tokenizers import Tokenizer
from torch import Tensor, nn

import forebay as fb
from forebay.masks import TrainOn
from forebay.torch import CacheDataset, Loader, PackedSelfAttention, Ranks, TokenBatch, document_leaks

ANSWERS = [("one", "two three"), ("Hello.", "I am a small model")]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    """Conversations of two turns, the last with thinking; the template writes thinking in every turn it has it."""
    root = tmp_path_factory.mktemp("chat")
    template = QWEN3.plain().replace("{% if loop.index0 > ns.last and (loop.last or thought) %}", "{% if thought %}")
    tokenizer = byte_level(QWEN3.special, QWEN3.ordinary)
    folder = write_folder(root / "model", tokenizer, template, QWEN3.tokens)
    lines = []
    for number in range(24):
        first, last = ANSWERS[number % 2]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": last, "reasoning_content": "hm"},
        ]
        lines.append(json.dumps({"messages": messages}))
    (root / "chats.jsonl").write_text("\n".join(lines))
    recipe = fb.ChatRecipe(tokenizer=folder, sequence_length=160, chunk_rows=4)
    fb.build(root / "cache", fb.sources.lines(root / "chats.jsonl"), recipe, workers=0)
    return fb.open_cache(root / "cache")


@pytest.fixture(scope="module")
def tokenizer(chat: fb.Cache) -> Tokenizer:
    return Tokenizer.from_str(chat.constants("chat")["tokenizer"].tobytes().decode())


def trained(batch: dict[str, Tensor], tokenizer: Tokenizer) -> list[str]:
    """The text that the loss counts, one per document."""
    found = []
    for labels, tokens, lengths in zip(batch["labels"], batch["tokens"], batch["seq_lens"], strict=True):
        start = 0
        for length in lengths[lengths > 0].tolist():
            counted = labels[start : start + length]
            assert (counted[:-1][counted[:-1] >= 0] == tokens[start + 1 : start + length][counted[:-1] >= 0]).all()
            found.append(tokenizer.decode(counted[counted >= 0].tolist(), skip_special_tokens=False))
            start += length
        assert (labels[start:] == -100).all()
    return found


def one_batch(chat: fb.Cache, **arguments: Any) -> dict[str, Tensor]:
    collate = TokenBatch(chat, **arguments)
    return next(iter(Loader(chat, global_batch_size=len(chat), shuffle=None, threads=0, collate=collate)))


END = "<|im_end|>"
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("train_on", "texts"),
    [
        (None, [f"{one}{END}{THOUGHT}{two}{END}" for one, two in ANSWERS]),
        (("response", "stop"), [f"{one}{END}{two}{END}" for one, two in ANSWERS]),
        (("response",), [f"{one}{two}" for one, two in ANSWERS]),
        (TrainOn.of(("response", "stop"), turns="last"), [f"{two}{END}" for _, two in ANSWERS]),
        (TrainOn(turns="last"), [f"{THOUGHT}{two}{END}" for _, two in ANSWERS]),
        ({"response": 1.0, "stop": 0.5}, [f"{one}{END}{two}{END}" for one, two in ANSWERS]),
    ],
)
def test_the_loss_counts_the_tokens_that_train_on_names(
    chat: fb.Cache, tokenizer: Tokenizer, train_on: Any, texts: list[str]
) -> None:
    found = trained(one_batch(chat, train_on=train_on), tokenizer)
    assert len(found) == 24
    assert sorted(set(found)) == sorted(texts)


def test_unshifted_labels_are_the_trained_tokens_themselves(chat: fb.Cache) -> None:
    shifted, unshifted = (one_batch(chat, train_on=("response",), labels=style) for style in ("shifted", "unshifted"))
    assert torch.equal(shifted["labels"][:, :-1], unshifted["labels"][:, 1:])
    counted = unshifted["labels"] >= 0
    assert torch.equal(unshifted["labels"][counted], unshifted["tokens"][counted])


def test_weights_come_with_the_labels_that_they_weigh(chat: fb.Cache, tokenizer: Tokenizer) -> None:
    batch = one_batch(chat, train_on={"response": 1.0, "stop": 0.25, "thinking": 0.0})
    end = tokenizer.token_to_id(END)
    weights, labels = batch["loss_weights"], batch["labels"]
    assert weights.shape == labels.shape
    assert (weights[labels == -100] == 0).all()
    assert (weights[labels == end] == 0.25).all()
    assert (weights[(labels >= 0) & (labels != end)] == 1).all()
    assert "loss_weights" not in one_batch(chat, train_on=("response", "stop"))


def test_a_place_without_a_label_has_no_weight(chat: fb.Cache) -> None:
    """The last token of a conversation has no label, also where the token behind it, of the next one, is trained."""
    batch = next(
        iter(
            Loader(
                chat, global_batch_size=len(chat), collate=TokenBatch(chat, train_on={"header": 0.5, "response": 1.0})
            )
        )
    )
    assert (chat.read([0])["seq_lens"].lengths > 1).all()  # type: ignore[union-attr]
    assert (batch["loss_weights"] == 0.5).any()
    assert not batch["loss_weights"][batch["labels"] == -100].any()


def test_rows_that_only_fill_a_batch_train_nothing(chat: fb.Cache) -> None:
    size = 3 * (len(chat) // 3)  # leaves 2 rows for 3 ranks
    loader = Loader(chat, global_batch_size=size, shuffle=None, drop_last=False, ranks=Ranks(2, 3))
    _, batch = loader
    empty = batch["row_weight"] == 0
    assert empty.any()
    assert (batch["labels"][empty] == -100).all()


def test_conversations_of_a_row_do_not_see_each_other(chat: fb.Cache, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    batch = one_batch(chat)
    tokens, seq_lens = batch["tokens"][:3], batch["seq_lens"][:3]
    assert (seq_lens > 0).sum() > 3
    embedding, attention = nn.Embedding(tokenizer.get_vocab_size(), 16), PackedSelfAttention(16, 2, backend="dense")
    assert document_leaks(lambda ids: attention(embedding(ids), seq_lens), tokens, seq_lens) == []


@pytest.mark.parametrize(
    ("train_on", "error", "said"),
    [
        ("response", TypeError, r"pass a list of kinds: \['response'\]"),
        (("answer",), ValueError, "each kind of train_on must be 'prompt', 'response'"),
        ((), ValueError, "nothing to train on"),
        ({"response": -1.0}, ValueError, "must be finite and at least 0"),
        ({"response": float("nan")}, ValueError, "must be finite|nothing to train on"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(chat: fb.Cache, train_on: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        Loader(chat, global_batch_size=2, collate=TokenBatch(chat, train_on=train_on))


def test_a_cache_without_spans_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\n" * 200)
    fb.build(tmp_path / "plain", fb.sources.lines(tmp_path / "a.txt"), ByteTokens(), workers=0)
    with pytest.raises(ValueError, match=r"has no spans, .* build it with `forebay build chat`"):
        Loader(
            fb.open_cache(tmp_path / "plain"),
            global_batch_size=2,
            collate=TokenBatch(fb.open_cache(tmp_path / "plain"), train_on=("response",)),
        )


def test_spans_come_beside_labels_if_they_are_named(chat: fb.Cache) -> None:
    stored = chat.read(np.arange(len(chat)), ["spans", "last_turn"])
    columns = ["last_turn", "spans", "documents"]
    batch = next(iter(Loader(chat, global_batch_size=len(chat), shuffle=None, columns=columns)))
    assert {"labels", "documents"} <= batch.keys()
    for name in ("spans", "last_turn"):
        assert batch[name].tolist() == stored[name].values.tolist()  # type: ignore[union-attr]
        assert CacheDataset(chat, columns=["spans", "last_turn"])[0][name].tolist() == chat[0][name].tolist()
    assert "spans" not in one_batch(chat)
