"""Who uses a store: everyone keeps a shared lock on its marker, so that a newcomer can tell whether it is alone."""

import fcntl
import os

from kvtier.errors import TierError
from kvtier.tier.ledger import lock_file


class Tenancy:
    """This process's hold on the store whose marker is at `path`.

    Raises:
        OSError: the marker is missing or cannot be written.
    """

    def __init__(self, path: str, tier: str) -> None:
        self._path = path
        self._tier = tier
        self._descriptor: int | None = _open(path)

    def enter(self, deadline_s: float) -> bool:
        """Take hold; whether nobody else has, in which case nobody else can until `share`.

        Raises:
            TierError: another process has been alone in there for longer than `deadline_s` seconds.
        """
        if lock_file(self._live(), fcntl.LOCK_EX, 0.0):
            return True
        self.share(deadline_s)
        return False

    def share(self, deadline_s: float) -> None:
        """Let others in, or come in beside them.

        Raises:
            TierError: another process has been alone in there for longer than `deadline_s` seconds.
        """
        if not lock_file(self._live(), fcntl.LOCK_SH, deadline_s):
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

    def leave(self) -> None:
        """Let go. Twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _live(self) -> int:
        if self._descriptor is None:
            raise TierError(self._tier, "is closed")
        return self._descriptor


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # network file systems lock only what may be written
