"""Log-probs of language models as layers: equal to forwards of one document, resumable, and never 0 where absent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.chat.preference_caches import VOCABULARY, chat_cache, gpt2, llama, preference_cache

import forebay as fb
from forebay.chat import write_dpo
from forebay.errors import ModelUnusable, RecipeInvalid
from forebay.teachers import LogProbs, TeacherRecipe
from forebay.torch import Loader, PreferenceBatch, TokenBatch, log_probs
from forebay.torch.distill import forward_kl_top_k
from forebay.torch.log_probs import padded_choices, spread_log_probs

K = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "llama")
    llama(7).save_pretrained(folder / "other")
    gpt2().save_pretrained(folder / "gpt2")
    peaked().save_pretrained(folder / "peaked")
    return folder


def peaked() -> Any:
    """A model with confident and unsure places."""
    model = llama(3)
    model.lm_head.weight.data *= 40
    return model


def recipes(models: Path, over: Any, **fields: Any) -> dict[str, TeacherRecipe]:
    llama, gpt2 = str(models / "llama"), str(models / "gpt2")
    return {
        "ref": TeacherRecipe(teacher=LogProbs(model=llama, over=over), batch_size=3, **fields),
        "best": TeacherRecipe(teacher=LogProbs(model=gpt2, over=over, top_k=K, name="best"), batch_size=3, **fields),
    }


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory, models: Path) -> fb.Cache:
    cache = chat_cache(tmp_path_factory.mktemp("chat"), 16)
    fb.build_layers(cache.root, recipes(models, "tokens"))
    return fb.open_cache(cache.root)


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory, models: Path) -> fb.Cache:
    cache = preference_cache(tmp_path_factory.mktemp("preferences"), 12, chunk_rows=5)
    fb.build_layers(cache.root, recipes(models, "preferences"))
    return fb.open_cache(cache.root)


def whole_row(cache: fb.Cache, row: int) -> dict[str, Any]:
    """A row with the columns of its layers."""
    return {name: values[0] for name, values in cache.read([row], cache.columns).items()}


@torch.no_grad()
def one_by_one(model: Any, tokens: np.ndarray[Any, Any]) -> torch.Tensor:
    """The log-probs of all tokens at every place of one document."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return logits.log_softmax(-1)


def test_documents_of_a_row_have_the_log_probs_of_forwards_one_by_one(chat: fb.Cache) -> None:
    reference, teacher = llama(), gpt2()
    crowded = 0
    for row in range(len(chat)):
        stored = whole_row(chat, row)
        start = at = 0
        crowded += len(stored["seq_lens"]) > 1
        for length in stored["seq_lens"].tolist():
            tokens = stored["tokens"][start : start + length]
            wanted = one_by_one(reference, tokens)[:-1].gather(
                1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
            )
            here = slice(at, at + length - 1)
            np.testing.assert_allclose(stored["ref_logps"][here], wanted[:, 0].numpy(), atol=1e-5)
            best = one_by_one(teacher, tokens)[:-1].topk(K)
            np.testing.assert_allclose(stored["best_top_logps"][here], best.values.numpy(), atol=5e-3)
            assert (stored["best_top_ids"][here] == best.indices.numpy()).mean() > 0.99  # ties may be ordered otherwise
            start, at = start + length, at + length - 1
        assert at == len(stored["ref_logps"]) == len(stored["best_top_ids"])
    assert crowded > 3
    assert chat.column("ref_logps").dtype == "float32"
    assert chat.column("best_top_logps").dtype == "float16"


def test_candidates_have_the_log_probs_of_forwards_one_by_one(preferences: fb.Cache) -> None:
    reference = llama()
    for row in range(len(preferences)):
        stored = whole_row(preferences, row)
        at, prompt = 0, stored["prompt"]
        for length in stored["candidate_lens"].tolist():
            tokens = np.concatenate([prompt, stored["candidates"][at : at + length]])
            labels = torch.from_numpy(tokens[len(prompt) :].astype(np.int64))[:, None]
            wanted = one_by_one(reference, tokens)[len(prompt) - 1 : -1].gather(1, labels)[:, 0]
            np.testing.assert_allclose(stored["ref_logps"][at : at + length], wanted.numpy(), atol=1e-5)
            at += length
        assert at == len(stored["ref_logps"])


def test_a_batch_has_log_probs_at_its_labels_and_nan_elsewhere(chat: fb.Cache) -> None:
    names = ["ref_logps", "best_top_ids", "best_top_logps"]
    model = llama()
    for style in ("shifted", "unshifted"):
        collate = TokenBatch(chat, log_probs=names, labels=style, train_on=("prompt", "header", "response", "stop"))
        batch = next(iter(Loader(chat, global_batch_size=len(chat), shuffle=None, threads=0, collate=collate)))
        without = TokenBatch(chat, labels=style, train_on=("prompt", "header", "response", "stop"))
        usual = next(iter(Loader(chat, global_batch_size=len(chat), shuffle=None, collate=without)))
        assert all(torch.equal(batch[name], usual[name]) for name in usual)
        labeled = batch["labels"] >= 0
        assert torch.equal(batch["ref_logps"].isnan(), ~labeled)
        assert torch.equal((batch["best_top_ids"] == -1).all(-1), ~labeled)
        assert torch.equal(batch["best_top_logps"].isnan().all(-1), ~labeled)
        length = int(batch["seq_lens"][0, 0])
        own = one_by_one(model, batch["tokens"][0, :length].numpy())
        wanted = own[:-1].gather(1, batch["tokens"][0, 1:length, None])[:, 0]
        here = slice(0, length - 1) if style == "shifted" else slice(1, length)
        assert torch.allclose(batch["ref_logps"][0, here], wanted, atol=1e-5)


@pytest.mark.parametrize("layout", ["concatenated", "packed"])
def test_a_batch_of_pairs_has_the_log_probs_of_both_candidates(preferences: fb.Cache, layout: Any) -> None:
    collate = PreferenceBatch(preferences, layout=layout, log_probs=["ref_logps"])
    batch = next(iter(Loader(preferences, global_batch_size=len(preferences), threads=0, collate=collate)))
    labeled = batch["labels"] >= 0
    assert torch.equal(batch["ref_logps"].isnan(), ~labeled)
    start, model = 0, llama()
    for length in batch["seq_lens"][0][batch["seq_lens"][0] > 0].tolist():
        own = one_by_one(model, batch["tokens"][0, start : start + length].numpy())
        here = slice(start, start + length - 1)
        wanted = own[:-1].gather(1, batch["labels"][0, here].clamp(min=0)[:, None])[:, 0]
        counted = labeled[0, here]
        assert torch.allclose(batch["ref_logps"][0, here][counted], wanted[counted], atol=1e-5)
        start += length


def test_rows_whose_log_probs_are_not_finite_are_absent_and_read_as_nan(tmp_path: Path, models: Path) -> None:
    """A model that gives NaN for one token: its rows have no values, and a failure with its reason."""
    cache = preference_cache(tmp_path, 12, chunk_rows=5)
    tokens = [{*cache[row]["prompt"].tolist(), *cache[row]["candidates"].tolist()} for row in range(12)]
    poisoned = min(tokens[3] - tokens[0] - tokens[1] - tokens[2])
    model = llama()
    model.model.embed_tokens.weight.data[poisoned] = float("nan")
    model.save_pretrained(tmp_path / "bad")
    teacher = LogProbs(model=str(tmp_path / "bad"), over="preferences")
    fb.build_layers(cache.root, {"ref": TeacherRecipe(teacher=teacher)}, max_failures=100)
    cache = fb.open_cache(cache.root)
    present = np.asarray(cache.read(np.arange(12), ["ref_logps"])["ref.present"])
    assert not present[3]
    assert present.any()
    collate = PreferenceBatch(cache, log_probs=["ref_logps"], layout="padded")
    batch = next(iter(Loader(cache, global_batch_size=12, shuffle=None, threads=0, collate=collate)))
    values = batch["ref_logps"]
    assert values[~torch.from_numpy(present)].isnan().all()
    assert not (values == 0).any()
    assert not values[torch.from_numpy(present)][batch["labels"][torch.from_numpy(present)] >= 0].isnan().any()
    with pytest.raises(ValueError, match=r"row 3 of '.*' has no 'ref_logps': it was not computed"):
        write_dpo(cache, tmp_path / "dpo.arrow", reference="ref_logps")


def test_other_weights_are_another_layer(models: Path) -> None:
    recipes = [TeacherRecipe(teacher=LogProbs(model=str(models / name))) for name in ("llama", "other")]
    assert fb.fingerprint(recipes[0]) != fb.fingerprint(recipes[1])


def test_models_that_do_not_fit_the_cache_are_refused(chat: fb.Cache, tmp_path: Path, models: Path) -> None:
    small = llama()
    small.resize_token_embeddings(50)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ModelUnusable, match="it has 50 tokens, and the cache the token"):
        fb.build_layers(chat.root, {"a": TeacherRecipe(teacher=LogProbs(model=str(tmp_path / "small"), name="a"))})
    short = llama()
    short.config.max_position_embeddings = 8
    short.save_pretrained(tmp_path / "short")
    with pytest.raises(ModelUnusable, match="it has 8 positions, and a document has"):
        fb.build_layers(chat.root, {"b": TeacherRecipe(teacher=LogProbs(model=str(tmp_path / "short"), name="b"))})
    one = LogProbs(model=str(models / "llama"), top_k=500, name="c")
    with pytest.raises(ModelUnusable, match="top_k is 500"):
        fb.build_layers(chat.root, {"c": TeacherRecipe(teacher=one)})
    with pytest.raises(RecipeInvalid, match="top_k must be at least 0"):
        LogProbs(model="m", top_k=-1)
    with pytest.raises(ValueError, match="log_probs must name columns of"):
        TokenBatch(chat, log_probs=["tokens"])


@pytest.fixture(scope="module")
def nucleus(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, fb.Cache]:
    """Caches of both kinds with as many tokens per label as have four fifths of the probability, at most 200."""
    found = {}
    for over in ("tokens", "preferences"):
        folder = tmp_path_factory.mktemp(over)
        cache = chat_cache(folder, 8) if over == "tokens" else preference_cache(folder, 6)
        teacher = LogProbs(model=str(models / "peaked"), over=over, top_k=200, top_p=0.8, name="best")  # type: ignore[arg-type]
        fb.build_layers(cache.root, {"best": TeacherRecipe(teacher=teacher, batch_size=3)})
        found[over] = fb.open_cache(cache.root)
    return found


def test_tokens_up_to_a_probability_are_stored_and_no_more(nucleus: dict[str, fb.Cache], models: Path) -> None:
    """Different numbers of tokens for labels: ids, log-probs in float16, and how many."""
    chat, model = nucleus["tokens"], peaked()
    assert chat.column("best_top_logps").dtype == "float16"
    seen = set()
    for row in range(len(chat)):
        stored = whole_row(chat, row)
        counts, start, at = stored["best_top_counts"].astype(int), 0, 0
        assert counts.sum() == len(stored["best_top_ids"]) == len(stored["best_top_logps"])
        for length in stored["seq_lens"].tolist():
            own = one_by_one(model, stored["tokens"][start : start + length])[:-1].sort(descending=True)
            reached = own.values.exp().cumsum(-1)
            wanted = ((reached < 0.8).sum(-1) + 1).clamp(max=200).numpy()
            here = counts[at : at + length - 1]
            assert (np.abs(here - wanted) <= 1).all()  # forwards of a batch differ in the last bit
            first = counts[:at].sum()
            assert stored["best_top_ids"][first] == own.indices[0, 0]
            np.testing.assert_allclose(
                stored["best_top_logps"][first : first + here[0]], own.values[0, : here[0]].numpy(), atol=5e-3
            )
            start, at = start + length, at + length - 1
        seen |= set(counts.tolist())
    assert len(seen) > 3


@pytest.mark.parametrize("over", ["tokens", "preferences"])
def test_batches_of_different_numbers_of_tokens_are_padded(nucleus: dict[str, fb.Cache], over: str) -> None:
    cache = nucleus[over]
    kind = TokenBatch if over == "tokens" else PreferenceBatch
    collate = kind(cache, log_probs=["best_top_ids", "best_top_logps"])
    batch = next(iter(Loader(cache, global_batch_size=len(cache), shuffle=None, threads=0, collate=collate)))
    ids, values, labeled = batch["best_top_ids"], batch["best_top_logps"], batch["labels"] >= 0
    assert torch.equal(ids == -1, values.isnan())
    assert (ids[..., 0] >= 0)[labeled].all()
    counts = (ids >= 0).sum(-1)
    assert ids.shape[-1] == counts.max()
    assert len(counts[labeled].unique()) > 2
    mass = values.exp().nan_to_num().sum(-1)[labeled & (counts < ids.shape[-1])]
    assert ((mass > 0.78) & (mass < 1.01)).all()
    logits = torch.randn(*labeled.shape, VOCABULARY, requires_grad=True)
    loss = forward_kl_top_k(logits, ids, values, labels=batch["labels"])
    by_definition = []
    for place in labeled.nonzero().tolist():
        count = int(counts[tuple(place)])
        chosen = ids[tuple(place)][:count]
        p = values[tuple(place)][:count].exp()
        q = logits[tuple(place)].softmax(-1)[chosen]
        p, q = (torch.cat([each, 1 - each.sum()[None]]) for each in (p, q))
        by_definition.append((p * (p / q).log()).sum())
    assert loss.item() == pytest.approx(torch.stack(by_definition).mean().item(), abs=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def rows_of(*rows: list[float] | list[int]) -> fb.Ragged:
    is_float = any(isinstance(value, float) for row in rows for value in row)
    return fb.Ragged.of([np.array(row) for row in rows], np.dtype(np.float16 if is_float else np.int64))


def test_counts_that_do_not_fit_the_values_are_refused() -> None:
    with pytest.raises(ValueError, match="other log-probs than their counts"):
        padded_choices(rows_of([1.0, 1.0, 1.0]), rows_of([1, 1]))
    absent, other = padded_choices(rows_of([], [1.0, 1.0, 1.0]), rows_of([], [1, 2]))
    assert (absent.shape, other.shape) == ((0, 2), (2, 2))


def test_values_that_are_not_one_for_each_label_are_refused() -> None:
    mask = np.array([[True, True, False], [True, False, False]])
    with pytest.raises(ValueError, match=r"row 1 of the batch has 1 labels, but 2 values of 'ref_logps'"):
        spread_log_probs("ref_logps", rows_of([1.0, 1.0], [1.0, 1.0]), mask)
    found = spread_log_probs("ref_logps", rows_of([1.0, 1.0], []), mask)
    np.testing.assert_array_equal(found, [[1, 1, np.nan], [np.nan] * 3])


def test_a_batch_that_one_place_makes_far_wider_than_what_is_stored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "MOST_VALUES", 100)
    with pytest.raises(ValueError, match="would have 210 values, more than 100"):
        padded_choices(rows_of([0.0] * (21 + 9)), rows_of([21, *[1] * 9]))
    ids = fb.Ragged(np.zeros((0, 17), np.int32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="would have 102 values, more than 100"):
        spread_log_probs("best_top_ids", ids, np.zeros((1, 6), np.bool_))


@pytest.mark.parametrize(
    ("fields", "said"), [({"top_p": 0.5}, "top_p needs top_k"), ({"top_k": 4, "top_p": 0.0}, "above 0")]
)
def test_probabilities_that_make_no_sense_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeInvalid, match=said):
        LogProbs(model="m", **fields)


def classes(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The probabilities of some tokens and of all others together, by definition."""
    top = log_probs.exp().gather(-1, ids)
    return torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1)


def test_the_loss_is_the_divergence_over_the_top_tokens_and_the_rest() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 3, 11).double(), torch.randn(2, 3, 11).double().requires_grad_()
    top = teacher.log_softmax(-1).topk(4)
    p, q = classes(teacher.log_softmax(-1), top.indices), classes(student.log_softmax(-1), top.indices)
    wanted = (p * (p / q).log()).sum(-1)
    loss = forward_kl_top_k(student, top.indices, top.values)
    assert loss.item() == pytest.approx(wanted.mean().item(), abs=1e-6)
    values, labels = top.values.clone(), torch.zeros(2, 3, dtype=torch.int64)
    values[0, 1], labels[1, 2] = float("nan"), -100
    counted = torch.ones(2, 3, dtype=torch.bool)
    counted[0, 1] = counted[1, 2] = False
    ids = top.indices.clone()
    ids[0, 1] = -1
    some = forward_kl_top_k(student, ids, values, labels=labels)
    assert some.item() == pytest.approx(wanted[counted].mean().item(), abs=1e-6)
    some.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert torch.equal(student.grad.abs().sum(-1) > 0, counted)
    assert student.grad.isfinite().all()
    everything = teacher.log_softmax(-1).topk(11)
    full = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    )
    found = forward_kl_top_k(student, everything.indices, everything.values)
    assert found.item() == pytest.approx(full.sum(-1).mean().item(), abs=1e-6)
    assert loss.item() <= found.item()
    none = forward_kl_top_k(student, ids, torch.full_like(values, float("nan")))
    assert none.item() == 0
