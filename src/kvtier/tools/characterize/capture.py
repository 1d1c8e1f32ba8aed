"""Captures the block layer's events of devices and the file calls of processes, while a command or processes run."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.characterize.block_devices import (
    BlockDevice,
    Spans,
    allocation_groups,
    disks,
    find_device,
    spans_of,
    within,
)
from kvtier.tools.characterize.block_events import BlockEvents
from kvtier.tools.characterize.calls import CallEvents
from kvtier.tools.characterize.io_trace import IoLayer, IoTrace, by_time
from kvtier.tools.characterize.process_tree import PROC, ProcessTree, check_process, end_processes, opened
from kvtier.tools.characterize.tracefs import PageEvents, TraceInstance, mounted, remove_stale

POLL_S = 0.05
BUFFER_BYTES = 16 << 20
"""Size of each processor's ring buffer. It holds the events of half a second at 100,000 requests per second."""
BUFFERS_BYTES_MAX = 512 << 20
"""Largest total size of all ring buffers."""
EVENTS_MAX = 8_000_000
"""Number of events, of up to 38 bytes each, that ends a capture. A request has three of them."""
END_S = 10.0
"""Seconds that a command has to end after a signal."""
CHILDREN_END_S = 1.0
"""Further seconds that remaining children of the command have to end."""


class Captured(NamedTuple):
    """The result of a capture."""

    trace: IoTrace
    exit_code: int | None
    """Exit code of the command; None without a command, or if it had to be ended."""


@dataclass
class CaptureSettings:
    """Settings of a capture: what is captured, and for how long."""

    device: str | None = None
    """A device, or a path on a device; None means all disks that are not stacked on another device."""
    directory: Path | None = None
    """Only requests for files below this directory count, and its device is captured; None means all files."""
    pids: Sequence[int] = ()
    """Processes to capture, with their children."""
    command: Sequence[str] = ()
    """A command to start and capture, with its children."""
    seconds: float | None = None
    """Length of the capture; None means until the command or the processes end."""
    buffer_bytes: int = BUFFER_BYTES
    events_max: int = EVENTS_MAX
    output: int | None = None
    """Descriptor for the command's standard output; None means this process's own."""
    devices: list[BlockDevice] = field(default_factory=list[BlockDevice], init=False)

    def find(self) -> Self:
        """Look up the devices and processes before tracing is set up.

        Raises:
            ConfigError: one of them does not exist.
        """
        if self.directory is not None:
            self.device, self.directory = str(self.directory), self.directory.resolve()
        self.devices = [find_device(self.device)] if self.device is not None else disks()
        if not self.devices:
            raise ConfigError("no disk in /sys/block; give --device with a block device, or --input FILE")
        for pid in self.pids:
            check_process(pid)
        return self


def run(settings: CaptureSettings, should_stop: Callable[[], bool] = lambda: False) -> Captured:
    """Capture until the time is up, the command has ended, `should_stop` returns True, or a limit is reached.

    Raises:
        ConfigError: tracefs is missing or forbidden, or there is no such device, process or command.
    """
    settings.find()
    with ExitStack() as stack:
        tracefs = stack.enter_context(mounted())
        remove_stale(tracefs)
        buffer_bytes = min(settings.buffer_bytes, BUFFERS_BYTES_MAX // (os.cpu_count() or 1))
        blocks = stack.enter_context(TraceInstance(tracefs, "block", buffer_bytes))
        tree = ProcessTree()
        events = BlockEvents(blocks, settings.devices, tree)
        sources: list[tuple[TraceInstance, BlockEvents | CallEvents]] = [(blocks, events)]
        calls = None
        if settings.pids or settings.command:
            instance = stack.enter_context(TraceInstance(tracefs, "calls", buffer_bytes))
            # Processes that have ended stay in the list, because an empty list would mean every process.
            roots = sorted({*settings.pids, *tree.threads_of(tree.with_children(settings.pids))})
            if settings.command:  # the child inherits tracing from this thread, which then leaves the list
                roots.append(os.getpid())
            calls = CallEvents(instance, tree, roots, {it.disk_number for it in settings.devices}, settings.directory)
            sources.append((instance, calls))
        return _Run(settings, sources, events, calls, tree).run(should_stop)


class _Run:
    def __init__(
        self,
        settings: CaptureSettings,
        sources: list[tuple[TraceInstance, BlockEvents | CallEvents]],
        blocks: BlockEvents,
        calls: CallEvents | None,
        tree: ProcessTree,
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._blocks = blocks
        self._calls = calls
        self._tree = tree
        self._remarks: list[str] = []
        self._spans: list[Spans] = []
        """Places of the directory's files on the disk, at the start and at the end of the capture."""
        self._read_ns: dict[TraceInstance, int] = {}
        """For each instance, the time until which all its events have been read."""

    def run(self, should_stop: Callable[[], bool]) -> Captured:
        self._note_spans()
        began_ns, began_s = time.monotonic_ns(), time.time()
        for instance, _ in self._sources:
            instance.write("tracing_on", "1")
        process = None
        try:
            if self._settings.command:
                process = self._start()
            self._watch(process, began_ns, should_stop)
            ended_ns = time.monotonic_ns()
            for instance, _ in self._sources:
                instance.write("tracing_on", "0")
            while self._add():
                pass
            self._note_spans()
        finally:
            exit_code = None if process is None else self._end(process)
        return Captured(self._trace(began_ns, began_s, ended_ns, process), exit_code)

    def _note_spans(self) -> None:
        if self._settings.directory is not None:
            self._spans.append(spans_of(self._settings.directory, self._settings.devices[0]))

    def _start(self) -> "subprocess.Popen[bytes]":
        command = list(self._settings.command)
        try:
            process = subprocess.Popen(command, stdout=self._settings.output)
        except OSError as error:
            raise ConfigError(f"command {command[0]!r} cannot be started: {error.strerror}") from error
        self._sources[-1][0].append("set_event_notrace_pid", str(os.getpid()))
        return process

    def _watch(self, process: "subprocess.Popen[bytes] | None", began_ns: int, should_stop: Callable[[], bool]) -> None:
        """Read events until one of the conditions of `run` ends the capture."""
        limit = self._settings.seconds
        while True:
            is_over = limit is not None and time.monotonic_ns() - began_ns >= limit * 1e9
            is_ended = process is not None and process.poll() is not None
            if process is None and self._settings.pids:
                is_ended = not any((PROC / str(it)).exists() for it in self._settings.pids)
            has_more = self._add()
            if is_over or is_ended or should_stop():
                return
            gone = [it.name for it in self._settings.devices if not it.exists()]
            if gone:
                self._remarks.append(f"Device {', '.join(gone)} vanished; the results end there.")
                return
            if sum(it.count for _, it in self._sources) >= self._settings.events_max:
                self._remarks.append(
                    f"The capture ended early, after {self._settings.events_max:,} events, the most that it holds in "
                    "memory."
                )
                return
            if has_more:
                continue
            time.sleep(POLL_S if limit is None else min(POLL_S, max(0.0, limit - (time.monotonic_ns() - began_ns) / 1e9)))  # fmt: skip  # noqa: E501

    def _add(self) -> bool:
        """Read the available events. Return whether there may be more."""
        is_full = False
        for instance, events in self._sources:
            now_ns = time.monotonic_ns()
            pages = instance.read()
            if len(pages):
                events.add(PageEvents(pages), self._read_ns.get(instance, 0))
            if len(pages) < instance.batch_bytes:
                self._read_ns[instance] = now_ns
            else:
                is_full = True
        return is_full

    def _end(self, process: "subprocess.Popen[bytes]") -> int | None:
        """End the command and its children if it still runs. Return the command's exit code."""
        if process.poll() is not None:
            return process.returncode
        children = opened(self._tree.with_children([process.pid]) - {process.pid})
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
        finally:
            end_processes(children, CHILDREN_END_S)
        return None

    def _trace(
        self, began_ns: int, began_s: float, ended_ns: int, process: "subprocess.Popen[bytes] | None"
    ) -> IoTrace:
        lost = sum(instance.lost() for instance, _ in self._sources)
        device, bios, thread, counts = self._blocks.requests(began_ns)
        parts = [device, bios]
        devices = self._settings.devices
        if not len(device) and len(bios):
            bios["layer"] = IoLayer.DEVICE
            below = ", ".join(sorted({name for it in devices for name in it.below}))
            stacked = f" and is stacked on {below}" if below else ""
            self._remarks.append(
                f"{', '.join(it.name for it in devices)} has no request queue{stacked}: its bios are counted as device "
                "requests, and nothing below it."
            )
        chosen = None
        if self._calls is not None:
            rows, more = self._calls.requests(began_ns)
            parts = [device, self._calls.whole_requests(bios, thread, began_ns), rows]
            counts |= more
            if not self._calls.sees_uring:
                self._remarks.append(
                    "This kernel has no events for io_uring, so the application's requests do not include them."
                )
            roots = [*self._settings.pids, *([process.pid] if process is not None else [])]
            chosen = self._tree.with_children(roots)
        requests = by_time(*parts)
        if self._settings.directory is not None:
            requests = within(requests, self._spans)
            self._remarks.append(
                f"Only requests for files below {self._settings.directory} count, by where these were at the start and "
                "at the end: not the file system's own, and not those for files that came and went in between."
            )
        return IoTrace(
            source="block",
            requests=requests,
            seconds=(ended_ns - began_ns) / 1e9,
            began_s=began_s,
            processes=self._tree.names(np.unique(requests["process"]).tolist()),
            places={it.disk_number: it.disk for it in devices},
            device_facts={it.disk: it.facts() | allocation_groups(it.disk) for it in devices if it.exists()},
            lost_events=lost,
            counts=counts,
            chosen=chosen,
            remarks=self._remarks,
        )
