"""Make a plan: compare a deployment with and without tiers, and find what the load demands of the tiers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from kvtier.tools.plan.cost import BreakEven, Cost, break_evens, cost
from kvtier.tools.plan.inputs import SETTINGS, Inputs
from kvtier.tools.plan.max_load import (
    FIRST_TOKEN,
    Ceiling,
    InputSensitivity,
    Limit,
    best,
    ceiling,
    gpus_for,
    in_users,
    is_served,
    life_years,
    most_users,
    sensitivities,
    sizes_of_a_host,
    throughput,
    used_shares,
)
from kvtier.tools.plan.operating_point import GPU, OperatingPoint, operate, prefill_s
from kvtier.tools.plan.resolve import SEARCHED, Basis, Deployment, deployments, given_totals, of_each_host, resolve
from kvtier.tools.plan.tier_demand import CapacityNeed, DriveLoad, capacity, drive_load, enough_bytes
from kvtier.tools.plan.tier_selection import (
    LEAST_GAIN,
    Choice,
    choices,
    pays_from,
    saving,
    smallest,
    user_prices,
    why_not,
    worth_buying,
)

HIT_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
_SPARSE = frozenset({"indexer", "compressed"})
"""Kinds of layers whose KV `connect.vllm.support` refuses, because vLLM gives it a special role or model version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware that serves the requested load, with the tiers and the cost of its hosts."""

    deployment: Deployment
    point: OperatingPoint
    """Operating point at the requested load."""
    cost: Cost
    user_price: float | None
    """Price of all the hardware and its energy, per requested user; None if a price is missing."""
    life_years: float | None
    """Life of the drives, in years; None without drives."""
    price: float | None
    """Price of all the hardware, with drives that replace worn ones; None if a price is missing."""

    @property
    def gpus(self) -> int:
        """Number of GPUs, all of the given kind."""
        return self.deployment.inputs.gpu.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Need(Machine):
    """The given hardware if the requested load is within its limits, or else the fewest GPUs that suffice."""

    users: float
    """Users within all limits."""
    enough_bytes: dict[str, float]
    """Size of each tier, as `--tier` takes it, that is enough for this load on these GPUs.

    The size includes copies of KV in faster tiers, and the free share of drives. Drives keep their planned rates.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A choice of tiers, with its limits and the hardware that the requested load requires."""

    choice: Choice
    ceiling: Ceiling
    users_at_ttft: float
    """Users within the limit of the time to first token alone."""
    throughput_per_s: float
    """Highest number of requests per second that the GPUs complete."""
    point: OperatingPoint
    """Operating point at the served load: the requested one, or the most that the GPUs complete."""
    ttft_s: float
    """Mean TTFT at the requested load; infinite where queues grow without end."""
    output_tokens_per_s: float
    gpus_least: int | None
    """Fewest GPUs that serve the requested load within the limits, at any size; None if no number is enough."""
    reserve: Machine | None
    """Hardware with a reserve: its most users, times `target.gpu_used`, are at least the requested load.

    It is `need` itself if that suffices, or else the hardware with the fewest GPUs; None if no number is enough.
    """
    need: Need | None
    """The hardware that the requested load requires; None if no number of GPUs is enough."""
    cost: Cost
    """Cost at the served load, without drives that replace worn ones."""

    @property
    def deployment(self) -> Deployment:
        """The given hardware with these tiers."""
        return self.choice.deployment

    @property
    def users(self) -> float:
        """Users within all limits."""
        return self.ceiling.binding.users

    @property
    def need_gpus(self) -> float:
        """Number of GPUs that the requested load requires; infinite if no number is enough."""
        return self.need.gpus if self.need else math.inf

    @property
    def reserve_gpus(self) -> float:
        """Number of GPUs with a reserve; infinite if no number is enough."""
        return self.reserve.gpus if self.reserve else math.inf

    @property
    def throughput_users(self) -> float:
        """Users beyond which throughput does not grow."""
        return in_users(self.deployment, self.throughput_per_s)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, the fastest first."""
        return self.choice.tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTier:
    """GPU memory or a tier of the inputs, and whether the plan recommends it."""

    name: str
    capacity_bytes: float
    """Capacity on the hardware that the requested load requires, or else on the given hardware."""
    worth_it: bool = True
    """Whether the plan recommends it; always true for GPU memory."""
    why_not: str = ""
    """Why the tier adds no users to the recommended tiers; empty if it adds some, or is recommended."""
    user_price: float | None = None
    """The price per user with this tier, if it adds users who cost too much; else None."""
    pays_from_interval_s: float | None = None
    """Shortest interval, in seconds, between a user's queries at which the tier adds users; None if none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All results of a plan, in bytes, seconds, tokens and rates per second. Shares are from 0 to 1."""

    choices: tuple[Choice, ...]
    """All choices of the given tiers: the one without tiers first, the one with all of them last."""
    alone: Variant
    ways: tuple[Variant, ...]
    """Alternatives worth buying, the recommended one first; GPU memory alone if no tier gains anything."""
    given: Variant
    """The variant with all tiers of the inputs."""
    arms: tuple[Variant, ...]
    """Variants to compare for the requested load: GPU memory alone, each of `ways`, and then other choices.

    The others are those of `bought`, and those that need clearly fewer GPUs, or less money, than all of `ways`. If the
    load fits on the given GPUs with none of these, the smallest choices with which it fits follow.
    """
    bought: tuple[Variant, ...]
    """Alternatives worth buying for the requested load, the recommended one first; empty if no tier saves enough.

    All choices of tiers compete. Savings count in GPUs with a reserve, or, if all prices are given, in the price of
    that hardware.
    """
    saves_gpus: bool
    """Whether any choice of tiers needs fewer GPUs with a reserve than GPU memory alone."""
    chosen: Variant
    """The variant planned for the requested load: the first one worth buying for it.

    If none is, the plan takes the variant for a full server if the load fits on the given GPUs, else GPU memory alone.
    """
    grown_gpus: int | None
    """Fewest GPUs for the requested load with all tiers, if the given totals grew with the hosts.

    None if that saves no GPUs, no totals are given, or the load requires no more hosts than the given ones.
    """
    user_prices: dict[tuple[str, ...], float]
    """Price per user of each choice of tiers; empty if prices are missing. They decide what is worth buying."""
    prices_load: bool
    """Whether prices are for the GPUs that the requested load requires with a reserve, instead of the given GPUs."""
    tiers: tuple[PlannedTier, ...]
    """GPU memory and all tiers of the inputs."""
    capacities: tuple[CapacityNeed, ...]
    drives: DriveLoad | None
    break_evens: tuple[BreakEven, ...]
    used: dict[str, float]
    """The used share of each limit's budget at the requested load."""
    sensitivities: tuple[InputSensitivity, ...]
    """How the number of users depends on each input, the strongest dependence first."""

    @property
    def tiered(self) -> Variant:
        """The recommended variant, with only the tiers that are worth buying."""
        return self.ways[0]

    @property
    def with_drives(self) -> "Plan":
        """This plan, but with the first alternative that has drives if the planned variant has none."""
        if self.drives is not None:
            return self
        arm = next((it for it in (*self.bought, *self.ways) if "disk" in it.tiers and it.need), None)
        if arm is None or arm.need is None:
            return self
        drives = drive_load(arm.need.deployment, arm.need.point, arm.need.enough_bytes["disk"])
        return replace(self, chosen=arm, drives=drives)

    @property
    def planned_deployment(self) -> Deployment:
        """The hardware for the requested load, or the given hardware if no number of GPUs is enough."""
        return self.chosen.need.deployment if self.chosen.need else self.deployment

    @property
    def refused(self) -> str:
        """Why kvtier or its engines refuse the model on the planned GPUs; empty if they accept it."""
        deployment = self.planned_deployment
        if deployment.server_gpus > deployment.inputs.host.gpus:
            return "kvtier refuses engines of several nodes"
        if any(it.kind in _SPARSE for it, _ in deployment.basis.model.runs):
            return "kvtier's vLLM connector does not support sparse attention such as sparse MLA yet"
        return ""

    @property
    def serves_any(self) -> bool:
        """Whether at least one choice of tiers lets the given GPUs serve at least one user within the limits.

        For a load in queries per second, more than zero is enough.
        """
        return any(self.deployment.workload.is_any(it.users) for it in self.choices)

    @property
    def deployment(self) -> Deployment:
        """The deployment with the tiers that are worth buying."""
        return self.tiered.deployment

    @property
    def idle_tiers(self) -> list[PlannedTier]:
        """The tiers that add nothing to the recommended ones."""
        return [it for it in self.tiers if not it.worth_it]

    @property
    def inputs(self) -> Inputs:
        """The inputs, with values from the catalogue and the model."""
        return self.deployment.inputs

    @property
    def binding(self) -> Limit:
        """The limit that is met first with the recommended tiers."""
        return self.tiered.ceiling.binding

    @property
    def requested_users(self) -> float:
        """The requested load in users; with a trace's own pauses, in queries per second."""
        return in_users(self.deployment, self.deployment.workload.requests_per_s)

    @property
    def planned_users(self) -> float:
        """The load for which GPUs and drives are planned: the requested one, or else the most that GPUs complete."""
        return self.requested_users if self.chosen.need else in_users(self.deployment, self.chosen.point.requests_per_s)

    @property
    def is_overloaded(self) -> bool:
        """Whether the requested load exceeds the limits of the given GPUs with every variant of `arms`."""
        return not any(it.need and it.need.gpus <= self.inputs.gpu.count for it in self.arms)


def make_plan(inputs: Inputs, basis: Basis | None = None, *, with_sensitivities: bool = True) -> Plan:
    """Make a plan for the inputs.

    Args:
        inputs: from `kvtier.tools.plan.read_inputs`.
        basis: the model and the trace that the inputs name, if they have been read already.
        with_sensitivities: whether to compute how users depend on each input, which takes most of the time.

    Raises:
        ConfigError: an input is unknown, not allowed, or contradicts another.
    """
    sizes = list(deployments(inputs, basis))
    found = choices(sizes)
    prices, prices_load = user_prices(found), False
    worth = worth_buying(found, prices)
    searched = sizes_of_a_host(inputs, sizes[0].basis)  # a plan that names fewer tiers searches the same sizes
    every = [_variant(inputs, it, sizes, searched) for it in found]
    variants = {it.tiers: it for it in every}
    alone, given = variants[()], variants[found[-1].tiers]
    for_load = {it.tiers: it.reserve.user_price for it in every if it.reserve and it.reserve.user_price is not None}
    fits = any(variants[it.tiers].need_gpus <= inputs.gpu.count for it in worth)
    if prices and for_load and not fits:
        prices, prices_load, worth = for_load, True, worth_buying(found, for_load, for_load=True)
    ways, amounts = [variants[it.tiers] for it in worth], _amounts(every, by_price=bool(prices))
    saved = saving(amounts)
    others = {*saved, *_better(ways, amounts, LEAST_GAIN if any(it.cost for it in found) else 1.0)}
    if prices_load and ways == [alone]:  # compare with the cheapest choice of tiers
        others = {*sorted(filter(None, prices), key=prices.__getitem__)[:1]}
    if not any(it.need_gpus <= inputs.gpu.count for it in (alone, *ways, *(variants[it] for it in others))):
        others |= {*smallest([it.tiers for it in every if it.need_gpus <= inputs.gpu.count])}  # the load fits
    tiered, kept = ways[0], ways[0].deployment
    others -= {(), *(it.tiers for it in ways)}
    arms = [alone, *(it for it in ways if it.tiers), *(it for it in every if it.tiers in others)]
    bought = sorted((variants[it] for it in saved), key=lambda it: (amounts[it.tiers], it.need_gpus, it not in ways))
    fits = any(it.need_gpus <= inputs.gpu.count for it in arms)
    chosen = min(bought[:1] or (ways if fits else [alone]), key=lambda it: it.need_gpus)
    at_load, point = (chosen.need.deployment, chosen.need.point) if chosen.need else (kept, tiered.point)
    enough = chosen.need.enough_bytes if chosen.need else enough_bytes(kept, [kept])
    shares = sorted({*HIT_SHARES, kept.inputs.target.hit_share}) if kept.workload.has_returns else []
    return Plan(
        choices=tuple(found),
        alone=alone,
        ways=tuple(ways),
        given=given,
        arms=tuple(arms),
        bought=tuple(bought),
        saves_gpus=min(it.reserve_gpus for it in every) < alone.reserve_gpus,
        chosen=chosen,
        grown_gpus=_grown_gpus(inputs, given, min(it.need_gpus for it in arms)),
        user_prices=prices,
        prices_load=prices_load,
        tiers=tuple(_tiers(given, found, worth[0], prices)),
        capacities=tuple(capacity(at_load, share) for share in shares),
        drives=drive_load(at_load, point, enough["disk"]) if "disk" in chosen.tiers else None,
        break_evens=tuple(break_evens(given.deployment)),
        used=used_shares(kept, operate(kept, kept.workload.requests_per_s)),
        sensitivities=tuple(sensitivities(inputs, kept)) if with_sensitivities else (),
    )


def _grown_gpus(inputs: Inputs, given: Variant, least: float) -> int | None:
    """Find the fewest GPUs with all tiers if given totals grew with the hosts; None if no fewer than `least`."""
    deployment = given.deployment
    if least <= deployment.hosts * deployment.inputs.host.gpus or not given_totals(inputs):
        return None
    grown = of_each_host(inputs, deployment.hosts)
    searched = sizes_of_a_host(grown, deployment.basis)
    found = gpus_for(grown, deployment, deployment.workload.requests_per_s, searched)
    return found.gpus if found is not None and found.gpus < least else None


def _amounts(arms: Sequence[Variant], *, by_price: bool) -> dict[tuple[str, ...], float]:
    """Return the amounts to compare for the requested load: GPUs with a reserve, or the price of that hardware."""
    if not by_price:
        return {it.tiers: it.reserve_gpus for it in arms}
    return {it.tiers: (it.reserve.user_price if it.reserve else None) or math.inf for it in arms}


def _better(ways: Sequence[Variant], amounts: Mapping[tuple[str, ...], float], gain: float) -> list[tuple[str, ...]]:
    """Find the choices with the smallest of `amounts`, without superfluous tiers; none if a way needs nearly as little.

    Args:
        ways: variants worth buying for a full server.
        amounts: GPUs or money that each choice of tiers requires.
        gain: smallest ratio that counts. If the given GPUs serve no user, even one GPU fewer counts.
    """
    least = min(amounts.values())
    if math.isinf(least) or any(amounts[it.tiers] <= least * gain for it in ways):
        return []
    return smallest([tiers for tiers, amount in amounts.items() if amount == least])


def _variant(
    inputs: Inputs, choice: Choice, sizes: Sequence[Deployment], searched: Sequence[tuple[int, bool]]
) -> Variant:
    deployment = choice.deployment
    requested = deployment.workload.requests_per_s
    top, most = ceiling(deployment), throughput(deployment)
    served = min(requested, most)
    point = operate(deployment, served)
    least = gpus_for(inputs, deployment, requested, searched)
    if not is_served(in_users(deployment, requested), top.binding.users):
        sizes = _sizes_of(inputs, deployment, least.gpus, searched) if least else []
    need = _need(choice, sizes, requested) if sizes else None
    return Variant(
        choice=choice,
        ceiling=top,
        users_at_ttft=next(it for it in top.serving if it.name in FIRST_TOKEN).users,
        throughput_per_s=most,
        point=point,
        ttft_s=point.ttft_s if served == requested else math.inf,
        output_tokens_per_s=served * deployment.workload.answer_tokens,
        gpus_least=least.gpus if least else None,
        reserve=_reserve(inputs, choice, need, searched) if need else None,
        need=need,
        cost=cost(deployment, point),
    )


def _reserve(inputs: Inputs, choice: Choice, need: Need, searched: Sequence[tuple[int, bool]]) -> Machine | None:
    """Return the hardware with a reserve: `need` if it has one, or else the fewest GPUs that have one.

    Hardware has a reserve if its most users, times `target.gpu_used`, cover the requested load.
    """
    deployment, requested = need.deployment, need.point.requests_per_s
    load = requested / inputs.target.gpu_used
    if is_served(in_users(deployment, load), need.users):
        return need
    found = gpus_for(inputs, deployment, load, searched)
    if found is None:
        return None
    size = {"gpu.count": found.gpus, "model.tp": found.tp, "model.dp_attention": found.dp_attention}
    larger = resolve(inputs.change(size, SEARCHED), deployment.basis).only(choice.tiers)
    return Machine(**_costs(larger, operate(larger, requested)))


def _costs(deployment: Deployment, point: OperatingPoint) -> dict[str, Any]:
    """Compute the cost and price fields of a machine, and the life of its drives, at the load of `point`."""
    has_drives = any(it.name == "disk" for it in deployment.tiers)
    years = life_years(deployment, point.write_bytes_per_s["disk"]) if has_drives else None
    at_load = cost(deployment, point, life_years=years)
    total, users = None if at_load.missing else at_load.total, in_users(deployment, point.requests_per_s)
    return {
        "deployment": deployment,
        "point": point,
        "cost": at_load,
        "user_price": None if total is None else total / (deployment.workload.counted(users) or users),
        "life_years": years,
        "price": None if at_load.missing else at_load.bought,
    }


def _sizes_of(
    inputs: Inputs, deployment: Deployment, gpus: int, searched: Sequence[tuple[int, bool]]
) -> list[Deployment]:
    """List the deployments of `gpus` GPUs at each size of `searched`."""
    changed = inputs.change({"gpu.count": gpus}, "the GPUs for the requested load")
    found = deployments(changed, deployment.basis)
    return [it for it in found if (it.inputs.model.tp, it.inputs.model.dp_attention) in searched]


def _need(choice: Choice, sizes: Sequence[Deployment], requested: float) -> Need:
    """Describe the hardware for the requested load, at the best of its sizes."""
    sizes = [it.only(choice.tiers) for it in sizes]
    if sizes[0].inputs.gpu.count == choice.deployment.inputs.gpu.count:
        deployment, users = choice.deployment, choice.users
    else:
        found = [most_users(it) for it in sizes]
        deployment = best(sizes, found)
        users = found[sizes.index(deployment)]
    costs = _costs(deployment, operate(deployment, requested))
    return Need(users=users, enough_bytes=enough_bytes(deployment, sizes), **costs)


def _tiers(
    given: Variant, found: list[Choice], best: Choice, prices: dict[tuple[str, ...], float]
) -> Iterator[PlannedTier]:
    """Yield GPU memory and all tiers of the inputs. `best` is the recommended choice, by price per user if known."""
    deployment = given.need.deployment if given.need else given.deployment
    yield PlannedTier(name=GPU, capacity_bytes=deployment.kv_bytes * deployment.replicas)
    by_tiers, in_prices = {frozenset(it.tiers): it for it in found}, bool(prices)
    for tier in deployment.tiers:
        if tier.name in best.tiers:
            yield PlannedTier(name=tier.name, capacity_bytes=tier.capacity_bytes)
            continue
        beside = by_tiers[frozenset((*best.tiers, tier.name))]
        is_dear = beside.tiers in prices and beside.users > best.users * LEAST_GAIN
        deployed = resolve(best.deployment.inputs, best.deployment.basis).only(beside.tiers)
        yield PlannedTier(
            name=tier.name,
            capacity_bytes=tier.capacity_bytes,
            worth_it=False,
            why_not="" if is_dear else why_not(deployed, tier.name),
            user_price=prices.get(beside.tiers) if is_dear else None,
            pays_from_interval_s=None if in_prices else pays_from(deployed, tier.name),
        )


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values: bytes, seconds, tokens, rates per second, shares from 0 to 1.

    An infinite value is None, which is null in JSON.
    """
    deployment, load, per_hour = plan.deployment, plan.deployment.workload, plan.tiered.cost.per_hour
    document: dict[str, Any] = {
        "model": deployment.model.name,
        "users_with_tiers": plan.tiered.users,
        "users_without_tiers": plan.alone.users,
        "users_with_all_tiers": plan.given.users,
        "is_overloaded": plan.is_overloaded,
        "refused": plan.refused or None,
        "gpus_if_totals_grow": plan.grown_gpus,
        "choices": [
            {
                "tiers": it.tiers,
                "users": it.users,
                "tp": it.deployment.inputs.model.tp,
                "dp_attention": it.deployment.inputs.model.dp_attention,
                "drive_life_years": it.life_years,
                "price": it.price,
                "user_price": it.user_price,
                "is_worth_buying": not plan.refused and it in [way.choice for way in plan.ways],
                "is_worth_buying_for_load": not plan.refused and it in [each.choice for each in plan.bought],
            }
            for it in plan.choices
        ],
        "needs": [_need_json(it) for it in plan.arms],
        "tp_with_tiers": deployment.inputs.model.tp,
        "tp_without_tiers": plan.alone.deployment.inputs.model.tp,
        "binding_limit": plan.binding.name,
        "sizes": [asdict(it) for it in plan.tiered.choice.sizes],
        "hosts": deployment.hosts,
        "replicas": deployment.replicas,
        "bytes_per_token_stored": deployment.model.token_bytes,
        "chunk_bytes": deployment.model.token_bytes * plan.inputs.software.chunk_tokens,
        "session_bytes": deployment.model.stored_bytes(load.stored_tokens),
        "gpu_kv_bytes_per_replica": deployment.kv_bytes,
        "prefill_gpu_s_per_token": prefill_s(deployment, load.input_tokens, load.input_tokens)
        * (deployment.server_gpus / load.input_tokens),
        "price_per_gpu_hour": per_hour and per_hour / plan.inputs.gpu.count,
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
        "tiers": [
            {**asdict(it), "worth_it": it.worth_it and (it.name == GPU or not plan.refused)} for it in plan.tiers
        ],
        "capacities": [asdict(it) for it in plan.capacities],
        "drives": asdict(drives) if (drives := plan.with_drives.drives) else None,
        "break_evens": [asdict(it) for it in plan.break_evens],
        "sensitivity": [{**asdict(it), "swing": it.swing} for it in plan.sensitivities],
        "inputs": {
            name: {"value": plan.inputs.value(name), "from": plan.inputs.origin(name), "help": setting.help}
            for name, setting in SETTINGS.items()
        },
        "sources": [{"name": name, "source": source, "date": date} for name, source, date in deployment.sources],
    }
    return cast("dict[str, Any]", _finite(document))


def _need_json(arm: Variant) -> dict[str, Any]:
    """Return the hardware for the requested load with an arm's tiers; only the tiers if no number of GPUs is enough."""
    need = arm.need
    if need is None:
        return {"tiers": arm.tiers}
    deployment, point = need.deployment, need.point
    return {
        "tiers": arm.tiers,
        "users": in_users(deployment, point.requests_per_s),
        "users_at_most": need.users,
        "gpus": need.gpus,
        "hosts": deployment.hosts,
        "tp": deployment.inputs.model.tp,
        "dp_attention": deployment.inputs.model.dp_attention,
        "drives": deployment.inputs.disk.count if "disk" in arm.tiers else 0,
        "gpu_kv_bytes": deployment.kv_bytes * deployment.replicas,
        "tier_bytes": {it.name: it.capacity_bytes for it in deployment.tiers},
        "kv_bytes_for_hits": capacity(deployment, deployment.inputs.target.hit_share).bytes,
        "enough_bytes": need.enough_bytes,
        "read_bytes_per_s": point.read_bytes_per_s,
        "read_burst_bytes_per_s": {
            name: rate * deployment.inputs.target.burst for name, rate in point.read_bytes_per_s.items()
        },
        "write_bytes_per_s": point.write_bytes_per_s,
        "drive_life_years": need.life_years,
        "user_price": need.user_price,
        "ttft_s": point.ttft_s,
        "ttft_p95_s": point.ttft_within_s(0.95),
        "tpot_s": point.tpot_s,
        "hit_rate": point.hit_rate,
        "output_tokens_per_s": point.requests_per_s * deployment.workload.answer_tokens,
        "watts": need.cost.watts,
        "price": need.price,
        "with_reserve": _reserve_json(arm.reserve) if arm.reserve else None,
    }


def _reserve_json(machine: Machine) -> dict[str, Any]:
    """Return the hardware that decides what is worth buying, and its prices."""
    deployment = machine.deployment
    return {
        "gpus": machine.gpus,
        "hosts": deployment.hosts,
        "tp": deployment.inputs.model.tp,
        "dp_attention": deployment.inputs.model.dp_attention,
        "drives": deployment.inputs.disk.count if machine.life_years else 0,
        "drive_life_years": machine.life_years,
        "user_price": machine.user_price,
        "price": machine.price,
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
        "gpus_needed": variant.reserve.gpus if variant.reserve else None,
        "tp_needed": variant.reserve.deployment.inputs.model.tp if variant.reserve else None,
        "cost": asdict(variant.cost),
        "cost_at_most": asdict(variant.choice.cost) if variant.choice.cost else None,
        "point": {**asdict(variant.point), "hit_rate": variant.point.hit_rate},
    }


def _finite(value: object) -> object:
    """Return `value` with None for each infinite number, because JSON has no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(it) for key, it in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(it) for it in cast("list[object]", value)]
    return value
