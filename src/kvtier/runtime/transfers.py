"""The work of each command: one function for each of the four links, the probe and the drop.

Nothing is judged here. An exception means that the bytes did not move, or moved only into a slot that no DONE was said
for; the mover turns it into an outcome, in one place. Of several objects that go together each has its own.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, TypeVar, TypeVarTuple

from kvtier.codec.base import Codec
from kvtier.codec.frame import OPEN_SCRATCH_BYTES, open_in_place, seal, seal_scratch_bytes
from kvtier.codec.head import Identity
from kvtier.device.base import Copier, Fence
from kvtier.errors import TierError
from kvtier.keys.names import object_name, object_names
from kvtier.layout import KvLayout
from kvtier.policy.base import Hinted
from kvtier.runtime.arena import Arena
from kvtier.runtime.jobs import Job, Work
from kvtier.runtime.worker_queues import Scratch
from kvtier.tier.base import About, AheadTier, BatchTier, Read, Tier, Write, ended
from kvtier.types import ChunkKey, Drop, Link, ObjectName, Outcome, Probe, RequestId, Tell, Transfer

BATCH_BYTES = 2 << 20
"""Small objects go to a tier and come from it in batches of about so many bytes: more gains nothing, and waits."""

BATCH_MAX = 64

FENCE_WAIT_S_MIN = 20e-6
FENCE_WAIT_S_MAX = 1e-3

NOT_ADMITTED = "not admitted"
"""The detail of a demote that the tier refused: FAILED, but no fault of the tier."""

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")
_Given = TypeVarTuple("_Given")

Steps = Generator[None, None, _Answer]
"""Work that may be left for a while where it yields."""

_log = logging.getLogger(__name__)


class Attempt(Protocol):
    """Gives what `act` returns or raises: of several objects one that fails must not keep the others from an answer."""

    def __call__(self, act: Callable[[*_Given], _Answer], *given: *_Given) -> _Answer | Exception:
        """See above."""
        ...


class Result(NamedTuple):
    """How work ended that raised nothing."""

    outcome: Outcome
    size_bytes: int = 0
    present: tuple[bool, ...] = ()
    detail: str = ""


_ABSENT = Result(Outcome.ABSENT, detail="not there")


class Transfers:
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
        self._batch_tiers = {name: tier for name, tier in tiers.items() if isinstance(tier, BatchTier)}
        self._ahead_tiers = {name: tier for name, tier in tiers.items() if isinstance(tier, AheadTier)}
        self._batch_counts = [min(BATCH_MAX, max(1, BATCH_BYTES // group.payload_bytes)) for group in layout.groups]

    def together(self, command: Work) -> int:
        """How many commands like this one gain by going together; 1 is none."""
        if isinstance(command, Transfer) and command.tier in self._batch_tiers:
            return self._batch_counts[command.group]
        return 1

    def run(self, jobs: Sequence[Job], scratch: Scratch, attempt: Attempt) -> Steps[list[Result | Exception]]:
        """Do what the jobs say: one job, or several demotes or several promotes of one tier that go together.

        Where a tier reads ahead it yields twice: when that has been asked, and when the frames are there, which are
        verified then. Other jobs may be run in between. `scratch` is used only before and after.

        What one of several raises stands in its place. Raised is what concerns them all, and what a single job raises.
        """
        if len(jobs) == 1:
            return [self._run(jobs[0], scratch)]
        command = jobs[0].command
        if isinstance(command, Transfer) and command.link is Link.DEMOTE:
            return self._demote_many(jobs, scratch, attempt)
        return (yield from self._promote_many(jobs, scratch, attempt))

    def _run(self, job: Job, scratch: Scratch) -> Result:
        command = job.command
        if isinstance(command, Probe):
            return self._probe(job, command)
        if isinstance(command, Drop):
            return self._drop(job, command)
        if isinstance(command, Tell):
            return self._tell(job, command)
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
        (identity,) = self._identities([transfer])
        write = self._sealed(transfer, identity, scratch.view(self._seal_scratch_bytes[transfer.group]))
        with _calling_tier(job):
            is_held = self._tiers[transfer.tier].write(*write)
        return _written(write, is_held=is_held)

    def _demote_many(self, jobs: Sequence[Job], scratch: Scratch, attempt: Attempt) -> list[Result | Exception]:
        transfers = _transfers(jobs)
        stops = list(accumulate(self._seal_scratch_bytes[transfer.group] for transfer in transfers))
        whole = scratch.view(stops[-1])
        views = [whole[start:stop] for start, stop in pairwise((0, *stops))]
        identities = self._identities(transfers)
        writes = [attempt(self._sealed, *it) for it in zip(transfers, identities, views, strict=True)]
        answers = _asked(jobs, writes, self._batch_tiers[transfers[0].tier].write_many)
        results: list[Result | Exception] = []
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(write, Exception):
                results.append(write)
            else:
                results.append(answer if isinstance(answer, Exception) else _written(write, is_held=answer))
        return results

    def _sealed(self, transfer: Transfer, identity: Identity, scratch: memoryview) -> Write:
        group = transfer.group
        slot = self._arena.frame(group, transfer.slot)
        frame = seal(slot, self._layout.groups[group], identity, self._codec, scratch)
        about = About(identity.parent, transfer.depth, group, transfer.session)
        return Write(identity.name, frame, about)

    def _promote(self, job: Job, transfer: Transfer, scratch: Scratch) -> Result:
        name = self._name(transfer.key, transfer.group)
        slot = self._arena.frame(transfer.group, transfer.slot)
        with _calling_tier(job):
            stored_bytes = self._tiers[transfer.tier].read(name, slot)
        return self._opened(transfer.group, name, slot, stored_bytes, scratch.view(OPEN_SCRATCH_BYTES))

    def _promote_many(self, jobs: Sequence[Job], scratch: Scratch, attempt: Attempt) -> Steps[list[Result | Exception]]:
        transfers = _transfers(jobs)
        groups = [transfer.group for transfer in transfers]
        names = self._names([transfer.key for transfer in transfers], groups)
        slots = [self._arena.frame(transfer.group, transfer.slot) for transfer in transfers]
        reads = list(map(Read, names, slots))
        answers = yield from self._read_many(jobs, reads, transfers[0].tier)
        memory = scratch.view(OPEN_SCRATCH_BYTES)
        return [
            answer if isinstance(answer, Exception) else attempt(self._opened, group, name, slot, answer, memory)
            for group, name, slot, answer in zip(groups, names, slots, answers, strict=True)
        ]

    def _read_many(self, jobs: Sequence[Job], reads: list[Read], tier: str) -> Steps[Sequence[int | Exception | None]]:
        ahead = self._ahead_tiers.get(tier)
        if ahead is None:
            return _asked(jobs, reads, self._batch_tiers[tier].read_many)
        with closing(ahead.reading(reads)) as steps:
            for job in jobs:
                job.is_in_tier = True
            next(steps, None)
            yield
            answers = _asked(jobs, reads, lambda _: ended(steps))
        yield
        return answers

    def _opened(
        self, group: int, name: ObjectName, slot: memoryview, stored_bytes: int | None, scratch: memoryview
    ) -> Result:
        if stored_bytes is None:
            return _ABSENT
        identity = Identity(name, self._fingerprint, self._digests[group])
        open_in_place(slot, stored_bytes, self._layout.groups[group], identity, scratch)
        return Result(Outcome.DONE, stored_bytes)

    def _probe(self, job: Job, probe: Probe) -> Result:
        keys, groups = [key for key, _ in probe.objects], [group for _, group in probe.objects]
        names = self._names(keys, groups)
        with _calling_tier(job):
            answers = self._tiers[probe.tier].contains(names)
            if len(answers) != len(names):
                raise TierError(probe.tier, f"{len(answers)} answers to {len(names)} names")
        return Result(Outcome.DONE, present=tuple(answers))

    def _drop(self, job: Job, drop: Drop) -> Result:
        name = self._name(drop.key, drop.group)
        with _calling_tier(job):
            self._tiers[drop.tier].delete(name)
        return Result(Outcome.DONE)

    def _tell(self, job: Job, tell: Tell) -> Result:
        tier = self._tiers[tell.tier]
        if isinstance(tier, Hinted):
            with _calling_tier(job):
                tier.expects(tell.session, tell.next_turn)
        return Result(Outcome.DONE)

    def _name(self, key: ChunkKey, group: int) -> ObjectName:
        return object_name(key, group, self._rank, self._digests[group])

    def _names(self, keys: Sequence[ChunkKey], groups: Sequence[int]) -> list[ObjectName]:
        """The name of each of these objects."""
        different = set(groups)
        if len(different) == 1:  # as a rule
            return object_names(keys, groups[0], self._rank, self._digests[groups[0]])
        names = [ObjectName(b"")] * len(keys)
        for group in different:
            members = [position for position, it in enumerate(groups) if it == group]
            its_keys = (keys[position] for position in members)
            for position, name in zip(
                members, object_names(its_keys, group, self._rank, self._digests[group]), strict=True
            ):
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
                self._rank,
            )
            for transfer, name in zip(transfers, names, strict=True)
        ]


@contextmanager
def _calling_tier(job: Job) -> Generator[None]:
    """What is raised within is the tier's fault."""
    job.is_in_tier = True
    yield
    job.is_in_tier = False


def _transfers(jobs: Sequence[Job]) -> list[Transfer]:
    return [job.command for job in jobs if isinstance(job.command, Transfer)]


def _written(write: Write, *, is_held: bool) -> Result:
    return Result(Outcome.DONE, len(write.frame)) if is_held else Result(Outcome.FAILED, detail=NOT_ADMITTED)


def _asked(
    jobs: Sequence[Job], asked: Sequence[_Question | Exception], ask: Callable[[list[_Question]], list[_Answer]]
) -> list[_Answer | Exception]:
    """What the tier answers to the questions that there are; in place of the others stand their errors."""
    going = [(job, question) for job, question in zip(jobs, asked, strict=True) if not isinstance(question, Exception)]
    for job, _ in going:
        job.is_in_tier = True
    told = ask([question for _, question in going])
    if len(told) != len(going):
        raise TierError(jobs[0].command.tier, f"{len(told)} answers to {len(going)} questions")
    for (job, _), answer in zip(going, told, strict=True):
        job.is_in_tier = isinstance(answer, TierError)
    answers = iter(told)
    return [question if isinstance(question, Exception) else next(answers) for question in asked]
