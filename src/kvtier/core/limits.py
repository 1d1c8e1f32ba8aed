"""Limits of the core: how much may be in flight, and for how long."""

from dataclasses import dataclass
from enum import Enum


class WritePolicy(Enum):
    """Rule for demoting a copy from the engine to the lower tiers."""

    THROUGH = "through"  # as soon as it is ready
    BACK = "back"  # before it is evicted from host memory, and at close
    SELECTIVE = "selective"  # at its n-th use


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on objects in flight (counts) and on their duration (seconds)."""

    gathers: int = 16
    scatters: int = 16
    promotes: int = 16
    """Promotions in flight per tier. All tiers share at most a quarter of the slots of the smallest group."""
    demotes: int = 8
    """Demotions in flight per tier. All tiers share at most a quarter of the slots of the smallest group."""
    small_bytes: int = 0
    """Bytes of small objects in flight per tier and direction, beyond the counts but within the quarter of the slots.
    Small objects travel in batches, and a batch holds only objects in flight.
    """
    waiting_chunks: int = 4096
    """Objects of all stores that may wait for a slot; further ones are dropped."""
    requests: int = 4096
    """Requests whose probe answers are kept; further ones are looked up in host memory only."""
    probe_deadline_s: float = 0.5
    load_deadline_s: float = 30.0
    transfer_deadline_s: float = 10.0
    store_deadline_s: float = 10.0
    tier_failures: int = 3
    tier_retry_s: float = 5.0
    write_policy: WritePolicy = WritePolicy.THROUGH
    selective_uses: int = 2

    def __post_init__(self) -> None:
        for name in ("gathers", "scatters", "promotes", "demotes", "requests", "tier_failures", "selective_uses"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("waiting_chunks", "small_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"limits.{name} must be at least 0, got {getattr(self, name)}")
