"""kvtier's settings in vLLM: `kv_connector_extra_config` overrides the settings file and the environment."""

from collections.abc import Mapping

from kvtier.config.loader import flat, load, override
from kvtier.config.sections import Config
from kvtier.connect.vllm.vllm_types import VllmConfig

_ORIGIN = "kv_connector_extra_config"


def settings_of(vllm_config: VllmConfig) -> Config:
    """The engine's settings; equal in all its processes that have the same environment.

    Raises:
        ConfigError: an unknown setting or an invalid value; the message names the setting and its origin.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return settings_from(extra or {}, load().config)


def settings_from(extra: Mapping[str, object], base: Config) -> Config:
    """Override `base` with `extra`, by section (``{"host": {"evictor": "lru"}}``) or flat (``{"host.evictor": …}``).

    ``{"tiers": [...]}`` replaces the list of tiers, and ``{"tiers.NAME.key": …}`` sets one value of a tier.

    Raises:
        ConfigError: see `settings_of`; also a setting given in both forms.
    """
    return override(base, flat(extra, _ORIGIN), _ORIGIN)
