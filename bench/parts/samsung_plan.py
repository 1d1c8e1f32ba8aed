"""Samsung's published figures compared with those of the plan of its test (``kvtier plan --example samsung``).

Four lists: figures that follow from the set-up; figures for which an input was set; figures that the plan predicts,
with no input set for them; and figures that it does not explain.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.report.format import bytes_text, rate_text, share_text
from kvtier.tools.plan.plan import Plan, Variant, make_plan

TABLES = tomllib.loads((Path(__file__).parent / "samsung_plan.toml").read_text(encoding="utf-8"))
"""``published``: the figures. ``calibrated``: inputs that were set, and the figure that each reproduces."""

HOW = {
    "set": "follows from the published set-up, by arithmetic",
    "calibrated": "an unpublished input was set so that the plan gives the figure, so it is no evidence",
    "predicted": "result of the plan, with no input set for it",
    "unexplained": "the plan gives another figure",
}
"""Kinds of agreement and their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """One figure of a source, and that of the plan."""

    text: str
    published: float
    is_least: bool
    """The source claims more than `published`, without a figure."""
    computed: float
    how: str
    note: str
    show: Callable[[float], str]
    """Formats the figure."""

    @property
    def off(self) -> float:
        """Relative difference of the plan's figure from the published one."""
        off = self.computed / self.published - 1
        return 0.0 if self.is_least and off > 0 else off


def compare(plan: Plan) -> list[PublishedFigure]:
    """Compare the published figures with those of a plan of the example, with or without changes."""
    plans: dict[int | None, Plan] = {None: plan}
    return [_figure(line, plan, plans) for line in TABLES["published"]]


def figure_row(figure: PublishedFigure) -> tuple[str, ...]:
    """Text, published and computed figure, difference and note."""
    published = f"> {figure.show(figure.published)}" if figure.is_least else figure.show(figure.published)
    off = "" if figure.is_least else f"{figure.off:+.0%}"
    return figure.text, published, figure.show(figure.computed), off, figure.note


def _figure(line: Mapping[str, Any], plan: Plan, plans: dict[int | None, Plan]) -> PublishedFigure:
    """The figure of one line of the example; `plans` keeps the plans by their number of users."""
    users, name = line.get("users"), line["figure"]
    if users not in plans:
        plans[users] = _plan_for(plan, users)
    return PublishedFigure(
        text=line["text"],
        published=float(line.get("value") or line["more_than"]),
        is_least="more_than" in line,
        computed=FIGURES[name](plans[users]),
        how=line["how"],
        note=line["note"],
        show=_format(name),
    )


def _plan_for(plan: Plan, users: int | None) -> Plan:
    changed = plan.inputs.change({"traffic.users": users}, "published")
    return make_plan(changed, plan.deployment.basis, with_sensitivities=False)


def _format(name: str) -> Callable[[float], str]:
    if name.endswith("bytes"):
        return bytes_text
    if name.endswith("bytes_per_s"):
        return rate_text
    return share_text if name.endswith(("share", "busy")) else lambda value: f"{value:.3g}"


def _read(plan: Plan) -> float:
    return sum(plan.given.point.read_bytes_per_s.values())


def _read_share(plan: Plan) -> float:
    return _read(plan) / (_read(plan) + max(plan.given.point.write_bytes_per_s.values()))


def _drive_power_share(plan: Plan) -> float:
    """Share of the drives in the power without drives, at the load at which it is highest."""
    return plan.inputs.disk.count * plan.inputs.disk.watts * plan.inputs.power.pue / plan.alone.cost.watts


def _ttft_spread(plan: Plan) -> float:
    """Rise of the time to first token from 20 to 140 users with GPU memory alone, over that with tiers."""
    few, many = _plan_for(plan, 20), _plan_for(plan, 140)
    return (many.alone.ttft_s - few.alone.ttft_s) / (many.tiered.ttft_s - few.tiered.ttft_s)


def _drive_cost_share(plan: Plan) -> float:
    return (plan.given.cost.bought or 0.0) / (plan.alone.cost.bought or math.inf) - 1


def _ratio(of: Callable[[Variant], float]) -> Callable[[Plan], float]:
    return lambda plan: of(plan.tiered) / of(plan.alone)


FIGURES: dict[str, Callable[[Plan], float]] = {
    "chunk_bytes": lambda plan: plan.deployment.model.token_bytes * plan.inputs.software.chunk_tokens,
    "session_bytes": lambda plan: plan.deployment.model.stored_bytes(plan.deployment.workload.reusable_tokens),
    "session_chunks": lambda plan: plan.deployment.workload.reusable_tokens / plan.inputs.software.chunk_tokens,
    "read_share": _read_share,
    "read_bytes_per_s": _read,
    "users_alone": lambda plan: plan.alone.users_at_ttft,
    "users_tiered": lambda plan: plan.given.users_at_ttft,
    "users_ratio": _ratio(lambda it: it.users_at_ttft),
    "throughput_users_alone": lambda plan: plan.alone.throughput_users,
    "tokens_ratio": _ratio(lambda it: it.output_tokens_per_s),
    "ttft_tiered_s": lambda plan: plan.given.ttft_s,
    "ttft_ratio": lambda plan: plan.alone.ttft_s / plan.given.ttft_s,
    "ttft_spread": _ttft_spread,
    "drive_cost_share": _drive_cost_share,
    "depth": lambda plan: plan.drives.depth if plan.drives else 0.0,
    "depth_burst": lambda plan: plan.drives.depth * plan.inputs.target.burst if plan.drives else 0.0,
    "tokens_per_price_ratio": _ratio(lambda it: it.cost.tokens_per_s_per_price or 0.0),
    "tokens_per_watt_ratio": _ratio(lambda it: it.cost.tokens_per_s_per_watt),
    "power_ratio": _ratio(lambda it: it.cost.watts),
    "drive_power_share": _drive_power_share,
    "gpu_busy": lambda plan: plan.given.point.gpu_busy,
}
"""Figures of a plan that a line of an example's ``[[published]]`` may name."""
