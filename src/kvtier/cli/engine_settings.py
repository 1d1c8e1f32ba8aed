"""Settings that a command gives to an engine: what its flags say, as JSON, and notes on it."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.config.loader import TIERS, Loaded, flat, load, override
from kvtier.config.machine_checks import check
from kvtier.config.schema import Setting
from kvtier.config.sections import all_settings, value_of
from kvtier.config.tier_list import SettingOrigin
from kvtier.config.value_types import Hidden
from kvtier.errors import ConfigError
from kvtier.tier.registry import TierSettings

HOST_BYTES = "host.capacity_bytes"


def given(loaded: Loaded) -> dict[str, object]:
    """The settings that were given as flags, by section, without defaults.

    Raises:
        ConfigError: a flag is a secret, which a list of processes would show.
    """
    config = loaded.config
    extra: dict[str, Any] = {}
    if loaded.origins[TIERS].layer == "flag":
        extra[TIERS] = [_table(tier) for tier in config.tiers]
    for setting in _given(loaded, "flag"):
        value = value_of(config, setting)
        if isinstance(setting.kind, Hidden):
            raise ConfigError(
                f"{setting.name} (from {loaded.origins[setting.name]}): a secret is never printed; allowed: "
                f"--set {setting.name}_file=PATH, or the environment of the server"
            )
        if not setting.section.startswith(f"{TIERS}."):
            extra.setdefault(setting.section, {})[setting.key] = _plain(value)
        elif TIERS not in extra:
            extra[setting.name] = _plain(value)
    return extra


def _table(tier: TierSettings) -> dict[str, object]:
    """The tier as JSON, without defaults."""
    names = {"kind": tier.kind} if tier.name == tier.kind else {"name": tier.name, "kind": tier.kind}
    changed = {each.key: getattr(tier, each.key) for each in tier.settings()}
    changed = {each.key: changed[each.key] for each in tier.settings() if changed[each.key] != each.default}
    return {**names, **{key: _plain(value) for key, value in changed.items()}}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _given(loaded: Loaded, *layers: str) -> list[Setting]:
    return [setting for setting in all_settings(loaded.config) if loaded.origins[setting.name].layer in layers]


def notes(loaded: Loaded, unused: Iterable[str] = ()) -> list[str]:
    """Notes on valid settings, without those that the engine does not use."""
    findings = check(loaded.config, loaded.origins, loaded.file)
    return [str(finding) for finding in findings if finding.setting not in unused] + [
        f"{setting.name} is also set by {loaded.origins[setting.name]}; the server reads that itself, where it sees it"
        for setting in _given(loaded, "file", "environment")
    ]


def server_settings(tiers: Sequence[str], extra: Mapping[str, object] | None, origin: str) -> Loaded:
    """The settings of a server, as visible from here.

    Args:
        tiers: as `--tier` gives them; they replace the engine's.
        extra: what the engine gives; None: unknown.
        origin: of `extra`, for messages.

    Raises:
        ConfigError: a setting is wrong.
    """
    loaded = load(tiers=tiers)
    given = {name for name in (TIERS, HOST_BYTES) if loaded.origins[name].layer == "flag"}
    values = {name: value for name, value in flat(extra or {}, origin) if name not in given}
    config = override(loaded.config, values.items(), origin)
    names = [name for name in values if name != TIERS]
    if TIERS in values:
        names += [each.name for tier in config.tiers for each in tier.settings()]
    if config.host.capacity_bytes != loaded.config.host.capacity_bytes:  # a text of the list may name it
        names.append(HOST_BYTES)
    origins = {**loaded.origins, **dict.fromkeys(names, SettingOrigin("flag", origin))}
    return Loaded(config=config, origins=origins, file=loaded.file)
