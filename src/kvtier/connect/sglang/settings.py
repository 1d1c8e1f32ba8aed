"""kvtier's settings in SGLang: the extra config overrides the settings file and the environment."""

from collections.abc import Mapping

from kvtier.config.loader import flat, load, override
from kvtier.config.sections import Config
from kvtier.connect.sglang.installed import EXTRA, settings_in
from kvtier.errors import ConfigError


def settings_of(extra: Mapping[str, object] | None) -> Config:
    """The engine's settings; equal in all its processes that have the same environment.

    Args:
        extra: the value of ``--hicache-storage-backend-extra-config``, without the keys that SGLang has removed.

    Raises:
        ConfigError: an unknown setting or an invalid value, no tier, or no ``interface_v1``.
    """
    given = extra or {}
    if not given.get("interface_v1"):
        raise ConfigError(
            f"{EXTRA}: interface_v1 = {given.get('interface_v1')!r}; allowed: 1. Without it SGLang copies each page "
            "once more, in another order"
        )
    config = override(load().config, flat(settings_in(given), EXTRA), EXTRA)
    if not config.tiers:
        raise ConfigError(f'{EXTRA}: no tier; allowed: at least one, such as "tiers": ["disk:/path/to/kv"]')
    return config
