"""Counters of the core."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    stores_dropped: int = 0
    """Objects that a store dropped: no room in time, or failed."""
    demotions_dropped: int = 0
    """Pending writes that were dropped or failed."""
    corrupt: int = 0
    """Copies in a lower tier that failed verification."""
    relays_dropped: int = 0
    """Objects that a faster tier held and a slower one did not get: evicted or unreadable before, or too many."""
    late: int = 0
    """Overdue transfers."""
    unprobed: int = 0
    """Lookups without probes, because `Limits.requests` were tracked."""
    unqueued: int = 0
    """Objects that a store dropped because `Limits.waiting_chunks` were waiting."""
