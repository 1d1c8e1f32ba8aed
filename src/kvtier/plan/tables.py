"""A plan as tables of text, for the terminal and for the report alike."""

import math
from collections.abc import Callable, Iterator
from functools import partial

from kvtier.config.kinds import seconds_text
from kvtier.plan.catalogue import Item, catalogue
from kvtier.plan.inputs import SETTINGS
from kvtier.plan.limits import TTFT
from kvtier.plan.planning import Plan, Side
from kvtier.plan.sensitivity import STEP, Users
from kvtier.plan.stated import HOW, Stated
from kvtier.report.format import (
    NONE,
    bytes_text,
    count_text,
    digits,
    rate_text,
    ratio_text,
    share_text,
    time_text,
)
from kvtier.report.table import Table

LEVERS = 12
"""How many inputs the table of what matters most has."""
_HARDWARE = ("gpu.", "host.", "disk.", "shared.", "software.")
_PLACES = {"gpu": "GPU memory", "host": "host memory", "disk": "local drives", "shared": "shared storage"}


def heading(plan: Plan) -> str:
    """What is planned, in a line."""
    inputs, setup = plan.inputs, plan.setup
    copies = "one copy" if setup.replicas == 1 else f"{setup.replicas} copies"
    spread = f", {copies} on {inputs.model.tp} each" if inputs.model.tp > 1 else ""
    return f"{setup.shape.name} on {inputs.gpu.count} x {inputs.gpu.name}{spread}"


def circumstances(plan: Plan) -> list[tuple[str, str]]:
    """The set-up in a few lines: what, and how much."""
    inputs, setup, demand = plan.inputs, plan.setup, plan.setup.demand
    chunk_bytes = setup.shape.token_bytes * inputs.software.chunk_tokens
    duplication = setup.shape.duplication
    copies = f"; every byte in {duplication:g} copies, since ranks cannot split it" if duplication > 1 else ""
    lines = [
        (
            "model",
            (
                f"KV {inputs.model.kv_dtype}, weights {inputs.model.weights} ({bytes_text(setup.weight_bytes)}); "
                f"{bytes_text(setup.kv_bytes)} left for KV beside each copy"
            ),
        ),
        (
            "KV",
            (
                f"{bytes_text(setup.shape.token_bytes)} a token, {bytes_text(chunk_bytes)} a chunk of "
                f"{inputs.software.chunk_tokens} tokens, {bytes_text(setup.shape.stored_bytes(demand.session_tokens))} "
                f"a conversation{copies}"
            ),
        ),
        ("traffic", _traffic(plan)),
        (
            "requests",
            (
                f"prompts of {demand.input_tokens:,.0f} tokens, {demand.reuse:.1%} of them reusable; "
                f"answers of {demand.answer_tokens:,.0f}"
            ),
        ),
    ]
    if demand.burst:
        lines.append(("bursts", f"the busiest 10 s of the trace have {demand.burst:.1f} times its average"))
    return lines + [("note", note) for note in demand.notes]


def _traffic(plan: Plan) -> str:
    traffic, demand = plan.inputs.traffic, plan.setup.demand
    rate = f"{demand.requests_per_s:,.3g} queries/s"
    if not demand.has_users:
        times = "" if traffic.load == 1 else f", {traffic.load:g} times its load"
        return f"{rate}, as in {traffic.trace}{times}"
    if plan.setup.trace:
        return f"{rate} of {traffic.trace}, as from {plan.asked_users:,.0f} users"
    return f"{traffic.users:,} users, a query every {seconds_text(traffic.interval_s)} each: {rate}"


def verdict(plan: Plan) -> list[str]:
    """The answer in a few sentences."""
    alone, tiered, unit = plan.alone, plan.tiered, _unit(plan)
    limit_s = plan.inputs.target.ttft_s
    ratio = ratio_text(tiered.users_at_ttft, alone.users_at_ttft)
    gain = f" ({ratio})" if ratio != NONE else ""
    told = [
        (
            f"Within {limit_s:g} s to the first token: {_load(plan, alone.users_at_ttft)} {unit} with GPU memory "
            f"alone, {_load(plan, tiered.users_at_ttft)} with tiers{gain}."
        )
    ]
    binding, following = plan.binding, tiered.ceiling.next
    if not binding.users:
        told.append(f"Even a single request is too much: {binding.name} ({binding.meaning}).")
    else:
        told.append(
            f"What binds: {binding.name}, at {_load(plan, binding.users)} {unit} ({binding.meaning}). "
            f"Raised by {binding.raised_by}."
        )
        told += _parts(plan)
    if following is not None and math.isfinite(following.users):
        told.append(f"What is next: {following.name}, at {_load(plan, following.users)} {unit}.")
    over = [name for name, used in plan.used.items() if used > 1]
    if over:
        told.append(
            f"The load that is asked for, {_load(plan, plan.asked_users)} {unit}, is too much for: {', '.join(over)}."
        )
    return told


def _parts(plan: Plan) -> list[str]:
    """What the time to first token is made of where it binds, and which inputs move it most."""
    top = plan.tiered.ceiling
    if top.binding.name != TTFT or not math.isfinite(top.point.ttft_s):
        return []
    prefill_s = top.point.ttft_s - top.point.wait_s - top.point.load_s
    told = [
        (
            f"The {top.point.ttft_s:.2g} s there: {time_text(top.point.wait_s)} waiting for the GPU, "
            f"{time_text(top.point.load_s)} loading, {time_text(prefill_s)} computing."
        )
    ]
    movers = [it for it in plan.levers if it.name.startswith(_HARDWARE)]
    strongest = [it.name for it in sorted(movers, key=lambda it: -it.ttft_swing)[:3]]
    return [*told, f"Of hardware and software, these move it most: {', '.join(strongest)}."] if strongest else told


def _unit(plan: Plan) -> str:
    return "users" if plan.setup.demand.has_users else "queries/s"


def _load(plan: Plan, load: float) -> str:
    return load_text(load, is_users=plan.setup.demand.has_users)


def load_text(load: float, *, is_users: bool) -> str:
    """A load in whole users, or in queries a second."""
    return count_text(load) if is_users or math.isinf(load) else digits(load)


def tables(plan: Plan, stated: list[Stated] | None = None) -> Iterator[Table]:
    """Every table of a plan, in the order in which they are read."""
    yield _buys(plan)
    yield _tiers(plan)
    if plan.drives is not None:
        yield _drives(plan)
    yield _capacities(plan)
    yield _limits(plan)
    if plan.break_evens:
        yield _break_evens(plan)
    if plan.levers:
        yield _levers(plan)
    if stated:
        yield stated_table(stated)


def _buys(plan: Plan) -> Table:
    target, currency, unit = plan.inputs.target, plan.inputs.price.currency, _unit(plan)
    asked = f"{_load(plan, plan.asked_users)} {unit}"
    load = partial(_load, plan)
    rows = [
        _row(plan, f"{unit} within {target.ttft_s:g} s to the first token", lambda it: it.users_at_ttft, load),
        _row(plan, f"{unit} with every limit held", lambda it: it.ceiling.users, load),
        _row(plan, f"{unit} at which throughput saturates", lambda it: it.throughput_users, load),
        _row(plan, f"time to first token at {asked}", lambda it: it.ttft_s, time_text),
        _row(plan, f"time per output token at {asked}", lambda it: it.point.tpot_s, time_text),
        (
            f"prompt tokens not computed at {asked}",
            share_text(plan.alone.point.hit_rate),
            share_text(plan.tiered.point.hit_rate),
            "",
        ),
        _row(plan, f"output tokens/s at {asked}", lambda it: it.output_tokens_per_s, digits),
        _row(plan, f"GPUs for {asked}", lambda it: it.gpus_needed, lambda it: f"{it:,.0f}"),
        _row(plan, f"power at {asked}", lambda it: it.cost.watts, lambda it: f"{it / 1000:,.2f} kW"),
        _row(plan, "output tokens/s per watt", lambda it: it.cost.tokens_per_s_per_watt, digits),
    ]
    if plan.tiered.cost.per_hour is not None:
        rows += [
            _row(plan, f"per hour, {currency}", lambda it: it.cost.per_hour, digits),
            _row(plan, f"per million output tokens, {currency}", lambda it: it.cost.per_million_output_tokens, digits),
            _row(plan, f"per million tokens in and out, {currency}", lambda it: it.cost.per_million_tokens, digits),
            _row(
                plan,
                f"output tokens/s for 1,000 {currency}",
                lambda it: None if it.cost.tokens_per_s_per_price is None else it.cost.tokens_per_s_per_price * 1000,
                digits,
            ),
        ]
    missing = plan.tiered.cost.missing
    note = f"Costs need prices, and these are yours to give: {', '.join(missing)}." if missing else ""
    return Table(
        title="What tiers buy",
        columns=("", "GPU memory alone", "with tiers", "ratio"),
        rows=tuple(rows),
        numeric=3,
        note=note,
    )


def _row(
    plan: Plan, name: str, of: Callable[[Side], float | None], text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    before, after = of(plan.alone), of(plan.tiered)
    return (
        name,
        NONE if before is None else text(before),
        NONE if after is None else text(after),
        ratio_text(after, before),
    )


def _tiers(plan: Plan) -> Table:
    rows = [
        (
            _PLACES[it.name],
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
        title="Where the KV is",
        columns=("place", "for KV", "tokens", "sessions", "kept for", "given", "read", "written"),
        rows=tuple(rows),
        numeric=7,
        note="Kept for: how long KV stays that nothing asks for. Given: share of all prompt tokens. All are averages.",
    )


def _drives(plan: Plan) -> Table:
    drives, disk, target = plan.drives, plan.inputs.disk, plan.inputs.target
    assert drives is not None, "the caller has looked"
    life = time_text(drives.life_years * 365.25 * 86_400)
    rows = [
        (
            "reads",
            (
                f"{rate_text(drives.read_bytes_per_s)} on average, {rate_text(drives.read_burst_bytes_per_s)} in "
                f"bursts (x {target.burst:g})"
            ),
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
            f"enough: {drives.drives_for_bandwidth} of them",
        ),
        (
            "writes",
            f"{bytes_text(drives.written_bytes_per_day)} a day, {digits(drives.writes_per_day)} drive writes a day",
            f"{drives.rated_writes_per_day:g} a day for {disk.rated_years:g} years is rated",
        ),
        (
            "life",
            f"{life} of such days",
            f"for {target.life_years:g} years: {drives.drives_for_life} of them",
        ),
    ]
    slow = drives.wanted_bytes_per_s > 1.01 * drives.read_bytes_per_s
    note = (
        f"{rate_text(drives.wanted_bytes_per_s)} would be read; the rest computes faster than it loads." if slow else ""
    )
    return Table(title="Drives", columns=("", "this load", "provided"), rows=tuple(rows), numeric=0, note=note)


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
        title="What tiers must hold",
        columns=("of what can be reused", "hit rate", "kept for", "tokens", "KV", "read", "in bursts"),
        rows=tuple(rows),
        numeric=6,
        note=f"At {_load(plan, plan.asked_users)} {_unit(plan)}, GPU memory included; reads as if no hit came from it.",
    )


def _limits(plan: Plan) -> Table:
    unit = _unit(plan)
    words = ("binds", "next")
    rows = [
        (
            limit.name,
            limit.meaning,
            _load(plan, limit.users) if math.isfinite(limit.users) else "not met",
            share_text(plan.used[limit.name]),
            words[place] if place < len(words) and math.isfinite(limit.users) else "",
        )
        for place, limit in enumerate(plan.tiered.ceiling.limits)
    ]
    return Table(
        title="Limits, with tiers",
        columns=("limit", "what it says", f"met at {unit}", "used as asked", ""),
        rows=tuple(rows),
        numeric=3,
    )


def _break_evens(plan: Plan) -> Table:
    rows = [
        (
            _PLACES[it.place],
            it.instead_of,
            f"{time_text(it.per_price_ratio_s)} x price of a {it.saved_unit} / {it.unit}",
            NONE if it.residence_s is None else time_text(it.residence_s),
        )
        for it in plan.break_evens
    ]
    return Table(
        title="How long KV is worth keeping",
        columns=("in", "instead of", "up to", "with your prices"),
        rows=tuple(rows),
        numeric=1,
        note="The five-minute rule: keep what is asked for again within this time.",
    )


def _levers(plan: Plan) -> Table:
    users = plan.levers[0].users
    rows = [
        (
            it.name,
            SETTINGS[it.name].kind.show(it.value),
            _users_text(plan, it.users_lower, lambda users: users.every_limit),
            _users_text(plan, it.users_higher, lambda users: users.every_limit),
            _users_text(plan, it.users_lower, lambda users: users.ttft),
            _users_text(plan, it.users_higher, lambda users: users.ttft),
        )
        for it in plan.levers[:LEVERS]
        if it.swing > 0.001
    ]
    return Table(
        title="What matters most",
        columns=("input", "value", f"all limits -{STEP:.0%}", f"+{STEP:.0%}", f"TTFT -{STEP:.0%}", f"+{STEP:.0%}"),
        rows=tuple(rows),
        numeric=4,
        note=f"{_unit(plan).capitalize()} when one input alone is a fifth lower or higher. As planned: "
        f"{_load(plan, users.every_limit)} with all limits held, {_load(plan, users.ttft)} within that of the TTFT.",
    )


def _users_text(plan: Plan, users: Users | None, of: Callable[[Users], float]) -> str:
    return NONE if users is None else _load(plan, of(users))


def stated_table(stated: list[Stated], *, with_notes: bool = False) -> Table:
    """What the example's source states against what the plan computes."""
    columns = ("stated", "there", "here", "off", "", *(("why",) if with_notes else ()))
    rows = [
        (it.text, it.show(it.stated), it.show(it.computed), f"{it.off:+.0%}", it.how, it.note)[: len(columns)]
        for it in stated
    ]
    note = "; ".join(f"{word}: {meaning}" for word, meaning in HOW.items())
    return Table(columns, rows, title="What the source states, and what the plan computes", note=f"{note}.")


def assumptions(plan: Plan) -> Table:
    """Every input that was used, its value, where it came from, and what it means."""
    rows = [
        (name, setting.kind.show(plan.inputs.value(name)), plan.inputs.origin(name), setting.help)
        for name, setting in SETTINGS.items()
        if _is_used(plan, name)
    ]
    return Table(title="Assumptions", columns=("input", "value", "from", "what it is"), rows=tuple(rows), numeric=0)


def _is_used(plan: Plan, name: str) -> bool:
    section, _, key = name.partition(".")
    inputs = plan.inputs
    has = {
        "host": inputs.host.capacity_bytes,
        "disk": inputs.disk.count,
        "shared": inputs.shared.capacity_bytes,
        "price": inputs.value(name),
    }
    if name in inputs.origins:
        return True
    if section == "traffic" and plan.setup.trace:
        own_pauses = not plan.setup.demand.has_users
        return key in {"trace", "trace_window_s", "load", "arrivals_cv2", "reuse"} or (
            not own_pauses and key in {"turns", "interval_s", "interval_cv"}
        )
    return bool(has.get(section, True)) and name not in {"traffic.trace", "traffic.trace_window_s", "traffic.load"}


def hardware() -> Iterator[Table]:
    """The catalogue, a table for each kind."""
    columns = {
        "gpu": ("bf16 TFLOP/s", "fp8 TFLOP/s", "memory", "its rate", "link", "watts"),
        "drive": ("capacity", "read", "write", "drive writes a day", "watts"),
        "memory": ("a channel",),
        "network": ("an adapter",),
    }
    for kind, items in catalogue().items():
        rows = tuple((it.name, *_figures(it)) for it in items.values())
        names = columns[kind]
        yield Table(title=kind, columns=("name", *names), rows=rows, numeric=len(names))


def _figures(item: Item) -> Iterator[str]:
    for key, value in item.values.items():
        if key == "flops":
            yield from (digits(value[form] / 1e12) if form in value else NONE for form in ("bf16", "fp8"))
        elif key.endswith("bytes_per_s"):
            yield f"{bytes_text(value)}/s"
        else:
            yield bytes_text(value) if key.endswith("bytes") else f"{value:g}"
