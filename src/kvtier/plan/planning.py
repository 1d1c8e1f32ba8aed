"""A plan: the set-up with GPU memory alone against the same with tiers, and what the tiers must provide."""

import math
from dataclasses import dataclass

from kvtier.plan.inputs import Inputs
from kvtier.plan.limits import TTFT, Ceiling, Limit, ceiling, in_users, life_years, throughput, uses
from kvtier.plan.money import BreakEven, Cost, break_evens, cost
from kvtier.plan.operate import GPU, Point, operate
from kvtier.plan.sensitivity import Lever, levers
from kvtier.plan.setup import Setup, set_up
from kvtier.plan.trace import TraceSummary

HIT_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: GPU memory alone, or with tiers."""

    with_tiers: bool
    ceiling: Ceiling
    users_at_ttft: float
    """Within the limit of the time to first token, whatever else is exceeded."""
    throughput_per_s: float
    """Requests a second that the GPUs get done at most."""
    throughput_users: float
    """From so many users on, more do not get more done."""
    served_per_s: float
    """Requests a second at the load that is asked for: all of them, or what the GPUs get done."""
    point: Point
    """At the load that is served."""
    ttft_s: float
    """At the load that is asked for; infinite where queues grow without end."""
    output_tokens_per_s: float
    gpus_needed: int | None
    """For the load that is asked for (`gpus_needed`); None where no number of them is enough."""
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One place that holds KV, at the load that is served."""

    name: str
    capacity_bytes: float
    capacity_tokens: float
    sessions: float
    residence_s: float
    """How long it keeps what it is not asked for; the end of the table (years) where it keeps everything."""
    found: float
    """Share of all prompt tokens that come from here."""
    read_bytes_per_s: float
    read_burst_bytes_per_s: float
    provided_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What all tiers together must hold for a share of the hits that are possible."""

    hit_share: float
    hit_rate: float
    """Share of all prompt tokens."""
    residence_s: float
    tokens: float
    bytes: float
    """Of KV; a place that fills only a share of its capacity needs more."""
    read_bytes_per_s: float
    """Average, were all of it read from tiers."""
    read_burst_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """What the load does to the drives."""

    read_bytes_per_s: float
    read_burst_bytes_per_s: float
    wanted_bytes_per_s: float
    """Would be read, if nothing that was found were computed because loading it is too slow."""
    provided_bytes_per_s: float
    used: float
    """Of their time: reads at their burst, and writes."""
    chunk_bytes: float
    chunks_read_per_s: float
    depth: float
    """Commands in flight, on average, over all drives."""
    depth_burst: float
    written_bytes_per_day: float
    writes_per_day: float
    """Times the capacity of all drives."""
    rated_writes_per_day: float
    life_years: float
    drives_for_bandwidth: int
    drives_for_life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a plan tells. Bytes, seconds, tokens and rates a second; shares from 0 to 1."""

    inputs: Inputs
    """Resolved: with what the catalogue and the model gave."""
    sources: tuple[tuple[str, str, str], ...]
    setup: Setup
    alone: Side
    tiered: Side
    tiers: tuple[Tier, ...]
    capacities: tuple[Capacity, ...]
    drives: Drives | None
    break_evens: tuple[BreakEven, ...]
    used: dict[str, float]
    """At the load that is asked for, of what is allowed, by limit."""
    levers: tuple[Lever, ...]
    """How the number of users depends on each input, the strongest first."""

    @property
    def binding(self) -> Limit:
        """The limit that is met first, with tiers."""
        return self.tiered.ceiling.binding

    @property
    def asked_users(self) -> float:
        """The load that is asked for, in users (with a trace's own pauses, in queries a second)."""
        return in_users(self.setup, self.setup.demand.requests_per_s)


def make_plan(inputs: Inputs, trace: TraceSummary | None = None, *, with_levers: bool = True) -> Plan:
    """Plan for the inputs.

    Args:
        inputs: what to plan for; see `kvtier.plan.inputs`.
        trace: what the trace says that they name, where it has been read already.
        with_levers: also find how the answer depends on each input, which takes most of the time.

    Raises:
        ConfigError: an input is unknown, not allowed, or contradicts another.
    """
    setup = set_up(inputs, trace)
    alone, tiered = side(setup, with_tiers=False), side(setup, with_tiers=True)
    asked = operate(setup, setup.demand.requests_per_s, with_tiers=True)
    return Plan(
        inputs=setup.inputs,
        sources=setup.sources,
        setup=setup,
        alone=alone,
        tiered=tiered,
        tiers=tuple(_tiers(setup, tiered.point)),
        capacities=tuple(capacity(setup, share) for share in sorted({*HIT_SHARES, setup.inputs.target.hit_share})),
        drives=_drives(setup, tiered.point),
        break_evens=tuple(break_evens(setup)),
        used=dict(uses(setup, asked)),
        levers=tuple(levers(inputs, setup)) if with_levers else (),
    )


def side(setup: Setup, *, with_tiers: bool) -> Side:
    """What the set-up does with tiers or without, at the load that is asked for and at most."""
    asked = setup.demand.requests_per_s
    top = ceiling(setup, with_tiers=with_tiers)
    at_ttft = next(it for it in top.limits if it.name == TTFT)
    most = throughput(setup, with_tiers=with_tiers)
    served = min(asked, most)
    point = operate(setup, served, with_tiers=with_tiers)
    return Side(
        with_tiers=with_tiers,
        ceiling=top,
        users_at_ttft=at_ttft.users,
        throughput_per_s=most,
        throughput_users=in_users(setup, most),
        served_per_s=served,
        point=point,
        ttft_s=point.ttft_s if served == asked else math.inf,
        output_tokens_per_s=served * setup.demand.answer_tokens,
        gpus_needed=gpus_needed(setup, asked, at_ttft.requests_per_s),
        cost=cost(setup, point, served_per_s=served),
    )


def gpus_needed(setup: Setup, target_per_s: float, measured_per_s: float) -> int | None:
    """GPUs for a throughput: target / (throughput of the small set-up x utilisation) x its GPUs, in whole replicas.

    The throughput of the small set-up is the one within the limit of the time to first token; the utilisation is
    ``target.gpu_used``. (The formula of the SNIA SDC 2025 talk on KV offload benchmarks.)
    """
    if not measured_per_s:
        return None
    replicas = target_per_s / (measured_per_s * setup.inputs.target.gpu_used) * setup.replicas
    return math.ceil(replicas - 1e-9) * setup.inputs.model.tp


def capacity(setup: Setup, hit_share: float) -> Capacity:
    """What tiers must hold, and read, for a share of the hits that the load that is asked for makes possible."""
    demand, shape = setup.demand, setup.shape
    residence_s = demand.curve.residence_for(hit_share)
    tokens = demand.curve.tokens_held(residence_s, demand.requests_per_s) + demand.prefix_tokens
    later = (1 - demand.first_share) * demand.reusable_tokens * hit_share
    read = demand.requests_per_s * shape.stored_bytes(later)
    hits = (demand.first_share + (1 - demand.first_share) * (1 - hit_share)) * demand.prefix_tokens + later
    return Capacity(
        hit_share=hit_share,
        hit_rate=hits / demand.input_tokens,
        residence_s=residence_s,
        tokens=tokens,
        bytes=shape.token_bytes * tokens,
        read_bytes_per_s=read,
        read_burst_bytes_per_s=read * setup.inputs.target.burst,
    )


def _tiers(setup: Setup, point: Point) -> list[Tier]:
    demand, burst = setup.demand, setup.inputs.target.burst
    gpu_tokens = setup.gpu_tokens * setup.replicas
    places = [(GPU, setup.kv_bytes * setup.replicas, gpu_tokens, 0.0)] + [
        (it.name, it.capacity_bytes, it.capacity_bytes / setup.shape.token_bytes, it.read_bytes_per_s)
        for it in setup.places
    ]
    return [
        Tier(
            name=name,
            capacity_bytes=capacity_bytes,
            capacity_tokens=tokens,
            sessions=tokens / demand.session_tokens,
            residence_s=point.residence_s[name],
            found=point.found[name],
            read_bytes_per_s=point.read_bytes_per_s.get(name, 0.0),
            read_burst_bytes_per_s=point.read_bytes_per_s.get(name, 0.0) * burst,
            provided_bytes_per_s=provided,
            write_bytes_per_s=point.write_bytes_per_s.get(name, 0.0),
        )
        for name, capacity_bytes, tokens, provided in places
    ]


def _drives(setup: Setup, point: Point) -> Drives | None:
    disk, software, target = setup.inputs.disk, setup.inputs.software, setup.inputs.target
    if not disk.count:
        return None
    read, written = point.read_bytes_per_s["disk"], point.write_bytes_per_s["disk"]
    chunk_bytes = setup.shape.token_bytes * software.chunk_tokens
    all_read = sum(point.read_bytes_per_s.values())
    # Little's law twice: requests that load at a time, and the commands that each has in flight meanwhile.
    loading = point.loading * read / all_read if all_read else 0.0
    depth = loading * software.chunks_in_flight * max(chunk_bytes / disk.command_bytes, 1.0)
    capacity_bytes = disk.count * disk.capacity_bytes
    rated = disk.drive_writes_per_day
    wanted = point.wanted_bytes_per_s["disk"]
    time_used = target.burst * wanted / disk.read_bytes_per_s + written / disk.write_bytes_per_s  # in drives
    years = life_years(setup, point)
    written_per_day = written * 86_400 * setup.inputs.traffic.day_share
    return Drives(
        read_bytes_per_s=read,
        read_burst_bytes_per_s=read * target.burst,
        wanted_bytes_per_s=wanted,
        provided_bytes_per_s=disk.count * disk.read_bytes_per_s,
        used=time_used / disk.count,
        chunk_bytes=chunk_bytes,
        chunks_read_per_s=read / chunk_bytes,
        depth=depth,
        depth_burst=depth * target.burst,
        written_bytes_per_day=written_per_day,
        writes_per_day=written_per_day / capacity_bytes,
        rated_writes_per_day=rated,
        life_years=years,
        drives_for_bandwidth=max(math.ceil(time_used - 1e-9), 1),
        drives_for_life=max(math.ceil(disk.count * target.life_years / years - 1e-9), 1),
    )
