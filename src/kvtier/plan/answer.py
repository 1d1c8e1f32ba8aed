"""A plan in sentences: verdict, conclusion, and the model and traffic that it is made for."""

import math
from collections.abc import Collection, Sequence

from kvtier.config.value_types import seconds_text
from kvtier.plan.hardware import COUNT_MAX
from kvtier.plan.inputs import SETTINGS, ModelInputs
from kvtier.plan.limits import FIRST_TOKEN, in_users
from kvtier.plan.plan import Plan, PlannedTier, Variant
from kvtier.plan.queueing import GPU, operate
from kvtier.plan.resolve import SEARCHED, Deployment
from kvtier.plan.search import PlannedSize
from kvtier.plan.worth import LEAST_GAIN, TIER_NAMES
from kvtier.report.format import NONE, YEAR_S, bytes_text, count_text, digits, ratio_text, share_text, time_text

_HARDWARE = ("gpu.", "host.", "disk.", "shared.", "software.")


def verdict(plan: Plan) -> str:
    """What the given GPUs serve at most, and which tiers are worth buying: the same for any requested load."""
    gpus = gpus_text(plan, plan.inputs.gpu.count)
    if not plan.serves_any:
        few = "not even one user" if plan.given.users else "not one request"
        gets = f"gets a first token {within(plan)}" if plan.inputs.target.ttft_s else f"is served {within(plan)}"
        return f"On {gpus}, {few} {gets.replace(' to the first token', '')}, with or without tiers."
    # At the sizes for any load, since the verdict does not depend on the requested one.
    by_tiers = {it.tiers: it for it in plan.choices}
    ways, alone = [by_tiers[it.tiers] for it in plan.ways if it.tiers], by_tiers[()]
    first = (ways or [alone])[0]
    point = operate(first.deployment, first.users / first.deployment.workload.interval_s, with_tiers=bool(ways))
    is_limited = plan.inputs.target.ttft_p95_s
    tail = "" if is_limited else f" (95 % within {time_text(point.ttft_within_s(0.95))})"
    served: list[str] = []
    for it in (*ways, alone):
        gain = NONE if it is alone else ratio_text(whole(plan, it.users), whole(plan, alone.users))
        users = (load_text if served else in_words)(plan, it.users)
        served.append(f"{users} with {names_text(it.tiers)}{'' if gain == NONE else f' ({gain})'}")
    limits = within(plan)
    serve, they = ("serves", "it serves") if plan.inputs.gpu.count == 1 else ("serve", "they serve")
    text = f"{limits[:1].upper()}{limits[1:]}{tail}, {gpus} {serve} {_series(served)}."
    users, most, size = max(
        ((whole(plan, size.users_with_tiers), it, size) for it in plan.choices for size in it.sizes),
        key=lambda it: it[0],
    )
    if users > max(whole(plan, it.users) for it in (alone, *ways)):
        text += f" With {names_text(most.tiers)} at TP {size.tp} {they} {load_text(plan, users)}."
    return f"{text} {_worth(plan, [it.tiers for it in ways])}"


def _worth(plan: Plan, ways: list[tuple[str, ...]]) -> str:
    """Which tiers to buy, and which not."""
    if not plan.given.deployment.tiers:
        return "The plan has no tiers."
    if not ways:
        reasons = {it.why_not: f"not {TIER_NAMES[it.name]}, because {it.why_not}" for it in plan.idle_tiers}
        why = f": {', and '.join(reasons.values())}" if len(reasons) > 1 else f", because {next(iter(reasons))}"
        return f"No tier is worth buying{why}."
    price = {it.tiers: it.price for it in plan.choices}
    currency = plan.inputs.price.currency
    texts = [
        names_text(it) + (f" for {digits(known)} {currency}" if (known := price[it]) is not None else "") for it in ways
    ]
    idle = [it.name for it in plan.idle_tiers if not any(it.name in way for way in ways)]
    instead = ", one of them" if len(ways) > 1 else ""
    return f"Worth buying: {' or '.join(texts)}{instead}.{f' Not: {names_text(idle)}.' if idle else ''}"


def request(plan: Plan) -> str:
    """What the requested load needs, in one sentence: GPUs and hosts, with each way worth buying and without."""
    given = plan.inputs.gpu.count
    load = in_words(plan, plan.requested_users)
    fits, not_fits, they = (
        ("fits", "does not fit", "it needs") if load == "1 user" else ("fit", "do not fit", "they need")
    )
    ways = sorted(plan.arms, key=lambda it: not it.tiers)
    fit = [names_text(it.tiers) for it in ways if it.need and it.need.gpus <= given]
    more = [it for it in ways if names_text(it.tiers) not in fit]
    needed = [
        f"{it.need.gpus:,} {'GPU' if it.need.gpus == 1 else 'GPUs'} in {_hosts_text(it.need.deployment)} "
        f"with {names_text(it.tiers)}"
        for it in more
        if it.need
    ]
    never = [names_text(it.tiers) for it in more if it.need is None]
    parts = [f"{they} {_series(needed)}"] if needed else []
    if never:
        without = f" with {_series(never, 'or')}" if needed or fit else ""
        most = f"no number of these GPUs up to {COUNT_MAX:,} is enough"
        parts.append(f"{most}{without}, but larger ones or more time (--ttft) may be")
    gpus = gpus_text(plan, given)
    if not fit:
        return f"{load} {not_fits} on {gpus}: {'; '.join(parts)}."
    least, _, with_tiers = min((it.gpus_least or given, len(it.tiers), it.tiers) for it in ways)
    which = f" with {names_text(with_tiers)}" if len(fit) > 1 else ""
    enough = f" ({least:,} would be enough{which})" if least < given else ""
    fitting = f"{load} {fits} on {gpus} with {_series(fit, 'or')}{enough}"
    return f"{'; '.join([fitting, *parts])}."


def gpus_text(plan: Plan, count: int) -> str:
    """GPUs of the plan's kind."""
    return f"{count:,} x {plan.inputs.gpu.name}"


def _hosts_text(deployment: Deployment) -> str:
    return "one host" if deployment.hosts == 1 else f"{deployment.hosts:,} hosts"


def names_text(tiers: Collection[str]) -> str:
    """Tiers in words; none are GPU memory alone."""
    return _series([TIER_NAMES[it] for it in tiers]) if tiers else f"{TIER_NAMES[GPU]} alone"


def _series(texts: Sequence[str], word: str = "and") -> str:
    """The texts as a list in a sentence."""
    return f" {word} ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def within(plan: Plan) -> str:
    """The limits of times, in words."""
    target = plan.inputs.target
    limits = [
        *([f"within {target.ttft_s:g} s on average to the first token"] if target.ttft_s else ()),
        *([f"with 95 % of first tokens within {target.ttft_p95_s:g} s"] if target.ttft_p95_s else ()),
        *([f"at {target.tpot_s * 1000:g} ms a token"] if target.tpot_s else ()),
    ]
    return _series(limits)


def heading(plan: Plan) -> str:
    """Model, GPUs and sizes in one line."""
    inputs, tiered, alone = plan.inputs, plan.tiered.deployment, plan.alone.deployment
    why = _why_size(plan)
    sizes = f"{size_text(tiered)} with tiers{why}, {size_text(alone)} without"
    if (tiered.inputs.model.tp, tiered.replicas) == (alone.inputs.model.tp, alone.replicas):
        sizes = f"{size_text(tiered)}{why}"
    if plan.tiered.need and plan.tiered.need.gpus != inputs.gpu.count:
        sizes += f"; for {shown_load(plan, plan.tiered)}: {size_text(plan.tiered.need.deployment)}"
    return f"{tiered.model.name} on {gpus_text(plan, inputs.gpu.count)} in {_hosts_text(tiered)}: {sizes}"


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
    served = f"{_split_text(best)} serves {in_words(plan, best.users_with_tiers)}"
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
    ignored = ", ".join(deployment.basis.model.ignored)
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
        *([("ignored", f"{ignored}, on demand: if they change what is cached, this plan is wrong")] if ignored else []),
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
    return f"{in_words(plan, plan.requested_users)}, a query every {seconds_text(traffic.interval_s)} each: {rate}"


def conclusion(plan: Plan) -> list[str]:
    """What binds with tiers, what raises it, what comes next, and what it wears: a few sentences."""
    binding, following = plan.binding, plan.tiered.ceiling.next
    sentences: list[str] = []
    if not plan.deployment.workload.is_any(binding.users):
        sentences.append(f"The smallest load exceeds a limit: {binding.name} ({binding.meaning}).")
    else:
        raised_by = _raised_by(plan) or f"To raise it, change {binding.raised_by}."
        users = in_words(plan, binding.users)
        sentences.append(f"Binding limit: {binding.name}, at {users} ({binding.meaning}). {raised_by}")
        sentences += _ttft_parts(plan)
    if following is not None and math.isfinite(following.users):
        sentences.append(f"Next limit: {following.name}, at {in_words(plan, following.users)}.")
    reserves = [it for it in plan.tiered.ceiling.limits if it.is_reserve and it.users < binding.users]
    if reserves:
        first = reserves[0]
        sentences.append(
            f"From {in_words(plan, first.users)} on, {first.name} is short in bursts, so that loads take "
            f"longer or prompts are computed. To raise it, change {first.raised_by}."
        )
    over = [it.name for it in plan.tiered.ceiling.serving if plan.used[it.name] > 1]
    if over:
        sentences.append(f"The requested load, {in_words(plan, plan.requested_users)}, exceeds: {', '.join(over)}.")
    if plan.deployment.workload.is_any(binding.users):
        sentences += [_idle(plan, it) for it in plan.idle_tiers]
    return [*sentences, *_least_host(plan), *_money(plan), *wear(plan)]


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
    """Why a tier adds nothing to the recommended ones, and from when on it would."""
    beside, name = names_text(plan.tiered.tiers or (GPU,)), TIER_NAMES[tier.name]
    verb = "add" if tier.name == "disk" else "adds"
    pays = tier.pays_from_interval_s
    since = f" That changes where a user's queries are {time_text(pays)} apart or more." if pays else ""
    return f"Beside {beside}, {name} {verb} less than {LEAST_GAIN - 1:.0%}, because {tier.why_not}.{since}"


def _money(plan: Plan) -> list[str]:
    """Host memory against drives for the same money, where their prices are given."""
    found, unit = plan.same_money, load_unit(plan)
    if found is None:
        return []
    host, drives = load_text(plan, found.users_host), load_text(plan, found.users_drives)
    return [
        (
            f"For {digits(found.money)} {plan.inputs.price.currency}, {bytes_text(found.host_bytes)} of host memory "
            f"alone serve {host} {unit}, and {found.drives} drives alone {drives}, until they wear out."
        )
    ]


def wear(plan: Plan) -> list[str]:
    """The life of the drives at the requested load, and the write policy that gives the wanted life."""
    drives, target = plan.drives, plan.inputs.target
    if drives is None or drives.life_years >= target.life_years:
        return []
    share = share_text(drives.write_share)
    is_selective = drives.write_policy == "selective"
    by = f"writing KV at its second use, {share} of it" if is_selective else f"a write budget of {share} of new KV"
    by += f" (then {digits(drives.users)} {load_unit(plan)} within all limits)"
    life = time_text(drives.life_years * YEAR_S)
    return [
        (
            f"At {shown_load(plan, plan.tiered)} the drives last {life}. {target.life_years:g} years need {by}, or "
            f"{drives.drives_for_life} drives."
        )
    ]


def shown_load(plan: Plan, variant: Variant) -> str:
    """The requested load and the GPUs that it needs; where no number is enough, what the given ones complete."""
    if variant.need is None:
        return in_words(plan, in_users(plan.deployment, variant.point.requests_per_s))
    gpus = variant.need.gpus
    on = f" on {gpus_text(plan, gpus)}" if gpus != plan.inputs.gpu.count else ""
    return f"{in_words(plan, plan.requested_users)}{on}"


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
    if plan.binding.name not in FIRST_TOKEN or not math.isfinite(point.ttft_s):
        return []
    prefill_s = point.ttft_s - point.wait_s - point.load_s
    return [
        (
            f"The mean of {point.ttft_s:.2g} s there: {time_text(point.wait_s)} waiting for the GPU, "
            f"{time_text(point.load_s)} loading, {time_text(prefill_s)} computing."
        )
    ]


def load_unit(plan: Plan) -> str:
    """Unit of loads in this plan."""
    return "users" if plan.deployment.workload.has_users else "queries/s"


def whole(plan: Plan, load: float) -> float:
    """A load as `load_text` shows it, for ratios."""
    return plan.deployment.workload.counted(load)


def in_words(plan: Plan, load: float) -> str:
    """A load with its unit: ``1 user``, ``53 users``, ``1.5 queries/s``."""
    text = f"{load_text(plan, load)} {load_unit(plan)}"
    return "1 user" if text == "1 users" else text


def load_text(plan: Plan, load: float) -> str:
    """A load in whole users, or in queries a second."""
    return count_text(load) if plan.deployment.workload.has_users or math.isinf(load) else digits(load)
