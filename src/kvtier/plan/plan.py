"""A plan: the deployment with GPU memory alone against the same with tiers, and the demands on the tiers."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from kvtier.plan.cost import BreakEven, Cost, break_evens, cost
from kvtier.plan.inputs import SETTINGS, Inputs
from kvtier.plan.limits import (
    TTFT,
    Ceiling,
    Limit,
    ceiling,
    in_users,
    life_years,
    most_users,
    throughput,
    used_shares,
)
from kvtier.plan.queueing import GPU, OperatingPoint, operate
from kvtier.plan.resolve import Basis, Deployment, deployments
from kvtier.plan.search import PlannedSize, gpus_for, search
from kvtier.plan.sensitivity import InputSensitivity, sensitivities
from kvtier.plan.worth import SameMoney, TierWorth, gpu_worth, least_host_bytes, same_money, worths

HIT_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The deployment with GPU memory alone, or with tiers, each at its own best size."""

    deployment: Deployment
    with_tiers: bool
    ceiling: Ceiling
    users_at_ttft: float
    """Within the limit of the time to first token alone."""
    throughput_per_s: float
    """Requests a second that the GPUs complete at most."""
    throughput_users: float
    """Users beyond which throughput does not grow."""
    served_per_s: float
    """Requests a second at the requested load: all of them, or the most that the GPUs complete."""
    point: OperatingPoint
    """Operating point at the served load."""
    ttft_s: float
    """Mean TTFT at the requested load; infinite where queues grow without end."""
    ttft_p95_s: float
    """The time that 95 % of the requests do not exceed, at the same load."""
    output_tokens_per_s: float
    gpus_least: int | None
    """GPUs that serve the requested load within the limits, at any size; None where no number of them is enough."""
    gpus_needed: int | None
    """The same at `target.gpu_used` of the most users."""
    cost: Cost
    """At the served load."""
    cost_at_most: Cost | None
    """At the highest load within all limits; None where not one user is within them."""

    @property
    def users(self) -> float:
        """Users within all limits."""
        return self.ceiling.binding.users


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTier:
    """GPU memory or a tier, at the served load."""

    name: str
    capacity_bytes: float
    capacity_tokens: float
    sessions: float
    residence_s: float
    """Time for which it keeps unused KV; the end of the table (years) where it keeps everything."""
    found: float
    """Share of all prompt tokens that come from here."""
    hit_share: float
    """The same at the highest load within all limits, where its worth is judged."""
    read_bytes_per_s: float
    read_burst_bytes_per_s: float
    provided_bytes_per_s: float
    write_bytes_per_s: float
    worth: TierWorth


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityNeed:
    """Capacity and bandwidth of all tiers together for a share of the possible hits."""

    hit_share: float
    hit_rate: float
    """Share of all prompt tokens."""
    residence_s: float
    tokens: float
    bytes: float
    """Size of the KV; a tier that fills only a share of its capacity needs more."""
    read_bytes_per_s: float
    """Average, with all hits read from tiers."""
    read_burst_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveLoad:
    """The load on the drives."""

    read_bytes_per_s: float
    read_burst_bytes_per_s: float
    wanted_bytes_per_s: float
    """Reads if no hit were computed because its load is too slow."""
    provided_bytes_per_s: float
    used: float
    """Share of their time: reads in bursts, and writes."""
    chunk_bytes: float
    chunks_read_per_s: float
    depth: float
    """Mean number of commands in flight, over all drives."""
    depth_burst: float
    written_bytes_per_day: float
    writes_per_day: float
    """Writes of a day, divided by the capacity of all drives."""
    rated_writes_per_day: float
    life_years: float
    life_selective_years: float
    """The same if KV is written at its second use, not as soon as it is computed."""
    write_policy: Literal["through", "selective", "budget"]
    """Writes all new KV, or KV at its second use, or a budget: the first of them that lasts `target.life_years`."""
    write_share: float
    """Share of new KV that this policy writes."""
    users: float
    """Users within all limits with this policy."""
    drives_for_bandwidth: int
    drives_for_life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All results. Bytes, seconds, tokens and rates a second; shares from 0 to 1."""

    sizes: tuple[PlannedSize, ...]
    """Every size that holds the model, the smallest first; the best of each arm is planned."""
    alone: Variant
    tiered: Variant
    """The recommended configuration: with the tiers that are worth it, and no others."""
    given: Variant
    """With all tiers of the inputs."""
    more_gpus: int | None
    """GPUs that serve the requested load, with all tiers, where the given ones serve no user; None elsewhere."""
    least_host_bytes: float | None
    """Host memory that brings 90 % of the users that all of it brings; None where it brings no users."""
    same_money: SameMoney | None
    tiers: tuple[PlannedTier, ...]
    """GPU memory and all tiers of the inputs."""
    capacities: tuple[CapacityNeed, ...]
    drives: DriveLoad | None
    break_evens: tuple[BreakEven, ...]
    used: dict[str, float]
    """The used share of each limit's budget at the requested load."""
    sensitivities: tuple[InputSensitivity, ...]
    """The dependence of the number of users on each input, the strongest first."""

    @property
    def deployment(self) -> Deployment:
        """The deployment with the tiers that are worth it."""
        return self.tiered.deployment

    @property
    def idle_tiers(self) -> list[PlannedTier]:
        """The tiers that bring nothing here, which nothing recommends."""
        return [it for it in self.tiers if it.name != GPU and not it.worth.worth_it]

    @property
    def inputs(self) -> Inputs:
        """The inputs, with values from the catalogue and the model."""
        return self.deployment.inputs

    @property
    def binding(self) -> Limit:
        """The limit that is met first, with tiers."""
        return self.tiered.ceiling.binding

    @property
    def requested_users(self) -> float:
        """The requested load in users (with a trace's own pauses, in queries a second)."""
        return in_users(self.deployment, self.deployment.workload.requests_per_s)

    @property
    def is_overloaded(self) -> bool:
        """Whether the requested load is within the limits neither with tiers nor without."""
        return self.requested_users > max(self.alone.users, self.tiered.users)


def make_plan(inputs: Inputs, basis: Basis | None = None, *, with_sensitivities: bool = True) -> Plan:
    """Plan for the inputs.

    Args:
        inputs: from `kvtier.plan.read_inputs`.
        basis: the model and the trace that they name, if they have been read already.
        with_sensitivities: also compute the dependence on each input, which takes most of the time.

    Raises:
        ConfigError: an input is unknown, not allowed, or contradicts another.
    """
    found = list(deployments(inputs, basis))
    sizes, with_all, best_alone = search(found)
    given, alone = _variant(inputs, with_all), _variant(inputs, best_alone, with_tiers=False)
    tiers = _tiers(with_all, given)
    best, tiered = with_all, given
    if idle := [it.name for it in tiers if it.name != GPU and not it.worth.worth_it]:
        sizes, best, _ = search([it.without(*idle) for it in found])
        tiered = _variant(inputs, best)
    load = best.workload
    serves_any = load.is_any(max(tiered.users, alone.users))
    if not serves_any:  # no tier is worth it there, but with more GPUs some may be
        tiered = replace(tiered, gpus_least=given.gpus_least, gpus_needed=given.gpus_needed)
    requested = operate(best, load.requests_per_s, with_tiers=True)
    shares = sorted({*HIT_SHARES, best.inputs.target.hit_share})
    return Plan(
        sizes=tuple(sizes),
        alone=alone,
        tiered=tiered,
        given=given,
        more_gpus=None if serves_any else tiered.gpus_least,
        least_host_bytes=least_host_bytes(best),
        same_money=same_money(with_all),
        tiers=tuple(tiers),
        capacities=tuple(capacity(best, share) for share in shares),
        drives=_drives(best, tiered.point) if any(it.name == "disk" for it in best.tiers) else None,
        break_evens=tuple(break_evens(with_all)),
        used=used_shares(best, requested),
        sensitivities=tuple(sensitivities(inputs, best)) if with_sensitivities else (),
    )


def _variant(inputs: Inputs, deployment: Deployment, *, with_tiers: bool = True) -> Variant:
    requested = deployment.workload.requests_per_s
    top = ceiling(deployment, with_tiers=with_tiers)
    at_ttft = next(it for it in top.limits if it.name == TTFT)
    most = throughput(deployment, with_tiers=with_tiers)
    served = min(requested, most)
    point = operate(deployment, served, with_tiers=with_tiers)
    within = top.binding.requests_per_s
    counted = deployment if with_tiers else replace(deployment, tiers=())
    least, needed = gpus_for(inputs, counted, [requested, requested / deployment.inputs.target.gpu_used])
    is_any = deployment.workload.is_any(in_users(deployment, within))
    return Variant(
        deployment=deployment,
        with_tiers=with_tiers,
        ceiling=top,
        users_at_ttft=at_ttft.users,
        throughput_per_s=most,
        throughput_users=in_users(deployment, most),
        served_per_s=served,
        point=point,
        ttft_s=point.ttft_s if served == requested else math.inf,
        ttft_p95_s=point.ttft_within_s(0.95) if served == requested else math.inf,
        output_tokens_per_s=served * deployment.workload.answer_tokens,
        gpus_least=least,
        gpus_needed=needed,
        cost=cost(deployment, point, served_per_s=served),
        cost_at_most=cost(deployment, top.point, served_per_s=within) if is_any else None,
    )


def capacity(deployment: Deployment, hit_share: float) -> CapacityNeed:
    """Capacity and reads of tiers for a share of the possible hits at the requested load."""
    load, model = deployment.workload, deployment.model
    residence_s = load.curve.residence_for(hit_share)
    tokens = load.curve.tokens_held(residence_s, load.requests_per_s) + load.prefix_tokens
    with_states = deployment.tier_curve.tokens_held(residence_s, load.requests_per_s) + load.prefix_tokens
    hit_requests = (1 - load.first_share) * hit_share
    later = hit_requests * load.reusable_tokens
    read = load.requests_per_s * hit_requests * model.loaded_bytes(load.reusable_tokens)
    hits = (load.first_share + (1 - load.first_share) * (1 - hit_share)) * load.prefix_tokens + later
    return CapacityNeed(
        hit_share=hit_share,
        hit_rate=hits / load.input_tokens,
        residence_s=residence_s,
        tokens=tokens,
        bytes=model.token_bytes * with_states,
        read_bytes_per_s=read,
        read_burst_bytes_per_s=read * deployment.inputs.target.burst,
    )


def _tiers(deployment: Deployment, given: Variant) -> list[PlannedTier]:
    point = given.point
    worth = {GPU: gpu_worth(deployment), **worths(deployment, given.ceiling.point)}
    session_tokens = deployment.workload.session_tokens
    # A stored session has a snapshot of its states.
    session_bytes = deployment.model.stored_bytes(session_tokens)
    gpu = (GPU, deployment.kv_bytes * deployment.replicas, deployment.gpu_tokens * deployment.replicas, 0.0)
    lower = [
        (it.name, it.capacity_bytes, it.capacity_bytes / session_bytes * session_tokens, it.read_bytes_per_s)
        for it in deployment.tiers
    ]
    return [
        PlannedTier(
            name=name,
            capacity_bytes=capacity_bytes,
            capacity_tokens=tokens,
            sessions=tokens / session_tokens,
            residence_s=point.residence_s[name],
            found=point.found[name],
            hit_share=given.ceiling.point.found[name],
            read_bytes_per_s=point.read_bytes_per_s.get(name, 0.0),
            read_burst_bytes_per_s=point.read_bytes_per_s.get(name, 0.0) * deployment.inputs.target.burst,
            provided_bytes_per_s=provided,
            write_bytes_per_s=point.write_bytes_per_s.get(name, 0.0),
            worth=worth[name],
        )
        for name, capacity_bytes, tokens, provided in (gpu, *lower)
    ]


def _drives(deployment: Deployment, point: OperatingPoint) -> DriveLoad:
    inputs = deployment.inputs
    disk, software, target = inputs.disk, inputs.software, inputs.target
    policy: Literal["through", "selective", "budget"]
    read, written = point.read_bytes_per_s["disk"], point.write_bytes_per_s["disk"]
    chunk_bytes = deployment.model.token_bytes * software.chunk_tokens
    # Little's law twice: the mean number of requests that load from drives, and the commands of each in flight.
    depth = point.loading["disk"] * software.chunks_in_flight * max(chunk_bytes / disk.command_bytes, 1.0)
    wanted = point.wanted_bytes_per_s["disk"]
    given = point.given_bytes_per_s["disk"]
    time_used = target.burst * wanted / disk.read_bytes_per_s + given / disk.write_bytes_per_s  # in drives
    years, full_years = life_years(deployment, written), life_years(deployment, point.new_bytes_per_s)
    kept = deployment.workload.kept_share
    selective_years = full_years / kept if kept else math.inf
    policy, share = "through", 1.0
    if full_years < target.life_years:
        lasts = selective_years >= target.life_years
        policy, share = ("selective", kept) if lasts else ("budget", full_years / target.life_years)
    changed = inputs.change({"software.write_share": min(share, software.write_share)})
    limited = replace(deployment, inputs=changed)
    written_per_day = written * 86_400 * inputs.traffic.day_share
    return DriveLoad(
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
        writes_per_day=written_per_day / (disk.count * disk.capacity_bytes),
        rated_writes_per_day=disk.drive_writes_per_day,
        life_years=years,
        life_selective_years=selective_years,
        write_policy=policy,
        write_share=share,
        users=most_users(limited),
        drives_for_bandwidth=max(math.ceil(time_used - 1e-9), 1),
        drives_for_life=max(math.ceil(disk.count * target.life_years / years - 1e-9), 1),
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: bytes, seconds, tokens, rates a second, shares from 0 to 1; infinity is null."""
    deployment, load = plan.deployment, plan.deployment.workload
    alone, tiered = plan.alone.users, plan.tiered.users
    document: dict[str, Any] = {
        "model": deployment.model.name,
        "users_with_tiers": tiered,
        "users_without_tiers": alone,
        "users_with_all_tiers": plan.given.users,
        "is_overloaded": plan.is_overloaded,
        "more_gpus": plan.more_gpus,
        "least_host_bytes": plan.least_host_bytes,
        "tp_with_tiers": deployment.inputs.model.tp,
        "tp_without_tiers": plan.alone.deployment.inputs.model.tp,
        "binding_limit": plan.binding.name,
        "sizes": [asdict(it) for it in plan.sizes],
        "hosts": deployment.hosts,
        "replicas": deployment.replicas,
        "bytes_per_token_stored": deployment.model.token_bytes,
        "chunk_bytes": deployment.model.token_bytes * plan.inputs.software.chunk_tokens,
        "session_bytes": deployment.model.stored_bytes(load.session_tokens),
        "gpu_kv_bytes_per_replica": deployment.kv_bytes,
        "traffic": {
            "requests_per_s": load.requests_per_s,
            "users": plan.requested_users if load.has_users else None,
            "input_tokens": load.input_tokens,
            "output_tokens": load.answer_tokens,
            "reusable_share": load.reuse,
            "burst": load.burst,
            "notes": load.notes,
        },
        "alone": _variant_json(plan.alone),
        "tiered": _variant_json(plan.tiered),
        "users_ratio": tiered / alone if alone else None,
        "binding": plan.binding.name,
        "next": plan.tiered.ceiling.next.name if plan.tiered.ceiling.next else None,
        "used": plan.used,
        "tiers": [_tier_json(it) for it in plan.tiers],
        "same_money": asdict(plan.same_money) if plan.same_money else None,
        "capacities": [asdict(it) for it in plan.capacities],
        "drives": asdict(plan.drives) if plan.drives else None,
        "break_evens": [asdict(it) for it in plan.break_evens],
        "sensitivity": [{**asdict(it), "swing": it.swing} for it in plan.sensitivities],
        "inputs": {
            name: {"value": plan.inputs.value(name), "from": plan.inputs.origin(name), "help": setting.help}
            for name, setting in SETTINGS.items()
        },
        "sources": [{"name": name, "source": source, "date": date} for name, source, date in deployment.sources],
    }
    return cast("dict[str, Any]", _finite(document))


def _tier_json(tier: PlannedTier) -> dict[str, Any]:
    without = tier.worth.without
    return {
        **{name: value for name, value in asdict(tier).items() if name != "worth"},
        "users_without_it": without.users,
        "users_with_it_alone": tier.worth.users_alone,
        "ttft_without_it_s": without.ttft_s,
        "output_tokens_per_s_without_it": without.output_tokens_per_s,
        "worth_it": tier.worth.worth_it,
        "why_not": tier.worth.why_not,
        "pays_from_interval_s": tier.worth.pays_from_s,
    }


def _variant_json(variant: Variant) -> dict[str, Any]:
    return {
        "users_at_ttft": variant.users_at_ttft,
        "users_at_all_limits": variant.ceiling.binding.users,
        "limits": [asdict(it) for it in variant.ceiling.limits],
        "throughput_requests_per_s": variant.throughput_per_s,
        "throughput_users": variant.throughput_users,
        "served_requests_per_s": variant.served_per_s,
        "ttft_s": variant.ttft_s,
        "ttft_p95_s": variant.ttft_p95_s,
        "dp_attention": variant.deployment.inputs.model.dp_attention,
        "output_tokens_per_s": variant.output_tokens_per_s,
        "gpus_least": variant.gpus_least,
        "gpus_needed": variant.gpus_needed,
        "cost": asdict(variant.cost),
        "cost_at_most": asdict(variant.cost_at_most) if variant.cost_at_most else None,
        "point": {**asdict(variant.point), "hit_rate": variant.point.hit_rate},
    }


def _finite(value: object) -> object:
    """`value` without infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(it) for key, it in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(it) for it in cast("list[object]", value)]
    return value
