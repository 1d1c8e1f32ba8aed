"""An instance of the kernel's tracing directory: own buffers, own events, removed at the end."""

import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvtier.characterize.ring_buffer import PAGE_BYTES, EventFormat, event_format
from kvtier.errors import ConfigError
from kvtier.probe.facts import read_mounts

TRACEFS = Path("/sys/kernel/tracing")
NAME = "kvtier"
BATCH_PAGES = 2048
"""Pages that one call of `TraceInstance.read` returns at most."""
_LOST = ("overrun", "commit overrun", "dropped events")


@contextmanager
def mounted() -> Generator[Path]:
    """The tracing directory, mounted for as long if it was not.

    Raises:
        ConfigError: the kernel has none, or it may not be mounted or written.
    """
    found = next((Path(mount.point) for mount in read_mounts() if mount.kind == "tracefs"), None)
    is_ours = found is None
    if found is None:
        done = subprocess.run(
            ["mount", "-t", "tracefs", "nodev", str(TRACEFS)], capture_output=True, text=True, timeout=10, check=False
        )
        if done.returncode:
            raise ConfigError(
                f"tracefs is not mounted on {TRACEFS} and cannot be: {done.stderr.strip() or 'no right'}; allowed: run "
                "as root, in a container with CAP_SYS_ADMIN and the host's /sys/kernel/tracing; or --input FILE"
            )
        found = TRACEFS
    try:
        if not os.access(found / "instances", os.W_OK):
            raise ConfigError(f"no right to write in {found / 'instances'}; allowed: run as root, or --input FILE")
        yield found
    finally:
        if is_ours:  # it stays if another program has opened it since
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["umount", str(found)], capture_output=True, timeout=10, check=False)


class TraceInstance:
    """One instance of tracefs; a context manager that removes it.

    Args:
        tracefs: the tracing directory.
        name: follows ``kvtier-PID`` in the instance's name.
        buffer_bytes: size of the ring buffer of each processor.

    Raises:
        ConfigError: the instance cannot be made.
    """

    def __init__(self, tracefs: Path, name: str, buffer_bytes: int) -> None:
        self.folder = tracefs / "instances" / f"{NAME}-{os.getpid()}-{name}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be made: {error.strerror}; allowed: one capture at once in a process, as root"
            ) from error
        self._pipes: list[int] = []
        self._pages = np.zeros(BATCH_PAGES * PAGE_BYTES, np.uint8)
        self.batch_bytes = len(self._pages)
        try:
            self.write("tracing_on", "0")
            self.write("trace_clock", "mono")
            self.write("options/overwrite", "1")  # a full buffer drops what is old, and marks the gap
            self.write("buffer_size_kb", str(-(-buffer_bytes // 1024)))
            cpus = sorted((self.folder / "per_cpu").glob("cpu*"), key=lambda it: int(it.name[3:]))
            self._stats = [cpu / "stats" for cpu in cpus]
            self._pipes = [os.open(cpu / "trace_pipe_raw", os.O_RDONLY | os.O_NONBLOCK) for cpu in cpus]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop tracing and remove the instance; does nothing the second time."""
        with suppress(ConfigError):
            self.write("tracing_on", "0")
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        with suppress(OSError):
            self.folder.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file of the instance.

        Raises:
            ConfigError: the kernel refuses it.
        """
        try:
            with (self.folder / name).open("w") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self.folder / name}: the kernel refuses {text!r}: {error.strerror}") from error

    def append(self, name: str, text: str) -> None:
        """Add to a file that is a list."""
        # Not open("a"), which seeks to the end: these files refuse it.
        file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def has(self, event: str) -> bool:
        """Whether the kernel has the event, such as ``block/block_rq_issue``."""
        return (self.folder / "events" / event).exists()

    def enable(self, event: str, fields: tuple[str, ...], condition: str = "") -> EventFormat:
        """Record an event where `condition` holds; returns its format with these fields.

        Raises:
            ConfigError: the kernel lacks the event or a field, or refuses the condition.
        """
        folder = f"events/{event}"
        try:
            found = event_format((self.folder / folder / "format").read_text(), fields)
        except (OSError, ValueError) as error:
            raise ConfigError(f"kernel event {event}: {error}") from error
        if condition:
            self.write(f"{folder}/filter", condition)
        self.write(f"{folder}/enable", "1")
        return found

    def read(self) -> np.ndarray:
        """Pages that are ready, at most `BATCH_PAGES`, without waiting; empty if there are none."""
        count = 0
        view = memoryview(self._pages.data).cast("B")
        self._pipes.append(self._pipes.pop(0))  # another processor first, so that a busy one starves none
        for pipe in self._pipes:
            while count < BATCH_PAGES:
                try:
                    got = os.readv(pipe, [view[count * PAGE_BYTES : (count + 1) * PAGE_BYTES]])
                except BlockingIOError:
                    break
                if not got:
                    break
                view[count * PAGE_BYTES + got : (count + 1) * PAGE_BYTES] = bytes(PAGE_BYTES - got)
                count += 1
        return self._pages[: count * PAGE_BYTES]

    def lost(self) -> int:
        """Events that the kernel could not keep, of all processors."""
        total = 0
        for path in self._stats:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(":")
                total += int(value) if name in _LOST else 0
        return total


def remove_stale(tracefs: Path) -> list[str]:
    """Remove the instances of captures that were killed; returns their names."""
    removed: list[str] = []
    for folder in (tracefs / "instances").glob(f"{NAME}-*"):
        hit = re.fullmatch(rf"{NAME}-(\d+)-\w+", folder.name)
        # A capture that was killed may have had the id of this process: in a container each one may be number 1.
        if hit is None or (int(hit[1]) != os.getpid() and Path(f"/proc/{hit[1]}").exists()):
            continue
        with suppress(OSError):  # in use: by this process, or by one that another PID namespace numbers
            folder.rmdir()
            removed.append(folder.name)
    return removed
