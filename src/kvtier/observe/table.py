"""Every metric there is: name, kind, unit, labels, help. Nothing is counted that is not in this table.

Prometheus names in base units. Labels are few and their values are known: never a request, a key or a path.
"""

from dataclasses import dataclass
from enum import Enum
from typing import get_args

from kvtier.types import Link, Outcome, Presence, Way


class MetricKind(Enum):
    """What a metric does over time; the values are Prometheus's words."""

    COUNTER = "counter"  # only goes up
    GAUGE = "gauge"  # goes up and down
    HISTOGRAM = "histogram"  # counts observations by size


@dataclass(frozen=True, slots=True)
class Label:
    """One label: its values where they are known in advance, None where they are names that the user gave (tiers)."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: MetricKind
    unit: str
    """The unit that `name` ends with (before ``_total``); empty for a plain count or a claim."""
    labels: tuple[Label, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, rising; one for all the rest comes after them."""


OPEN_LABEL_VALUES_MAX = 32
"""Values of a label that is not closed; further ones are counted as "other", so that no label can grow for ever."""

OTHER = "other"

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_LINK = Label("link", tuple(link.value for link in Link))
_OUTCOME = Label("outcome", tuple(outcome.value for outcome in Outcome))
_TIER = Label("tier")
_PLACE = Label("place")  # "host" or a tier

LOOKUPS = Metric(
    "kvtier_lookups_total",
    MetricKind.COUNTER,
    "",
    (Label("presence", tuple(presence.value for presence in Presence)),),
    "Lookups answered, by what was said.",
)
LOOKUP_TOKENS = Metric(
    "kvtier_lookup_tokens_total",
    MetricKind.COUNTER,
    "tokens",
    (Label("result", ("ready", "arriving", "absent")),),
    "Tokens of prompts looked up, each request once: in host memory, in a lower tier, nowhere. The hit rate of tokens "
    "is (ready + arriving) over all three.",
)
LOADS = Metric(
    "kvtier_loads_total",
    MetricKind.COUNTER,
    "",
    (Label("result", ("whole", "part", "none")),),
    "Loads ended, by how much of what was asked for arrived.",
)
LOAD_TOKENS = Metric(
    "kvtier_load_tokens_total", MetricKind.COUNTER, "tokens", (_PLACE,), "Tokens restored, by where they came from."
)
LOAD_SECONDS = Metric(
    "kvtier_load_seconds", MetricKind.HISTOGRAM, "seconds", (), "From asking for a load to its end.", _SECONDS
)
STORES = Metric("kvtier_stores_total", MetricKind.COUNTER, "", (), "Stores ended.")
STORE_CHUNKS = Metric(
    "kvtier_store_chunks_total",
    MetricKind.COUNTER,
    "chunks",
    (Label("result", ("held", "dropped")),),
    "Chunks of stores (all groups counted): held in host memory, or dropped for want of room or by a failure.",
)
STORE_SECONDS = Metric(
    "kvtier_store_seconds", MetricKind.HISTOGRAM, "seconds", (), "From asking for a store to its end.", _SECONDS
)
TRANSFERS = Metric(
    "kvtier_transfers_total", MetricKind.COUNTER, "", (_LINK, _OUTCOME), "Transfers ended, by the way and the outcome."
)
TRANSFER_BYTES = Metric(
    "kvtier_transfer_bytes_total", MetricKind.COUNTER, "bytes", (_LINK,), "Bytes moved by transfers that were done."
)
TRANSFER_SECONDS = Metric(
    "kvtier_transfer_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    (_LINK,),
    "How long a transfer took, without its wait for a thread.",
    _SECONDS,
)
TRANSFER_WAIT_SECONDS = Metric(
    "kvtier_transfer_wait_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    (_LINK,),
    "How long a transfer waited for a thread.",
    _SECONDS,
)
TRANSFERS_IN_FLIGHT = Metric(
    "kvtier_transfers_in_flight", MetricKind.GAUGE, "", (_LINK,), "Transfers given to the mover and not yet ended."
)
REQUESTS = Metric("kvtier_requests", MetricKind.GAUGE, "", (), "Requests that are tracked.")
PROBES = Metric(
    "kvtier_probes_total",
    MetricKind.COUNTER,
    "",
    (_TIER, Label("result", ("answered", "late", "failed"))),
    "Questions to lower tiers, by how they ended.",
)
PROBE_SECONDS = Metric(
    "kvtier_probe_seconds", MetricKind.HISTOGRAM, "seconds", (_TIER,), "How long a lower tier took to answer.", _SECONDS
)
HELD_BYTES = Metric("kvtier_held_bytes", MetricKind.GAUGE, "bytes", (_PLACE,), "Bytes that a place holds.")
CAPACITY_BYTES = Metric(
    "kvtier_capacity_bytes",
    MetricKind.GAUGE,
    "bytes",
    (_PLACE,),
    "Most bytes a place may hold now: less than its setting while a tier's file system is full. Host memory is each "
    "engine's own.",
)
EVICTIONS = Metric("kvtier_evictions_total", MetricKind.COUNTER, "", (_PLACE,), "Good copies removed to make room.")
WRITE_BYTES = Metric(
    "kvtier_tier_write_bytes_total",
    MetricKind.COUNTER,
    "bytes",
    (_TIER, Label("what", ("frames", "upkeep", "avoided"))),
    "Bytes that a tier wrote to its device: frames, and what keeping them took (copies of survivors, index); and bytes "
    "that its write budget refused. Write amplification is (frames + upkeep) over frames.",
)
DROPS = Metric(
    "kvtier_drops_total",
    MetricKind.COUNTER,
    "",
    (_PLACE, Label("reason", ("corrupt", "failed", "stale"))),
    "Bad copies removed: damaged, or doubted because a load found damage before them, not written whole, or of another "
    "version or layout.",
)
TIER_UP = Metric(
    "kvtier_tier_up",
    MetricKind.GAUGE,
    "",
    (_TIER, Label("way", get_args(Way))),
    "1 while the tier is read or written, 0 while such operations have failed and are made only now and then.",
)
TIER_FAILURES = Metric(
    "kvtier_tier_failures_total", MetricKind.COUNTER, "", (_TIER,), "I/O errors and missed deadlines of a tier."
)
STUCK_QUEUES = Metric(
    "kvtier_stuck_queues",
    MetricKind.GAUGE,
    "",
    (_TIER,),
    "Worker queues of a tier (read, write, probe) all of whose threads are in a call that has not returned for 30 s.",
)

TRACE_REQUESTS = Metric(
    "kvtier_trace_requests_total",
    MetricKind.COUNTER,
    "",
    (Label("result", ("recorded", "lost")),),
    "Requests that were to be recorded as a trace.",
)

METRICS: tuple[Metric, ...] = (
    LOOKUPS,
    LOOKUP_TOKENS,
    LOADS,
    LOAD_TOKENS,
    LOAD_SECONDS,
    STORES,
    STORE_CHUNKS,
    STORE_SECONDS,
    TRANSFERS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFER_WAIT_SECONDS,
    TRANSFERS_IN_FLIGHT,
    REQUESTS,
    PROBES,
    PROBE_SECONDS,
    HELD_BYTES,
    CAPACITY_BYTES,
    EVICTIONS,
    WRITE_BYTES,
    DROPS,
    TIER_UP,
    TIER_FAILURES,
    STUCK_QUEUES,
    TRACE_REQUESTS,
)
"""The table."""
