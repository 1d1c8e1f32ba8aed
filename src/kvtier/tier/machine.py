"""Read-only checks of a store's directory and its file system, for kinds of tier that keep files."""

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage

from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.tier.directory_marker import find_marker
from kvtier.tier.registry import Problem
from kvtier.tier.safe_open import refuse_public


def nearest_existing(path: Path) -> Path:
    """`path`, or its nearest existing parent."""
    for candidate in (path, *path.parents):
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return candidate
    return path  # not even "/" exists


def path_problem(path: Path, nearest: Path) -> str | None:
    """Why `path` cannot be used, given its nearest existing directory `nearest`; None if it can."""
    if not nearest.is_dir():
        subject = path if nearest == path else f"its parent {nearest}"
        return f"{subject} is not a directory"
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        what = "it" if nearest == path else f"it does not exist, and its parent {nearest}"
        return f"{what} cannot be written by this user"
    return None


def space_problems(capacity_bytes: int, nearest: Path, *, is_store: bool) -> Iterator[Problem]:
    """Problems of a store of `capacity_bytes` on the file system of the directory `nearest`.

    Args:
        capacity_bytes: the store's cap.
        nearest: the store, or its nearest existing parent.
        is_store: whether the store exists, whose own bytes count as used.
    """
    usage = disk_usage(nearest)
    if usage.total == 0:
        yield Problem("error", "path", f"the file system of {nearest} has no space for files")
        return
    # A store's own bytes count as used. Only a scan could tell how many, so a store may use the whole size.
    room = usage.total if is_store else usage.free
    if capacity_bytes > room:
        detail = f"more than the {'size' if is_store else 'free space'} of its file system, {size_text(room)}"
        yield Problem("warning", "capacity_bytes", detail)


def store_problems(path: Path, capacity_bytes: int, version: int) -> Iterator[Problem]:
    """What is wrong with the root of a store of files whose marker has this version."""
    nearest = nearest_existing(path)
    problem = path_problem(path, nearest)
    if problem is not None:
        yield Problem("error", "path", problem)
        return
    try:
        if nearest == path:
            refuse_public(path)
        is_store = nearest == path and find_marker(path, version) is not None
    except ConfigError as error:
        yield Problem("error", "path", str(error))
        return
    yield from space_problems(capacity_bytes, nearest, is_store=is_store)
