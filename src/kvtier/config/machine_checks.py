"""Checks the settings against this machine. Read-only."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvtier.config.loader import SettingOrigin
from kvtier.config.probe_record import read_links
from kvtier.config.sections import HOW_TO_SHARE, Config, JournalConfig, TraceConfig
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.keys.secret import SECRET_BYTES
from kvtier.tier.machine import nearest_existing, path_problem
from kvtier.tier.registry import Problem, kind_of

MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limits of a container (cgroup 2, cgroup 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A setting that will not work (error) or not as expected (warning)."""

    level: Literal["error", "warning"]
    setting: str
    value: str
    origin: str
    detail: str

    def __str__(self) -> str:
        return f"{self.setting} = {self.value} (from {self.origin}): {self.detail}"


@dataclass(frozen=True, slots=True)
class _Reporter:
    origins: Mapping[str, SettingOrigin]

    def error(self, setting: str, value: object, detail: str) -> Finding:
        return self.finding("error", setting, value, detail)

    def warning(self, setting: str, value: object, detail: str) -> Finding:
        return self.finding("warning", setting, value, detail)

    def finding(self, level: Literal["error", "warning"], setting: str, value: object, detail: str) -> Finding:
        origin = str(self.origins.get(setting, "Python"))
        return Finding(level=level, setting=setting, value=str(value), origin=origin, detail=detail)


def check(
    config: Config, origins: Mapping[str, SettingOrigin] | None = None, file: Path | None = None
) -> list[Finding]:
    """Problems of `config` on this machine.

    Args:
        config: the settings.
        origins: their origins, for messages (`Loaded.origins`).
        file: the settings file, if any (`Loaded.file`).
    """
    reporter = _Reporter(origins or {})
    findings = [*_host(config, reporter), *_limits(config, reporter), *_tiers(config, reporter)]
    paths: tuple[tuple[str, Path | None, Iterator[Finding]], ...] = (
        ("store.secret_file", config.store.secret_file, _secret(config, reporter, file)),
        ("trace.path", config.trace.path, _lines("trace", config.trace, reporter)),
        ("journal.path", config.journal.path, _lines("journal", config.journal, reporter)),
        ("planner.probe_file", config.planner.probe_file, _probe(config, reporter)),
    )
    for setting, path, part in paths:
        try:
            findings += part
        except OSError as error:  # such as an unreadable parent directory, or a name that is too long
            findings.append(reporter.error(setting, path, f"{error.filename}: {error.strerror}"))
    return findings


def refuse_unusable(
    config: Config, origins: Mapping[str, SettingOrigin] | None = None, file: Path | None = None
) -> None:
    """Refuse settings that stop every start on this machine. Of tiers only required ones do, and only they are read.

    Raises:
        ConfigError: the message names the setting, its origin if known, and the problem.
    """
    required = replace(config, tiers=tuple(tier for tier in config.tiers if tier.required))
    for finding in check(required, origins, file):
        if finding.level == "error":
            raise ConfigError(str(finding).replace(" (from Python)", ""))


def memory_bytes(limits: tuple[Path, ...] = MEMORY_LIMITS) -> int:
    """Memory of this machine, or of this container if one of the files `limits` states less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():  # "max" without a limit
            total = min(total, int(limit))
    return total


def _host(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    wanted, total = config.host.capacity_bytes, memory_bytes()
    shown = size_text(wanted)
    if wanted > total:
        yield reporter.error("host.capacity_bytes", shown, f"more than the memory of this machine, {size_text(total)}")
    elif wanted > total * 0.9:
        detail = f"leaves less than a tenth of the memory, {size_text(total)}, to other programs"
        yield reporter.warning("host.capacity_bytes", shown, detail)


def _tiers(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    for tier in config.tiers:
        kind = kind_of(tier)
        known = {each.key: each for each in tier.settings()}
        try:
            problems = [*kind.check(tier)]
        except OSError as error:  # such as an unreadable parent directory, or a name that is too long
            problems = [Problem("error", kind.where, f"{error.filename}: {error.strerror}")]
        except Exception as error:  # noqa: BLE001 - a kind of another package
            problems = [Problem("error", kind.where, f"the check of kind {kind.name} failed: {error!r}")]
        for level, key, detail in problems:
            value = known[key].kind.show(getattr(tier, key)) if key in known else ""
            yield reporter.finding(level, f"{tier.label}.{key}", value, detail)
        load_s = config.limits.load_deadline_s
        for key, more in (("probe_deadline_s", ""), ("transfer_deadline_s", ": loads end before their transfers")):
            if getattr(tier, key) > load_s:
                detail = f"longer than limits.load_deadline_s, {load_s:g} s{more}"
                yield reporter.warning(f"{tier.label}.{key}", f"{getattr(tier, key):g} s", detail)


def _lines(section: str, settings: TraceConfig | JournalConfig, reporter: _Reporter) -> Iterator[Finding]:
    path = settings.path
    if path is None:
        yield from _without_effect(section, settings, reporter)
        return
    problem = path_problem(path, nearest_existing(path))
    if problem is not None:
        yield reporter.error(f"{section}.path", path, problem)


def _probe(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    path = config.planner.probe_file
    if path is None:
        return
    try:
        read_links(path, "")
    except ConfigError as error:
        yield reporter.error("planner.probe_file", path, str(error).partition(": ")[2])


def _without_effect(section: str, settings: object, reporter: _Reporter) -> Iterator[Finding]:
    for name, origin in reporter.origins.items():
        if name.startswith(f"{section}.") and name != f"{section}.path" and origin.layer != "default":
            value = getattr(settings, name.partition(".")[2])
            yield reporter.warning(name, value, f"has no effect: {section}.path is not set")


def _secret(config: Config, reporter: _Reporter, file: Path | None) -> Iterator[Finding]:
    path = config.store.secret_file
    if path is not None:
        is_shared = any(kind_of(tier).is_shared(tier) for tier in config.tiers)
        yield from _secret_file(path, reporter, is_shared=is_shared)
    origin = reporter.origins.get("store.secret")
    if origin is None or config.store.secret is None:
        return
    if origin.layer == "file" and file is not None and _is_open_to_others(file):
        yield reporter.warning("store.secret", "(set)", f"other users can read {file}; chmod 600")
    if origin.layer == "flag":
        yield reporter.warning("store.secret", "(set)", "other users can see a flag in the list of processes")


def _secret_file(path: Path, reporter: _Reporter, *, is_shared: bool) -> Iterator[Finding]:
    if is_shared and not path.exists():
        yield reporter.error(
            "store.secret_file", path, f"it does not exist, and a shared tier needs it; {HOW_TO_SHARE}"
        )
    elif not path.exists():  # it will be created
        nearest = path.parent
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            yield reporter.error(
                "store.secret_file", path, f"it does not exist, and {nearest} is not a writable directory"
            )
    elif not path.is_file():
        yield reporter.error("store.secret_file", path, "not a file")
    elif not os.access(path, os.R_OK):
        yield reporter.error("store.secret_file", path, "cannot be read by this user")
    elif _is_open_to_others(path):
        yield reporter.error("store.secret_file", path, f"other users can read it; chmod 600 {path}")
    elif path.stat().st_size != SECRET_BYTES:
        yield reporter.error("store.secret_file", path, f"must hold {SECRET_BYTES} bytes")


def _limits(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    if (
        config.store.write_policy != "selective"
        and reporter.origins.get("store.selective_uses", SettingOrigin("default")).where
    ):
        detail = f"has no effect: store.write_policy is {config.store.write_policy}"
        yield reporter.warning("store.selective_uses", config.store.selective_uses, detail)


def _is_open_to_others(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO))
