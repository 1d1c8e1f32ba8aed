"""Which limit binds, and which is next.

Each limit says how much of what is allowed a load uses; 1 is the limit. The load at which it first does is found for
each alone, and the smallest of these loads is what the set-up can serve. So the answer changes when the limit that
binds is raised, it does not when another is, and the second smallest is what one meets after mending the first.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvtier.plan.operate import Point, decode_token_s, operate
from kvtier.plan.setup import Setup

TTFT = "time to first token"
"""Name of the limit that every plan has."""
_STEPS_PER_DECADE = 24
_DECADES_BELOW = 4
_DECADES_ABOVE = 2
_BISECTIONS = 40
_DAYS_PER_YEAR = 365.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of a set-up."""

    name: str
    meaning: str
    raised_by: str
    """Inputs that raise it."""
    requests_per_s: float
    """The load at which it is met, were it the only one; infinite when it is not met in reach."""
    users: float
    """That load in users; with a trace's own pauses, in queries a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most that a set-up serves, and why not more."""

    with_tiers: bool
    limits: tuple[Limit, ...]
    """The tightest first."""
    point: Point
    """At the ceiling, or at almost no load where even that is too much."""

    @property
    def requests_per_s(self) -> float:
        """The load at which the first limit is met."""
        return self.limits[0].requests_per_s

    @property
    def users(self) -> float:
        """That load in users."""
        return self.limits[0].users

    @property
    def binding(self) -> Limit:
        """The limit that is met first."""
        return self.limits[0]

    @property
    def next(self) -> Limit | None:
        """The limit that is met when the first is mended."""
        return self.limits[1] if len(self.limits) > 1 else None


Use = Callable[[Setup, Point], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a limit is checked."""

    name: str
    meaning: str
    raised_by: str
    used: Use
    """Of what is allowed, 1 being the limit."""


def rules_of(setup: Setup, *, with_tiers: bool) -> list[Rule]:
    """The limits that a set-up has."""
    target = setup.inputs.target
    rules = [
        Rule(
            name=TTFT,
            meaning=f"mean at most {target.ttft_s:g} s",
            raised_by="target.ttft_s, or whatever makes its parts shorter",
            used=lambda setup, point: point.ttft_s / setup.inputs.target.ttft_s,
        ),
        Rule(
            name="GPU time",
            meaning="prefill, decoding and what blocks them",
            raised_by="gpu.count, gpu.flops, gpu.memory_bytes_per_s",
            used=lambda _, point: point.gpu_used,
        ),
    ]
    if target.tpot_s:
        rules.append(
            Rule(
                name="time per output token",
                meaning=f"at most {target.tpot_s:g} s",
                raised_by="target.tpot_s, gpu.memory_bytes_per_s, gpu.count",
                used=lambda setup, point: point.tpot_s / setup.inputs.target.tpot_s,
            )
        )
    if not with_tiers or not setup.places:
        return rules
    rules.append(
        Rule(
            name="load stream",
            meaning="from a host to its GPUs",
            raised_by="software.load_bytes_per_s, gpu.link_bytes_per_s, gpu.count",
            used=_link_wanted,
        )
    )
    return [*rules, *_place_rules(setup)]


def _place_rules(setup: Setup) -> Iterator[Rule]:
    burst = f"{setup.inputs.target.burst:g} x the average reads, and writes"
    names = {it.name for it in setup.places}
    if "host" in names:
        yield Rule(
            name="host memory bandwidth",
            meaning=burst,
            raised_by="host.channels, host.channel_bytes_per_s, host.share",
            used=_host_used,
        )
    if "disk" in names:
        yield Rule(
            name="drive bandwidth",
            meaning=burst,
            raised_by="disk.count, disk.read_bytes_per_s, disk.write_bytes_per_s",
            used=lambda setup, point: _bandwidth_used(setup, point, "disk"),
        )
        yield Rule(
            name="drive life",
            meaning=f"{setup.inputs.target.life_years:g} years of these writes",
            raised_by="disk.count, disk.drive_writes_per_day, software.write_share",
            used=lambda setup, point: setup.inputs.target.life_years / max(life_years(setup, point), 1e-9),
        )
    if "shared" in names:
        yield Rule(
            name="network bandwidth",
            meaning=burst,
            raised_by="shared.adapters, shared.adapter_bytes_per_s",
            used=lambda setup, point: _bandwidth_used(setup, point, "shared"),
        )


def life_years(setup: Setup, point: Point) -> float:
    """Years until the drives have written what they are rated for; infinite when nothing is written.

    A rating of d drive writes a day for y years is ``365 d y`` times the capacity (JESD218 counts so).
    """
    disk = setup.inputs.disk
    day_share = setup.inputs.traffic.day_share
    written = point.write_bytes_per_s.get("disk", 0.0) * day_share * 86_400 * _DAYS_PER_YEAR * disk.wear
    rated = disk.count * disk.capacity_bytes * disk.drive_writes_per_day * _DAYS_PER_YEAR * disk.rated_years
    return rated / written if written else math.inf


def _link_wanted(setup: Setup, point: Point) -> float:
    return sum(point.wanted_bytes_per_s.values()) / setup.replicas / setup.load_bytes_per_s


def _bandwidth_used(setup: Setup, point: Point, name: str) -> float:
    place = next(it for it in setup.places if it.name == name)
    reads = setup.inputs.target.burst * point.wanted_bytes_per_s[name] / place.read_bytes_per_s
    return reads + point.write_bytes_per_s[name] / place.write_bytes_per_s


def _host_used(setup: Setup, point: Point) -> float:
    """Host memory is the gateway: what comes from or goes to a lower tier crosses its channels twice."""
    place = next(it for it in setup.places if it.name == "host")
    below = sum(rate for name, rate in point.wanted_bytes_per_s.items() if name != "host")
    written = sum(point.write_bytes_per_s.values())
    reads = setup.inputs.target.burst * (point.wanted_bytes_per_s["host"] + 2 * below)
    return (reads + written) / place.read_bytes_per_s


def ceiling(setup: Setup, *, with_tiers: bool) -> Ceiling:
    """The most that the set-up serves, with all its limits in order."""
    rules = rules_of(setup, with_tiers=with_tiers)
    loads = _loads(setup)
    points = [operate(setup, load, with_tiers=with_tiers) for load in loads]
    limits: list[Limit] = []
    for rule in rules:
        met = _first_met(rule.used, setup, loads, points, with_tiers=with_tiers)
        limits.append(
            Limit(
                name=rule.name,
                meaning=rule.meaning,
                raised_by=rule.raised_by,
                requests_per_s=met,
                users=in_users(setup, met),
            )
        )
    limits.sort(key=lambda it: it.requests_per_s)
    load = limits[0].requests_per_s or loads[0]
    return Ceiling(with_tiers=with_tiers, limits=tuple(limits), point=operate(setup, load, with_tiers=with_tiers))


def highest_load(setup: Setup, *, with_tiers: bool, only: str = "") -> float:
    """Requests a second at which the first limit is met, or the one named `only`: `ceiling` without the rest."""
    used = [rule.used for rule in rules_of(setup, with_tiers=with_tiers) if not only or rule.name == only]
    return _until_met(lambda it, point: max(use(it, point) for use in used), setup, with_tiers=with_tiers)


def throughput(setup: Setup, *, with_tiers: bool) -> float:
    """Requests a second that get done, however long they wait: what the GPUs and the pipes to them allow."""
    return _until_met(_pipes_used, setup, with_tiers=with_tiers)


def _pipes_used(setup: Setup, point: Point) -> float:
    places = [point.read_bytes_per_s[it.name] / it.read_bytes_per_s for it in setup.places]
    return max(point.gpu_used, point.link_used, *places) if places else point.gpu_used


def in_users(setup: Setup, requests_per_s: float) -> float:
    """A load in users; with a trace's own pauses there are none, and it stays in queries a second."""
    return requests_per_s * setup.demand.interval_s


def _loads(setup: Setup) -> list[float]:
    """From almost nothing to far beyond what decoding alone allows."""
    most = setup.replicas / (setup.demand.answer_tokens * decode_token_s(setup))
    steps = (_DECADES_BELOW + _DECADES_ABOVE) * _STEPS_PER_DECADE
    least = most / 10**_DECADES_BELOW
    return [least * 10 ** (step / _STEPS_PER_DECADE) for step in range(steps + 1)]


def _until_met(used: Use, setup: Setup, *, with_tiers: bool) -> float:
    points: list[Point] = []
    loads = _loads(setup)
    for load in loads:
        points.append(operate(setup, load, with_tiers=with_tiers))
        if used(setup, points[-1]) > 1:
            break
    return _first_met(used, setup, loads[: len(points)], points, with_tiers=with_tiers)


def _first_met(used: Use, setup: Setup, loads: list[float], points: list[Point], *, with_tiers: bool) -> float:
    over = next((n for n, point in enumerate(points) if used(setup, point) > 1), None)
    if over is None:
        return math.inf
    if over == 0:
        return 0.0
    low, high = loads[over - 1], loads[over]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if used(setup, operate(setup, middle, with_tiers=with_tiers)) > 1:
            high = middle
        else:
            low = middle
    return low


def uses(setup: Setup, point: Point) -> Mapping[str, float]:
    """How much of what is allowed each limit uses at one load, by the limit's name."""
    return {rule.name: rule.used(setup, point) for rule in rules_of(setup, with_tiers=point.with_tiers)}
