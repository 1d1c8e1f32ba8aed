"""The material that judges read: real texts, and documents with questions that only the document answers.

The code is Python's asyncio, and the prose is Python's reference; both come from this installation. The caller passes
the conversations of agents.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from pydoc_data.topics import topics

import torch

from kvtier.tools.bench.quality.judge import Judge

Texts = Mapping[str, Sequence[str]]
"""The parts of each text by its name. Parts are conversations, files or paragraphs."""

PEOPLE = (
    "Alice", "Bruno", "Carla", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "Jonas", "Karen", "Louis",
    "Maria", "Nadia", "Oscar", "Paula",
)  # fmt: skip
PROJECTS = ("Amber", "Birch", "Cedar", "Delta", "Falcon", "Garnet", "Harbor", "Indigo")
PARAGRAPHS = 12
"""Number of a document's paragraphs that questions are about. As many others come first."""
GIVEN_WORDS, COPIED_WORDS = 6, 5
"""Number of words that a question quotes from a paragraph, and of those that follow them in its answer."""
SHORT_CHARACTERS = 300
"""Paragraphs of a document with questions are shorter than this."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document, followed by its answer.

    Greedy decoding gives the answer if each token of the answer is the most probable one at its position.
    """

    kind: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    """Positions in `tokens` that the model has to predict."""


def read_texts(agent: Sequence[str]) -> Texts:
    """Return all texts. `agent` contains the conversations."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    return {"agent": agent, "code": [file.read_text("utf-8") for file in files], "prose": _paragraphs()}


def excerpt(judge: Judge, parts: Sequence[str], place: float, tokens: int) -> torch.Tensor:
    """Return `tokens` tokens of a text, from the beginning of one of its parts. After the last part comes the first.

    `place` says where to begin: 0 is the first part, and 0.5 the middle one.
    """
    found: list[str] = []
    # A token of these texts has fewer than 16 characters.
    for part in islice(cycle(parts), int(place * len(parts)), None):
        found.append(part)
        if sum(map(len, found)) > 16 * tokens:
            break
    return judge.tokens("\n\n".join(found)[: 16 * tokens])[:, :tokens]


def document(judge: Judge, seed: int, tokens: int) -> tuple[torch.Tensor, list[Question]]:
    """Make a document of exactly `tokens` tokens, [1, tokens], and the questions, grouped by kind.

    Facts stand between real paragraphs. A two-step answer names a project, and then this project's budget.
    """
    draw = random.Random(seed)  # noqa: S311 - no secret
    people, projects = draw.sample(PEOPLE, len(PEOPLE)), draw.sample(PROJECTS, len(PROJECTS))
    leads = dict(zip(people, projects, strict=False))
    codes = {it: draw.randint(1000, 9999) for it in (*people[len(leads) :], *projects)}
    facts = [f"Note: the {'budget' if it in projects else 'access code'} of {it} is {codes[it]}." for it in codes]
    facts += [f"Note: the project of {person} is {project}." for person, project in leads.items()]
    draw.shuffle(facts)
    paragraphs = draw.sample([it for it in _paragraphs() if len(it) < SHORT_CHARACTERS], 2 * PARAGRAPHS)
    filler, prose = paragraphs[:PARAGRAPHS], paragraphs[PARAGRAPHS:]
    lines = [it for each in zip_longest(prose, facts[::2], facts[1::2]) for it in each if it]
    found = judge.tokens("\n".join([*filler, *lines]) + "\n")[:, -tokens:]
    asked: list[tuple[str, ...]] = [
        ("recall", f"Note: the access code of {it} is", f" {codes[it]}") for it in people[len(leads) :]
    ]
    for person, project in leads.items():
        second = f".\nNote: the budget of {project} is", f" {codes[project]}"
        asked.append(("two steps", f"Note: the project of {person} is", f" {project}", *second))
    for words in (it.split() for it in prose):
        for start in range(0, len(words) - GIVEN_WORDS - COPIED_WORDS, COPIED_WORDS):
            middle = start + GIVEN_WORDS
            copied = " ".join(["", *words[middle : middle + COPIED_WORDS]])
            asked.append(("copy", " ".join(words[start:middle]), copied))
    return found, [_question(judge, *it) for it in asked]


def _question(judge: Judge, kind: str, *texts: str) -> Question:
    """Return a question. The `texts` are alternately given to the model and expected as its answer."""
    tokens: list[int] = []
    answer: list[int] = []
    for number, text in enumerate(texts):
        new = judge.tokens(text)[0].tolist()
        if number % 2:
            answer += range(len(tokens), len(tokens) + len(new))
        tokens += new
    return Question(kind, tuple(tokens), tuple(answer))


def _paragraphs() -> list[str]:
    """Return paragraphs of prose, each as one line."""
    found = (" ".join(it.split()) for text in topics.values() for it in re.split(r"\n\s*\n", text) if it[:1].isalpha())
    return list(dict.fromkeys(it for it in found if 120 < len(it) < 900 and it.endswith(".")))
