"""A plan in sentences: verdict, conclusion, and the model and traffic that it is made for."""

import math

from kvtier.config.value_types import seconds_text
from kvtier.plan.inputs import SETTINGS, ModelInputs
from kvtier.plan.limits import TTFT, in_users
from kvtier.plan.plan import Plan, PlannedTier, Variant
from kvtier.plan.resolve import SEARCHED, Deployment
from kvtier.plan.search import PlannedSize
from kvtier.plan.worth import LEAST_GAIN, TIER_NAMES
from kvtier.report.format import NONE, YEAR_S, bytes_text, count_text, digits, ratio_text, share_text, time_text

_HARDWARE = ("gpu.", "host.", "disk.", "shared.", "software.")


def verdict(plan: Plan) -> str:
    """The finding in one line: what tiers change, or why they change nothing."""
    alone, tiered, load = plan.alone.users, plan.tiered.users, plan.deployment.workload
    unit, in_time = load_unit(plan), within(plan)
    before, after = load_text(plan, alone), load_text(plan, tiered)
    if plan.is_overloaded:
        return _overload(plan)
    in_time += f" (95 % within {time_text(plan.tiered.ceiling.point.ttft_within_s(0.95))})"
    if not load.is_any(alone):
        return f"Only with tiers is the first token in time: {after} {unit} {in_time}{_of_which(plan)}"
    if tiered < alone * LEAST_GAIN:
        gain = f"No gain from tiers above {LEAST_GAIN - 1:.0%}"
        return f"{gain}: {after} {unit} {in_time}, {before} with GPU memory alone; {_no_gain(plan)}"
    gain = ratio_text(whole(plan, tiered), whole(plan, alone))
    return f"Tiers serve {after} {unit} {in_time}, {before} without ({gain}){_of_which(plan)}"


def _overload(plan: Plan) -> str:
    """The requested load does not fit: how many users do, and how many GPUs would serve it."""
    load, inputs = plan.deployment.workload, plan.inputs
    requested = f"{load_text(plan, plan.requested_users)} {load_unit(plan)}"
    start = f"{requested} do not fit on {inputs.gpu.count} x {inputs.gpu.name}"
    if not load.is_any(max(plan.alone.users, plan.tiered.users)):
        few = "less than one user" if plan.tiered.users else "not one request"
        enough = f"{plan.more_gpus} of these GPUs would serve them, with the given tiers"
        if plan.more_gpus is None:
            enough = "nor would more of these GPUs: larger ones, or more time (--ttft), may"
        return f"{start}: {few} is {within(plan)}, with or without tiers; {enough}"
    after, before = load_text(plan, plan.tiered.users), load_text(plan, plan.alone.users)
    fit = f"{before} do {within(plan)}, with or without tiers"
    if plan.tiered.users >= plan.alone.users * LEAST_GAIN:
        fit = f"{after} do {within(plan)} with {kept(plan)}, {before} without"
    with_tiers, without = (it.gpus_least or NONE for it in (plan.tiered, plan.alone))
    return f"{start}: {fit}; {requested} need {with_tiers} GPUs with tiers, {without} without"


def kept(plan: Plan) -> str:
    """The tiers that the plan recommends, in words."""
    return " and ".join(TIER_NAMES[it.name] for it in plan.deployment.tiers)


def _of_which(plan: Plan) -> str:
    """The recommended tiers, where others are not worth it."""
    idle = " and ".join(TIER_NAMES[it.name] for it in plan.idle_tiers)
    return f"; that is with {kept(plan)}, not worth it: {idle}" if idle else ""


def within(plan: Plan) -> str:
    """The limits of times, in words."""
    target = plan.inputs.target
    tpot = f" and {target.tpot_s * 1000:g} ms a token" if target.tpot_s else ""
    return f"within {target.ttft_s:g} s on average to the first token{tpot}"


def _no_gain(plan: Plan) -> str:
    """Why tiers change nothing for users."""
    if not plan.given.deployment.tiers:
        return "the plan has none"
    if not plan.deployment.tiers:
        return plan.idle_tiers[0].worth.why_not
    before, after = (load_text(plan, it.throughput_users) for it in (plan.alone, plan.tiered))
    return f"throughput saturates at {after} {load_unit(plan)} instead of {before}"


def heading(plan: Plan) -> str:
    """Model, GPUs and sizes in one line."""
    inputs, tiered, alone = plan.inputs, plan.tiered.deployment, plan.alone.deployment
    why = _why_size(plan)
    sizes = f"{size_text(tiered)} with tiers{why}, {size_text(alone)} without"
    if (tiered.inputs.model.tp, tiered.replicas) == (alone.inputs.model.tp, alone.replicas):
        sizes = f"{size_text(tiered)}{why}"
    hosts = "one host" if tiered.hosts == 1 else f"{tiered.hosts} hosts"
    return f"{tiered.model.name} on {inputs.gpu.count} x {inputs.gpu.name} in {hosts}: {sizes}"


def _why_size(plan: Plan) -> str:
    """Why the size with tiers is larger than memory needs: the users of the best smaller one."""
    if plan.inputs.origin("model.tp") != SEARCHED or len(plan.sizes) == 1:
        return ""
    smaller = [it for it in plan.sizes if it.tp < plan.inputs.model.tp]
    if not smaller:
        return " (the fewest GPUs that hold the model)"
    best = max(smaller, key=lambda it: it.users_with_tiers)
    fewer = whole(plan, plan.tiered.users) - whole(plan, best.users_with_tiers)
    if not fewer:
        return " (the soonest first token)"
    served = f"{_split_text(best)} serves {load_text(plan, best.users_with_tiers)} {load_unit(plan)}"
    return f" ({served}, {load_text(plan, fewer)} fewer)"


def _split_text(size: ModelInputs | PlannedSize) -> str:
    """How the GPUs of a copy share the model."""
    return f"data-parallel attention on {size.tp} GPUs" if size.dp_attention else f"TP {size.tp}"


def size_text(deployment: Deployment) -> str:
    """The GPUs of a copy of the model, and the copies."""
    split, copies = _split_text(deployment.inputs.model), deployment.copies
    idle = deployment.inputs.gpu.count - deployment.used_gpus
    return f"{split}, {'one copy' if copies == 1 else f'{copies} copies'}{f', {idle} GPUs idle' if idle else ''}"


def circumstances(plan: Plan) -> list[tuple[str, str]]:
    """Name and text of each line about the model and the workload."""
    inputs, deployment, load, model = plan.inputs, plan.deployment, plan.deployment.workload, plan.deployment.model
    chunk_tokens = inputs.software.chunk_tokens
    copies = ""
    if model.duplication > 1:
        stored = model.duplication / model.delivered_ratio
        copies = (
            f"; {stored:g} copies for ranks that cannot split it (software.copies = 1: a tier that all share has one)"
        )
    bursts = [f"the busiest 10 s of the trace have {load.burst:.1f} times its average"] if load.burst else []
    return [
        (
            "model",
            (
                f"KV {inputs.model.kv_dtype}, weights {inputs.model.weights} ({bytes_text(deployment.weight_bytes)}); "
                f"{bytes_text(deployment.kv_bytes)} for KV next to "
                f"{'each copy' if deployment.replicas == deployment.copies else 'its part on each GPU'}"
            ),
        ),
        (
            "KV",
            (
                f"{bytes_text(model.token_bytes)} a token, {bytes_text(model.token_bytes * chunk_tokens)} a chunk of "
                f"{chunk_tokens} tokens, {bytes_text(model.stored_bytes(load.session_tokens))} a conversation{copies}"
            ),
        ),
        ("traffic", _traffic(plan)),
        (
            "requests",
            (
                f"prompts of {load.input_tokens:,.0f} tokens, {load.reuse:.1%} of them reusable; "
                f"answers of {load.answer_tokens:,.0f}"
            ),
        ),
        *(("bursts", it) for it in bursts),
        *(("note", note) for note in load.notes),
    ]


def _traffic(plan: Plan) -> str:
    traffic, load = plan.inputs.traffic, plan.deployment.workload
    rate = f"{load.requests_per_s:,.3g} queries/s"
    if not load.has_users:
        times = "" if traffic.load == 1 else f", {traffic.load:g} times its load"
        return f"{rate}, as in {traffic.trace}{times}"
    if plan.deployment.basis.trace:
        return f"{rate} of {traffic.trace}, as from {plan.requested_users:,.0f} users"
    return f"{traffic.users:,} users, a query every {seconds_text(traffic.interval_s)} each: {rate}"


def conclusion(plan: Plan) -> list[str]:
    """What binds with tiers, what raises it, what comes next, and what it wears: a few sentences."""
    unit, binding, following = load_unit(plan), plan.binding, plan.tiered.ceiling.next
    sentences: list[str] = []
    if not plan.deployment.workload.is_any(binding.users):
        sentences.append(f"The smallest load exceeds a limit: {binding.name} ({binding.meaning}).")
    else:
        raised_by = _raised_by(plan) or f"To raise it, change {binding.raised_by}."
        users = load_text(plan, binding.users)
        sentences.append(f"Binding limit: {binding.name}, at {users} {unit} ({binding.meaning}). {raised_by}")
        sentences += _ttft_parts(plan)
    if following is not None and math.isfinite(following.users):
        sentences.append(f"Next limit: {following.name}, at {load_text(plan, following.users)} {unit}.")
    reserves = [it for it in plan.tiered.ceiling.limits if it.is_reserve and it.users < binding.users]
    if reserves:
        first = reserves[0]
        sentences.append(
            f"From {load_text(plan, first.users)} {unit} on, {first.name} is short in bursts, so that loads take "
            f"longer or prompts are computed. To raise it, change {first.raised_by}."
        )
    over = [it.name for it in plan.tiered.ceiling.serving if plan.used[it.name] > 1]
    if over:
        sentences.append(
            f"The requested load, {load_text(plan, plan.requested_users)} {unit}, exceeds: {', '.join(over)}."
        )
    sentences += _gpus(plan)
    if plan.tiered.users >= plan.alone.users * LEAST_GAIN:
        sentences += [_idle(plan, it) for it in plan.idle_tiers]
    return [*sentences, *_least_host(plan), *_money(plan), *wear(plan)]


def _gpus(plan: Plan) -> list[str]:
    """GPUs for the requested load, those that the limits need and those with a reserve."""
    variants = {"with tiers": plan.tiered, "without": plan.alone}
    if not any(it.gpus_least for it in variants.values()):
        return []
    least = ", ".join(f"{it.gpus_least or NONE} {name}" for name, it in variants.items())
    needed = ", ".join(f"{it.gpus_needed or NONE} {name}" for name, it in variants.items())
    used = plan.inputs.target.gpu_used
    reserve = f"; {needed} at {used:.0%} of the most users (target.gpu_used)" if used < 1 else ""
    return [f"GPUs for {load_text(plan, plan.requested_users)} {load_unit(plan)}: {least}{reserve}."]


def _least_host(plan: Plan) -> list[str]:
    """The host memory from which on most of the gain is there."""
    if plan.least_host_bytes is None:
        return []
    least, given = bytes_text(plan.least_host_bytes), bytes_text(plan.inputs.host.capacity_bytes)
    return [
        (
            f"Host memory: from {least} on it adds 90 % of the {load_unit(plan)} that {given} adds. A tier also holds "
            "what is above it, so GPU memory is neither added nor subtracted."
        )
    ]


def _idle(plan: Plan, tier: PlannedTier) -> str:
    """Why a tier is not worth it, and from when on it would be."""
    name, without = TIER_NAMES[tier.name].capitalize(), tier.worth.without
    verb = "is" if tier.name in {"host", "shared"} else "are"
    pays = tier.worth.pays_from_s
    since = f" That changes where a user's queries are {time_text(pays)} apart or more." if pays else ""
    return (
        f"{name} {verb} not worth it here, because {tier.worth.why_not}: {load_text(plan, without.users)} "
        f"{load_unit(plan)} without.{since}"
    )


def _money(plan: Plan) -> list[str]:
    """The price of a further user, and host memory against drives, where prices are given."""
    sentences, currency, unit = list[str](), plan.inputs.price.currency, load_unit(plan)
    before, after, more = plan.alone.cost.bought, plan.tiered.cost.bought, plan.tiered.users - plan.alone.users
    what = "tiers that are worth it" if plan.idle_tiers else "tiers"
    if (
        before
        and after
        and not plan.tiered.cost.missing
        and plan.deployment.tiers
        and math.isfinite(more)
        and more >= 1
    ):
        price, years = after - before + _worn(plan), plan.inputs.price.years
        worn = f", of it {digits(_worn(plan))} for drives that wear out within {years:g} years" if _worn(plan) else ""
        each = f"{digits(price / more)} for each of {digits(more)} {unit} more"
        sentences.append(f"The {what} cost {digits(price)} {currency}{worn}: {each}.")
    found = plan.same_money
    if found is not None:
        host, drives = load_text(plan, found.users_host), load_text(plan, found.users_drives)
        sentences.append(
            f"For {digits(found.money)} {currency}, {bytes_text(found.host_bytes)} of host memory alone serve {host} "
            f"{unit}, and {found.drives} drives alone {drives}, until they wear out."
        )
    return sentences


def wear(plan: Plan) -> list[str]:
    """The life of the drives at the served load, and the write policy that gives the wanted life."""
    drives, target = plan.drives, plan.inputs.target
    if drives is None or drives.life_years >= target.life_years:
        return []
    share = share_text(drives.write_share)
    is_selective = drives.write_policy == "selective"
    by = f"writing KV at its second use, {share} of it" if is_selective else f"a write budget of {share} of new KV"
    by += f" (then {digits(drives.users)} {load_unit(plan)} within all limits)"
    load, life = served_text(plan, plan.tiered), time_text(drives.life_years * YEAR_S)
    sentence = (
        f"At {load} the drives last {life}. {target.life_years:g} years need {by}, or {drives.drives_for_life} drives."
    )
    if worn := _worn(plan):
        sentence += f" The rows of cost leave out {digits(worn)} {plan.inputs.price.currency} for worn drives."
    return [sentence]


def _worn(plan: Plan) -> float:
    """The price of the drives that replace worn ones within the years of the prices."""
    if plan.drives is None:
        return 0.0
    disk, price = plan.inputs.disk, plan.inputs.price
    return max(0.0, disk.count * price.drive * (price.years / plan.drives.life_years - 1))


def _raised_by(plan: Plan) -> str:
    """What more of the strongest inputs of hardware and software gives."""
    changed = [
        (it.users_higher, it)
        for it in plan.sensitivities
        if it.name.startswith(_HARDWARE)
        if it.users_higher and it.users_higher > it.users * 1.01
    ]
    strongest = sorted(changed, key=lambda it: -it[0])[:3]
    texts = [
        f"{it.name} = {SETTINGS[it.name].kind.show(it.higher)} gives {load_text(plan, users)}"
        for users, it in strongest
    ]
    return f"To raise it: {'; '.join(texts)}." if texts else ""


def _ttft_parts(plan: Plan) -> list[str]:
    """The parts of the time to first token where it binds."""
    point = plan.tiered.ceiling.point
    if plan.binding.name != TTFT or not math.isfinite(point.ttft_s):
        return []
    prefill_s = point.ttft_s - point.wait_s - point.load_s
    return [
        (
            f"The {point.ttft_s:.2g} s there: {time_text(point.wait_s)} waiting for the GPU, "
            f"{time_text(point.load_s)} loading, {time_text(prefill_s)} computing."
        )
    ]


def served_text(plan: Plan, variant: Variant) -> str:
    """The load that the GPUs complete of the requested one."""
    return f"{load_text(plan, in_users(plan.deployment, variant.served_per_s))} {load_unit(plan)}"


def load_unit(plan: Plan) -> str:
    """Unit of loads in this plan."""
    return "users" if plan.deployment.workload.has_users else "queries/s"


def whole(plan: Plan, load: float) -> float:
    """A load as `load_text` shows it, for ratios."""
    is_counted = plan.deployment.workload.has_users and not math.isinf(load)
    return float(math.floor(load + 1e-6)) if is_counted else load


def load_text(plan: Plan, load: float) -> str:
    """A load in whole users, or in queries a second."""
    return count_text(load) if plan.deployment.workload.has_users or math.isinf(load) else digits(load)
