"""A figure that someone else printed: the counting convention that turns our size into theirs, if one does.

A figure is recomputed with each convention in use: 1,000 or 1,024 bytes, 4,000 or 4,096 tokens, heads instead of KV
heads, and so on. Conventions that reproduce its digits match; the fewer it takes, the likelier. A figure is a size
(``150 KB``), or a number of tokens (``3M tokens``) or users (``12 users``) that memory holds.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from itertools import product
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.report.format import both, exact
from kvtier.size.caches import LayerCache, TokenPart
from kvtier.size.capacity import GpuCapacity, TierCapacity
from kvtier.size.sizes import KvSize

Agreement = Literal["exact", "cut", "rounded", "coarse"]
"""Digits agree when rounded to the last one, when cut off after it, to the last one of very few, or to fewer."""
Capacities = Mapping[str, GpuCapacity | TierCapacity]
"""What holds the tokens and users of a figure, by name."""

_EXACT_MAX = 0.005
"""Largest relative error of digits that count as exact."""
_CUT_MAX = 0.02
_COARSE_MAX = 0.05
_MATCHES_SHOWN = 3
_COST_MAX = 2
"""Most conventions that are combined; more of them could explain any figure."""
_MIXED_COST = 2
"""Mixing units is a mistake, not a convention: it must explain a figure alone."""
_COPIES_AT = (2, 4, 8, 16)
"""Tensor-parallel sizes whose copies a figure may include."""
_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_FIGURE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgtpe]?i?) ?(b|bytes?|tokens?|users?|sessions?)", re.ASCII | re.IGNORECASE
)
_DIGITS = {
    "exact": "",
    "cut": "; cut off, not rounded",
    "rounded": "; rounded",
    "coarse": "; rounded or cut to fewer digits",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as printed in a document, such as ``150 KB``."""

    text: str
    number: float
    prefix: str
    """Upper case: "" for bytes, then "K", "M" ... "E"."""
    is_binary: bool
    """It says KiB, so 1,024 is meant; KB may mean either."""
    counts: str
    """What it counts: ``B``, ``tokens`` or ``users``."""
    step: float
    """What the last printed digit counts: 0.01 for 1.47."""
    rough: float
    """The same without trailing zeros, which may be printed for their place alone: 10 for 150."""

    def bytes(self, thousand: int) -> float:
        """The figure in bytes or things, read with a kilo of `thousand`."""
        return self.number * float(thousand) ** _PREFIXES.index(self.prefix)


def parse_figure(text: str) -> Figure:
    """Read a printed figure.

    Raises:
        ConfigError: it is none.
    """
    found = _FIGURE.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None or not float(found[1]):
        raise ConfigError(
            f"check: {text!r} is no figure; write it like 150 KB, 0.33 GB or 144 KiB, 3M tokens, 12 users"
        )
    digits, prefix, noun = found[1], found[2].upper(), found[3][0].lower()
    decimals = len(digits.partition(".")[2])
    zeros = 0 if decimals else len(digits) - len(digits.rstrip("0"))
    return Figure(
        text=text.strip(),
        number=float(digits),
        prefix=prefix.removesuffix("I"),
        is_binary=prefix.endswith("I"),
        counts={"b": "B", "t": "tokens"}.get(noun, "users"),
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
    """What the figure may mean."""

    what: str
    """The thing that has this size or number."""
    bytes: float
    """Or tokens, or users."""
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check."""

    kv: KvSize
    figure: Figure
    matches: tuple[FigureMatch, ...]
    """The simplest first; empty when no convention reproduces the figure."""
    nearest: Candidate | None
    """The nearest of our own sizes; None where all are zero."""
    nothing: str
    """What to say where all are zero."""

    @property
    def text(self) -> str:
        """The result in one line."""
        if self.matches:
            return f"{self.figure.text} is {self._match_text(self.matches[0])}"
        if self.nearest is None:
            return f"{self.figure.text}: no convention known here gives it; {self.nothing}"
        what, value = self.nearest.what, self.nearest.bytes
        size = f"{exact(value)} {self.figure.counts}{f' = {both(value)}' if self.figure.counts == 'B' else ''}"
        ratio = _as_written(self.figure) / value
        return (
            f"{self.figure.text}: no convention known here gives it; it is {ratio:.3g} times {what}, which is nearest: "
            f"{size} ({self.kv.form.name}, TP {self.kv.tp})"
        )

    @property
    def others(self) -> list[str]:
        """The next matches, each in one line."""
        return [self._match_text(match) for match in self.matches[1:_MATCHES_SHOWN]]

    def _match_text(self, match: FigureMatch) -> str:
        found, counts = match.candidate, self.figure.counts
        steps = f", counted with {' and '.join(found.steps)}" if found.steps else ""
        how = ", ".join(filter(None, (self.kv.form.name, match.unit.name, f"TP {self.kv.tp}")))
        return f"{found.what}{steps}: {exact(found.bytes)} {counts} ({how}{_DIGITS[match.agreement]})"


def check(
    kv: KvSize, text: str, sessions: Sequence[tuple[int, int]] = (), capacities: Capacities | None = None
) -> Verdict:
    """Find the convention by which a published figure is one of `kv`.

    Args:
        kv: the model in the format that the figure may be in.
        text: the figure, such as ``150 KB``.
        sessions: (tokens, users) whose totals it may mean.
        capacities: what holds the tokens or users.

    Raises:
        ConfigError: `text` is no figure, or nothing is there that could hold it.
    """
    figure, own = parse_figure(text), list(_own(kv, sessions))
    if figure.counts != "B":
        own = [each for name, it in (capacities or {}).items() for each in _held(kv, figure, sessions, name, it)]
    if figure.counts != "B" and not capacities:
        raise ConfigError(f"check: {text!r} counts {figure.counts}; --gpu, --memory or --tier must say what holds them")
    found = _matches(own, figure) if figure.counts != "B" else search(kv, figure, sessions)
    kept: dict[tuple[float, float], FigureMatch] = {}
    for match in sorted(found, key=lambda match: (match.cost, match.agreement == "coarse", match.agreement == "cut")):
        kept.setdefault((match.candidate.bytes, match.unit.bytes), match)  # the simplest of equal results
    ours = (each for each in own if each.bytes and not each.steps)
    nearest = min(ours, key=lambda each: abs(math.log(_as_written(figure) / each.bytes)), default=None)
    holders = " or ".join(capacities or {}) if figure.counts != "B" else ""
    nothing = f"no {figure.counts} fit into {holders}" if holders else f"{kv.model.name} keeps no KV"
    return Verdict(kv, figure, tuple(kept.values()), nearest, nothing)


def search(kv: KvSize, figure: Figure, sessions: Sequence[tuple[int, int]]) -> list[FigureMatch]:
    """Every size that gives the digits of `figure`."""
    return _matches((*_own(kv, sessions), *_recounted(kv, sessions)), figure)


def _as_written(figure: Figure) -> float:
    return figure.bytes(1024 if figure.is_binary else 1000)


def _matches(candidates: Sequence[Candidate], figure: Figure) -> list[FigureMatch]:
    """Matches of each candidate, one for each unit that gives the digits of `figure`."""
    found: list[FigureMatch] = []
    for candidate, unit in ((each, unit) for each in candidates for unit in _units(figure)):
        agreement = _agreement(candidate.bytes / unit.bytes, figure)
        # Few digits agree with something sooner or later, so they must agree with a size of ours as it is written.
        if agreement is None or (agreement == "coarse" and (candidate.steps or not unit.is_as_written)):
            continue
        match = FigureMatch(candidate, unit, agreement)
        found += [match] * (match.cost <= _COST_MAX)
    return found


def _agreement(value: float, figure: Figure) -> Agreement | None:
    """Agreement of `value`, in the unit of `figure`, with its digits."""
    off, slack = value - figure.number, 1 + 1e-9
    error = abs(off) / figure.number
    is_rounded, is_cut = abs(off) <= figure.step / 2 * slack, 0 <= off < figure.step / slack
    is_near = abs(off) <= figure.rough / 2 * slack and error <= _COARSE_MAX
    rules: tuple[tuple[bool, Agreement], ...] = (
        (is_rounded and error <= _EXACT_MAX, "exact"),
        (is_cut and error <= _EXACT_MAX, "cut"),
        (is_rounded and error <= _COARSE_MAX, "rounded"),
        ((is_cut and error <= _CUT_MAX) or is_near, "coarse"),
    )
    return next((agreement for holds, agreement in rules if holds), None)


def _units(figure: Figure) -> Iterator[Unit]:
    """Readings of the prefix of `figure`: by 1,000, by 1,024, and mixtures of both."""
    power = _PREFIXES.index(figure.prefix)
    if not power:
        yield Unit("bytes" if figure.counts == "B" else "", 1.0, is_as_written=True)
        return
    prefix, of = (f"{figure.prefix}B", " B") if figure.counts == "B" else (figure.prefix, "")
    if not figure.is_binary:
        yield Unit(f"{prefix} = {_power(1000, power)}{of}", 1000.0**power, is_as_written=True)
    if of or figure.is_binary or power == 1:
        yield Unit(f"{prefix} = {_power(1024, power)}{of}", 1024.0**power, is_as_written=figure.is_binary)
    for binary in range(1, 1 if figure.is_binary or not of else power):
        name = f"units mixed: {prefix} = {_power(1024, binary)} x {_power(1000, power - binary)} B"
        yield Unit(name, 1024.0**binary * 1000.0 ** (power - binary), is_mixed=True)


def _power(base: int, power: int) -> str:
    return f"{base:,}" if power == 1 else f"{base:,}^{power}"


def token_readings(tokens: int) -> Iterator[tuple[int, str]]:
    """Other readings of the same number of tokens: 4,096 and 4,000, 131,072 and 128,000."""
    for unit, other_unit in ((1024, 1000), (1000, 1024)):
        if tokens % unit == 0:
            other = tokens // unit * other_unit
            yield other, f"{other:,} tokens"


def _rounded_early(bytes_per_token: float) -> Iterator[tuple[float, str]]:
    """Sizes of a token that was rounded before multiplying."""
    units = (("kB", 1000), ("MB", 1000**2), ("KiB", 1024), ("MiB", 1024**2)) if bytes_per_token else ()
    for (unit, factor), digits in product(units, (2, 3)):
        number = bytes_per_token / factor
        last = Decimal(1).scaleb(Decimal(number).adjusted() - digits + 1)
        early = float(Decimal(number).quantize(last, ROUND_HALF_UP))
        if early != number and early >= 0.1:
            yield early * factor, f"a token rounded to {early:g} {unit} before multiplying"


def _own(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Our own sizes, and those of sessions with other readings of their tokens."""
    is_mixed = kv.bytes_per_token_growing not in {0, kv.bytes_per_token}
    sizes = (
        ("a token, all layers" if is_mixed else "a token", kv.bytes_per_token),
        ("a token, layers without a window", kv.bytes_per_token_growing if is_mixed else 0),
        (f"a token with the copies at TP {kv.tp}", kv.bytes_per_token_stored if kv.duplication > 1 else 0),
        ("windows and states of a session", kv.bytes_per_session_constant),
        (f"a chunk of {kv.chunk_tokens} tokens on a rank", kv.chunk_bytes_per_rank),
    )
    yield from (Candidate(what, size) for what, size in sizes if size)
    for tokens, users in sessions:
        name = session_name(tokens, users)
        for count, steps in ((tokens, ()), *((other, (step,)) for other, step in token_readings(tokens))):
            total = kv.total(count, users)
            is_least = total.bytes == total.bytes_minimum
            yield Candidate(name if is_least else f"{name}, all layers and ranks", total.bytes, steps)
            yield from () if is_least else (Candidate(f"{name}, minimum", total.bytes_minimum, steps),)
        early = _rounded_early(kv.bytes_per_token_stored)
        yield from (Candidate(name, size * tokens * users, (step,)) for size, step in early)


def _held(
    kv: KvSize, figure: Figure, sessions: Sequence[tuple[int, int]], name: str, capacity: GpuCapacity | TierCapacity
) -> Iterator[Candidate]:
    """What `capacity` holds: as `kvtier size` shows it, and its bytes divided by those of a token or session."""
    room = capacity.kv_bytes if isinstance(capacity, GpuCapacity) else float(capacity.capacity_bytes)
    power = int(math.log(max(room, 1), 1000))
    ways: list[tuple[float, float, tuple[str, ...]]] = [
        (room, kv.bytes_per_token, ()),
        (room, kv.bytes_per_token_growing, ("layers without a window alone",)),
        (room * 1.024**power, kv.bytes_per_token, (f"1,024 for 1,000 in the bytes of {name}",)),
        *((room, size, steps) for size, steps in _countings(kv)),
    ]
    is_tokens = figure.counts == "tokens"
    for tokens in dict.fromkeys(tokens for tokens, _ in sessions):
        held, length = capacity.held(tokens), 1 if is_tokens else tokens
        whole = f"what fits into {name} in sessions of {tokens:,} tokens"
        yield Candidate(whole, held.tokens if is_tokens else held.sessions)
        what = f"the bytes of {name} / {'a token' if is_tokens else f'{tokens:,} tokens'}"
        # one convention at most: few digits agree with many
        yield from (Candidate(what, total // (size * length), steps) for total, size, steps in ways if size)


def session_name(tokens: int, users: int) -> str:
    """Sessions in words."""
    return f"{users:,} x {tokens:,} tokens" if users > 1 else f"{tokens:,} tokens"


def _recounted(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """Sizes by other ways to count the bytes of a token."""
    for size, steps in _countings(kv):
        yield Candidate("a token", size, steps)
        for tokens, users in sessions:
            others = token_readings(tokens) if len(steps) < _COST_MAX else ()
            for count, more in ((tokens, ()), *((other, (step,)) for other, step in others)):
                yield Candidate(session_name(tokens, users), size * count * users, (*steps, *more))


def _countings(kv: KvSize) -> list[tuple[float, tuple[str, ...]]]:
    """Bytes a token by other conventions."""
    model, usual, heads = kv.model, kv.bytes_per_token, kv.model.attention_heads or 0
    hidden, expanded = model.hidden_size or 0, model.expanded_elements or 0
    dim = hidden // heads if heads and hidden % heads == 0 else 0
    by_heads, by_hidden = f"{heads} attention heads as KV heads", f"hidden size / heads = {dim} as head dimension"
    latents = sum(count for cache, count in model.runs if cache.kind == "mla")
    copied = [
        (tp * sum(count * cache.rank_token_bytes(kv.form, tp) for cache, count in model.runs), tp)
        for tp in _COPIES_AT
        if kv.tp == 1 and all(cache.can_be_split(tp) for cache, _ in model.runs)
    ]
    ways: tuple[tuple[float, tuple[str, ...]], ...] = (
        (heads and counted(kv, lambda part: replace(part, count=heads)), (by_heads,)),
        (dim and counted(kv, lambda part: replace(part, size=dim)), (by_hidden,)),
        (dim and counted(kv, lambda part: replace(part, count=heads, size=dim)), (by_heads, by_hidden)),
        (usual / 2, ("half as many bytes (8-bit elements, or keys without values)",)),
        (usual * 2, ("twice as many bytes (32-bit elements)",)),
        (
            latents * kv.form.vector_bytes("kv", expanded),
            ("every head's keys and values instead of the latent",),
        ),
        *((size, (f"the copies that {tp} tensor-parallel ranks keep",)) for size, tp in copied if size > usual),
    )
    return [each for each in ways if each[0]]


def counted(kv: KvSize, recount: Callable[[TokenPart], TokenPart]) -> float:
    """Bytes a token with the parts of plain attention changed by `recount`."""

    def changed(cache: LayerCache) -> LayerCache:
        return replace(cache, parts=tuple(recount(part) if part.role == "kv" else part for part in cache.parts))

    return sum(count * changed(cache).token_bytes(kv.form) for cache, count in kv.model.runs)
