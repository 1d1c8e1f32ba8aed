"""Limits of the core: how much may be in flight, and for how long."""

from dataclasses import dataclass
from enum import Enum


class WritePolicy(Enum):
    """A rule for when an object from the engine is written to the lower tiers."""

    THROUGH = "through"  # as soon as it is ready
    BACK = "back"  # before it is evicted from host memory, and at close
    SELECTIVE = "selective"  # at its n-th use


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """The properties of one lower tier that the core requires. Tiers are ordered from fastest to slowest."""

    name: str
    persists: bool = True
    """Whether its objects survive this process. If so, they need not stay in host memory for slower tiers."""
    is_remote: bool = False
    """Whether asking it costs a network round trip. If so, the core asks for few names at a time, in rounds, and
    requests need not wait for the answers.
    """
    loads_in_flight: int = 16
    """Maximum number of promotions in flight. Those of all tiers together take at most a quarter of the slots of the
    smallest group.
    """
    writes_in_flight: int = 8
    """Maximum number of demotions in flight. Those of all tiers together take at most a quarter of the slots of the
    smallest group.
    """
    small_bytes_in_flight: int = 0
    """Small objects may exceed the counts above, up to this many bytes in flight per direction, within the quarter of
    the slots. Small objects are moved in batches, and only objects in flight can be in a batch.
    """
    probe_deadline_s: float = 0.5
    transfer_deadline_s: float = 10.0
    failures: int = 3
    """Number of consecutive failures that open a circuit breaker."""
    retry_s: float = 5.0
    """Delay before a tier that has stopped is tried again. It doubles with each failed trial, up to a minute."""

    def __post_init__(self) -> None:
        for name in ("loads_in_flight", "writes_in_flight", "failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"tier {self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.small_bytes_in_flight < 0:
            raise ValueError(
                f"tier {self.name}: small_bytes_in_flight must be at least 0, got {self.small_bytes_in_flight}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the number of objects in flight, on the duration of operations, and on what hints may retain."""

    stores_in_flight: int = 16
    scatters: int = 16
    load_deadline_s: float = 30.0
    store_deadline_s: float = 10.0
    announced_wait_s: float = 5.0
    """Longest time that a request waits for chunks that another engine has announced."""
    retained_share: float = 0.5
    """Share of each group's host slots that hints may retain."""
    hint_share: float = 1.0
    """Share of each group's host slots that one hint of a request may retain, within `retained_share`."""
    retain_s: float = 3600.0
    """Longest time for which a hint retains objects."""
    publishes: bool = False
    """Whether other engines wait for this one's stores. If so, remote tiers get objects in the order of the stores."""
    write_policy: WritePolicy = WritePolicy.THROUGH
    selective_uses: int = 2

    def __post_init__(self) -> None:
        for name in ("stores_in_flight", "scatters", "selective_uses"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.retained_share < 1:
            raise ValueError(f"limits.retained_share must be at least 0 and less than 1, got {self.retained_share}")
