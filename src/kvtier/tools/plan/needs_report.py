"""Build the tables of the hardware, tiers and drives that the requested load requires."""

import math
from collections.abc import Callable, Iterator, Sequence

from kvtier.report.format import (
    NONE,
    UNBOUNDED,
    YEAR_S,
    bytes_text,
    counted,
    digits,
    rate_text,
    share_text,
    time_text,
)
from kvtier.report.table import Table
from kvtier.tools.plan.cost import worn
from kvtier.tools.plan.inputs import ModelInputs
from kvtier.tools.plan.max_load import is_served
from kvtier.tools.plan.operating_point import GPU
from kvtier.tools.plan.plan import Machine, Need, Plan, Variant
from kvtier.tools.plan.plan_text import arm_name, in_words, load_unit, shown_load, with_energy, without_drives
from kvtier.tools.plan.tier_demand import DriveLoad
from kvtier.tools.plan.tier_selection import LEAST_GAIN, TIER_NAMES, PlannedSize


def needs_table(plan: Plan) -> Table:
    """Build the table of hardware for the requested load, with a column for each variant in `plan.arms`."""
    inputs, target, used = plan.inputs, plan.inputs.target, plan.inputs.target.gpu_used
    needs = [it.need for it in plan.arms]
    reuses = inputs.software.gpu_reuse
    names = [it.name for it in plan.given.deployment.tiers if any(it.name in arm.tiers for arm in plan.arms)]

    def row(name: str, of: Callable[[Need], str]) -> tuple[str, ...]:
        return name, *(of(it) if it else NONE for it in needs)

    def price(name: str, of: Callable[[Machine], float | None]) -> tuple[str, ...]:
        machines = [it.reserve for it in plan.arms]
        return f"with a reserve, {name}", *(optional(of(it), digits) if it else NONE for it in machines)

    def hits(tier: str) -> Iterator[tuple[str, ...]]:
        name = TIER_NAMES[tier]
        keeps = tier != GPU or reuses
        stays = f"{name}, s that unused KV stays"
        yield row(stays, lambda it: optional(it.point.residence_s.get(tier) if keeps else None, digits))
        yield row(f"{name}, prompt tokens found", lambda it: optional(it.point.found.get(tier), share_text))

    def rows_of(tier: str) -> Iterator[tuple[str, ...]]:
        name = TIER_NAMES[tier]

        def rates(what: str, of: Callable[[Need], dict[str, float]], times: float = 1.0) -> tuple[str, ...]:
            return row(
                f"{name} {what}, GB/s", lambda it: optional(of(it).get(tier), lambda b: f"{b * times / 1e9:,.2f}")
            )

        yield row(
            f"{name}, TB for KV" + (f" ({inputs.disk.filled:.0%} of them)" if tier == "disk" else ""),
            lambda it: next((_terabytes(t.capacity_bytes) for t in it.deployment.tiers if t.name == tier), NONE),
        )
        yield row(f"{name}, TB that are enough", lambda it: optional(it.enough_bytes.get(tier), _terabytes))
        yield from hits(tier)
        yield rates("read on average", lambda it: it.point.read_bytes_per_s)
        yield rates(f"read in bursts (x {target.burst:g})", lambda it: it.point.read_bytes_per_s, target.burst)
        yield rates("written", lambda it: it.point.write_bytes_per_s)
        if tier == "disk":
            count = "disk.count"
            yield row("drives", lambda it: f"{it.deployment.inputs.value(count)}" if it.life_years else NONE)
            yield row("life of the drives, years", lambda it: optional(it.life_years, years_text))

    rows = [
        row("GPUs", lambda it: f"{it.gpus:,}"),
        row("hosts", lambda it: f"{it.deployment.hosts:,}"),
        row("GPUs of a copy", lambda it: size_name(it.deployment.inputs.model)),
        (
            f"GPUs with a reserve ({used:.0%} used)",
            *(_reserve(it) for it in plan.arms),
        ),
        row(
            "GPU memory, TB as tiers store it",
            lambda it: _terabytes(it.deployment.gpu_stored_bytes) if reuses else NONE,
        ),
        *hits(GPU),
        *(it for name in names for it in rows_of(name)),
        row("prompt tokens not computed", lambda it: share_text(it.point.hit_rate)),
        row("mean time to first token, s", lambda it: digits(it.point.ttft_s)),
        row("95 % of first tokens within, s", lambda it: digits(it.point.ttft_within_s(0.95))),
        row("time per output token, ms", lambda it: digits(it.point.tpot_s * 1e3)),
        row("power on average, kW", lambda it: f"{it.cost.watts / 1000:,.2f}"),
    ]
    years, one = counted(inputs.price.years, "year"), load_unit(plan, one=True)
    if any(it and it.price for it in needs):
        energy = with_energy(plan)
        rows += [
            price(f"price, {inputs.price.currency}", lambda it: it.price),
            price(f"price {energy} of {years}", lambda it: it.cost.total),
            price(f"price {energy} of a {one}", lambda it: it.user_price),
        ]
    return Table(
        ("", *(arm_name(it) for it in plan.arms)),
        rows,
        numeric=len(needs),
        title=f"What {(load := in_words(plan, plan.requested_users))} {'needs' if load == '1 user' else 'need'}",
        note=_needs_note(plan, names),
    )


def _reserve(arm: Variant) -> str:
    """Return the number of GPUs with a reserve as a cell.

    Add the size of their copies if it differs from the size without a reserve.
    """
    found, need = arm.reserve, arm.need
    if found is None or need is None:
        return NONE
    size = size_name(found.deployment.inputs.model)
    return f"{found.gpus:,}" + ("" if size == size_name(need.deployment.inputs.model) else f" ({size})")


def _needs_note(plan: Plan, names: Sequence[str]) -> str:
    """Return the note under the table, which states the hardware it assumes and what its lines contain."""
    inputs, needs = plan.inputs, [it.need for it in plan.arms]
    has_drives = any(it and it.life_years for it in needs)
    worn_ones = f"the drives that replace worn ones in {counted(inputs.price.years, 'year')}, and " * has_drives
    missing = sorted({name for it in needs if it for name in it.cost.missing})
    slow = [
        f"Only {it.point.write_bytes_per_s[tier] / given:.0%} of new KV is written to {TIER_NAMES[tier]} in time."
        for it in needs
        if it
        for tier, given in it.point.given_bytes_per_s.items()
        if it.point.write_bytes_per_s[tier] * LEAST_GAIN < given
    ]
    notes = {
        "The given hardware where the load fits, else the fewest GPUs; tiers grow with the hosts unless their totals "
        "are given.": True,
        "The TB that are enough are for the line GPUs at any size of a copy, and a size for --tier"
        f"{', with copies of what GPU memory holds' * inputs.software.gpu_reuse}. More GPUs, such as a reserve, need "
        "the TB for KV of their hosts.": names,
        "With several tiers the slowest is reduced first, and a faster one only if no slower one is needed.": any(
            len(it.tiers) > 1 for it in plan.arms
        ),
        "Drives of that size need the rates of the planned ones, and last in proportion to their size.": "disk"
        in names,
        " ".join(slow): slow,
        "GPU memory is counted as what tiers store of its conversations, with their copies, windows and "
        "states.": inputs.software.gpu_reuse,
        "There are fewer drives than hosts, and a host without one has no local drives: give --tier one or more for "
        "each host.": any(
            it and it.life_years and it.deployment.inputs.disk.count < it.deployment.hosts for it in needs
        ),
        "A tier that keeps KV for many pauses keeps it unused for its capacity / (new conversations a second x KV of "
        "a finished one without the system prompt), less the pauses of a conversation.": names
        and plan.deployment.workload.has_users
        and inputs.traffic.reuse is None,
        _windows(plan): names and any(math.isfinite(it.last_tokens) for it in plan.deployment.model.spans),
        _snapshots(plan): names and plan.deployment.model.state_bytes,
        "Shared storage is as fast here as the network adapters of the hosts; state what yours reads and writes with "
        "?read= and ?write= of its --tier. Its power is not in the table.": "shared" in names
        and not inputs.shared.read_bytes_per_s,
        f"A price needs {', '.join(missing)}.": missing,
        f"Prices are of the GPUs with a reserve and their hosts. The first has {worn_ones}no energy.": any(
            it and it.price for it in needs
        ),
        "The power of GPUs grows with their use; plan the feed for all of gpu.watts.": True,
        _reads_with_reserve(plan): names,
        "Energy needs price.energy_per_kwh.": any(it and it.price for it in needs) and not inputs.price.energy_per_kwh,
    }
    return " ".join(text for text, applies in notes.items() if text and applies)


def _reads_with_reserve(plan: Plan) -> str:
    """State how much tiers read with the GPUs of a reserve, if that is more than without a reserve."""
    texts = [
        f"{rate_text(reads)} {arm_name(it)}"
        for it in plan.arms
        if it.tiers and it.need and it.reserve
        if (reads := sum(it.reserve.point.read_bytes_per_s.values()))
        > LEAST_GAIN * sum(it.need.point.read_bytes_per_s.values())
    ]
    return f"With a reserve, tiers read more on average: {', '.join(texts)}." if texts else ""


def _windows(plan: Plan) -> str:
    """State how many bytes per token a hit reads if layers have a window: fewer than a tier stores."""
    model, tokens = plan.deployment.model, plan.deployment.workload.reusable_tokens
    read = (model.loaded_bytes(tokens) - model.state_bytes) / tokens if tokens else 0.0
    return (
        f"A hit reads only the last tokens of layers with a window: {bytes_text(read)} a token found, of the "
        f"{bytes_text(model.token_bytes)} that are stored."
    )


def _snapshots(plan: Plan) -> str:
    """State that each query leaves a snapshot of its recurrent states in a tier for one pause."""
    count, size = plan.inputs.software.snapshots, plan.deployment.model.state_bytes
    each = counted(count, "snapshot")
    return (
        f"Each query also leaves {each} of the recurrent states ({bytes_text(size)} each) in that KV; "
        "the size of a conversation counts one. For the share of snapshots in it, subtract one pause only."
    )


def drives_table(plan: Plan, drives: DriveLoad) -> Table:
    """Build the table of the load on the drives. Its note says how many to buy."""
    target, need = plan.inputs.target, plan.chosen.need
    deployment = (need or plan.chosen).deployment
    inputs, disk = plan.inputs, deployment.inputs.disk
    written = (need or plan.chosen).point.write_bytes_per_s["disk"]
    at_second_use_s = min(drives.life_selective_years, 1e4) * YEAR_S
    writes = round(100 * written / ((written + drives.read_bytes_per_s) or 1))
    rows = [
        (
            "chunks",
            f"{digits(drives.read_bytes_per_s / drives.chunk_bytes)} a second of {bytes_text(drives.chunk_bytes)}",
            f"{bytes_text(disk.command_bytes)} a command",
        ),
        (
            "queue depth",
            f"{digits(drives.depth)} commands on average, {digits(drives.depth * target.burst)} in bursts",
            f"{digits(drives.depth / disk.count)} for each of {counted(disk.count, 'drive')}",
        ),
        (
            "mix",
            f"{100 - writes}% of the bytes are read, {writes}% written",
            f"kvtier bench io --mix {100 - writes}/{writes}" if 0 < writes < 100 else "kvtier bench io",
        ),
        (
            "time",
            f"{share_text(drives.used)} of the drives' time, bursts and writes",
            f"needs {counted(drives.drives_for_bandwidth, 'drive')}",
        ),
        (
            "writes",
            f"{bytes_text(drives.written_bytes_per_day)} a day, {digits(drives.writes_per_day)} drive writes a day",
            f"rated for {disk.drive_writes_per_day:g} a day for {disk.rated_years:g} years",
        ),
        (
            "life",
            time_text(drives.life_years * YEAR_S),
            f"{target.life_years:g} years need {counted(drives.drives_for_life, 'drive')}",
        ),
        (
            "reused KV only",
            f"{time_text(at_second_use_s)} ({share_text(plan.deployment.workload.kept_share)} of new KV is written)",
            f"{target.life_years:g} years: {_lasting_writes(plan, drives, at=True)}",
        ),
    ]
    is_slow = drives.wanted_bytes_per_s > 1.01 * drives.read_bytes_per_s
    buy = max(drives.drives_for_capacity, drives.drives_for_bandwidth, drives.drives_for_life, deployment.hosts)
    slow = f"All hits are {rate_text(drives.wanted_bytes_per_s)}; the rest computes faster than it loads. "
    price, years = inputs.price, drives.life_years
    each_host = f", one for each host {deployment.hosts:,}" if deployment.hosts > 1 else ""
    needs = (
        f"capacity needs {drives.drives_for_capacity:,}, speed {drives.drives_for_bandwidth:,}, "
        f"{target.life_years:g} years of life {drives.drives_for_life:,}{each_host}."
    )
    note = f"Buy {counted(buy, 'drive')}: {needs} The plan counts {disk.count:,}."
    if years < target.life_years:
        kept, bought = "", ""
        if price.drive:
            paid = digits(disk.count * price.drive + worn(deployment, years))
            kept = f", for {paid} {price.currency} in {counted(price.years, 'year')}"
            bought = f" for {digits(buy * price.drive)} {price.currency}"
        worn_s = time_text(years * YEAR_S)
        note = (
            f"Keep the {counted(disk.count, 'drive')} of the plan and replace each after {worn_s}, "
            f"{digits(disk.count / years)} a year{kept}. Or buy {counted(buy, 'drive')}{bought}: {needs}"
        )
        if drives.write_policy != "through":
            served = f"{in_words(plan, drives.users)}{without_drives(plan)}"
            serves = f", a budget for at most {served}" if drives.write_share else ""
            note += f" Or keep these and {_lasting_writes(plan, drives)}{serves}."
    if not plan.bought:
        note = f"If drives are bought all the same, {note[0].lower()}{note[1:]}"
    note = f"{slow if is_slow else ''}{note}"
    title = f"Drives {arm_name(plan.chosen)}, at {shown_load(plan)}"
    return Table(("", "load", "provided"), rows, title=title, note=note)


def _lasting_writes(plan: Plan, drives: DriveLoad, *, at: bool = False) -> str:
    """State the share of writes with which drives last. With `at`, add the load if it is below the planned one."""
    users = in_words(plan, drives.users)
    if drives.write_share is None:
        return f"serve at most {users}"
    is_lower = at and not is_served(plan.planned_users, drives.users)
    return f"write {share_text(drives.write_share)} {f'at {users}' if is_lower else 'of new KV'}"


def size_name(size: ModelInputs | PlannedSize) -> str:
    """Return how many GPUs share a copy, and how, as a cell."""
    return f"{'DP attention' if size.dp_attention else 'TP'} {size.tp}"


def years_text(count: float) -> str:
    """Return a number of years as a cell."""
    return UNBOUNDED if math.isinf(count) else digits(count)


def _terabytes(count: float) -> str:
    return digits(count / 1e12)


def optional(value: float | None, text: Callable[[float], str]) -> str:
    """Return the text of a value, or a dash for None."""
    return NONE if value is None else text(value)
