"""How the answer depends on each input: the same plan with the input a fifth lower and a fifth higher."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.config.schema import Setting
from kvtier.errors import ConfigError
from kvtier.plan.inputs import SETTINGS, Inputs
from kvtier.plan.limits import TTFT, highest_load, in_users
from kvtier.plan.setup import Setup, set_up

STEP = 0.2
_NO_NUMBERS = (str, bool, type(None))
_ASKED = frozenset(("traffic.users", "traffic.load", "target.gpu_used", "traffic.trace_window_s"))
"""These say how much is asked for, not what the set-up can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Two answers of a plan: what is met first of all limits, and of the time to first token alone."""

    every_limit: float
    ttft: float

    def change(self, other: "Users") -> float:
        """The larger of the changes from here to `other`, as a share."""
        pairs = ((self.every_limit, other.every_limit), (self.ttft, other.ttft))
        return max((abs(there - here) / here for here, there in pairs if here and math.isfinite(there)), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What one input does to the number of users that the set-up serves with tiers."""

    name: str
    value: float
    lower: float | None
    """The value that was tried below; None where it is not allowed."""
    higher: float | None
    users: Users
    """As planned."""
    users_lower: Users | None
    """With the lower value; None where there is no plan with it."""
    users_higher: Users | None

    @property
    def ttft_swing(self) -> float:
        """The larger of the changes of the users within the limit of the time to first token, as a share."""
        changed = [it.ttft for it in (self.users_lower, self.users_higher) if it and math.isfinite(it.ttft)]
        return max((abs(it / self.users.ttft - 1) for it in changed), default=0.0) if self.users.ttft else 0.0

    @property
    def swing(self) -> float:
        """The larger of the two changes, as a share of what is planned."""
        return max((self.users.change(it) for it in (self.users_lower, self.users_higher) if it), default=0.0)


def levers(inputs: Inputs, setup: Setup) -> list[Lever]:
    """Every numeric input that was used, the strongest first.

    Args:
        inputs: as they were given, so that what the catalogue gives follows from them.
        setup: what they came to.
    """
    users = _users(setup)
    found = [
        Lever(
            name=setting.name,
            value=value,
            lower=lower,
            higher=higher,
            users=users,
            users_lower=_changed(inputs, setup, setting.name, lower),
            users_higher=_changed(inputs, setup, setting.name, higher),
        )
        for setting, value, lower, higher in _numbers(setup)
    ]
    return sorted(found, key=lambda it: -it.swing)


def _numbers(setup: Setup) -> Iterator[tuple[Setting, float, float | None, float | None]]:
    for name, setting in SETTINGS.items():
        value = setup.inputs.value(name)
        if isinstance(value, _NO_NUMBERS) or not isinstance(value, int | float) or not value or name in _ASKED:
            continue
        if name.startswith("price."):
            continue  # prices change what it costs, not what it does
        lower: float = value * (1 - STEP)
        higher: float = value * (1 + STEP)
        if isinstance(value, int):
            # A whole number moves by at least one; GPUs move by whole replicas.
            grain = setup.inputs.model.tp if name == "gpu.count" else 1
            step = max(round(value * STEP / grain), 1) * grain
            lower, higher = value - step, value + step
        yield setting, value, _allowed(setting, lower), _allowed(setting, higher)


def _allowed(setting: Setting, value: float) -> float | None:
    try:
        read = setting.kind.read(value, is_text=False)
    except ValueError:
        return None
    return value if read else None  # 0 would mean something else


def _changed(inputs: Inputs, setup: Setup, name: str, value: float | None) -> Users | None:
    if value is None:
        return None
    try:
        return _users(set_up(inputs.change({name: value}, "sensitivity"), setup.trace))
    except ConfigError:  # what the change makes impossible, such as a model that no longer fits
        return None


def _users(setup: Setup) -> Users:
    return Users(
        every_limit=in_users(setup, highest_load(setup, with_tiers=True)),
        ttft=in_users(setup, highest_load(setup, with_tiers=True, only=TTFT)),
    )
