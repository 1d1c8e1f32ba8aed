"""The source of the keys of sealed frames: a file, a command, a string, or the configured secret.

A file is read again, or a command is run again, every minute.
"""

import logging
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.keys.seal_keys import BYTES_MAX, FORM, Keyring, SealKey, parse
from kvtier.keys.secret import Secret, read_private, redacted

logger = logging.getLogger(__name__)

EVERY_S: Final = 60.0
READING_S: Final = 15.0
"""A reading that takes longer counts as failed. The next starts only after it has ended. Commands have less time."""
First = Callable[[Callable[[], Keyring]], Keyring]
WARN_EVERY_S: Final = 600.0
"""Minimum time between two warnings about one kind of failure."""

_COMMAND = "store.keys_command"
_TOLD = "; it wrote: "


def read_file(path: Path) -> Keyring:
    """Read the keys in a file, which only its owner may read (mode 0600). Links are followed.

    Raises:
        ConfigError: the file does not exist, others own it or can read it, it cannot be read, it is empty, or a line
            is wrong; see `seal_keys.parse`.
    """
    return _parsed(read_private(path, "keys file", BYTES_MAX), f"keys file {path}")


def _parsed(content: bytes, origin: str) -> Keyring:
    """Parse `content`. If it is empty, raise: the file is probably being rewritten. A comment alone means no keys."""
    if not content.strip():
        raise ConfigError("there is no key", setting=origin, allowed=FORM)
    return parse(content, origin)


def _with_keys(read: Callable[[], Keyring], origin: str) -> Keyring:
    """Return the keys from `read`, or raise ConfigError if there are none."""
    found = read()
    if not found.keys:
        raise ConfigError("there is no key", setting=origin, allowed=FORM)
    return found


def read_command(words: Sequence[str], deadline_s: float = 10.0) -> Keyring:
    """Read the keys that a program writes to its standard output.

    Args:
        words: the program and its arguments, run without a shell. Process lists show them, so they must hold no secret.
        deadline_s: time after which the program, and everything that it started, is killed.

    Raises:
        ConfigError: the program cannot be started, fails, exceeds its deadline or `BYTES_MAX`, or writes a wrong line;
            see `seal_keys.parse`. The message contains the end of its standard error, `redacted`, and nothing of
            its standard output.
    """
    ends_s = time.monotonic() + deadline_s
    # The output goes to files in memory: reading a pipe would wait for every process that still has the pipe open.
    with os.fdopen(os.memfd_create("keys"), "rb") as output, os.fdopen(os.memfd_create("errors"), "rb") as errors:
        try:
            child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"cannot be started: {error.strerror}", setting=_COMMAND) from None
        while child.poll() is None:
            if time.monotonic() > ends_s or max(os.fstat(it.fileno()).st_size for it in (output, errors)) > BYTES_MAX:
                with suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, signal.SIGKILL)  # the child has not been reaped, so its id is still valid
                    child.wait(5)  # on a busy machine this takes more than a second
                raise ConfigError(
                    f"ran for more than {deadline_s:g} s, or wrote more than {BYTES_MAX} bytes", setting=_COMMAND
                )
            time.sleep(0.01)
        written, complaint = (os.pread(it.fileno(), BYTES_MAX + 1, 0) for it in (output, errors))
    if child.returncode:
        why = " ".join(redacted(complaint.decode(errors="replace")).split())[-200:]
        raise ConfigError(f"ended with status {child.returncode}{_TOLD}{why or 'nothing'}", setting=_COMMAND)
    return _parsed(written, f"output of {_COMMAND}")


class KeySource:
    """The keys now in use. A thread reads them again at intervals. The class is thread-safe.

    After a reading that fails, or finds nothing at all, the last keys stay in use. A successful reading replaces
    them: a removed line removes its key, and a comment alone removes all keys. A forked process keeps the keys that it
    had at the fork.

    Args:
        read: reads the keys, or raises ConfigError.
        origin: where the keys come from, for messages.
        every_s: seconds between two readings; if None, only `refresh` reads again.
        first: calls its argument for the first reading, perhaps within a deadline, and returns the keys or raises its
            error. The argument raises ConfigError if there is no key.
        clock: returns seconds.

    Raises:
        ConfigError: the first reading fails or finds no key.
    """

    def __init__(
        self,
        read: Callable[[], Keyring],
        *,
        origin: str = "the keys",
        every_s: float | None = EVERY_S,
        first: First = lambda read: read(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keyring = first(partial(_with_keys, read, origin))
        """The keys in use now. To get several answers from the same keys, read this attribute once."""
        self.failures = 0
        """Number of failed readings."""
        self._read, self._clock = read, clock
        self._warned: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._process = os.getpid()
        if every_s is not None:
            threading.Thread(target=self._run, args=(every_s,), name="kvtier keys", daemon=True).start()

    def refresh(self) -> None:
        """Read the keys now."""
        if self._process != os.getpid():  # another thread may have held the lock at the fork
            return
        with self._lock:
            try:
                found = self._read()
                before, has_changed = self.keyring.keys, found.keys != self.keyring.keys
                if has_changed and not self._closed.is_set():
                    self.keyring = found
                    level = logging.INFO if found.keys else logging.WARNING
                    logger.log(level, "%d keys are in use now; there were %d before", len(found.keys), len(before))
            except Exception as error:  # noqa: BLE001 - whatever happens, the last keys stay
                self._failed(str(error) if isinstance(error, ConfigError) else type(error).__name__)

    def _failed(self, what: str) -> None:
        self.failures += 1
        kind, now_s = what.partition(_TOLD)[0], self._clock()
        if now_s - self._warned.get(kind, float("-inf")) >= WARN_EVERY_S:
            self._warned[kind] = now_s
            logger.warning("the %d keys of the last good reading stay in use: %s", len(self.keyring.keys), what)

    def close(self) -> None:
        """End the thread. A reading that is running ends by its own deadline and changes nothing."""
        if self._process == os.getpid():
            self._closed.set()

    def _run(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            # Each reading has its own thread, because a file system or the start of a program may hang.
            reading = threading.Thread(target=self.refresh, name="kvtier keys", daemon=True)
            reading.start()
            while reading.join(max(every_s, READING_S)) or reading.is_alive():
                self._failed("the new reading takes too long")


def open_keys(
    *,
    file: Path | None = None,
    command: str = "",
    text: str = "",
    secret: Secret | None = None,
    tenant: str = "",
    every_s: float = EVERY_S,
    first: First = lambda read: read(),
) -> KeySource | None:
    """Return the source that the settings name; None if they name none.

    Args:
        file: ``store.keys_file``.
        command: ``store.keys_command``.
        text: ``store.keys``.
        secret: the configured secret. If none of `file`, `command` and `text` is given, it is the material of epoch 0
            of `tenant`, as in a line ``0 TENANT SECRET``.
        tenant: name of the engine's tenant; empty for none.
        every_s: seconds between two readings of a file or command.
        first: see `KeySource`.

    Raises:
        ConfigError: the first reading fails; see `read_file` and `read_command`.
    """
    if file is not None:
        return KeySource(partial(read_file, file), origin=f"keys file {file}", every_s=every_s, first=first)
    if command:
        read = partial(read_command, shlex.split(command))
        return KeySource(read, origin=f"output of {_COMMAND}", every_s=every_s, first=first)
    if text:
        return KeySource(partial(parse, text.encode(), "store.keys"), every_s=None)
    return None if secret is None else KeySource(lambda: Keyring([SealKey.of(tenant, 0, secret)]), every_s=None)
