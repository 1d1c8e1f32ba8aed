"""Who uses a store: everyone keeps a shared lock on its marker, so that a newcomer can tell whether it is alone."""

import fcntl
import os

from kvtier.errors import TierError
from kvtier.tier.inside import Descriptor, open_file
from kvtier.tier.ledger import lock_file


class Tenancy:
    """This process's hold on the store whose marker is at `path`.

    Raises:
        OSError: the marker is missing, no regular file, or cannot be written.
    """

    def __init__(self, path: str, tier: str) -> None:
        self._path = path
        self._tier = tier
        self._descriptor = _open(path)

    def enter(self, deadline_s: float) -> bool:
        """Take hold; whether nobody else has, in which case nobody else can until `share`.

        Raises:
            TierError: another process has been alone in there for longer than `deadline_s` seconds.
        """
        if lock_file(self._descriptor.fileno(), fcntl.LOCK_EX, 0.0):
            return True
        self.share(deadline_s)
        return False

    def share(self, deadline_s: float) -> None:
        """Let others in, or come in beside them.

        Raises:
            TierError: another process has been alone in there for longer than `deadline_s` seconds.
        """
        if not lock_file(self._descriptor.fileno(), fcntl.LOCK_SH, deadline_s):
            raise TierError(self._tier, f"another process kept {self._path} to itself for {deadline_s} s")

    def renew(self, deadline_s: float) -> None:
        """Take hold of the marker that is at the path now.

        Raises:
            OSError: there is none.
            TierError: another process has been alone in there for longer than `deadline_s` seconds.
        """
        descriptor = _open(self._path)
        self.leave()
        self._descriptor = descriptor
        self.share(deadline_s)

    def is_there(self) -> bool:
        """Whether the marker that we hold is the one at its path."""
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._descriptor.fileno()))
        except OSError:
            return False

    def leave(self) -> None:
        """Let go. Twice is fine."""
        self._descriptor.close()


def _open(path: str) -> Descriptor:
    return Descriptor(open_file(path, os.O_RDWR)[0])  # network file systems lock only what may be written
