"""From prompts to a cache that is filled as far as possible: lookup, plan, load. The waits all have deadlines.

The rows of a batch share one length, so they resume at a common column; a row whose restorable prefix ends there or
behind it may have to stop inside a chunk, and then uses a part of it. Full attention takes no notice. A window needs
the tokens before the place where it resumes, which then are not the ones before the chunk's end: so the window's chunks
of both boundaries around the place are loaded, and only if the lookup says that both are there.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import DynamicCache

from kvtier.connect.transformers.arriving import Arriving
from kvtier.connect.transformers.caches import CacheShape, Restoration, restoration, restored_cache
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.rows import common_column, row_tokens
from kvtier.connect.transformers.waiting import Waiting
from kvtier.device.layers import LayerReadiness
from kvtier.runtime.base import Session
from kvtier.types import LoadDone, Lookup, Place, Prefix, Presence, RequestId

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""A load that brought less than it promised (a copy was bad, a tier failed) is planned anew, up to its first hole."""
_PROBE_POLL_MIN_S = 0.0001
_PROBE_POLL_MAX_S = 0.005
_PLAN_ROUNDS = 8

NO_REQUEST = RequestId("")


@dataclass(slots=True)
class Asked:
    """One row of a call: a prompt and what is known of its KV."""

    name: str
    """Unique; its requests are named after it."""
    pad: int
    prefix: Prefix
    session: str | None = None
    request: RequestId = NO_REQUEST
    restorable: int = 0
    whole_chunks: int | None = None
    """Chunks before the first hole that a load found. A tier may list a bad object for a while after it was read."""
    prefixes: dict[int, Prefix] = field(default_factory=dict[int, Prefix])
    """Shorter ones that were asked about, by their number of chunks."""

    def hopeful(self) -> Prefix:
        """The prefix as far as no load has found a hole in it."""
        return self.prefix if self.whole_chunks is None else self.shortened(self.whole_chunks)

    def shortened(self, chunks: int) -> Prefix:
        """The prefix of the first `chunks` chunks; always the same object, which spares the lookup work."""
        if chunks >= len(self.prefix.keys):
            return self.prefix
        if chunks not in self.prefixes:
            self.prefixes[chunks] = Prefix(self.prefix.keys[:chunks], self.prefix.chunk_tokens)
        return self.prefixes[chunks]


@dataclass(slots=True)
class Restored:
    """What came of it."""

    cache: DynamicCache | None = None
    """Filled; None when nothing could be restored."""
    columns: int = 0
    tokens: int = 0
    """Restored tokens, summed over the rows."""
    sources: dict[str, int] = field(default_factory=dict[str, int])
    lookup_s: float = 0.0
    load_s: float = 0.0
    arriving: Arriving | None = None
    """What the cache's layers wait for; None when all of them are there."""


class Restorer:
    """Restores the prompts of one call at a time.

    Args:
        session: where KV is asked for.
        copier: which the session calls.
        waiting: which polls the session.
        shape: the model's KV groups.
        probe_deadline_s: how long lower tiers may take to answer a lookup.
        load_deadline_s: how long all loads of a call may take; after it the call goes on without.
    """

    def __init__(
        self,
        session: Session,
        copier: CacheCopier,
        waiting: Waiting,
        shape: CacheShape,
        *,
        probe_deadline_s: float,
        load_deadline_s: float,
    ) -> None:
        self._session = session
        self._copier = copier
        self._waiting = waiting
        self._shape = shape
        self._probe_deadline_s = probe_deadline_s
        self._load_deadline_s = load_deadline_s

    def restore(self, rows: Sequence[Asked], columns: int, *, is_layerwise: bool = False) -> Restored:
        """A cache for these rows, each of `columns` columns with its padding, filled as far as possible.

        Args:
            rows: of the call.
            columns: of its prompt.
            is_layerwise: hand the cache out while its layers still arrive. Then `finish` follows, or `resume`.
        """
        restored = Restored()
        self._restore(rows, columns, time.monotonic() + self._load_deadline_s, restored, is_layerwise=is_layerwise)
        return restored

    def finish(self, rows: Sequence[Asked], restored: Restored) -> None:
        """The model has used every layer of a cache that was handed out early: settle the accounts."""
        arriving, restored.arriving = restored.arriving, None
        if arriving is None:
            return
        try:
            if not arriving.end():
                logger.warning("loads whose layers were all there have not ended; their tensors stay until they do")
            done = arriving.done
            restored.load_s += arriving.waited_s
            restored.sources = _sources(rows, done, restored.columns)
        finally:
            arriving.leave()
            self._release(rows)

    def resume(self, rows: Sequence[Asked], columns: int, broken: Restored) -> Restored:
        """What can be had after a layer turned out to be missing, all of it there before this returns."""
        arriving, broken.arriving = broken.arriving, None
        restored = Restored(lookup_s=broken.lookup_s, load_s=broken.load_s)
        if arriving is None:
            return restored
        try:
            self._release(rows)  # ends the loads that have not
            arriving.end()
            restored.load_s += arriving.waited_s
            for number, event in arriving.done.items():
                if event.failed:
                    rows[number].whole_chunks = min(chunk for _, chunk in event.failed)
        finally:
            arriving.leave()
        if not arriving.is_late:
            self._restore(rows, columns, arriving.deadline, restored, first=1)
        return restored

    def _restore(
        self,
        rows: Sequence[Asked],
        columns: int,
        deadline: float,
        restored: Restored,
        *,
        is_layerwise: bool = False,
        first: int = 0,
    ) -> None:
        for attempt in range(first, _ATTEMPTS):
            # What tiers have said of a request is kept as long as it lives; a second attempt asks anew.
            for row in rows:
                row.request = RequestId(f"{row.name}/{attempt}")
            try:
                is_over = self._attempt(rows, columns, deadline, restored, is_layerwise=is_layerwise)
            finally:
                if restored.arriving is None:
                    self._release(rows)
            if is_over or time.monotonic() >= deadline:
                break

    def _release(self, rows: Sequence[Asked]) -> None:
        for row in rows:
            self._session.release(row.request)

    def _attempt(
        self, rows: Sequence[Asked], columns: int, deadline: float, restored: Restored, *, is_layerwise: bool
    ) -> bool:
        """Plan and load once; whether that is all that can be done."""
        started = time.perf_counter()
        column = self._plan(rows, columns)
        planned = time.perf_counter()
        restored.lookup_s += planned - started
        if not any(row_tokens(column, row.pad) for row in rows):
            return True
        is_filled = self._load(rows, column, deadline, restored, is_layerwise=is_layerwise)
        restored.load_s += time.perf_counter() - planned
        return is_filled

    # ---- lookup and plan -------------------------------------------------------------------------------------------

    def _plan(self, rows: Sequence[Asked], columns: int) -> int:
        """The column to resume at."""
        padding = [row.pad for row in rows]
        self._look_up([(row, row.hopeful()) for row in rows])
        for _ in range(_PLAN_ROUNDS):
            column = common_column(padding, [row.restorable for row in rows], columns)
            if not self._shape.has_windows or not self._shorten(rows, column):
                return column
        return 0

    def _shorten(self, rows: Sequence[Asked], column: int) -> bool:
        """Whether some row resumes inside a chunk before which no boundary is valid; its prefix is shortened then."""
        has_changed = False
        for row in rows:
            chunks, rest = divmod(row_tokens(column, row.pad), row.prefix.chunk_tokens)
            if not rest or not chunks:
                continue
            found = self._ask([(row, row.shortened(chunks))])[0].tokens
            if found < chunks * row.prefix.chunk_tokens:
                row.restorable = found
                has_changed = True
        return has_changed

    def _look_up(self, questions: Sequence[tuple[Asked, Prefix]]) -> None:
        for (row, _), found in zip(questions, self._ask(questions), strict=True):
            row.restorable = found.tokens

    def _ask(self, questions: Sequence[tuple[Asked, Prefix]]) -> list[Lookup]:
        """The answers, once no tier is being asked any more or the deadline has passed."""
        deadline = time.monotonic() + self._probe_deadline_s
        answers = [self._session.lookup(row.request, prefix) for row, prefix in questions]
        pause_s = _PROBE_POLL_MIN_S
        while any(answer.presence is Presence.PROBING for answer in answers) and time.monotonic() < deadline:
            # An answer is no event that would end a wait, and an index in memory answers at once.
            self._waiting.take(pause_s)
            pause_s = min(2 * pause_s, _PROBE_POLL_MAX_S)
            for number, (row, prefix) in enumerate(questions):
                if answers[number].presence is Presence.PROBING:
                    answers[number] = self._session.lookup(row.request, prefix)
        return answers

    # ---- load ------------------------------------------------------------------------------------------------------

    def _load(
        self, rows: Sequence[Asked], column: int, deadline: float, restored: Restored, *, is_layerwise: bool
    ) -> bool:
        """Load all rows up to `column`; whether `restored` has a cache now."""
        padding = tuple(row.pad for row in rows)
        tensors = restoration(self._shape, padding, column)
        wanted: dict[int, int] = {}
        for number, row in enumerate(rows):
            tokens = row_tokens(column, row.pad)
            if tokens:
                wanted[number] = tokens
        requests = {number: rows[number].request for number in wanted}
        places = {number: self._places(rows[number], tokens) for number, tokens in wanted.items()}
        readiness = LayerReadiness(self._expected(places.values())) if is_layerwise and _has_room(tensors) else None
        self._waiting.begin(list(requests.values()))
        try:
            for number in wanted:
                self._begin(rows[number], number, places[number], tensors, readiness)
            arriving = None if readiness is None else Arriving(self._waiting, readiness, requests, deadline)
        except BaseException:
            self._waiting.leave(list(requests.values()))
            raise
        if arriving is not None:
            restored.arriving, restored.columns = arriving, column
            restored.tokens = sum(wanted.values())
            restored.cache = restored_cache(tensors, column, arriving.wait)
            return True
        done = self._waiting.loads(list(requests.values()), deadline)
        late = [request for request in requests.values() if request not in done]
        for request in late:
            # Its tensors stay exposed until the LoadDone comes, which nobody waits for.
            self._session.release(request)
        if late:
            logger.warning("a load took longer than %g s; the prompt is computed", self._load_deadline_s)
            return False
        return self._fill(rows, wanted, tensors, {number: done[requests[number]] for number in wanted}, restored)

    def _begin(
        self, row: Asked, number: int, places: Sequence[Place], tensors: Restoration, readiness: LayerReadiness | None
    ) -> None:
        boundary = max(place.chunk for place in places) + 1
        self._copier.expose(row.request, number, row.pad, tensors.spans, readiness)
        try:
            self._session.load(row.request, row.prefix, boundary * row.prefix.chunk_tokens, places, session=row.session)
        except BaseException:
            self._copier.forget(row.request)  # no LoadDone will
            raise

    def _expected(self, loads: Iterable[Sequence[Place]]) -> dict[int, int]:
        """How many chunks each of the model's layers is made of."""
        expected = dict.fromkeys((layer.index for layer in self._shape.layers), 0)
        for places in loads:
            for place in places:
                for layer in self._shape.groups[place.group]:
                    expected[layer.index] += 1
        return expected

    def _places(self, row: Asked, tokens: int) -> list[Place]:
        """Every chunk of which the first `tokens` tokens of a row need a part."""
        size = row.prefix.chunk_tokens
        boundary = -(-tokens // size) * size
        places: list[Place] = []
        for number, group in enumerate(self._shape.groups):
            past = group[0].past_tokens
            first = 0 if past is None else max(0, tokens - past) // size
            chunks = range(first, boundary // size)
            places += [Place(number, chunk, (chunk * size, (chunk + 1) * size)) for chunk in chunks]
        return places

    def _fill(
        self,
        rows: Sequence[Asked],
        wanted: dict[int, int],
        tensors: Restoration,
        done: dict[int, LoadDone],
        restored: Restored,
    ) -> bool:
        column = tensors.columns
        for number, tokens in wanted.items():
            event = done[number]
            if event.failed:
                column = min(column, rows[number].pad + min(event.tokens, tokens))
                rows[number].whole_chunks = min(chunk for _, chunk in event.failed)
        if column < tensors.columns:
            logger.info("a load brought less than was promised; %d of %d columns", column, tensors.columns)
            # Window tensors end where they were planned to end, so they can only be planned anew.
            if self._shape.has_windows or not any(row_tokens(column, row.pad) for row in rows):
                return False
        restored.cache = restored_cache(tensors, column)
        restored.columns = column
        restored.tokens = sum(row_tokens(column, row.pad) for row in rows)
        restored.sources = _sources(rows, done, column)
        return True


def _sources(rows: Sequence[Asked], done: dict[int, LoadDone], column: int) -> dict[str, int]:
    """Restored tokens by place. What a row loads behind the common column does not count."""
    total: dict[str, int] = {}
    for number, event in done.items():
        left = row_tokens(column, rows[number].pad)
        for place, tokens in event.sources:
            total[place] = total.get(place, 0) + min(tokens, left)
            left -= min(tokens, left)
    return {place: tokens for place, tokens in total.items() if tokens}


def _has_room(tensors: Restoration) -> bool:
    """Whether the device can keep the tensors until the last layer has come, beside the longer ones made of them.

    A load that is waited for as a whole gives them back layer by layer.
    """
    devices = {layer.device for layer in tensors.shape.layers if layer.device.type == "cuda"}
    return all(_free_bytes(device) > tensors.size_bytes for device in devices)


def _free_bytes(device: torch.device) -> int:
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return kept + torch.cuda.mem_get_info(device)[0]
