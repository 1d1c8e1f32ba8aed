"""Published figures of an example compared with those of its plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.plan.plan import Plan, Variant, make_plan
from kvtier.plan.read_inputs import PUBLISHED, example_tables
from kvtier.report.format import bytes_text, rate_text, share_text
from kvtier.report.table import Table

HOW = {
    "arithmetic": "follows from the set-up or from other figures here, by arithmetic",
    "calibrated": "an unpublished input was set so that the plan gives the figure",
    "predicted": "result of the plan, with no input set for it",
    "unexplained": "the plan gives another figure",
}
"""Kinds of agreement and their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """One figure of a source, and that of the plan."""

    text: str
    published: float
    computed: float
    how: str
    note: str
    show: Callable[[float], str]
    """Formats the figure."""

    @property
    def off(self) -> float:
        """Relative difference of the plan's figure from the published one."""
        return self.computed / self.published - 1

    def to_json(self) -> dict[str, object]:
        """The figure as plain values."""
        keys = ("text", "published", "computed", "off", "how", "note")
        return {key: getattr(self, key) for key in keys}


def compare(example: str, plan: Plan) -> list[PublishedFigure]:
    """Compare the published figures of an example with those of a plan.

    Args:
        example: its name.
        plan: made from it, with or without changes.
    """
    plans: dict[int | None, Plan] = {None: plan}
    return [_figure(line, plan, plans) for line in example_tables(example)[PUBLISHED]]


def published_table(figures: list[PublishedFigure], *, with_notes: bool = False) -> Table:
    """The published figures of an example, compared with those of the plan."""
    columns = ("figure", "published", "plan", "off", "", *(("why",) if with_notes else ()))
    rows = [
        (it.text, it.show(it.published), it.show(it.computed), f"{it.off:+.0%}", it.how, it.note)[: len(columns)]
        for it in figures
    ]
    note = "; ".join(f"{word}: {meaning}" for word, meaning in HOW.items())
    return Table(columns, rows, title="Published figures and those of the plan", note=f"{note}.")


def _figure(line: Mapping[str, Any], plan: Plan, plans: dict[int | None, Plan]) -> PublishedFigure:
    """The figure of one line of the example; `plans` keeps the plans by their number of users."""
    users, name = line.get("users"), line["figure"]
    if users not in plans:
        changed = plan.inputs.change({"traffic.users": users}, "published")
        plans[users] = make_plan(changed, plan.deployment.trace, with_sensitivities=False)
    return PublishedFigure(
        text=line["text"],
        published=float(line["value"]),
        computed=FIGURES[name](plans[users]),
        how=line["how"],
        note=line["note"],
        show=_format(name),
    )


def _format(name: str) -> Callable[[float], str]:
    if name.endswith("bytes"):
        return bytes_text
    if name.endswith("bytes_per_s"):
        return rate_text
    return share_text if name.endswith(("share", "busy")) else lambda value: f"{value:.3g}"


def _read(plan: Plan) -> float:
    return sum(plan.tiered.point.read_bytes_per_s.values())


def _read_share(plan: Plan) -> float:
    return _read(plan) / (_read(plan) + max(plan.tiered.point.write_bytes_per_s.values()))


def _drive_power_share(plan: Plan) -> float:
    """Share of the drives in the power without drives, at the load at which it is highest."""
    return plan.inputs.disk.count * plan.inputs.disk.watts / plan.alone.cost.watts


def _ratio(of: Callable[[Variant], float]) -> Callable[[Plan], float]:
    return lambda plan: of(plan.tiered) / of(plan.alone)


FIGURES: dict[str, Callable[[Plan], float]] = {
    "chunk_bytes": lambda plan: plan.deployment.model.token_bytes * plan.inputs.software.chunk_tokens,
    "session_bytes": lambda plan: plan.deployment.model.stored_bytes(plan.deployment.workload.reusable_tokens),
    "session_chunks": lambda plan: plan.deployment.workload.reusable_tokens / plan.inputs.software.chunk_tokens,
    "read_share": _read_share,
    "read_bytes_per_s": _read,
    "users_alone": lambda plan: plan.alone.users_at_ttft,
    "users_tiered": lambda plan: plan.tiered.users_at_ttft,
    "users_ratio": _ratio(lambda it: it.users_at_ttft),
    "throughput_users_alone": lambda plan: plan.alone.throughput_users,
    "tokens_ratio": _ratio(lambda it: it.output_tokens_per_s),
    "ttft_tiered_s": lambda plan: plan.tiered.ttft_s,
    "depth": lambda plan: plan.drives.depth if plan.drives else 0.0,
    "depth_burst": lambda plan: plan.drives.depth_burst if plan.drives else 0.0,
    "tokens_per_price_ratio": _ratio(lambda it: it.cost.tokens_per_s_per_price or 0.0),
    "tokens_per_watt_ratio": _ratio(lambda it: it.cost.tokens_per_s_per_watt),
    "power_ratio": _ratio(lambda it: it.cost.watts),
    "drive_power_share": _drive_power_share,
    "gpu_busy": lambda plan: plan.tiered.point.gpu_busy,
}
"""Figures of a plan that a line of an example's ``[[published]]`` may name."""
