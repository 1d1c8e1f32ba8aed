"""What `kvtier plan` shows: the plan's tables, and its charts with their curves."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from kvtier.plan.answer import (
    circumstances,
    conclusion,
    heading,
    kept,
    load_text,
    load_unit,
    served_text,
    verdict,
    whole,
    within,
)
from kvtier.plan.cost import Cost, cost
from kvtier.plan.inputs import SETTINGS, ModelInputs
from kvtier.plan.limits import in_users
from kvtier.plan.plan import DriveLoad, Plan, Variant
from kvtier.plan.queueing import OperatingPoint, fetch_s, operate, prefill_s
from kvtier.plan.search import PlannedSize
from kvtier.plan.sensitivity import STEP, InputSensitivity
from kvtier.plan.settings import settings_toml
from kvtier.plan.worth import LEAST_GAIN, TIER_NAMES
from kvtier.report.chart import DASHED, Axis, Chart, Charts, Curve, Rule
from kvtier.report.format import (
    NONE,
    YEAR_S,
    bytes_text,
    count_text,
    digits,
    rate_text,
    ratio_text,
    share_text,
    short_count,
    time_text,
)
from kvtier.report.report import Report, Section
from kvtier.report.table import Table

POINTS = 120
CONTEXTS = (8_192, 32_768, 131_072, 1_048_576)
SENSITIVITIES = 12
"""Inputs in the table of sensitivities."""
LIMITS = (
    (
        "Limits are of mean times. The 95th percentile assumes an exponential tail of the waiting time, and no other "
        "delay."
    ),
    (
        "Exchanges between GPUs do not overlap with computing, and every layer of a mixture counts as one of experts. "
        "Half of the published times that set no input are met within 8 %, and all within 0.6 to 1.25 of them."
    ),
    (
        "One queue for each copy of the model. Chunked prefill, batching and preemption are not simulated; their cost "
        "is in gpu.flops_share and gpu.memory_rate_share, which you can measure."
    ),
    "Users stay with their copy of the model, so GPU memories add up; all copies share the tiers.",
    (
        "LRU by its residence time. Against exact LRU on public traces that is off by one or two points of hit rate; a "
        "policy that knows which conversations have ended does better."
    ),
    "Every computed token is written. Drives wear as rated; a drive in a data centre may do better or worse.",
)


def plan_report(plan: Plan, *, shows_inputs: bool = False) -> Report:
    """What a plan found.

    Args:
        plan: the plan.
        shows_inputs: a terminal shows every input in use, too; a page always has them.
    """
    inputs = _assumptions(plan)
    defaults = sum(row[2].startswith("default") for row in inputs.rows)
    count = ("inputs", f"{len(inputs.rows)}, {defaults} of them by default; --show-inputs lists them")
    facts = [Table(("", ""), [*circumstances(plan), count], title="Model and traffic")]
    sources = [f"source of {name}: {source}; read {date}" for name, source, date in plan.deployment.sources]
    return Report(
        command="kvtier plan",
        answer=verdict(plan),
        sections=[
            Section(texts=[heading(plan)], charts=partial(_answer_chart, plan), notes=conclusion(plan)),
            Section(tables=list(tables(plan))),
            Section(charts=partial(_other_charts, plan), is_page_only=True),
            Section(tables=facts),
            Section(notes=sources, tables=[inputs], is_page_only=not shows_inputs),
            Section(title="Not modelled", notes=LIMITS, is_page_only=True),
            Section(title="Settings of kvtier", code=settings_toml(plan)),
        ],
    )


def _answer_chart(plan: Plan) -> Charts:
    limit_s = plan.inputs.target.ttft_s
    met = [
        Curve(
            x=[it.users_at_ttft], y=[limit_s], colour=colour, dash="", marker="o",
            note=load_text(plan, it.users_at_ttft),
        )
        for colour, it in (("alone", plan.alone), ("tiered", plan.tiered))
    ]  # fmt: skip
    return {
        "ttft": Chart(
            heading="Time to first token against the load",
            marks=[*ttft_curves(plan), Rule(at=limit_s), *met],
            x=Axis(label=load_unit(plan), least=0),
            y=Axis(label="mean time to first token, s", least=0, most=3 * limit_s),
            caption="Dashed: the limit; a dot is where the mean meets it. Curves end where queues grow without bound.",
        )
    }


def _other_charts(plan: Plan) -> Charts:
    computed, *fetched = single_prompt_curves(plan)
    crossed = [(it, place) for it in fetched if (place := crossing(computed, it)) is not None]
    since = "; ".join(f"{it.label} from {it.x[place]:,.0f} tokens on" for it, place in crossed)
    floor = min(min(it.y) for it in (computed, *fetched))
    falls = [
        Curve(x=[it.x[place]] * 2, y=[floor, it.y[place]], colour=it.colour, dash=":", width=1.0)
        for it, place in crossed
    ]
    held = capacity_curves(plan)
    room = [
        Curve(
            x=held[0].x, y=[it.capacity_bytes] * 2, colour=it.name, dash=DASHED, width=1.4,
            label=f"{TIER_NAMES[it.name]}, {bytes_text(it.capacity_bytes)}",
        )
        for it in plan.tiers
    ]  # fmt: skip
    costs = cost_curves(plan)
    price = plan.inputs.price.currency if _has_prices(plan) else "kWh"
    return {
        "capacity": Chart(
            heading="KV against conversations and context",
            marks=[*held, *room],
            x=Axis(label="conversations held", is_log=True, text=short_count),
            y=Axis(label="KV", is_log=True, text=bytes_text),
            caption="Each conversation has its own KV. Dashed: the capacity of each tier. Both axes are logarithmic.",
        ),
        "prompt": Chart(
            heading="One prompt: computed, or fetched",
            marks=[computed, *fetched, *falls],
            x=Axis(label="tokens of the prompt", is_log=True, text=short_count),
            y=Axis(label="time to its KV", is_log=True, text=time_text),
            caption="One prompt whose KV is all stored, on an idle machine."
            + (f" It is faster {since}." if since else ""),
        ),
        "cost": Chart(
            heading=f"{'Cost' if _has_prices(plan) else 'Energy'} of a million output tokens",
            marks=costs,
            x=Axis(label=load_unit(plan), least=0),
            y=Axis(label=f"{price} for a million output tokens", least=0, most=8 * min(min(it.y) for it in costs)),
            caption="The same machines under growing load: a curve ends where throughput saturates.",
        ),
    }


def capacity_curves(plan: Plan) -> list[Curve]:
    """Bytes of KV against users, for several contexts that the model allows."""
    model = plan.deployment.model
    most = model.tokens_max or CONTEXTS[-1]
    contexts = [it for it in CONTEXTS if it <= most] or [most]
    last = max(10_000.0, 10 * plan.binding.users, 10 * plan.requested_users)
    users = (1.0, 10.0 ** math.ceil(math.log10(min(last, 1e7))))
    return [
        Curve(
            label=f"{tokens // 1024:,}k tokens",
            colour="tiered",
            alpha=0.35 + 0.65 * number / len(contexts),
            x=users,
            y=[model.stored_bytes(tokens) * it for it in users],
        )
        for number, tokens in enumerate(contexts, 1)
    ]


def single_prompt_curves(plan: Plan) -> list[Curve]:
    """Seconds to the KV of one prompt on an idle machine: computed, or fetched from each tier."""
    deployment = plan.given.deployment
    least, most = 1_000.0, min(deployment.model.tokens_max or CONTEXTS[-1], CONTEXTS[-1])
    tokens = tuple(least * (most / least) ** (step / (POINTS - 1)) for step in range(POINTS))
    computed = Curve(
        label="computed", colour="computed", x=tokens, y=tuple(prefill_s(deployment, it, it) for it in tokens)
    )
    return [computed] + [
        Curve(
            label=f"fetched from {TIER_NAMES[tier.name]}",
            colour=tier.name,
            x=tokens,
            y=tuple(fetch_s(deployment, tier.name, it) for it in tokens),
        )
        for tier in deployment.tiers
    ]


def crossing(computed: Curve, fetched: Curve) -> int | None:
    """The first point of `fetched` from which on it is faster; None when it always or never is."""
    faster = [fetch < compute for fetch, compute in zip(fetched.y, computed.y, strict=True)]
    return faster.index(True) if True in faster and not faster[0] else None


def ttft_curves(plan: Plan) -> list[Curve]:
    """Mean time to first token against the load, up to where queues grow without end."""
    return [_variant_curve(plan, variant, lambda point: point.ttft_s) for variant in (plan.alone, plan.tiered)]


def cost_curves(plan: Plan) -> list[Curve]:
    """A million output tokens against the load: in money where prices are given, else in kWh."""

    def of(point: OperatingPoint) -> float:
        at_load = cost(plan.deployment, point, served_per_s=point.requests_per_s)
        return at_load.per_million_output_tokens or 1e6 / at_load.tokens_per_s_per_watt / 3.6e6

    curves = [_variant_curve(plan, variant, of) for variant in (plan.alone, plan.tiered)]
    return [replace(it, note=f"{it.y[-1]:.3g}") for it in curves]


def _variant_curve(plan: Plan, variant: Variant, of: Callable[[OperatingPoint], float]) -> Curve:
    most = variant.throughput_per_s * 0.9999
    rates = [most * (step + 1) / POINTS for step in range(POINTS)]
    return Curve(
        label="with tiers" if variant.with_tiers else "GPU memory alone",
        colour="tiered" if variant.with_tiers else "alone",
        x=tuple(in_users(plan.deployment, rate) for rate in rates),
        y=tuple(of(operate(variant.deployment, rate, with_tiers=variant.with_tiers)) for rate in rates),
    )


def _has_prices(plan: Plan) -> bool:
    return plan.tiered.cost.per_hour is not None


def tables(plan: Plan) -> Iterator[Table]:
    """The tables of a plan's figures, in reading order."""
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

    def most(
        name: str, of: Callable[[Cost], float | None], text: Callable[[float], str] = digits
    ) -> tuple[str, str, str, str]:
        return row(f"{name} *", lambda it: of(it.cost_at_most) if it.cost_at_most else None, text)

    alone, tiered, used = plan.alone.point, plan.tiered.point, plan.inputs.target.gpu_used
    rows = [
        ("GPUs of a copy", *(_size_name(it.deployment.inputs.model) for it in (plan.alone, plan.tiered)), ""),
        row(f"{unit} {within(plan)}", lambda it: whole(plan, it.users), partial(load_text, plan)),
        row(
            "95 % of first tokens within *",
            lambda it: it.ceiling.point.ttft_within_s(0.95) if it.cost_at_most else None,
            time_text,
        ),
        row(
            f"{unit} at which throughput saturates",
            lambda it: whole(plan, it.throughput_users),
            partial(load_text, plan),
        ),
        row(f"time to first token at {requested}", lambda it: it.ttft_s, time_text),
        row(f"95 % of first tokens within, at {requested}", lambda it: it.ttft_p95_s, time_text),
        row(f"time per output token at {requested}", lambda it: it.point.tpot_s, time_text),
        (f"prompt tokens not computed at {requested}", share_text(alone.hit_rate), share_text(tiered.hit_rate), ""),
        row(f"output tokens/s at {requested}", lambda it: it.output_tokens_per_s),
        row(f"GPUs for {requested}, at the best size", lambda it: it.gpus_least, count_text),
        row(f"the same at {used:.0%} (target.gpu_used)", lambda it: it.gpus_needed, count_text),
        most("power", lambda it: it.watts, lambda it: f"{it / 1000:,.2f} kW"),
        row(
            "power of a user *",
            lambda it: _of_user(plan, it, lambda cost: cost.watts),
            lambda it: f"{digits(it)} W",
        ),
        most("output tokens/s per watt", lambda it: it.tokens_per_s_per_watt),
    ]
    if plan.tiered.cost.per_hour is not None:
        rows += [
            most(f"per hour, {currency}", lambda it: it.per_hour),
            row(f"per hour and user, {currency} *", lambda it: _of_user(plan, it, lambda cost: cost.per_hour)),
            most(f"per million output tokens, {currency}", lambda it: it.per_million_output_tokens),
            most(f"per million tokens in and out, {currency}", lambda it: it.per_million_tokens),
            most(f"output tokens/s for 1,000 {currency}", lambda it: (it.tokens_per_s_per_price or 0.0) * 1000),
        ]
    loads = f"{load_text(plan, plan.alone.users)} and {load_text(plan, plan.tiered.users)}"
    note = f"*: each at its own most {unit} within the limits, {loads}."
    note += f" Costs need prices as inputs: {', '.join(missing)}." if missing else ""
    if _size_name(plan.alone.deployment.inputs.model) != _size_name(plan.tiered.deployment.inputs.model):
        note += " Each column is of its own size, so a row compares sizes, too."
    name = f"with {kept(plan)}" if plan.idle_tiers and plan.deployment.tiers else "with tiers"
    return Table(("", "GPU memory alone", name, "ratio"), rows, numeric=3, title="Gains of tiers", note=note)


def _of_user(plan: Plan, variant: Variant, of: Callable[[Cost], float | None]) -> float | None:
    """A cost at the highest load within the limits, divided by its users."""
    total = of(variant.cost_at_most) if variant.cost_at_most else None
    return total / whole(plan, variant.users) if total else None


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
        note=f"{load_unit(plan).capitalize()} {within(plan)}. Among sizes that serve nearly as many (95 %), the "
        "smallest is planned; more GPUs of a copy exchange more.",
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
        title=f"Tiers at {served_text(plan, plan.given)}",
        note="All that are given. Residence: how long unused KV survives. Hits: share of all prompt tokens. All are "
        "averages at this load; the drives' table is of the tiers that are worth it.",
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
    return Table(("", f"at {served_text(plan, plan.tiered)}", "provided"), rows, title="Drives", note=note)


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
        "no hits. The hit rate counts the shared system prompt, the reads do not.",
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


def _assumptions(plan: Plan) -> Table:
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
        return key in {"trace", "trace_window_s", "trace_time_unit", "load", "arrivals_cv2", "reuse", *by_users}
    is_used = {
        "host": inputs.host.capacity_bytes,
        "disk": inputs.disk.count,
        "shared": inputs.shared.capacity_bytes,
        "price": inputs.value(name),
    }
    return bool(is_used.get(section, True)) and not name.startswith(("traffic.trace", "traffic.load"))
