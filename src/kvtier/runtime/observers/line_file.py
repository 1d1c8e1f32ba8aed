"""A JSON-lines file for threads that must not block, used for recordings of requests and the journal.

`put` only queues an item. The file's own thread turns queued items into lines and writes them a few times a second.
Lines that exceed the queue, the capacity or the file system's space count as lost. No caller waits for a file system
that hangs.
"""

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvtier.errors import UnusablePathError
from kvtier.observe.metric_definitions import Metric
from kvtier.observe.metrics import Metrics
from kvtier.tier.files.safe_open import make_root

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S: Final = 2.0
"""How long opening waits for the file. Lines are written from its creation on, even if that comes later."""
DRAIN_S: Final = 0.25
"""Interval at which queued items are written."""
FLUSH_BYTES: Final = 1 << 18
"""Lines are written when they reach this many bytes, even if the queue is not empty."""
SUFFIX: Final = ".jsonl"

_Item = TypeVar("_Item")

_numbers = itertools.count(1)


def new_path(folder: Path, stem: str) -> Path:
    """Return a unique path in `folder`: a stem such as ``requests``, the time, the process number and a random part."""
    # Engines in two containers often have the same process number.
    parts = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}", os.getpid(), next(_numbers), os.urandom(4).hex()
    return folder / f"{stem}-{'-'.join(map(str, parts))}{SUFFIX}"


class LineFile(Generic[_Item]):
    """A new file, mode 0600, and the thread that writes it.

    Args:
        path: path of the file; its directory is created if missing.
        capacity_bytes: limit for this file and its `siblings`, whose sizes are summed at the start.
        siblings: glob pattern of other files in the directory.
        setting: name of the setting that requests the file, for messages.
        lines: turns an item into lines with line feeds; called in the file's thread.
        rest: returns the last lines; called once at the end, in the file's thread.
        first: transforms the first line.
        waiting_max: maximum number of queued items.
        metrics: receives `metric`.
        metric: counts lines by the label `result`, which is ``recorded`` or ``lost``.

    Raises:
        UnusablePathError: the file cannot be created.
        RuntimeError: the system cannot start a thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        siblings: str = "",
        setting: str,
        lines: Callable[[_Item], Iterable[bytes]],
        rest: Callable[[], Iterable[bytes]] = tuple,
        first: Callable[[bytes], bytes] = bytes,
        waiting_max: int,
        metrics: Metrics,
        metric: Metric,
    ) -> None:
        self.path = path
        self._siblings = siblings
        self._lines_of = lines
        self._rest = rest
        self._first = first
        self._waiting_max = waiting_max
        self._metrics = metrics
        self._metric = metric
        self._items: deque[_Item] = deque()
        """Queued items. Operations of a deque are atomic, so no lock is needed."""
        self._lines: list[bytes] = []
        self._lines_bytes = self._written_bytes = 0
        self._is_full = self._has_failed = False
        self._closing = threading.Event()
        self._room_bytes = capacity_bytes
        self._file = -1
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name=f"kvtier {setting}", daemon=True)
        self._thread.start()
        try:
            opened.result(OPEN_DEADLINE_S)
        except TimeoutError:
            logger.warning(
                "%s could not be created within %g s; kvtier writes to it once it exists", self.path, OPEN_DEADLINE_S
            )
        except OSError as error:
            raise UnusablePathError(
                f"no file can be created: {error.strerror or error}", setting=setting, value=repr(str(path.parent))
            ) from error
        else:
            logger.info("%s: kvtier writes to %s", setting, self.path)

    def put(self, item: _Item) -> bool:
        """Queue an item. Return False if it is lost. Never block.

        Any thread may call this; racing threads may each exceed the limit by one item.
        """
        if self._is_full or self._closing.is_set() or len(self._items) >= self._waiting_max:
            self.lose()
            return False
        self._items.append(item)
        return True

    def lose(self, count: int = 1) -> None:
        """Count lines as lost."""
        self._metrics.add(self._metric, count, result="lost")

    def close(self, deadline_s: float) -> None:
        """Write the queued items and end the thread, unless the file system hangs. Idempotent."""
        self._closing.set()
        self._thread.join(deadline_s)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self, opened: Future[None]) -> None:
        try:
            self._open()
        except OSError as error:
            self._stop(error.strerror or str(error))
            opened.set_exception(error)
            return
        opened.set_result(None)
        is_last = False
        while not is_last:
            is_last = self._closing.wait(DRAIN_S)
            while self._items:
                item = self._items.popleft()
                self._write(lambda item=item: self._lines_of(item))
            if is_last:
                self._write(self._rest)
            self._flush()
        os.close(self._file)

    def _open(self) -> None:
        folder = self.path.parent
        make_root(folder)
        if self._siblings:
            for it in folder.glob(self._siblings):
                with suppress(OSError):  # removed meanwhile, or a dangling link
                    self._room_bytes -= it.stat().st_size
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _write(self, made: Callable[[], Iterable[bytes]]) -> None:
        try:
            lines = list(made())
        except Exception:  # one item failed; the thread continues
            self.lose()
            if not self._has_failed:
                self._has_failed = True
                logger.exception("internal error: a line of %s is lost (logged once)", self.path)
            return
        for each in lines:
            line = each if self._written_bytes or self._lines else self._first(each)
            if self._is_full or self._written_bytes + self._lines_bytes + len(line) > self._room_bytes:
                self._stop("the file has reached its maximum size")
                self.lose()
                continue
            self._lines.append(line)
            self._lines_bytes += len(line)
            if self._lines_bytes >= FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines, self._lines_bytes = self._lines, [], 0
        if not lines:
            return
        data = b"".join(lines)
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(0, "only a part of a line was written")  # noqa: TRY301 - one place that ends the file
        except OSError as error:
            self.lose(len(lines))
            self._stop(error.strerror or str(error))
            self._cut()
            return
        self._written_bytes += len(data)
        self._metrics.add(self._metric, len(lines), result="recorded")

    def _cut(self) -> None:
        """Remove an incomplete last line."""
        try:
            os.ftruncate(self._file, self._written_bytes)
        except OSError as error:
            logger.warning("the last line of %s is incomplete and could not be removed: %s", self.path, error)

    def _stop(self, reason: str) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("kvtier no longer writes to %s: %s; requests are served as before", self.path, reason)
