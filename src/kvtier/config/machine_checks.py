"""Checks the settings against this machine without changing anything."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvtier.codec.registry import coders
from kvtier.config.sections import HOW_TO_SHARE, Config, all_settings, value_of
from kvtier.config.tier_list import SettingOrigin
from kvtier.config.value_types import FileLocation, size_text
from kvtier.device.control_groups import memory_limit
from kvtier.errors import ConfigError, UnusablePathError, described
from kvtier.keys.key_source import read_file
from kvtier.keys.secret import load
from kvtier.tier.files.path_checks import nearest_existing, path_problem, tier_file
from kvtier.tier.registry import Problem, TierSettings, is_sealed, kind_of

_DEFAULT = SettingOrigin("default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A setting that will not work (error), will not work as expected (warning) or has a cost (note)."""

    level: Literal["error", "warning", "note"]
    setting: str
    value: str
    origin: str
    detail: str

    def __str__(self) -> str:
        return f"{self.setting} = {self.value} (from {self.origin}): {self.detail}"


def check(
    config: Config, origins: Mapping[str, SettingOrigin] | None = None, file: Path | None = None
) -> list[Finding]:
    """Return the problems that `config` has on this machine.

    Args:
        config: the settings.
        origins: their origins, for messages (`Loaded.origins`).
        file: the settings file, if any (`Loaded.file`).
    """
    origins = origins or {}
    load_s = config.limits.load_deadline_s
    parts = (
        ("host.capacity_bytes", _host(config)),
        *((f"{tier.label}.{kind_of(tier).where}", _tier(tier, load_s)) for tier in config.tiers),
        ("store.codec", _packages(config)),
        ("store.loss", _loss(config)),
        ("store.secret_file", _secret(config, origins, file)),
        ("trace.path", _lines("trace", config.trace.path, origins)),
        ("journal.path", _lines("journal", config.journal.path, origins)),
    )
    problems: list[Problem] = []
    for name, part in parts:
        try:
            problems += part
        except OSError as error:  # such as an unreadable parent directory, or a name that is too long
            problems.append(Problem("error", name, f"{error.filename}: {error.strerror}"))
    known = {setting.name: setting for setting in all_settings(config)}
    findings: list[Finding] = []
    for level, name, detail in problems:
        value = known[name].kind.show(value_of(config, known[name])) if name in known else ""
        origin = str(origins.get(name, "Python"))
        findings.append(Finding(level=level, setting=name, value=value, origin=origin, detail=detail))
    return findings


def refuse_unusable(
    config: Config,
    origins: Mapping[str, SettingOrigin] | None = None,
    file: Path | None = None,
    *,
    is_start: bool = False,
) -> None:
    """Refuse settings that cannot work on this machine. Tiers that are not required are not checked.

    Args:
        config: the settings.
        origins: their origins, for messages (`Loaded.origins`).
        file: the settings file, if any (`Loaded.file`).
        is_start: whether an engine is starting. A bad path does not stop a start unless a required tier needs it.

    Raises:
        ConfigError: the message names the setting, its origin if known, and the problem.
    """
    required = replace(config, tiers=tuple(tier for tier in config.tiers if tier.required))
    passing: set[str] = set()
    if is_start:
        passing = {
            "trace.path",
            "journal.path",
            "" if required.tiers else "store.secret_file",
            "" if any(map(is_sealed, required.tiers)) else "store.keys_file",
        }
    for finding in check(required, origins, file):
        if finding.level == "error" and finding.setting not in passing:
            raise ConfigError(
                finding.detail,
                setting=finding.setting,
                value=finding.value,
                origin=finding.origin.removeprefix("Python"),
            )


def memory_bytes() -> int:
    """Return the memory of this machine, or the smallest limit of this process's control groups if that is less."""
    return _memory()[0]


def _memory() -> tuple[int, str]:
    """Return `memory_bytes`, and a description of it."""
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    if limit is None or limit[0] >= total:
        return total, f"the memory of this machine, {size_text(total)}"
    return limit[0], f"the memory limit {size_text(limit[0])} of a control group ({limit[1]})"


def _host(config: Config) -> Iterator[Problem]:
    wanted, (total, what) = config.host.capacity_bytes, _memory()
    if wanted > total:
        yield Problem("error", "host.capacity_bytes", f"more than {what}")
    elif wanted > total * 0.9:
        yield Problem("warning", "host.capacity_bytes", f"leaves less than a tenth of {what} to other programs")


def _tier(tier: TierSettings, load_s: float) -> Iterator[Problem]:
    kind = kind_of(tier)
    try:
        for level, key, detail in kind.check(tier):
            yield Problem(level, f"{tier.label}.{key}", detail)
    except OSError as error:  # such as an unreadable parent directory, or a name that is too long
        yield Problem("error", f"{tier.label}.{kind.where}", f"{error.filename}: {error.strerror}")
    except Exception as error:  # noqa: BLE001 - a kind of another package
        yield Problem(
            "error", f"{tier.label}.{kind.where}", f"the check of kind {kind.name} failed: {described(error)}"
        )
    for each in tier.settings():
        if isinstance(each.kind, FileLocation) and getattr(tier, each.key) is not None:
            try:
                tier_file(tier, each.key)
            except UnusablePathError as error:
                yield Problem("error", each.name, error.detail)
    for key, more in (("probe_deadline_s", ""), ("transfer_deadline_s", ", so loads end before their transfers")):
        if getattr(tier, key) > load_s:
            detail = f"longer than limits.load_deadline_s, {load_s:g} s{more}"
            yield Problem("warning", f"{tier.label}.{key}", detail)


def _packages(config: Config) -> Iterator[Problem]:
    """Yield codecs and seals whose packages are not installed. A missing package prevents every start.

    The tiers of an engine with a lossy class may hold objects of its codec, regardless of their own codecs.
    """
    codecs = {f"{tier.label}.codec" if tier.codec else "store.codec": config.codec_of(tier) for tier in config.tiers}
    if codecs and config.store.loss not in ("none", *codecs.values()):
        codecs["store.loss"] = config.store.loss
    for name, codec in codecs.items():
        try:
            coders(codec)
        except ConfigError as error:
            yield Problem("error", name, str(error))
    for tier in filter(is_sealed, config.tiers):
        try:
            import_module("kvtier.codec.seal")
        except ConfigError as error:
            yield Problem("error", f"{tier.label}.seal", str(error))


def _loss(config: Config) -> Iterator[Problem]:
    """Yield the meaning of a lossy class, and the reason why its codec is slow."""
    store = config.store
    if store.loss_notice:
        yield Problem("note", "store.loss", store.loss_notice)
    if store.loss in map(config.codec_of, config.tiers) and find_spec("numba") is None:
        yield Problem("warning", "store.loss", "the package numba is not installed, so coding and decoding are slower")


def _lines(section: str, path: Path | None, origins: Mapping[str, SettingOrigin]) -> Iterator[Problem]:
    if path is not None:
        problem = path_problem(path, nearest_existing(path))
        if problem is not None:
            yield Problem("error", f"{section}.path", problem)
    elif origins.get(f"{section}.capacity_bytes", _DEFAULT).layer != "default":
        yield Problem("warning", f"{section}.capacity_bytes", f"has no effect: {section}.path is not set")


def _secret(config: Config, origins: Mapping[str, SettingOrigin], file: Path | None) -> Iterator[Problem]:
    path = config.store.secret_file
    if path is not None:
        problem = _secret_file_problem(path, is_shared=any(kind_of(tier).is_shared(tier) for tier in config.tiers))
        if problem:
            yield Problem("error", "store.secret_file", problem)
    if config.store.keys_file is not None:
        try:
            read_file(config.store.keys_file)
        except ConfigError as error:
            yield Problem("error", "store.keys_file", error.detail)
    for name in ("store.secret", "store.keys"):
        layer = origins.get(name, _DEFAULT).layer
        if layer == "file" and file is not None and _is_open_to_others(file):
            yield Problem("warning", name, f"other users can read {file}; run chmod 600 on it")
        if layer == "flag":
            yield Problem("warning", name, "other users can see a flag in the process list")


def _secret_file_problem(path: Path, *, is_shared: bool) -> str:
    """Return the reason why the file cannot provide the secret; empty if it can."""
    try:
        found = load(path)
    except ConfigError as error:
        return error.detail
    if found is not None:
        return ""
    if is_shared:
        return f"it does not exist, and a shared tier needs it; {HOW_TO_SHARE}"
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        return f"it does not exist, and {path.parent} is not a writable directory"
    return ""  # it will be created


def _is_open_to_others(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO))
