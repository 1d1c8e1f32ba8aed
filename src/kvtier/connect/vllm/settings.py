"""kvtier's settings in vLLM: `kv_connector_extra_config` overrides the settings file and the environment."""

from collections.abc import Iterator, Mapping
from typing import cast

from kvtier.config.loader import TIERS, load, override
from kvtier.config.sections import Config, find_section
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError

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
    return override(base, _entries(extra), _ORIGIN)


def _entries(extra: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in extra.items():
        if "." in name or name == TIERS:
            yield name, value
            continue
        find_section(name, _ORIGIN)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} (from {_ORIGIN}): allowed: a section of settings, such as {{...}}")
        for inner, raw in cast("Mapping[str, object]", value).items():
            yield f"{name}.{inner}", raw
