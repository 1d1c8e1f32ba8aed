"""Build the report of `kvtier plan`: the plan's tables, and its charts with their curves."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvtier.report.format import (
    NONE,
    bytes_text,
    counted,
    digits,
    rate_text,
    ratio_text,
    share_text,
    time_text,
)
from kvtier.report.table import Table
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.plan.charts import answer_chart, other_charts
from kvtier.tools.plan.cost import Cost
from kvtier.tools.plan.inputs import SETTINGS
from kvtier.tools.plan.max_load import STEP, InputSensitivity
from kvtier.tools.plan.needs_report import drives_table, needs_table, optional, size_name, years_text
from kvtier.tools.plan.plan import Plan, Variant
from kvtier.tools.plan.plan_text import (
    arm_name,
    circumstances,
    conclusion,
    gpus_text,
    heading,
    in_words,
    load_text,
    load_unit,
    names_text,
    request,
    verdict,
    with_energy,
    within,
)
from kvtier.tools.plan.settings import settings_toml
from kvtier.tools.plan.tier_selection import LEAST_GAIN, TIER_NAMES
from kvtier.tools.plan.workload import without_effect

SENSITIVITIES = 12
"""Maximum number of inputs in the table of sensitivities."""
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


def plan_report(plan: Plan, more: Sequence[Table] = (), *, shows_inputs: bool = False) -> Report:
    """Build the report of a plan.

    Args:
        plan: the plan.
        more: tables that the user asked for; they precede the others.
        shows_inputs: whether a terminal also shows every input in use; a page always does.
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
            PageSection(texts=[verdict(plan)], tables=[needs_table(plan)] if any(it.need for it in plan.arms) else []),
            PageSection(texts=[heading(plan)], charts=partial(answer_chart, plan), notes=conclusion(plan)),
            PageSection(tables=[*more, *tables(plan)]),
            PageSection(charts=partial(other_charts, plan), is_page_only=True),
            PageSection(tables=facts),
            PageSection(notes=sources, tables=[inputs], is_page_only=not shows_inputs),
            PageSection(title="Not modelled", notes=LIMITS, is_page_only=True),
            PageSection(title="Settings of kvtier", code=settings_toml(plan)),
        ],
    )


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables of a plan's figures, in reading order."""
    if plan.given.tiers and plan.serves_any:
        yield _choices(plan)
    if len(plan.tiered.choice.sizes) > 1:
        yield _sizes(plan)
    if plan.deployment.tiers:
        yield _gains(plan)
    if (planned := plan.with_drives).drives is not None:
        yield drives_table(planned, planned.drives)
    if plan.capacities:
        yield _capacities(plan)
    yield _limits(plan)
    if plan.break_evens:
        yield _break_evens(plan)
    if plan.sensitivities and plan.serves_any:
        yield _sensitivities(plan)


def _choices(plan: Plan) -> Table:
    currency, unit, one = plan.inputs.price.currency, load_unit(plan), load_unit(plan, one=True)
    ways, by_price = [it.tiers for it in plan.ways if it.tiers], bool(plan.user_prices)
    gpus = gpus_text(plan, plan.inputs.gpu.count)
    has_prices = any(it.price for it in plan.choices)
    for_load = f" for {in_words(plan, plan.requested_users)}" if plan.prices_load else ""
    # The last columns need prices: of the tiers alone, or of everything.
    columns = (
        "tiers",
        unit,
        "drives, years",
        for_load.strip() or "if full",
        *(("price of tiers", f"of a {one}")[: has_prices + by_price]),
    )
    rows = [
        (
            names_text(it.tiers),
            load_text(plan, it.users),
            optional(it.life_years, years_text),
            ("or this" if ways.index(it.tiers) else "this") if it.tiers in ways and not plan.refused else "",
            optional(it.price, digits),
            optional(plan.user_prices.get(it.tiers), digits),
        )[: len(columns)]
        for it in plan.choices
    ]
    years = counted(plan.inputs.price.years, "year")
    notes = (
        f"{unit.capitalize()} {within(plan)}. Each row has the life of its drives at its own load.",
        f"Prices of tiers are for {gpus} at that load, in {currency}"
        + (" and with the drives that replace worn ones." if any(it.life_years for it in plan.choices) else ".")
        if has_prices
        else "",
        f"The price of a {one} is that of all hardware{for_load and f'{for_load} with a reserve'} over {years}, "
        f"{with_energy(plan)}."
        if by_price
        else "",
        _marks(plan),
    )
    return Table(
        columns,
        rows,
        numeric=len(columns) - 1,
        title=f"Most {unit} with each choice of tiers on {gpus}",
        note=" ".join(filter(None, notes)),
    )


def _marks(plan: Plan) -> str:
    """State which choices the table marks as worth buying, or why no choice is marked."""
    unit, one, by_price = load_unit(plan), load_unit(plan, one=True), bool(plan.user_prices)
    if why := plan.refused:
        return f"No row is marked, because {why}."
    near = f"{LEAST_GAIN - 1:.0%} of the {f'least per {one}' if by_price else f'most {unit}'}"
    if not plan.ways[0].tiers:
        if by_price:
            is_near = plan.user_prices.get((), math.inf) <= min(plan.user_prices.values()) * LEAST_GAIN
        else:
            is_near = plan.alone.users * LEAST_GAIN >= max(it.users for it in plan.choices)
        what = f"{'costs' if by_price else 'serves'} within {near}" if is_near else f"serves as many whole {unit}"
        return f"No row is marked, because GPU memory alone {what}."
    when = f" for {in_words(plan, plan.requested_users)}" if plan.prices_load else ""
    return (
        f"'This' marks what is worth buying{when or ' if these GPUs are full and have all given tiers'}. "
        f"It is the fewest tiers that {'cost' if by_price else 'serve'} within {near}."
    )


def _gains(plan: Plan) -> Table:
    currency, unit, one = plan.inputs.price.currency, load_unit(plan), load_unit(plan, one=True)

    def row(
        name: str, of: Callable[[Variant], float | None], text: Callable[[float], str] = digits
    ) -> tuple[str, str, str, str]:
        before, after = of(plan.alone), of(plan.tiered)
        return name, optional(before, text), optional(after, text), ratio_text(after, before)

    def most(name: str, of: Callable[[Cost], float | None]) -> tuple[str, str, str, str]:
        """Make a row with a cost at the highest load within the limits."""
        return row(name, lambda it: of(it.choice.cost) if it.choice.cost else None)

    in_loads = partial(load_text, plan)
    rows = [
        row(f"{unit} {within(plan)}", lambda it: it.users, in_loads),
        row(f"{unit} at which throughput saturates", lambda it: it.throughput_users, in_loads),
        row(f"power of a {one}, W", lambda it: it.choice.cost and it.choice.cost.watts / it.choice.whole_users),
        most("output tokens/s per watt", lambda it: it.tokens_per_s_per_watt),
    ]
    by_price = bool(plan.user_prices) and not plan.prices_load
    if by_price:
        rows += [
            row(f"price of a {one}, {currency}", lambda it: it.choice.user_price),
            most(f"price of a million output tokens, {currency}", lambda it: it.per_million_output_tokens),
            most(f"output tokens/s for 1,000 {currency}", lambda it: (it.tokens_per_s_per_price or 0.0) * 1000),
        ]
    loads = f"{load_text(plan, plan.alone.users)} and {load_text(plan, plan.tiered.users)} {unit}"
    is_mixed = size_name(plan.alone.deployment.inputs.model) != size_name(plan.tiered.deployment.inputs.model)
    years, worn_ones = counted(plan.inputs.price.years, "year"), " and worn drives" * ("disk" in plan.tiered.tiers)
    notes = (
        f"Prices need {', '.join(plan.given.cost.missing)} as inputs." if plan.given.cost.missing else "",
        f"Prices are of all hardware{worn_ones} over {years}, {with_energy(plan)}." if by_price else "",
        "Columns differ in size, so a row also compares sizes." if is_mixed else "",
        "Ratios are those of the unrounded figures.",
        "Figures of a user divide by whole users." if one == "user" else "",
    )
    return Table(
        ("", "GPU memory alone", arm_name(plan.tiered), "ratio"),
        rows,
        numeric=3,
        title=f"Gains of tiers, each at its own most: {loads}",
        note=" ".join(filter(None, notes)),
    )


def _sizes(plan: Plan) -> Table:
    planned = {arm_name(it): it for it in (plan.alone, plan.tiered)}
    rows = [
        (
            size_name(size),
            str(size.copies),
            *(load_text(plan, it) for it in (size.users_without_tiers, size.users_with_tiers)[: len(planned)]),
            ", ".join(name for name, it in planned.items() if size_name(it.deployment.inputs.model) == size_name(size)),
        )
        for size in plan.tiered.choice.sizes
    ]
    return Table(
        ("GPUs of a copy", "copies", *planned, "planned for"),
        rows,
        numeric=2 + len(planned),
        title=f"{load_unit(plan).capitalize()} by size",
        note=f"{load_unit(plan).capitalize()} {within(plan)}. Among sizes that serve as many, the smallest is planned; "
        "more GPUs of a copy exchange more.",
    )


def _capacities(plan: Plan) -> Table:
    deployment = plan.planned_deployment
    load = deployment.workload
    stored = deployment.model.stored_bytes(load.stored_tokens)
    held = deployment.model.gpu_bytes(load.longest_tokens if load.has_users else load.session_tokens)
    reuses = plan.inputs.software.gpu_reuse
    kept = "GPU memory keeps a part of it, so this is no size to buy. Reads are as if it had no hits. "
    prompt = "The hit rate counts the shared system prompt of every query, the reads only that of hits."
    counted = (
        f" KV is as {'tiers store' if deployment.tiers else 'GPU memory holds'} it: a finished conversation takes "
        f"{bytes_text(stored)} in tiers"
        + (f" and, between its queries, {bytes_text(held)} in GPU memory." if reuses else ".")
    )
    rows = [
        (
            f"{it.hit_share:.0%}" + (" (target)" if it.hit_share == plan.inputs.target.hit_share else ""),
            share_text(it.hit_rate),
            time_text(it.residence_s),
            f"{digits(it.tokens / 1e6)} M",
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
        note=f"{kept if reuses else ''}{prompt if load.prefix_tokens else ''}"
        f"{'' if math.isclose(stored, held, rel_tol=0.01) else counted}",
    )


def _limits(plan: Plan) -> Table:
    ranks = {it.name: rank for it, rank in zip(plan.tiered.ceiling.serving, ("binds", "next"), strict=False)}
    rows = [
        (
            limit.name,
            limit.meaning,
            load_text(plan, limit.users) if math.isfinite(limit.users) else "not met",
            ratio_text(plan.requested_users, limit.users) if math.isfinite(limit.users) else NONE,
            "reserve" if limit.is_reserve else ranks.get(limit.name, "") if math.isfinite(limit.users) else "",
        )
        for limit in plan.tiered.ceiling.limits
    ]
    load = in_words(plan, plan.requested_users)
    columns = ("limit", "meaning", f"met at {load_unit(plan)}", "load / limit", "")
    note = f"The load is {load}. Ratios are those of the unrounded figures. "
    if plan.deployment.tiers:
        note += "Reserve: bandwidth. Where it is short, loads take longer or prompts are computed."
    title = f"Limits of {gpus_text(plan, plan.inputs.gpu.count)} with {names_text(plan.tiered.tiers)}"
    return Table(columns, rows, numeric=3, title=title, note=note.strip())


def _break_evens(plan: Plan) -> Table:
    has_prices = any(it.residence_s for it in plan.break_evens)
    columns = ("KV in", "costs less than", "if used within", *(["your prices"] if has_prices else []))
    rows = [
        (
            TIER_NAMES[it.tier],
            it.instead_of,
            f"{time_text(it.per_price_ratio_s)} x price of a {it.saved_unit} / price of a {it.unit}",
            optional(it.residence_s, time_text),
        )[: len(columns)]
        for it in plan.break_evens
    ]
    return Table(
        columns,
        rows,
        numeric=len(columns) - 3,
        title="How long KV is worth keeping",
        note="This is the five-minute rule. The time grows with the price of what the tier saves, and shrinks with the "
        "price of the tier.",
    )


def _sensitivities(plan: Plan) -> Table:
    planned = plan.sensitivities[0].users

    def tried(it: InputSensitivity, value: float | None, users: float | None) -> str:
        if value is None or users is None:
            return NONE
        # Whole numbers change by whole steps, and GPUs by whole copies of the model.
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
        "value in brackets. A copy keeps the planned number of GPUs, except that another gpu.count is planned again. "
        f"As planned: {load_text(plan, planned)}.",
    )


def _assumptions(plan: Plan) -> Table:
    """List the name, value, origin and meaning of every input in use."""
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
