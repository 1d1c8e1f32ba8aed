"""Find which limit of a deployment binds and which is next, the best size, and the number of GPUs for a load.

The limits of latency and throughput determine how many users a deployment serves. Bandwidth is only a reserve: bursts
that exceed it slow down loads. A prompt is computed if that is faster than loading it. The time to first token includes
both effects. Wear is not a limit.

A limit is met at the lowest load that uses up its budget. The limit that is met first binds, and the deployment serves
no more than that load. Only raising the binding limit changes the answer. Once it is raised, the limit with the next
higher load binds.

A larger size reads weights and computes prompts faster, and has room for more KV. It also exchanges more, and fewer
copies share the load. The plan takes a size larger than memory requires only if that size serves more users.

Sensitivities come from plans with one input a fifth lower and a fifth higher.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from kvtier.config.schema import Setting
from kvtier.errors import ConfigError
from kvtier.tools.plan.hardware import COUNT_MAX
from kvtier.tools.plan.inputs import SETTINGS, Inputs
from kvtier.tools.plan.operating_point import OperatingPoint, decode_token_s, operate
from kvtier.tools.plan.resolve import SEARCHED, Basis, Deployment, TierHardware, deployments, resolve

TTFT, TTFT_P95 = FIRST_TOKEN = "time to first token", "95 % of first tokens"
"""Names of the limits of the time to first token. Every plan has at least one of them."""
TPOT = "time per output token"
_LEAST, _MOST = 1e-12, 100.0
"""Range of loads searched, in multiples of the load at which decoding alone fills the GPUs."""
_START, _STEP, _SCANNED_FROM = 0.1, 4.0, 1e-4
_CLOSE = 1e-11
"""Relative width at which a search ends."""
_STEPS = 100
_DAYS_PER_YEAR = 365.25

Use = Callable[[Deployment, OperatingPoint], float]
"""A function that computes the used share of a limit's budget, at an operating point."""

_BANDWIDTHS = {
    "host": ("host memory bandwidth", "host.channels, host.channel_bytes_per_s, host.share"),
    "disk": ("drive bandwidth", "disk.count, disk.read_bytes_per_s, disk.write_bytes_per_s"),
    "shared": ("network bandwidth", "shared.read_bytes_per_s, shared.write_bytes_per_s, shared.adapters"),
}
"""The name of each tier's bandwidth limit, and the inputs that raise it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of a deployment."""

    name: str
    meaning: str
    raised_by: str
    """Inputs that raise the limit."""
    requests_per_s: float
    """The load at which this limit alone is met; infinite if no load in the searched range meets it."""
    users: float
    """The same load in users; with a trace's own pauses, in queries per second."""
    is_reserve: bool
    """Whether the limit is a bandwidth. Beyond it loads get slower, but requests are still served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The highest load within all limits, and the limits."""

    limits: tuple[Limit, ...]
    """The tightest first."""
    point: OperatingPoint
    """Operating point at the ceiling, or at almost no load if even almost no load exceeds a limit."""

    @property
    def binding(self) -> Limit:
        """The limit that is met first."""
        return self.serving[0]

    @property
    def next(self) -> Limit | None:
        """The limit that is met next, once the first is raised."""
        return self.serving[1] if len(self.serving) > 1 else None

    @property
    def serving(self) -> list[Limit]:
        """The limits of latency and throughput, the tightest first."""
        return [it for it in self.limits if not it.is_reserve]


@dataclass(frozen=True, slots=True)
class LimitRule:
    """One limit, with the function that computes the used share of its budget."""

    name: str
    meaning: str
    raised_by: str
    used: Use
    is_reserve: bool = False


def rules(deployment: Deployment) -> list[LimitRule]:
    """List the limits of a deployment."""
    target, tiers = deployment.inputs.target, deployment.tiers
    burst = f"{target.burst:g} x the average reads, and writes"
    found = [
        LimitRule(
            TTFT,
            f"mean at most {target.ttft_s:g} s",
            "target.ttft_s, or any input that shortens its parts",
            lambda _, point: point.ttft_s / target.ttft_s,
        ),
        LimitRule(
            TTFT_P95,
            f"at most {target.ttft_p95_s:g} s",
            "target.ttft_p95_s, or any input that shortens its parts",
            lambda _, point: point.ttft_within_s(0.95) / target.ttft_p95_s,
        ),
        LimitRule(
            "GPU time",
            "prefill, decoding and blocking loads",
            "gpu.count, gpu.flops, gpu.memory_bytes_per_s",
            lambda _, point: point.gpu_used,
        ),
        LimitRule(
            TPOT,
            f"at most {target.tpot_s:g} s",
            "target.tpot_s, gpu.memory_bytes_per_s, gpu.count",
            lambda _, point: point.tpot_s / target.tpot_s,
        ),
        LimitRule(
            "load stream",
            "from a host to its GPUs, on average",
            "software.load_bytes_per_s, gpu.link_bytes_per_s, gpu.count",
            lambda it, point: sum(point.wanted_bytes_per_s.values()) / it.replicas / it.load_bytes_per_s,
            is_reserve=True,
        ),
    ]
    applies = (target.ttft_s, target.ttft_p95_s, True, target.tpot_s, tiers)
    return [rule for rule, is_there in zip(found, applies, strict=True) if is_there] + [
        LimitRule(name, burst, raised_by, partial(_tier_used, tier=it), is_reserve=True)
        for it in tiers
        for name, raised_by in (_BANDWIDTHS[it.name],)
    ]


def life_years(deployment: Deployment, written_bytes_per_s: float) -> float:
    """Compute the years until the drives have written what they are rated for; infinite without writes.

    A rating of d drive writes a day for y years is ``365 d y`` times the capacity (as in JESD218).
    """
    disk = deployment.inputs.disk
    written = written_bytes_per_s * deployment.inputs.traffic.day_share * 86_400 * _DAYS_PER_YEAR * disk.wear
    rated = disk.count * disk.capacity_bytes * disk.drive_writes_per_day * _DAYS_PER_YEAR * disk.rated_years
    return rated / written if written else math.inf


def _tier_used(deployment: Deployment, point: OperatingPoint, tier: TierHardware) -> float:
    """Return the share of a tier's time that reads in bursts and average writes take.

    Data of a tier below host memory crosses the channels of host memory twice.
    """
    reads, writes = point.wanted_bytes_per_s[tier.name], point.given_bytes_per_s[tier.name]
    if tier.name == "host":
        reads += 2 * sum(rate for name, rate in point.wanted_bytes_per_s.items() if name != "host")
        writes = sum(point.given_bytes_per_s.values())
    return deployment.inputs.target.burst * reads / tier.read_bytes_per_s + writes / tier.write_bytes_per_s


def ceiling(deployment: Deployment) -> Ceiling:
    """Find the highest load within all limits, and sort the limits by the load that meets them."""
    points = _points(deployment)
    limits: list[Limit] = []
    for rule in rules(deployment):
        # Higher loads shorten a tier's residence time, which may lower its reads again, so scan from low loads.
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


def highest_load(deployment: Deployment, near: float = 0.0) -> float:
    """Find the requests per second at which the first limit of latency or throughput is met.

    Args:
        deployment: the deployment to search.
        near: load near which the search starts, such as that of a similar deployment.
    """
    used = [rule.used for rule in rules(deployment) if not rule.is_reserve]
    points = partial(operate, deployment)
    return _met(lambda it, point: max(use(it, point) for use in used), deployment, points, near, 1.2)


def is_within(deployment: Deployment, requests_per_s: float) -> bool:
    """Return whether a load stays within the limits of latency and throughput."""
    point = operate(deployment, requests_per_s)
    return all(rule.used(deployment, point) <= 1 for rule in rules(deployment) if not rule.is_reserve)


def most_users(deployment: Deployment, near: float = 0.0) -> float:
    """Return the users within all limits: `highest_load` in users."""
    return in_users(deployment, highest_load(deployment, near))


def throughput(deployment: Deployment) -> float:
    """Compute the most requests per second, however long requests wait.

    This is the most that the GPUs, each replica's load bandwidth and the tiers' read bandwidth can sustain.
    """
    return _met(_pipes_used, deployment, _points(deployment)) or _LEAST * _decoding_alone(deployment)


def _pipes_used(deployment: Deployment, point: OperatingPoint) -> float:
    reads = [point.read_bytes_per_s[tier.name] / tier.read_bytes_per_s for tier in deployment.tiers]
    return max(point.gpu_used, point.link_used, *reads)


def in_users(deployment: Deployment, requests_per_s: float) -> float:
    """Convert a load to users. With a trace's own pauses the load stays in queries per second."""
    return requests_per_s * deployment.workload.interval_s


def _decoding_alone(deployment: Deployment) -> float:
    """Compute the requests per second at which decoding alone fills the GPUs."""
    return deployment.replicas / (deployment.workload.answer_tokens * decode_token_s(deployment))


def _points(deployment: Deployment) -> Callable[[float], OperatingPoint]:
    """Return a function that maps a load to its operating point, and computes each load only once."""
    return cache(partial(operate, deployment))


def _met(
    used: Use, deployment: Deployment, points: Callable[[float], OperatingPoint], near: float = 0.0, step: float = _STEP
) -> float:
    """Find the load that uses up the budget of `used`. Return 0 or infinity if it is outside the searched range.

    Steps from `near` bracket the load, and false position (the Illinois rule) narrows the bracket. The function to
    solve is ``1 - 1 / used``: finite where queues grow without end, and nearly straight before that.
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
        if not low < middle < high or count % 4 == 3:  # bisection is faster where the curve bends or jumps
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
    """Compute the used share of each limit's budget at one load, by the name of the limit."""
    return {rule.name: rule.used(deployment, point) for rule in rules(deployment)}


_ALMOST_NO_LOAD = 1e-9
CLOSE = 1e-9


def best(sizes: Sequence[Deployment], users: Sequence[float]) -> Deployment:
    """Find the smallest size that serves the most whole users, or the size with the lowest TTFT if none serves any.

    Args:
        sizes: deployments with the tiers to count, the smallest size first.
        users: users that each of them serves.
    """
    if not max(users):
        return min(sizes, key=lambda it: operate(it, _ALMOST_NO_LOAD).ttft_s)
    counted = [sizes[0].workload.counted(it) for it in users]
    counted = counted if max(counted) else users
    return next(it for it, served in zip(sizes, counted, strict=True) if is_served(max(counted), served))


def is_served(requested: float, users: float) -> bool:
    """Return whether `users` are as many as requested, up to the precision of a search."""
    return users >= requested * (1 - CLOSE)


def sizes_of_a_host(inputs: Inputs, basis: Basis) -> list[tuple[int, bool]]:
    """List the sizes to search for any number of GPUs: the sizes of the given GPUs and of a whole host."""
    hosts = inputs.change({"gpu.count": max(inputs.gpu.count, inputs.host.gpus)})
    found = (it.inputs.model for each in (inputs, hosts) for it in deployments(each, basis))
    return sorted({(it.tp, it.dp_attention) for it in found})


class Fewest(NamedTuple):
    """The fewest GPUs for a load, and the size of their copies."""

    gpus: int
    tp: int
    dp_attention: bool


def gpus_for(
    inputs: Inputs, deployment: Deployment, load: float, searched: Sequence[tuple[int, bool]]
) -> Fewest | None:
    """Find the fewest GPUs, in whole copies of any of the `searched` sizes, that serve `load`; None if no number does.

    The search checks each number as a plan of that many GPUs, with the tiers of their hosts. Copies share tiers whose
    total is given, so the users of one copy are only a first estimate. The search steps by the users of a copy, and
    then halves its last step. A copy serves more if it shares the tiers of its host with fewer copies. If several
    sizes need equally many GPUs, the result has the size of `deployment`, or else the largest.

    Args:
        inputs: the inputs as given, so that totals follow the number of hosts.
        deployment: the same inputs, resolved, with the tiers to count.
        load: requests per second.
        searched: sizes to try, from `sizes_of_a_host`.
    """
    basis, kept, model = deployment.basis, {it.name for it in deployment.tiers}, deployment.inputs.model
    own = (model.tp, model.dp_attention)
    sizes = sorted(searched, key=lambda it: (it == own, it), reverse=True)

    @cache
    def most(tp: int, dp: bool, copies: int) -> float:  # noqa: FBT001 - a key of the cache
        size = {"gpu.count": tp * copies, "model.tp": tp, "model.dp_attention": dp}
        changed = resolve(inputs.change(size, SEARCHED), basis).only(kept)
        return highest_load(changed, near=most(tp, dp, 1) * copies if copies > 1 else 0.0)

    found: Fewest | None = None
    for tp, dp in sizes:
        limit = found.gpus if found else COUNT_MAX + 1
        failed, copies = 0, 1
        while copies * tp < limit and (served := most(tp, dp, copies)) and not is_served(load, served):
            failed, copies = copies, max(copies + 1, math.ceil(copies * load / served * (1 - CLOSE)))
        if not most(tp, dp, 1):
            continue
        copies = min(copies, -(-limit // tp))
        while copies - failed > 1:
            middle = (failed + copies) // 2
            failed, copies = (failed, middle) if is_served(load, most(tp, dp, middle)) else (middle, copies)
        if copies * tp < limit:
            found = Fewest(copies * tp, tp, dp)
    return found


STEP = 0.2
_SIZE = ("model.tp", "model.dp_attention")
"""Inputs that a plan searches for. Sensitivities keep the values that it found."""
_LOAD = frozenset((*_SIZE, "host.gpus", "traffic.users", "traffic.load", "target.gpu_used", "traffic.trace_window_s"))
"""Inputs without sensitivities: size, hosts, and the requested load, which does not change the most users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSensitivity:
    """Users within all limits, with tiers, for a lower and a higher value of one input."""

    name: str
    value: float
    lower: float | None
    """The lower value; None if it is not allowed."""
    higher: float | None
    users: float
    """Users with the planned value."""
    users_lower: float | None
    """Users with the lower value; None if no plan is possible with it."""
    users_higher: float | None

    @property
    def swing(self) -> float:
        """The largest relative change of the users."""
        changed = [it for it in (self.users_lower, self.users_higher) if it is not None and math.isfinite(it)]
        return max((abs(it - self.users) / self.users for it in changed if self.users), default=0.0)


def sensitivities(inputs: Inputs, deployment: Deployment) -> list[InputSensitivity]:
    """Compute the sensitivity to every numeric input in use, the strongest first, at the size that the plan found.

    Another number of GPUs is planned at its own best size.

    Args:
        inputs: the inputs as given, so that values from the catalogue follow a changed name.
        deployment: the same inputs, resolved.
    """
    size = {name: deployment.inputs.value(name) for name in _SIZE}
    fixed = inputs.change(size, deployment.inputs.origin("model.tp"))
    users = most_users(deployment)

    def at(name: str, value: float | None) -> float | None:
        # Another number of GPUs is planned at its own best size.
        return _changed(inputs if name == "gpu.count" else fixed, deployment, name, value, users)

    found = [
        InputSensitivity(
            name=setting.name,
            value=value,
            lower=lower,
            higher=higher,
            users=users,
            users_lower=at(setting.name, lower),
            users_higher=at(setting.name, higher),
        )
        for setting, value, lower, higher in _numbers(deployment)
    ]
    return sorted(found, key=lambda it: -it.swing)


def _numbers(deployment: Deployment) -> Iterator[tuple[Setting, float, float | None, float | None]]:
    for name, setting in SETTINGS.items():
        value = deployment.inputs.value(name)
        is_other = name in _LOAD or name.startswith("price.")  # prices change the cost, not the number of users
        if is_other or not isinstance(value, int | float) or isinstance(value, bool) or not value:
            continue
        lower: float = value * (1 - STEP)
        higher: float = value * (1 + STEP)
        if isinstance(value, int):
            # A whole number changes by at least one; GPUs change by whole copies of the model.
            grain = deployment.inputs.model.tp if name == "gpu.count" else 1
            step = max(round(value * STEP / grain), 1) * grain
            whole = value // grain * grain
            lower, higher = whole - step, whole + step
        yield setting, value, _allowed(setting, lower), _allowed(setting, higher)


def _allowed(setting: Setting, value: float) -> float | None:
    try:
        read = setting.kind.read(value, is_text=False)
    except ValueError:
        return None
    return value if read else None  # 0 would mean something else


def _changed(inputs: Inputs, deployment: Deployment, name: str, value: float | None, users: float) -> float | None:
    if value is None:
        return None
    try:
        changed = [
            it.only({tier.name for tier in deployment.tiers})
            for it in deployments(inputs.change({name: value}, "sensitivity"), deployment.basis)
        ]
    except ConfigError:  # an impossible plan, such as a model that no longer fits
        return None
    near = users / deployment.workload.interval_s
    return max(most_users(it, near if math.isfinite(near) else 0.0) for it in changed)
