"""Settings that a command passes on to an engine: those given as flags, as JSON, and notes on them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier.config.loader import TIERS, Loaded, flat, load, overridden
from kvtier.config.machine_checks import check
from kvtier.config.schema import Setting
from kvtier.config.sections import all_settings, value_of
from kvtier.config.tier_list import SettingOrigin
from kvtier.config.value_types import Hidden
from kvtier.errors import ConfigError
from kvtier.tier.registry import TierSettings

HOST_BYTES = "host.capacity_bytes"


def given(loaded: Loaded) -> dict[str, object]:
    """Return the settings given as flags, by section, without defaults.

    Raises:
        ConfigError: a flag holds a secret, which a list of processes would show.
    """
    config = loaded.config
    extra: dict[str, Any] = {}
    if loaded.origins[TIERS].layer == "flag":
        extra[TIERS] = [_table(tier) for tier in config.tiers]
    for setting in _given(loaded, "flag"):
        value = value_of(config, setting)
        if isinstance(setting.kind, Hidden):
            raise ConfigError(
                "a secret is never printed",
                setting=setting.name,
                origin=loaded.origins[setting.name],
                allowed=f"--set {setting.name}_file=PATH, or an environment variable of the server",
            )
        if not setting.section.startswith(f"{TIERS}."):
            extra.setdefault(setting.section, {})[setting.key] = _plain(value)
        elif TIERS not in extra:
            extra[setting.name] = _plain(value)
    return extra


def _table(tier: TierSettings) -> dict[str, object]:
    """Return the tier as JSON, without defaults."""
    names = {"kind": tier.kind} if tier.name == tier.kind else {"name": tier.name, "kind": tier.kind}
    changed = {each.key: getattr(tier, each.key) for each in tier.settings()}
    changed = {each.key: changed[each.key] for each in tier.settings() if changed[each.key] != each.default}
    return {**names, **{key: _plain(value) for key, value in changed.items()}}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _given(loaded: Loaded, *layers: str) -> list[Setting]:
    return [setting for setting in all_settings(loaded.config) if loaded.origins[setting.name].layer in layers]


def notes(loaded: Loaded, unused: Iterable[str] = ()) -> list[str]:
    """Return notes on two kinds of settings.

    The first are those that `check` has findings about on this machine, except the settings in `unused`. The second are
    those that come from a file or an environment variable rather than a flag.
    """
    findings = check(loaded.config, loaded.origins, loaded.file)
    return [str(finding) for finding in findings if finding.setting not in unused] + [
        f"{setting.name} is also set by {loaded.origins[setting.name]}; the server reads it itself, if it has access"
        for setting in _given(loaded, "file", "environment")
    ]


def server_settings(tiers: Sequence[str], extra: Mapping[str, object] | None, origin: str) -> Loaded:
    """Read the settings of a server, as far as they are visible from here.

    Args:
        tiers: values of `--tier`, which replace the engine's tiers.
        extra: settings that the engine passes; None if unknown.
        origin: name of the source of `extra`, for messages.

    Raises:
        ConfigError: a setting is wrong.
    """
    loaded = load(tiers=tiers)
    given = {name for name in (TIERS, HOST_BYTES) if loaded.origins[name].layer == "flag"}
    values = [(name, value) for name, value in flat(extra or {}, origin) if name not in given]
    return overridden(loaded, values, SettingOrigin("flag", origin))
