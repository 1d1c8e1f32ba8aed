"""Finds out which chunks a tier holds, so that routers learn its content after a start.

The token ids of a chunk are in the sealed (encrypted) head of its frame. A recall reads the heads of the newest
objects.

A thread per tier lists and reads objects in small batches with pauses, so that loads are not delayed. No command waits
for it, so a read that hangs delays nothing else. An object that cannot be opened here is skipped and left unchanged.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from kvtier.codec.frame import Seals, open_seal
from kvtier.codec.frame_header import Identity, expect, frame_layout, opened_identity, read_head
from kvtier.errors import CorruptChunkError, TierError, UnreadableChunkError, described
from kvtier.keys.object_names import names_of
from kvtier.layout import KvLayout
from kvtier.runtime.arena import page_aligned
from kvtier.runtime.executor import Completion
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.tier.base import Read, Tier
from kvtier.tier.buffer_loans import Loan
from kvtier.types import ChunkKey, ChunkRecord, ObjectName, Outcome, Recall, RecallPage

CHUNKS_MAX: Final = 16_384
"""Maximum number of heads that one recall reads."""

HEADS_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of heads that one recall reads."""

SECONDS_MAX: Final = 60.0
"""Maximum duration of a recall, which then ends with the chunks found so far."""

PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before missed objects are read again: another engine may still be writing them."""

BATCH: Final = 16
"""Number of heads that one call of the tier reads. The thread then pauses for as long as the call took."""

PAGE_BYTES: Final = 256 << 10
"""Approximate size of the records in a page. A message with them is twice as long, because it has hex digits."""


class TierRecall:
    """The recalls of one tier on one rank. Only one thread at a time may call `page`.

    Args:
        tier: the tier, which a thread of this object reads.
        form: holds the keys of the tier's seals.
        layout: the KV groups, with this rank's part of each.
        model: 16 bytes, `keys.secret.model_id`; other models' objects are skipped.
        name_heads: `keys.object_names.name_head` of each group.
        closing: set when the mover closes; the thread then ends after its batch.
    """

    def __init__(
        self,
        tier: Tier,
        form: StoredForm,
        layout: KvLayout,
        model: bytes,
        name_heads: Sequence[bytes],
        closing: threading.Event,
    ) -> None:
        self._tier = tier
        self._form = form
        self._layout = layout
        self._model = model
        self._name_heads = name_heads
        self._closing = closing
        self._number = 0
        self._records: list[ChunkRecord] = []
        """The records that the current recall has found. Its thread appends to them until the recall is over."""
        self._is_over = False
        self._error = ""
        self._thread: threading.Thread | None = None

    def page(self, command: Recall) -> Completion:
        """Return the completion of `command` immediately. A recall with a new number starts the thread."""
        if command.number != self._number:
            if self._thread is not None and self._thread.is_alive():
                return Completion(command, Outcome.FAILED, detail="an earlier recall has not ended")
            self._number, self._records, self._is_over, self._error = command.number, [], False, ""
            self._thread = threading.Thread(
                target=self._run, args=(command.group,), name=f"kvtier {self._tier.name} recall", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # the system cannot start another thread
                self._thread, self._error = None, str(error)
        if self._error:
            return Completion(command, Outcome.FAILED, detail=self._error)
        is_over, records = self._is_over, self._records
        page = tuple(_front(islice(records, command.position, None)))
        is_last = is_over and command.position + len(page) >= len(records)
        if is_last:
            self._records = []
        return Completion(command, Outcome.DONE, page=RecallPage(page, is_last))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self, group: int) -> None:
        try:
            if self._form.is_locked:
                raise TierError(self._tier.name, "the tenant has no key that opens its objects")  # noqa: TRY301
            for found in self._read(group):
                known = {record.key for record in self._records}
                self._records += [record for record in records_of(found) if record.key not in known]
            self._is_over = True
        except Exception as error:  # noqa: BLE001 - any error of a tier ends only this recall
            self._error = described(error)

    def _read(self, group: int) -> Iterator[dict[ObjectName, Identity]]:
        """Yield the identities of the objects that carry token ids, newest first, each soon followed by its parents.

        All that are known are yielded once the tier's list has been read, and again each time that missed objects have
        been read again.
        """
        found: dict[ObjectName, Identity] = {}
        until_s = time.monotonic() + SECONDS_MAX
        header_bytes = frame_layout(self._layout.groups[group]).header_bytes
        left = min(CHUNKS_MAX, HEADS_BYTES_MAX // header_bytes)
        buffer = page_aligned(BATCH * header_bytes).data
        seen: set[ObjectName] = set()
        listed = (name for name in self._tier.newest(left, until_s) if name not in seen)
        missed: list[ObjectName] = []
        for pause_s in (0.0, *PAUSES_S):
            if self._closing.wait(pause_s):
                return
            first, missed = dict.fromkeys(missed), []
            while left > 0 and time.monotonic() < until_s:
                began_s = time.monotonic()
                names = _take(first, listed, seen, min(BATCH, left))
                if not names:
                    break
                left -= len(names)
                for name, identity in self._opened(names, buffer, group, self._form.seals):
                    if identity is None:
                        missed.append(name)
                        continue
                    found[name] = identity
                    if identity.parent is not None and identity.parent not in seen:
                        first[identity.parent] = None
                if self._closing.wait(time.monotonic() - began_s):
                    break
            yield found
            if not missed or left <= 0 or time.monotonic() >= until_s:
                return

    def _opened(
        self, names: Sequence[ObjectName], buffer: memoryview, group: int, seals: Seals | None
    ) -> Iterator[tuple[ObjectName, Identity | None]]:
        """Yield each object's identity, or None for an object that is absent or cannot be read."""
        size = len(buffer) // BATCH
        heads = [buffer[at * size : (at + 1) * size] for at in range(len(names))]
        with Loan(heads, self._tier.name) as views:
            answers = self._tier.peek_many(list(map(Read, names, views)))
        if len(answers) != len(names):
            raise TierError(self._tier.name, f"a batch of {len(names)} heads returned {len(answers)} results")
        for name, head, answer in zip(names, heads, answers, strict=True):
            identity = self._identity(name, head[:answer], group, seals) if isinstance(answer, int) else None
            if identity is not None or not isinstance(answer, int):
                yield name, identity

    def _identity(self, name: ObjectName, front: memoryview, group: int, seals: Seals | None) -> Identity | None:
        """Read the identity in the sealed head of `name`.

        Return None if the head carries no token ids, belongs to another model or cannot be opened.
        """
        try:
            head = read_head(front)
            expect(head, self._layout.groups[group], Identity(name))
            if not head.seal or head.identity.model != self._model:
                return None
            identity = opened_identity(head, open_seal(head, seals)[1])
        except (CorruptChunkError, UnreadableChunkError):
            return None
        # A key that names another object does not belong to this chunk, even though its writer had the key of the seal.
        is_whole = bool(identity.text) and identity.tokens == self._layout.chunk_tokens
        is_own = is_whole and names_of([(ChunkKey(identity.key), group)], self._name_heads) == [name]
        return identity if is_own else None


def _take(
    first: dict[ObjectName, None], listed: Iterator[ObjectName], seen: set[ObjectName], most: int
) -> list[ObjectName]:
    """Return the next names to read. Parents come first, because a chain without its root is useless."""
    names = list(islice(first, most))
    seen.update(names)
    names += islice(listed, most - len(names))
    seen.update(names)
    for name in names:
        first.pop(name, None)
    return names


def records_of(found: Mapping[ObjectName, Identity]) -> list[ChunkRecord]:
    """Return the chunks of `found` whose chain is complete to depth 0, each after its parent, in the given order."""
    records: list[ChunkRecord] = []
    whole: dict[ObjectName, bool] = {}
    for first in found:
        chain: list[Identity] = []
        name, depth = first, found[first].depth
        while name is not None and name not in whole and name in found and found[name].depth == depth:
            chain.append(found[name])
            name, depth = found[name].parent, depth - 1
        is_whole = depth == -1 if name is None else whole.get(name, False) and found[name].depth == depth
        parent = None if name is None or not is_whole else ChunkKey(found[name].key)
        for identity in reversed(chain):
            whole[identity.name] = is_whole
            if is_whole:
                at, key = 4 * identity.tokens, ChunkKey(identity.key)
                records.append(ChunkRecord(key, parent, identity.depth, identity.text[:at], identity.text[at:]))
                parent = key
    return records


def _front(records: Iterable[ChunkRecord]) -> Iterator[ChunkRecord]:
    """Yield the first of `records`, if any, and more until they reach `PAGE_BYTES`."""
    size_bytes = 0
    for record in records:
        yield record
        size_bytes += len(record.tokens) + len(record.extras) + 2 * len(record.key)
        if size_bytes >= PAGE_BYTES:
            return
