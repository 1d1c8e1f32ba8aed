"""Threads that execute gathers and scatters on a simulated device, and the slots that they use."""

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.simulated_cuda import Machine
from tests.simulated_cuda.machine import POISON, DeviceError
from tests.simulated_cuda.turns import StalledError

from kvtier.connect.vllm.worker.copier import RevokedError
from kvtier.device.copier import Copier, Fence
from kvtier.layout import KvLayout
from kvtier.runtime import command_runner
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Job
from kvtier.runtime.worker_queues import Scratch
from kvtier.types import ChunkKey, Direction, Outcome, RequestId, Transfer

HOST_PART_BYTES = 4096
SLOTS = 3
MOVERS = 2
POLLS_MAX = 2000
BATCHED = 0.5
"""Share of the commands that join the batch of the one before, if their direction is the same."""
REFUSED = 0.02
"""Share of the calls that the driver refuses, in schedules with errors."""


@dataclass
class Command:
    """A gather or scatter."""

    direction: Direction
    request: str
    group: int
    blocks: tuple[int, ...]
    wanted: Callable[[memoryview], bool]
    """Whether a payload holds the right bytes."""
    fill: Callable[[memoryview], None]
    """Write the right bytes to a payload."""
    ended: Callable[[bool], None]
    """Called at the end: whether it succeeded."""


@dataclass
class _Labelled:
    """Names the request of each copy for the machine."""

    inner: Copier
    machine: Machine

    def gather(self, request: RequestId, *rest: Any) -> Fence | None:
        with self.machine.label(f"gather {request}"):
            return self.inner.gather(request, *rest)

    def scatter(self, request: RequestId, *rest: Any) -> Fence | None:
        with self.machine.label(f"scatter {request}"):
            return self.inner.scatter(request, *rest)

    def done(self, fence: Fence) -> bool:
        return self.inner.done(fence)


@dataclass
class Movers:
    """Commands, and the threads that execute them. One thread runs at a time."""

    machine: Machine
    rng: random.Random
    copier: Copier
    layout: KvLayout
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Slots are page-locked, pageable, or the first of them only are locked by now.
        locked = self.rng.choice((SLOTS, SLOTS, 0, 1))

        def lock(address: int, size_bytes: int, slot_bytes: int) -> Callable[[], None]:
            if locked:
                assert self.machine.register(address, slot_bytes * locked) == 0
            return lambda: None

        self.arena = Arena(self.layout, [SLOTS] * len(self.layout.groups), page_lock=lock)
        self.runner = CommandRunner(
            layout=self.layout,
            model=bytes(16),
            arena=self.arena,
            copier=_Labelled(self.copier, self.machine),
            tiers={},
            common=(),
            forms={},
            clock=lambda: 0.0,
        )
        self.free: list[list[int]] = [[] for _ in self.layout.groups]
        self.queue: deque[tuple[Command, int]] = deque()
        self.running = 0
        self.is_over = False
        self._ids = count()
        self.polls = threading.local()
        """How often each thread may still look at its fence."""
        for group in range(len(self.layout.groups)):
            for slot in range(SLOTS):
                self._reuse(group, slot)

    def submit(self, command: Command) -> None:
        """Queue a command, with a slot that holds the right bytes if it is a scatter."""
        self.machine.turns.wait_for(lambda: self.free[command.group])
        slot = self.free[command.group].pop()
        payload = self.arena.payload(command.group, slot)
        self.machine.host_writes(f"use of slot {slot}", payload)
        if command.direction is Direction.SCATTER:
            command.fill(payload)
        self.queue.append((command, slot))
        self.machine.turns.switch()

    def work(self) -> None:
        """Execute commands until the engine is over."""
        while self.queue or not self.is_over:
            self.machine.turns.wait_for(lambda: self.queue or self.is_over)
            if not self.queue:
                return
            batch = [self.queue.popleft()]
            direction = batch[0][0].direction
            while self.queue and self.queue[0][0].direction is direction and self.rng.random() < BATCHED:
                batch.append(self.queue.popleft())
            self.running += len(batch)
            are_done = self._run(batch)
            self.running -= len(batch)
            for (command, slot), is_done in zip(batch, are_done, strict=True):
                payload = self.arena.payload(command.group, slot)
                if is_done and direction is Direction.GATHER:
                    self.machine.host_reads(f"a reader of {command.request}", payload)
                    if not command.wanted(payload):
                        self.problems.append(f"gather of {command.request}: wrong bytes")
                self._reuse(command.group, slot)
                command.ended(is_done)

    def wait(self) -> None:
        """Wait until nothing is queued or runs."""
        self.machine.turns.wait_for(lambda: not self.queue and not self.running)

    def _run(self, batch: list[tuple[Command, int]]) -> list[bool]:
        jobs: list[Job] = []
        for command, slot in batch:
            key, request = ChunkKey(bytes(16)), RequestId(command.request)
            what = command.group, slot, "", request, command.blocks
            jobs.append(Job(Transfer(next(self._ids), command.direction, key, *what, None, 0, math.inf, None), 0.0))
        self.polls.left = POLLS_MAX
        are_done: list[bool] = []
        for (command, _), result in zip(batch, self.runner.run(jobs, Scratch()), strict=True):
            if isinstance(result, StalledError | DeviceError):
                if isinstance(result, StalledError) or "refused" not in str(result):
                    self.problems.append(f"{command.direction.value} of {command.request}: {result}")
            elif isinstance(result, Exception) and not isinstance(result, RevokedError | LookupError):
                raise result
            are_done.append(not isinstance(result, Exception) and result.outcome is Outcome.DONE)
        return are_done

    def sleep(self, _s: float) -> None:
        """Let the others go on, instead of `time.sleep` between two looks at a fence."""
        self.machine.turns.switch()
        self.polls.left -= 1
        if self.polls.left < 0:
            raise StalledError("the copy waits for a stream that is held")

    def _reuse(self, group: int, slot: int) -> None:
        """Give the slot to another object."""
        payload = self.arena.payload(group, slot)
        self.machine.host_writes(f"reuse of slot {slot}", payload)
        np.frombuffer(payload, np.uint8)[:] = POISON
        self.free[group].append(slot)


def run_schedule(machine: Machine, movers: Movers, engine: Callable[[], None], *, has_errors: bool) -> list[str]:
    """Run the engine and the movers in one order; what went wrong."""
    rng = random.Random(machine.rng.random())
    calls = {"allocate", "record", "wait", "copy to the device", "copy to the host"}

    def refuses(name: str) -> bool:
        is_mover = machine.turns.number > 1
        return is_mover and (name in calls or "aten" in name) and rng.random() < REFUSED

    if has_errors:
        machine.fail_at = refuses

    def whole() -> None:
        try:
            engine()
        finally:
            movers.is_over = True

    with mock.patch.object(command_runner, "time", SimpleNamespace(sleep=movers.sleep)):
        machine.turns.together(whole, *[movers.work] * MOVERS)
    torch.cuda.synchronize()
    return movers.problems
