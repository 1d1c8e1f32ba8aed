"""What somebody stated about a set-up, next to what the plan says: which figures follow, and which do not."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.plan.limits import in_users
from kvtier.plan.planning import Plan, Side, make_plan
from kvtier.plan.reading import STATED, example_tables
from kvtier.report.format import bytes_text, rate_text, share_text

HOW = {
    "arithmetic": "follows from the set-up or from other figures here, by arithmetic",
    "calibrated": "an input that is not published was set so that it comes out",
    "predicted": "comes out of the plan, and nothing was set for it",
    "unexplained": "the plan says something else",
}
"""What the words mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """One figure of a source, and the plan's."""

    text: str
    stated: float
    computed: float
    how: str
    note: str
    show: Callable[[float], str]
    """How its figure is written."""

    @property
    def off(self) -> float:
        """By how much the plan's figure is above the stated one, as a share of that."""
        return self.computed / self.stated - 1


def compare(example: str, plan: Plan) -> list[Stated]:
    """What the source of an example stated, each figure beside that of the plan.

    Args:
        example: its name.
        plan: made from it, or from it with changes.
    """
    at_users: dict[int | None, Plan] = {None: plan}
    return [
        Stated(
            text=it["text"],
            stated=float(it["value"]),
            computed=_computed(it, plan, at_users),
            how=it["how"],
            note=it["note"],
            show=_shown(it["figure"]),
        )
        for it in _stated(example)
    ]


def figure_names() -> list[str]:
    """What a line of ``[[stated]]`` may name as its figure."""
    return sorted(_FIGURES)


def _stated(example: str) -> Iterable[Mapping[str, Any]]:
    return example_tables(example)[STATED]


def _computed(stated: Mapping[str, Any], plan: Plan, at_users: dict[int | None, Plan]) -> float:
    users = stated.get("users")
    if users not in at_users:
        changed = plan.inputs.change({"traffic.users": users}, "stated")
        at_users[users] = make_plan(changed, plan.setup.trace, with_levers=False)
    return _FIGURES[stated["figure"]](at_users[users])


def _shown(figure: str) -> Callable[[float], str]:
    if figure.endswith("bytes"):
        return bytes_text
    if figure.endswith("bytes_per_s"):
        return rate_text
    return share_text if figure.endswith(("share", "busy")) else lambda value: f"{value:.3g}"


def _read(plan: Plan) -> float:
    return sum(plan.tiered.point.read_bytes_per_s.values())


def _read_share(plan: Plan) -> float:
    return _read(plan) / (_read(plan) + max(plan.tiered.point.write_bytes_per_s.values()))


def _drive_power_share(plan: Plan) -> float:
    """Of the power without them, at the load at which that is highest."""
    return plan.inputs.disk.count * plan.inputs.disk.watts / plan.alone.cost.watts


def _ratio(of: Callable[[Side], float]) -> Callable[[Plan], float]:
    return lambda plan: of(plan.tiered) / of(plan.alone)


def _depth(plan: Plan) -> float:
    return plan.drives.depth if plan.drives else 0.0


_FIGURES: dict[str, Callable[[Plan], float]] = {
    "chunk_bytes": lambda plan: plan.setup.shape.token_bytes * plan.inputs.software.chunk_tokens,
    "session_bytes": lambda plan: plan.setup.shape.stored_bytes(plan.setup.demand.reusable_tokens),
    "session_chunks": lambda plan: plan.setup.demand.reusable_tokens / plan.inputs.software.chunk_tokens,
    "read_share": _read_share,
    "read_bytes_per_s": _read,
    "users_alone": lambda plan: plan.alone.users_at_ttft,
    "users_tiered": lambda plan: plan.tiered.users_at_ttft,
    "users_ratio": _ratio(lambda side: side.users_at_ttft),
    "throughput_users_alone": lambda plan: in_users(plan.setup, plan.alone.throughput_per_s),
    "tokens_ratio": _ratio(lambda side: side.output_tokens_per_s),
    "ttft_tiered_s": lambda plan: plan.tiered.ttft_s,
    "depth": _depth,
    "depth_burst": lambda plan: _depth(plan) * plan.inputs.target.burst,
    "tokens_per_price_ratio": _ratio(lambda side: side.cost.tokens_per_s_per_price or 0.0),
    "tokens_per_watt_ratio": _ratio(lambda side: side.cost.tokens_per_s_per_watt),
    "power_ratio": _ratio(lambda side: side.cost.watts),
    "drive_power_share": _drive_power_share,
    "gpu_busy": lambda plan: plan.tiered.point.gpu_busy,
}
"""Name of a figure to what it is of a plan."""
