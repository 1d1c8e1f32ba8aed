"""What the core counts. Plain numbers; whoever observes reads them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the core was made."""

    stores_dropped: int = 0
    """Objects that a store did not keep: not admitted, no room in time, or failed."""
    demotions_dropped: int = 0
    """Objects that a lower tier was to receive and did not."""
    corrupt: int = 0
    """Copies in a lower tier that failed their check."""
    late: int = 0
    """Transfers whose deadline passed."""
    unprobed: int = 0
    """Lookups that asked no lower tier because `Limits.requests` were tracked."""
    unqueued: int = 0
    """Objects that a store did not keep because `Limits.waiting_chunks` waited for a slot."""
