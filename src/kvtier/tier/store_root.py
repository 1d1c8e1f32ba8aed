"""A directory that is to hold a store: what of it is a mistake of whoever chose it, and what may pass."""

import errno
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError, TierError
from kvtier.tier.notes import NOTE

MISTAKES = frozenset({
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
})  # fmt: skip
"""Errors that stay until somebody changes a setting or a permission. All others come from a place that fails."""

_NAMED_MAX = 3
_SECRET = re.compile(r"secret|\.secret\.[0-9a-f]+")
_FILE_SYSTEMS = re.compile(r"lost\+found|\.snapshots?|\.nfs[0-9a-f]+|\.Trash-\d+")
RANK = re.compile(r"rank-\d+")
"""Where each rank has its store of the disk tier."""


@contextmanager
def opening(tier: str, root: Path, allowed: str) -> Generator[None]:
    """Errors of opening the store at `root`.

    Raises:
        ConfigError: for a mistake.
        TierError: for a place that fails.
    """
    if "\0" in str(root):
        raise ConfigError(f"root {str(root)!r} cannot be used: there is a null byte in it; allowed: a path")
    try:
        yield
    except OSError as error:
        if error.errno in MISTAKES:
            raise ConfigError(
                f"root {str(root)!r} cannot be used: {error}; allowed: {allowed} that we may write"
            ) from error
        raise TierError(tier, f"root {str(root)!r} cannot be opened: {error}") from error


def refuse_foreign_files(root: Path, is_ours: Callable[[str], bool], allowed: str) -> None:
    """Keep out of a directory where something is that was not made by us, nor with the file system.

    A store's secret is made beside it though the store itself comes later.

    Args:
        root: the directory; missing is fine.
        is_ours: tells by its name what we may have made in a directory without a store.
        allowed: what would be, for the message.

    Raises:
        ConfigError: there is such a thing; the message names the first few.
        OSError: it cannot be listed.
    """
    if not root.exists():
        return
    names = sorted(path.name for path in root.iterdir())
    passes = (_FILE_SYSTEMS, _SECRET, NOTE)
    found = [it for it in names if not any(each.fullmatch(it) for each in passes) and not is_ours(it)]
    if found:
        more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        named = ", ".join(map(repr, found[:_NAMED_MAX]))
        raise ConfigError(
            f"root {str(root)!r} holds other things ({named}{more}) and no store of ours; nothing was changed; "
            f"allowed: {allowed}"
        )
