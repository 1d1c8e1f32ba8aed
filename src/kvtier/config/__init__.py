"""Settings: one frozen tree, read once, every value knowing where it came from."""

from kvtier.config.loader import Loaded, Origin, load
from kvtier.config.machine import Finding, check
from kvtier.config.sections import (
    SECTIONS,
    Config,
    DirectoryConfig,
    DiskConfig,
    HostConfig,
    LimitsConfig,
    PlannerConfig,
    Setting,
    StoreConfig,
    settings,
    value_of,
)

__all__ = [
    "SECTIONS",
    "Config",
    "DirectoryConfig",
    "DiskConfig",
    "Finding",
    "HostConfig",
    "LimitsConfig",
    "Loaded",
    "Origin",
    "PlannerConfig",
    "Setting",
    "StoreConfig",
    "check",
    "load",
    "settings",
    "value_of",
]
