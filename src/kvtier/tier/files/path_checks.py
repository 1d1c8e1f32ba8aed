"""A setting of all tier kinds that keep files, and read-only checks of a directory and its file system."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from kvtier.config.schema import setting
from kvtier.config.value_types import FileLocation, Switch, size_text
from kvtier.errors import ConfigError, UnusablePathError
from kvtier.keys.secret import read_private
from kvtier.tier.files.safe_open import refuse_public
from kvtier.tier.registry import Problem, TierSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTierSettings(TierSettings):
    """The settings of every kind that keeps files in a directory."""

    any_owner: bool = setting(
        default=False,
        kind=Switch(),
        help="Use a directory of another ordinary user, who may replace its content; false: refuse it.",
    )


def tier_file(tier: TierSettings, key: str) -> bytes:
    """Return the content of the file that a setting of the kind `FileLocation` names.

    Raises:
        UnusablePathError: it is missing, cannot be read, belongs to another user, or has the wrong format.
    """
    kind = next(each.kind for each in tier.settings() if each.key == key)
    path, pem = getattr(tier, key), kind.pem if isinstance(kind, FileLocation) else ""
    is_public = pem == "CERTIFICATE"
    any_owner = is_public or getattr(tier, "any_owner", None)
    content = read_private(path, f"{tier.label}.{key}", any_owner=any_owner, any_reader=True)
    try:
        if is_public:
            import ssl  # noqa: PLC0415 - slow, and only for this file

            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
        has_form = f"{pem}-----".encode() in content or not pem
    except (OSError, ValueError):
        has_form = False
    if not has_form:
        raise UnusablePathError(
            f"contains no {pem.lower()} in PEM format", setting=f"{tier.label}.{key}", value=repr(str(path))
        )
    return content


def nearest_existing(path: Path) -> Path:
    """Return `path`, or its nearest existing parent."""
    for candidate in (path, *path.parents):
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return candidate
    return path  # not even "/" exists


def path_problem(path: Path, nearest: Path) -> str | None:
    """Return why `path` cannot be used, given its nearest existing directory `nearest`, or None if it can."""
    if not nearest.is_dir():
        subject = path if nearest == path else f"its parent {nearest}"
        return f"{subject} is not a directory"
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        if nearest == path:
            return "this user cannot write to it"
        return f"it does not exist, and this user cannot write to its parent {nearest}"
    return None


def store_problems(
    path: Path,
    capacity_bytes: int,
    holds_store: Callable[[Path], bool],
    reserve_bytes: int = 0,
    *,
    any_owner: bool = False,
) -> Iterator[Problem]:
    """Yield the problems of a store's root.

    Args:
        path: path of the root.
        capacity_bytes: the store's cap.
        holds_store: returns whether there is a store; raises ConfigError if the directory cannot be used.
        reserve_bytes: free space that the store must leave.
        any_owner: as in `FileTierSettings`.
    """
    nearest = nearest_existing(path)
    problem = path_problem(path, nearest)
    if problem is not None:
        yield Problem("error", "path", problem)
        return
    try:
        if nearest == path:
            refuse_public(path, any_owner=any_owner)
        is_store = nearest == path and holds_store(path)
    except ConfigError as error:
        yield Problem("error", "path", str(error))
        return
    usage = disk_usage(nearest)
    if usage.total == 0:
        yield Problem("error", "path", f"the file system of {nearest} cannot hold files: its size is 0")
        return
    # An existing store's bytes count as used, and only a scan could tell how many. So its cap may be the whole size.
    room = usage.total if is_store else usage.free
    if capacity_bytes > room:
        detail = f"more than the {'size' if is_store else 'free space'} of its file system, {size_text(room)}"
        yield Problem("warning", "capacity_bytes", detail)
    if reserve_bytes and reserve_bytes >= room:
        detail = f"leaves no space for the store: its file system has {size_text(room)}{'' if is_store else ' free'}"
        yield Problem("warning", "reserve_bytes", detail)
