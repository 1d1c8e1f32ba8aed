"""Somebody else's figure and ours: which convention turns the one into the other, or that none does.

We compute what they would have got with each convention that is in use (1,000 or 1,024 bytes, 4,000 or 4,096 tokens,
heads instead of KV heads, ...) and keep those that give their digits. The fewer conventions it takes, the likelier.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal

from kvtier.errors import ConfigError
from kvtier.size.answer import KvSize
from kvtier.size.kinds import Cache, Part
from kvtier.size.units import Figure, both, exact, parse_figure

EXACT, ROUNDED, COARSE = "exact", "rounded", "coarse"
"""How well digits agree: to the last one, to the last one of very few, or when cut off or rounded to fewer."""

_EXACT_MAX = 0.005
"""Relative error up to which digits that agree are called exact."""
_CUT_MAX = 0.02
_COARSE_MAX = 0.05
COST_MAX = 2
"""Conventions that are combined at most; with more of them anything could be explained."""
_MIXED_COST = 2
"""Mixing units is a mistake, not a convention: it must explain a figure alone."""
_COPIES_AT = (2, 4, 8, 16)
"""Tensor-parallel sizes whose copies somebody may have counted."""
_PREFIXES = ("", "K", "M", "G", "T", "P", "E")


@dataclass(frozen=True, slots=True)
class Unit:
    """One way to read a prefix."""

    told: str
    bytes: float
    is_as_written: bool = False
    """A KB of 1,000 bytes, a KiB of 1,024."""
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A size that they may have meant, and what it takes to come from ours to it."""

    what: str
    """What it is the size of."""
    bytes: float
    steps: tuple[str, ...] = ()
    """Conventions that differ from ours, other than the unit."""


@dataclass(frozen=True, slots=True)
class Match:
    """A candidate that gives their digits."""

    candidate: Candidate
    unit: Unit
    agreement: str
    """`EXACT`, `ROUNDED` or `COARSE`."""

    @property
    def cost(self) -> int:
        """How much has to be supposed; 0 for our own figure in either unit."""
        return len(self.candidate.steps) + self.unit.is_mixed * _MIXED_COST + (self.agreement == COARSE)

    @property
    def told(self) -> str:
        """One line for people."""
        way = "" if not self.candidate.steps else f", counted with {' and '.join(self.candidate.steps)}"
        digits = {EXACT: "", ROUNDED: ", rounded", COARSE: ", rounded or cut to fewer digits"}[self.agreement]
        return f"{self.candidate.what}{way} ({exact(self.candidate.bytes)} B), {self.unit.told}{digits}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of their figure."""

    figure: Figure
    matches: tuple[Match, ...]
    """The simplest first; empty when no convention explains it."""
    nearest: Candidate
    """Of our own figures, the nearest."""

    @property
    def told(self) -> str:
        """The answer in a line."""
        if self.matches:
            return f"{self.figure.text} is {self.matches[0].told}"
        ratio = self.figure.bytes(1024 if self.figure.is_binary else 1000) / self.nearest.bytes
        return (
            f"{self.figure.text}: no convention known here gives it; it is {ratio:.3g} times {self.nearest.what}, "
            f"{exact(self.nearest.bytes)} B = {both(self.nearest.bytes)}"
        )


def check(kv: KvSize, text: str, sessions: Sequence[tuple[int, int]] = ()) -> Verdict:
    """Compare the figure `text` with the sizes of `kv`.

    Args:
        kv: our sizes.
        text: theirs, such as ``150 KB``.
        sessions: (tokens, users) whose totals it may be about.

    Raises:
        ConfigError: `text` is no size.
    """
    try:
        figure = parse_figure(text)
    except ValueError as error:
        raise ConfigError(f"check: {text!r} is {error}") from error
    own = list(_own(kv, sessions))
    candidates = [*own, *_recounted(kv, sessions)]
    matches = sorted(
        (match for candidate in candidates for match in matches_of(candidate, figure)),
        key=lambda match: (match.cost, match.agreement == COARSE),
    )
    kept: dict[tuple[float, float], Match] = {}
    for match in matches:  # the simplest way to the same bytes in the same unit stands for all of them
        kept.setdefault((match.candidate.bytes, match.unit.bytes), match)
    ours = [candidate for candidate in own if not candidate.steps]
    theirs = figure.bytes(1024 if figure.is_binary else 1000)
    return Verdict(figure, tuple(kept.values()), min(ours, key=lambda each: abs(math.log(theirs / each.bytes))))


def matches_of(candidate: Candidate, figure: Figure, cost_max: int = COST_MAX) -> Iterator[Match]:
    """The units with which `candidate` gives the digits of `figure`, supposing no more than `cost_max`."""
    for unit in units_of(figure):
        found = agreement(candidate.bytes / unit.bytes, figure)
        # Few digits agree with something sooner or later, so they must agree with a figure of ours as it is written.
        if found is None or (found == COARSE and (candidate.steps or not unit.is_as_written)):
            continue
        match = Match(candidate, unit, found)
        if match.cost <= cost_max:
            yield match


def agreement(value: float, figure: Figure) -> str | None:
    """How well `value`, in the unit of `figure`, agrees with its digits: `EXACT`, `ROUNDED`, `COARSE`, or None."""
    off = value - figure.number
    error, slack = abs(off) / figure.number, 1 + 1e-9
    is_rounded = abs(off) <= figure.step / 2 * slack
    is_cut = 0 <= off < figure.step / slack
    if error <= _EXACT_MAX and (is_rounded or is_cut):
        return EXACT
    if is_rounded and error <= _COARSE_MAX:
        return ROUNDED
    is_coarse = (is_cut and error <= _CUT_MAX) or (abs(off) <= figure.rough / 2 * slack and error <= _COARSE_MAX)
    return COARSE if is_coarse else None


def units_of(figure: Figure) -> Iterator[Unit]:
    """Ways to read the prefix of `figure`: by 1,000, by 1,024, and the mixtures that slip in on the way up."""
    power = _PREFIXES.index(figure.prefix)
    if not power:
        yield Unit("bytes", 1.0, is_as_written=True)
        return
    if not figure.is_binary:
        yield Unit(f"{figure.prefix}B = {_power(1000, power)} B", 1000.0**power, is_as_written=True)
    yield Unit(f"{figure.prefix}B = {_power(1024, power)} B", 1024.0**power, is_as_written=figure.is_binary)
    for binary in range(1, power if not figure.is_binary else 1):
        told = f"units mixed: {figure.prefix}B = {_power(1024, binary)} x {_power(1000, power - binary)} B"
        yield Unit(told, 1024.0**binary * 1000.0 ** (power - binary), is_mixed=True)


def token_readings(tokens: int) -> Iterator[tuple[int, str]]:
    """Other numbers of tokens that go by the same name: 4,096 and 4,000, 131,072 and 128,000."""
    if tokens % 1024 == 0:
        other = tokens // 1024 * 1000
        yield other, f"{other:,} tokens"
    if tokens % 1000 == 0:
        other = tokens // 1000 * 1024
        yield other, f"{other:,} tokens"


def rounded_early(bytes_per_token: float) -> Iterator[tuple[float, str]]:
    """What the size of a token becomes when it is rounded before it is multiplied."""
    if not bytes_per_token:
        return
    for step, units in ((1000, ("kB", "MB")), (1024, ("KiB", "MiB"))):
        for power, unit in enumerate(units, 1):
            number = bytes_per_token / step**power
            for digits in (2, 3):
                place = Decimal(1).scaleb(Decimal(number).adjusted() - digits + 1)
                early = float(Decimal(number).quantize(place, ROUND_HALF_UP))
                if early != number and early >= 0.1:
                    yield early * step**power, f"a token rounded to {early:g} {unit} before multiplying"


def _power(base: int, power: int) -> str:
    return f"{base:,}" if power == 1 else f"{base:,}^{power}"


def _own(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Our own figures, and for sessions those of other numbers of tokens that go by the same name."""
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
        yield from _totals(kv, name, tokens, users, ())
        for other, told in token_readings(tokens):
            yield from _totals(kv, name, other, users, (told,))
        for early, told in rounded_early(kv.bytes_per_token_stored):
            yield Candidate(name, early * tokens * users, (told,))


def _totals(kv: KvSize, name: str, tokens: int, users: int, steps: tuple[str, ...]) -> Iterator[Candidate]:
    total = kv.total(tokens, users)
    if total.bytes == total.bytes_minimum:
        yield Candidate(name, total.bytes, steps)
        return
    yield Candidate(f"{name}, all layers and ranks", total.bytes, steps)
    yield Candidate(f"{name}, what is needed", total.bytes_minimum, steps)


def _session(tokens: int, users: int) -> str:
    return f"{users:,} x {tokens:,} tokens" if users > 1 else f"{tokens:,} tokens"


def _recounted(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    for per_token, steps in _countings(kv):
        yield Candidate("a token", per_token, steps)
        for tokens, users in sessions:
            name = _session(tokens, users)
            yield Candidate(name, per_token * tokens * users, steps)
            if len(steps) < COST_MAX:
                for other, told in token_readings(tokens):
                    yield Candidate(name, per_token * other * users, (*steps, told))


def _countings(kv: KvSize) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Bytes a token as others count them."""
    heads, hidden, usual = kv.model.attention_heads, kv.model.hidden_size, kv.bytes_per_token
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
    spread = kv.model.spread_elements
    latents = sum(run.count for run in kv.model.runs if run.kind == "mla")
    if spread and latents:
        yield latents * kv.form.vector_bytes("kv", spread), ("every head's keys and values instead of the latent",)
    for tp in _COPIES_AT:
        runs = kv.model.runs
        if kv.tp == 1 and all(run.cache.can_be_cut(tp) for run in runs):
            stored = tp * sum(run.count * run.cache.rank_token_bytes(kv.form, tp) for run in runs)
            if stored > usual:
                yield stored, (f"the copies that {tp} tensor-parallel ranks keep",)


def _counted(kv: KvSize, recount: Callable[[Part], Part]) -> float:
    """Bytes a token when the parts of plain attention are counted by `recount`."""

    def changed(cache: Cache) -> Cache:
        return replace(cache, parts=tuple(recount(part) if part.role == "kv" else part for part in cache.parts))

    return sum(run.count * changed(run.cache).token_bytes(kv.form) for run in kv.model.runs)
