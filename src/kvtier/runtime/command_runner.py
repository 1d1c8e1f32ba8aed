"""The work of each command: one method for each kind.

Methods raise on failure and the mover turns exceptions into outcomes. In a batch each object has its own result. After
an exception the bytes in the target slot are undefined. Tiers get slots as loans, and a method ends after them.
"""

import hmac
import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar, TypeVarTuple

from kvtier.codec.base import Codec
from kvtier.codec.frame import OPEN_SCRATCH_BYTES, open_in_place, seal, seal_scratch_bytes
from kvtier.codec.head import Identity
from kvtier.device.copier import Copier, Fence
from kvtier.errors import TierError, UnreadableChunkError
from kvtier.keys.object_names import object_name, object_names
from kvtier.layout import KvLayout
from kvtier.policy.base import Hinted
from kvtier.runtime.arena import Arena
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.runtime.executor import Job, Work
from kvtier.runtime.worker_queues import Scratch
from kvtier.tier.base import About, AheadTier, BatchTier, LogsRefusals, Read, Tier, Write, ended
from kvtier.tier.loan import Loan, clear_frames
from kvtier.tier.refusal_log import RefusalLog
from kvtier.types import ChunkKey, Drop, Link, ObjectName, Outcome, Probe, RequestId, Tell, Transfer

BATCH_BYTES = 2 << 20
"""Approximate size of a batch of small objects. Larger batches are not faster and delay their first object."""

BATCH_MAX = 64

FENCE_WAIT_S_MIN = 20e-6
FENCE_WAIT_S_MAX = 1e-3

NOT_ADMITTED = "not admitted"
"""Detail of a demote that the tier refused: FAILED, but not a tier fault."""

REFUSED_MIN = 16
"""A tier that refuses so many writes in a row, and does not log it, is full or over its budget, which is logged."""

UNREADABLE_S = 60.0
"""How long an object that this process could not read is left alone. Another process may replace it meanwhile."""

UNREADABLE_MAX = 1 << 16
"""When there are this many, all are tried again."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
_Given = TypeVarTuple("_Given")

Steps = Generator[None, None, _Answer]
"""Work that may be suspended where it yields."""

_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """The outcome of one object's work."""

    outcome: Outcome
    size_bytes: int = 0
    present: tuple[bool, ...] = ()
    detail: str = ""


_ABSENT = Result(Outcome.ABSENT, detail="not there")
_ELSEWHERE = Result(Outcome.DONE)


class CommandRunner:
    """Moves one rank's objects between its engine, its arena and its tiers. Thread-safe.

    A tier's object that this process cannot read is absent here for a time: it is not found, written or deleted.

    Two demotes of a slot may seal it concurrently while scatters read it, without a lock. For one identity `seal`
    always writes the same bytes, writes the header at once, and leaves the layers alone. The core ensures that a slot
    is not read while other bytes are written to it.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        fingerprint: bytes,
        arena: Arena,
        copier: Copier,
        tiers: Mapping[str, Tier],
        common: Collection[str],
        codec: Codec,
        clock: Callable[[], float],
        name_root: bytes | None = None,
    ) -> None:
        self._layout = layout
        self._fingerprint = fingerprint
        self._arena = arena
        self._copier = copier
        self._tiers: dict[str, Tier] = {}
        self._batch_tiers: dict[str, BatchTier] = {}
        self._ahead_tiers: dict[str, AheadTier] = {}
        self._refusals: dict[str, RefusalLog] = {}
        for name, tier in tiers.items():
            self._use(name, tier)
            if isinstance(tier, DeferredTier):
                tier.when_open(partial(self._use, name))
        self._codec = codec
        self._clock = clock
        self._digests = [layout.digest(group) for group in range(len(layout.groups))]
        self._name_digests = (
            self._digests if name_root is None else [hmac.digest(name_root, it, "sha256") for it in self._digests]
        )
        """Of each group, in names."""
        self._parts = [layout.part(group) for group in range(len(layout.groups))]
        self._kept_elsewhere = {
            (name, group) for name in common for group, known in enumerate(layout.groups) if known.copy
        }
        """(tier, group) whose objects another rank writes and drops, because it holds the same KV."""
        self._engine_bytes = [sum(group.layer_bytes) for group in layout.groups]
        self._seal_scratch_bytes = [seal_scratch_bytes(group, codec) for group in layout.groups]
        self._unreadable: dict[tuple[str, ObjectName], float] = {}
        """(tier, name), and until when it is left alone. Threads share it without a lock: each use is one operation."""
        self._batch_counts = [min(BATCH_MAX, max(1, BATCH_BYTES // group.payload_bytes)) for group in layout.groups]

    def _use(self, name: str, tier: Tier) -> None:
        self._tiers[name] = tier
        self._refusals[name] = tier.refusals if isinstance(tier, LogsRefusals) else RefusalLog(name)
        if isinstance(tier, BatchTier):
            self._batch_tiers[name] = tier
        if isinstance(tier, AheadTier):
            self._ahead_tiers[name] = tier

    @property
    def batching(self) -> Collection[str]:
        """Names of the tiers that take batches; a tier that opens later is added then."""
        return self._batch_tiers

    def together(self, command: Work) -> int:
        """Most commands like this one in a batch; 1: no batches."""
        if isinstance(command, Transfer) and command.tier in self._batch_tiers and not self._is_elsewhere(command):
            return self._batch_counts[command.group]
        return 1

    def reads_ahead(self, command: Work) -> bool:
        """Whether a batch of this command goes to `promote_ahead`."""
        return isinstance(command, Transfer) and command.link is Link.PROMOTE and command.tier in self._ahead_tiers

    def run(self, jobs: Sequence[Job], scratch: Scratch) -> Sequence[Result | Exception]:
        """Do one job, or a batch of demotes or promotes of one tier.

        Returns:
            A result for each job. In a batch an object's exception is its result.

        Raises:
            Exception: a single job, or a batch as a whole, failed.
        """
        command = jobs[0].command
        if not isinstance(command, Transfer):
            return [self._ask(jobs[0], command)]
        if len(jobs) > 1:
            return (
                self._demote_many(jobs, scratch) if command.link is Link.DEMOTE else self._promote_many(jobs, scratch)
            )
        if command.link is Link.PROMOTE:
            return [self._promote(jobs[0], command, scratch)]
        if command.link is not Link.DEMOTE:
            return [self._copy(command)]
        if self._kept_elsewhere and self._is_elsewhere(command):
            return [_ELSEWHERE]
        return [self._demote(jobs[0], command, scratch)]

    def _ask(self, job: Job, command: Probe | Drop | Tell) -> Result:
        if isinstance(command, Probe):
            return self._probe(job, command)
        if isinstance(command, Tell):
            return self._tell(job, command)
        return _ELSEWHERE if self._is_elsewhere(command) else self._drop(job, command)

    def _is_elsewhere(self, command: Work) -> bool:
        """Whether another rank does this demote or drop for this one.

        A command of all ranks is done when every rank has done it, so the outcome is that of the rank that writes. One
        rank drops and writes an object, so its writes stay behind its drops.
        """
        if isinstance(command, Drop) or (isinstance(command, Transfer) and command.link is Link.DEMOTE):
            return (command.tier, command.group) in self._kept_elsewhere
        return False

    def _copy(self, transfer: Transfer) -> Result:
        start = self._copier.gather if transfer.link is Link.GATHER else self._copier.scatter
        payload = self._arena.payload(transfer.group, transfer.slot)
        fence = start(transfer.request or RequestId(""), transfer.group, transfer.blocks, payload)
        if fence is not None:
            self._await(fence, transfer)
        return Result(Outcome.DONE, self._engine_bytes[transfer.group])

    def _await(self, fence: Fence, transfer: Transfer) -> None:
        """Wait for a device copy to end, without a deadline.

        Until it ends the device uses the slot and the blocks, so they cannot be reused. An exception of `done` ends
        the wait: the copy has failed.
        """
        wait_s = FENCE_WAIT_S_MIN
        is_logged = False
        while not self._copier.done(fence):
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, FENCE_WAIT_S_MAX)
            if not is_logged and self._clock() > transfer.deadline_s:
                _log.warning(
                    "a %s of slot %d is past its deadline; kvtier waits until the device has finished it",
                    transfer.link.value,
                    transfer.slot,
                )
                is_logged = True

    def _demote(self, job: Job, transfer: Transfer, scratch: Scratch) -> Result:
        (identity,) = self._identities([transfer])
        write = self._sealed(transfer, identity, scratch.view(self._seal_scratch_bytes[transfer.group]))
        job.is_in_tier = True
        with Loan((write.frame,), transfer.tier) as (frame,):
            is_held = self._tiers[transfer.tier].write(write.name, frame, write.about)
        job.is_in_tier = False
        return self._written(transfer.tier, write, is_held=is_held)

    def _demote_many(self, jobs: Sequence[Job], scratch: Scratch) -> list[Result | Exception]:
        transfers = _transfers(jobs)
        stops = list(accumulate(self._seal_scratch_bytes[transfer.group] for transfer in transfers))
        whole = scratch.view(stops[-1])
        views = [whole[start:stop] for start, stop in pairwise((0, *stops))]
        identities = self._identities(transfers)
        writes = [_attempt(self._sealed, *it) for it in zip(transfers, identities, views, strict=True)]
        tier = transfers[0].tier
        with Loan([write.frame for write in writes if isinstance(write, Write)], tier) as frames:
            rest = iter(frames)
            lent = [write._replace(frame=next(rest)) if isinstance(write, Write) else write for write in writes]
            answers = _call_tier(jobs, lent, self._batch_tiers[tier].write_many)
        results: list[Result | Exception] = []
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(write, Exception):
                results.append(write)
            else:
                results.append(answer if isinstance(answer, Exception) else self._written(tier, write, is_held=answer))
        return results

    def _written(self, tier: str, write: Write, *, is_held: bool) -> Result:
        if is_held:
            self._refusals[tier].taken()
            return Result(Outcome.DONE, len(write.frame))
        self._refusals[tier].refused(f"the last {REFUSED_MIN} were not admitted", REFUSED_MIN)
        return Result(Outcome.FAILED, detail=NOT_ADMITTED)

    def _sealed(self, transfer: Transfer, identity: Identity, scratch: memoryview) -> Write:
        if self._is_left_alone(transfer.tier, identity.name):
            raise TierError(transfer.tier, NOT_ADMITTED)  # a tier does not overwrite objects
        group = transfer.group
        slot = self._arena.frame(group, transfer.slot)
        frame = seal(slot, self._layout.groups[group], identity, self._codec, scratch)
        about = About(identity.parent, transfer.depth, group, transfer.session)
        return Write(identity.name, frame, about)

    def _promote(self, job: Job, transfer: Transfer, scratch: Scratch) -> Result:
        group = transfer.group
        (name,) = object_names((transfer.key,), group, self._parts[group], self._name_digests[group])
        slot = self._arena.frame(group, transfer.slot)
        job.is_in_tier = True
        with Loan((slot,), transfer.tier) as (into,):
            stored_bytes = self._tiers[transfer.tier].read(name, into)
        job.is_in_tier = False
        return self._opened(transfer, name, slot, stored_bytes, scratch.view(OPEN_SCRATCH_BYTES))

    def _promote_many(self, jobs: Sequence[Job], scratch: Scratch) -> list[Result | Exception]:
        names, slots = self._objects(jobs)
        tier = jobs[0].command.tier
        with Loan(slots, tier) as views:
            answers = _call_tier(jobs, list(map(Read, names, views)), self._batch_tiers[tier].read_many)
        return self._opened_many(jobs, names, slots, answers, scratch)

    def promote_ahead(self, jobs: Sequence[Job], scratch: Scratch) -> Steps[list[Result | Exception]]:
        """Do a batch of promotes of an `AheadTier`.

        It yields twice: when the reads are submitted, and when the frames have arrived, before it verifies them. The
        thread may run other jobs in between; `scratch` is not used then.
        """
        names, slots = self._objects(jobs)
        tier = jobs[0].command.tier
        with Loan(slots, tier) as views:
            reads = list(map(Read, names, views))
            with closing(self._ahead_tiers[tier].reading(reads)) as steps:
                for job in jobs:
                    job.is_in_tier = True
                next(steps, None)
                yield
                answers = _call_tier(jobs, reads, lambda _: ended(steps))
        yield
        return self._opened_many(jobs, names, slots, answers, scratch)

    def _objects(self, jobs: Sequence[Job]) -> tuple[list[ObjectName], list[memoryview]]:
        """Names and slots."""
        transfers = _transfers(jobs)
        names = self._names([transfer.key for transfer in transfers], [transfer.group for transfer in transfers])
        return names, [self._arena.frame(transfer.group, transfer.slot) for transfer in transfers]

    def _opened_many(
        self,
        jobs: Sequence[Job],
        names: Sequence[ObjectName],
        slots: Sequence[memoryview],
        answers: Sequence[int | Exception | None],
        scratch: Scratch,
    ) -> list[Result | Exception]:
        memory = scratch.view(OPEN_SCRATCH_BYTES)
        return [
            answer if isinstance(answer, Exception) else _attempt(self._opened, it, name, slot, answer, memory)
            for it, name, slot, answer in zip(_transfers(jobs), names, slots, answers, strict=True)
        ]

    def _opened(
        self, transfer: Transfer, name: ObjectName, slot: memoryview, stored_bytes: int | None, scratch: memoryview
    ) -> Result:
        if stored_bytes is None:
            return _ABSENT
        identity = Identity(name, self._fingerprint, self._digests[transfer.group])
        try:
            open_in_place(slot, stored_bytes, self._layout.groups[transfer.group], identity, scratch)
        except UnreadableChunkError:
            if len(self._unreadable) >= UNREADABLE_MAX:
                self._unreadable.clear()
            self._unreadable[transfer.tier, name] = self._clock() + UNREADABLE_S
            raise
        return Result(Outcome.DONE, stored_bytes)

    def _is_left_alone(self, tier: str, name: ObjectName) -> bool:
        return bool(self._unreadable) and self._clock() < self._unreadable.get((tier, name), 0.0)

    def _probe(self, job: Job, probe: Probe) -> Result:
        keys, groups = [key for key, _ in probe.objects], [group for _, group in probe.objects]
        names = self._names(keys, groups)
        job.is_in_tier = True
        answers = self._tiers[probe.tier].contains(names)
        if len(answers) != len(names):
            raise TierError(probe.tier, f"contains returned {len(answers)} results for {len(names)} names")
        if self._unreadable:
            answers = [
                it and not self._is_left_alone(probe.tier, name) for name, it in zip(names, answers, strict=True)
            ]
        present = tuple(map(bool, answers))
        job.is_in_tier = False
        return Result(Outcome.DONE, present=present)

    def _drop(self, job: Job, drop: Drop) -> Result:
        name = self._name(drop.key, drop.group)
        job.is_in_tier = True
        if not self._is_left_alone(drop.tier, name):  # another rank's object is bad, not this one
            self._tiers[drop.tier].delete(name)
        job.is_in_tier = False
        return Result(Outcome.DONE)

    def _tell(self, job: Job, tell: Tell) -> Result:
        tier = self._tiers[tell.tier]
        if isinstance(tier, Hinted):
            job.is_in_tier = True
            tier.expects(tell.session, tell.next_turn)
            job.is_in_tier = False
        return Result(Outcome.DONE)

    def _name(self, key: ChunkKey, group: int) -> ObjectName:
        return object_name(key, group, self._parts[group], self._name_digests[group])

    def _names(self, keys: Sequence[ChunkKey], groups: Sequence[int]) -> list[ObjectName]:
        """The names of these objects."""
        different = set(groups)
        if len(different) == 1:  # the usual case
            return object_names(keys, groups[0], self._parts[groups[0]], self._name_digests[groups[0]])
        names = [ObjectName(b"")] * len(keys)
        for group in different:
            members = [position for position, it in enumerate(groups) if it == group]
            its_keys = (keys[position] for position in members)
            its_names = object_names(its_keys, group, self._parts[group], self._name_digests[group])
            for position, name in zip(members, its_names, strict=True):
                names[position] = name
        return names

    def _identities(self, transfers: Sequence[Transfer]) -> list[Identity]:
        groups = [transfer.group for transfer in transfers]
        names = self._names([transfer.key for transfer in transfers], groups)
        of_parents = [(transfer.parent, transfer.group) for transfer in transfers if transfer.parent is not None]
        parents = iter(self._names([key for key, _ in of_parents], [group for _, group in of_parents]))
        return [
            Identity(
                name,
                self._fingerprint,
                self._digests[transfer.group],
                None if transfer.parent is None else next(parents),
                transfer.depth,
                self._layout.chunk_tokens,
                transfer.group,
                self._parts[transfer.group],
            )
            for transfer, name in zip(transfers, names, strict=True)
        ]


def _transfers(jobs: Sequence[Job]) -> list[Transfer]:
    return [job.command for job in jobs if isinstance(job.command, Transfer)]


def _attempt(act: Callable[[*_Given], _Answer], *given: *_Given) -> _Answer | Exception:
    """The result of `act`, or its exception, so that one object of a batch does not fail the others."""
    try:
        return act(*given)
    except Exception as error:  # noqa: BLE001 - the mover turns it into an outcome
        return error


def _call_tier(
    jobs: Sequence[Job], items: Sequence[_Item | Exception], call: Callable[[list[_Item]], list[_Answer]]
) -> list[_Answer | Exception]:
    """Results of `call` for the items; an item that is an exception is its own result."""
    valid = [(job, item) for job, item in zip(jobs, items, strict=True) if not isinstance(item, Exception)]
    for job, _ in valid:
        job.is_in_tier = True
    answers = call([item for _, item in valid])
    if len(answers) != len(valid):
        raise TierError(jobs[0].command.tier, f"a batch of {len(valid)} objects returned {len(answers)} results")
    for (job, _), answer in zip(valid, answers, strict=True):
        job.is_in_tier = isinstance(answer, TierError)
        if isinstance(answer, Exception):
            clear_frames(answer)
    rest = iter(answers)
    return [item if isinstance(item, Exception) else next(rest) for item in items]
