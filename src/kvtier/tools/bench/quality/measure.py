"""Measures how lossy KV changes what judges predict in real texts, answers to questions, and chains of turns.

A judge is a language model. A chain computes a text turn by turn, each after the restored KV of earlier turns.

Each figure compares a judge with itself on its exact KV. The yardstick is the change that bf16 arithmetic alone causes
on exact KV and the same text.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import NamedTuple

import torch

from kvtier.tools.bench.quality.forms import CHUNK_TOKENS, restored
from kvtier.tools.bench.quality.judge import Judge
from kvtier.tools.bench.quality.texts import Question, Texts, document, excerpt

SCORED_TOKENS = 160
"""Number of scored tokens after the prefix of a text."""
DOCUMENT_TOKENS = 1024
DOCUMENTS_MAX = 60
"""Most documents with questions, however few answers are right."""
POWER_DOCUMENTS = 3
"""Number of documents on which the references are measured too. The codecs are measured on all documents."""
BF16 = "bf16 arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """How a judge continues a text after a prefix that was stored in one form."""

    model: str
    text: str
    """Name of the text, and tokens of the prefix."""
    codec: str
    ratio: float
    """Stored bytes as a share of the raw ones."""
    kl: float
    """Mean Kullback-Leibler divergence, in nats, of the next token's distribution from that on exact KV."""
    kl_p99: float
    top1: float
    """Share of tokens whose best next token is the same as on exact KV."""
    perplexity_change: float
    """Perplexity of the text divided by that on exact KV, minus 1."""
    noise_kl: float
    """`kl` of bf16 arithmetic on exact KV."""
    noise_top1: float
    samples: Sequence[float]
    """`kl` of each excerpt."""


@dataclass(slots=True)
class TaskRow:
    """Counts the answers that stay right, among those that are right on exact KV."""

    model: str
    codec: str
    kept: int = 0
    of: int = 0
    """Answers that are right on exact KV."""
    kinds: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """`kept` and `of` of each kind of question."""

    def add(self, kind: str, *, is_kept: bool) -> None:
        """Count an answer that is right on exact KV."""
        counts = self.kinds.setdefault(kind, [0, 0])
        self.kept, self.of = self.kept + is_kept, self.of + 1
        counts[:] = counts[0] + is_kept, counts[1] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """Growth of the loss if every turn is computed after restored KV, and then stored in the same form."""

    model: str
    codec: str
    kl_by_turn: Sequence[float]
    """Mean KL of each turn over the texts."""
    kl_once: float
    """KL of the last turn if the KV before it was computed exactly, and then stored and restored only once."""
    samples: Sequence[Sequence[float]]
    """For each text, the KL of each turn and then `kl_once`."""


@dataclass(slots=True)
class QualityResult:
    """All rows."""

    results: list[TextRow] = field(default_factory=list[TextRow])
    tasks: list[TaskRow] = field(default_factory=list[TaskRow])
    turns: list[TurnRow] = field(default_factory=list[TurnRow])


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityPlan:
    """The measurements to make."""

    codecs: Sequence[str]
    references: Sequence[str]
    tokens: Sequence[int]
    """Lengths of prefixes. Only the first is measured at all `positions`."""
    positions: int
    answers: int
    """Number of right answers on exact KV to collect; 0 means no questions."""
    turns: int
    """Turns of a chain; 0 means no chains."""
    seed: int

    def steps(self, texts: Texts) -> int:
        """Return about how many steps of progress `measure` reports for one judge; questions are only estimated."""
        return len(texts) * (self.positions + len(self.tokens) - 1 + self.turns) + self.answers


class _Score(NamedTuple):
    """Scores of tokens. Each tensor has one number per token."""

    kl: torch.Tensor
    is_same: torch.Tensor
    """Whether the best next token is the same as on exact KV."""
    added_loss: torch.Tensor
    """Cross entropy of the text minus that on exact KV, without a number for the last token."""


def measure(
    judge: Judge,
    texts: Texts,
    plan: QualityPlan,
    result: QualityResult,
    advance: Callable[[float], None] = lambda _steps: None,
) -> Iterator[None]:
    """Add the rows of one judge to `result`. Yield after each part."""
    longest = (judge.positions - SCORED_TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS
    first, *further = (min(it, longest) for it in plan.tokens)
    for name in texts:
        places = [it / plan.positions for it in range(plan.positions)]
        result.results += _text_rows(judge, texts, name, places, first, plan, advance)
        yield
    if plan.turns:
        result.turns += _turn_rows(judge, texts, plan, advance)
        yield
    if plan.answers:
        rows = {it: TaskRow(judge.name, it) for it in (*plan.codecs, BF16, *plan.references)}
        result.tasks += rows.values()
        yield from _ask(judge, plan, rows, advance)
    for length, name in product(further, texts):
        result.results += _text_rows(judge, texts, name, [0.0], length, plan, advance)
        yield


def _text_rows(
    judge: Judge,
    texts: Texts,
    name: str,
    places: Sequence[float],
    length: int,
    plan: QualityPlan,
    advance: Callable[[float], None],
) -> list[TextRow]:
    scores: dict[str, list[_Score]] = {}
    ratios: dict[str, float] = {}
    for place in places:
        prefix, rest = excerpt(judge, texts[name], place, length + SCORED_TOKENS).split(length, 1)
        kv = judge.prefix_kv(prefix)
        exact, _ = judge.continued(kv, rest, scored=SCORED_TOKENS)
        rounded, _ = judge.continued(kv, rest, scored=SCORED_TOKENS, is_rounded=True)
        scores.setdefault(BF16, []).append(_score(exact, rounded, rest))
        for form in (*plan.codecs, *plan.references):
            back = restored(kv, form)
            changed, _ = judge.continued(back.kv, rest, scored=SCORED_TOKENS)
            scores.setdefault(form, []).append(_score(exact, changed, rest))
            ratios[form] = back.ratio
        advance(1)
    whole = {form: _Score(*map(torch.cat, zip(*parts, strict=True))) for form, parts in scores.items()}
    return [
        TextRow(
            model=judge.name,
            text=f"{name} {length}",
            codec=form,
            ratio=round(ratio, 4),
            kl=whole[form].kl.mean().item(),
            kl_p99=whole[form].kl.quantile(0.99).item(),
            top1=whole[form].is_same.mean().item(),
            perplexity_change=whole[form].added_loss.mean().exp().item() - 1,
            noise_kl=whole[BF16].kl.mean().item(),
            noise_top1=whole[BF16].is_same.mean().item(),
            samples=[it.kl.mean().item() for it in scores[form]],
        )
        for form, ratio in ratios.items()
    ]


def _turn_rows(judge: Judge, texts: Texts, plan: QualityPlan, advance: Callable[[float], None]) -> list[TurnRow]:
    found: dict[str, list[list[float]]] = {it: [] for it in plan.codecs}
    for parts in texts.values():
        first, *turns = excerpt(judge, parts, 0.5, (plan.turns + 1) * CHUNK_TOKENS).split(CHUNK_TOKENS, 1)
        exact_kv = judge.prefix_kv(first)
        chains = {it: restored(exact_kv, it).kv for it in plan.codecs}
        kls: dict[str, list[float]] = {it: [] for it in plan.codecs}
        for number, turn in enumerate(turns, 1):
            exact, new = judge.continued(exact_kv, turn, scored=CHUNK_TOKENS)
            for form, kv in chains.items():
                changed, its_new = judge.continued(kv, turn, scored=CHUNK_TOKENS)
                kls[form].append(_score(exact, changed, turn).kl.mean().item())
                chains[form] = torch.cat((kv, restored(its_new, form, number).kv), 3)
                if number == plan.turns:
                    changed, _ = judge.continued(restored(exact_kv, form).kv, turn, scored=CHUNK_TOKENS)
                    kls[form].append(_score(exact, changed, turn).kl.mean().item())
            exact_kv = torch.cat((exact_kv, new), 3)
            advance(1)
        for form, kl in kls.items():
            found[form].append(kl)
    rows: list[TurnRow] = []
    for form, samples in found.items():
        *by_turn, once = (sum(it) / len(it) for it in zip(*samples, strict=True))
        rows.append(TurnRow(model=judge.name, codec=form, kl_by_turn=by_turn, kl_once=once, samples=samples))
    return rows


def _ask(
    judge: Judge, plan: QualityPlan, rows: Mapping[str, TaskRow], advance: Callable[[float], None]
) -> Iterator[None]:
    """Ask until enough answers are right on exact KV. Count in `rows` which stay right. Yield after each document."""
    for number in range(DOCUMENTS_MAX):
        if rows[BF16].of >= plan.answers:
            break
        tokens, questions = document(judge, plan.seed + number, DOCUMENT_TOKENS)
        kv = judge.prefix_kv(tokens)
        known = [it for it, is_right in zip(questions, _answers(judge, kv, questions), strict=True) if is_right]
        for form, row in rows.items():
            if not known or (form in plan.references and number >= POWER_DOCUMENTS):
                continue
            its_kv = kv if form == BF16 else restored(kv, form).kv
            for it, is_kept in zip(known, _answers(judge, its_kv, known, is_rounded=form == BF16), strict=True):
                row.add(it.kind, is_kept=is_kept)
        advance(len(known))
        yield


def _answers(
    judge: Judge, kv: torch.Tensor, questions: Sequence[Question], *, is_rounded: bool = False
) -> Iterator[bool]:
    """Yield, for each question about one document, whether greedy decoding after its `kv` gives the answer."""
    lengths = [len(it.tokens) for it in questions]
    starts = accumulate(lengths, initial=0)
    places = [torch.tensor(it.answer) + start for it, start in zip(questions, starts, strict=False)]
    tokens, scored = torch.tensor([[token for it in questions for token in it.tokens]]), torch.cat(places)
    changed, _ = judge.continued(kv, tokens, scored=scored - 1, lengths=lengths, is_rounded=is_rounded)
    is_right = changed.argmax(-1) == tokens[0, scored]
    yield from (bool(it.all()) for it in is_right.split([len(it) for it in places]))


def _score(exact: torch.Tensor, changed: torch.Tensor, tokens: torch.Tensor) -> _Score:
    """Compare log probabilities on exact and on changed KV, [tokens, vocabulary]. `tokens` has shape [1, tokens]."""
    kl = (exact.exp() * (exact - changed)).sum(-1).clamp_min(0)
    is_same = (exact.argmax(-1) == changed.argmax(-1)).float()
    added = (exact - changed)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
    return _Score(kl, is_same, added)
