"""A plan as text: summary, tables and conclusion, for the terminal and the HTML report."""

import math
from collections.abc import Callable, Iterator

from kvtier.config.value_types import seconds_text
from kvtier.plan.cost import Cost
from kvtier.plan.inputs import SETTINGS, ModelInputs
from kvtier.plan.limits import TTFT, in_users
from kvtier.plan.plan import MORE_GPUS, DriveLoad, Plan, PlannedTier, Variant
from kvtier.plan.resolve import SEARCHED, Deployment
from kvtier.plan.search import PlannedSize
from kvtier.plan.sensitivity import STEP, InputSensitivity
from kvtier.plan.worth import LEAST_GAIN, TIER_NAMES
from kvtier.report.format import (
    NONE,
    YEAR_S,
    bytes_text,
    count_text,
    digits,
    rate_text,
    ratio_text,
    share_text,
    time_text,
)
from kvtier.report.table import Table

SENSITIVITIES = 12
"""Inputs in the table of sensitivities."""
_HARDWARE = ("gpu.", "host.", "disk.", "shared.", "software.")


def verdict(plan: Plan) -> str:
    """The finding in one line: what tiers change, or why they change nothing."""
    alone, tiered, load = plan.alone.users, plan.tiered.users, plan.deployment.workload
    unit, within = load_unit(plan), _within(plan)
    before, after = load_text(plan, alone), load_text(plan, tiered)
    if plan.is_overloaded:
        return _overload(plan)
    within += f" (95 % within {time_text(plan.tiered.ceiling.point.ttft_within_s(0.95))})"
    if not load.is_any(alone):
        return f"Only with tiers is the first token in time: {after} {unit} {within}{_of_which(plan)}"
    if tiered < alone * LEAST_GAIN:
        gain = f"No gain from tiers above {LEAST_GAIN - 1:.0%}"
        return f"{gain}: {after} {unit} {within}, {before} with GPU memory alone; {_no_gain(plan)}"
    return f"Tiers serve {after} {unit} {within}, {before} without ({ratio_text(tiered, alone)}){_of_which(plan)}"


def _overload(plan: Plan) -> str:
    """The requested load does not fit: how many users do, and how many GPUs would serve it."""
    load, inputs = plan.deployment.workload, plan.inputs
    requested = f"{load_text(plan, plan.requested_users)} {load_unit(plan)}"
    start = f"{requested} do not fit on {inputs.gpu.count} x {inputs.gpu.name}"
    if not load.is_any(max(plan.alone.users, plan.tiered.users)):
        few = "less than one user" if plan.tiered.users else "not one request"
        enough = f"{plan.more_gpus} of these GPUs would serve them, with the given tiers"
        if plan.more_gpus is None:
            enough = f"nor would {MORE_GPUS[-1]} times the GPUs: larger ones, or more time (--ttft), may"
        return f"{start}: {few} is {_within(plan)}, with or without tiers; {enough}"
    after, before = load_text(plan, plan.tiered.users), load_text(plan, plan.alone.users)
    fit = f"{before} do {_within(plan)}, with or without tiers"
    if plan.tiered.users >= plan.alone.users * LEAST_GAIN:
        fit = f"{after} do {_within(plan)} with {_kept(plan)}, {before} without"
    with_tiers, without = (_optional(it.gpus_least, count_text) for it in (plan.tiered, plan.alone))
    return f"{start}: {fit}; {requested} need {with_tiers} GPUs with tiers, {without} without"


def _kept(plan: Plan) -> str:
    return " and ".join(TIER_NAMES[it.name] for it in plan.deployment.tiers)


def _of_which(plan: Plan) -> str:
    """The recommended tiers, where others are not worth it."""
    idle = " and ".join(TIER_NAMES[it.name] for it in plan.idle_tiers)
    return f"; that is with {_kept(plan)}, not worth it: {idle}" if idle else ""


def _within(plan: Plan) -> str:
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
    sizes = f"{size_text(tiered)} with tiers, {size_text(alone)} without"
    if (tiered.inputs.model.tp, tiered.replicas) == (alone.inputs.model.tp, alone.replicas):
        sizes = size_text(tiered)
    chosen = ", which serves most users" if inputs.origin("model.tp") == SEARCHED else ""
    hosts = "one host" if tiered.hosts == 1 else f"{tiered.hosts} hosts"
    return f"{tiered.model.name} on {inputs.gpu.count} x {inputs.gpu.name} in {hosts}: {sizes}{chosen}"


def size_text(deployment: Deployment) -> str:
    """The GPUs of a copy of the model, and the copies."""
    model, copies = deployment.inputs.model, deployment.copies
    split = f"data-parallel attention on {model.tp} GPUs" if model.dp_attention else f"TP {model.tp}"
    return f"{split}, {'one copy' if copies == 1 else f'{copies} copies'}"


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
    lines = [
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
    ]
    if load.burst:
        lines.append(("bursts", f"the busiest 10 s of the trace have {load.burst:.1f} times its average"))
    return lines + [("note", note) for note in load.notes]


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
    if not all(plan.deployment.workload.is_any(it.users) for it in variants.values()):
        return []
    least = ", ".join(f"{it.gpus_least} {name}" for name, it in variants.items())
    needed = ", ".join(f"{it.gpus_needed} {name}" for name, it in variants.items())
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
        each = digits((after - before) / more)
        sentences.append(
            f"The {what} cost {digits(after - before)} {currency}, {each} for each of {digits(more)} {unit} more."
        )
    found = plan.same_money
    if found is not None:
        host, drives = load_text(plan, found.users_host), load_text(plan, found.users_drives)
        sentences.append(
            f"For {digits(found.money)} {currency}, {bytes_text(found.host_bytes)} of host memory alone serve {host} "
            f"{unit}, and {found.drives} drives alone {drives}."
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
    load, life = _served(plan, plan.tiered), time_text(drives.life_years * YEAR_S)
    sentence = (
        f"At {load} the drives last {life}. {target.life_years:g} years need {by}, or {drives.drives_for_life} drives."
    )
    price, years = plan.inputs.price, plan.inputs.price.years
    worn = plan.inputs.disk.count * price.drive * (years / drives.life_years - 1)
    if worn > 0:
        sentence += (
            f" Drives that wear out within {years:g} years cost {digits(worn)} {price.currency} more, in no price here."
        )
    return [sentence]


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


def _served(plan: Plan, variant: Variant) -> str:
    """The load that the GPUs complete of the requested one."""
    return f"{load_text(plan, in_users(plan.deployment, variant.served_per_s))} {load_unit(plan)}"


def load_unit(plan: Plan) -> str:
    """Unit of loads in this plan."""
    return "users" if plan.deployment.workload.has_users else "queries/s"


def load_text(plan: Plan, load: float) -> str:
    """A load in whole users, or in queries a second."""
    return count_text(load) if plan.deployment.workload.has_users or math.isinf(load) else digits(load)


def tables(plan: Plan) -> Iterator[Table]:
    """Every table of a plan, in reading order."""
    if len(plan.sizes) > 1:
        yield _sizes(plan)
    yield _gains(plan)
    yield _tiers(plan)
    if plan.given.deployment.tiers:
        yield _worth(plan)
    if plan.drives is not None:
        yield _drives(plan, plan.drives)
    yield _capacities(plan)
    yield _limits(plan)
    if plan.break_evens:
        yield _break_evens(plan)
    if plan.sensitivities:
        yield _sensitivities(plan)


def _gains(plan: Plan) -> Table:
    currency, unit, missing = plan.inputs.price.currency, load_unit(plan), plan.tiered.cost.missing
    requested = f"{load_text(plan, plan.requested_users)} {unit}"

    def row(
        name: str, of: Callable[[Variant], float | None], text: Callable[[float], str] = digits
    ) -> tuple[str, str, str, str]:
        before, after = of(plan.alone), of(plan.tiered)
        return name, _optional(before, text), _optional(after, text), ratio_text(after, before)

    def load(value: float) -> str:
        return load_text(plan, value)

    def most(
        name: str, of: Callable[[Cost], float | None], text: Callable[[float], str] = digits
    ) -> tuple[str, str, str, str]:
        return row(f"{name} *", lambda it: of(it.cost_at_most) if it.cost_at_most else None, text)

    alone, tiered, used = plan.alone.point, plan.tiered.point, plan.inputs.target.gpu_used
    rows = [
        ("GPUs of a copy", *(_size_name(it.deployment.inputs.model) for it in (plan.alone, plan.tiered)), ""),
        row(f"{unit} {_within(plan)}", lambda it: it.users, load),
        row("95 % of first tokens within *", lambda it: it.ceiling.point.ttft_within_s(0.95), time_text),
        row(f"{unit} at which throughput saturates", lambda it: it.throughput_users, load),
        row(f"time to first token at {requested}", lambda it: it.ttft_s, time_text),
        row(f"95 % of first tokens within, at {requested}", lambda it: it.ttft_p95_s, time_text),
        row(f"time per output token at {requested}", lambda it: it.point.tpot_s, time_text),
        (f"prompt tokens not computed at {requested}", share_text(alone.hit_rate), share_text(tiered.hit_rate), ""),
        row(f"output tokens/s at {requested}", lambda it: it.output_tokens_per_s),
        row(f"GPUs for {requested}", lambda it: it.gpus_least, count_text),
        row(f"the same at {used:.0%} (target.gpu_used)", lambda it: it.gpus_needed, count_text),
        most("power", lambda it: it.watts, lambda it: f"{it / 1000:,.2f} kW"),
        row(
            "power of a user *",
            lambda it: _of_user(it, lambda cost: cost.watts),
            lambda it: f"{digits(it)} W",
        ),
        most("output tokens/s per watt", lambda it: it.tokens_per_s_per_watt),
    ]
    if plan.tiered.cost.per_hour is not None:
        rows += [
            most(f"per hour, {currency}", lambda it: it.per_hour),
            row(f"per hour and user, {currency} *", lambda it: _of_user(it, lambda cost: cost.per_hour)),
            most(f"per million output tokens, {currency}", lambda it: it.per_million_output_tokens),
            most(f"per million tokens in and out, {currency}", lambda it: it.per_million_tokens),
            most(f"output tokens/s for 1,000 {currency}", lambda it: (it.tokens_per_s_per_price or 0.0) * 1000),
        ]
    note = f"*: each at its own most {unit} within the limits, {load(plan.alone.users)} and {load(plan.tiered.users)}."
    note += f" Costs need prices as inputs: {', '.join(missing)}." if missing else ""
    name = f"with {_kept(plan)}" if plan.idle_tiers and plan.deployment.tiers else "with tiers"
    return Table(("", "GPU memory alone", name, "ratio"), rows, numeric=3, title="Gains of tiers", note=note)


def _of_user(variant: Variant, of: Callable[[Cost], float | None]) -> float | None:
    """A cost at the highest load within the limits, divided by its users."""
    whole = of(variant.cost_at_most) if variant.cost_at_most else None
    return whole / variant.users if whole else None


def _sizes(plan: Plan) -> Table:
    planned = {"GPU memory alone": plan.alone, "with tiers": plan.tiered}
    rows = [
        (
            _size_name(size),
            str(size.copies),
            load_text(plan, size.users_without_tiers),
            load_text(plan, size.users_with_tiers),
            ", ".join(
                name for name, it in planned.items() if _size_name(it.deployment.inputs.model) == _size_name(size)
            ),
        )
        for size in plan.sizes
    ]
    return Table(
        ("GPUs of a copy", "copies", *planned, "planned for"),
        rows,
        numeric=4,
        title="Users by size",
        note=f"{load_unit(plan).capitalize()} {_within(plan)}. The exchange between GPUs takes no time here beyond "
        "gpu.flops_share: measure that share at your size.",
    )


def _size_name(size: ModelInputs | PlannedSize) -> str:
    return f"{'DP attention' if size.dp_attention else 'TP'} {size.tp}"


def _worth(plan: Plan) -> Table:
    unit, now, lower = load_unit(plan), plan.given, plan.tiers[1:]
    whole, found = load_text(plan, now.users), share_text(sum(it.hit_share for it in lower))
    rows = [
        (
            TIER_NAMES[it.name],
            share_text(it.hit_share),
            load_text(plan, it.worth.users_alone),
            load_text(plan, it.worth.without.users),
            time_text(it.worth.without.ttft_s),
            digits(it.worth.without.output_tokens_per_s),
            "yes" if it.worth.worth_it else "no",
        )
        for it in lower
    ]
    rows.append(("(with all)", found, NONE, whole, time_text(now.ttft_s), digits(now.output_tokens_per_s), ""))
    return Table(
        ("tier", f"hits at {whole} {unit}", "alone", "without it", "TTFT", "tokens/s", "worth it"),
        rows,
        numeric=6,
        title="Each tier's own worth",
        note=f"{unit.capitalize()} within the limits at the planned size, with the tier alone and without it. A tier "
        f"is worth it if the plan without it is {LEAST_GAIN - 1:.0%} worse in {unit}; or, at a requested load within "
        "the limits, in TTFT or tokens/s. Of two that can stand in for each other, the dearer, or else the lower, is "
        "not; the other is judged without it.",
    )


def _optional(value: float | None, text: Callable[[float], str]) -> str:
    return NONE if value is None else text(value)


def _tiers(plan: Plan) -> Table:
    rows = [
        (
            TIER_NAMES[it.name],
            bytes_text(it.capacity_bytes),
            f"{it.capacity_tokens / 1e6:,.2f} M",
            count_text(it.sessions),
            time_text(it.residence_s),
            share_text(it.found),
            rate_text(it.read_bytes_per_s) if it.provided_bytes_per_s else NONE,
            rate_text(it.write_bytes_per_s) if it.provided_bytes_per_s else NONE,
        )
        for it in plan.tiers
    ]
    return Table(
        ("tier", "for KV", "tokens", "sessions", "residence", "hits", "read", "written"),
        rows,
        numeric=7,
        title=f"Tiers at {_served(plan, plan.given)}",
        note="All that are given. Residence: how long unused KV survives. Hits: share of all prompt tokens. All are "
        "averages at this load.",
    )


def _drives(plan: Plan, drives: DriveLoad) -> Table:
    disk, target = plan.inputs.disk, plan.inputs.target
    average, burst, wanted = (
        rate_text(rate) for rate in (drives.read_bytes_per_s, drives.read_burst_bytes_per_s, drives.wanted_bytes_per_s)
    )
    rows = [
        (
            "reads",
            f"{average} on average, {burst} in bursts (x {target.burst:g})",
            f"{rate_text(drives.provided_bytes_per_s)} by {disk.count} drives",
        ),
        (
            "chunks",
            f"{digits(drives.chunks_read_per_s)} a second of {bytes_text(drives.chunk_bytes)}",
            f"{bytes_text(disk.command_bytes)} a command",
        ),
        (
            "queue depth",
            f"{digits(drives.depth)} commands on average, {digits(drives.depth_burst)} in bursts",
            f"{digits(drives.depth / disk.count)} for each drive",
        ),
        (
            "time",
            f"{share_text(drives.used)} of the drives' time, bursts and writes",
            f"needs {drives.drives_for_bandwidth} drives",
        ),
        (
            "writes",
            f"{bytes_text(drives.written_bytes_per_day)} a day, {digits(drives.writes_per_day)} drive writes a day",
            f"rated for {drives.rated_writes_per_day:g} a day for {disk.rated_years:g} years",
        ),
        (
            "life",
            time_text(drives.life_years * YEAR_S),
            f"{target.life_years:g} years need {drives.drives_for_life} drives",
        ),
        (
            "life by policy",
            f"second use: {time_text(min(drives.life_selective_years * YEAR_S, 1e4 * YEAR_S))}",
            f"{target.life_years:g} years allow {share_text(drives.write_share)} of new KV",
        ),
    ]
    is_slow = drives.wanted_bytes_per_s > 1.01 * drives.read_bytes_per_s
    note = f"All hits are {wanted}; the rest computes faster than it loads." if is_slow else ""
    return Table(("", f"at {_served(plan, plan.tiered)}", "provided"), rows, title="Drives", note=note)


def _capacities(plan: Plan) -> Table:
    rows = [
        (
            f"{it.hit_share:.0%}" + (" (target)" if it.hit_share == plan.inputs.target.hit_share else ""),
            share_text(it.hit_rate),
            time_text(it.residence_s),
            f"{it.tokens / 1e6:,.2f} M",
            bytes_text(it.bytes),
            rate_text(it.read_bytes_per_s),
            rate_text(it.read_burst_bytes_per_s),
        )
        for it in plan.capacities
    ]
    return Table(
        ("of possible hits", "hit rate", "residence", "tokens", "KV", "read", "in bursts"),
        rows,
        numeric=6,
        title="Capacity for a share of the possible hits",
        note=f"At {load_text(plan, plan.requested_users)} {load_unit(plan)}, GPU memory included; reads as if it had "
        "no hits.",
    )


def _limits(plan: Plan) -> Table:
    ranks = {it.name: rank for it, rank in zip(plan.tiered.ceiling.serving, ("binds", "next"), strict=False)}
    rows = [
        (
            limit.name,
            limit.meaning,
            load_text(plan, limit.users) if math.isfinite(limit.users) else "not met",
            share_text(plan.used[limit.name]),
            "reserve" if limit.is_reserve else ranks.get(limit.name, "") if math.isfinite(limit.users) else "",
        )
        for limit in plan.tiered.ceiling.limits
    ]
    columns = ("limit", "meaning", f"met at {load_unit(plan)}", "used at load", "")
    note = "Reserve: bandwidth for bursts. Where it is short, loads take longer or prompts are computed."
    return Table(columns, rows, numeric=3, title="Limits, with tiers", note=note)


def _break_evens(plan: Plan) -> Table:
    rows = [
        (
            TIER_NAMES[it.tier],
            it.instead_of,
            f"{time_text(it.per_price_ratio_s)} x price of a {it.saved_unit} / {it.unit}",
            _optional(it.residence_s, time_text),
        )
        for it in plan.break_evens
    ]
    return Table(
        ("in", "instead of", "up to", "with your prices"),
        rows,
        numeric=1,
        title="How long KV is worth keeping",
        note="The five-minute rule: keep KV that is reused within this time.",
    )


def _sensitivities(plan: Plan) -> Table:
    planned = plan.sensitivities[0].users

    def tried(it: InputSensitivity, value: float | None, users: float | None) -> str:
        if value is None or users is None:
            return NONE
        # Whole numbers move by whole steps, and GPUs by whole copies of the model.
        is_other = not math.isclose(abs(value / it.value - 1), STEP)
        return load_text(plan, users) + (f" (at {SETTINGS[it.name].kind.show(value)})" if is_other else "")

    rows = [
        (
            it.name,
            SETTINGS[it.name].kind.show(it.value),
            tried(it, it.lower, it.users_lower),
            tried(it, it.higher, it.users_higher),
        )
        for it in plan.sensitivities[:SENSITIVITIES]
        if it.swing > 0.001
    ]
    return Table(
        ("input", "value", f"-{STEP:.0%}", f"+{STEP:.0%}"),
        rows,
        numeric=2,
        title="Sensitivity",
        note=f"{load_unit(plan).capitalize()} within every limit, with one input a fifth lower or higher, or at the "
        f"value in brackets, at the planned size. As planned: {load_text(plan, planned)}.",
    )


def assumptions(plan: Plan) -> Table:
    """Name, value, origin and meaning of every input in use."""
    rows = [
        (name, setting.kind.show(plan.inputs.value(name)), plan.inputs.origin(name), setting.help)
        for name, setting in SETTINGS.items()
        if _is_used(plan, name)
    ]
    return Table(("input", "value", "from", "meaning"), rows, title="Assumptions")


def _is_used(plan: Plan, name: str) -> bool:
    section, _, key = name.partition(".")
    inputs = plan.inputs
    if not inputs.origin(name).startswith("default"):
        return True
    if section == "traffic" and plan.deployment.basis.trace:
        has_users = plan.deployment.workload.has_users
        by_users = {"turns", "interval_s", "interval_cv"} if has_users else set[str]()
        return key in {"trace", "trace_window_s", "load", "arrivals_cv2", "reuse", *by_users}
    is_used = {
        "host": inputs.host.capacity_bytes,
        "disk": inputs.disk.count,
        "shared": inputs.shared.capacity_bytes,
        "price": inputs.value(name),
    }
    return bool(is_used.get(section, True)) and name not in {"traffic.trace", "traffic.trace_window_s", "traffic.load"}
