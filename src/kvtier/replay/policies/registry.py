"""Policies by name: the product's own, with an admission if wanted, and those to compare with."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from kvtier.config.sections import HostConfig
from kvtier.errors import ConfigError
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.admission import AdmitAll
from kvtier.policy.registry import ADMITTERS, EVICTORS, make_admitter, make_evictor
from kvtier.replay.cost import Prefill
from kvtier.replay.policies.base import Policy
from kvtier.replay.policies.bounds import DeadKnown, Infinite, Min
from kvtier.replay.policies.queues import Arc, Mq, PlainFifo, PlainLru, S3Fifo, SecondSightLru, Sieve, Ttl
from kvtier.replay.policies.scores import DecayingLfu, Gdsf, Lfu, Lru2
from kvtier.replay.policies.shipped import Shipped, Tells
from kvtier.replay.policies.turns import ByTurn
from kvtier.trace.packed import Packed

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class _Known:
    """A policy to compare with."""

    make: Callable[[int, Packed, Prefill, float], Policy]
    help: str
    parameter: float | None = None
    """Default of what may stand behind a colon."""


def _mid_block(prefill: Prefill, tokens: int) -> Callable[[int], float]:
    return lambda place: prefill.seconds(place * tokens, (place + 1) * tokens)


REFERENCES: dict[str, _Known] = {
    "plain-fifo": _Known(lambda c, t, _p, _x: PlainFifo(c, t.block_count), "first in, first out"),
    "plain-lru": _Known(lambda c, t, _p, _x: PlainLru(c, t.block_count), "least recently used"),
    "lfu": _Known(lambda c, t, _p, _x: Lfu(c, t.block_count), "least often used since it came"),
    "lfu-decay": _Known(
        lambda c, t, _p, x: DecayingLfu(c, t.block_count, x), "LFU, uses count half after so many requests", 1000.0
    ),
    "lru-2": _Known(lambda c, t, _p, _x: Lru2(c, t.block_count), "by the use before the last"),
    "arc": _Known(lambda c, t, _p, _x: Arc(c, t.block_count), "adaptive replacement cache"),
    "s3-fifo": _Known(lambda c, t, _p, _x: S3Fifo(c, t.block_count), "a small and a main queue"),
    "sieve": _Known(lambda c, t, _p, _x: Sieve(c, t.block_count), "FIFO with a hand that spares what was used"),
    "mq": _Known(lambda c, t, _p, x: Mq(c, t.block_count, x), "multi-queue; life in cache sizes", 2.0),
    "second-sight": _Known(
        lambda c, t, _p, _x: SecondSightLru(c, t.block_count), "LRU, admits what was computed before, however long ago"
    ),
    "ttl": _Known(
        lambda c, t, _p, x: Ttl(c, t.block_count, x), "LRU, leaves so many seconds after its last use", 600.0
    ),
    "turn": _Known(lambda c, t, _p, _x: ByTurn(c, t, by_uses=False), "by the reuse seen at each turn"),
    "turn-uses": _Known(lambda c, t, _p, _x: ByTurn(c, t, by_uses=True), "by the reuse seen at each turn and use"),
    "gdsf": _Known(
        lambda c, t, p, _x: Gdsf(c, t.block_count, _mid_block(p, t.block_tokens)), "uses x seconds saved, with age"
    ),
    "dead-known": _Known(lambda c, t, _p, _x: DeadKnown(c, t), "LRU that knows which blocks are never used again"),
    "adaptive-turns": _Known(
        lambda c, t, p, _x: Shipped(c, t, Adaptive(), AdmitAll(), p, tells=Tells.TURNS),
        "adaptive, told who has a session's next turn, where the trace knows",
    ),
    "adaptive-ends": _Known(
        lambda c, t, p, _x: Shipped(c, t, Adaptive(), AdmitAll(), p, tells=Tells.ENDS),
        "adaptive, told when a session has ended",
    ),
    "adaptive-hints": _Known(
        lambda c, t, p, _x: Shipped(c, t, Adaptive(), AdmitAll(), p, tells=Tells.TURNS | Tells.ENDS),
        "adaptive, told both",
    ),
    "min": _Known(lambda c, t, _p, _x: Min(c, t), "Belady's bound for whole prefixes"),
    "infinite": _Known(lambda _c, t, _p, _x: Infinite(t.block_count, t.block_count), "nothing ever leaves"),
}
"""Name to how it is made, of those that are not shipped."""


def policy_names() -> list[str]:
    """All names, the product's own first."""
    outside = set(entry_points(group="kvtier.evictors").names)
    return [DEFAULT, *EVICTORS, *sorted(outside - EVICTORS.keys()), *(it for it in REFERENCES if it not in EVICTORS)]


def make_policy(name: str, capacity: int, packed: Packed, prefill: Prefill | None = None) -> Policy:
    """The policy `name` for a cache of `capacity` blocks.

    Args:
        name: "default", an evictor of the product, that and an admitter joined by "+", or one of `REFERENCES`, which
            may take a number behind a colon.
        capacity: blocks that fit.
        packed: the trace that it will see.
        prefill: what a hit saves.

    Raises:
        ConfigError: there is no such policy, or its number is none.
    """
    prefill = prefill or Prefill()
    base, _, parameter = name.partition(":")
    evictor, _, admitter = base.partition("+")
    if evictor == DEFAULT:
        evictor = HostConfig().evictor
    elif evictor in REFERENCES and evictor not in EVICTORS:
        if admitter:
            raise ConfigError(f"policy {name!r}: {evictor} takes no admission; allowed: {', '.join(EVICTORS)}")
        known = REFERENCES[evictor]
        return known.make(capacity, packed, prefill, _number(name, parameter, known.parameter))
    elif evictor not in policy_names():
        raise ConfigError(
            f"unknown policy {evictor!r}; allowed: {', '.join(policy_names())}; the product's own also with an "
            f"admission, such as lru+second-sight ({', '.join(ADMITTERS)})"
        )
    if parameter:
        raise ConfigError(f"policy {name!r}: {evictor} takes no number")
    return Shipped(capacity, packed, make_evictor(evictor), make_admitter(admitter or "all"), prefill)


def _number(name: str, text: str, default: float | None) -> float:
    if not text:
        return default or 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if default is None or not 0 < value < float("inf"):
        raise ConfigError(
            f"policy {name!r}: {text!r} " + ("is no number above 0" if default is not None else "is not allowed here")
        )
    return value
