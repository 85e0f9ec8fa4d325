"""Fine-tune a tiny model on the answers of conversations.

    python examples/finetune_chat.py

Builds a chat cache of colors and fruits with a byte-level tokenizer and a ChatML template, trains a transformer on
responses and stop tokens, and generates answers. Before training, it checks on the logits that other tokens get no
gradient; after training, it reads a second policy (the last turn only) from the same cache.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

import forebay as fb
from forebay.masks import TrainOn
from forebay.torch import Loader, PackedSelfAttention, TokenBatch, document_block_mask

TEMPLATE = """{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ANSWERS = {"red": "apple", "yellow": "lemon", "green": "pear", "blue": "plum"}


def write_model(folder: Path) -> Tokenizer:
    """Write a byte-level tokenizer and the template, as in a model repository."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>"), AddedToken("<|pad|>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return tokenizer


def write_chats(path: Path, count: int) -> None:
    colors = list(ANSWERS)
    with path.open("w") as file:
        for number in range(count):
            asked = (colors[number % 4], colors[number // 4 % 4])
            turns = [message for color in asked for message in _turn(color)]
            file.write(json.dumps({"messages": turns}) + "\n")


def _turn(color: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": color}, {"role": "assistant", "content": ANSWERS[color]}]


class TinyModel(nn.Module):
    """Two layers of attention within conversations."""

    def __init__(self, vocabulary: int, length: int, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.position_embedding = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attention = nn.ModuleList(PackedSelfAttention(width, 4, backend="dense") for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, seq_lens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.position_embedding(positions)
        mask = document_block_mask(seq_lens, tokens.shape[1])  # built once, for all layers
        for attention, norm, mlp in zip(self.attention, self.norms, self.mlps, strict=True):
            x = x + attention(norm(x), mask=mask)
            x = x + mlp(x)
        logits: Tensor = self.head(x)
        return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def prove_masks(model: TinyModel, batch: dict[str, Tensor]) -> int:
    """Check that exactly the logits before trained tokens get a gradient; return how many do."""
    logits = model(batch["tokens"], batch["positions"], batch["seq_lens"]).detach().requires_grad_()
    loss_of(logits, batch["labels"]).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    touched = logits.grad.abs().sum(-1) > 0
    if not torch.equal(touched, batch["labels"] >= 0):
        raise AssertionError("an untrained token has a gradient, or a trained one has none")
    return int(touched.sum())


@torch.no_grad()
def answer(model: TinyModel, tokenizer: Tokenizer, question: str, most: int = 12) -> str:
    ids = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
    begin, end = len(ids), tokenizer.token_to_id("<|im_end|>")
    while len(ids) < begin + most:
        tokens = torch.tensor([ids])
        logits = model(tokens, torch.arange(len(ids))[None], torch.tensor([[len(ids)]]))
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    return tokenizer.decode(ids[begin:], skip_special_tokens=False)


def main(folder: Path, steps: int = 60) -> dict[str, str]:
    torch.manual_seed(0)
    tokenizer = write_model(folder / "model")
    write_chats(folder / "chats.jsonl", 256)
    recipe = fb.ChatRecipe(tokenizer=str(folder / "model"), sequence_length=128)
    fb.build(folder / "cache", fb.sources.lines(folder / "chats.jsonl"), recipe, workers=0, progress=False)
    cache = fb.open_cache(folder / "cache")
    model = TinyModel(tokenizer.get_vocab_size(), 128)
    loader = Loader(cache, global_batch_size=8, seed=0, collate=TokenBatch(cache, train_on=("response", "stop")))
    trained = prove_masks(model, next(iter(loader)))
    print(f"{trained:,} of {8 * 128:,} tokens of a batch are trained, and no other logit has a gradient")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for batch in loader.forever(max_steps=steps):
        loss = loss_of(model(batch["tokens"], batch["positions"], batch["seq_lens"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(f"loss {loss.item():.4f} after {steps} steps")
    last = Loader(
        cache,
        global_batch_size=8,
        seed=0,
        collate=TokenBatch(cache, train_on=TrainOn.of(("response", "stop"), turns="last")),
    )
    print(f"the last turn alone: {prove_masks(model, next(iter(last))):,} tokens, from the same cache")
    answers = {question: answer(model, tokenizer, question) for question in ANSWERS}
    print(answers)
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to keep the data  [a temporary folder]")
    parser.add_argument("--steps", type=int, default=60, help="at least 1")
    chosen = parser.parse_args()
    if chosen.folder:
        main(chosen.folder, chosen.steps)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder), chosen.steps)
