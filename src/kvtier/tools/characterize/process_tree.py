"""Finds the processes that issue I/O requests, and ends the children of a command.

The kernel's events name threads, but users choose processes. So each thread is mapped to its process.
"""

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tools.characterize.io_trace import NO_PROCESS

PROC = Path("/proc")
CLONE_THREAD = 0x10000
_KTHREADD = 2
"""Parent of all kernel threads."""


class ProcessTree:
    """Knows the process of each thread, and the parent of each process.

    It starts with the running processes and learns from the kernel's `task_newtask` events, so it also knows
    short-lived processes.
    """

    def __init__(self) -> None:
        self._process: dict[int, int] = {}
        self._parent: dict[int, int] = {}
        self._names: dict[int, str] = {}
        for folder in PROC.iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):  # the process has ended
                    process = int(folder.name)
                    self._learn(process)
                    for thread in (folder / "task").iterdir():
                        self._process[int(thread.name)] = self._process[process]

    def _learn(self, process: int) -> None:
        text = (PROC / str(process) / "stat").read_text(errors="replace")  # a name may contain any bytes
        name, _, rest = text.partition("(")[2].rpartition(")")
        parent = int(rest.split()[1])
        is_kernel = _KTHREADD in {process, parent}
        self._process[process] = NO_PROCESS if is_kernel else process
        if not is_kernel:
            self._parent[process] = parent
            self._names[process] = name

    def born(self, creator: int, thread: int, flags: int) -> None:
        """Record a new thread, or the first thread of a new process. `creator` and `thread` are thread ids."""
        process = self.process_of(creator)
        if creator == _KTHREADD:
            self._process[thread] = NO_PROCESS
        elif flags & CLONE_THREAD:
            self._process[thread] = process
        else:
            self._process[thread] = thread
            self._parent[thread] = process
            self._names.pop(thread, None)

    def process_of(self, thread: int) -> int:
        """Return the process of a thread, or `NO_PROCESS` for a kernel thread."""
        if thread == 0:
            return NO_PROCESS
        found = self._process.get(thread)
        if found is None:  # the thread is older than the events, or its event was lost
            self._process[thread] = thread
            with suppress(OSError):
                process = _process_id(thread)
                self._learn(process)
                self._process[thread] = self._process[process]
            found = self._process[thread]
        return found

    def name(self, process: int, seen: str) -> None:
        """Record the name of a process. `seen` is the thread's name in an event."""
        if process != NO_PROCESS and process not in self._names:
            with suppress(OSError):
                seen = (PROC / str(process) / "comm").read_text(errors="replace").strip()
            self._names[process] = seen

    def names(self, processes: Iterable[int]) -> dict[int, str]:
        """Return the name of each process."""
        return {it: self._names.get(it, f"process {it}") for it in processes if it != NO_PROCESS}

    def with_children(self, roots: Iterable[int]) -> frozenset[int]:
        """Return `roots` and all processes that descend from them."""
        chosen = set(roots)
        grew = True
        while grew:
            grown = {child for child, parent in self._parent.items() if parent in chosen} - chosen
            chosen |= grown
            grew = bool(grown)
        return frozenset(chosen)

    def threads_of(self, processes: frozenset[int]) -> list[int]:
        """Return the ids of all threads of `processes`."""
        return [thread for thread, process in self._process.items() if process in processes]


def check_process(process: int) -> None:
    """Refuse the id of a process that does not run, of a thread, or of a kernel thread.

    Raises:
        ConfigError: `process` is one of these.
    """
    try:
        owner = _process_id(process)
        tree = ProcessTree()
    except OSError as error:
        raise ConfigError(f"--pid {process}: no such process; allowed: the id of a running process") from error
    if owner != process:
        raise ConfigError(f"--pid {process}: it is a thread of process {owner}; give --pid {owner}")
    if tree.process_of(process) == NO_PROCESS:
        raise ConfigError(
            f"--pid {process}: it is a thread of the kernel, whose requests belong to no process; give the id of a "
            "process, or leave out --pid to measure the whole device"
        )


def opened(processes: Iterable[int]) -> list[int]:
    """Return descriptors of the running processes. Unlike an id, a descriptor never names another process later."""
    found: list[int] = []
    for process in processes:
        with suppress(OSError):  # it has ended
            found.append(os.pidfd_open(process))
    return found


def end_processes(descriptors: list[int], seconds: float) -> None:
    """Terminate processes, kill those that still run after `seconds`, and close the descriptors."""
    deadline_s = time.monotonic() + seconds
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in descriptors:
            with suppress(OSError):  # it has ended
                signal.pidfd_send_signal(each, number)
        waiting = select.poll()
        for each in descriptors:
            waiting.register(each, select.POLLIN)
        running = len(descriptors) if number == signal.SIGTERM else 0
        while running and (left_s := deadline_s - time.monotonic()) > 0:
            for each, _ in waiting.poll(left_s * 1000):
                waiting.unregister(each)
                running -= 1
    for each in descriptors:
        os.close(each)


def _process_id(thread: int) -> int:
    """Return the process of a running thread.

    Raises:
        OSError: no thread has this id.
    """
    status = (PROC / str(thread) / "status").read_text(errors="replace")
    return next((int(line[5:]) for line in status.splitlines() if line.startswith("Tgid:")), thread)
