"""What tiers did with a trace, as plain values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.replay.links import LinkUse

QUANTILES = 200
"""The distribution of times is told at so many equal steps."""
PARTS = 120
"""What is told over time is told for so many equal parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times to the first token, in seconds."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    quantiles_s: tuple[float, ...]
    """The time that a share of 0, 1/200, 2/200, ... 1 of the requests does not exceed."""

    @classmethod
    def of(cls, times_s: npt.NDArray[np.float64]) -> "Latency":
        """Of at least one request."""
        told: list[float] = np.quantile(times_s, np.linspace(0, 1, QUANTILES + 1)).tolist()
        p50, p95, p99 = (told[round(share * QUANTILES)] for share in (0.5, 0.95, 0.99))
        return cls(mean_s=float(times_s.mean()), p50_s=p50, p95_s=p95, p99_s=p99, quantiles_s=tuple(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOutcome:
    """What one tier did; of tiers that each node has, all together."""

    name: str
    capacity_bytes: int
    """Of one."""
    count: int
    """Nodes that have one; 1 where it is shared."""
    hit_tokens: int
    """Delivered to engines from bytes that lay here."""
    hit_rate: float
    """Of all input tokens."""
    reads: LinkUse
    """Promotions; for host memory: to the engine, whatever tier it came from."""
    writes: LinkUse
    """Demotions; for host memory: from the engine."""
    evictions: int
    writes_per_day: float
    """How often a day's writes, at this rate, would fill the tier."""
    drive_writes_per_day: float
    """The same for its drives, of which KV may use a part only."""
    rated_writes_per_day: float | None
    """How often a day its drives may be filled; None where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """What the product's planner decided, and how good that was.

    The best split of a request is found by trying every number of leading chunks, knowing what no planner knows: how
    fast the links are and how long their queues. Others that come later are left out of it. The time of a split is that
    of its load, or of the prompts before it if that is longer, and of computing the rest. Only requests that found
    something count.
    """

    requests: int
    """That found something."""
    loads: int
    trials: int
    """Loads that were not expected to pay: a place that was believed slow is tried again."""
    cut_loads: int
    """Loads that brought less than they were asked for, mostly because they ceased to pay."""
    loaded_tokens: int
    skipped_tokens: int
    """Present, but computing was expected to be sooner."""
    cut_tokens: int
    """Asked for and not brought in time."""
    predicted_load_s: float
    """What all loads were expected to take, as far as the engine was not busy with others anyway."""
    load_s: float
    """What they took, counted in the same way."""
    recompute_s: float
    """What computing everything would have taken."""
    taken_s: float
    """What loading and computing the rest took."""
    best_s: float
    """What the best splits would have taken."""
    regret_s: float
    """Sum of what each request took longer than its best split."""
    regret_most_s: float
    """Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOverTime:
    """A tier in each part of the time; of tiers that each node has, all together."""

    hit_tokens_per_s: tuple[float, ...]
    """By the arrival of the requests."""
    read_bytes_per_s: tuple[float, ...]
    written_bytes_per_s: tuple[float, ...]
    read_depth: tuple[float, ...]
    """Transfers on the links or waiting for them, on average."""
    write_depth: tuple[float, ...]
    held_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """Series, a value for each of `PARTS` equal parts of the time until nothing moves any more."""

    part_s: float
    input_tokens_per_s: tuple[float, ...]
    skipped_tokens_per_s: tuple[float, ...]
    """Of these, what was present and was computed all the same."""
    tiers: dict[str, TierOverTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """What the tiers did with a trace."""

    requests: int
    is_complete: bool
    """False: it was broken off after so many requests."""
    nodes: int
    servers: int
    """Of each node."""
    duration_s: float
    """Until the last first token."""
    input_tokens: int
    hit_rate: float
    ttft: Latency
    ttft_without: Latency
    """The same requests on the same nodes, everything computed."""
    tiers: tuple[TierOutcome, ...]
    planning: Planning
    loads: int
    cut_loads: int
    convoys: int
    """Loads that found something on its way for another."""
    skipped_tokens: int
    """Present, but computing was expected to be sooner."""
    dropped_chunks: int
    """Not stored: not admitted, or no room in time."""
    dropped_demotions: int
    """Not written to a lower tier: its room in host memory was wanted, or the tier failed."""
    busy_share: float
    """Of the prefill servers' time."""
    busy_share_without: float
    over_time: OverTime

    @classmethod
    def read(cls, plain: dict[str, Any]) -> "Tiered":
        """From what `dataclasses.asdict` made of one, be it through JSON.

        Raises:
            KeyError, TypeError: it is something else.
        """
        over_time = _read(OverTime, plain["over_time"])
        whole: dict[str, Any] = {
            **plain,
            "ttft": _read(Latency, plain["ttft"]),
            "ttft_without": _read(Latency, plain["ttft_without"]),
            "tiers": tuple(_read(TierOutcome, _with_links(it)) for it in plain["tiers"]),
            "planning": _read(Planning, plain["planning"]),
            "over_time": replace(
                over_time, tiers={name: _read(TierOverTime, it) for name, it in plain["over_time"]["tiers"].items()}
            ),
        }
        return cls(**whole)


Value = TypeVar("Value")


def _read(kind: Callable[..., Value], plain: dict[str, Any]) -> Value:
    return kind(**{name: tuple(it) if isinstance(it, list) else it for name, it in plain.items()})  # pyright: ignore[reportUnknownArgumentType]


def _with_links(tier: dict[str, Any]) -> dict[str, Any]:
    return {**tier, "reads": _read(LinkUse, tier["reads"]), "writes": _read(LinkUse, tier["writes"])}
