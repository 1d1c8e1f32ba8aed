"""A temporary directory on the file system in question, for stores of the probe's own.

Existing stores are never opened. What a killed probe left behind is removed by the next one: whoever measures holds a
lock on a file in its directory, and a directory whose lock is free belongs to nobody.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.errors import ConfigError

PREFIX = ".kvtier-probe-"
LOCK_NAME = "in-use"


def choose_parent(path: Path) -> Path:
    """Where to measure for a tier at `path`: beside it where that is the same file system, otherwise in it.

    Raises:
        ConfigError: nothing can be written there.
    """
    existing = next((it for it in (path, *path.parents) if it.is_dir()), Path("/"))
    candidates = [existing]
    if existing == path and path.parent != path and _is_same_file_system(path, path.parent):
        candidates.insert(0, path.parent)
    for candidate in candidates:
        if os.access(candidate, os.R_OK | os.W_OK | os.X_OK):
            return candidate
    raise ConfigError(f"{str(path)!r} cannot be measured: this user may not write in {str(existing)!r}")


@contextmanager
def sub_store(parent: Path) -> Generator[Path]:
    """A directory of our own in `parent`, removed with everything in it at the end, whatever that is.

    Raises:
        ConfigError: it cannot be made.
    """
    sweep(parent)
    try:
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"nothing can be written in {str(parent)!r}: {error.strerror or error}") from error
    try:
        lock = os.open(place / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks; then nobody sweeps there either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield place
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Remove what probes that were killed left in `parent`; returns what was removed."""
    removed: list[Path] = []
    for place in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(place / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # not ours, somebody else's, or being made right now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
            removed.append(place)
        except OSError:
            continue
        finally:
            os.close(lock)
    return removed


def _is_same_file_system(path: Path, other: Path) -> bool:
    return path.stat().st_dev == other.stat().st_dev
