"""Runs many operations in several threads on two tiers over one store, with faults of the storage in between.

It is for kinds whose store several nodes share. Every frame that verifies must have the right bytes. The buffer of a
failed read gets a new owner at once, and the owner's bytes must stay.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.faults.disk_world import group_of, identity, payload_of, sealed

from kvtier.codec.frame import OPEN_SCRATCH_BYTES, frame_bytes, head_bytes, unpack_in_place
from kvtier.errors import CorruptChunkError, TierError
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.base import Read, Tier, Write

NAMES = 200
THREADS = 4
BATCH = 8
FAULTS = 100
"""The most faults in a soak."""
OWNED_MAX = 64
FRAMES = [sealed(number) for number in range(NAMES)]


def stop_this_process(seconds: float) -> None:
    """Stop all threads of this process, as a frozen control group does."""
    program = "import os,signal,sys,time;p=int(sys.argv[1]);os.kill(p,19);time.sleep(float(sys.argv[2]));os.kill(p,18)"
    subprocess.run([sys.executable, "-c", program, str(os.getpid()), str(seconds)], timeout=60, check=True)


def flip_a_bit(paths: Sequence[Path], chance: random.Random) -> None:
    """Flip a bit of one file of `paths`, unless it is gone."""
    with suppress(OSError, IndexError):
        path = chance.choice(paths)
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


class TierSoak:
    """A soak.

    Args:
        make: opens a tier over the store, as another node does.
        faults: each harms the storage, for a moment or permanently.
        heal: repairs the storage.
        seed: seed of everything that is drawn.
    """

    def __init__(
        self, make: Callable[[], Tier], faults: Sequence[Callable[[], None]], heal: Callable[[], None], seed: int
    ) -> None:
        self._make, self._faults, self._heal = make, faults, heal
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._left = 0
        self.counts: Counter[str] = Counter()

    def run(self, operations: int) -> Counter[str]:
        """Run `operations` operations. Return counts of what happened."""
        self._left = operations
        tiers = [self._make(), self._make()]
        try:
            with ThreadPoolExecutor(THREADS) as threads:
                workers = [threads.submit(self._work, tiers[n % 2], self._chance.random()) for n in range(THREADS)]
                next_fault = operations
                while not all(worker.done() for worker in workers):
                    time.sleep(0.01)
                    if 0 < self._left <= next_fault:
                        next_fault = self._left - max(500, operations // FAULTS)
                        self._chance.choice(self._faults)()
                        self._heal()
                        self.counts["faults"] += 1
                for worker in workers:
                    worker.result()
            self._heal()
            self._check_well(tiers)
        finally:
            self._left = 0
            for tier in tiers:
                tier.close()
        return self.counts

    def _check_well(self, tiers: Sequence[Tier]) -> None:
        """Check that with healthy storage one tier writes and the other reads."""
        end_s, slot = time.monotonic() + 60, empty_frame(FRAMES[0].nbytes)
        while True:
            try:
                tiers[0].delete(object_name(0))
                if tiers[0].write(object_name(0), FRAMES[0]) and tiers[1].read(object_name(0), slot) is not None:
                    assert slot == FRAMES[0]
                    return
            except TierError:
                pass
            assert time.monotonic() < end_s, "the store is well, and the tiers are not"
            time.sleep(0.2)

    def _work(self, tier: Tier, seed: float) -> None:
        worker = Worker(tier, random.Random(seed))
        try:
            while self._take():
                worker.step()
        except BaseException:
            self._left = 0  # the others end too
            raise
        finally:
            with self._lock:
                self.counts += worker.counts

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


class Worker:
    """Runs one thread's operations, and checks what it reads."""

    def __init__(self, tier: Tier, chance: random.Random, counts: Counter[str] | None = None) -> None:
        self.tier, self.chance = tier, chance
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.slots = [empty_frame(max(frame.nbytes for frame in FRAMES)) for _ in range(BATCH)]
        self.scratch = memoryview(bytearray(OPEN_SCRATCH_BYTES))
        self.owned: deque[tuple[memoryview, bytes]] = deque()
        """Buffers of failed reads with the bytes of their new owners."""

    def step(self) -> None:
        """Run one operation, or a batch of several. Each object of a batch counts as an operation."""
        acts = [self._write, self._read, self._delete, self._look, self._write_many, self._read_many]
        weights = [25, 60, 8, 7, 5, 10]
        (number,) = self.chance.choices(range(len(acts)), weights)
        try:
            acts[number]()
        except TierError:
            self.counts["failed"] += 1
        self.counts["operations"] += 1 if number < 3 else BATCH
        if self.owned and (len(self.owned) > OWNED_MAX or self.chance.random() < 0.05):
            slot, owner = self.owned.popleft()
            assert slot == owner, "a read that failed wrote into a buffer with a new owner"
            self.counts["left alone"] += 1

    def _number(self) -> int:
        return min(int(self.chance.expovariate(1 / 60)), NAMES - 1)

    def _numbers(self) -> list[int]:
        first = self._number()
        return [(first + more) % NAMES for more in range(BATCH)]

    def _slot(self, number: int, at: int = 0) -> memoryview:
        return self.slots[at][: frame_bytes(group_of(number))]

    def _write(self) -> None:
        number = self._number()
        self.tier.write(object_name(number), FRAMES[number])

    def _write_many(self) -> None:
        self.tier.write_many([Write(object_name(number), FRAMES[number]) for number in self._numbers()])

    def _delete(self) -> None:
        self.tier.delete(object_name(self._number()))

    def _look(self) -> None:
        self.tier.contains([object_name(number) for number in self._numbers()])

    def _read(self) -> None:
        number = self._number()
        try:
            count = self.tier.read(object_name(number), self._slot(number))
        except TierError as error:
            self._judge(number, 0, error)
        else:
            self._judge(number, 0, count)

    def _read_many(self) -> None:
        numbers = self._numbers()
        reads = [Read(object_name(number), self._slot(number, at)) for at, number in enumerate(numbers)]
        try:
            answers = self.tier.read_many(reads)
        except TierError as error:
            answers = [error] * len(numbers)
        for at, (number, answer) in enumerate(zip(numbers, answers, strict=True)):
            self._judge(number, at, answer)

    def _judge(self, number: int, at: int, answer: int | TierError | None) -> None:
        if answer is None:
            self.counts["absent"] += 1
            return
        if isinstance(answer, TierError):
            self.counts["failed"] += 1
            owner = self.chance.randbytes(16) * (len(self.slots[at]) // 16)
            self.slots[at][:] = owner
            self.owned.append((self.slots[at], owner))
            self.slots[at] = empty_frame(len(owner))
            return
        group, slot = group_of(number), self._slot(number, at)
        try:
            unpack_in_place(slot, answer, group, identity(number), self.scratch)
        except CorruptChunkError:
            self.counts["refused"] += 1
            self.tier.delete(object_name(number))  # as the core does
            return
        assert slot[head_bytes(group) :] == payload_of(number), f"wrong bytes as object {number}"
        self.counts["right"] += 1
