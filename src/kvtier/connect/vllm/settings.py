"""Our settings as vLLM carries them: `kv_connector_extra_config`, on top of the file and the environment."""

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
    """The settings of this engine; the same in every process of it that has the same environment.

    Raises:
        ConfigError: an unknown setting or a value that is not allowed; the message names it and where it came from.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return settings_from(extra or {}, load().config)


def settings_from(extra: Mapping[str, object], base: Config) -> Config:
    """`base` with what `extra` says, in sections (``{"host": {"evictor": "lru"}}``) or flat (``{"host.evictor": …}``).

    Raises:
        ConfigError: see `settings_of`; also a setting that is given in both forms.
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
