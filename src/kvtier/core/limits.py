"""Limits of the core: how much may be in flight, and for how long."""

from dataclasses import dataclass
from enum import Enum


class WritePolicy(Enum):
    """Rule for demoting a copy from the engine to the lower tiers."""

    THROUGH = "through"  # as soon as it is ready
    BACK = "back"  # before it is evicted from host memory, and at close
    SELECTIVE = "selective"  # at its n-th use


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """What the core must know of one lower tier. Tiers are ordered from fastest to slowest."""

    name: str
    persists: bool = True
    """Its objects survive this process, so an object that it holds need not stay in host memory for slower tiers."""
    is_remote: bool = False
    """An answer costs a round trip: it is asked for few names, in rounds, and requests need not wait for it."""
    promotes: int = 16
    """Promotions in flight. All tiers share a quarter of the slots of the smallest group."""
    demotes: int = 8
    """Demotions in flight. All tiers share a quarter of the slots of the smallest group."""
    small_bytes: int = 0
    """Bytes of small objects in flight per direction, beyond the counts but within the quarter of the slots. Small
    objects travel in batches, and a batch holds only objects in flight.
    """
    probe_deadline_s: float = 0.5
    transfer_deadline_s: float = 10.0
    failures: int = 3
    """Consecutive failures that open a circuit breaker."""
    retry_s: float = 5.0
    """Delay before a trial; doubles up to a minute."""

    def __post_init__(self) -> None:
        for name in ("promotes", "demotes", "failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"tier {self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.small_bytes < 0:
            raise ValueError(f"tier {self.name}: small_bytes must be at least 0, got {self.small_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on objects in flight (counts) and on their duration (seconds)."""

    gathers: int = 16
    scatters: int = 16
    load_deadline_s: float = 30.0
    store_deadline_s: float = 10.0
    announced_wait_s: float = 5.0
    """How long a request waits at most for chunks that another engine has announced."""
    retained_share: float = 0.5
    """Share of each group's host slots that hints may retain."""
    hint_share: float = 1.0
    """Share of each group's host slots that one hint of a request may retain, within `retained_share`."""
    retain_s: float = 3600.0
    """How long a hint retains objects at most."""
    publishes: bool = False
    """Other engines wait for what this one stores: remote tiers get objects in the order of the stores."""
    write_policy: WritePolicy = WritePolicy.THROUGH
    selective_uses: int = 2

    def __post_init__(self) -> None:
        for name in ("gathers", "scatters", "selective_uses"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.retained_share < 1:
            raise ValueError(f"limits.retained_share must be at least 0 and less than 1, got {self.retained_share}")
