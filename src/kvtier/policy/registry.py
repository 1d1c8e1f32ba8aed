"""Eviction policies by name. To add one, add a line here, or an entry point in another package.

The group of entry points is `kvtier.evictors`; each is a callable without arguments.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from kvtier.errors import ConfigError
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.base import Evictor
from kvtier.policy.fifo import Fifo
from kvtier.policy.lru import Lru

EVICTORS: dict[str, Callable[[], Evictor]] = {"adaptive": Adaptive, "lru": Lru, "fifo": Fifo}
DEFAULT_EVICTOR = "adaptive"


def evictor_names() -> list[str]:
    """Names of all known policies, including those of packages that cannot be loaded."""
    return [*EVICTORS, *sorted(entry_points(group="kvtier.evictors").names - EVICTORS.keys())]


def make_evictor(name: str) -> Evictor:
    """A new evictor of the policy `name`.

    Raises:
        ConfigError: the policy is unknown, or its package cannot be loaded.
    """
    if name in EVICTORS:
        return EVICTORS[name]()
    points = entry_points(group="kvtier.evictors")
    if name not in points.names:
        known = ", ".join(sorted({*EVICTORS, *points.names}))
        raise ConfigError(f"unknown eviction policy {name!r}; allowed: {known}")
    try:
        return points[name].load()()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"eviction policy {name!r} cannot be loaded from {points[name].value!r}: {error}") from error
