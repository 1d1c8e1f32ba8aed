"""A plan: the deployment with GPU memory alone against the same with tiers, and the demands on the tiers."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from kvtier.plan.cost import BreakEven, Cost, break_evens, cost, worn
from kvtier.plan.inputs import SETTINGS, Inputs
from kvtier.plan.limits import (
    FIRST_TOKEN,
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
from kvtier.plan.search import PlannedSize, best, gpus_for, is_served
from kvtier.plan.sensitivity import InputSensitivity, sensitivities
from kvtier.plan.worth import (
    Choice,
    SameMoney,
    choices,
    least_host_bytes,
    only,
    pays_from,
    same_money,
    smallest,
    why_not,
    worth_buying,
)

HIT_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The hardware for the requested load, and that load on it.

    It is the given hardware where the load is within its limits, else the fewest GPUs with the tiers of their hosts.
    """

    deployment: Deployment
    users: float
    """Users within all limits."""
    point: OperatingPoint
    cost: Cost
    life_years: float | None
    """Life of its drives; None without drives."""
    price: float | None
    """The price of all of it, with drives that replace worn ones; None where one is not given."""

    @property
    def gpus(self) -> int:
        """GPUs, all of them of the kind that is given."""
        return self.deployment.inputs.gpu.count


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
    point: OperatingPoint
    """Operating point at the served load: the requested one, or the most that the GPUs complete."""
    ttft_s: float
    """Mean TTFT at the requested load; infinite where queues grow without end."""
    output_tokens_per_s: float
    gpus_least: int | None
    """GPUs that serve the requested load within the limits, at any size; None where no number of them is enough."""
    gpus_needed: int | None
    """The same at `target.gpu_used` of the most users."""
    need: Need | None
    """What the requested load needs; None where no number of GPUs is enough."""
    cost: Cost
    """At the served load."""
    cost_at_most: Cost | None
    """At the highest load within all limits; None where not one user is within them."""

    @property
    def users(self) -> float:
        """Users within all limits."""
        return self.ceiling.binding.users

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of its tiers, the fastest first."""
        return tuple(it.name for it in self.deployment.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTier:
    """GPU memory or a tier of the inputs, and whether the plan recommends it."""

    name: str
    capacity_bytes: float
    """On the hardware that the requested load needs, else on the given one."""
    worth_it: bool
    """GPU memory is always there."""
    why_not: str
    """Why it brings nothing beside the recommended tiers; empty where it is one of them."""
    pays_from_interval_s: float | None
    """The interval between two queries of a user from which it brings users beside them; None where none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityNeed:
    """Capacity and bandwidth of all tiers together for a share of the possible hits."""

    hit_share: float
    hit_rate: float
    """Share of all prompt tokens."""
    residence_s: float
    tokens: float
    bytes: float
    """Size of the KV as tiers store it, or without tiers as GPU memory holds it.

    A tier that fills only a share of its capacity needs more.
    """
    read_bytes_per_s: float
    """Average, with all hits read from tiers."""
    read_burst_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveLoad:
    """The load on the drives."""

    read_bytes_per_s: float
    wanted_bytes_per_s: float
    """Reads if no hit were computed because its load is too slow."""
    used: float
    """Share of their time: reads in bursts, and writes."""
    chunk_bytes: float
    depth: float
    """Mean number of commands in flight, over all drives."""
    written_bytes_per_day: float
    writes_per_day: float
    """Writes of a day, divided by the capacity of all drives."""
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

    choices: tuple[Choice, ...]
    """Each choice of the given tiers: none first, all last."""
    alone: Variant
    ways: tuple[Variant, ...]
    """The choices that are worth buying, one of them, the recommended first; GPU memory alone where no tier gains."""
    given: Variant
    """With all tiers of the inputs."""
    arms: tuple[Variant, ...]
    """What to compare for the requested load: GPU memory alone, and each way that is worth buying.

    Where the given GPUs serve no user, these are the choices with which the load needs the fewest GPUs.
    """
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
    def tiered(self) -> Variant:
        """The recommended configuration: with the tiers that are worth it, and no others."""
        return self.ways[0]

    @property
    def sizes(self) -> tuple[PlannedSize, ...]:
        """Every size that holds the model, the smallest first, with the recommended tiers and without."""
        kept = tuple(it.name for it in self.deployment.tiers)
        return next(it.sizes for it in self.choices if it.tiers == kept)

    @property
    def serves_any(self) -> bool:
        """Whether any user is within the limits on the given GPUs, with some of the tiers or without."""
        return self.deployment.workload.is_any(max(it.users for it in self.choices))

    @property
    def deployment(self) -> Deployment:
        """The deployment with the tiers that are worth it."""
        return self.tiered.deployment

    @property
    def idle_tiers(self) -> list[PlannedTier]:
        """The tiers that bring nothing beside the recommended ones."""
        return [it for it in self.tiers if not it.worth_it]

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
        """Whether the requested load is within the limits neither with tiers that are worth it nor without."""
        return not any(it.need and it.need.gpus <= self.inputs.gpu.count for it in self.arms)


def make_plan(inputs: Inputs, basis: Basis | None = None, *, with_sensitivities: bool = True) -> Plan:
    """Plan for the inputs.

    Args:
        inputs: from `kvtier.plan.read_inputs`.
        basis: the model and the trace that they name, if they have been read already.
        with_sensitivities: also compute the dependence on each input, which takes most of the time.

    Raises:
        ConfigError: an input is unknown, not allowed, or contradicts another.
    """
    found = choices(list(deployments(inputs, basis)))
    alone = _variant(inputs, found[0], with_tiers=False)
    best_choices = worth_buying(found)
    variants = {it.tiers: _variant(inputs, it) for it in (*best_choices, found[-1])}
    given = variants[found[-1].tiers]
    ways = tuple(variants[it.tiers] for it in best_choices)
    tiered, kept = ways[0], ways[0].deployment
    bought = [it for it in ways if it.tiers]
    if not kept.workload.is_any(max(it.users for it in found)):
        every = [_variant(inputs, it) for it in found]
        fewest = min(it.gpus_least or math.inf for it in every)
        enough = smallest([it.tiers for it in every if it.gpus_least == fewest])
        bought = [it for it in every if it.tiers and it.tiers in enough]
    need, load = tiered.need, kept.workload
    shares = sorted({*HIT_SHARES, kept.inputs.target.hit_share})
    at_load, point = (need.deployment, need.point) if need else (kept, tiered.point)
    return Plan(
        choices=tuple(found),
        alone=alone,
        ways=ways,
        given=given,
        arms=(alone, *bought),
        least_host_bytes=least_host_bytes(kept),
        same_money=same_money(given.deployment),
        tiers=tuple(_tiers(given, found[-1].deployment, kept)),
        capacities=tuple(capacity(at_load, share) for share in shares),
        drives=_drives(at_load, point) if any(it.name == "disk" for it in kept.tiers) else None,
        break_evens=tuple(break_evens(given.deployment)),
        used=used_shares(kept, operate(kept, load.requests_per_s, with_tiers=True)),
        sensitivities=tuple(sensitivities(inputs, kept)) if with_sensitivities else (),
    )


def _variant(inputs: Inputs, choice: Choice, *, with_tiers: bool = True) -> Variant:
    deployment = choice.for_load
    requested = deployment.workload.requests_per_s
    top = ceiling(deployment, with_tiers=with_tiers)
    at_ttft = next(it for it in top.serving if it.name in FIRST_TOKEN)
    most = throughput(deployment, with_tiers=with_tiers)
    served = min(requested, most)
    point = operate(deployment, served, with_tiers=with_tiers)
    within = top.binding.requests_per_s
    least, needed = gpus_for(inputs, deployment, [requested, requested / deployment.inputs.target.gpu_used])
    is_any = deployment.workload.is_any(in_users(deployment, within))
    return Variant(
        deployment=deployment,
        with_tiers=with_tiers,
        ceiling=top,
        users_at_ttft=at_ttft.users,
        throughput_per_s=most,
        throughput_users=in_users(deployment, most),
        point=point,
        ttft_s=point.ttft_s if served == requested else math.inf,
        output_tokens_per_s=served * deployment.workload.answer_tokens,
        gpus_least=least,
        gpus_needed=needed,
        need=_need(inputs, choice, top.binding.users, least),
        cost=cost(deployment, point, served_per_s=served),
        cost_at_most=cost(deployment, top.point, served_per_s=within) if is_any else None,
    )


def _need(inputs: Inputs, choice: Choice, users: float, gpus: int | None) -> Need | None:
    """The hardware for the requested load: the given one where it serves that load, else that of `gpus` GPUs."""
    deployment, requested = choice.for_load, choice.for_load.workload.requests_per_s
    load = in_users(deployment, requested)
    if not is_served(load, users):
        if gpus is None:
            return None
        changed = inputs.change({"gpu.count": gpus}, "the GPUs for the requested load")
        sizes = [only(it, choice.tiers) for it in deployments(changed, deployment.basis)]
        found = [most_users(it) for it in sizes]
        deployment = best(sizes, found, load)
        users = found[sizes.index(deployment)]
    point = operate(deployment, requested, with_tiers=bool(choice.tiers))
    years = life_years(deployment, point.write_bytes_per_s["disk"]) if "disk" in point.write_bytes_per_s else None
    at_load = cost(deployment, point, served_per_s=requested)
    price = None if at_load.missing or at_load.bought is None else at_load.bought + worn(deployment, years)
    return Need(deployment=deployment, users=users, point=point, cost=at_load, life_years=years, price=price)


def capacity(deployment: Deployment, hit_share: float) -> CapacityNeed:
    """Capacity and reads of tiers for a share of the possible hits at the requested load."""
    load, model = deployment.workload, deployment.model
    residence_s = load.curve.residence_for(hit_share)
    tokens = load.curve.tokens_held(residence_s, load.requests_per_s) + load.prefix_tokens
    size = tokens * model.gpu_bytes(load.session_tokens) / load.session_tokens
    if deployment.tiers:
        with_states = deployment.tier_curve.tokens_held(residence_s, load.requests_per_s) + load.prefix_tokens
        size = model.token_bytes * with_states
    hit_requests = (1 - load.first_share) * hit_share
    later = hit_requests * load.reusable_tokens
    read = load.requests_per_s * hit_requests * model.loaded_bytes(load.reusable_tokens)
    hits = (load.first_share + (1 - load.first_share) * (1 - hit_share)) * load.prefix_tokens + later
    return CapacityNeed(
        hit_share=hit_share,
        hit_rate=hits / load.input_tokens,
        residence_s=residence_s,
        tokens=tokens,
        bytes=size,
        read_bytes_per_s=read,
        read_burst_bytes_per_s=read * deployment.inputs.target.burst,
    )


def _tiers(given: Variant, whole: Deployment, best: Deployment) -> list[PlannedTier]:
    """GPU memory and all tiers of the inputs, which `whole` has at the size for any load; `best` is recommended."""
    kept = {GPU, *(it.name for it in best.tiers)}
    deployment = given.need.deployment if given.need else given.deployment
    beside = {it: only(whole, kept | {it.name}) for it in whole.tiers if it.name not in kept}
    reasons = {it.name: (why_not(deployed, it), pays_from(deployed, it)) for it, deployed in beside.items()}
    sizes = {GPU: deployment.kv_bytes * deployment.replicas, **{it.name: it.capacity_bytes for it in deployment.tiers}}
    return [
        PlannedTier(
            name=name,
            capacity_bytes=capacity_bytes,
            worth_it=name in kept,
            why_not=reasons.get(name, ("", None))[0],
            pays_from_interval_s=reasons.get(name, ("", None))[1],
        )
        for name, capacity_bytes in sizes.items()
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
        wanted_bytes_per_s=wanted,
        used=time_used / disk.count,
        chunk_bytes=chunk_bytes,
        depth=depth,
        written_bytes_per_day=written_per_day,
        writes_per_day=written_per_day / (disk.count * disk.capacity_bytes),
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
    document: dict[str, Any] = {
        "model": deployment.model.name,
        "users_with_tiers": plan.tiered.users,
        "users_without_tiers": plan.alone.users,
        "users_with_all_tiers": plan.given.users,
        "is_overloaded": plan.is_overloaded,
        "choices": [_choice_json(it, plan.ways) for it in plan.choices],
        "needs": [_need_json(it) for it in plan.arms],
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
        "next": plan.tiered.ceiling.next.name if plan.tiered.ceiling.next else None,
        "used": plan.used,
        "tiers": [asdict(it) for it in plan.tiers],
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


def _choice_json(choice: Choice, ways: tuple[Variant, ...]) -> dict[str, Any]:
    return {
        "tiers": choice.tiers,
        "users": choice.users,
        "tp": choice.deployment.inputs.model.tp,
        "drive_life_years": choice.life_years,
        "price": choice.price,
        "is_worth_buying": choice.tiers in [it.tiers for it in ways],
    }


def _need_json(arm: Variant) -> dict[str, Any]:
    """What the requested load needs with the tiers of one arm; only its tiers where no number of GPUs is enough."""
    need = arm.need
    if need is None:
        return {"tiers": arm.tiers}
    deployment, point = need.deployment, need.point
    kept = capacity(deployment, deployment.inputs.target.hit_share)
    return {
        "tiers": arm.tiers,
        "users": in_users(deployment, point.requests_per_s),
        "users_at_most": need.users,
        "gpus": need.gpus,
        "hosts": deployment.hosts,
        "tp": deployment.inputs.model.tp,
        "drives": deployment.inputs.disk.count if "disk" in arm.tiers else 0,
        "gpu_kv_bytes": deployment.kv_bytes * deployment.replicas,
        "tier_bytes": {it.name: it.capacity_bytes for it in deployment.tiers},
        "kv_bytes_for_hits": kept.bytes,
        "read_bytes_per_s": point.read_bytes_per_s,
        "read_burst_bytes_per_s": {
            name: rate * deployment.inputs.target.burst for name, rate in point.read_bytes_per_s.items()
        },
        "write_bytes_per_s": point.write_bytes_per_s,
        "drive_life_years": need.life_years,
        "ttft_s": point.ttft_s,
        "ttft_p95_s": point.ttft_within_s(0.95),
        "tpot_s": point.tpot_s,
        "hit_rate": point.hit_rate,
        "output_tokens_per_s": point.requests_per_s * deployment.workload.answer_tokens,
        "watts": need.cost.watts,
        "price": need.price,
    }


def _variant_json(variant: Variant) -> dict[str, Any]:
    return {
        "users_at_ttft": variant.users_at_ttft,
        "users_at_all_limits": variant.ceiling.binding.users,
        "limits": [asdict(it) for it in variant.ceiling.limits],
        "throughput_requests_per_s": variant.throughput_per_s,
        "throughput_users": variant.throughput_users,
        "served_requests_per_s": variant.point.requests_per_s,
        "ttft_s": variant.ttft_s,
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
