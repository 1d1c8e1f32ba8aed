"""Does the work of each command, with one method for each kind.

Methods raise on failure, and the mover turns exceptions into outcomes. Each object of a batch has its own result. The
bytes in the target slot are undefined after an exception. A tier borrows slots, and a method returns only after its
loans have ended.
"""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeVar, cast

from kvtier.codec.frame import OPEN_SCRATCH_BYTES, pack, section_checksums, unpack_in_place
from kvtier.codec.frame_header import Identity
from kvtier.device.copier import Copier, Fence
from kvtier.errors import TierError, UnreadableChunkError
from kvtier.keys.object_names import name_head, names_of
from kvtier.layout import KvLayout
from kvtier.runtime.arena import Arena
from kvtier.runtime.executor import Completion, Job, Work
from kvtier.runtime.tier_encoding import RAW, StoredForm
from kvtier.runtime.tier_recall import TierRecall
from kvtier.runtime.worker_queues import Scratch
from kvtier.tier.base import About, Read, Tier, Write, clear_frames
from kvtier.tier.buffer_loans import Loan
from kvtier.types import ChunkKey, Direction, Drop, ObjectName, Outcome, Probe, Recall, RequestId, Tell, Transfer

BATCH_BYTES = 2 << 20
"""Approximate size of a batch of small objects. Larger batches are not faster and delay their first object."""

BATCH_MAX = 64

FENCE_WAIT_S_MIN = 20e-6
FENCE_WAIT_S_MAX = 1e-3

NOT_ADMITTED = "not admitted"
"""Detail of a demotion that the tier refused: it is FAILED, but not a tier fault."""

REFUSED_MIN = 16
"""Number of refused writes in a row after which a tier is reported as full or over budget, unless it logs that itself.
"""

UNREADABLE_S = 60.0
"""How long this process ignores an object that it could not read. Another process may replace it meanwhile."""

UNREADABLE_MAX = 1 << 16
"""Number of unreadable objects after which all of them are tried again."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """The outcome of one object's work."""

    outcome: Outcome
    size_bytes: int = 0
    present: tuple[bool, ...] = ()
    detail: str = ""
    reason: str = ""


_ABSENT = Result(Outcome.ABSENT, detail="the object is not there")
_ELSEWHERE = Result(Outcome.DONE)


class CommandRunner:
    """Moves one rank's objects between its engine, its arena and its tiers. Thread-safe.

    An object that this process cannot read counts as absent for `UNREADABLE_S`: it is not found, written or deleted.

    Two demotions may pack the same slot concurrently while scatters read it, without a lock. For one identity, `pack`
    always writes the same header into the slot, in one piece, and leaves the layers alone. Coded and encrypted bytes go
    to the thread's scratch memory. The core ensures that a slot is not read while other bytes are written to it.

    Args:
        layout: the KV groups, with this rank's part of each.
        model: 16 bytes, `keys.secret.model_id`, written into every frame.
        arena: the arena with the slots.
        copier: copies between the engine's blocks and slots; None if no command needs it.
        tiers: lower tiers by name.
        common: names of tiers in which all ranks of the engine use one store (`TierKind.is_common`).
        forms: how each tier stores its objects, by tier name. Other tiers store them raw and without a seal.
        clock: returns seconds, on the same clock as the commands' deadlines.
        name_root: 32 bytes that key the names of objects; None if the chunk keys are already keyed (`keys.chain`).
        writes_all: whether every gathered object is soon written to a tier.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        model: bytes,
        arena: Arena,
        copier: Copier | None = None,
        tiers: Mapping[str, Tier],
        common: Collection[str] = (),
        forms: Mapping[str, StoredForm] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        name_root: bytes | None = None,
        writes_all: bool = False,
    ) -> None:
        self._layout = layout
        self._model = model
        self._arena = arena
        self._copier = cast("Copier", copier)  # None only where no command needs it
        self.tiers = tiers
        self._forms = {name: forms.get(name) or StoredForm() for name in tiers}
        self.clock = clock
        digests = [layout.digest(group) for group in range(len(layout.groups))]
        keyed = digests if name_root is None else [hmac.digest(name_root, it, "sha256") for it in digests]
        self._parts = [layout.part(group) for group in range(len(layout.groups))]
        self._name_heads = list(map(name_head, range(len(keyed)), self._parts, keyed))
        filled = arena.filled_elsewhere
        self._kept_elsewhere = {
            (name, group)
            for name in ("", *tiers)
            for group, known in enumerate(layout.groups)
            if known.copy and (name in common or group in filled)
        }
        """(tier, group) pairs whose objects another rank writes and drops, because it has the same KV. The tier ``""``
        is host memory, whose slots that rank fills."""
        self._asked_elsewhere = {(name, group) for name in tiers if name not in common for group in filled}
        """(tier, group) pairs whose objects are only in another rank's store."""
        self._absent = {group for group, known in enumerate(layout.groups) if known.is_absent}
        """The groups of which this rank has no part."""
        self._engine_bytes = [sum(group.layer_bytes) for group in layout.groups]
        self._scratch_bytes = {
            name: [form.scratch_bytes(group) for group in layout.groups] for name, form in self._forms.items()
        }
        self._hashes = writes_all and any(not max(sizes) for sizes in self._scratch_bytes.values())
        """Whether the gathering thread hashes a copy that is complete on return, while the processor's cache holds it.
        A writing thread would have to read each byte from memory again."""
        self._checksums: dict[tuple[int, int], list[int]] = {}
        """Section checksums of the payload in each (group, slot), removed when the slot is refilled. Threads share them
        without a lock, like the slots."""
        self._recalls: dict[str, TierRecall] = {}
        self.closing = threading.Event()
        """Set when no more commands will arrive. It ends recalls."""
        self._unreadable: dict[tuple[str, ObjectName], float] = {}
        """Time until which each (tier, name) is ignored. Threads share it without a lock, because each use is one
        operation."""
        self._batch_counts = {
            number: min(BATCH_MAX, max(1, BATCH_BYTES // group.payload_bytes))
            for number, group in enumerate(layout.groups)
        }

    def together(self, command: Work) -> int:
        """Return how many commands like this one a batch may contain, or 1 for no batches."""
        if not isinstance(command, Transfer) or (self._kept_elsewhere and self._is_elsewhere(command)):
            return 1
        return self._batch_counts.get(command.group, 1)

    def run(self, jobs: Sequence[Job], scratch: Scratch) -> Sequence[Result | Exception]:
        """Do one job, or a batch of transfers in one direction between the same places.

        Returns:
            A result for each job. The result of an object that failed in a batch is its exception.

        Raises:
            Exception: a single job or a whole batch failed.
        """
        command = jobs[0].command
        if self._kept_elsewhere and self._is_elsewhere(command):
            return [_ELSEWHERE]
        if not isinstance(command, Transfer):
            return [self._ask(jobs[0], command)]
        if command.direction is Direction.PROMOTE:
            return self._promote(jobs, scratch)
        if command.direction is not Direction.DEMOTE:
            return self._copy(jobs)
        return self._demote(jobs, scratch)

    def recall(self, command: Recall) -> Completion:
        """Complete a recall immediately. Only one thread may call this at a time.

        Raises:
            ValueError: the tier or the group is unknown.
        """
        tier = self.tiers.get(command.tier)
        if tier is None or not 0 <= command.group < len(self._layout.groups):
            raise ValueError(f"there is no tier {command.tier!r} with group {command.group}")
        if command.tier not in self._recalls:
            self._recalls[command.tier] = TierRecall(
                *(tier, self._forms[command.tier], self._layout, self._model, self._name_heads, self.closing)
            )
        return self._recalls[command.tier].page(command)

    def _ask(self, job: Job, command: Probe | Drop | Tell) -> Result:
        """Do a command that moves no bytes."""
        tier = self.tiers[command.tier]
        present: tuple[bool, ...] = ()
        job.is_in_tier = True
        if isinstance(command, Probe) and self._asked_elsewhere:
            is_elsewhere = [(command.tier, group) in self._asked_elsewhere for _, group in command.objects]
            own = tuple(it for it, is_its in zip(command.objects, is_elsewhere, strict=True) if not is_its)
            # A probe without objects checks whether the tier answers. It matters only if this rank stores there.
            groups = range(len(self._parts))
            keeps = not all((command.tier, group) in self._asked_elsewhere for group in groups)
            asks = own or (keeps and not command.objects)
            found = iter(self._probe(tier, command._replace(objects=own)) if asks else ())
            present = tuple(it or next(found) for it in is_elsewhere)
        elif isinstance(command, Probe):
            present = self._probe(tier, command)
        elif isinstance(command, Tell):
            tier.expects(command.conversation, command.next_turn)
        else:
            (name,) = names_of([(command.key, command.group)], self._name_heads)
            if not self._is_left_alone(command.tier, name):  # the bad copy is another rank's
                tier.delete(name)
        job.is_in_tier = False
        return Result(Outcome.DONE, present=present)

    def _is_elsewhere(self, command: Work) -> bool:
        """Return whether another rank does this transfer or drop for this rank.

        A command ends when every rank has ended it, so the rank that does the work determines the outcome. One rank
        both drops and writes an object, so its writes follow its drops. Every rank that has the KV scatters it.
        """
        if isinstance(command, Drop):
            return (command.tier, command.group) in self._kept_elsewhere
        if not isinstance(command, Transfer):
            return False
        if command.direction is Direction.SCATTER:
            return command.group in self._absent
        place = (command.tier if command.direction is Direction.DEMOTE else "", command.group)
        return place in self._kept_elsewhere

    def _copy(self, jobs: Sequence[Job]) -> list[Result | Exception]:
        """Copy between the engine and slots. A device gets all copies before the first of them is waited for."""
        results: list[Result | Exception] = []
        fences: list[tuple[int, Fence, Transfer]] = []
        try:
            for job in jobs:
                transfer = job.command
                assert isinstance(transfer, Transfer)
                is_gather = transfer.direction is Direction.GATHER
                group, slot = place = transfer.group, transfer.slot
                if is_gather:
                    self._checksums.pop(place, None)
                start = self._copier.gather if is_gather else self._copier.scatter
                request, payload = transfer.request or RequestId(""), self._arena.payload
                try:
                    fence = start(request, group, transfer.blocks, payload(group, slot))
                    if fence is not None:
                        fences.append((len(results), fence, transfer))
                    elif is_gather and self._hashes:
                        frame = self._arena.frame(group, slot)
                        self._checksums[place] = section_checksums(frame, self._layout.groups[group])
                    results.append(Result(Outcome.DONE, self._engine_bytes[group]))
                except Exception as error:  # noqa: BLE001 - as in `_demote`
                    results.append(error)
        finally:  # a device uses the slots of copies that it has begun, whatever has ended the batch
            for at, fence, transfer in fences:
                try:
                    self._await(fence, transfer)
                except Exception as error:  # noqa: BLE001 - as in `_demote`
                    results[at] = error
        return results

    def _await(self, fence: Fence, transfer: Transfer) -> None:
        """Wait without a deadline for a device copy to end.

        The device uses the slot and the blocks until then, so neither can be reused. The wait also ends if `done`
        raises, because the copy has then failed.
        """
        wait_s = FENCE_WAIT_S_MIN
        is_logged = False
        while not self._copier.done(fence):
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, FENCE_WAIT_S_MAX)
            if not is_logged and self.clock() > transfer.deadline_s:
                _log.warning(
                    "a %s of slot %d is past its deadline; kvtier waits until the device has finished it",
                    transfer.direction.value,
                    transfer.slot,
                )
                is_logged = True

    def _demote(self, jobs: Sequence[Job], scratch: Scratch) -> list[Result | Exception]:
        transfers = [job.command for job in jobs if isinstance(job.command, Transfer)]
        tier = self.tiers[transfers[0].tier]
        sizes = self._scratch_bytes[transfers[0].tier]
        stops = list(accumulate(sizes[transfer.group] for transfer in transfers))
        whole = scratch.view(stops[-1])
        views = [whole[start:stop] for start, stop in pairwise((0, *stops))]
        results: list[Result | Exception] = [_ELSEWHERE] * len(jobs)
        writes: dict[int, Write] = {}
        for at, sealing in enumerate(zip(transfers, self._identities(transfers), views, strict=True)):
            try:
                writes[at] = self._sealed(*sealing)
            except Exception as error:  # noqa: BLE001 - the mover turns an object's error into its outcome
                results[at] = error
        if not writes:
            return results
        with Loan([write.frame for write in writes.values()], tier.name) as frames:
            lent = [write._replace(frame=frame) for write, frame in zip(writes.values(), frames, strict=True)]
            choice = self._forms[transfers[0].tier].choice
            write_many = tier.write_many if choice is None else partial(choice.write_many, tier.write_many)
            answers = _answers([jobs[at] for at in writes], lent, write_many)
        for (at, write), answer in zip(writes.items(), answers, strict=True):
            results[at] = answer if isinstance(answer, Exception) else _written(tier, write, is_written=answer)
        return results

    def _sealed(self, transfer: Transfer, identity: Identity, scratch: memoryview) -> Write:
        form = self._forms[transfer.tier]
        key = form.key if form.is_sealed else None
        if (form.is_sealed and key is None) or self._is_left_alone(transfer.tier, identity.name):
            raise TierError(transfer.tier, NOT_ADMITTED)  # a tier would not overwrite the unreadable object
        group = transfer.group
        slot = self._arena.frame(group, transfer.slot)
        checksums = self._checksums.get((group, transfer.slot))
        layout, choice = self._layout.groups[group], form.choice
        codec = form.codec if choice is None or choice.codes(group, layout, slot, scratch) else RAW
        frame = pack(slot, layout, identity, codec, scratch, checksums, key, form.lossy)
        about = About(identity.parent, transfer.depth, group, transfer.conversation)
        return Write(identity.name, frame, about)

    def _promote(self, jobs: Sequence[Job], scratch: Scratch) -> list[Result | Exception]:
        transfers: list[Transfer] = []
        objects: list[tuple[ChunkKey, int]] = []
        slots: list[memoryview] = []
        for job in jobs:
            transfer = job.command
            assert isinstance(transfer, Transfer)
            transfers.append(transfer)
            objects.append((transfer.key, transfer.group))
            slots.append(self._arena.frame(transfer.group, transfer.slot))
            self._checksums.pop((transfer.group, transfer.slot), None)
        names = names_of(objects, self._name_heads)
        tier, form = self.tiers[transfers[0].tier], self._forms[transfers[0].tier]
        if form.is_sealed and form.is_locked:
            return [_ABSENT] * len(jobs)
        seals = None if form.keys is None else form.seals
        choice = form.choice
        read_many = tier.read_many if choice is None else partial(choice.read_many, tier.read_many, transfers[0].group)
        with Loan(slots, tier.name) as views:
            answers = _answers(jobs, list(map(Read, names, views)), read_many)
        memory = scratch.view(OPEN_SCRATCH_BYTES)
        results: list[Result | Exception] = []
        for transfer, name, slot, answer in zip(transfers, names, slots, answers, strict=True):
            if answer is None or isinstance(answer, Exception):
                results.append(answer or _ABSENT)
                continue
            identity = Identity(name)
            try:
                open_frame = unpack_in_place if choice is None else partial(choice.open, transfer.group)
                open_frame(slot, answer, self._layout.groups[transfer.group], identity, memory, seals)
                results.append(Result(Outcome.DONE, answer))
            except Exception as error:  # noqa: BLE001 - as in `_demote`
                if isinstance(error, UnreadableChunkError):
                    self._leave_alone(transfer.tier, name)
                results.append(error)
        return results

    def _leave_alone(self, tier: str, name: ObjectName) -> None:
        if len(self._unreadable) >= UNREADABLE_MAX:
            self._unreadable.clear()
        self._unreadable[tier, name] = self.clock() + UNREADABLE_S

    def _is_left_alone(self, tier: str, name: ObjectName) -> bool:
        return bool(self._unreadable) and self.clock() < self._unreadable.get((tier, name), 0.0)

    def _probe(self, tier: Tier, probe: Probe) -> tuple[bool, ...]:
        if self._forms[probe.tier].is_locked:
            return (False,) * len(probe.objects)
        names = names_of(probe.objects, self._name_heads)
        choice = self._forms[probe.tier].choice
        answers = tier.contains(names) if choice is None else choice.contains(tier.contains, names)
        if len(answers) != len(names):
            raise TierError(probe.tier, f"contains() returned {len(answers)} results for {len(names)} names")
        if self._unreadable:
            answers = [
                it and not self._is_left_alone(probe.tier, name) for name, it in zip(names, answers, strict=True)
            ]
        return tuple(map(bool, answers))

    def _identities(self, transfers: Sequence[Transfer]) -> list[Identity]:
        names = names_of([(transfer.key, transfer.group) for transfer in transfers], self._name_heads)
        of_parents = [(transfer.parent, transfer.group) for transfer in transfers if transfer.parent is not None]
        parents = iter(names_of(of_parents, self._name_heads))
        return [
            Identity(
                name,
                self._model,
                None if transfer.parent is None else next(parents),
                transfer.depth,
                self._layout.chunk_tokens,
                transfer.group,
                self._parts[transfer.group],
                transfer.key,
                transfer.text,
            )
            for transfer, name in zip(transfers, names, strict=True)
        ]


def _written(tier: Tier, write: Write, *, is_written: bool) -> Result:
    if is_written:
        tier.refusals.taken()
        return Result(Outcome.DONE, len(write.frame))
    tier.refusals.refused(f"the last {REFUSED_MIN} objects were not admitted", REFUSED_MIN)
    return Result(Outcome.FAILED, detail=NOT_ADMITTED)


def _answers(jobs: Sequence[Job], batch: list[_Item], call: Callable[[list[_Item]], list[_Answer]]) -> list[_Answer]:
    """Return the results of `call` for a batch with one object for each of `jobs`."""
    for job in jobs:
        job.is_in_tier = True
    answers = call(batch)
    if len(answers) != len(batch):
        raise TierError(jobs[0].command.tier, f"a batch of {len(batch)} objects returned {len(answers)} results")
    for job, answer in zip(jobs, answers, strict=True):
        job.is_in_tier = isinstance(answer, TierError)
        if isinstance(answer, Exception):
            clear_frames(answer)
    return answers
