"""Every metric: name, kind, unit, labels and help. Only these metrics can be counted.

Names follow Prometheus's rules and use base units. Labels have few known values and never name a request, a key or a
path.
"""

from dataclasses import dataclass
from enum import Enum
from typing import get_args

from kvtier.layout import Loss
from kvtier.types import WRITE_KINDS, Direction, Outcome, Presence, Way


class MetricKind(Enum):
    """Kind of a metric, in Prometheus's terms."""

    COUNTER = "counter"  # only increases
    GAUGE = "gauge"  # goes up and down
    HISTOGRAM = "histogram"  # counts observations by size


@dataclass(frozen=True, slots=True)
class Label:
    """One label. `values` is None if its values are the names of tiers in the settings, at most 16."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric."""

    name: str
    kind: MetricKind
    unit: str
    """The unit at the end of `name` (before ``_total``); empty for plain counts."""
    labels: tuple[Label, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending; a last bucket is unbounded."""


_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_LINK = Label("link", tuple(direction.value for direction in Direction))
_OUTCOME = Label("outcome", tuple(outcome.value for outcome in Outcome))
_TIER = Label("tier")
_PLACE = Label("place")  # "host" or a tier

LOOKUPS = Metric(
    "kvtier_lookups_total",
    MetricKind.COUNTER,
    "",
    (Label("presence", tuple(presence.value for presence in Presence)),),
    "Lookups, by result.",
)
LOOKUP_TOKENS = Metric(
    "kvtier_lookup_tokens_total",
    MetricKind.COUNTER,
    "tokens",
    (Label("result", ("ready", "arriving", "absent")),),
    "Tokens of prompts that were looked up, once per request: in host memory, in a lower tier, or absent. The token "
    "hit rate is (ready + arriving) over all three.",
)
ANNOUNCED_TOKENS = Metric(
    "kvtier_announced_tokens_total",
    MetricKind.COUNTER,
    "tokens",
    (Label("result", ("found", "missing")),),
    "Tokens that another engine announced, once per request: found within the wait, or missing.",
)
LOADS = Metric(
    "kvtier_loads_total",
    MetricKind.COUNTER,
    "",
    (Label("result", ("whole", "part", "none")),),
    "Loads, by the share of the requested tokens that arrived.",
)
LOAD_TOKENS = Metric("kvtier_load_tokens_total", MetricKind.COUNTER, "tokens", (_PLACE,), "Tokens loaded, by source.")
LOSSY_LOAD_TOKENS = Metric(
    "kvtier_lossy_load_tokens_total",
    MetricKind.COUNTER,
    "tokens",
    (Label("loss", get_args(Loss)[1:]),),
    "Tokens loaded by an engine with a lossy class, by class; 0 in other engines.",
)
LOAD_SECONDS = Metric("kvtier_load_seconds", MetricKind.HISTOGRAM, "seconds", (), "Duration of a load.", _SECONDS)
STORES = Metric("kvtier_stores_total", MetricKind.COUNTER, "", (), "Stores.")
STORE_CHUNKS = Metric(
    "kvtier_store_chunks_total",
    MetricKind.COUNTER,
    "chunks",
    (Label("result", ("held", "dropped")),),
    "Chunks of stores, in all groups: held in host memory, or dropped (no slot in time, or a failure).",
)
STORE_SECONDS = Metric("kvtier_store_seconds", MetricKind.HISTOGRAM, "seconds", (), "Duration of a store.", _SECONDS)
OBJECTS = Metric(
    "kvtier_objects_total",
    MetricKind.COUNTER,
    "",
    (Label("way", get_args(Way)), _OUTCOME),
    "Objects that an engine with its own host memory has read or written, by outcome.",
)
OBJECT_CALL_SECONDS = Metric(
    "kvtier_object_call_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    (Label("call", ("leading_run", "contains", "get", "put")),),
    "Duration of a call by an engine with its own host memory.",
    _SECONDS,
)
TRANSFERS = Metric(
    "kvtier_transfers_total", MetricKind.COUNTER, "", (_LINK, _OUTCOME), "Transfers, by link and outcome."
)
REFUSALS = ("damaged", "unsealed", "foreign", "forged", "version", "codec", "key")
REFUSED_OBJECTS = Metric(
    "kvtier_refused_objects_total",
    MetricKind.COUNTER,
    "",
    (_TIER, Label("reason", REFUSALS)),
    "Objects that a read refused. Objects that are damaged, or whose seal is missing, another tenant's or forged, are "
    "dropped. Objects of an unknown version, codec or key are kept.",
)
TRANSFER_BYTES = Metric(
    "kvtier_transfer_bytes_total", MetricKind.COUNTER, "bytes", (_LINK, _TIER), "Bytes of successful transfers."
)
TRANSFER_SECONDS = Metric(
    "kvtier_transfer_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    (_LINK, _TIER),
    "Duration of a transfer, excluding its wait for a thread.",
    _SECONDS,
)
TRANSFER_WAIT_SECONDS = Metric(
    "kvtier_transfer_wait_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    (_LINK, _TIER),
    "Time that a transfer waits for a thread.",
    _SECONDS,
)
TRANSFERS_IN_FLIGHT = Metric(
    "kvtier_transfers_in_flight",
    MetricKind.GAUGE,
    "",
    (_LINK, _TIER),
    "Transfers in flight, including those that wait for a thread. Their mean number over an interval is the increase "
    "of the sums of kvtier_transfer_seconds and kvtier_transfer_wait_seconds, divided by its length.",
)
REQUESTS = Metric("kvtier_requests", MetricKind.GAUGE, "", (), "Tracked requests.")
PROBES = Metric(
    "kvtier_probes_total",
    MetricKind.COUNTER,
    "",
    (_TIER, Label("result", ("answered", "late", "failed"))),
    "Probes of lower tiers, by result.",
)
PROBE_SECONDS = Metric(
    "kvtier_probe_seconds", MetricKind.HISTOGRAM, "seconds", (_TIER,), "Duration of a probe.", _SECONDS
)
HELD_BYTES = Metric(
    "kvtier_held_bytes",
    MetricKind.GAUGE,
    "bytes",
    (_PLACE,),
    "Bytes held, by place, on all ranks. A store that all ranks use counts once.",
)
CAPACITY_BYTES = Metric(
    "kvtier_capacity_bytes",
    MetricKind.GAUGE,
    "bytes",
    (_PLACE,),
    "Current capacity, by place, on all ranks: below the setting while a tier's file system is full. A store that all "
    "ranks use counts once. Host memory is per engine.",
)
RETAINED_BYTES = Metric(
    "kvtier_retained_bytes", MetricKind.GAUGE, "bytes", (), "Bytes of host memory that hints retain, on all ranks."
)
HINT_REFUSALS = ("prefetches", "retained", "waiting", "priority")
REFUSED_HINTS = Metric(
    "kvtier_refused_hints_total",
    MetricKind.COUNTER,
    "",
    (Label("reason", HINT_REFUSALS),),
    "Hints of requests that had no effect: too many prefetches that are due earlier; more than may be retained; too "
    "many that wait for stores; a high priority that the settings do not allow.",
)
EVICTIONS = Metric("kvtier_evictions_total", MetricKind.COUNTER, "", (_PLACE,), "Good copies removed to make room.")
WRITE_BYTES = Metric(
    "kvtier_tier_write_bytes_total",
    MetricKind.COUNTER,
    "bytes",
    (_TIER, Label("what", WRITE_KINDS)),
    "Bytes written to a tier's device as frames or for upkeep (index; copies during eviction), and bytes "
    "that the write budget refused. Write amplification is (frames + upkeep) over frames.",
)
DROPS = Metric(
    "kvtier_drops_total",
    MetricKind.COUNTER,
    "",
    (_PLACE, Label("reason", ("corrupt", "failed", "stale"))),
    "Bad copies removed: damaged, suspect because of damage earlier in the prefix, incomplete, or of another version "
    "or layout.",
)
TIER_UP = Metric(
    "kvtier_tier_up",
    MetricKind.GAUGE,
    "",
    (_TIER, Label("way", get_args(Way))),
    "1 while reads or writes of the tier are allowed, 0 while its circuit breaker is open.",
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
RELAYS_WAITING = Metric(
    "kvtier_relays_waiting",
    MetricKind.GAUGE,
    "",
    (_TIER,),
    "Objects that a faster tier holds and that wait to be written to this tier.",
)
RELAYS_DROPPED = Metric(
    "kvtier_relays_dropped_total",
    MetricKind.COUNTER,
    "",
    (),
    "Objects that a slower tier did not get: the faster tier evicted them first, or too many waited.",
)

TRACE_REQUESTS = Metric(
    "kvtier_trace_requests_total",
    MetricKind.COUNTER,
    "",
    (Label("result", ("recorded", "lost")),),
    "Requests in trace recordings: recorded, or lost.",
)
JOURNAL_LINES = Metric(
    "kvtier_journal_lines_total",
    MetricKind.COUNTER,
    "",
    (Label("result", ("recorded", "lost")),),
    "Lines in journals of requests and objects: recorded, or lost.",
)

METRICS: tuple[Metric, ...] = (
    LOOKUPS,
    LOOKUP_TOKENS,
    ANNOUNCED_TOKENS,
    LOADS,
    LOAD_TOKENS,
    LOSSY_LOAD_TOKENS,
    LOAD_SECONDS,
    STORES,
    STORE_CHUNKS,
    STORE_SECONDS,
    OBJECTS,
    OBJECT_CALL_SECONDS,
    TRANSFERS,
    REFUSED_OBJECTS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFER_WAIT_SECONDS,
    TRANSFERS_IN_FLIGHT,
    REQUESTS,
    PROBES,
    PROBE_SECONDS,
    HELD_BYTES,
    CAPACITY_BYTES,
    RETAINED_BYTES,
    REFUSED_HINTS,
    EVICTIONS,
    WRITE_BYTES,
    DROPS,
    TIER_UP,
    TIER_FAILURES,
    STUCK_QUEUES,
    RELAYS_WAITING,
    RELAYS_DROPPED,
    TRACE_REQUESTS,
    JOURNAL_LINES,
)
