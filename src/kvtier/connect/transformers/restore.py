"""Fills a cache for a call's prompts as far as possible: lookup, plan, load. Every wait has a deadline.

The rows of a batch share one cache length, so they resume at a common column. A row with a longer restorable prefix may
then stop inside a chunk, and uses a part of it. Full attention works with any column. A window needs the tokens before
the column where it resumes, not those before the chunk's end. So the window's chunks of both boundaries around that
column are loaded, and only if the lookup finds both.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import DynamicCache

from kvtier.connect.transformers.caches import CacheShape, Restoration, restoration, restored_cache
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.open_requests import OpenRequests
from kvtier.device.layers import LayerReadiness
from kvtier.errors import KvError
from kvtier.runtime.session import Session
from kvtier.types import LoadDone, Lookup, Place, Prefix, Presence, RequestId

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""A load that delivered less than planned (a bad copy, a failed tier) is planned again, up to its first hole."""
_PROBE_POLL_MIN_S = 0.0001
_PROBE_POLL_MAX_S = 0.005
_PLAN_ROUNDS = 8
_LAYER_POLL_S = 0.005
"""How often a waiting layer checks whether its load has failed."""
_END_S = 5.0
"""Longest wait for the ends of loads whose last layer has been used."""


def row_tokens(column: int, pad: int) -> int:
    """Number of a row's tokens before `column`."""
    return max(0, column - pad)


def common_column(padding: Sequence[int], restorable: Sequence[int], columns: int) -> int:
    """The column at which all rows can resume, given the restorable tokens of each.

    At least the last column is computed: its logits choose the first new token. A row whose first token lies after the
    common column restores nothing, and does not limit the others.
    """
    reach = min(pad + tokens for pad, tokens in zip(padding, restorable, strict=True))
    return max(0, min(reach, columns - 1))


@dataclass(slots=True)
class RowRequest:
    """One row of a call: its prompt, and the state of its restoration."""

    name: str
    """Unique; the row's request ids start with it."""
    pad: int
    prefix: Prefix
    conversation: str | None = None
    request: RequestId = RequestId("")  # noqa: RUF009  immutable
    restorable: int = 0
    whole_chunks: int | None = None
    """Chunks before the first hole that a load found. A tier may list a bad object for a while after it was read."""
    prefixes: dict[int, Prefix] = field(default_factory=dict[int, Prefix])
    """Shorter prefixes, by their number of chunks."""

    def shortened(self, chunks: int | None) -> Prefix:
        """The first `chunks` chunks; None: all. The same object each time, since lookups compare by identity."""
        if chunks is None or chunks >= len(self.prefix.keys):
            return self.prefix
        if chunks not in self.prefixes:
            self.prefixes[chunks] = Prefix(self.prefix.keys[:chunks], self.prefix.chunk_tokens)
        return self.prefixes[chunks]


class MissingLayerError(KvError):
    """A layer was not loaded. Raised inside the model's forward; the call starts again."""


class LayerwiseLoad:
    """The loads of one call whose model computes layer i while layer i + 1 is still being loaded.

    The cache is handed out before it is filled. Each layer waits at its first use, with a deadline. If a chunk is
    missing the wait raises `MissingLayerError` before the call has produced any output, and the call starts again.

    Args:
        requests: polls the session.
        readiness: layer readiness, set by the copier.
        loads: the open loads, by row.
        deadline: on the monotonic clock.
    """

    def __init__(
        self, requests: OpenRequests, readiness: LayerReadiness, loads: Mapping[int, RequestId], deadline: float
    ) -> None:
        self._requests = requests
        self._readiness = readiness
        self._loads = dict(loads)
        self.deadline = deadline
        self.waited_s = 0.0
        """Seconds that the model waited."""

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    @property
    def done(self) -> dict[int, LoadDone]:
        """The ended loads, by row."""
        return {
            row: event for row, request in self._loads.items() if (event := self._requests.ended(request)) is not None
        }

    def wait(self, layer: int) -> None:
        """Wait until the model's layer `layer` is complete.

        Raises:
            MissingLayerError: a load failed, or the deadline passed.
        """
        started = time.perf_counter()
        try:
            while not self._readiness.wait(layer, _LAYER_POLL_S):
                self._requests.poll()
                if any(event.failed for event in self.done.values()):
                    raise MissingLayerError(f"a chunk of layer {layer} could not be loaded")
                if self.is_late:
                    raise MissingLayerError(f"layer {layer} was not loaded in time")
        finally:
            self.waited_s += time.perf_counter() - started

    def wait_for_end(self) -> bool:
        """Wait up to `_END_S` for all loads to end; whether they did."""
        until = min(time.monotonic() + _END_S, max(self.deadline, time.monotonic() + _LAYER_POLL_S))
        while len(self.done) < len(self._loads) and time.monotonic() < until:
            self._requests.poll(_LAYER_POLL_S)
        return len(self.done) == len(self._loads)

    def forget(self) -> None:
        """Stop recording the loads' ends."""
        self._requests.forget_loads(list(self._loads.values()))


@dataclass(slots=True)
class Restored:
    """The result for one call."""

    cache: DynamicCache | None = None
    """Filled; None if nothing could be restored."""
    columns: int = 0
    tokens: int = 0
    """Restored tokens, summed over the rows."""
    sources: dict[str, int] = field(default_factory=dict[str, int])
    lookup_s: float = 0.0
    load_s: float = 0.0
    layerwise: LayerwiseLoad | None = None
    """The loads that the cache's layers wait for; None if all layers are complete."""


class Restorer:
    """Restores the prompts of one call at a time.

    Args:
        session: for lookups and loads.
        copier: the session's.
        requests: polls the session.
        shape: the model's KV groups.
        probe_deadline_s: longest wait for the tiers' answers to a lookup.
        load_deadline_s: longest wait for all loads of a call; after it the prompt is computed.
    """

    def __init__(
        self,
        session: Session,
        copier: CacheCopier,
        requests: OpenRequests,
        shape: CacheShape,
        *,
        probe_deadline_s: float,
        load_deadline_s: float,
    ) -> None:
        self._session = session
        self._copier = copier
        self._requests = requests
        self._shape = shape
        self._probe_deadline_s = probe_deadline_s
        self._load_deadline_s = load_deadline_s

    def restore(self, rows: Sequence[RowRequest], columns: int, *, is_layerwise: bool = False) -> Restored:
        """A cache for these rows, filled as far as possible.

        Args:
            rows: rows of the call.
            columns: length of its prompt, padding included.
            is_layerwise: return the cache while its layers are still being loaded. `finish` or `resume` must follow.
        """
        restored = Restored()
        self._restore(rows, columns, time.monotonic() + self._load_deadline_s, restored, is_layerwise=is_layerwise)
        return restored

    def finish(self, rows: Sequence[RowRequest], restored: Restored) -> None:
        """Complete the figures of a layerwise load, after the model has used every layer."""
        layerwise, restored.layerwise = restored.layerwise, None
        if layerwise is None:
            return
        try:
            if not layerwise.wait_for_end():
                logger.warning("loads have not ended although all layers were loaded; their tensors stay until they do")
            restored.load_s += layerwise.waited_s
            restored.sources = _sources(rows, layerwise.done, restored.columns)
        finally:
            layerwise.forget()
            self._release(rows)

    def resume(self, rows: Sequence[RowRequest], columns: int, broken: Restored) -> Restored:
        """Restore again after a `MissingLayerError`, without the missing chunks, and not layerwise."""
        layerwise, broken.layerwise = broken.layerwise, None
        restored = Restored(lookup_s=broken.lookup_s, load_s=broken.load_s)
        if layerwise is None:
            return restored
        try:
            self._release(rows)  # cancels the open loads
            layerwise.wait_for_end()
            restored.load_s += layerwise.waited_s
            for number, event in layerwise.done.items():
                if event.failed:
                    rows[number].whole_chunks = min(chunk for _, chunk in event.failed)
        finally:
            layerwise.forget()
        if not layerwise.is_late:
            self._restore(rows, columns, layerwise.deadline, restored, first=1)
        return restored

    def _restore(
        self,
        rows: Sequence[RowRequest],
        columns: int,
        deadline: float,
        restored: Restored,
        *,
        is_layerwise: bool = False,
        first: int = 0,
    ) -> None:
        for attempt in range(first, _ATTEMPTS):
            # Probe answers are kept per request id, so each attempt has new ids.
            for row in rows:
                row.request = RequestId(f"{row.name}/{attempt}")
            try:
                is_over = self._attempt(rows, columns, deadline, restored, is_layerwise=is_layerwise)
            finally:
                if restored.layerwise is None:
                    self._release(rows)
            if is_over or time.monotonic() >= deadline:
                break

    def _release(self, rows: Sequence[RowRequest]) -> None:
        for row in rows:
            self._session.release(row.request)

    def _attempt(
        self, rows: Sequence[RowRequest], columns: int, deadline: float, restored: Restored, *, is_layerwise: bool
    ) -> bool:
        """Plan and load once; False if another attempt may restore something."""
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

    def _plan(self, rows: Sequence[RowRequest], columns: int) -> int:
        """The column to resume at."""
        padding = [row.pad for row in rows]
        found = self._look_up([(row, row.shortened(row.whole_chunks)) for row in rows])
        for row, lookup in zip(rows, found, strict=True):
            row.restorable = lookup.tokens
        for _ in range(_PLAN_ROUNDS):
            column = common_column(padding, [row.restorable for row in rows], columns)
            if not self._shape.has_windows or not self._shorten(rows, column):
                return column
        return 0

    def _shorten(self, rows: Sequence[RowRequest], column: int) -> bool:
        """Shorten rows that resume inside a chunk without a valid boundary before it; whether there were any."""
        has_changed = False
        for row in rows:
            chunks, rest = divmod(row_tokens(column, row.pad), row.prefix.chunk_tokens)
            if not rest or not chunks:
                continue
            found = self._look_up([(row, row.shortened(chunks))])[0].tokens
            if found < chunks * row.prefix.chunk_tokens:
                row.restorable = found
                has_changed = True
        return has_changed

    def _look_up(self, questions: Sequence[tuple[RowRequest, Prefix]]) -> list[Lookup]:
        """Look up prefixes; waits for the tiers' answers until the probe deadline."""
        deadline = time.monotonic() + self._probe_deadline_s
        answers = [self._session.lookup(row.request, prefix) for row, prefix in questions]
        pause_s = _PROBE_POLL_MIN_S
        while any(answer.presence is Presence.PROBING for answer in answers) and time.monotonic() < deadline:
            # A probe's answer is not an event and does not end a poll. An index in memory answers at once.
            self._requests.poll(pause_s)
            pause_s = min(2 * pause_s, _PROBE_POLL_MAX_S)
            for number, (row, prefix) in enumerate(questions):
                if answers[number].presence is Presence.PROBING:
                    answers[number] = self._session.lookup(row.request, prefix)
        return answers

    # ---- load ------------------------------------------------------------------------------------------------------

    def _load(
        self, rows: Sequence[RowRequest], column: int, deadline: float, restored: Restored, *, is_layerwise: bool
    ) -> bool:
        """Load all rows up to `column`; whether `restored` has a cache now."""
        tensors = restoration(self._shape, tuple(row.pad for row in rows), column)
        wanted = {number: tokens for number, row in enumerate(rows) if (tokens := row_tokens(column, row.pad))}
        requests = {number: rows[number].request for number in wanted}
        places = {number: self._places(rows[number], tokens) for number, tokens in wanted.items()}
        readiness = LayerReadiness(self._expected(places.values())) if is_layerwise and _has_room(tensors) else None
        self._requests.expect(list(requests.values()))
        try:
            for number in wanted:
                self._begin(rows[number], number, places[number], tensors, readiness)
            layerwise = None if readiness is None else LayerwiseLoad(self._requests, readiness, requests, deadline)
        except BaseException:
            self._requests.forget_loads(list(requests.values()))
            raise
        if layerwise is not None:
            restored.layerwise, restored.columns = layerwise, column
            restored.tokens = sum(wanted.values())
            restored.cache = restored_cache(tensors, column, layerwise.wait)
            return True
        done = self._requests.wait_for_loads(list(requests.values()), deadline)
        late = [request for request in requests.values() if request not in done]
        for request in late:
            # The copier holds its tensors until the LoadDone comes.
            self._session.release(request)
        if late:
            logger.warning("a load took longer than %g s; the prompt is computed", self._load_deadline_s)
            return False
        return self._fill(rows, wanted, tensors, {number: done[requests[number]] for number in wanted}, restored)

    def _begin(
        self,
        row: RowRequest,
        number: int,
        places: Sequence[Place],
        tensors: Restoration,
        readiness: LayerReadiness | None,
    ) -> None:
        boundary = max(place.chunk for place in places) + 1
        self._copier.expose(row.request, number, row.pad, tensors.spans, readiness)
        try:
            self._session.load(
                row.request, row.prefix, boundary * row.prefix.chunk_tokens, places, session=row.conversation
            )
        except BaseException:
            self._copier.forget(row.request)  # no LoadDone will come
            raise

    def _expected(self, loads: Iterable[Sequence[Place]]) -> dict[int, int]:
        """Number of chunks that fill each of the model's layers."""
        expected = dict.fromkeys((layer.index for layer in self._shape.layers), 0)
        for places in loads:
            for place in places:
                for layer in self._shape.groups[place.group]:
                    expected[layer.index] += 1
        return expected

    def _places(self, row: RowRequest, tokens: int) -> list[Place]:
        """Every chunk that the first `tokens` tokens of a row need, wholly or in part."""
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
        rows: Sequence[RowRequest],
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
            logger.info("a load delivered %d of %d columns", column, tensors.columns)
            # Window tensors end at the planned column, so they have to be planned again.
            if self._shape.has_windows or not any(row_tokens(column, row.pad) for row in rows):
                return False
        restored.cache = restored_cache(tensors, column)
        restored.columns = column
        restored.tokens = sum(row_tokens(column, row.pad) for row in rows)
        restored.sources = _sources(rows, done, column)
        return True


def _sources(rows: Sequence[RowRequest], done: dict[int, LoadDone], column: int) -> dict[str, int]:
    """Restored tokens by place, up to the common column."""
    total: dict[str, int] = {}
    for number, event in done.items():
        left = row_tokens(column, rows[number].pad)
        for place, tokens in event.sources:
            total[place] = total.get(place, 0) + min(tokens, left)
            left -= min(tokens, left)
    return {place: tokens for place, tokens in total.items() if tokens}


def _has_room(tensors: Restoration) -> bool:
    """Whether the device can hold the restored tensors and the longer ones made of them at the same time.

    A layerwise load holds all of them until the last layer is complete. Otherwise they are freed layer by layer.
    """
    devices = {layer.device for layer in tensors.shape.layers if layer.device.type == "cuda"}
    return all(_free_bytes(device) > tensors.size_bytes for device in devices)


def _free_bytes(device: torch.device) -> int:
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return reserved + torch.cuda.mem_get_info(device)[0]
