"""kvtier's settings in vLLM: `kv_connector_extra_config` overrides the settings file and the environment."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from kvtier.config.loader import load
from kvtier.config.schema import read
from kvtier.config.sections import Config, find, find_section
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

    Raises:
        ConfigError: see `settings_of`; also a setting given in both forms.
    """
    sections: dict[str, dict[str, object]] = {}
    for section, key, raw in _entries(extra):
        setting = find(find_section(section, _ORIGIN), key, _ORIGIN)
        values = sections.setdefault(section, {})
        if key in values:
            raise ConfigError(f"{setting.name} (from {_ORIGIN}): given twice; allowed: one of the two forms")
        values[key] = read(setting, raw, _ORIGIN, is_text=False)
    parts = {section: replace(getattr(base, section), **values) for section, values in sections.items()}
    return replace(base, **parts)


def _entries(extra: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    for name, value in extra.items():
        section, dot, key = name.partition(".")
        if dot:
            yield section, key, value
            continue
        find_section(section, _ORIGIN)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} (from {_ORIGIN}): allowed: a section of settings, such as {{...}}")
        for inner, raw in cast("Mapping[str, object]", value).items():
            yield section, str(inner), raw
