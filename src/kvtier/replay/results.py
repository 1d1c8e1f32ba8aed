"""Tiers of a replay, and its results, as plain values."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

HOST = "host"
QUANTILES = 200
"""Steps of a distribution of times."""
PARTS = 120
"""Points of a time series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """Capacity and speed of a tier."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    """Host memory: to the engine."""
    write_bytes_per_s: float
    """Host memory: from the engine."""
    latency_s: float
    is_shared: bool = False
    """One tier for all nodes, not one for each."""
    is_remote: bool = False
    """A lookup asks for few names at a time, and each round takes `latency_s`."""
    drive_bytes: int | None = None
    """Capacity of the drives, of which KV uses `capacity_bytes`; None: all of it."""
    rated_writes_per_day: float | None = None
    """Rated endurance of the drives, in drive writes per day."""
    sources: dict[str, str] = field(default_factory=dict[str, str], compare=False)
    """Field to the source of its value."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--tier {self.name}: {name} is {getattr(self, name)}; allowed: above 0")
        if not 0 <= self.latency_s < 60:
            raise ConfigError(f"--tier {self.name}: latency_s is {self.latency_s}; allowed: 0 to 60")
        if self.drive_bytes is not None and self.drive_bytes < self.capacity_bytes:
            raise ConfigError(
                f"--tier {self.name}: drives of {self.drive_bytes} bytes hold less than the {self.capacity_bytes} that "
                "KV is to use; allowed: larger drives, or more of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """Use of a link, or of the same link of several nodes."""

    transfers: int
    total_bytes: int
    mean_bytes_per_s: float
    """Mean bandwidth of all links together."""
    peak_bytes_per_s: float
    """Bandwidth in the busiest second of the busiest link; at most the link's bandwidth."""
    peak_together_bytes_per_s: float
    """Bandwidth in the busiest second of all links together."""
    used_share: float
    """Share of the bandwidth."""
    mean_depth: float
    """Active and queued transfers of one link, over time."""
    peak_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftStats:
    """Distribution of the time to first token."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    quantiles_s: tuple[float, ...]
    """Quantiles at 0, 1/200, 2/200, ... 1."""

    @classmethod
    def of(cls, times_s: npt.NDArray[np.float64]) -> "TtftStats":
        """Statistics of the times of at least one request."""
        quantiles: list[float] = np.quantile(times_s, np.linspace(0, 1, QUANTILES + 1)).tolist()
        p50, p95, p99 = (quantiles[round(share * QUANTILES)] for share in (0.5, 0.95, 0.99))
        return cls(mean_s=float(times_s.mean()), p50_s=p50, p95_s=p95, p99_s=p99, quantiles_s=tuple(quantiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """One tier; a tier of each node summed over nodes."""

    name: str
    capacity_bytes: int
    """Capacity of one tier of this name."""
    count: int
    """Nodes that have one; 1 if it is shared."""
    hit_tokens: int
    """Delivered to engines from this tier."""
    hit_rate: float
    """Over all input tokens."""
    reads: LinkStats
    """Promotions; host memory: to the engine, from any tier."""
    writes: LinkStats
    """Demotions; host memory: from the engine."""
    evictions: int
    writes_per_day: float
    """Bytes written a day over the tier's capacity."""
    drive_writes_per_day: float
    """Bytes written a day over the drives' capacity."""
    rated_writes_per_day: float | None
    """Rated drive writes per day; None: unknown."""
    loads: int
    """Loads whose slowest place is this tier."""
    trials: int
    """Those of them that try it and are not expected to pay."""


@dataclass(slots=True, kw_only=True)
class PlanningStats:
    """Decisions of the planner, and their cost against the best split of each request.

    The best split is found by trying every number of leading chunks, with the true speeds and queues of the links,
    after what running loads still have to move, and without later requests. The time of a split is that of its load, or
    of the prompts before it if that is longer, and of computing the rest. Only requests with a hit count.
    """

    requests: int = 0
    loads: int = 0
    trials: int = 0
    """Loads that were not expected to pay, but try a slow tier again."""
    cut_loads: int = 0
    """Loads that delivered less than planned, mostly because they ceased to pay."""
    loaded_tokens: int = 0
    skipped_tokens: int = 0
    """Cached, but computing was expected to be faster."""
    cut_tokens: int = 0
    """Planned and not delivered in time."""
    predicted_load_s: float = 0.0
    """Expected time of all loads beyond the engine's backlog."""
    load_s: float = 0.0
    """Actual time of all loads beyond the backlog."""
    recompute_s: float = 0.0
    """Time to compute everything."""
    taken_s: float = 0.0
    """Time of loads and computing the rest."""
    best_s: float = 0.0
    """Time of loads and computing the rest, with the best splits."""
    regret_s: float = 0.0
    """Sum over requests of the time beyond the best split."""
    regret_most_s: float = 0.0
    """Largest regret of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSeries:
    """A tier over time; a tier of each node summed over nodes."""

    hit_tokens_per_s: tuple[float, ...]
    """Hit tokens by arrival time of the requests."""
    read_bytes_per_s: tuple[float, ...]
    written_bytes_per_s: tuple[float, ...]
    read_depth: tuple[float, ...]
    """Active and queued transfers."""
    write_depth: tuple[float, ...]
    held_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredSeries:
    """Values for each of `PARTS` equal parts of the time until the last transfer."""

    part_s: float
    input_tokens_per_s: tuple[float, ...]
    skipped_tokens_per_s: tuple[float, ...]
    """Cached, but computed."""
    tiers: dict[str, TierSeries]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredResult:
    """Result of a replay through tiers."""

    requests: int
    is_complete: bool
    """False: it was stopped after these requests."""
    nodes: int
    servers: int
    """Prefill servers of each node."""
    duration_s: float
    """Time until the last request has its first token."""
    input_tokens: int
    hit_rate: float
    ttft: TtftStats
    ttft_without: TtftStats
    """The same requests on the same nodes, with everything computed."""
    tiers: tuple[TierResult, ...]
    planning: PlanningStats
    loads: int
    cut_loads: int
    convoys: int
    """Loads that found a chunk in transfer for another request."""
    skipped_tokens: int
    """Cached, but computing was expected to be faster."""
    dropped_chunks: int
    """Not stored: no slot in time."""
    dropped_demotions: int
    """Not written to a lower tier: the slot was needed, or the tier failed."""
    busy_share: float
    """Busy share of the prefill servers' time."""
    busy_share_without: float
    over_time: TieredSeries

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "TieredResult":
        """The inverse of `dataclasses.asdict`, also through JSON.

        Raises:
            KeyError, TypeError: `plain` is something else.
        """
        over_time = _read(TieredSeries, plain["over_time"])
        whole: dict[str, Any] = {
            **plain,
            "ttft": _read(TtftStats, plain["ttft"]),
            "ttft_without": _read(TtftStats, plain["ttft_without"]),
            "tiers": tuple(
                replace(
                    _read(TierResult, it), reads=_read(LinkStats, it["reads"]), writes=_read(LinkStats, it["writes"])
                )
                for it in plain["tiers"]
            ),
            "planning": PlanningStats(**plain["planning"]),
            "over_time": replace(
                over_time, tiers={name: _read(TierSeries, it) for name, it in plain["over_time"]["tiers"].items()}
            ),
        }
        return cls(**whole)


Value = TypeVar("Value")


def _read(kind: Callable[..., Value], plain: dict[str, Any]) -> Value:
    return kind(**{name: tuple(it) if isinstance(it, list) else it for name, it in plain.items()})  # pyright: ignore[reportUnknownArgumentType]
