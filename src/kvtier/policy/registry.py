"""Finds eviction policies by name. To add one, add a line here, or an entry point in another package.

The group of entry points is `kvtier.evictors`. Each entry point is a callable without arguments.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from kvtier.errors import ConfigError, check_interface, described
from kvtier.policy.base import Evictor, Hinted

EVICTORS = {
    # name: (module, class); a module is imported on first use
    "adaptive": ("kvtier.policy.adaptive", "Adaptive"),
    "lru": ("kvtier.policy.lru", "Lru"),
    "fifo": ("kvtier.policy.fifo", "Fifo"),
}
DEFAULT_EVICTOR = "adaptive"


def evictor_names() -> list[str]:
    """Return the names of all known policies, including those of packages that cannot be loaded."""
    return [*EVICTORS, *sorted(entry_points(group="kvtier.evictors").names - EVICTORS.keys())]


def make_evictor(name: str) -> Evictor:
    """Return a new evictor of the policy `name`.

    Raises:
        ConfigError: the policy is unknown, or its package cannot be loaded or is for another release of kvtier.
    """
    if name in EVICTORS:
        module, attribute = EVICTORS[name]
        return cast("Evictor", getattr(import_module(module), attribute)())
    points = entry_points(group="kvtier.evictors")
    if name not in points.names:
        raise ConfigError(f"unknown eviction policy {name!r}; allowed: {', '.join(sorted(evictor_names()))}")
    subject = f"eviction policy {name!r} ({points[name].value})"
    try:
        evictor: Evictor = points[name].load()()
    except Exception as error:
        raise ConfigError(f"{subject} cannot be loaded: {described(error)}") from error
    for interface in (Evictor, Hinted) if isinstance(evictor, Hinted) else (Evictor,):
        check_interface(evictor, interface, subject)
    return evictor
