"""Makes questions about documents of this repository, and decides when two answers to one are the same."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

DOCUMENTS = Path(__file__).parents[1]
SHORTEST, LONGEST, TEXTS, QUESTIONS = 1000, 7000, 10, 5
"""Tokens of the shortest and the longest text, number of texts, and number of questions about each."""

ROUNDING = 2e-4
"""Rounding error of a difference of two log probabilities in float32. Other batches were measured to change one by at
most 6e-5."""
TIES = 2
"""How many of 50 answers may differ where two tokens are equally likely."""
ENOUGH = 0.95
"""Share of the restorable tokens that must be restored."""


class Said(Protocol):
    """An answer: its tokens, and for each step the likeliest tokens as (token, log probability)."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[list[tuple[int, float]]]: ...


class Comparison(NamedTuple):
    """The result of comparing answers with a reference's."""

    equal: int
    ties: list[int]
    """Positions of answers that take another token where two tokens of the reference are equally likely."""
    changed: list[int]
    """Positions of all other answers that differ."""


def questions_by_text(tokenizer: Any) -> list[list[list[int]]]:
    """Return prompts for a chat model as tokens: the questions of each text, from the shortest text on.

    The lengths are a geometric series. A text is the start of the shortest document that has enough tokens and that no
    longer text uses. A question asks about a heading or a name in the text.
    """
    files = sorted([*DOCUMENTS.glob("*.md"), *(DOCUMENTS / "docs").rglob("*.md")])
    documents = sorted((tokenizer.encode(file.read_text("utf-8")) for file in files), key=len)
    found: list[list[list[int]]] = []
    for number in reversed(range(TEXTS)):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** (number / (TEXTS - 1)))
        document = next(it for it in documents if len(it) >= length)
        documents.remove(document)
        text = tokenizer.decode(document[:length])
        names = ["".join(it) for it in re.findall(r"^#+ (.+)$|`([^`\n]+)`", text, re.MULTILINE)]
        names = list(dict.fromkeys(names))
        asked = [names[place * len(names) // QUESTIONS] for place in range(QUESTIONS)]
        contents = [f"{text}\n\nWhat does the text say about {name}? Answer in one sentence." for name in asked]
        chats = [[{"role": "user", "content": it}] for it in contents]
        found.append([tokenizer.apply_chat_template(it, add_generation_prompt=True).input_ids for it in chats])
    return found[::-1]


def compare(answers: Sequence[Said], wanted: Sequence[Said]) -> Comparison:
    """Compare `answers` with a reference's, `wanted`, and print the result."""
    lost = [_likelier(*pair) for pair in zip(answers, wanted, strict=True)]
    ties = [place for place, it in enumerate(lost) if it is not None and it <= ROUNDING]
    changed = [place for place, it in enumerate(lost) if it is not None and it > ROUNDING]
    result = Comparison(lost.count(None), ties, changed)
    print(result, [lost[place] for place in ties + changed])
    return result


def assert_same(answers: Sequence[Said], wanted: Sequence[Said]) -> None:
    """Assert that no answer has changed, and that few differ at a tie."""
    found = compare(answers, wanted)
    assert not found.changed
    assert len(found.ties) <= TIES


def _likelier(answer: Said, wanted: Said) -> float | None:
    """Return how much likelier the wanted token is at the first difference, as a difference of log probabilities."""
    for token, other, row in zip(answer.tokens, wanted.tokens, wanted.logprobs, strict=False):
        if token != other:
            known = dict(row)
            return known[other] - known.get(token, -math.inf)
    return None if len(answer.tokens) == len(wanted.tokens) else math.inf
