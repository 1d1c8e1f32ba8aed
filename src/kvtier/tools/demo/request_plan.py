"""The requests of the demo: a recorded trace of agent conversations, as prompts of tokens.

The trace has the input of each turn without the model's earlier answers. To show the reuse of generated tokens, a
prompt consists of the earlier prompt, this model's answer, and the tokens that the conversation added.

`StoredPrefixes` counts the tokens that a perfect cache would restore. It needs only tokens, and not kvtier. A request
stores the whole chunks of its prompt and answer without the answer's last token. No forward pass reads that token, so
it has no KV.
"""

import gzip
import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRACE = Path(__file__).parent / "data" / "lmcache_miniswe_text_12sessions.jsonl.gz"
TRACE_NAME = "LMCache/lmcache-agent-trace, mini-swe-agent on SWE-bench, the 12 smallest conversations (Apache-2.0)"

VOCABULARY = 4096
"""Number of tokens in the tokenizer that `train_tokenizer` trains, and in models with random weights."""

QUESTION_CHARACTERS = 80
"""Most characters of a question that are shown."""
ANSWER_CHARACTERS = 240
"""Most characters of an answer that are shown."""

_COMMAND = re.compile(r"\s*<returncode>(\d+)</returncode>\s*<output>(.*)</output>\s*", re.DOTALL)
_UNINFORMATIVE = re.compile(r"\s*(<.*>|Consider the following PR description:)?\s*")


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line of the trace."""

    time_us: int
    session: str
    text: str


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. Its prompt consists of the prompt and answer of the parent, if any, and then `tokens`."""

    session: int
    """Number of the conversation, from 0, by start time."""
    turn: int
    """Number of the request in its conversation, from 0."""
    parent: int | None
    """Position in the plan of the parent, the earlier request of the conversation that this one continues."""
    tokens: tuple[int, ...]
    end: int | None = None
    """Token that ends the parent's answer. The prompt gets this token if the answer was cut off before it."""


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer, with the text of a model's chat template around each message of the user."""

    tokenizer: "Tokenizer"
    first: Sequence[str] = ("", "")
    """Text before and after the first message of a conversation."""
    later: Sequence[str] = ("", "")
    """Text before and after a later message, without the token that ends the earlier answer."""
    end: int | None = None
    """Token that ends an answer."""

    def encode(self, text: str, *, is_first: bool) -> tuple[int, ...]:
        """Return the tokens of a user's message with the text of the chat template around it."""
        before, after = self.first if is_first else self.later
        return tuple(self.tokenizer.encode(f"{before}{text}{after}", add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return self.tokenizer.decode(tokens)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The requests of a demo in sending order."""

    requests: tuple[PlannedRequest, ...]
    questions: tuple[str, ...]
    """The informative part of the user's message of each request, in one line."""
    tokenizer: ChatTokenizer
    sessions: int
    """Number of conversations with at least one request in the plan."""
    sessions_in_trace: int
    requests_in_trace: int


def read_trace(path: Path = TRACE) -> list[TraceLine]:
    """Read the lines of a trace, sorted by time.

    Raises:
        ConfigError: the file is missing or has another format.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            members = [json.loads(line) for line in lines]
        found = [TraceLine(int(it["timestamp"]), str(it["session_id"]), str(it["input"])) for it in members]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error
    return sorted(found, key=lambda it: it.time_us)


def choose_sessions(lines: Sequence[TraceLine], count: int) -> list[TraceLine]:
    """Return the lines of the `count` conversations with the least text, sorted by time.

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


def _first_turns(lines: Sequence[TraceLine], count: int) -> list[TraceLine]:
    """Choose `count` lines: first turns before second turns, and so on. Return them in their old order.

    Among lines of the same turn, earlier ones are preferred.
    """
    turns: Counter[str] = Counter()
    ranked: list[tuple[int, int]] = []
    for position, line in enumerate(lines):
        ranked.append((turns[line.session], position))
        turns[line.session] += 1
    return [lines[position] for position in sorted(position for _, position in sorted(ranked)[:count])]


def one_line(text: str, most: int) -> str:
    """Make text safe for a terminal: one line of at most `most` characters without control characters."""
    shown = " ".join("".join(it if it.isprintable() else " " for it in text).split())
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def question_of(text: str) -> str:
    """Return the informative part of a user's message: the title of a pull request, or the output of a command."""
    command = _COMMAND.fullmatch(text)
    lines = [it for it in (command[2] if command else text).splitlines() if not _UNINFORMATIVE.fullmatch(it)]
    # The last line of a Python error says what went wrong.
    line = next(iter(reversed(lines) if lines and lines[0].startswith("Traceback") else lines), "no output")
    return one_line(f"exit code {command[1]}: {line}" if command else line, QUESTION_CHARACTERS)


def train_tokenizer(texts: Iterable[str]) -> ChatTokenizer:
    """Train a byte-level BPE tokenizer of `VOCABULARY` tokens. Equal texts give equal tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415  an extra

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return ChatTokenizer(tokenizer)


def find_parent(texts: Sequence[str], position: int) -> int | None:
    """Return the position of the earlier text that the text at `position` continues, or None.

    If it continues several, the longest counts, and of equal ones the latest.
    """
    earlier = [j for j in range(position) if texts[position].startswith(texts[j])]
    return max(earlier, key=lambda j: (len(texts[j]), j)) if earlier else None


def plan_requests(
    lines: Sequence[TraceLine], *, sessions: int, requests: int | None, tokenizer: ChatTokenizer | None = None
) -> RequestPlan:
    """Tokenize the trace and choose its requests.

    Args:
        lines: the whole trace.
        sessions: number of conversations to take, the shortest first.
        requests: number of requests to take, the first turns of each conversation first. None takes all requests.
        tokenizer: the model's tokenizer. None trains a tokenizer on the trace.

    Raises:
        ConfigError: `sessions` or `requests` is out of range.
    """
    chosen = choose_sessions(lines, sessions)
    if requests is not None and not 1 <= requests <= len(chosen):
        raise ConfigError(
            f"--requests must be in 1..{len(chosen)} (the requests of {sessions} conversations), got {requests}"
        )
    if requests is not None:
        chosen = _first_turns(chosen, requests)
    tokenizer = tokenizer or train_tokenizer(line.text for line in lines)
    numbers = {session: number for number, session in enumerate(dict.fromkeys(line.session for line in chosen))}
    planned: list[PlannedRequest] = []
    questions: list[str] = []
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
                tokens=tokenizer.encode(new_text, is_first=parent is None),
                end=tokenizer.end,
            )
        )
        questions.append(question_of(new_text))
        positions[line.session].append(len(planned) - 1)
    return RequestPlan(
        requests=tuple(planned),
        questions=tuple(questions),
        tokenizer=tokenizer,
        sessions=len(numbers),
        sessions_in_trace=len({line.session for line in lines}),
        requests_in_trace=len(lines),
    )


def most_tokens(requests: Sequence[PlannedRequest], new_tokens: int) -> int:
    """Return how many tokens the longest prompt and its answer have, if every answer has `new_tokens`."""
    most: list[int] = []
    for request in requests:
        # The token that ends an answer counts as well.
        earlier = 0 if request.parent is None else most[request.parent] + 1
        most.append(earlier + len(request.tokens) + new_tokens)
    return max(most)


def build_prompt(
    request: PlannedRequest, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[int]:
    """Build the prompt of a request from the prompts and answers of all earlier requests."""
    if request.parent is None:
        return list(request.tokens)
    answer = answers[request.parent]
    end = [] if request.end is None or answer[-1] == request.end else [request.end]
    return [*prompts[request.parent], *answer, *end, *request.tokens]


class StoredPrefixes:
    """The prefixes of all stored token sequences, in whole chunks. A digest of the tokens names each prefix."""

    def __init__(self, chunk_tokens: int, digests: Iterable[str] = ()) -> None:
        self.chunk_tokens = chunk_tokens
        self.digests = set(digests)

    def store(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add the chunks of a request that has ended."""
        self.digests.update(_prefix_digests([*prompt, *answer[:-1]], self.chunk_tokens))

    def restorable_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of leading tokens of `prompt` that need not be computed.

        The last token is always computed, because its output gives the next token. So the last chunk of a prompt that
        ends on a chunk boundary counts one token less.
        """
        chunks = 0
        for digest in _prefix_digests(prompt, self.chunk_tokens):
            if digest not in self.digests:
                break
            chunks += 1
        return min(chunks * self.chunk_tokens, max(len(prompt) - 1, 0))


def _prefix_digests(tokens: Sequence[int], chunk_tokens: int) -> list[str]:
    running = hashlib.sha256()
    digests: list[str] = []
    for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
        running.update(array("q", tokens[end - chunk_tokens : end]).tobytes())
        digests.append(running.hexdigest()[:32])
    return digests
