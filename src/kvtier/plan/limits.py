"""Limits of a deployment: which one binds, and which is next.

Users come from latency and throughput. Bandwidth is a reserve: where bursts exceed it, loads take longer, and prompts
that would load more slowly than they compute are computed, which the time to first token contains. Wear is no limit.

Each limit computes the used share of its budget at a load; it is met at 1. The load at which that happens first is
found for each limit alone. The lowest of these loads is the most that the deployment serves. Raising the binding limit
changes the answer, raising another one does not, and the second lowest load is met after the first limit is raised.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from kvtier.plan.queueing import OperatingPoint, decode_token_s, operate
from kvtier.plan.resolve import Deployment

TTFT, TTFT_P95 = FIRST_TOKEN = "time to first token", "95 % of first tokens"
"""Names of the limits of the time to first token: every plan has one of them, or both."""
_LEAST, _MOST = 1e-12, 100.0
"""Searched loads, as multiples of the load at which decoding alone fills the GPUs."""
_START, _STEP, _SCANNED_FROM = 0.1, 4.0, 1e-4
_CLOSE = 1e-11
"""Relative width at which a search ends."""
_STEPS = 100
_DAYS_PER_YEAR = 365.25

Use = Callable[[Deployment, OperatingPoint], float]
"""The used share of a budget."""

_BANDWIDTHS = {
    "host": ("host memory bandwidth", "host.channels, host.channel_bytes_per_s, host.share"),
    "disk": ("drive bandwidth", "disk.count, disk.read_bytes_per_s, disk.write_bytes_per_s"),
    "shared": ("network bandwidth", "shared.adapters, shared.adapter_bytes_per_s"),
}
"""Name of each tier's bandwidth limit, and the inputs that raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of a deployment."""

    name: str
    meaning: str
    raised_by: str
    """Inputs that raise it."""
    requests_per_s: float
    """The load at which this limit alone is met; infinite when it is not met in the searched range."""
    users: float
    """The ceiling in users; with a trace's own pauses, in queries a second."""
    is_reserve: bool
    """Bandwidth: beyond it loads are slower, but requests are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The highest load that meets all limits, and the limits."""

    limits: tuple[Limit, ...]
    """The tightest first."""
    point: OperatingPoint
    """Operating point at the ceiling, or at almost no load where even that exceeds a limit."""

    @property
    def binding(self) -> Limit:
        """The limit that is met first."""
        return self.serving[0]

    @property
    def next(self) -> Limit | None:
        """The limit that is met after the first is raised."""
        return self.serving[1] if len(self.serving) > 1 else None

    @property
    def serving(self) -> list[Limit]:
        """The limits of latency and throughput, the tightest first."""
        return [it for it in self.limits if not it.is_reserve]


@dataclass(frozen=True, slots=True)
class LimitRule:
    """Check of one limit."""

    name: str
    meaning: str
    raised_by: str
    used: Use
    is_reserve: bool = False


def rules(deployment: Deployment, *, with_tiers: bool) -> list[LimitRule]:
    """The limits of a deployment."""
    target = deployment.inputs.target
    found: list[LimitRule] = []
    if target.ttft_s:
        found.append(
            LimitRule(
                TTFT,
                f"mean at most {target.ttft_s:g} s",
                "target.ttft_s, or any input that shortens its parts",
                lambda _, point: point.ttft_s / target.ttft_s,
            )
        )
    if target.ttft_p95_s:
        found.append(
            LimitRule(
                TTFT_P95,
                f"at most {target.ttft_p95_s:g} s",
                "target.ttft_p95_s, or any input that shortens its parts",
                lambda _, point: point.ttft_within_s(0.95) / target.ttft_p95_s,
            )
        )
    found.append(
        LimitRule(
            "GPU time",
            "prefill, decoding and blocking loads",
            "gpu.count, gpu.flops, gpu.memory_bytes_per_s",
            lambda _, point: point.gpu_used,
        )
    )
    if target.tpot_s:
        found.append(
            LimitRule(
                "time per output token",
                f"at most {target.tpot_s:g} s",
                "target.tpot_s, gpu.memory_bytes_per_s, gpu.count",
                lambda _, point: point.tpot_s / target.tpot_s,
            )
        )
    if not with_tiers or not deployment.tiers:
        return found
    found.append(
        LimitRule(
            "load stream",
            "from a host to its GPUs",
            "software.load_bytes_per_s, gpu.link_bytes_per_s, gpu.count",
            _link_used,
            is_reserve=True,
        )
    )
    burst = f"{target.burst:g} x the average reads, and writes"
    for tier in deployment.tiers:
        name, raised_by = _BANDWIDTHS[tier.name]
        used = _host_used if tier.name == "host" else partial(_bandwidth_used, tier=tier.name)
        found.append(LimitRule(name, burst, raised_by, used, is_reserve=True))
    return found


def life_years(deployment: Deployment, written_bytes_per_s: float) -> float:
    """Years until the drives have written their rating; infinite without writes.

    A rating of d drive writes a day for y years is ``365 d y`` times the capacity (as in JESD218).
    """
    disk = deployment.inputs.disk
    day_share = deployment.inputs.traffic.day_share
    written = written_bytes_per_s * day_share * 86_400 * _DAYS_PER_YEAR * disk.wear
    rated = disk.count * disk.capacity_bytes * disk.drive_writes_per_day * _DAYS_PER_YEAR * disk.rated_years
    return rated / written if written else math.inf


def _link_used(deployment: Deployment, point: OperatingPoint) -> float:
    return sum(point.wanted_bytes_per_s.values()) / deployment.replicas / deployment.load_bytes_per_s


def _bandwidth_used(deployment: Deployment, point: OperatingPoint, tier: str) -> float:
    hardware = next(it for it in deployment.tiers if it.name == tier)
    reads = deployment.inputs.target.burst * point.wanted_bytes_per_s[tier] / hardware.read_bytes_per_s
    return reads + point.given_bytes_per_s[tier] / hardware.write_bytes_per_s


def _host_used(deployment: Deployment, point: OperatingPoint) -> float:
    """Data from or to a lower tier crosses the channels of host memory twice."""
    host = next(it for it in deployment.tiers if it.name == "host")
    below = sum(rate for name, rate in point.wanted_bytes_per_s.items() if name != "host")
    written = sum(point.given_bytes_per_s.values())
    reads = deployment.inputs.target.burst * (point.wanted_bytes_per_s["host"] + 2 * below)
    return (reads + written) / host.read_bytes_per_s


def ceiling(deployment: Deployment, *, with_tiers: bool) -> Ceiling:
    """The highest load that meets all limits, with the limits in order."""
    points = _points(deployment, with_tiers=with_tiers)
    limits: list[Limit] = []
    for rule in rules(deployment, with_tiers=with_tiers):
        # Reads of a tier fall again where higher loads shorten its residence time, so they are scanned from below.
        near, step = (_SCANNED_FROM * _decoding_alone(deployment), 1.3) if rule.is_reserve else (0.0, _STEP)
        met = _met(rule.used, deployment, points, near, step)
        limits.append(
            Limit(
                name=rule.name,
                meaning=rule.meaning,
                raised_by=rule.raised_by,
                requests_per_s=met,
                users=in_users(deployment, met),
                is_reserve=rule.is_reserve,
            )
        )
    limits.sort(key=lambda it: it.requests_per_s)
    first = next(it for it in limits if not it.is_reserve).requests_per_s
    return Ceiling(limits=tuple(limits), point=points(first or _LEAST * _decoding_alone(deployment)))


def highest_load(deployment: Deployment, *, with_tiers: bool, near: float = 0.0) -> float:
    """Requests a second at which the first limit of latency or throughput is met.

    Args:
        deployment: to search.
        with_tiers: with its tiers, or with GPU memory alone.
        near: a load near which the search begins, such as that of a similar deployment.
    """
    used = [rule.used for rule in rules(deployment, with_tiers=with_tiers) if not rule.is_reserve]
    points = partial(operate, deployment, with_tiers=with_tiers)
    return _met(lambda it, point: max(use(it, point) for use in used), deployment, points, near, 1.2)


def most_users(deployment: Deployment, *, with_tiers: bool = True, near: float = 0.0) -> float:
    """Users within all limits: `highest_load` in users."""
    return in_users(deployment, highest_load(deployment, with_tiers=with_tiers, near=near))


def throughput(deployment: Deployment, *, with_tiers: bool) -> float:
    """Requests a second that the GPUs and their pipes complete at most, with any waiting time."""
    points = _points(deployment, with_tiers=with_tiers)
    return _met(_pipes_used, deployment, points) or _LEAST * _decoding_alone(deployment)


def _pipes_used(deployment: Deployment, point: OperatingPoint) -> float:
    if not deployment.tiers:
        return point.gpu_used
    reads = [point.read_bytes_per_s[tier.name] / tier.read_bytes_per_s for tier in deployment.tiers]
    return max(point.gpu_used, point.link_used, *reads)


def in_users(deployment: Deployment, requests_per_s: float) -> float:
    """A load in users; with a trace's own pauses it stays in queries a second."""
    return requests_per_s * deployment.workload.interval_s


def _decoding_alone(deployment: Deployment) -> float:
    """Requests a second at which decoding alone fills the GPUs."""
    return deployment.replicas / (deployment.workload.answer_tokens * decode_token_s(deployment))


def _points(deployment: Deployment, *, with_tiers: bool) -> Callable[[float], OperatingPoint]:
    """The operating point at a load, computed once for each load."""
    return cache(partial(operate, deployment, with_tiers=with_tiers))


def _met(
    used: Use, deployment: Deployment, points: Callable[[float], OperatingPoint], near: float = 0.0, step: float = _STEP
) -> float:
    """The load at which the budget is used up; 0 or infinite where that is not in the searched range.

    Steps from `near` bracket it; then false position (the Illinois rule) narrows the bracket. It works on
    ``1 - 1 / used``, which is finite where queues grow without end and nearly straight before that.
    """

    def over(load: float) -> float:
        share = used(deployment, points(load))
        return 1 - 1 / share if share else -math.inf

    alone = _decoding_alone(deployment)
    low = high = near or alone * _START
    at_low = at_high = over(low)
    step = step if near else _STEP
    while at_low > 0:
        high, at_high = low, at_low
        low /= step
        if low < _LEAST * alone:
            return 0.0
        at_low, step = over(low), min(step * step, _STEP)
    while at_high <= 0:
        low, at_low = high, at_high
        high *= step
        if high > _MOST * alone:
            return math.inf
        at_high = over(high)
    was_over = None
    for count in range(_STEPS):
        if high - low <= _CLOSE * high:
            break
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        if not low < middle < high or count % 4 == 3:  # where the curve bends or jumps, halves are faster
            middle = (low + high) / 2
        at = over(middle)
        if at > 0:
            high, at_high = middle, at
            at_low /= 2 if was_over else 1
        else:
            low, at_low = middle, at
            at_high /= 2 if was_over is False else 1
        was_over = at > 0
    return low


def used_shares(deployment: Deployment, point: OperatingPoint) -> dict[str, float]:
    """The used share of each limit's budget at one load, by the limit's name."""
    return {rule.name: rule.used(deployment, point) for rule in rules(deployment, with_tiers=point.with_tiers)}
