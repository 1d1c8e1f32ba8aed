"""Explain a figure that someone else printed: find the counting convention that turns kvtier's size into it.

A figure is a size (``150 KB``), or the tokens (``3M tokens``) or users (``12 users``) that fit into memory. The module
recomputes it with each common convention: 1,000 or 1,024 bytes, 4,000 or 4,096 tokens, heads instead of KV heads.
A convention matches if it reproduces the printed digits. The match with the fewest assumptions is the likeliest.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from itertools import product
from typing import Literal

from kvtier.errors import ConfigError
from kvtier.report.format import both, exact
from kvtier.tools.size.caches import TokenPart
from kvtier.tools.size.sizes import GpuCapacity, KvSize, TierCapacity

Agreement = Literal["", "exact", "cut", "rounded", "coarse"]
"""Digits agree if kvtier's size can be rounded or cut off to them. The agreement of very few digits proves less: it is
``rounded``, or ``coarse`` if the last digit differs."""
UnitReading = Literal["as written", "other", "mixed"]
"""A KB has 1,000 bytes as written, or 1,024 in the other reading. An MB may mix both."""
Capacities = Mapping[str, GpuCapacity | TierCapacity]
"""Each memory or tier, by name, into which a figure's tokens or users may fit."""

_EXACT_MAX = 0.005
"""Largest relative error at which digits count as exact."""
_CUT_MAX = 0.02
_COARSE_MAX = 0.05
_MATCHES_SHOWN = 3
_COST_MAX = 2
"""Maximum number of conventions in a combination. With more, any figure could be explained."""
_MIXED_COST = 2
"""Cost of mixed units. They are a mistake, not a convention, so they must explain a figure alone."""
_COPIES_AT = (2, 4, 8, 16)
"""Tensor-parallel sizes whose copies a figure may include."""
_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_FIGURE = re.compile(
    r"((?:[0-9]{1,15}|[0-9]{1,3}(?:[,_][0-9]{3}){1,4})(?:\.[0-9]{1,9})?) ?([kmgtpe]?i?) ?"
    r"(b|bytes?|tokens?|users?|sessions?)",
    re.ASCII | re.IGNORECASE,
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
    """Prefix of the unit in upper case: "" for bytes, then "K", "M" ... "E"."""
    is_binary: bool
    """Whether the prefix is binary. KiB means 1,024 bytes; KB may mean 1,000 or 1,024."""
    counts: str
    """Unit of the figure: ``B``, ``tokens`` or ``users``."""
    step: float
    """Value of one unit in the last printed digit: 0.01 for 1.47."""
    rough: float
    """The step if trailing zeros are only placeholders: 10 for 150."""

    def bytes(self, thousand: int | None = None) -> float:
        """Return the figure in bytes, tokens or users. A kilo means `thousand`; None means as written."""
        return self.number * float(thousand or (1024 if self.is_binary else 1000)) ** _PREFIXES.index(self.prefix)


def parse_figure(text: str) -> Figure:
    """Read a printed figure.

    Raises:
        ConfigError: `text` is not a figure.
    """
    found = _FIGURE.fullmatch(text.strip())
    digits = found[1].replace(",", "").replace("_", "") if found else ""
    if found is None or not float(digits):
        raise ConfigError(
            f"check: {text!r} is not a figure; write it like 150 KB, 0.33 GB or 144 KiB, 3M tokens, 12 users"
        )
    prefix, noun = found[2].upper(), found[3][0].lower()
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
class Reading:
    """One of kvtier's sizes that a figure may mean. `matches` adds the unit in which the digits agree."""

    what: str
    """Name of the thing with this size or number."""
    bytes: float
    """Size in bytes, or number of tokens or users."""
    steps: tuple[str, ...] = ()
    """Conventions that differ from kvtier's, except the unit."""
    unit: str = ""
    unit_bytes: float = 1.0
    unit_reading: UnitReading = "as written"
    agreement: Agreement = ""

    @property
    def cost(self) -> int:
        """Number of assumptions; 0 for kvtier's own figure, whether the unit is read as written or otherwise."""
        return len(self.steps) + (self.unit_reading == "mixed") * _MIXED_COST + (self.agreement == "coarse")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check."""

    kv: KvSize
    figure: Figure
    matches: tuple[Reading, ...]
    """Matching readings, the simplest first; empty if no convention reproduces the figure."""
    nearest: Reading | None
    """The nearest of kvtier's own sizes; None if all are zero."""
    holders: str
    """Names of the memory or tiers into which the tokens or users should fit."""

    @property
    def text(self) -> str:
        """The result as one line of text."""
        figure, nearest, unknown = self.figure, self.nearest, f"{self.figure.text}: no convention known here gives it"
        if self.matches:
            return f"{figure.text} is {self._match_text(self.matches[0])}"
        if nearest is None:
            nothing = f"no {figure.counts} fit into {self.holders}"
            return f"{unknown}; {nothing if self.holders else f'{self.kv.model.name} keeps no KV'}"
        size = f"{exact(nearest.bytes)} {figure.counts}{f' = {both(nearest.bytes)}' if figure.counts == 'B' else ''}"
        ratio = f"{figure.bytes() / nearest.bytes:.3g} times {nearest.what}, which is nearest"
        return f"{unknown}; it is {ratio}: {size} ({self.kv.form.name}, TP {self.kv.tp})"

    @property
    def others(self) -> list[str]:
        """The next matches, each as one line of text."""
        return [self._match_text(match) for match in self.matches[1:_MATCHES_SHOWN]]

    def _match_text(self, found: Reading) -> str:
        steps = f", counted with {' and '.join(found.steps)}" if found.steps else ""
        how = ", ".join(filter(None, (self.kv.form.name, found.unit, f"TP {self.kv.tp}")))
        number = f"{exact(found.bytes)} {self.figure.counts}"
        return f"{found.what}{steps}: {number} ({how}{_DIGITS[found.agreement]})"


def check(
    kv: KvSize, text: str, sessions: Sequence[tuple[int, int]] = (), capacities: Capacities | None = None
) -> Verdict:
    """Find the convention under which a published figure equals a size of `kv`.

    Args:
        kv: sizes of the model, in the format that the figure may assume.
        text: the figure, such as ``150 KB``.
        sessions: pairs (tokens, users). The figure may mean the total of one of them.
        capacities: memory or tiers into which the tokens or users of the figure may fit.

    Raises:
        ConfigError: `text` is not a figure, or it counts tokens or users and no capacity is given.
    """
    figure, holders = parse_figure(text), capacities or {}
    if figure.counts == "B":
        own, holders = list(sizes(kv, sessions)), {}
    elif holders:
        own = [each for name, it in holders.items() for each in _held(kv, figure, sessions, name, it)]
    else:
        raise ConfigError(f"check: {text!r} counts {figure.counts}; --gpu, --memory or --tier must say what holds them")
    kept: dict[tuple[float, float], Reading] = {}
    for match in sorted(
        matches(own, figure), key=lambda it: (it.cost, it.agreement == "coarse", it.agreement == "cut")
    ):
        kept.setdefault((match.bytes, match.unit_bytes), match)  # the simplest of equal results
    ours = (each for each in own if each.bytes and not each.steps)
    nearest = min(ours, key=lambda each: abs(math.log(figure.bytes() / each.bytes)), default=None)
    return Verdict(kv, figure, tuple(kept.values()), nearest, " or ".join(holders))


def matches(candidates: Iterable[Reading], figure: Figure) -> list[Reading]:
    """List each candidate in each unit that gives the digits of `figure`."""
    units = list(_units(figure))
    found = [
        replace(each, unit=unit, unit_bytes=factor, unit_reading=reading, agreement=agreement)
        for each in candidates
        for unit, factor, reading in units
        if (agreement := _agreement(each.bytes / factor, figure))
    ]
    # Few digits match some convention by chance, so they must match one of kvtier's own sizes as written.
    return [
        it
        for it in found
        if it.cost <= _COST_MAX and (it.agreement != "coarse" or (not it.steps and it.unit_reading == "as written"))
    ]


def _agreement(value: float, figure: Figure) -> Agreement:
    """Return the agreement of `value`, in the unit of `figure`, with the figure's digits; empty if they differ."""
    off, slack = value - figure.number, 1 + 1e-9
    error, is_rounded = abs(off) / figure.number, abs(off) <= figure.step / 2 * slack
    is_cut, is_near = 0 <= off < figure.step / slack, abs(off) <= figure.rough / 2 * slack and error <= _COARSE_MAX
    if error <= _EXACT_MAX and (is_rounded or is_cut):
        return "exact" if is_rounded else "cut"
    is_coarse = is_near or (is_cut and error <= _CUT_MAX)
    return "rounded" if is_rounded and error <= _COARSE_MAX else "coarse" if is_coarse else ""


def _units(figure: Figure) -> Iterator[tuple[str, float, UnitReading]]:
    """Yield name, bytes and kind of each reading of the figure's prefix: powers of 1,000 or 1,024, and mixtures."""
    power, is_bytes = _PREFIXES.index(figure.prefix), figure.counts == "B"
    all_powers = range(power + 1) if is_bytes or power < 2 else range(1)
    for binary in (power,) if figure.is_binary else all_powers:
        factors = [f"{base:,}^{n}".removesuffix("^1") for base, n in ((1024, binary), (1000, power - binary)) if n]
        name = f"{figure.prefix}{'B' * is_bytes} = {' x '.join(factors)}{' B' * is_bytes}"
        name = name if factors else "bytes" * is_bytes
        is_mixed, is_written = 0 < binary < power, binary == power * figure.is_binary
        reading = "mixed" if is_mixed else "as written" if is_written else "other"
        yield f"{'units mixed: ' * is_mixed}{name}", 1024.0**binary * 1000.0 ** (power - binary), reading


def token_readings(tokens: int) -> list[tuple[int, tuple[str, ...]]]:
    """Return the numbers of tokens that one number may mean, such as 4,096 and 4,000, with their conventions."""
    others = [tokens // unit * other for unit, other in ((1024, 1000), (1000, 1024)) if tokens % unit == 0]
    return [(tokens, ()), *((other, (f"{other:,} tokens",)) for other in others)]


def _rounded_early(bytes_per_token: float) -> Iterator[tuple[float, str]]:
    """Yield sizes of a token that someone may have rounded before a multiplication."""
    units = (("kB", 1000), ("MB", 1000**2), ("KiB", 1024), ("MiB", 1024**2))
    for (unit, factor), digits in product(units, (2, 3)):
        number = Decimal(bytes_per_token / factor)
        early = float(number.quantize(Decimal(1).scaleb(number.adjusted() - digits + 1), ROUND_HALF_UP))
        if early != number and early >= 0.1:
            yield early * factor, f"a token rounded to {early:g} {unit} before multiplying"


def sizes(kv: KvSize, sessions: Sequence[tuple[int, int]]) -> Iterator[Reading]:
    """Yield kvtier's own sizes, and the sizes under other ways to count tokens or bytes."""
    countings = _countings(kv)
    yield from (Reading(what, size) for what, size in kv.named_sizes)
    yield Reading(f"a chunk of {kv.chunk_tokens} tokens on a rank", kv.chunk_bytes_per_rank)
    yield from (Reading("a token", size, steps) for size, steps in countings)
    for tokens, users in sessions:
        name = session_name(tokens, users)
        for count, steps in token_readings(tokens):
            total = kv.total(count, users)
            is_least = total.bytes == total.bytes_minimum
            yield Reading(name if is_least else f"{name}, all layers and ranks", total.bytes, steps)
            yield from () if is_least else (Reading(f"{name}, minimum", total.bytes_minimum, steps),)
            yield from (Reading(name, size * count * users, (*more, *steps)) for size, more in countings)
        for size, step in _rounded_early(kv.bytes_per_token_stored):
            yield Reading(name, size * tokens * users, (step,))


def _held(
    kv: KvSize, figure: Figure, sessions: Sequence[tuple[int, int]], name: str, capacity: GpuCapacity | TierCapacity
) -> Iterator[Reading]:
    """Yield how many tokens or users fit into `capacity`: as in `kvtier size`, and by plain division of bytes."""
    room = capacity.kv_bytes if isinstance(capacity, GpuCapacity) else float(capacity.capacity_bytes)
    power = int(math.log(max(room, 1), 1000))
    ways: list[tuple[float, float, tuple[str, ...]]] = [
        (room, kv.bytes_per_token, ()),
        (room, kv.bytes_per_token_growing, ("layers without a window alone",)),
        (room * 1.024**power, kv.bytes_per_token, (f"1,024 for 1,000 in the bytes of {name}",)),
        *((room, size, steps) for size, steps in _countings(kv)),
    ]
    for tokens in dict.fromkeys(tokens for tokens, _ in sessions):
        held, fits = capacity.held(tokens), f"what fits into {name} in sessions of {tokens:,} tokens"
        number, length, unit = (
            (held.tokens, 1, "a token") if figure.counts == "tokens" else (held.sessions, tokens, f"{tokens:,} tokens")
        )
        yield Reading(fits, number)
        # Few digits agree with many conventions, so conventions are not combined.
        for total, size, steps in ways:
            yield Reading(f"the bytes of {name} / {unit}", total // (size * length) if size else 0, steps)


def session_name(tokens: int, users: int) -> str:
    """Describe sessions in words."""
    return f"{users:,} x {tokens:,} tokens" if users > 1 else f"{tokens:,} tokens"


def _countings(kv: KvSize) -> list[tuple[float, tuple[str, ...]]]:
    """Return the bytes per token under other conventions."""
    model, usual, heads = kv.model, kv.bytes_per_token, kv.model.attention_heads or 0
    hidden, expanded = model.hidden_size or 0, model.expanded_elements or 0
    dim = hidden // heads if heads and hidden % heads == 0 else 0
    by_heads, by_hidden = f"{heads} attention heads as KV heads", f"hidden size / heads = {dim} as head dimension"
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
            sum(count for cache, count in model.runs if cache.kind == "mla") * kv.form.vector_bytes("kv", expanded),
            ("every head's keys and values instead of the latent",),
        ),
        *((size, (f"the copies that {tp} tensor-parallel ranks keep",)) for size, tp in copied if size > usual),
    )
    return [each for each in ways if each[0]]


def counted(kv: KvSize, recount: Callable[[TokenPart], TokenPart]) -> float:
    """Return the bytes per token after `recount` has changed the parts of plain attention."""
    return sum(
        count
        * replace(cache, parts=tuple(recount(part) if part.role == "kv" else part for part in cache.parts)).token_bytes(
            kv.form
        )
        for cache, count in kv.model.runs
    )
