"""Plain values of a replay: tiers, prefill times and results."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

HOST = "host"
QUANTILES = 200
"""Number of steps in a distribution of times."""
PARTS = 120
"""Number of points in a time series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """Capacity and speed of a tier."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    """Read bandwidth. For host memory, the bandwidth to the engine."""
    write_bytes_per_s: float
    """Write bandwidth. For host memory, the bandwidth from the engine."""
    latency_s: float
    is_shared: bool = False
    """Whether all nodes share one tier, instead of one for each node."""
    is_remote: bool = False
    """Whether a lookup asks for only a few names at a time, in rounds of `latency_s` each."""
    drive_bytes: int | None = None
    """Capacity of the drives, of which KV uses `capacity_bytes`; None means that KV uses the whole tier."""
    rated_writes_per_day: float | None = None
    """Rated endurance of the drives, in drive writes per day."""
    sources: dict[str, str] = field(default_factory=dict[str, str], compare=False)
    """The source of each field's value."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--tier {self.name}: {name} is {getattr(self, name)}; allowed: above 0")
        if not 0 <= self.latency_s < 60:
            raise ConfigError(f"--tier {self.name}: latency_s is {self.latency_s}; allowed: 0 to 60")
        if self.drive_bytes is not None and self.drive_bytes < self.capacity_bytes:
            raise ConfigError(
                f"--tier {self.name}: drives of {self.drive_bytes} bytes hold less than the {self.capacity_bytes} "
                "bytes that KV is to use; use larger drives, or more of them"
            )

    def in_raw_bytes(self, share: float) -> "TierSpec":
        """Return this tier with its size and speeds in bytes of raw KV.

        They are larger than in stored bytes, because the tier stores only `share` as many bytes.
        """
        note = f" / {share:.3g}, because it stores that share of raw KV"
        return replace(
            self,
            capacity_bytes=int(self.capacity_bytes / share),
            drive_bytes=None if self.drive_bytes is None else int(self.drive_bytes / share),
            read_bytes_per_s=self.read_bytes_per_s / share,
            write_bytes_per_s=self.write_bytes_per_s / share,
            sources={name: it if name == "latency_s" else it + note for name, it in self.sources.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """The use of a link, or of the corresponding links of several nodes."""

    transfers: int
    total_bytes: int
    mean_bytes_per_s: float
    """Mean bandwidth of all links together."""
    peak_bytes_per_s: float
    """Bandwidth in the busiest second of the busiest link, at most the link's own bandwidth."""
    peak_together_bytes_per_s: float
    """Bandwidth in the busiest second of all links together."""
    used_share: float
    """Share of the bandwidth that is in use."""
    mean_depth: float
    """Mean number of active and queued transfers per link over time."""
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
        """Compute the statistics of the times of at least one request."""
        quantiles: list[float] = np.quantile(times_s, np.linspace(0, 1, QUANTILES + 1)).tolist()
        p50, p95, p99 = (quantiles[round(share * QUANTILES)] for share in (0.5, 0.95, 0.99))
        return cls(mean_s=float(times_s.mean()), p50_s=p50, p95_s=p95, p99_s=p99, quantiles_s=tuple(quantiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """Results of one tier, or of all nodes' tiers of this name together."""

    name: str
    capacity_bytes: int
    """Capacity of one tier of this name."""
    count: int
    """Number of nodes with a tier of this name; 1 if the tier is shared."""
    hit_tokens: int
    """Tokens that engines loaded from this tier."""
    hit_rate: float
    """Hit tokens as a share of all input tokens."""
    reads: LinkStats
    """Promotions; for host memory, transfers from any tier to the engine."""
    writes: LinkStats
    """Demotions; for host memory, transfers from the engine."""
    evictions: int
    writes_per_day: float
    """Bytes written per day, divided by the tier's capacity."""
    drive_writes_per_day: float
    """Bytes written per day, divided by the drives' capacity."""
    rated_writes_per_day: float | None
    """Rated drive writes per day; None if unknown."""
    loads: int
    """Number of loads whose slowest tier is this one."""
    trials: int
    """Number of loads that try the tier although they are not expected to pay off."""


@dataclass(slots=True, kw_only=True)
class PlanningStats:
    """The planner's decisions, and their cost compared with the best split of each request.

    A split loads a number of leading chunks and computes the rest. The best split is the fastest, with the true speeds
    and queues of the links. A load waits for the remaining transfers of running loads, and later requests are ignored.
    The time of a split is that of its load, or of the earlier prompts if they take longer, plus that of computing the
    rest. Only requests with a hit count.
    """

    requests: int = 0
    loads: int = 0
    trials: int = 0
    """Loads that tried a slow tier again although they were not expected to pay off."""
    cut_loads: int = 0
    """Loads that delivered less than planned, mostly because they no longer paid off."""
    loaded_tokens: int = 0
    skipped_tokens: int = 0
    """Cached tokens that were computed, because computing was expected to be faster."""
    cut_tokens: int = 0
    """Tokens that were planned but not delivered in time."""
    predicted_load_s: float = 0.0
    """Seconds by which loads were expected to outlast the engine's backlog, summed over all loads."""
    load_s: float = 0.0
    """Seconds by which loads actually outlasted the backlog, summed over all loads."""
    recompute_s: float = 0.0
    """Seconds that the requests would have taken without loads."""
    taken_s: float = 0.0
    """Seconds of loads and of computing the rest."""
    best_s: float = 0.0
    """Seconds of loads and of computing the rest, with the best splits."""
    regret_s: float = 0.0
    """Seconds beyond those of the best splits, summed over requests."""
    regret_most_s: float = 0.0
    """Largest regret of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSeries:
    """One tier over time, or all nodes' tiers of this name together."""

    hit_tokens_per_s: tuple[float, ...]
    """Hit tokens by arrival time of the requests."""
    read_bytes_per_s: tuple[float, ...]
    written_bytes_per_s: tuple[float, ...]
    read_depth: tuple[float, ...]
    """Number of active and queued transfers."""
    write_depth: tuple[float, ...]
    held_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredSeries:
    """Values for each of `PARTS` equal parts of the time until the last transfer."""

    part_s: float
    input_tokens_per_s: tuple[float, ...]
    skipped_tokens_per_s: tuple[float, ...]
    """Cached tokens that were computed."""
    tiers: dict[str, TierSeries]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredResult:
    """Result of a replay through tiers."""

    requests: int
    is_complete: bool
    """Whether the replay covers the whole trace. False if it was stopped early."""
    nodes: int
    servers: int
    """Number of prefill servers in each node."""
    duration_s: float
    """Time until the last request's first token."""
    input_tokens: int
    hit_rate: float
    ttft: TtftStats
    ttft_without: TtftStats
    """TTFT of the same requests on the same nodes if they compute everything."""
    tiers: tuple[TierResult, ...]
    planning: PlanningStats
    loads: int
    cut_loads: int
    convoys: int
    """Number of loads with a chunk that was already in transfer for another request."""
    skipped_tokens: int
    """Cached tokens that were computed, because computing was expected to be faster."""
    dropped_chunks: int
    """Chunks that were not stored, because no slot was free in time."""
    dropped_demotions: int
    """Objects that were not written to a lower tier, because their slot was needed or the tier failed."""
    busy_share: float
    """Share of the time in which the prefill servers were busy."""
    busy_share_without: float
    over_time: TieredSeries

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "TieredResult":
        """Invert `dataclasses.asdict`, even after a round trip through JSON.

        Raises:
            KeyError, TypeError: `plain` has another form.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """Speed of a prefill. The defaults suit a 70B dense model with 80 layers and 8,192 hidden units on 8 H100."""

    tokens_per_s: float = 10_000.0
    """Speed at the beginning of a prompt."""
    attention_tokens: float = 53_000.0
    """Position at which a token costs twice as much as the first: 2 x parameters / (4 x layers x hidden units)."""
    windows: tuple[tuple[int, float], ...] = ()
    """Pairs (window in tokens, `attention_tokens`) of layers with sliding windows."""
    source: str = field(default="default: near a 70B dense model on 8 H100", compare=False)
    """Source of the figures."""

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_s < float("inf"):
            raise ConfigError(f"the prefill speed is {self.tokens_per_s:g} tokens a second; allowed: above 0")
        if not all(it > 0 for it in (self.attention_tokens, *(cost for _, cost in self.windows))):
            raise ConfigError(
                f"the prefill speed has attention_tokens = {self.attention_tokens:g}; allowed: above 0, or inf"
            )

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds to compute the tokens at positions from `start` to `stop`."""
        before = (stop + start) / 2
        cost = 1.0 + before / self.attention_tokens
        for window, attention_tokens in self.windows:
            cost += min(before, window) / attention_tokens
        return (stop - start) * cost / self.tokens_per_s


def best_split(
    arrivals_s: Iterable[float], *, chunk_tokens: int, input_tokens: int, ahead_s: float, prefill: PrefillSpeed
) -> tuple[int, float]:
    """Return the number of leading chunks whose load gives the earliest end of the prefill, and the seconds until then.

    Args:
        arrivals_s: seconds until each loadable leading chunk and all earlier chunks have arrived.
        chunk_tokens: number of tokens per chunk.
        input_tokens: tokens of the prompt.
        ahead_s: seconds until the engine can start this prompt.
        prefill: speed of computing.
    """
    best = (0, ahead_s + prefill.seconds(0, input_tokens))
    for chunks, arrival_s in enumerate(arrivals_s, 1):
        end_s = max(arrival_s, ahead_s) + prefill.seconds(min(chunks * chunk_tokens, input_tokens), input_tokens)
        if end_s < best[1]:
            best = (chunks, end_s)
    return best
