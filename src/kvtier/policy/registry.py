"""Policies by name. A policy of one's own is a line here, or an entry point of the package that brings it.

The groups of entry points are `kvtier.evictors` and `kvtier.admitters`; each point is a callable without arguments.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvtier.errors import ConfigError
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.admission import AdmitAll, SecondSight
from kvtier.policy.base import Admitter, Evictor
from kvtier.policy.fifo import Fifo
from kvtier.policy.lru import Lru

EVICTORS: dict[str, Callable[[], Evictor]] = {"adaptive": Adaptive, "lru": Lru, "fifo": Fifo}
ADMITTERS: dict[str, Callable[[], Admitter]] = {"all": AdmitAll, "second-sight": SecondSight}


def make_evictor(name: str) -> Evictor:
    """A new evictor of the policy `name`.

    Raises:
        ConfigError: nobody provides `name` (the message lists who is known), or its package cannot be loaded.
    """
    return _find("eviction policy", name, EVICTORS, "kvtier.evictors")()


def make_admitter(name: str) -> Admitter:
    """A new admitter of the policy `name`.

    Raises:
        ConfigError: nobody provides `name` (the message lists who is known), or its package cannot be loaded.
    """
    return _find("admission policy", name, ADMITTERS, "kvtier.admitters")()


def _find(what: str, name: str, ours: Mapping[str, Callable[[], Any]], group: str) -> Callable[[], Any]:
    if name in ours:
        return ours[name]
    # Only who uses a policy from outside pays for this import.
    from importlib.metadata import entry_points  # noqa: PLC0415

    points = entry_points(group=group)
    if name in points.names:
        try:
            return points[name].load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{what} {name!r} cannot be loaded from {points[name].value!r}: {error}") from error
    known = ", ".join(sorted({*ours, *points.names}))
    raise ConfigError(f"unknown {what} {name!r}; known here: {known}")
