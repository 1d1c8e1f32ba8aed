"""Dependence of the number of users on each input: the same plan with the input a fifth lower and a fifth higher."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.config.schema import Setting
from kvtier.errors import ConfigError
from kvtier.plan.inputs import SETTINGS, Inputs
from kvtier.plan.limits import most_users
from kvtier.plan.resolve import Deployment, resolve

STEP = 0.2
_SIZE = ("model.tp", "model.dp_attention")
"""What the search found, and what stays."""
_LOAD = frozenset((*_SIZE, "host.gpus", "traffic.users", "traffic.load", "target.gpu_used", "traffic.trace_window_s"))
"""Inputs of the requested load, which do not change the most that the deployment serves; the size, and the hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSensitivity:
    """Users within all limits, with tiers, for a lower and a higher value of one input."""

    name: str
    value: float
    lower: float | None
    """The lower value; None where it is not allowed."""
    higher: float | None
    users: float
    """Users with the planned value."""
    users_lower: float | None
    """Users with the lower value; None where no plan is possible with it."""
    users_higher: float | None

    @property
    def swing(self) -> float:
        """The largest relative change of the users."""
        changed = [it for it in (self.users_lower, self.users_higher) if it is not None and math.isfinite(it)]
        return max((abs(it - self.users) / self.users for it in changed if self.users), default=0.0)


def sensitivities(inputs: Inputs, deployment: Deployment) -> list[InputSensitivity]:
    """The sensitivity of every numeric input in use, the strongest first, at the size that the plan found.

    Args:
        inputs: as given, so that values from the catalogue follow a changed name.
        deployment: the same, resolved.
    """
    size = {name: deployment.inputs.value(name) for name in _SIZE}
    inputs = inputs.change(size, deployment.inputs.origin("model.tp"))
    users = most_users(deployment)
    found = [
        InputSensitivity(
            name=setting.name,
            value=value,
            lower=lower,
            higher=higher,
            users=users,
            users_lower=_changed(inputs, deployment, setting.name, lower, users),
            users_higher=_changed(inputs, deployment, setting.name, higher, users),
        )
        for setting, value, lower, higher in _numbers(deployment)
    ]
    return sorted(found, key=lambda it: -it.swing)


def _numbers(deployment: Deployment) -> Iterator[tuple[Setting, float, float | None, float | None]]:
    for name, setting in SETTINGS.items():
        value = deployment.inputs.value(name)
        if name in _LOAD or name.startswith("price."):  # prices change the cost, not the number of users
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            continue
        lower: float = value * (1 - STEP)
        higher: float = value * (1 + STEP)
        if isinstance(value, int):
            # A whole number moves by at least one; GPUs move by whole copies of the model.
            grain = deployment.inputs.model.tp if name == "gpu.count" else 1
            step = max(round(value * STEP / grain), 1) * grain
            whole = value // grain * grain
            lower, higher = whole - step, whole + step
        yield setting, value, _allowed(setting, lower), _allowed(setting, higher)


def _allowed(setting: Setting, value: float) -> float | None:
    try:
        read = setting.kind.read(value, is_text=False)
    except ValueError:
        return None
    return value if read else None  # 0 would mean something else


def _changed(inputs: Inputs, deployment: Deployment, name: str, value: float | None, users: float) -> float | None:
    if value is None:
        return None
    try:
        changed = resolve(inputs.change({name: value}, "sensitivity"), deployment.basis)
        changed = changed.without(*({it.name for it in changed.tiers} - {it.name for it in deployment.tiers}))
    except ConfigError:  # an impossible plan, such as a model that no longer fits
        return None
    near = users / deployment.workload.interval_s
    return most_users(changed, near=near if math.isfinite(near) else 0.0)
