"""Measures what it costs to reuse the KV of documents that stand elsewhere in a prompt.

    OMP_NUM_THREADS=1 python bench/documents.py --model smollm2 --model FILE.gguf --record bench/records/documents.json

A judge computes each document alone, behind a fixed head that is dropped. In a prompt the keys are moved by one
rotation, and the first k tokens of each document are computed again in their place. The rest of the prompt is always
computed. Questions count only where the exact model answers rightly. A k passes if it keeps all bars.

Moved history is the second use: the first document is removed, and the others keep the KV that they had behind it.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import torch
from bench.parts.command import Counts, record_option, recorded_settings
from bench.parts.command import run as run_script
from transformers.cache_utils import DynamicCache

from kvtier.cli.options import tell_written
from kvtier.report.output import write_json
from kvtier.tools.bench.quality.command import SMOLLM2
from kvtier.tools.bench.quality.judge import Judge
from kvtier.tools.bench.quality.texts import PEOPLE, Texts, excerpt, read_texts
from kvtier.tools.demo.model import PRETRAINED, pretrained_file
from kvtier.tools.demo.request_plan import read_trace
from kvtier.tools.run_record import make_record

BARS = {"loss": 0.02, "loss_bound": 0.05, "kl_share": 0.05, "top1": 0.95, "nll": 0.02, "answers": 200}
"""Most right answers lost, and the 95 % bound on it; most KL as a share of the KL without documents; least top-1 and
most added loss on text; fewest right answers of the exact model."""
HISTORY_KL = 0.02
"""Most KL of moved history."""
HEAD = "<|im_start|>system\n\n\n\n\n\n"
"""What stands before a document when its KV is computed. It takes the attention that a first token gets."""
SYSTEM = (
    "<|im_start|>system\nYou answer questions about documents. Answer with what the documents say.<|im_end|>\n"
    "<|im_start|>user\n"
)
PLACES = ("beginning", "middle", "end")
DOCUMENTS, DOCUMENT_TOKENS = 3, (256, 512)
GIVEN_TOKENS, SCORED_TOKENS = 8, 96
"""Tokens of real text that are given after the documents, and those that are scored."""
SETS_MAX = 80
"""Most sets of documents with questions, however few answers were right."""
CONTROL_SETS = 3
"""Sets of documents, and texts, on which arms that are only controls are measured."""
HISTORY_SETS = 8
"""Sets of documents from which the first one is removed."""
FAR = 1000
"""Positions by which KV is moved to check the rotation."""
EXACT, NONE, WHOLE, UNROTATED = "exact", "no documents", "k = whole document", "keys not rotated"
ROTATED = "exact prompt, moved"
"""An arm whose only errors are those of a rotation in bf16."""
ROOMS = (
    "library", "workshop", "tower", "cellar", "chapel", "office", "archive", "kitchen", "studio", "garden",
    "laboratory", "garage",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """What follows the documents. `parts` are the positions in `tokens` to predict, each with the place of its fact."""

    kind: str
    tokens: list[int]
    parts: list[tuple[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Case:
    """Documents, what is asked about them, and what only the first one says."""

    documents: list[torch.Tensor]
    asks: list[Ask]
    secrets: list[Ask]


@dataclass(slots=True)
class Sums:
    """What one arm made of all tokens of one kind."""

    kl: list[float] = field(default_factory=list[float])
    """Mean of each case."""
    tokens: int = 0
    kl_sum: float = 0
    same: int = 0
    added_loss: float = 0
    kept: int = 0
    of: int = 0
    kinds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    places: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Answers kept and their number; an answer with two facts counts for both places."""
    log_p: float = 0
    """Logarithm of the probabilities of the answers."""

    def add(self, asks: Sequence[Ask], exact: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
        """Compare logarithms of probabilities, [predicted tokens, vocabulary] for each ask."""
        before = self.kl_sum, self.tokens
        for ask, first, other in zip(asks, exact, changed, strict=True):
            truth = truth_of(ask)
            self.kl_sum += (first.exp() * (first - other)).sum(-1).clamp_min(0).sum().item()
            self.same += int((first.argmax(-1) == other.argmax(-1)).sum())
            self.added_loss += (first - other).gather(-1, truth[:, None]).sum().item()
            self.log_p += other.gather(-1, truth[:, None]).sum().item()
            self.tokens += len(truth)
            is_right = other.argmax(-1) == truth
            self.kept, self.of = self.kept + bool(is_right.all()), self.of + 1
            kind = self.kinds[ask.kind]
            kind[:] = kind[0] + bool(is_right.all()), kind[1] + 1
            sizes = [len(it) for _, it in ask.parts]
            for (place, _), part in zip(ask.parts, is_right.split(sizes), strict=True):
                counts = self.places[place]
                counts[:] = counts[0] + bool(part.all()), counts[1] + 1
        self.kl.append((self.kl_sum - before[0]) / max(1, self.tokens - before[1]))

    def figures(self) -> dict[str, Any]:
        """Return the means and counts, as a record has them."""
        tokens, of = max(1, self.tokens), max(1, self.of)
        return {
            "kl": self.kl_sum / tokens,
            "top1": self.same / tokens,
            "nll": self.added_loss / tokens,
            "log_p": self.log_p / of,
            "tokens": self.tokens,
            "kept": self.kept,
            "of": self.of,
            "kinds": dict(self.kinds),
            "places": dict(self.places),
            "kl_by_case": self.kl,
        }


class PlacingJudge(Judge):
    """A judge that computes some tokens of a prompt over the KV of the others, in bf16 as engines do."""

    def __init__(self, path: Path, name: str = "") -> None:
        super().__init__(path, name)
        self._net = self._rounded
        self._frequencies: torch.Tensor = self._net.model.rotary_emb.inv_freq.float()
        self.head, self.system = self.tokens(HEAD), self.tokens(SYSTEM)

    def computed(
        self, kept: torch.Tensor, kept_at: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return the KV of `tokens` at positions `at`, which see the kept KV and each other at lower positions."""
        cache: Any = DynamicCache()
        for layer, both in enumerate(kept if len(kept_at) else ()):
            keys, values = both[:, None]
            cache.update(keys, values, layer)
        mask = (torch.cat((kept_at, at))[None] <= at[:, None])[None, None]
        with torch.inference_mode():
            self._net(
                tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, attention_mask=mask,
                position_ids=at[None],
            )  # fmt: skip
        new = [torch.stack((it.keys[0, :, len(kept_at) :], it.values[0, :, len(kept_at) :])) for it in cache.layers]
        return torch.stack(new)

    def moved(self, kv: torch.Tensor, by: int) -> torch.Tensor:
        """Rotate the keys once, in float32, for positions that are `by` higher."""
        angle = torch.cat((by * self._frequencies, by * self._frequencies))
        keys = kv[:, 0].float()
        turned = torch.cat((-keys[..., keys.shape[-1] // 2 :], keys[..., : keys.shape[-1] // 2]), -1)
        keys = keys * angle.cos() + turned * angle.sin()
        return torch.stack((keys.to(kv.dtype), kv[:, 1]), 1)

    def behind_head(self, document: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the KV of a document behind the fixed head, which begins at position `start`."""
        tokens = torch.cat((self.head, document), 1)
        at = torch.arange(start, start + tokens.shape[1])
        return self.computed(torch.empty(0), torch.arange(0), tokens, at)[..., self.head.shape[1] :, :]

    def again(self, kv: torch.Tensor, tokens: torch.Tensor, starts: Sequence[int], first: int) -> torch.Tensor:
        """Return `kv` with the `first` tokens behind each of `starts` computed again over the rest."""
        ends = [*starts[1:], tokens.shape[1]]
        is_new = torch.zeros(tokens.shape[1], dtype=torch.bool)
        for start, end in zip(starts, ends, strict=True):
            is_new[start : min(start + first, end)] = True
        if not first:
            return kv
        at, whole = torch.arange(tokens.shape[1]), kv.clone()
        whole[..., is_new, :] = self.computed(kv[..., ~is_new, :], at[~is_new], tokens[:, is_new], at[is_new])
        return whole

    def predict(self, kv: torch.Tensor, asks: Sequence[Ask]) -> list[torch.Tensor]:
        """Return logarithms of the probabilities at the predicted positions of each ask."""
        if not asks:
            return []
        lengths = [len(it.tokens) for it in asks]
        places = [
            [start + at - 1 for _, part in ask.parts for at in part]
            for ask, start in zip(asks, accumulate(lengths, initial=0), strict=False)
        ]
        tokens = torch.tensor([[token for it in asks for token in it.tokens]])
        found, _ = self.continued(kv, tokens, scored=torch.tensor([at for it in places for at in it]), lengths=lengths)
        return list(found.split([len(it) for it in places]))


def truth_of(ask: Ask) -> torch.Tensor:
    """Return the tokens that are to be predicted."""
    return torch.tensor([ask.tokens[at] for _, part in ask.parts for at in part])


def right(asks: Sequence[Ask], found: Sequence[torch.Tensor]) -> list[Ask]:
    """Return those asks that greedy decoding answers rightly."""
    pairs = zip(asks, found, strict=True)
    return [ask for ask, logs in pairs if bool((logs.argmax(-1) == truth_of(ask)).all())]


def question(judge: Judge, kind: str, *texts: str | tuple[str, str]) -> Ask:
    """Make a question of texts that are given, and pairs of an answer and the place of its fact."""
    tokens: list[int] = []
    parts: list[tuple[str, list[int]]] = []
    for it in texts:
        text, place = (it, "") if isinstance(it, str) else it
        new = judge.tokens(text)[0].tolist()
        if place:
            parts.append((place, [*range(len(tokens), len(tokens) + len(new))]))
        tokens += new
    return Ask(kind, tokens, parts)


def fact_case(judge: Judge, seed: int, prose: Sequence[str]) -> Case:
    """Make documents of real prose with facts at their beginning, middle and end, and questions about them."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    rooms = draw.sample(ROOMS, 3 * DOCUMENTS + DOCUMENTS - 1)
    people, codes = draw.sample(PEOPLE, DOCUMENTS), [str(it) for it in draw.sample(range(100, 1000), len(rooms))]
    lines: list[dict[str, list[str]]] = [{place: [] for place in PLACES} for _ in range(DOCUMENTS)]
    asks: list[Ask] = []

    def place_of(line: str, document: int, place: str = "") -> str:
        place = place or draw.choice(PLACES)
        lines[document][place].append(line)
        return place

    def ask(kind: str, text: str, *texts: str | tuple[str, str]) -> Ask:
        first, *rest = texts
        start = f"Question: {text}<|im_end|>\n<|im_start|>assistant\n{first}" if text else first
        return question(judge, kind, start, *rest)

    where = [PLACES[number % 3] for number in range(3 * DOCUMENTS)]  # room `number` is in document number // 3
    for number, place in enumerate(where):
        place_of(f"The access code of the {rooms[number]} is {codes[number]}.", number // 3, place)
    for number, place in enumerate(where):
        text, first = f"What is the access code of the {rooms[number]}?", f"The access code of the {rooms[number]} is"
        asks.append(ask("one fact", text, first, (f" {codes[number]}", place)))
    for number in range(len(where)):
        other = (number // 3 + 1) % DOCUMENTS * 3 + draw.randrange(3)
        pair = [(f" {codes[it]}", where[it]) for it in (number, other)]
        text = f"What are the access codes of the {rooms[number]} and of the {rooms[other]}?"
        first, second = f"The access code of the {rooms[number]} is", f". The access code of the {rooms[other]} is"
        asks.append(ask("two documents", text, first, pair[0], second, pair[1]))
    for number, person in enumerate(people):
        room = (number + 1) % DOCUMENTS * 3 + draw.randrange(3)
        place = place_of(f"{person} works in the {rooms[room]}.", number)
        second = f". The access code of the {rooms[room]} is", (f" {codes[room]}", where[room])
        asks.append(ask("two steps", "", f"{person} works in the", (f" {rooms[room]}", place), *second))
    for number in range(DOCUMENTS - 1):
        room, code = (it[3 * DOCUMENTS + number] for it in (rooms, codes))
        place_of(f"This page is about the {room}.", number)
        place = place_of(f"The access code of the place on the page before is {code}.", number + 1)
        first = f"The page before is about the {room}. The access code of the place on the page before is"
        asks.append(ask("page before", "", first, (f" {code}", place)))
    secrets = list[Ask]()
    for number in range(3):  # later documents use what the first one says, without its code
        place_of(f"The access code of the {rooms[number]} opens the cabinet here, too.", 1 + number % (DOCUMENTS - 1))
        text, first = f"What is the access code of the {rooms[number]}?", f"The access code of the {rooms[number]} is"
        secrets.append(ask("removed secret", text, first, (f" {codes[number]}", where[number])))
    return Case([_document(judge, draw, it, prose) for it in lines], asks, secrets)


def _document(judge: Judge, draw: random.Random, lines: dict[str, list[str]], prose: Sequence[str]) -> torch.Tensor:
    """Return a document with a length drawn from `DOCUMENT_TOKENS`."""
    for each in lines.values():
        draw.shuffle(each)
    first, middle, last = (" ".join(it) for it in lines.values())
    words = " ".join(draw.sample(prose, 8)).split()
    wanted, low, high = draw.randint(*DOCUMENT_TOKENS), 0, len(words)

    def made(count: int) -> torch.Tensor:
        parts = first, " ".join(words[: count // 2]), middle, " ".join(words[count // 2 : count]), last
        return judge.tokens(f"<document>\n{' '.join(parts)}\n</document>\n")

    while low < high:  # the longest that is not longer than wanted
        count = (low + high + 1) // 2
        low, high = (count, high) if made(count).shape[1] <= wanted else (low, count - 1)
    found = made(low)
    assert DOCUMENT_TOKENS[0] - 8 <= found.shape[1] <= DOCUMENT_TOKENS[1], found.shape
    return found


def text_case(judge: Judge, seed: int, parts: Sequence[str], place: float) -> Case:
    """Cut real text into documents that follow each other; what comes next is predicted."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    sizes = [draw.randint(*DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    *documents, rest = excerpt(judge, parts, place, sum(sizes) + GIVEN_TOKENS + SCORED_TOKENS).split(
        [*sizes, GIVEN_TOKENS + SCORED_TOKENS], 1
    )
    scored = [*range(GIVEN_TOKENS, rest.shape[1])]
    return Case(documents, [Ask("text", rest[0].tolist(), [("after", scored)])], [])


Table = dict[tuple[str, str], Sums]
"""Sums by arm, and by what was asked: questions, text, history, secrets."""


def measure(
    judge: PlacingJudge, case: Case, firsts: Sequence[int], table: Table, *, has_controls: bool, has_history: bool
) -> None:
    """Add one case to `table`."""
    system = judge.system.shape[1]
    tokens = torch.cat((judge.system, *case.documents), 1)
    starts = [*accumulate((it.shape[1] for it in case.documents[:-1]), initial=system)]
    exact = judge.prefix_kv(tokens)
    before = exact[..., :system, :]
    is_text = not case.secrets
    asks = case.asks if is_text else right(case.asks, judge.predict(exact, case.asks))
    reference = judge.predict(exact, asks)
    if not is_text:  # in bf16 a batch of other answers can change a close one, so a right one is right twice
        still = right(asks, reference)
        reference = [it for ask, it in zip(asks, reference, strict=True) if ask in still]
        asks = still
    alone = [judge.behind_head(it) for it in case.documents]
    at_head = judge.head.shape[1]
    placed = [before, *(judge.moved(it, start - at_head) for it, start in zip(alone, starts, strict=True))]
    joined = torch.cat(placed, 3)
    arms = {f"k = {first}": judge.again(joined, tokens, starts, first) for first in firsts}
    arms = {NONE: before, EXACT: exact, **arms}
    if has_controls:
        arms[WHOLE] = judge.again(joined, tokens, starts, DOCUMENT_TOKENS[1])
        arms[UNROTATED] = torch.cat([before, *alone], 3)
        there = judge.computed(torch.empty(0), torch.arange(0), tokens, torch.arange(tokens.shape[1]) + FAR)
        arms[ROTATED] = judge.moved(there, -FAR)
    what = "text" if is_text else "questions"
    for arm, kv in arms.items():
        if asks:
            table[arm, what].add(asks, reference, reference if arm == EXACT else judge.predict(kv, asks))
    if has_history:
        _measure_history(judge, case, firsts, table, exact)


def _measure_history(
    judge: PlacingJudge, case: Case, firsts: Sequence[int], table: Table, unedited: torch.Tensor
) -> None:
    """Remove the first document, and keep the KV that the others had behind it."""
    system, removed = judge.system.shape[1], case.documents[0].shape[1]
    tokens = torch.cat((judge.system, *case.documents[1:]), 1)
    asks, what = (case.secrets, "secrets") if case.secrets else (case.asks, "history")
    if case.secrets:
        asks = right(asks, judge.predict(unedited, asks))
    if not asks:
        return
    known = judge.predict(unedited, asks)
    edited = judge.prefix_kv(tokens)
    reference = judge.predict(edited, asks)
    later = torch.cat((edited[..., :system, :], judge.moved(unedited[..., system + removed :, :], -removed)), 3)
    table["not edited", what].add(asks, reference, known)
    table[EXACT, what].add(asks, reference, reference)
    for first in firsts:
        kv = judge.again(later, tokens, [system], first)
        table[f"k = {first}", what].add(asks, reference, judge.predict(kv, asks))


def bound(lost: int, of: int) -> float:
    """Return the upper end of Wilson's 95 % interval of a share."""
    share, z2 = lost / of, 1.96**2
    middle, half = share + z2 / (2 * of), 1.96 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return (middle + half) / (1 + z2 / of)


def judged(table: Table, arm: str) -> dict[str, Any]:
    """Return the figures that have bars, and those that are not within them."""
    asked, text = (table[arm, what].figures() for what in ("questions", "text"))
    lost, of = asked["of"] - asked["kept"], max(1, asked["of"])
    share: dict[str, float] = {}
    for what, figures in (("questions", asked), ("text", text)):  # a control has only the first cases
        mine, control = figures["kl_by_case"], table[NONE, what].kl
        share[what] = sum(mine) / max(1e-12, sum(control[: len(mine)]))
    found = {
        "loss": lost / of,
        "loss_bound": bound(lost, of),
        "kl_share_questions": share["questions"],
        "kl_share_text": share["text"],
        "top1": text["top1"],
        "nll": text["nll"],
    }
    limits = {name: BARS[name.rsplit("_", 1)[0] if name.startswith("kl_share") else name] for name in found}
    broken = [it for it, limit in limits.items() if (found[it] < limit if it == "top1" else found[it] > limit)]
    return found | {"fails": broken}


def move_check(judge: PlacingJudge, document: torch.Tensor) -> dict[str, float]:
    """Return how far keys that were moved by `FAR` are from keys computed there, and how far unmoved ones are."""
    here, there = judge.behind_head(document), judge.behind_head(document, FAR)
    size = there[:, 0].float().norm()

    def error(kv: torch.Tensor) -> float:
        return ((kv[:, 0].float() - there[:, 0].float()).norm() / size).item()

    return {"moved": error(judge.moved(here, FAR)), "not moved": error(here)}


def run_judge(judge: PlacingJudge, texts: Texts, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure one judge. Yield the results so far after each case."""
    table: Table = defaultdict(Sums)
    short = [it for it in texts["prose"] if len(it) < 600]
    lengths: list[int] = []
    places = [(name, it / plan["positions"]) for it in range(plan["positions"]) for name in texts]
    moves: dict[str, float] = {}
    for number in range(max(SETS_MAX, len(places))):
        has_controls, has_history = number < CONTROL_SETS, number < HISTORY_SETS
        if number < len(places):
            name, place = places[number]
            case = text_case(judge, plan["seed"] + number, texts[name], place)
            measure(judge, case, plan["k"], table, has_controls=has_controls, has_history=True)
        if table[EXACT, "questions"].of < plan["answers"] and number < SETS_MAX:
            case = fact_case(judge, plan["seed"] + number, short)
            lengths += [it.shape[1] for it in case.documents]
            moves = moves or move_check(judge, case.documents[0])
            measure(judge, case, plan["k"], table, has_controls=has_controls, has_history=has_history)
        elif number >= len(places):
            break
        click.echo(f"{judge.name}, {number + 1}: {table[EXACT, 'questions'].of} right answers", err=True)
        bars = {arm: judged(table, arm) for arm in dict.fromkeys(arm for arm, _ in table) if arm != "not edited"}
        enough = table[EXACT, "questions"].of >= BARS["answers"] and number + 1 >= len(places)
        yield {
            "model": judge.name,
            "document_tokens": {"least": min(lengths), "mean": sum(lengths) / len(lengths), "most": max(lengths)},
            "move_error": moves,
            "is_complete": enough,
            "passing_k": [it for it in plan["k"] if enough and not bars[f"k = {it}"]["fails"]],
            "bars": bars,
            "rows": [{"arm": arm, "what": what, **sums.figures()} for (arm, what), sums in table.items()],
        }


@click.command()
@click.option("--model", "models", multiple=True, default=(SMOLLM2,), show_default=True, help="As of bench quality.")
@click.option("--k", type=Counts(), default="0,8,16,32,64", show_default=True, help="First tokens to compute again.")
@click.option("--answers", type=click.IntRange(1), default=200, show_default=True, help="Right answers to collect.")
@click.option("--positions", type=click.IntRange(1), default=3, show_default=True, help="Excerpts of each text.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Seed of all draws.")
@record_option
def documents(models: Sequence[str], seed: int, record: Path | None, **given: Any) -> None:  # noqa: ANN401
    """Measure documents out of place against the bars of a gate. Nothing is downloaded."""
    torch.set_num_threads(1)
    longest: dict[str, str] = {}
    for line in read_trace():
        longest[line.session] = max(longest.get(line.session, ""), line.text, key=len)
    texts = read_texts([*longest.values()])
    results: dict[str, Any] = {"bars": BARS, "history_kl": HISTORY_KL, "judges": []}
    names: list[str] = []
    for model in models:
        judge = PlacingJudge(pretrained_file(), PRETRAINED) if model == SMOLLM2 else PlacingJudge(Path(model))
        names.append(judge.name)
        results["judges"].append({})
        for found in run_judge(judge, texts, {**given, "seed": seed}):
            results["judges"][-1] = found
            if record is not None:
                settings = recorded_settings({"models": names, **given})
                write_json("--record", record, make_record("documents", settings=settings, seed=seed, results=results))
        for arm, bars in results["judges"][-1].get("bars", {}).items():
            values = ", ".join(f"{it} {value:.4f}" for it, value in bars.items() if it != "fails")
            click.echo(f"{judge.name}, {arm}: {values}; fails: {', '.join(bars['fails']) or 'none'}")
    tell_written(record)


if __name__ == "__main__":
    run_script(documents)
