"""All policies of a replay by name: the shipped ones, and those for comparison."""

from collections.abc import Callable
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.registry import DEFAULT_EVICTOR, evictor_names, make_evictor
from kvtier.tools.replay.policies.base import Policy
from kvtier.tools.replay.policies.evictor_adapter import Shipped
from kvtier.tools.replay.policies.reference import Arc, Infinite, Min, OracleLru, PlainLru, S3Fifo
from kvtier.tools.trace.arrays import TraceArrays

DEFAULT = "default"


class Reference(NamedTuple):
    """A policy that is not shipped."""

    make: Callable[[int, TraceArrays], Policy]
    """Makes the policy from a capacity in blocks and the trace."""
    help: str


def _hinted(*, turns: bool, ends: bool) -> Callable[[int, TraceArrays], Policy]:
    return lambda capacity, trace: Shipped(capacity, trace, Adaptive(), turns=turns, ends=ends)


REFERENCES: dict[str, Reference] = {
    "plain-lru": Reference(PlainLru, "LRU without names"),
    "arc": Reference(Arc, "adaptive replacement cache"),
    "s3-fifo": Reference(S3Fifo, "a small and a main queue"),
    "adaptive-turns": Reference(_hinted(turns=True, ends=False), "adaptive, with the trace's next_turn"),
    "adaptive-ends": Reference(_hinted(turns=False, ends=True), "adaptive, with the ends of sessions"),
    "adaptive-hints": Reference(_hinted(turns=True, ends=True), "adaptive, with both"),
    "oracle-lru": Reference(OracleLru, "LRU that never keeps a block after its last use"),
    "min": Reference(Min, "Belady's bound for policies that keep whole prefixes"),
    "infinite": Reference(Infinite, "never evicts"),
}


def policy_names() -> list[str]:
    """Return the names of all policies, the shipped ones first."""
    return [DEFAULT, *evictor_names(), *REFERENCES]


def check_policy(name: str) -> None:
    """Refuse an unknown policy.

    Raises:
        ConfigError: there is no such policy, or its package cannot be loaded.
    """
    if name not in policy_names():
        raise ConfigError(f"unknown policy {name!r}; allowed: {', '.join(policy_names())}")
    if name not in REFERENCES and name != DEFAULT:
        make_evictor(name)


def make_policy(name: str, capacity: int, trace: TraceArrays) -> Policy:
    """Make the policy `name` for a cache of `capacity` blocks.

    Args:
        name: "default", an evictor, or one of `REFERENCES`.
        capacity: number of blocks that fit.
        trace: the replayed trace.

    Raises:
        ConfigError: there is no such policy.
    """
    if name in REFERENCES:
        return REFERENCES[name].make(capacity, trace)
    return Shipped(capacity, trace, make_evictor(DEFAULT_EVICTOR if name == DEFAULT else name))
