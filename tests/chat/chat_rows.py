"""The documents of rows that a chat recipe made, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.chat.stock_templates import Piece
from tokenizers import Tokenizer

import forebay as fb
from forebay.masks.train_on import KINDS


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@dataclass(frozen=True)
class Labeled:
    """One document: its tokens, and the kind and the message of each."""

    sample: int
    tokens: list[int]
    kinds: list[str]
    messages: list[int]

    def decoded(self, tokenizer: Tokenizer, *kinds: str) -> str:
        chosen = [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]
        return tokenizer.decode(chosen, skip_special_tokens=False)


def labeled_documents(rows: fb.Rows) -> list[Labeled]:
    """Every document of some rows, by sample and by its place in it. Spans must cover each document exactly once."""
    columns: Any = rows.columns
    found: list[tuple[tuple[int, int], Labeled]] = []
    for row in range(len(columns["tokens"])):
        tokens, spans = columns["tokens"][row], columns["spans"][row].tolist()
        used = int(columns["seq_lens"][row].sum())
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
        assert spans[-1][1] == used
        kinds = [KINDS[span[3]] for span in spans for _ in range(span[1] - span[0])]
        messages = [span[4] for span in spans for _ in range(span[1] - span[0])]
        start = 0
        borders = {0, *(span[1] for span in spans)}
        for length, (number, offset) in zip(columns["seq_lens"][row], columns["documents"][row].tolist(), strict=True):
            stop = start + int(length)
            assert stop in borders, "a span crosses two documents"
            one = Labeled(number, tokens[start:stop].tolist(), kinds[start:stop], messages[start:stop])
            found.append(((number, offset), one))
            start = stop
    return [document for _, document in sorted(found, key=lambda each: each[0])]


def expected(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> tuple[str, list[int], list[str], list[int]]:
    """The text, tokens, kinds and messages of an oracle: a token has the kind of the piece that it begins in."""
    pieces = [piece for piece in pieces if piece[0]]
    text = "".join(piece[0] for piece in pieces)
    ends = np.cumsum([len(piece[0]) for piece in pieces])
    encoded = tokenizer.encode(text, add_special_tokens=False)
    which = [int(np.searchsorted(ends, start, side="right")) for start, _ in encoded.offsets]
    return text, encoded.ids, [pieces[at][1] for at in which], [pieces[at][2] for at in which]
