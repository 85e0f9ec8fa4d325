"""Conversations and preferences in the browser: colors are spans of the cache, underlined tokens are trained."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.chat.preference_caches import chat_cache, llama, preference_cache
from tests.chat.stock_templates import CHATML
from tests.chat.tokenizer_folders import byte_level, write_folder
from tests.viewer.conftest import PALE_TEXT, PRINTED, Open

import forebay as fb
from forebay.masks.train_on import KINDS, ROLES
from forebay.teachers import LogProbs, TeacherRecipe
from forebay.torch import Loader
from forebay.viewer.bundle import collect, page_of
from forebay.viewer.shown_cache import Query, ShownCache
from forebay.viewer.token_rows import token_row

pytestmark = pytest.mark.slow

PAGES = ("overview", "chunks?layer={layer}&chunk=0", "rows?row=0", "rows?row=1", "training", "compare?b=1")
COLORS = "[...document.querySelectorAll('.tokens span')].map((one) => one.className.split(' ')[0])"
TRAINED = "[...document.querySelectorAll('.tokens span')].map((one) => one.classList.contains('trained'))"
PALE = "[...document.querySelectorAll('.tokens span')].map((one) => one.classList.contains('off'))"


def _model(folder: Path) -> str:
    return write_folder(folder, byte_level(CHATML.special), CHATML.plain(), CHATML.tokens)


@pytest.fixture(scope="module")
def chat_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats = [
        [
            {"role": "system", "content": f"You are a small model {number}."},
            {"role": "user", "content": f"Who are you? {PRINTED}"},
            {"role": "assistant", "content": f"I am a small model. {PRINTED}"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "hello " * (1 + number % 4)},
        ]
        for number in range(24)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    recipe = fb.ChatRecipe(tokenizer=_model(folder / "model"), sequence_length=768, chunk_rows=4)
    fb.build(folder / "cache", fb.sources.lines(folder / "chats.jsonl"), recipe, workers=0)
    return folder / "cache"


@pytest.fixture(scope="module")
def preference_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [
        {"prompt": f"Who are you? {PRINTED}", "chosen": f"I am {number}. {PRINTED}", "rejected": PRINTED}
        for number in range(20)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = fb.PreferenceRecipe(tokenizer=_model(folder / "model"), sequence_length=512, chunk_rows=8)
    fb.build(folder / "cache", fb.sources.lines(folder / "pairs.jsonl"), recipe, workers=0)
    return folder / "cache"


def _loaded_labels(root: Path) -> dict[bytes, list[int]]:
    """The labels of each row, as a loader makes them."""
    loader = Loader(fb.open_cache(root), global_batch_size=1, threads=0, drop_last=False)
    found: dict[bytes, list[int]] = {}
    for _, batch in zip(range(len(fb.open_cache(root))), loader, strict=False):
        found[batch["tokens"][0].numpy().tobytes()] = batch["labels"][0].tolist()
    return found


def test_labels_on_the_page_are_those_of_the_loader(chat_root: Path) -> None:
    expected = _loaded_labels(chat_root)
    for row in range(len(fb.open_cache(chat_root))):
        shown = token_row(ShownCache.of(chat_root), Query((("row", str(row)),)))
        assert shown.labels == expected[np.array(shown.tokens, np.int64).tobytes()]
        assert {span.kind for span in shown.spans} == {"header", "prompt", "response", "stop"}


def test_spans_have_the_color_of_their_kind_and_a_legend(view: Open, chat_root: Path) -> None:
    row = fb.open_cache(chat_root)[0]
    spans = row["spans"].tolist()
    used = int(row["seq_lens"].sum())
    assert used < len(row["tokens"])
    opened = view(chat_root)
    page = opened.go("0/rows?row=0")
    kinds = [kind for start, stop, _, kind, _ in spans for _ in range(start, stop)]
    assert page.evaluate(COLORS) == [f"k{kind}" for kind in kinds] + ["pad"] * (len(row["tokens"]) - used)
    counted = [KINDS[kind] in ("response", "stop") for kind in kinds]
    rest = [False] * (len(row["tokens"]) - used)
    assert page.evaluate(TRAINED) == counted + rest
    assert page.evaluate(PALE) == [not one for one in counted] + rest
    legend = page.inner_text(".legend")
    for kind in ("header", "prompt", "response", "stop", "underlined", "padding"):
        assert kind in legend
    drawn = page.evaluate(
        "[...document.querySelectorAll('.legend i')].map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(drawn)) == len(drawn)
    for name in ("prompt", "response", "stop"):
        start, _, role, kind, _ = next(span for span in spans if KINDS[span[3]] == name)
        page.hover(f".tokens span >> nth={start}")
        assert page.inner_text(".readout").endswith(f"; {KINDS[kind]} of {ROLES[role]}")
    opened.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_kind_of_span_has_a_color_of_its_own(view: Open, chat_root: Path, scheme: str) -> None:
    page = view(chat_root, scheme=scheme).go("0/rows?row=0")
    kinds, colors = page.evaluate(
        """async () => {
          const { KINDS } = await import('./static/tokens.js');
          const strip = document.querySelector('.tokens');
          const cells = KINDS.map((_, at) => Object.assign(document.createElement('span'), { className: `k${at}` }));
          strip.append(...cells);
          return [KINDS, cells.map((one) => getComputedStyle(one).backgroundColor)];
        }"""
    )
    assert kinds == list(KINDS)
    assert len(set(colors)) == len(KINDS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_untrained_text_has_enough_contrast(view: Open, chat_root: Path, preference_root: Path, scheme: str) -> None:
    opened = view(chat_root, preference_root, scheme=scheme)
    for address in ("0/rows?row=0", "1/rows?row=0"):
        assert opened.go(address).evaluate(PALE_TEXT) == []


def test_box_of_tokens_says_what_is_below_and_shows_it(view: Open, chat_root: Path) -> None:
    opened = view(chat_root, width=400)
    page = opened.go("0/rows?row=0")
    tokens = page.locator(".tokens span").count()
    button = page.locator("button.more")
    button.wait_for()
    visible = """() => { const box = document.querySelector('.tokens').getBoundingClientRect();
        const tops = [...document.querySelectorAll('.tokens span')].map((one) => one.getBoundingClientRect().top);
        return tops.filter((top) => top < box.bottom).length; }"""
    below = int(button.inner_text().split()[0])
    assert abs(below - (tokens - page.evaluate(visible))) <= 40  # at most two lines
    page.evaluate("document.querySelector('.tokens').scrollTop = 1e6")
    button.wait_for(state="hidden")
    page.evaluate("document.querySelector('.tokens').scrollTop = 0")
    button.click()
    button.wait_for(state="hidden")
    assert page.evaluate(visible) == tokens
    opened.check()


def test_every_page_of_conversations_and_preferences_is_drawn(
    view: Open, chat_root: Path, preference_root: Path
) -> None:
    opened = view(chat_root, preference_root, width=400, scheme="dark")
    for number, layer in enumerate(("chat", "preferences")):
        assert fb.open_cache((chat_root, preference_root)[number]).generation.base == layer
        for where in PAGES:
            page = opened.go(f"{number}/{where.format(layer=layer)}")
            assert page.locator(".box.bad").count() == 0, where
            assert page.evaluate("window.hacked") is None
            assert page.locator("img[src=x]").count() == 0
            opened.check()


def test_a_static_copy_has_conversations_and_preferences(chat_root: Path, preference_root: Path) -> None:
    bundle = collect([ShownCache.of(chat_root), ShownCache.of(preference_root)], rows=3)
    assert not [address for address, record in bundle.records.items() if hasattr(record, "damaged")]
    assert "<script>window.hacked" not in page_of(bundle).decode()


def test_a_preference_shows_its_prompt_and_its_candidates_as_text(view: Open, preference_root: Path) -> None:
    cache = fb.open_cache(preference_root)
    row = cache[0]
    shown = token_row(ShownCache.of(preference_root), Query((("row", "0"),)))
    prompt, lens = row["prompt"].tolist(), row["candidate_lens"].tolist()
    assert shown.tokens == prompt + row["candidates"].tolist()
    assert shown.seq_lens == [len(prompt), *lens]
    assert shown.positions == [*range(len(prompt)), *(len(prompt) + at for length in lens for at in range(length))]
    assert shown.scores is not None
    assert "".join(shown.texts[len(prompt) :]) == f"I am 0. {PRINTED}<|im_end|>{PRINTED}<|im_end|>"
    # What a model learns to write is exactly the candidates; the last token of one predicts nothing.
    counted = [at for at, label in enumerate(shown.labels) if label != -100]
    assert all(shown.labels[at] == shown.tokens[at + 1] for at in counted)
    assert len(prompt) + lens[0] - 1 not in counted
    opened = view(preference_root)
    page = opened.go("0/rows?row=0&text=who+are")
    begins = page.evaluate("[...document.querySelectorAll('.begins')].map((one) => one.textContent)")
    assert begins == ["prompt", "candidate 1, preferred", "candidate 2"]
    spans = row["spans"].tolist()
    kinds = [KINDS[kind] for start, stop, _, kind, _ in spans for _ in range(start, stop)]
    assert page.evaluate(TRAINED) == [kind in ("response", "stop") for kind in kinds]
    page.wait_for_selector("mark >> nth=0")  # the search of the address
    page.wait_for_selector(f"text={len(cache)} of {len(cache)} rows searched · {len(cache)} hits")
    page.hover(f".tokens span >> nth={len(prompt)}")
    assert f"position {len(prompt)} of candidate 1, preferred" in page.inner_text(".readout")
    assert page.evaluate("window.hacked") is None
    opened.check()


@pytest.mark.parametrize("kind", ["tokens", "preferences"])
def test_log_probs_stand_at_the_token_that_they_are_about(view: Open, tmp_path: Path, kind: str) -> None:
    llama().save_pretrained(tmp_path / "llama")
    cache = chat_cache(tmp_path, 6) if kind == "tokens" else preference_cache(tmp_path, 6)
    fb.build(cache.root, None, TeacherRecipe(teacher=LogProbs(model=str(tmp_path / "llama"), over=kind)))
    cache = fb.open_cache(cache.root)
    stored = cache.read([0], ["ref_logps"])["ref_logps"][0]
    shown = token_row(ShownCache.of(cache), Query((("row", "0"),)))
    found = np.array(shown.log_probs["ref_logps"])
    assert np.allclose(found[~np.isnan(found)], stored, atol=1e-4)
    begins = np.cumsum([0, *shown.seq_lens[:-1]])
    absent = begins if kind == "tokens" else np.arange(shown.seq_lens[0])
    assert np.isnan(found[absent]).all()
    assert np.isnan(found).sum() == len(absent) + shown.padding
    opened = view(cache)
    page = opened.go("0/rows?row=0")
    page.select_option("[name=color]", "ref_logps")
    assert page.url.endswith("color=ref_logps")
    at = int(np.flatnonzero(~np.isnan(found))[0])
    assert page.evaluate(f"document.querySelectorAll('.tokens span')[{at}].style.backgroundColor") != ""
    page.hover(f".tokens span >> nth={at}")
    assert "ref_logps -" in page.inner_text(".readout")
    opened.go("0/teachers?row=0")
    assert "ref_logps" in opened.text()
    assert "deviation" in opened.text()
    assert not page.is_visible("[name=t]")  # the layer has no timesteps
    opened.check()
