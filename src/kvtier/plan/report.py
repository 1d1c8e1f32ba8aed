"""What `kvtier plan` shows: the plan's tables, and its charts with their curves."""

import math
from collections.abc import Callable, Iterator
from functools import partial

from kvtier.plan.answer import (
    circumstances,
    conclusion,
    gpus_text,
    heading,
    in_words,
    load_text,
    load_unit,
    names_text,
    request,
    shown_load,
    verdict,
    whole,
    within,
)
from kvtier.plan.cost import Cost, cost
from kvtier.plan.inputs import SETTINGS, ModelInputs
from kvtier.plan.limits import in_users
from kvtier.plan.plan import DriveLoad, Need, Plan, Variant, capacity
from kvtier.plan.queueing import GPU, OperatingPoint, fetch_s, operate, prefill_s
from kvtier.plan.search import PlannedSize
from kvtier.plan.sensitivity import STEP, InputSensitivity
from kvtier.plan.settings import settings_toml
from kvtier.plan.workload import without_effect
from kvtier.plan.worth import LEAST_GAIN, TIER_NAMES
from kvtier.report.chart import Axis, Chart, Charts, Curve, Rule, told_apart
from kvtier.report.format import (
    NONE,
    UNBOUNDED,
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
        "Half of the held-out times are met within 7 %, and all are between 0.61 and 1.24 of the published ones."
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
        answer=request(plan),
        sections=[
            Section(texts=[verdict(plan)], tables=[needs_table(plan)] if any(it.need for it in plan.arms) else []),
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
    target, curves = plan.inputs.target, ttft_curves(plan)
    limit_s = target.ttft_s or target.ttft_p95_s
    met = [
        Curve(x=[it.users_at_ttft], y=[limit_s], colour=curve.colour, dash="", marker="o")
        for curve, it in zip(curves, plan.arms, strict=True)
    ]
    last = max(it.x[-1] for it in curves)
    asked = [Rule(at=plan.requested_users, dash=":", is_vertical=True)] if plan.requested_users < last else []
    what = "mean time to first token" if target.ttft_s else "95 % of first tokens within"
    return {
        "ttft": Chart(
            heading="Time to first token against the load",
            marks=[*curves, Rule(at=limit_s), *asked, *met],
            x=Axis(label=load_unit(plan), least=0, most=last),
            y=Axis(label=f"{what}, s", least=0, most=3 * limit_s),
            caption="Dashed across: the limit; a dot is where a curve meets it, the legend has that load. Curves end "
            f"where queues grow without bound.{' Dotted upright: the requested load.' if asked else ''}",
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
            x=held[0].x, y=[it.capacity_bytes] * 2, colour=it.name, width=1.4,
            label=f"{TIER_NAMES[it.name]}, {bytes_text(it.capacity_bytes)}",
        )
        for it in plan.tiers
    ]  # fmt: skip
    costs = cost_curves(plan)
    price = plan.inputs.price.currency if _has_prices(plan) else "kWh"
    return {
        "capacity": Chart(
            heading="KV against conversations and context",
            marks=[*held, *told_apart([held[0], *room])[1:]],
            x=Axis(label="conversations held", is_log=True, text=short_count),
            y=Axis(label="KV", is_log=True, text=bytes_text),
            caption="Each conversation has its own KV, as tiers store it. Dashed: the capacity of each tier. Both axes "
            "are logarithmic.",
        ),
        "prompt": Chart(
            heading="One prompt: computed, or fetched",
            marks=[*told_apart([computed, *fetched]), *falls],
            x=Axis(label="tokens of the prompt", is_log=True, text=short_count),
            y=Axis(label="time to its KV", is_log=True, text=time_text),
            caption="One prompt whose KV is all stored, on an idle machine."
            + (f" It is faster {since}." if since else ""),
        ),
        "cost": Chart(
            heading=f"{'Cost' if _has_prices(plan) else 'Energy'} of a million output tokens",
            marks=costs,
            x=Axis(label=load_unit(plan), least=0, most=max(it.x[-1] for it in costs)),
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
            label=f"from {TIER_NAMES[tier.name]}",
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
    """Time to first token against the load, its mean or the limited percentile, up to where queues grow without end."""
    by_mean = plan.inputs.target.ttft_s

    def of(_: Variant, point: OperatingPoint) -> float:
        return point.ttft_s if by_mean else point.ttft_within_s(0.95)

    return _variant_curves(plan, of, lambda it, _: load_text(plan, it.users_at_ttft))


def cost_curves(plan: Plan) -> list[Curve]:
    """A million output tokens against the load: in money where prices are given, else in kWh."""

    def of(variant: Variant, point: OperatingPoint) -> float:
        at_load = cost(variant.deployment, point, served_per_s=point.requests_per_s)
        return at_load.per_million_output_tokens or 1e6 / at_load.tokens_per_s_per_watt / 3.6e6

    return _variant_curves(plan, of, lambda _, last: f"{last:.3g}")


def _variant_curves(
    plan: Plan, of: Callable[[Variant, OperatingPoint], float], figure: Callable[[Variant, float], str]
) -> list[Curve]:
    curves: list[Curve] = []
    for variant in plan.arms:
        most = variant.throughput_per_s * 0.9999
        rates = [most * (step + 1) / POINTS for step in range(POINTS)]
        points = [operate(variant.deployment, rate, with_tiers=variant.with_tiers) for rate in rates]
        y = tuple(of(variant, it) for it in points)
        curves.append(
            Curve(
                label=f"{_arm_name(variant)}: {figure(variant, y[-1])}",
                colour={0: "alone", 1: variant.tiers[0] if variant.tiers else ""}.get(len(variant.tiers), "tiered"),
                x=tuple(in_users(plan.deployment, rate) for rate in rates),
                y=y,
            )
        )
    return told_apart(curves)


def _has_prices(plan: Plan) -> bool:
    return plan.tiered.cost.per_hour is not None


def tables(plan: Plan) -> Iterator[Table]:
    """The tables of a plan's figures, in reading order."""
    if plan.given.tiers and plan.serves_any:
        yield _choices(plan)
    if len(plan.sizes) > 1:
        yield _sizes(plan)
    if plan.deployment.tiers:
        yield _gains(plan)
    if plan.drives is not None:
        yield _drives(plan, plan.drives)
    yield _capacities(plan)
    yield _limits(plan)
    if plan.break_evens:
        yield _break_evens(plan)
    if plan.sensitivities:
        yield _sensitivities(plan)


def needs_table(plan: Plan) -> Table:
    """What a buyer needs for the requested load: a column for GPU memory alone and for each way."""
    inputs, target, used = plan.inputs, plan.inputs.target, plan.inputs.target.gpu_used
    needs = [it.need for it in plan.arms]
    names = [it.name for it in plan.given.deployment.tiers if any(it.name in arm.tiers for arm in plan.arms)]

    def row(name: str, of: Callable[[Need], str]) -> tuple[str, ...]:
        return name, *(of(it) if it else NONE for it in needs)

    def hits(tier: str) -> Iterator[tuple[str, ...]]:
        name = TIER_NAMES[tier]
        yield row(f"{name}, s that unused KV stays", lambda it: _optional(it.point.residence_s.get(tier), digits))
        yield row(f"{name}, prompt tokens found", lambda it: _optional(it.point.found.get(tier), share_text))

    def rows_of(tier: str) -> Iterator[tuple[str, ...]]:
        name = TIER_NAMES[tier]

        def rates(what: str, of: Callable[[Need], dict[str, float]], times: float = 1.0) -> tuple[str, ...]:
            return row(
                f"{name} {what}, GB/s", lambda it: _optional(of(it).get(tier), lambda b: f"{b * times / 1e9:,.2f}")
            )

        yield row(
            f"{name}, TB for KV",
            lambda it: next((digits(t.capacity_bytes / 1e12) for t in it.deployment.tiers if t.name == tier), NONE),
        )
        yield from hits(tier)
        yield rates("read on average", lambda it: it.point.read_bytes_per_s)
        yield rates(f"read in bursts (x {target.burst:g})", lambda it: it.point.read_bytes_per_s, target.burst)
        yield rates("written", lambda it: it.point.write_bytes_per_s)
        if tier == "disk":
            count = "disk.count"
            yield row("drives", lambda it: f"{it.deployment.inputs.value(count)}" if it.life_years else NONE)
            yield row("life of the drives, years", lambda it: _optional(it.life_years, _years))

    rows = [
        row("GPUs", lambda it: f"{it.gpus:,}"),
        row("hosts", lambda it: f"{it.deployment.hosts:,}"),
        row("GPUs of a copy", lambda it: _size_name(it.deployment.inputs.model)),
        (
            f"GPUs with a reserve ({used:.0%} used)",
            *(_optional(it.gpus_needed, count_text) for it in plan.arms),
        ),
        row(
            f"KV for {target.hit_share:.0%} of possible hits, TB",
            lambda it: digits(capacity(it.deployment, target.hit_share).bytes / 1e12),
        ),
        row("GPU memory, TB for KV", lambda it: digits(it.deployment.kv_bytes * it.deployment.replicas / 1e12)),
        *hits(GPU),
        *(it for name in names for it in rows_of(name)),
        row("prompt tokens not computed", lambda it: share_text(it.point.hit_rate)),
        row("mean time to first token, s", lambda it: digits(it.point.ttft_s)),
        row("95 % of first tokens within, s", lambda it: digits(it.point.ttft_within_s(0.95))),
        row("time per output token, ms", lambda it: digits(it.point.tpot_s * 1e3)),
        row("power, kW", lambda it: f"{it.cost.watts / 1000:,.2f}"),
        row(f"price, {inputs.price.currency}", lambda it: _optional(it.price, digits)),
    ]
    if not any(it and it.price for it in needs):
        rows.pop()
    missing = sorted({name for it in needs if it for name in it.cost.missing})
    note = (
        "The given hardware where the load fits, else the fewest GPUs; tiers grow with the hosts unless their totals "
    )
    note += "are given. KV for hits includes what GPU memory holds; with tiers it is as they store it."
    note += f" A price needs {', '.join(missing)}." if missing else ""
    return Table(
        ("", *(_arm_name(it) for it in plan.arms)),
        rows,
        numeric=len(needs),
        title=f"What {(load := in_words(plan, plan.requested_users))} {'needs' if load == '1 user' else 'need'}",
        note=note,
    )


def _arm_name(variant: Variant) -> str:
    return f"with {names_text(variant.tiers)}" if variant.tiers else names_text(())


def _choices(plan: Plan) -> Table:
    currency, unit, alone = plan.inputs.price.currency, load_unit(plan), plan.alone.users
    ways = [it.tiers for it in plan.ways]
    rows = [
        (
            names_text(it.tiers),
            load_text(plan, it.users),
            _optional(it.life_years, _years),
            _optional(it.price, digits),
            digits(it.price / (it.users - alone)) if it.price and it.users >= alone + 1 else NONE,
            ("or this" if ways.index(it.tiers) else "this") if it.tiers and it.tiers in ways else "",
        )
        for it in plan.choices
    ]
    return Table(
        ("tiers", unit, "drives, years", "price", "for each more", "to buy"),
        rows,
        numeric=5,
        title=f"Most {unit} with each choice of tiers on {gpus_text(plan, plan.inputs.gpu.count)}",
        note=f"{unit.capitalize()} {within(plan)}. Each row has the life of its drives at its own load. Prices are in "
        f"{currency}, with the drives that replace worn ones. To buy is what serves within "
        f"{LEAST_GAIN - 1:.0%} of the most and of which no part does.",
    )


def _gains(plan: Plan) -> Table:
    currency, unit = plan.inputs.price.currency, load_unit(plan)

    def row(
        name: str, of: Callable[[Variant], float | None], text: Callable[[float], str] = digits
    ) -> tuple[str, str, str, str]:
        before, after = of(plan.alone), of(plan.tiered)
        return name, _optional(before, text), _optional(after, text), ratio_text(after, before)

    def most(name: str, of: Callable[[Cost, float], float | None]) -> tuple[str, str, str, str]:
        """A cost at the highest load within the limits, for its users."""
        return row(name, lambda it: of(it.cost_at_most, whole(plan, it.users)) if it.cost_at_most else None)

    in_loads = partial(load_text, plan)
    rows = [
        row(f"{unit} {within(plan)}", lambda it: whole(plan, it.users), in_loads),
        row(f"{unit} at which throughput saturates", lambda it: whole(plan, it.throughput_users), in_loads),
        most("power of a user, W", lambda it, users: it.watts / users),
        most("output tokens/s per watt", lambda it, _: it.tokens_per_s_per_watt),
    ]
    if _has_prices(plan):
        rows += [
            most(f"per hour and user, {currency}", lambda it, users: (it.per_hour or 0.0) / users),
            most(f"per million output tokens, {currency}", lambda it, _: it.per_million_output_tokens),
            most(f"output tokens/s for 1,000 {currency}", lambda it, _: (it.tokens_per_s_per_price or 0.0) * 1000),
        ]
    loads = f"{load_text(plan, plan.alone.users)} and {load_text(plan, plan.tiered.users)} {unit}"
    missing = plan.tiered.cost.missing
    note = f"Costs need prices as inputs: {', '.join(missing)}. " if missing else ""
    if plan.drives and not missing:
        note += "Costs leave out drives that replace worn ones. "
    if _size_name(plan.alone.deployment.inputs.model) != _size_name(plan.tiered.deployment.inputs.model):
        note += "Each column is of its own size, so a row compares sizes, too."
    return Table(
        ("", "GPU memory alone", _arm_name(plan.tiered), "ratio"),
        rows,
        numeric=3,
        title=f"Gains of tiers, each at its own most: {loads}",
        note=note.strip(),
    )


def _sizes(plan: Plan) -> Table:
    planned = {"GPU memory alone": plan.alone}
    planned |= {"with tiers": plan.tiered} if plan.deployment.tiers else {}
    rows = [
        (
            _size_name(size),
            str(size.copies),
            *(load_text(plan, it) for it in (size.users_without_tiers, size.users_with_tiers)[: len(planned)]),
            ", ".join(
                name for name, it in planned.items() if _size_name(it.deployment.inputs.model) == _size_name(size)
            ),
        )
        for size in plan.sizes
    ]
    return Table(
        ("GPUs of a copy", "copies", *planned, "planned for"),
        rows,
        numeric=2 + len(planned),
        title="Users by size",
        note=f"{load_unit(plan).capitalize()} {within(plan)}. Among sizes that serve nearly as many (95 %), the "
        "smallest is planned; more GPUs of a copy exchange more.",
    )


def _size_name(size: ModelInputs | PlannedSize) -> str:
    return f"{'DP attention' if size.dp_attention else 'TP'} {size.tp}"


def _years(years: float) -> str:
    return UNBOUNDED if math.isinf(years) else digits(years)


def _optional(value: float | None, text: Callable[[float], str]) -> str:
    return NONE if value is None else text(value)


def _drives(plan: Plan, drives: DriveLoad) -> Table:
    disk, target = plan.inputs.disk, plan.inputs.target
    rows = [
        (
            "chunks",
            f"{digits(drives.read_bytes_per_s / drives.chunk_bytes)} a second of {bytes_text(drives.chunk_bytes)}",
            f"{bytes_text(disk.command_bytes)} a command",
        ),
        (
            "queue depth",
            f"{digits(drives.depth)} commands on average, {digits(drives.depth * target.burst)} in bursts",
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
            f"rated for {disk.drive_writes_per_day:g} a day for {disk.rated_years:g} years",
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
    note = (
        f"All hits are {rate_text(drives.wanted_bytes_per_s)}; the rest computes faster than it loads."
        if is_slow
        else ""
    )
    title = f"Drives {_arm_name(plan.tiered)}, at {shown_load(plan, plan.tiered)}"
    return Table(("", "load", "provided"), rows, title=title, note=note)


def _capacities(plan: Plan) -> Table:
    deployment = plan.tiered.need.deployment if plan.tiered.need else plan.deployment
    tokens = deployment.workload.session_tokens
    stored, held = deployment.model.stored_bytes(tokens), deployment.model.gpu_bytes(tokens)
    counted = f" KV is as {'tiers store' if deployment.tiers else 'GPU memory holds'} it: a conversation takes "
    counted += f"{bytes_text(stored)} in tiers, {bytes_text(held)} in GPU memory."
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
        title=f"KV for a share of the possible hits, at {in_words(plan, plan.requested_users)}",
        note="GPU memory included; reads as if it had no hits. The hit rate counts the shared system prompt of every "
        f"query, the reads only that of hits.{'' if math.isclose(stored, held, rel_tol=0.01) else counted}",
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
    columns = ("limit", "meaning", f"met at {load_unit(plan)}", "used", "")
    note = "Reserve: bandwidth for bursts. Where it is short, loads take longer or prompts are computed."
    load = in_words(plan, plan.requested_users)
    gpus = gpus_text(plan, plan.inputs.gpu.count)
    title = f"Limits of {gpus} with {names_text(plan.tiered.tiers)}, used at {load}"
    return Table(columns, rows, numeric=3, title=title, note=note)


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
        title=f"Sensitivity of the {in_words(plan, planned)} with {names_text(plan.tiered.tiers)}",
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
    if section == "traffic":
        return key not in without_effect(plan.deployment.basis.trace)
    if not inputs.origin(name).startswith("default"):
        return True
    is_used = {
        "host": inputs.host.capacity_bytes,
        "disk": inputs.disk.count,
        "shared": inputs.shared.capacity_bytes,
        "price": inputs.value(name),
    }
    return bool(is_used.get(section, True))
