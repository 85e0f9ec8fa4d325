"""Models of `transformers` on packed rows, by each of their attentions: no document sees another.

Flash attention needs a GPU. On a CPU, an attention of ours that is registered with `transformers` gets what flash
attention would get in every layer, and attends to each segment by itself.
"""

from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.helpers.token_caches import token_cache
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import forebay as fb
from forebay.torch import (
    Loader,
    TokenBatch,
    derive_on_device,
    document_leaks,
    transformers_inputs,
)

LENGTH, VOCABULARY = 48, 61
SEQ_LENS = torch.tensor([[20, 15, 0], [30, 7, 11]], dtype=torch.int32)
BATCH = {"tokens": torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY, "seq_lens": SEQ_LENS}


def config(family: str):
    transformers = import_module("transformers")
    if family == "llama":
        return transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4)


def model(family: str, attention: str, device: str = "cpu", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    made = import_module("transformers").AutoModelForCausalLM.from_config(config(family), attn_implementation=attention)
    return made.to(device, dtype).eval()


def logits_with(network: torch.nn.Module, inputs: dict):
    def logits(tokens: Tensor) -> Tensor:
        return network(**{**inputs, "input_ids": tokens}).logits

    return logits


def each_document_alone(network: torch.nn.Module) -> Tensor:
    """The logits of every document in a row by itself: no mask and no positions of ours are involved."""
    logits = torch.zeros(2, LENGTH, VOCABULARY)
    for row, lengths in enumerate(SEQ_LENS.tolist()):
        start = 0
        for length in [*lengths, LENGTH - sum(lengths)]:
            if length:
                alone = BATCH["tokens"][row : row + 1, start : start + length]
                logits[row, start : start + length] = network(input_ids=alone, use_cache=False).logits[0]
            start += length
    return logits


@pytest.fixture
def varlen():
    """An attention by segments, with the arguments of flash attention, as `transformers` passes them."""
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    called = []

    def attend(module, query, key, value, attention_mask, cu_seq_lens_q, max_length_q, scaling=None, **_):
        assert attention_mask is None
        called.append(max_length_q)
        key, value = (heads.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for heads in (key, value))
        flat = [heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value)]
        parts = []
        for start, stop in pairwise(cu_seq_lens_q.tolist()):
            heads = (tensor[start:stop].transpose(0, 1) for tensor in flat)
            parts.append(scaled_dot_product_attention(*heads, is_causal=True, scale=scaling).transpose(0, 1))
        return torch.cat(parts).unflatten(0, (len(query), -1)), None

    functions.register("forebay_varlen", attend)
    return called


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sdpa_with_a_mask_keeps_documents_apart(family):
    network, inputs = model(family, "sdpa"), transformers_inputs(BATCH, "sdpa")
    assert inputs["attention_mask"].shape == (2, 1, LENGTH, LENGTH)
    assert not document_leaks(logits_with(network, inputs), BATCH["tokens"], SEQ_LENS)
    with torch.no_grad():
        torch.testing.assert_close(network(**inputs).logits, each_document_alone(network), atol=1e-5, rtol=0)
        unmasked = {name: value for name, value in inputs.items() if name in ("input_ids", "use_cache")}
        assert document_leaks(logits_with(network, unmasked), BATCH["tokens"], SEQ_LENS), "the check finds leaks"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_position_ids_alone_keep_documents_apart_without_flash(family, attention):
    network, inputs = model(family, attention), transformers_inputs(BATCH, "eager")
    assert "attention_mask" not in inputs
    assert not document_leaks(logits_with(network, inputs), BATCH["tokens"], SEQ_LENS)
    with torch.no_grad():
        torch.testing.assert_close(network(**inputs).logits, each_document_alone(network), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_block_mask():
    """GPT-2 of `transformers` has no FlexAttention, and says so when it is made."""
    network, inputs = model("llama", "flex_attention"), transformers_inputs(BATCH, "flex_attention")
    whole = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=False)
    assert not document_leaks(logits_with(whole, inputs), BATCH["tokens"], SEQ_LENS)
    with torch.no_grad():
        expected = each_document_alone(model("llama", "sdpa"))
        torch.testing.assert_close(whole(**inputs).logits, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="flex_attention"):
        model("gpt2", "flex_attention")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_arguments_of_flash_attention_reach_every_layer(family, varlen):
    network, inputs = model(family, "forebay_varlen"), transformers_inputs(BATCH, "flash_attention_2")
    assert "attention_mask" not in inputs
    with torch.no_grad():
        torch.testing.assert_close(
            network(**inputs).logits, each_document_alone(model(family, "sdpa")), atol=1e-5, rtol=0
        )
    assert varlen == [30, 30]
    assert not document_leaks(logits_with(network, inputs), BATCH["tokens"], SEQ_LENS)


def test_the_segments_are_those_that_transformers_finds_in_the_positions():
    flash = import_module("transformers.modeling_flash_attention_utils")
    inputs = transformers_inputs(BATCH, "flash_attention_2")
    (starts, _), (longest, _) = flash.prepare_fa_kwargs_from_position_ids(inputs["position_ids"])
    assert torch.equal(inputs["cu_seq_lens_q"], starts)
    assert torch.equal(inputs["cu_seq_lens_k"], starts)
    assert inputs["max_length_q"] == inputs["max_length_k"] == int(longest)
    assert not flash._is_packed_sequence(inputs["position_ids"], 2), "two rows: the positions are not looked at"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flash_attention_keeps_documents_apart_on_the_gpu(family):
    pytest.importorskip("flash_attn")
    network = model(family, "flash_attention_2", "cuda", torch.bfloat16)
    tokens = BATCH["tokens"].cuda()
    inputs = transformers_inputs({**BATCH, "tokens": tokens}, "flash_attention_2")
    assert not document_leaks(logits_with(network, inputs), tokens, SEQ_LENS, tolerance=0.0)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_batches_of_a_loader_train_with_the_loss_of_single_documents(tmp_path: Path, attention, varlen):
    cache = fb.open_cache(token_cache(tmp_path, 12))
    batch = next(iter(Loader(cache, global_batch_size=4, shuffle=None, collate=TokenBatch(cache, labels="unshifted"))))
    batch["tokens"] %= VOCABULARY
    batch["labels"][batch["labels"] >= 0] %= VOCABULARY
    network = model("llama", "sdpa" if attention == "sdpa" else "forebay_varlen")
    found = network(**transformers_inputs(batch, attention), labels=batch["labels"]).loss
    alone = model("llama", "sdpa")
    losses = []
    for tokens, lengths in zip(batch["tokens"], batch["seq_lens"].tolist(), strict=True):
        for document in tokens.split([*lengths, len(tokens) - sum(lengths)])[: len(lengths)]:
            if len(document) > 1:
                logits = alone(input_ids=document[None], use_cache=False).logits[0, :-1]
                losses.append(torch.nn.functional.cross_entropy(logits, document[1:], reduction="none"))
    torch.testing.assert_close(found, torch.cat(losses).mean())
    found.backward()


def test_a_window_is_part_of_the_mask():
    seen = transformers_inputs(BATCH, "sdpa", window=4)["attention_mask"][0, 0]
    assert seen.sum(-1).max() == 4
    assert seen[19].nonzero().flatten().tolist() == [16, 17, 18, 19]


def test_unknown_attentions_and_tokens_as_they_are_stored_are_refused():
    with pytest.raises(ValueError, match="attention must be one of flex_attention, sdpa, eager, flash_attention_2"):
        transformers_inputs(BATCH, "paged")
    stored = BATCH | {"tokens": BATCH["tokens"].to(torch.uint16)}
    with pytest.raises(TypeError, match=r"call derive_on_device\(batch\) first"):
        transformers_inputs(stored, "sdpa")
    assert torch.equal(transformers_inputs(derive_on_device(stored), "sdpa")["input_ids"], BATCH["tokens"])
