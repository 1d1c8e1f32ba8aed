"""Checks of a store's root directory: configuration mistakes, failing storage, foreign files."""

import errno
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError, TierError
from kvtier.tier.store_notes import NOTE

MISTAKES = frozenset({
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
})  # fmt: skip
"""errno values that persist until a setting or a permission changes. Any other is a failure of the storage."""

_NAMED_MAX = 3
_SECRET = re.compile(r"secret|\.secret\.[0-9a-f]+")
_FILE_SYSTEMS = re.compile(r"lost\+found|\.snapshots?|\.nfs[0-9a-f]+|\.Trash-\d+")
RANK = re.compile(r"rank-\d+")
"""Directory of one rank's disk store."""


@contextmanager
def opening(tier: str, root: Path, allowed: str) -> Generator[None]:
    """Translate OSError while the store at `root` is opened.

    Raises:
        ConfigError: a mistake in settings or permissions.
        TierError: the storage fails.
    """
    if "\0" in str(root):
        raise ConfigError(f"root {str(root)!r} cannot be used: it contains a null byte; allowed: a path")
    try:
        yield
    except OSError as error:
        if error.errno in MISTAKES:
            raise ConfigError(f"root {str(root)!r} cannot be used: {error}; allowed: {allowed}, writable") from error
        raise TierError(tier, f"root {str(root)!r} cannot be opened: {error}") from error


def refuse_foreign_files(root: Path, is_ours: Callable[[str], bool], allowed: str) -> None:
    """Refuse a directory with files that neither kvtier nor the file system created.

    A secret and notes are allowed: both may be written before the store.

    Args:
        root: the directory; may be missing.
        is_ours: whether kvtier may have created a file of this name in a directory without a store.
        allowed: allowed values, for the message.

    Raises:
        ConfigError: there are foreign files; the message names the first few.
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
            f"root {str(root)!r} holds other files ({named}{more}) and no kvtier store; nothing was changed; "
            f"allowed: {allowed}"
        )
