"""The preference recipe: a prompt and its candidates, best first, as tokens with spans.

    pairs         {"prompt": "Hi", "chosen": "Hello.", "rejected": "No."}, each a text or a list of messages
    whole pairs   {"chosen": [messages], "rejected": [messages]}: the messages that both begin with are the prompt
    candidates    {"prompt": "Hi", "candidates": ["Hello.", "No.", "?"], "scores": [9, 2, 0]}

The prompt may also be the list of `messages` or `conversations`. A candidate may be an object with its score in it.

    row   prompt ┌ header prompt header ┐  candidates ┌ response stop ┬ response stop ┬ … ┐  candidate_lens, scores

A row is a sample. `prompt` followed by a candidate is exactly what the chat recipe makes of that conversation, up to
its last stop token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta

from forebay.chat.conversation_packing import shown_by_label, tokens_by_label
from forebay.chat.conversations import BadConversation, Conversation, FieldNames, messages_of, read_record
from forebay.chat.dissect import Document
from forebay.chat.encoding import Encoded
from forebay.chat.recipe import ChatRecipe, Rendered, Renderer, in_batches
from forebay.columns import DTYPES, Array, Column, Ragged
from forebay.errors import RecipeInvalid
from forebay.fields import Size
from forebay.masks.train_on import GENERATED, KINDS, SPAN_FIELDS
from forebay.recipe import Rows
from forebay.source import Failure, Sample, Source
from forebay.sources.jsonl import lines
from forebay.sources.source_settings import PathSettings
from forebay.tokens.packing import document_too_long, in_order
from forebay.tokens.recipe_base import MOST_TOKENS, TokenizedRecipe

FIELDS = ("prompt", "chosen", "rejected", "candidates", "scores", "score_chosen", "score_rejected", "tools", "system")
_GENERATED = [KINDS.index(kind) for kind in GENERATED]
_PROMPT, _STOP = KINDS.index("prompt"), KINDS.index("stop")
MOST_CANDIDATES = 256


class PreferenceRecipe(ChatRecipe, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokenize prompts with preferred and rejected answers, with spans that mark generated tokens.

    Fields are those of the chat recipe. `sequence_length` is the most tokens of a prompt with one candidate; `names`
    maps fields of samples, such as `{"chosen": "preferred", "candidates": "responses"}`.
    """

    kind: ClassVar[str] = "preferences"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"
    source_settings: ClassVar[str] = "forebay.chat.preferences:PreferenceSettings"

    sequence_length: Annotated[
        int, Meta(ge=1, le=MOST_TOKENS, description="Most tokens of a prompt with one candidate.")
    ] = 2048
    long: Annotated[Literal["error", "drop"], Meta(description="How to treat longer ones.")] = "error"
    format: Annotated[Literal["auto"], Meta(description="Format of the samples: by their fields.")] = "auto"

    def __post_init__(self) -> None:
        TokenizedRecipe.__post_init__(self)
        if unknown := [name for name in self.names if name not in FIELDS]:
            raise RecipeInvalid(f"names must map only {', '.join(FIELDS)} (got {unknown[0]!r})")

    def columns(self) -> tuple[Column, ...]:
        ragged = partial(self._column(), ragged=True)
        return (
            ragged(name="id", dtype="uint8"),
            ragged(name="prompt", dtype=self._dtype()),
            ragged(name="candidates", dtype=self._dtype()),
            ragged(name="candidate_lens", dtype="uint32"),
            ragged(name="scores", dtype="float32"),
            ragged(name="spans", dtype="uint32", shape=(SPAN_FIELDS,)),
        )

    def rows_from(self, statistics: Mapping[str, Any]) -> float:
        """A row is a sample."""
        pairs: int = statistics["pairs"]
        return pairs

    def make(self, samples: Iterable[Sample]) -> Rows:
        failed: list[tuple[int, Failure]] = []
        rows: list[_Row] = []
        characters = 0
        for batch in in_batches(self._rendered(enumerate(samples), failed)):
            encoded, problems = self._encoded(batch)
            first = 0
            for at, group in enumerate(batch):
                assert isinstance(group, RenderedGroup)
                numbers = range(first, first := first + len(group.documents))
                row = None if at in problems else _row(group, encoded, numbers)
                problem = problems[at] if row is None else self._problem(group.name, row)
                if problem is not None:
                    failed.append((group.number, Failure(group.name, *problem)))
                elif row is not None:
                    rows.append(row)
                    characters += sum(len(document.text) for document in group.documents)
        columns = _columns(rows, DTYPES[self._dtype()][1])
        return Rows(columns, in_order(failed), _statistics(rows, columns, characters))

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Figures from the sums over all chunks."""
        rows, tokens = max(1, holds["rows"]), max(1, statistics.get("tokens", 0))
        return {
            "candidates_per_prompt": statistics.get("candidates", 0) / rows,
            "tokens_per_prompt": statistics.get("prompt_tokens", 0) / rows,
            "tokens_per_candidate": (tokens - statistics.get("prompt_tokens", 0))
            / max(1, statistics.get("candidates", 0)),
            "bytes_per_token": holds["bytes"] / tokens,
            **shown_by_label(statistics),
        }

    def _names(self) -> FieldNames:
        return FieldNames(roles=tuple(sorted(self.roles.items())))  # `names` are of the samples' own fields

    def _render(self, number: int, sample: Sample, renderer: Renderer) -> "RenderedGroup":
        """One document per candidate."""
        group = read_candidates(sample, self.names)
        documents = []
        for messages in group.candidates:
            conversation = renderer.read({"messages": [*group.prompt, *messages], "tools": group.tools})
            if len(conversation.messages) < len(group.prompt) + len(messages):
                raise BadConversation("no-response", "a candidate must end with a message of the assistant")
            document = renderer.layouts.documents(conversation)[-1]
            _check_turns(document, conversation, len(group.prompt))
            documents.append(document)
        return RenderedGroup(number, sample.id, documents, len(group.prompt), group.scores)

    def _problem(self, name: str, row: "_Row") -> tuple[str, str] | None:
        longest = len(row.prompt) + max(map(len, row.candidates))
        if longest > self.sequence_length:
            if self.long == "error":
                raise document_too_long(name, longest, self.sequence_length, "set long='drop' (`--long drop`)")
            return "too-long", f"{longest:,} tokens, at most {self.sequence_length:,} are kept"
        if np.array_equal(row.candidates[0], row.candidates[-1]):
            return "same-candidates", "the best and the worst candidate have the same tokens"
        return None


class PreferenceSettings(PathSettings, frozen=True, kw_only=True):
    """Prompts with preferred and rejected answers.

    SOURCE is a file, a folder or a quoted glob of JSON lines, each an object with a prompt and its candidates; .gz,
    .zst, .bz2 and .xz files are decompressed.
    """

    example: ClassVar[str] = "'pairs/*.jsonl' --tokenizer ./model"

    max_sample_bytes: Annotated[Size | None, Meta(description="Fail longer samples.", extra={"default": "64MiB"})] = (
        None
    )

    def open(self) -> Source:
        return lines(*self.paths, **self._passed("max_sample_bytes"))


@dataclass(slots=True)
class RenderedGroup(Rendered):
    """A sample as one document per candidate."""

    prompt_messages: int
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The messages of a sample: those of the prompt, and those of each candidate, best first."""

    prompt: list[Any]
    candidates: list[list[Any]]
    scores: list[float]  # NaN where the sample has none
    tools: Any = None


def read_candidates(sample: Sample, names: Mapping[str, str]) -> Candidates:
    """Return the candidates of a sample in the order of their scores, highest first; raise `BadConversation`."""
    record = read_record(sample.data)
    named = {field: names.get(field, field) for field in FIELDS}
    listed = record.get(named["candidates"])
    has_pair = named["chosen"] in record and named["rejected"] in record
    if not has_pair and not isinstance(listed, Sequence):
        shown = ", ".join(list(map(str, record))[:6]) or "none"
        raise BadConversation(
            "no-candidates",
            f"it has neither {named['chosen']} and {named['rejected']} nor {named['candidates']}; it has {shown}",
        )
    sides = [record[named["chosen"]], record[named["rejected"]]] if has_pair else list(listed or ())
    if not 2 <= len(sides) <= MOST_CANDIDATES:
        raise BadConversation("no-candidates", f"it has {len(sides)} candidates; expected 2 to {MOST_CANDIDATES}")
    pair_scores = [record.get(named[name]) for name in ("score_chosen", "score_rejected")]
    scores = _scores(sides, pair_scores if has_pair else record.get(named["scores"]), has_pair)
    asked = next((record[name] for name in (named["prompt"], "messages", "conversations") if name in record), None)
    prompt = list(messages_of(asked, "user")) if asked is not None else []
    candidates = [list(messages_of(side, "assistant")) for side in sides]
    if asked is None:
        prompt, candidates = _shared_prompt(candidates)
    if isinstance(system := record.get(named["system"]), str) and system:
        prompt = [{"role": "system", "content": system}, *prompt]
    if not prompt:
        raise BadConversation("no-prompt", f"it has no {named['prompt']}, and its candidates begin differently")
    order = sorted(range(len(sides)), key=lambda each: -scores[each]) if not has_pair else range(len(sides))
    return Candidates(
        prompt, [candidates[at] for at in order], [scores[at] for at in order], record.get(named["tools"])
    )


def _shared_prompt(candidates: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """The messages that all candidates begin with, and the rest of each."""
    shared = 0
    shortest = min(map(len, candidates))
    while shared < shortest - 1 and all(each[shared] == candidates[0][shared] for each in candidates):
        shared += 1
    return candidates[0][:shared], [each[shared:] for each in candidates]


def _scores(sides: Sequence[Any], listed: Any, is_pair: bool) -> list[float]:
    """The scores of candidates; NaN for a pair that has none."""
    if is_pair and listed == [None, None]:
        return [float("nan")] * 2
    if listed is None:
        listed = [side.get("score") if isinstance(side, Mapping) else None for side in sides]
    if not isinstance(listed, Sequence) or len(listed) != len(sides):
        raise BadConversation("bad-score", f"{len(sides)} candidates need a list of {len(sides)} scores")
    scores = [_score(score) for score in listed]
    if max(scores) == min(scores) or (is_pair and scores[0] < scores[1]):
        raise BadConversation("no-preference", f"no candidate is better than the others: scores {scores[:8]}")
    return scores


def _score(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise BadConversation("bad-score", f"a score is {value!r:.40}; expected a finite number")
    return float(value)


def _check_turns(document: Document, conversation: Conversation, prompt: int) -> None:
    """Raise if the template renders a candidate's turn as history, not as a generated turn."""
    stopped = set(document.labels[document.labels[:, 1] == _STOP, 2].tolist())
    if any(turn not in stopped for turn in conversation.turns if turn >= prompt):
        raise BadConversation(
            "history-changes", "the template writes earlier turns of the candidate differently in later ones"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    name: str
    prompt: Array
    candidates: list[Array]
    spans: Array
    scores: list[float]


def _row(group: RenderedGroup, encoded: Encoded, numbers: range) -> _Row:
    """Cut the documents of candidates after the tokens that they share, and each after its last stop token."""
    ends, span_ends = np.cumsum(encoded.lengths), np.cumsum(encoded.span_counts)
    ids: list[Array] = []
    spans: list[Array] = []
    begins: list[int] = []
    for at in numbers:
        own = encoded.spans[span_ends[at] - encoded.span_counts[at] : span_ends[at]].copy()
        mine = own[:, 4] >= group.prompt_messages
        own[~mine & np.isin(own[:, 3], _GENERATED), 3] = _PROMPT  # answers of the prompt are only context
        begins.append(int(own[mine & np.isin(own[:, 3], _GENERATED), 0].min()))
        stop = int(own[mine & (own[:, 3] == _STOP), 1].max())
        first = int(ends[at] - encoded.lengths[at])
        ids.append(encoded.ids[first : first + stop])
        spans.append(own[own[:, 0] < stop])
    shared = min(begins)
    for other in ids[1:]:
        differ = np.flatnonzero(ids[0][:shared] != other[:shared])
        shared = int(differ[0]) if len(differ) else shared
    prompt = spans[0][spans[0][:, 0] < shared].copy()
    prompt[:, 1] = np.minimum(prompt[:, 1], shared)
    parts, at = [prompt], shared
    for tokens, own in zip(ids, spans, strict=True):
        part = own[own[:, 1] > shared].copy()
        part[:, 0] = np.maximum(part[:, 0], shared)
        part[:, :2] += at - shared
        parts.append(part)
        at += len(tokens) - shared
    candidates = [tokens[shared:] for tokens in ids]
    return _Row(group.name, ids[0][:shared], candidates, np.concatenate(parts), group.scores)


def _columns(rows: Sequence[_Row], dtype: np.dtype[Any]) -> dict[str, Array | Ragged]:
    uint32 = np.dtype(np.uint32)
    return {
        "id": Ragged.of_bytes([row.name.encode("utf-8", "surrogateescape") for row in rows]),
        "prompt": Ragged.of([row.prompt for row in rows], dtype),
        "candidates": Ragged.of([np.concatenate(row.candidates) for row in rows], dtype),
        "candidate_lens": Ragged.of([np.array(list(map(len, row.candidates))) for row in rows], uint32),
        "scores": Ragged.of([np.array(row.scores) for row in rows], np.dtype(np.float32)),
        "spans": Ragged.of([row.spans for row in rows], uint32, (SPAN_FIELDS,)),
    }


def _statistics(
    rows: Sequence[_Row], columns: Mapping[str, Any], characters: int
) -> dict[str, int | float | list[int]]:
    spans = columns["spans"].values
    return {
        "pairs": len(rows),
        "candidates": len(columns["candidate_lens"].values),
        "characters": characters,
        "prompt_tokens": len(columns["prompt"].values),
        "tokens": int((spans[:, 1] - spans[:, 0]).sum()),
        **tokens_by_label(spans),
        "raw_bytes": sum(column.nbytes for column in columns.values()),
    }
