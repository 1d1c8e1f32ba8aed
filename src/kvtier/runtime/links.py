"""The work of each command: one function for each of the four links, the probe and the drop.

Nothing is caught here. An exception means that the bytes did not move, or moved only into a slot that no DONE was said
for; the mover turns it into an outcome, in one place.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.codec.base import Codec
from kvtier.codec.frame import OPEN_SCRATCH_BYTES, open_in_place, seal, seal_scratch_bytes
from kvtier.codec.head import Identity
from kvtier.device.base import Copier, Fence
from kvtier.errors import TierError
from kvtier.keys.names import object_name, object_names
from kvtier.layout import KvLayout
from kvtier.runtime.arena import Arena
from kvtier.runtime.jobs import Job
from kvtier.runtime.lanes import Scratch
from kvtier.tier.base import About, Tier
from kvtier.types import ChunkKey, Drop, Link, ObjectName, Outcome, Probe, RequestId, Transfer

FENCE_WAIT_S_MIN = 20e-6
FENCE_WAIT_S_MAX = 1e-3

NOT_ADMITTED = "not admitted"
"""The detail of a demote that the tier refused: FAILED, but no fault of the tier."""

_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """How work ended that raised nothing."""

    outcome: Outcome
    size_bytes: int = 0
    present: tuple[bool, ...] = ()
    detail: str = ""


class Links:
    """One rank's ways between its engine, its arena and its tiers. Thread-safe: it has no state of its own.

    Two demotes of one slot may seal it at the same time, and scatters may read it meanwhile, without a lock: for the
    same identity `seal` writes the same bytes, the header in one piece; padding that it zeroes stays zero; and it
    leaves the layers alone. Who may write to a slot, and that nobody reads it then, is the core's to decide.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        rank: int,
        fingerprint: bytes,
        arena: Arena,
        copier: Copier,
        tiers: Mapping[str, Tier],
        codec: Codec,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._fingerprint = fingerprint
        self._arena = arena
        self._copier = copier
        self._tiers = dict(tiers)
        self._codec = codec
        self._clock = clock
        self._digests = [layout.digest(group) for group in range(len(layout.groups))]
        self._engine_bytes = [sum(group.layer_bytes) for group in layout.groups]
        self._seal_scratch_bytes = [seal_scratch_bytes(group, codec) for group in layout.groups]

    def run(self, job: Job, scratch: Scratch) -> Result:
        """Do what the job says. Raises whatever its tier, codec or copier raises."""
        command = job.command
        if isinstance(command, Probe):
            return self._probe(job, command)
        if isinstance(command, Drop):
            return self._drop(job, command)
        if command.link is Link.GATHER or command.link is Link.SCATTER:
            return self._copy(command)
        if command.link is Link.DEMOTE:
            return self._demote(job, command, scratch)
        return self._promote(job, command, scratch)

    def _copy(self, transfer: Transfer) -> Result:
        start = self._copier.gather if transfer.link is Link.GATHER else self._copier.scatter
        payload = self._arena.payload(transfer.group, transfer.slot)
        fence = start(transfer.request or RequestId(""), transfer.group, transfer.blocks, payload)
        if fence is not None:
            self._await(fence, transfer)
        return Result(Outcome.DONE, self._engine_bytes[transfer.group])

    def _await(self, fence: Fence, transfer: Transfer) -> None:
        """Wait for a device copy to end, for as long as it takes.

        It cannot be abandoned: the device goes on using the slot and the blocks, and nobody else may have them before.
        An exception of `done` does end it: the copy has failed.
        """
        wait_s = FENCE_WAIT_S_MIN
        is_told = False
        while not self._copier.done(fence):
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, FENCE_WAIT_S_MAX)
            if not is_told and self._clock() > transfer.deadline_s:
                _log.warning("a %s runs past its deadline; waiting for the device", transfer.link.value)
                is_told = True

    def _demote(self, job: Job, transfer: Transfer, scratch: Scratch) -> Result:
        group = transfer.group
        identity = self._identity(transfer)
        size_bytes = self._seal_scratch_bytes[group]
        frame = seal(
            self._arena.frame(group, transfer.slot),
            self._layout.groups[group],
            identity,
            self._codec,
            scratch.view(size_bytes) if size_bytes else None,
        )
        about = About(identity.parent, transfer.depth, group, self._layout.chunk_tokens, transfer.hint)
        with _calling_tier(job):
            is_held = self._tiers[transfer.tier].write(identity.name, frame, about)
        if not is_held:
            return Result(Outcome.FAILED, detail=NOT_ADMITTED)
        return Result(Outcome.DONE, len(frame))

    def _promote(self, job: Job, transfer: Transfer, scratch: Scratch) -> Result:
        group = transfer.group
        identity = self._identity(transfer)
        slot = self._arena.frame(group, transfer.slot)
        with _calling_tier(job):
            stored_bytes = self._tiers[transfer.tier].read(identity.name, slot)
        if stored_bytes is None:
            return Result(Outcome.ABSENT, detail="not there")
        open_in_place(slot, stored_bytes, self._layout.groups[group], identity, scratch.view(OPEN_SCRATCH_BYTES))
        return Result(Outcome.DONE, stored_bytes)

    def _probe(self, job: Job, probe: Probe) -> Result:
        present = [False] * len(probe.objects)
        positions: dict[int, list[int]] = {}
        for position, (_, group) in enumerate(probe.objects):
            positions.setdefault(group, []).append(position)
        names: list[ObjectName] = []
        for group, members in positions.items():
            keys = (probe.objects[position][0] for position in members)
            names += object_names(keys, group, self._rank, self._digests[group])
        with _calling_tier(job):
            answers = self._tiers[probe.tier].contains(names)
            if len(answers) != len(names):
                raise TierError(probe.tier, f"{len(answers)} answers to {len(names)} names")
        order = (position for members in positions.values() for position in members)
        for position, is_present in zip(order, answers, strict=True):
            present[position] = is_present
        return Result(Outcome.DONE, present=tuple(present))

    def _drop(self, job: Job, drop: Drop) -> Result:
        name = self._name(drop.key, drop.group)
        with _calling_tier(job):
            self._tiers[drop.tier].delete(name)
        return Result(Outcome.DONE)

    def _name(self, key: ChunkKey, group: int) -> ObjectName:
        return object_name(key, group, self._rank, self._digests[group])

    def _identity(self, transfer: Transfer) -> Identity:
        group = transfer.group
        return Identity(
            self._name(transfer.key, group),
            self._fingerprint,
            self._digests[group],
            None if transfer.parent is None else self._name(transfer.parent, group),
            transfer.depth,
            self._layout.chunk_tokens,
            group,
            self._rank,
        )


@contextmanager
def _calling_tier(job: Job) -> Generator[None]:
    """What is raised within is the tier's fault."""
    job.is_in_tier = True
    yield
    job.is_in_tier = False
