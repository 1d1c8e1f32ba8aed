"""Other people's figures: the counting convention that turns our size into theirs, if one does.

A figure is recomputed with each convention in use: 1,000 or 1,024 bytes, 4,000 or 4,096 tokens, heads instead of KV
heads, and so on. Conventions that reproduce its digits match; the fewer it takes, the likelier. `published_cells` does
the same for the published tables in ``published_sizes.toml``.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvtier.errors import ConfigError
from kvtier.report.format import both, decimal, exact
from kvtier.size.caches import LayerCache, TokenPart
from kvtier.size.sizes import KvSize, of

Agreement = Literal["exact", "cut", "rounded", "coarse"]
"""Digits agree when rounded to the last one, when cut off after it, to the last one of very few, or to fewer."""
Judgement = Literal["exact", "cut", "rounded", "other unit", "bound", "wrong"]
"""Of a published figure: right as written (a kB is 1,000 bytes, 4K tokens are 4,096); the same cut off instead of
rounded; right to fewer digits, or multiplied from a rounded size of a token; right in other conventions, each of which
the reason names; a number of modules that is enough; right in none."""

_EXACT_MAX = 0.005
"""Largest relative error of digits that count as exact."""
_CUT_MAX = 0.02
_COARSE_MAX = 0.05
_COST_MAX = 2
"""Most conventions that are combined; more of them could explain any figure."""
_AT_LEAST = "at least "
_MIXED_COST = 2
"""Mixing units is a mistake, not a convention: it must explain a figure alone."""
_COPIES_AT = (2, 4, 8, 16)
"""Tensor-parallel sizes whose copies a figure may include."""
_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_FIGURE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgtpe]?i?)b", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Figure:
    """A size as printed in a document, such as ``150 KB``."""

    text: str
    number: float
    prefix: str
    """Upper case: "" for bytes, then "K", "M" ... "E"."""
    is_binary: bool
    """It says KiB, so 1,024 is meant; KB may mean either."""
    step: float
    """What the last printed digit counts: 0.01 for 1.47."""
    rough: float
    """The same without trailing zeros, which may be printed for their place alone: 10 for 150."""

    def bytes(self, thousand: int) -> float:
        """The figure in bytes, read with a kilo of `thousand`."""
        return self.number * self.unit_bytes(thousand)

    def unit_bytes(self, thousand: int) -> float:
        """Bytes of the figure's unit, read with a kilo of `thousand`."""
        return float(thousand) ** _PREFIXES.index(self.prefix)


def parse_figure(text: str) -> Figure:
    """Read a printed size.

    Raises:
        ValueError: it is not a size.
    """
    found = _FIGURE.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None or not float(found[1]):
        raise ValueError("not a size; write it like 150 KB, 0.33 GB or 144 KiB")
    digits, unit = found[1], found[2].upper()
    decimals = len(digits.partition(".")[2])
    zeros = 0 if decimals else len(digits) - len(digits.rstrip("0"))
    return Figure(
        text=text.strip(),
        number=float(digits),
        prefix=unit.removesuffix("I"),
        is_binary=unit.endswith("I"),
        step=10.0**-decimals,
        rough=10.0 ** (zeros or -decimals),
    )


@dataclass(frozen=True, slots=True)
class Unit:
    """One reading of a prefix."""

    name: str
    bytes: float
    is_as_written: bool = False
    """A KB of 1,000 bytes, a KiB of 1,024."""
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A size that the figure may mean."""

    what: str
    """The thing whose size it is."""
    bytes: float
    steps: tuple[str, ...] = ()
    """Conventions that differ from ours, other than the unit."""


@dataclass(frozen=True, slots=True)
class FigureMatch:
    """A candidate that reproduces the figure's digits."""

    candidate: Candidate
    unit: Unit
    agreement: Agreement

    @property
    def cost(self) -> int:
        """Number of assumptions; 0 for our own figure in either unit."""
        return len(self.candidate.steps) + self.unit.is_mixed * _MIXED_COST + (self.agreement == "coarse")

    @property
    def text(self) -> str:
        """The match in one line."""
        steps = f", counted with {' and '.join(self.candidate.steps)}" if self.candidate.steps else ""
        digits = {
            "exact": "",
            "cut": ", cut off, not rounded",
            "rounded": ", rounded",
            "coarse": ", rounded or cut to fewer digits",
        }[self.agreement]
        return f"{self.candidate.what}{steps} ({exact(self.candidate.bytes)} B), {self.unit.name}{digits}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check."""

    figure: Figure
    matches: tuple[FigureMatch, ...]
    """The simplest first; empty when no convention reproduces the figure."""
    nearest: Candidate
    """The nearest of our own sizes."""

    @property
    def text(self) -> str:
        """The result in one line."""
        if self.matches:
            return f"{self.figure.text} is {self.matches[0].text}"
        ratio = _as_written(self.figure) / self.nearest.bytes
        return (
            f"{self.figure.text}: no convention known here gives it; it is {ratio:.3g} times {self.nearest.what}, "
            f"{exact(self.nearest.bytes)} B = {both(self.nearest.bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCell:
    """One published figure, judged."""

    document: str
    row: str
    column: str
    printed: str
    model: str
    tokens: int
    users: int
    bytes: float
    """Exact size: every layer, 16-bit elements, one copy."""
    bytes_minimum: float
    """The minimum: windows forget."""
    verdict: Judgement
    because: str


def check(kv: KvSize, text: str, sessions: Sequence[tuple[int, int]] = ()) -> Verdict:
    """Compare the figure `text` with the sizes of `kv`.

    Args:
        kv: our sizes.
        text: the figure, such as ``150 KB``.
        sessions: (tokens, users) whose totals it may mean.

    Raises:
        ConfigError: `text` is not a size.
    """
    try:
        figure = parse_figure(text)
    except ValueError as error:
        raise ConfigError(f"check: {text!r} is {error}") from error
    matches = _search(kv, figure, sessions)
    kept: dict[tuple[float, float], FigureMatch] = {}
    for match in sorted(matches, key=lambda match: (match.cost, match.agreement == "coarse", match.agreement == "cut")):
        kept.setdefault((match.candidate.bytes, match.unit.bytes), match)  # the simplest of equal results
    nearest = min(
        (each for each in _own(kv, sessions) if not each.steps),
        key=lambda each: abs(math.log(_as_written(figure) / each.bytes)),
    )
    return Verdict(figure, tuple(kept.values()), nearest)


def _search(kv: KvSize, figure: Figure, sessions: Sequence[tuple[int, int]]) -> list[FigureMatch]:
    """Everything that gives the digits of `figure`."""
    candidates = (*_own(kv, sessions), *_recounted(kv, sessions))
    return [match for each in candidates for match in _matches(each, figure)]


def _as_written(figure: Figure) -> float:
    return figure.bytes(1024 if figure.is_binary else 1000)


def _matches(candidate: Candidate, figure: Figure) -> Iterator[FigureMatch]:
    """Matches of `candidate`, one for each unit that gives the digits of `figure`."""
    for unit in _units(figure):
        agreement = _agreement(candidate.bytes / unit.bytes, figure)
        # Few digits agree with something sooner or later, so they must agree with a size of ours as it is written.
        if agreement is None or (agreement == "coarse" and (candidate.steps or not unit.is_as_written)):
            continue
        match = FigureMatch(candidate, unit, agreement)
        if match.cost <= _COST_MAX:
            yield match


def _agreement(value: float, figure: Figure) -> Agreement | None:
    """Agreement of `value`, in the unit of `figure`, with its digits."""
    off = value - figure.number
    error, slack = abs(off) / figure.number, 1 + 1e-9
    is_rounded = abs(off) <= figure.step / 2 * slack
    is_cut = 0 <= off < figure.step / slack
    if error <= _EXACT_MAX and (is_rounded or is_cut):
        return "exact" if is_rounded else "cut"
    if is_rounded and error <= _COARSE_MAX:
        return "rounded"
    is_coarse = (is_cut and error <= _CUT_MAX) or (abs(off) <= figure.rough / 2 * slack and error <= _COARSE_MAX)
    return "coarse" if is_coarse else None


def _units(figure: Figure) -> Iterator[Unit]:
    """Readings of the prefix of `figure`: by 1,000, by 1,024, and mixtures of both."""
    power = _PREFIXES.index(figure.prefix)
    if not power:
        yield Unit("bytes", 1.0, is_as_written=True)
        return
    prefix = f"{figure.prefix}B"
    if not figure.is_binary:
        yield Unit(f"{prefix} = {_power(1000, power)} B", 1000.0**power, is_as_written=True)
    yield Unit(f"{prefix} = {_power(1024, power)} B", 1024.0**power, is_as_written=figure.is_binary)
    for binary in range(1, 1 if figure.is_binary else power):
        name = f"units mixed: {prefix} = {_power(1024, binary)} x {_power(1000, power - binary)} B"
        yield Unit(name, 1024.0**binary * 1000.0 ** (power - binary), is_mixed=True)


def _power(base: int, power: int) -> str:
    return f"{base:,}" if power == 1 else f"{base:,}^{power}"


def _token_readings(tokens: int) -> Iterator[tuple[int, str]]:
    """Other readings of the same number of tokens: 4,096 and 4,000, 131,072 and 128,000."""
    for unit, other_unit in ((1024, 1000), (1000, 1024)):
        if tokens % unit == 0:
            other = tokens // unit * other_unit
            yield other, f"{other:,} tokens"


def _rounded_early(bytes_per_token: float) -> Iterator[tuple[float, str]]:
    """Sizes of a token that was rounded before multiplying."""
    if not bytes_per_token:
        return
    for step, units in ((1000, ("kB", "MB")), (1024, ("KiB", "MiB"))):
        for power, unit in enumerate(units, 1):
            number = bytes_per_token / step**power
            for digits in (2, 3):
                last = Decimal(1).scaleb(Decimal(number).adjusted() - digits + 1)
                early = float(Decimal(number).quantize(last, ROUND_HALF_UP))
                if early != number and early >= 0.1:
                    yield early * step**power, f"a token rounded to {early:g} {unit} before multiplying"


def _own(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Our own sizes, and those of sessions with other readings of their tokens."""
    is_mixed = kv.bytes_per_token_growing not in {0, kv.bytes_per_token}
    for what, size in (
        ("a token, all layers" if is_mixed else "a token", kv.bytes_per_token),
        ("a token, layers without a window", kv.bytes_per_token_growing if is_mixed else 0),
        (f"a token with the copies at TP {kv.tp}", kv.bytes_per_token_stored if kv.duplication > 1 else 0),
        ("windows and states of a session", kv.bytes_per_session_constant),
        (f"a chunk of {kv.chunk_tokens} tokens on a rank", kv.chunk_bytes_per_rank),
    ):
        if size:
            yield Candidate(what, size)
    for tokens, users in sessions:
        name = _session(tokens, users)
        readings = ((other, (step,)) for other, step in _token_readings(tokens))
        for count, steps in ((tokens, ()), *readings):
            total = kv.total(count, users)
            if total.bytes == total.bytes_minimum:
                yield Candidate(name, total.bytes, steps)
            else:
                yield Candidate(f"{name}, all layers and ranks", total.bytes, steps)
                yield Candidate(f"{name}, minimum", total.bytes_minimum, steps)
        for early, step in _rounded_early(kv.bytes_per_token_stored):
            yield Candidate(name, early * tokens * users, (step,))


def _session(tokens: int, users: int) -> str:
    return f"{users:,} x {tokens:,} tokens" if users > 1 else f"{tokens:,} tokens"


def _recounted(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Sizes by other ways to count the bytes of a token."""
    for per_token, steps in _countings(kv):
        yield Candidate("a token", per_token, steps)
        for tokens, users in sessions:
            name = _session(tokens, users)
            yield Candidate(name, per_token * tokens * users, steps)
            if len(steps) < _COST_MAX:
                for other, step in _token_readings(tokens):
                    yield Candidate(name, per_token * other * users, (*steps, step))


def _countings(kv: KvSize) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Bytes a token by other conventions."""
    model, usual = kv.model, kv.bytes_per_token
    heads, hidden = model.attention_heads, model.hidden_size
    by_heads = f"{heads} attention heads as KV heads"
    if heads:
        yield _counted(kv, lambda part: replace(part, count=heads)), (by_heads,)
    if heads and hidden and hidden % heads == 0:
        dim = hidden // heads
        by_hidden = f"hidden size / heads = {dim} as head dimension"
        yield _counted(kv, lambda part: replace(part, size=dim)), (by_hidden,)
        yield _counted(kv, lambda part: replace(part, count=heads, size=dim)), (by_heads, by_hidden)
    yield usual / 2, ("half as many bytes (8-bit elements, or keys without values)",)
    yield usual * 2, ("twice as many bytes (32-bit elements)",)
    latents = sum(count for cache, count in model.runs if cache.kind == "mla")
    if model.expanded_elements and latents:
        expanded = latents * kv.form.vector_bytes("kv", model.expanded_elements)
        yield expanded, ("every head's keys and values instead of the latent",)
    for tp in _COPIES_AT:
        if kv.tp == 1 and all(cache.can_be_split(tp) for cache, _ in model.runs):
            stored = tp * sum(count * cache.rank_token_bytes(kv.form, tp) for cache, count in model.runs)
            if stored > usual:
                yield stored, (f"the copies that {tp} tensor-parallel ranks keep",)


def _counted(kv: KvSize, recount: Callable[[TokenPart], TokenPart]) -> float:
    """Bytes a token with the parts of plain attention changed by `recount`."""

    def changed(cache: LayerCache) -> LayerCache:
        return replace(cache, parts=tuple(recount(part) if part.role == "kv" else part for part in cache.parts))

    return sum(count * changed(cache).token_bytes(kv.form) for cache, count in kv.model.runs)


@cache
def published_cells() -> tuple[PublishedCell, ...]:
    """Every cell of every published table, in the order printed."""
    published = tomllib.loads(Path(__file__).with_name("published_sizes.toml").read_text(encoding="utf-8"))
    cells = [
        _cell(table, row, column, printed)
        for table in published["table"]
        for row in table["row"]
        for column, printed in enumerate(row["cells"])
    ]
    return (*cells, *(_by_formula(formula, name) for formula in published["formula"] for name in formula["models"]))


def _by_formula(formula: dict[str, Any], name: str) -> PublishedCell:
    """What a published formula gives for a token of the model `name`, in 16 bits."""
    kv = of(name)
    heads = kv.model.attention_heads
    by_heads = _counted(kv, lambda part: replace(part, count=heads or part.count))
    ratio = by_heads / kv.bytes_per_token
    because = [f"{heads} attention heads as KV heads: {ratio:g} times too many"] if ratio != 1 else []
    if not formula["has_element_bytes"]:
        because.append("elements, not bytes")
    return PublishedCell(
        document=formula["document"],
        row=name,
        column="1 token",
        printed=f"{exact(by_heads)} B" if formula["has_element_bytes"] else f"{exact(by_heads / 2)} elements",
        model=name,
        tokens=1,
        users=1,
        bytes=kv.bytes_per_token,
        bytes_minimum=kv.session_bytes(1),
        verdict="wrong" if ratio != 1 else "exact" if formula["has_element_bytes"] else "other unit",
        because="; ".join(because),
    )


def _cell(table: dict[str, Any], row: dict[str, Any], column: int, printed: str) -> PublishedCell:
    tokens = row.get("tokens", 1) * (table["tokens"][column] if "tokens" in table else 1)
    users = table["users"][column] if "users" in table else 1
    kv = of(row["model"])
    total = kv.total(tokens, users)
    verdict, because = _judged(kv, printed, tokens, users)
    return PublishedCell(
        document=table["document"],
        row=row["printed"],
        column=table["columns"][column],
        printed=printed,
        model=row["model"],
        tokens=tokens,
        users=users,
        bytes=total.bytes,
        bytes_minimum=total.bytes_minimum,
        verdict=verdict,
        because="; ".join(text for text in (because, row["remarks"][column] if "remarks" in row else "") if text),
    )


def _judged(kv: KvSize, printed: str, tokens: int, users: int) -> tuple[Judgement, str]:
    """The verdict and its reason, by the search of `check` among sizes of this cell alone."""
    if printed.startswith(_AT_LEAST):
        return _judged_bound(kv, printed, tokens, users)
    name = _session(tokens, users)
    names = {"a token", "a token, all layers"} if tokens == users == 1 else {name, f"{name}, all layers and ranks"}
    found = _search(kv, parse_figure(printed), [(tokens, users)])
    matches = [match for match in found if match.candidate.what in names]
    if not matches:
        return "wrong", "in no convention known here"
    best = min(matches, key=lambda match: (match.cost, not match.unit.is_as_written, match.agreement == "coarse"))
    steps, is_other = best.candidate.steps, not best.unit.is_as_written
    readings = {step for _, step in _token_readings(tokens)}
    is_early = any("rounded to" in step for step in steps)
    because = "; ".join((*steps, best.unit.name) if is_other else steps)
    if best.unit.is_mixed or (is_early and is_other) or not (is_early or readings.issuperset(steps)):
        return "wrong", because
    if is_other or (steps and not is_early):
        return "other unit", because
    if steps or best.agreement not in ("exact", "cut"):
        return "rounded", because
    return best.agreement, because


def _judged_bound(kv: KvSize, printed: str, tokens: int, users: int) -> tuple[Judgement, str]:
    """The verdict on ``at least 20 DRAM``, modules of a terabyte."""
    count = int(printed.removeprefix(_AT_LEAST).removesuffix(" DRAM"))
    total = kv.total(tokens, users).bytes
    enough = math.ceil(total / 1e12)
    because = f"{decimal(total)} fill {enough} DRAM of 1 TB; {count} are {total / (count * 1e12):.0%} full"
    return ("bound" if count >= enough else "wrong"), because
