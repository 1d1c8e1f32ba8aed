"""Real conversations as a list of requests: the trace, the tokenizer made from its text, and the prompts.

The trace holds what was sent to a model at each turn of a conversation, but not with the model's earlier answers in it.
So that the reuse of generated tokens shows, a prompt here is made of the earlier prompt, the answer that *our* model
gave to it, and the tokens of what the conversation added.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRACE = Path(__file__).parent / "data" / "lmcache_miniswe_text_12sessions.jsonl.gz"
TRACE_NAME = "LMCache/lmcache-agent-trace, mini-swe-agent on SWE-bench, the 12 smallest conversations (Apache-2.0)"

VOCABULARY = 4096
"""Tokens of the tokenizer that is trained here, and of the model."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the trace."""

    time_us: int
    session: str
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One request of the plan.

    Its prompt is `tokens` where `parent` is None; else the parent's prompt, the parent's answer and then `tokens`.
    """

    session: int
    """Number of the conversation, from 0, in the order in which the conversations begin."""
    turn: int
    """Number of the request in its conversation, from 0."""
    parent: int | None
    """Position in the plan of the earlier request of the same conversation that this one continues."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a demo in the order in which they are sent."""

    steps: tuple[Step, ...]
    sessions: int
    """Conversations of which at least one request is sent."""
    sessions_in_trace: int
    requests_in_trace: int
    tokenizer_digest: str


def read_trace(path: Path = TRACE) -> list[Row]:
    """The rows of the trace at `path`, in the order in which they were sent.

    Raises:
        ConfigError: the file is missing or is not a trace of this form.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [_row(json.loads(line)) for line in lines]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error
    return sorted(rows, key=lambda row: row.time_us)


def _row(line: dict[str, object]) -> Row:
    return Row(time_us=int(str(line["timestamp"])), session=str(line["session_id"]), text=str(line["input"]))


def choose_sessions(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows of the `count` conversations with the least text, in the order in which they were sent."""
    characters: dict[str, int] = {}
    for row in rows:
        characters[row.session] = characters.get(row.session, 0) + len(row.text)
    if not 1 <= count <= len(characters):
        raise ConfigError(f"--sessions must be in 1..{len(characters)} (the conversations of the trace), got {count}")
    chosen = set(sorted(characters, key=lambda session: (characters[session], session))[:count])
    return [row for row in rows if row.session in chosen]


def train_tokenizer(texts: Iterable[str]) -> "Tokenizer":
    """A byte-level BPE tokenizer of `VOCABULARY` tokens; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415  an extra, wanted only here

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def find_parent(texts: Sequence[str], position: int) -> int | None:
    """Which of the texts before `position` that text continues: the longest (the latest of equals) it begins with."""
    earlier = [j for j in range(position) if texts[position].startswith(texts[j])]
    return max(earlier, key=lambda j: (len(texts[j]), j)) if earlier else None


def make_plan(rows: Sequence[Row], *, sessions: int, requests: int | None) -> Plan:
    """Tokenize the trace and say how each prompt is built.

    Args:
        rows: the whole trace; the tokenizer is trained on all of it, whatever is chosen.
        sessions: how many conversations to take (the shortest).
        requests: take only the first so many requests; None takes all.

    Raises:
        ConfigError: `sessions` or `requests` is out of range.
    """
    chosen = choose_sessions(rows, sessions)
    if requests is not None and not 1 <= requests <= len(chosen):
        raise ConfigError(
            f"--requests must be in 1..{len(chosen)} (the requests of {sessions} conversations), got {requests}"
        )
    chosen = chosen[:requests]
    tokenizer = train_tokenizer(row.text for row in rows)
    numbers = {session: number for number, session in enumerate(dict.fromkeys(row.session for row in chosen))}
    steps: list[Step] = []
    seen: dict[str, tuple[list[str], list[int]]] = {session: ([], []) for session in numbers}
    for row in chosen:
        texts, positions = seen[row.session]
        texts.append(row.text)
        found = find_parent(texts, len(texts) - 1)
        new_text = row.text if found is None else row.text[len(texts[found]) :]
        steps.append(
            Step(
                session=numbers[row.session],
                turn=len(positions),
                parent=None if found is None else positions[found],
                tokens=tuple(tokenizer.encode(new_text).ids),
            )
        )
        positions.append(len(steps) - 1)
    return Plan(
        steps=tuple(steps),
        sessions=len(numbers),
        sessions_in_trace=len({row.session for row in rows}),
        requests_in_trace=len(rows),
        tokenizer_digest=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
    )


def build_prompt(
    steps: Sequence[Step], position: int, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[int]:
    """The tokens of the request at `position`, from the prompts and answers of the requests before it."""
    step = steps[position]
    if step.parent is None:
        return list(step.tokens)
    return [*prompts[step.parent], *answers[step.parent], *step.tokens]
