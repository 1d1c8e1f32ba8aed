"""Put a plan into sentences: its verdict and conclusion, and the model and traffic that it is for."""

import math
from collections.abc import Collection, Sequence

from kvtier.config.value_types import seconds_text
from kvtier.report.format import (
    NONE,
    YEAR_S,
    bytes_text,
    count_text,
    counted,
    digits,
    ratio_text,
    share_text,
    time_text,
)
from kvtier.tools.plan.hardware import COUNT_MAX
from kvtier.tools.plan.inputs import SETTINGS, ModelInputs
from kvtier.tools.plan.max_load import FIRST_TOKEN, TPOT, TTFT, TTFT_P95, is_served, most_users
from kvtier.tools.plan.operating_point import GPU
from kvtier.tools.plan.plan import Plan, PlannedTier, Variant
from kvtier.tools.plan.resolve import SEARCHED, Deployment, given_totals, of_each_host
from kvtier.tools.plan.tier_selection import LEAST_GAIN, TIER_NAMES, PlannedSize

_HARDWARE = ("gpu.", "host.", "disk.", "shared.", "software.")


def verdict(plan: Plan) -> str:
    """State how many users the given GPUs serve, and which tiers are worth buying for a full server.

    It depends on the requested load only if the hosts for this load share totals that the user gave, or if prices are
    for this load.
    """
    gpus = gpus_text(plan, plan.inputs.gpu.count)
    if not plan.serves_any:
        few = "not even one user" if plan.given.users else "not one request"
        gets = f"gets a first token {within(plan)}" if plan.inputs.target.ttft_s else f"is served {within(plan)}"
        return f"On {gpus}, {few} {gets.replace(' to the first token', '')}, with or without tiers."
    ways = [it for it in plan.ways if it.tiers]
    tail = ""
    if not plan.inputs.target.ttft_p95_s:
        tail = f" (95 % within {time_text(plan.tiered.ceiling.point.ttft_within_s(0.95))})"
    served: list[str] = []
    whole, is_rounded = plan.deployment.workload.counted, False
    for it in (*ways, plan.alone):
        users = (load_text if served else in_words)(plan, it.users)
        ratio = ratio_text(it.users, plan.alone.users if plan.alone.choice.cost else None)
        gain = f" ({ratio})" if it.tiers and ratio != NONE else ""
        is_rounded |= bool(gain) and ratio != ratio_text(whole(it.users), whole(plan.alone.users))
        served.append(f"{users} with {names_text(it.tiers)}{gain}")
    limits, shared = within(plan), _shared_totals(plan) if ways else ""
    all_of = " with all of these tiers" if shared else ""
    serve, they = ("serves", "it serves") if plan.inputs.gpu.count == 1 else ("serve", "they serve")
    text = f"{limits[:1].upper()}{limits[1:]}{tail}, {gpus}{all_of} {serve} {_series(served)}."
    text += " Ratios are of unrounded users." if is_rounded else ""
    most, shown = max(plan.choices, key=lambda it: it.users), [load_text(plan, it.users) for it in (plan.alone, *ways)]
    if load_text(plan, most.users) not in shown:
        text += f" With {names_text(most.tiers)} {they} {load_text(plan, most.users)}."
    return f"{text} {shared or _worth(plan, ways)}".strip()


def _shared_totals(plan: Plan) -> str:
    """State one host's part of the tiers with given totals, if the load requires more hosts than the given GPUs fill.

    The verdict counts the given GPUs with all of these tiers, but each of these hosts gets only its part.
    """
    hosts = min((it.need.deployment.hosts for it in plan.arms if it.need), default=0)
    totals = {"host": "host.capacity_bytes", "disk": "disk.count", "shared": "shared.capacity_bytes"}
    uneven = "disk" if hosts and plan.given.deployment.inputs.disk.count % hosts else ""  # a drive is in one host
    parts = [
        f"{bytes_text(it.capacity_bytes / (hosts or 1))} of {TIER_NAMES[it.name]}{' on average' * (it.name == uneven)}"
        for it in plan.given.deployment.tiers
        if not plan.inputs.origin(totals[it.name]).startswith(("default", "probe"))
    ]
    if hosts <= plan.deployment.hosts or not parts:
        return ""
    return f"The {hosts:,} hosts for {in_words(plan, plan.requested_users)} share them: one host gets {_series(parts)}."


def _conclusion_for_load(plan: Plan) -> str:
    """State which tiers are worth buying for the requested load, with the life of drives that wear out too early."""
    if not plan.given.tiers or not plan.deployment.model.stored_bytes(1):
        return ""
    load, one = in_words(plan, plan.requested_users), load_unit(plan, one=True)
    if why := plan.refused:
        return f" Buy no tier for this plan: {why}."
    by_price = f" by price per {one}" if plan.user_prices else ""
    if not plan.bought:
        return f" No tier is worth buying for {load}{by_price}{'' if by_price else _why_none(plan)}."
    texts = [names_text(it.tiers) + _early_wear(plan, it) for it in plan.bought]
    text = f" Worth buying for {load}{by_price}: {' or '.join(texts)}{', one of them' if len(texts) > 1 else ''}."
    if by_price:
        return text
    needed = sorted({it.reserve_gpus for it in plan.bought})
    gpus = " or ".join(f"{it:,}" for it in needed) + (" GPU" if needed == [1] else " GPUs")
    instead = f" instead of {plan.alone.reserve.gpus:,}" if plan.alone.reserve else ""
    return f"{text} With a reserve {_they_need(load)} {gpus}{instead}."


def _why_none(plan: Plan) -> str:
    """Explain why no tier is worth buying for the requested load: tiers save none, or too few, of the GPUs."""
    alone = plan.alone.reserve_gpus
    if math.isinf(alone):
        return ""
    if alone <= plan.inputs.gpu.count:
        return f", because {gpus_text(plan, int(alone))} {'has' if alone == 1 else 'have'} a reserve without one"
    gpus = f"the {alone:,} GPUs that {_they_need(in_words(plan, plan.requested_users))} with a reserve"
    saved = f"less than {LEAST_GAIN - 1:.0%}" if plan.saves_gpus else "none"
    return f", because tiers save {saved} of {gpus}"


def _they_need(load: str) -> str:
    return "it needs" if load == "1 user" else "they need"


def _early_wear(plan: Plan, arm: Variant) -> str:
    """State how long the drives of a variant last at the requested load, if that is less than the wanted life."""
    years = (arm.need and arm.need.life_years) or math.inf
    if years >= plan.inputs.target.life_years:
        return ""
    is_priced = bool(plan.user_prices) and years < plan.inputs.price.years
    return f" (they last {time_text(years * YEAR_S)}{', and the price replaces worn ones' if is_priced else ''})"


def _worth(plan: Plan, ways: list[Variant]) -> str:
    """State which tiers are worth buying for a full server, or for the requested load if prices are for it."""
    if not plan.given.tiers:
        return "The plan has no tiers."
    if plan.refused:
        return ""
    currency, one = plan.inputs.price.currency, load_unit(plan, one=True)
    load, gpus = in_words(plan, plan.requested_users), gpus_text(plan, plan.inputs.gpu.count)
    full = "for a full server" if plan.inputs.gpu.count <= plan.inputs.host.gpus else f"for {gpus} at full load"
    on = f"for {load}" if plan.prices_load else full
    by_price = f" by price per {one}" if plan.user_prices else ""
    shown = [it for it in (plan.arms if plan.prices_load else ways) if it.tiers]
    priced = {it.tiers: plan.user_prices.get(it.tiers) for it in (*shown, plan.alone)}
    costs = [f"{digits(price)} with {names_text(tiers)}" for tiers, price in priced.items() if price is not None]
    reserve = "with a reserve, " if plan.prices_load else ""
    over = f"{reserve}in {currency} over {counted(plan.inputs.price.years, 'year')} {with_energy(plan)}"
    each = f" A {one} costs {_series(costs)}, {over}." if by_price else ""
    if not ways:
        whys = [(it.name, why_idle(plan, it)) for it in plan.idle_tiers]
        reasons = {why: f"not {TIER_NAMES[name]}, because {why}" for name, why in whys}
        why = f": {', and '.join(reasons.values())}" if len(reasons) > 1 else f", because {next(iter(reasons))}"
        return f"No tier is worth buying {on}{by_price}{why}.{each}"
    texts = [
        names_text(it.tiers)
        + ("" if it.choice.price is None or plan.prices_load else f" for {digits(it.choice.price)} {currency}")
        for it in ways
    ]
    idle = [it.name for it in plan.idle_tiers if not any(it.name in way.tiers for way in ways)]
    instead = ", one of them" if len(ways) > 1 else ""
    not_bought = f" Not: {names_text(idle)}." if idle else ""
    return f"Worth buying {on}{by_price}: {' or '.join(texts)}{instead}.{not_bought}{each}"


def with_energy(plan: Plan) -> str:
    """State whether prices over years contain energy, which they do only if it has a price."""
    return "with energy" if plan.inputs.price.energy_per_kwh else "without energy"


def why_idle(plan: Plan, tier: PlannedTier) -> str:
    """Explain why a tier is not worth adding to the recommended ones: it adds no users, or they cost too much."""
    before = plan.user_prices.get(plan.tiered.tiers)
    if tier.user_price is None or before is None:
        return tier.why_not
    costs = f"{digits(tier.user_price)} {plan.inputs.price.currency} instead of {digits(before)}"
    little = f", which is less than {LEAST_GAIN - 1:.0%} off" if tier.user_price < before else ""
    return f"a {load_unit(plan, one=True)} then costs {costs}{little}"


def request(plan: Plan) -> str:
    """State which GPUs and hosts the requested load needs, with and without tiers, and which tiers are worth buying."""
    given = plan.inputs.gpu.count
    load = in_words(plan, plan.requested_users)
    they, (fits, not_fits) = _they_need(load), ("fits", "does not fit") if load == "1 user" else ("fit", "do not fit")
    ways = sorted(plan.arms, key=lambda it: (not it.tiers, it.need.gpus if it.need else math.inf))
    fit = [names_text(it.tiers) for it in ways if it.need and it.need.gpus <= given]
    more = [it for it in ways if names_text(it.tiers) not in fit]
    needed = [
        f"{counted(it.need.gpus, 'GPU')} in {_hosts_text(it.need.deployment)} with {names_text(it.tiers)}"
        for it in more
        if it.need
    ]
    never = [names_text(it.tiers) for it in more if it.need is None]
    parts = [f"{they} {_series(needed)}"] if needed else []
    if never:
        without = f" with {_series(never, 'or')}" if needed or fit else ""
        most = f"no number of these GPUs up to {COUNT_MAX:,} is enough"
        larger = "larger ones, larger copies (--tp)"
        parts.append(f"{most}{without}, but {larger} or more time ({_time_options(plan)}) may be")
    gpus, model = gpus_text(plan, given), plan.deployment.model
    nothing = ""
    if not (model.token_bytes or any(it.tiers for it in plan.arms)):
        nothing = f"Nothing to offload: {model.name} keeps a constant state of {bytes_text(model.state_bytes)} a user. "
    if not fit:
        conclusion = f"{_conclusion_for_load(plan)}{_if_totals_grow(plan)}"
        return f"{nothing}{load} {not_fits} on {gpus}: {'; '.join(parts)}.{conclusion}"
    least, _, with_tiers = min((it.gpus_least or given, len(it.tiers), it.tiers) for it in ways)
    which = f" with {names_text(with_tiers)}" if len(fit) > 1 else ""
    if with_tiers and plan.alone.need and plan.alone.need_gpus <= given:
        which += f", {plan.alone.gpus_least:,} with {names_text(())}"
    enough = f" ({least:,} would be enough{which})" if least < given else ""
    fitting = f"{load} {fits} on {gpus} with {_series(fit, 'or')}{enough}"
    return f"{nothing}{'; '.join([fitting, *parts])}.{_conclusion_for_load(plan)}"


def _time_options(plan: Plan) -> str:
    """Name the options that relax the limits of time that every load exceeds. If there are none, name all of them."""
    options = {TTFT: "--ttft", TTFT_P95: "--target-p95", TPOT: "target.tpot_s"}
    limits = [it for it in plan.alone.ceiling.serving if it.name in options]
    return _series([options[it.name] for it in [it for it in limits if not it.users] or limits])


def _if_totals_grow(plan: Plan) -> str:
    """State which totals stayed fixed as hosts were added, if scaling them with the hosts would save GPUs."""
    if plan.grown_gpus is None:
        return ""
    given, inputs = plan.given.deployment, plan.given.deployment.inputs
    hosts = -(-plan.grown_gpus // inputs.host.gpus)
    each = of_each_host(inputs, given.hosts)

    def totals(times: int) -> str:
        texts = {
            "host.capacity_bytes": f"{bytes_text(each.host.capacity_bytes * times)} of host memory",
            "disk.count": counted(each.disk.count * times, "drive"),
        }
        return _series([texts[it] for it in given_totals(inputs)])

    gpus = f"{counted(plan.grown_gpus, 'GPU')} in {counted(hosts, 'host')}"
    return (
        f" The given totals stay the same for any number of hosts. With {totals(1)} in each host, and all given tiers, "
        f"{gpus} would be enough: give --tier the totals of {totals(hosts)}."
    )


def gpus_text(plan: Plan, count: int) -> str:
    """Name `count` GPUs of the plan's kind."""
    return f"{count:,} x {plan.inputs.gpu.name}"


def _hosts_text(deployment: Deployment) -> str:
    return "one host" if deployment.hosts == 1 else counted(deployment.hosts, "host")


def names_text(tiers: Collection[str]) -> str:
    """Name the tiers in words, or GPU memory alone if there are none."""
    return _series([TIER_NAMES[it] for it in tiers]) if tiers else f"{TIER_NAMES[GPU]} alone"


def arm_name(variant: Variant) -> str:
    """Return the heading of a variant's column, which names its tiers."""
    return f"with {names_text(variant.tiers)}" if variant.tiers else names_text(())


def _series(texts: Sequence[str], word: str = "and") -> str:
    """Join texts into a list that fits into a sentence."""
    return f" {word} ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def within(plan: Plan) -> str:
    """Put the limits of time into words."""
    target = plan.inputs.target
    limits = [
        *([f"within {target.ttft_s:g} s on average to the first token"] if target.ttft_s else ()),
        *([f"with 95 % of first tokens within {target.ttft_p95_s:g} s"] if target.ttft_p95_s else ()),
        *([f"at {target.tpot_s * 1000:g} ms a token"] if target.tpot_s else ()),
    ]
    return _series(limits)


def heading(plan: Plan) -> str:
    """Name the model, the GPUs and the sizes in one line."""
    inputs, tiered, alone = plan.inputs, plan.tiered.deployment, plan.alone.deployment
    why = _why_size(plan)
    sizes = f"{size_text(tiered)} {arm_name(plan.tiered)}{why}, {size_text(alone)} with {names_text(())}"
    if (tiered.inputs.model.tp, tiered.replicas) == (alone.inputs.model.tp, alone.replicas):
        sizes = f"{size_text(tiered)}{why}"
    if plan.chosen.need and plan.chosen.need.gpus != inputs.gpu.count:
        tiers = f" with {names_text(plan.chosen.tiers)}" if plan.chosen.tiers != plan.tiered.tiers else ""
        sizes += f"; for {shown_load(plan)}{tiers}: {size_text(plan.chosen.need.deployment)}"
    return f"{tiered.model.name} on {gpus_text(plan, inputs.gpu.count)} in {_hosts_text(tiered)}: {sizes}"


def _why_size(plan: Plan) -> str:
    """Explain why the size with tiers is larger than memory requires, and state the users of the best smaller size."""
    if plan.inputs.origin("model.tp") != SEARCHED or len(plan.tiered.choice.sizes) == 1:
        return ""
    smaller = [it for it in plan.tiered.choice.sizes if it.tp < plan.inputs.model.tp]
    if not smaller:
        return " (the fewest GPUs that hold the model)"
    best = max(smaller, key=lambda it: it.users_with_tiers)
    whole = plan.deployment.workload.counted
    fewer = whole(plan.tiered.users) - whole(best.users_with_tiers)
    if not fewer:
        return " (the soonest first token)"
    served = f"{_split_text(best)} serves {in_words(plan, best.users_with_tiers)}"
    return f" ({served}, {load_text(plan, fewer)} fewer)"


def _split_text(size: ModelInputs | PlannedSize) -> str:
    """Explain how the GPUs of a copy share the model."""
    return f"data-parallel attention on {size.tp} GPUs" if size.dp_attention else f"TP {size.tp}"


def size_text(deployment: Deployment) -> str:
    """State how many GPUs share a copy of the model, and how many copies there are."""
    split, copies = _split_text(deployment.inputs.model), deployment.copies
    idle = deployment.inputs.gpu.count - deployment.used_gpus
    text = f"{split}, {'one copy' if copies == 1 else f'{copies:,} copies'}"
    return f"{text}, {counted(idle, 'GPU')} idle" if idle else text


def circumstances(plan: Plan) -> list[tuple[str, str]]:
    """Return the name and the text of each line about the model and the workload."""
    inputs, deployment, load, model = plan.inputs, plan.deployment, plan.deployment.workload, plan.deployment.model
    chunk_tokens = inputs.software.chunk_tokens
    copies = ""
    if model.duplication > 1:
        stored = model.duplication / model.delivered_ratio
        copies = f"; ranks that cannot split it hold {digits(model.duplication)} copies, a tier has {digits(stored)}"
    stored_bytes = model.stored_bytes(load.stored_tokens)
    own = f", {bytes_text(stored_bytes - load.prefix_tokens * model.token_bytes)} without the system prompt"
    conversation = f"{bytes_text(stored_bytes)} a finished conversation{own if load.prefix_tokens else ''}{copies}"
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
                f"{chunk_tokens} tokens, {conversation}"
                if model.token_bytes
                else f"a constant state, {conversation}"
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
        *(
            [("ignored", f"{ignored}, as requested: if they change what is cached, this plan is wrong")]
            if ignored
            else []
        ),
        *(("note", note) for note in load.notes),
    ]


def _traffic(plan: Plan) -> str:
    traffic, load = plan.inputs.traffic, plan.deployment.workload
    rate = f"{digits(load.requests_per_s)} queries/s"
    if not load.has_users:
        times = "" if traffic.load == 1 else f", {traffic.load:g} times its load"
        return f"{rate}, as in {traffic.trace}{times}"
    if plan.deployment.basis.trace:
        return f"{rate} of {traffic.trace}, as from {in_words(plan, plan.requested_users)}"
    return f"{in_words(plan, plan.requested_users)}, a query every {seconds_text(traffic.interval_s)} each: {rate}"


def conclusion(plan: Plan) -> list[str]:
    """Explain in sentences what binds with tiers, what raises that limit, what binds next, and how drives wear."""
    binding, following = plan.binding, plan.tiered.ceiling.next
    over = [it.name for it in plan.tiered.ceiling.serving if plan.used[it.name] > 1]
    # These limits apply to the tiers for a full server. The tiers for the load may differ.
    beside = (
        f" with {names_text(plan.tiered.tiers or (GPU,))}" if over and plan.tiered.tiers != plan.chosen.tiers else ""
    )
    sentences: list[str] = []
    if not plan.deployment.workload.is_any(binding.users):
        load = "One user" if binding.users else "The smallest load"
        sentences.append(f"{load} exceeds a limit: {binding.name} ({binding.meaning}).")
    else:
        raised_by = _raised_by(plan) or f"To raise it, change {binding.raised_by}."
        users = in_words(plan, binding.users)
        sentences.append(f"Binding limit{beside}: {binding.name}, at {users} ({binding.meaning}). {raised_by}")
        sentences += _ttft_parts(plan)
    if following is not None and math.isfinite(following.users):
        sentences.append(f"Next limit: {following.name}, at {in_words(plan, following.users)}.")
    reserves = [it for it in plan.tiered.ceiling.limits if it.is_reserve and it.users < binding.users]
    if reserves:
        first = reserves[0]
        sentences.append(
            f"From {in_words(plan, first.users)} on, {first.name} is short ({first.meaning}), so that loads take "
            f"longer or prompts are computed. To raise it, change {first.raised_by}."
        )
    if over:
        the = f"W{beside[2:]}, the" if beside else "The"
        sentences.append(f"{the} requested load, {in_words(plan, plan.requested_users)}, exceeds: {', '.join(over)}.")
    if plan.deployment.workload.is_any(binding.users):
        sentences += [_idle(plan, it) for it in plan.idle_tiers]
    return [*sentences, *wear(plan.with_drives)]


def _idle(plan: Plan, tier: PlannedTier) -> str:
    """Explain why a tier adds nothing to the recommended ones, and from which interval between queries it would."""
    beside, name = names_text(plan.tiered.tiers or (GPU,)), TIER_NAMES[tier.name]
    adds, are = ("add", "are") if tier.name == "disk" else ("adds", "is")
    pays = tier.pays_from_interval_s
    since = f" With about {time_text(pays)} between a user's queries, {name} {adds} more." if pays else ""
    what = f"{adds} less than {LEAST_GAIN - 1:.0%}" if tier.why_not else f"{are} not worth the price"
    with_it = next(it for it in plan.choices if {*it.tiers} == {*plan.tiered.tiers, tier.name})
    if tier.why_not and with_it.whole_users >= plan.tiered.choice.whole_users * LEAST_GAIN:  # rounding hides it
        what += f" ({with_it.users:,.2f} {load_unit(plan)} instead of {plan.tiered.users:,.2f})"
    return f"Beside {beside}, {name} {what}, because {why_idle(plan, tier)}.{since}"


def wear(plan: Plan) -> list[str]:
    """State how long drives last at the requested load, and which write policy makes them last long enough."""
    drives, target = plan.drives, plan.inputs.target
    if drives is None or drives.life_years >= target.life_years:
        return []
    if drives.write_share is None:
        by = f"a load of at most {in_words(plan, drives.users)}"
    else:
        share = share_text(drives.write_share)
        is_selective = drives.write_policy == "selective"
        by = f"writing KV at its second use, {share} of it" if is_selective else f"a write budget of {share} of new KV"
    if drives.write_share and not is_served(plan.planned_users, drives.users):
        by += f" (then {in_words(plan, drives.users)} within all limits{without_drives(plan)})"
    life = time_text(drives.life_years * YEAR_S)
    deployment = plan.planned_deployment
    if deployment.replicas % (most := deployment.host_engines):
        full_s = drives.life_years * YEAR_S * deployment.replicas / (most * deployment.hosts)
        life += f" on average, and {time_text(full_s)} in a host with {most} of the {deployment.replicas:,} engines"
    return [
        (
            f"At {shown_load(plan)} the drives last {life}. {target.life_years:g} years need {by}, or "
            f"{counted(drives.drives_for_life, 'drive')}."
        )
    ]


def without_drives(plan: Plan) -> str:
    """State how many users the GPUs serve without drives, if a write budget leaves little of the drives' gain."""
    deployment = plan.planned_deployment
    names = {it.name for it in deployment.tiers} - {"disk"}
    users = most_users(deployment.only(names))
    is_little = plan.drives is not None and plan.drives.users < users * LEAST_GAIN
    return f", against {load_text(plan, users)} without drives" if is_little else ""


def shown_load(plan: Plan) -> str:
    """Return the planned load, followed by the number of GPUs if that is not the given number.

    The planned load is the requested one or, if no number of GPUs can serve that, the most that the given GPUs
    complete.
    """
    gpus = plan.chosen.need.gpus if plan.chosen.need else plan.inputs.gpu.count
    on = f" on {gpus_text(plan, gpus)}" if gpus != plan.inputs.gpu.count else ""
    return f"{in_words(plan, plan.planned_users)}{on}"


def _raised_by(plan: Plan) -> str:
    """State how many users are served if one of the most influential hardware and software inputs is increased."""
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
    """List the parts of the time to first token, if that limit binds."""
    point = plan.tiered.ceiling.point
    if plan.binding.name not in FIRST_TOKEN or not math.isfinite(point.ttft_s):
        return []
    parts = {
        "waiting for the GPU": point.wait_s,
        "loading": point.load_s,
        "computing": point.ttft_s - point.wait_s - point.load_s,
    }
    texts = [f"{time_text(seconds)} {name}" for name, seconds in parts.items() if seconds]
    return [f"The mean of {digits(point.ttft_s)} s there: {', '.join(texts)}."]


def load_unit(plan: Plan, *, one: bool = False) -> str:
    """Return the unit of this plan's loads."""
    names = ("user", "users") if plan.deployment.workload.has_users else ("query/s", "queries/s")
    return names[0 if one else 1]


def in_words(plan: Plan, load: float) -> str:
    """Return a load with its unit: ``1 user``, ``53 users``, ``1.5 queries/s``."""
    text = load_text(plan, load)
    return f"{text} {load_unit(plan, one=text == '1')}"


def load_text(plan: Plan, load: float) -> str:
    """Return a load in whole users, or in queries per second."""
    return count_text(load) if plan.deployment.workload.has_users or math.isinf(load) else digits(load)
