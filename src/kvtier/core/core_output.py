"""The output of the core: commands, events and counters."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvtier.types import Command, Event


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    stores_dropped: int = 0
    """Objects that a store dropped because they got no slot in time or their transfer failed."""
    demotions_dropped: int = 0
    """Pending writes that were dropped or failed."""
    corrupt: int = 0
    """Copies in a lower tier that failed verification."""
    relays_dropped: int = 0
    """Relays dropped because the object was evicted or unreadable, or because too many relays waited."""
    late: int = 0
    """Overdue transfers, and reads that were given up because their tier was down."""
    unprobed: int = 0
    """Lookups without probes, because `REQUESTS_MAX` requests were tracked already."""
    unqueued: int = 0
    """Objects that a store dropped because `WAITING_MAX` objects were waiting already."""
    refused_hints: Counter[str] = field(default_factory=Counter[str])
    """Hints that had no effect or only a partial one, by reason: `prefetches`, `retained` or `waiting`."""


@dataclass(slots=True, eq=False)
class Output:
    """Commands and events that have not been taken yet, and counters. All parts of the core append to it."""

    commands: list[Command] = field(default_factory=list[Command])
    events: list[Event] = field(default_factory=list[Event])
    counters: Counters = field(default_factory=Counters)
    new_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    """Returns a new id for a command that expects an answer."""
