"""The demo's requests: a recorded trace of agent conversations, tokenized, and the prompts made from it.

The trace holds the input of each turn without the model's earlier answers. To show the reuse of generated tokens, a
prompt is the earlier prompt, this model's answer to it, and the tokens that the conversation added.
"""

import gzip
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
class TraceLine:
    """One line of the trace."""

    time_us: int
    session: str
    text: str


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. Its prompt is the parent's prompt and answer, if there is a parent, and then `tokens`."""

    session: int
    """Number of the conversation, from 0, by start time."""
    turn: int
    """Number of the request in its conversation, from 0."""
    parent: int | None
    """Position in the plan of the earlier request of the same conversation that this one continues."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The requests of a demo in sending order."""

    requests: tuple[PlannedRequest, ...]
    sessions: int
    """Conversations with at least one request in the plan."""
    sessions_in_trace: int
    requests_in_trace: int


def read_trace(path: Path = TRACE) -> list[TraceLine]:
    """The lines of a trace, sorted by time.

    Raises:
        ConfigError: the file is missing or has another form.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            members = [json.loads(line) for line in lines]
        found = [TraceLine(int(it["timestamp"]), str(it["session_id"]), str(it["input"])) for it in members]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error
    return sorted(found, key=lambda it: it.time_us)


def choose_sessions(lines: Sequence[TraceLine], count: int) -> list[TraceLine]:
    """The lines of the `count` conversations with the least text, sorted by time.

    Raises:
        ConfigError: the trace has fewer conversations.
    """
    characters: dict[str, int] = {}
    for line in lines:
        characters[line.session] = characters.get(line.session, 0) + len(line.text)
    if not 1 <= count <= len(characters):
        raise ConfigError(f"--sessions must be in 1..{len(characters)} (the conversations of the trace), got {count}")
    chosen = set(sorted(characters, key=lambda session: (characters[session], session))[:count])
    return [line for line in lines if line.session in chosen]


def train_tokenizer(texts: Iterable[str]) -> "Tokenizer":
    """A byte-level BPE tokenizer of `VOCABULARY` tokens; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415  an extra, needed only here

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def find_parent(texts: Sequence[str], position: int) -> int | None:
    """The text before `position` that this one continues: its longest prefix, of equals the latest."""
    earlier = [j for j in range(position) if texts[position].startswith(texts[j])]
    return max(earlier, key=lambda j: (len(texts[j]), j)) if earlier else None


def plan_requests(lines: Sequence[TraceLine], *, sessions: int, requests: int | None) -> RequestPlan:
    """Tokenize the trace.

    Args:
        lines: the whole trace; the tokenizer is trained on all of it.
        sessions: how many conversations to take, the shortest first.
        requests: take only the first of them; None takes all.

    Raises:
        ConfigError: `sessions` or `requests` is out of range.
    """
    chosen = choose_sessions(lines, sessions)
    if requests is not None and not 1 <= requests <= len(chosen):
        raise ConfigError(
            f"--requests must be in 1..{len(chosen)} (the requests of {sessions} conversations), got {requests}"
        )
    chosen = chosen[:requests]
    tokenizer = train_tokenizer(line.text for line in lines)
    numbers = {session: number for number, session in enumerate(dict.fromkeys(line.session for line in chosen))}
    planned: list[PlannedRequest] = []
    texts: dict[str, list[str]] = {session: [] for session in numbers}
    positions: dict[str, list[int]] = {session: [] for session in numbers}
    for line in chosen:
        texts[line.session].append(line.text)
        turn = len(positions[line.session])
        parent = find_parent(texts[line.session], turn)
        new_text = line.text if parent is None else line.text[len(texts[line.session][parent]) :]
        planned.append(
            PlannedRequest(
                session=numbers[line.session],
                turn=turn,
                parent=None if parent is None else positions[line.session][parent],
                tokens=tuple(tokenizer.encode(new_text).ids),
            )
        )
        positions[line.session].append(len(planned) - 1)
    return RequestPlan(
        requests=tuple(planned),
        sessions=len(numbers),
        sessions_in_trace=len({line.session for line in lines}),
        requests_in_trace=len(lines),
    )


def build_prompt(
    request: PlannedRequest, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[int]:
    """The tokens of a request, from the prompts and answers of all requests before it."""
    if request.parent is None:
        return list(request.tokens)
    return [*prompts[request.parent], *answers[request.parent], *request.tokens]
