"""Checks the settings against this machine. Read-only."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Literal

from kvtier.config.loader import Origin
from kvtier.config.probe_record import read_links
from kvtier.config.sections import Config, DirectoryConfig, DiskConfig
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.keys.secret import SECRET_BYTES
from kvtier.tier.directory_marker import DamagedMarkerError, read_marker, refuse_foreign
from kvtier.tier.disk_marker import MARKER_NAME as DISK_MARKER_NAME
from kvtier.tier.disk_marker import refuse_foreign_ranks
from kvtier.tier.safe_open import refuse_public

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
    origins: Mapping[str, Origin]

    def error(self, setting: str, value: object, detail: str) -> Finding:
        return self._finding("error", setting, value, detail)

    def warning(self, setting: str, value: object, detail: str) -> Finding:
        return self._finding("warning", setting, value, detail)

    def _finding(self, level: Literal["error", "warning"], setting: str, value: object, detail: str) -> Finding:
        origin = str(self.origins.get(setting, "Python"))
        return Finding(level=level, setting=setting, value=str(value), origin=origin, detail=detail)


def check(config: Config, origins: Mapping[str, Origin] | None = None, file: Path | None = None) -> list[Finding]:
    """Problems of `config` on this machine.

    Args:
        config: the settings.
        origins: their origins, for messages (`Loaded.origins`).
        file: the settings file, if any (`Loaded.file`).
    """
    reporter = _Reporter(origins or {})
    findings = [*_host(config, reporter), *_limits(config, reporter)]
    paths: tuple[tuple[str, Path | None, Iterator[Finding]], ...] = (
        ("directory.path", config.directory.path, _directory(config, reporter)),
        ("disk.path", config.disk.path, _disk(config, reporter)),
        ("store.secret_file", config.store.secret_file, _secret(config, reporter, file)),
        ("trace.path", config.trace.path, _trace(config, reporter)),
        ("planner.probe_file", config.planner.probe_file, _probe(config, reporter)),
    )
    for setting, path, part in paths:
        try:
            findings += part
        except OSError as error:  # such as an unreadable parent directory, or a name that is too long
            findings.append(reporter.error(setting, path, f"{error.filename}: {error.strerror}"))
    return findings


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


def _directory(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    path = config.directory.path
    if path is None:
        yield from _without_effect("directory", config.directory, reporter)
        return
    nearest = _nearest_existing(path)
    problem = _path_problem(path, nearest)
    if problem is not None:
        yield reporter.error("directory.path", path, problem)
        return
    try:
        if nearest == path:
            refuse_public(path)
        is_store = nearest == path and read_marker(path) is not None
        if not is_store:
            refuse_foreign(path)
    except DamagedMarkerError as error:
        yield reporter.warning("directory.path", path, f"{error}; {error.WHAT_NEXT}")
        return
    except ConfigError as error:
        yield reporter.error("directory.path", path, str(error))
        return
    yield from _space("directory", config.directory, nearest, reporter, is_store=is_store)


def _disk(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    path = config.disk.path
    if path is None:
        yield from _without_effect("disk", config.disk, reporter)
        return
    nearest = _nearest_existing(path)
    problem = _path_problem(path, nearest)
    if problem is not None:
        yield reporter.error("disk.path", path, problem)
        return
    try:
        if nearest == path:
            refuse_public(path)
        refuse_foreign_ranks(path)
    except ConfigError as error:
        yield reporter.error("disk.path", path, str(error))
        return
    is_store = nearest == path and (path / "rank-0" / DISK_MARKER_NAME).exists()
    yield from _space("disk", config.disk, nearest, reporter, is_store=is_store)
    reserve, usage = config.disk.reserve_bytes, disk_usage(nearest)
    room = usage.total if is_store else usage.free
    if usage.total and reserve >= room:
        detail = f"leaves no space for the store: its file system has {size_text(room)}{'' if is_store else ' free'}"
        yield reporter.warning("disk.reserve_bytes", size_text(reserve), detail)


def _trace(config: Config, reporter: _Reporter) -> Iterator[Finding]:
    path = config.trace.path
    if path is None:
        yield from _without_effect("trace", config.trace, reporter)
        return
    problem = _path_problem(path, _nearest_existing(path))
    if problem is not None:
        yield reporter.error("trace.path", path, problem)


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


def _path_problem(path: Path, nearest: Path) -> str | None:
    """Why `path` cannot be used, given its nearest existing directory `nearest`; None if it can."""
    if not nearest.is_dir():
        subject = path if nearest == path else f"its parent {nearest}"
        return f"{subject} is not a directory"
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        what = "it" if nearest == path else f"it does not exist, and its parent {nearest}"
        return f"{what} cannot be written by this user"
    return None


def _space(
    section: str, settings: DirectoryConfig | DiskConfig, nearest: Path, reporter: _Reporter, *, is_store: bool
) -> Iterator[Finding]:
    usage, wanted = disk_usage(nearest), settings.capacity_bytes
    if usage.total == 0:
        yield reporter.error(f"{section}.path", settings.path, f"the file system of {nearest} has no space for files")
        return
    # A store's own bytes count as used. Only a scan could tell how many, so a store may use the whole size.
    room = usage.total if is_store else usage.free
    if wanted > room:
        detail = f"more than the {'size' if is_store else 'free space'} of its file system, {size_text(room)}"
        yield reporter.warning(f"{section}.capacity_bytes", size_text(wanted), detail)


def _secret(config: Config, reporter: _Reporter, file: Path | None) -> Iterator[Finding]:
    path = config.store.secret_file
    if path is not None:
        yield from _secret_file(path, reporter)
    origin = reporter.origins.get("store.secret")
    if origin is None or config.store.secret is None:
        return
    if origin.layer == "file" and file is not None and _is_open_to_others(file):
        yield reporter.warning("store.secret", "(set)", f"other users can read {file}; chmod 600")
    if origin.layer == "flag":
        yield reporter.warning("store.secret", "(set)", "other users can see a flag in the list of processes")


def _secret_file(path: Path, reporter: _Reporter) -> Iterator[Finding]:
    if not path.exists():  # it will be created
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
    limits = config.limits
    if limits.probe_deadline_s > limits.load_deadline_s:
        detail = f"longer than limits.load_deadline_s, {limits.load_deadline_s:g} s"
        yield reporter.warning("limits.probe_deadline_s", f"{limits.probe_deadline_s:g} s", detail)
    if limits.transfer_deadline_s > limits.load_deadline_s:
        detail = f"longer than limits.load_deadline_s, {limits.load_deadline_s:g} s: loads end before their transfers"
        yield reporter.warning("limits.transfer_deadline_s", f"{limits.transfer_deadline_s:g} s", detail)
    if (
        config.store.write_policy != "selective"
        and reporter.origins.get("store.selective_uses", Origin("default")).where
    ):
        detail = f"has no effect: store.write_policy is {config.store.write_policy}"
        yield reporter.warning("store.selective_uses", config.store.selective_uses, detail)


def _nearest_existing(path: Path) -> Path:
    """`path`, or its nearest existing parent."""
    for candidate in (path, *path.parents):
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return candidate
    return path  # not even "/" exists


def _is_open_to_others(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO))
