"""Fills a cache for a call's prompts as far as possible: lookup, plan, load. Every wait has a deadline.

The rows of a batch share one cache length, so they resume at a common column. A row with a longer restorable prefix
may then stop inside a chunk and use only a part of it. Full attention works with any column. A window requires the
tokens before the column at which the row resumes, not those before the chunk's end. So kvtier loads the window's chunks
at both boundaries around that column, but only if the lookup finds both.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers.cache_utils import DynamicCache

from kvtier.connect.transformers.caches import CacheShape, blank_spans, filled_cache
from kvtier.connect.transformers.open_requests import OpenRequests, RowRequest
from kvtier.runtime.session import Session
from kvtier.types import LoadDone, Lookup, Place, Prefix, Presence, RequestId

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Maximum number of attempts to restore a call. If a chunk cannot be loaded (a bad copy, a failed tier), the next
attempt loads only the chunks before it."""
_PROBE_POLL_MIN_S = 0.0001
_PROBE_POLL_MAX_S = 0.005
_PLAN_ROUNDS = 8


def row_tokens(column: int, pad: int) -> int:
    """Return the number of tokens of a row before `column`."""
    return max(0, column - pad)


def common_column(padding: Sequence[int], restorable: Sequence[int], columns: int) -> int:
    """Return the column at which all rows can resume, given the restorable tokens of each.

    At least the last column is computed, because its logits determine the first new token. A row whose first token is
    after the common column restores nothing and does not limit the others.
    """
    reach = min(pad + tokens for pad, tokens in zip(padding, restorable, strict=True))
    return max(0, min(reach, columns - 1))


@dataclass(slots=True)
class RestoreResult:
    """The KV that one call restored."""

    cache: DynamicCache | None = None
    """The filled cache; None if nothing could be restored."""
    columns: int = 0
    tokens: int = 0
    """Restored tokens, summed over the rows."""
    sources: dict[str, int] = field(default_factory=dict[str, int])
    lookup_s: float = 0.0
    load_s: float = 0.0


class Restorer:
    """Restores the prompts of one call at a time.

    Args:
        session: answers lookups.
        requests: starts the loads and waits for them.
        shape: the model's KV groups.
        probe_deadline_s: seconds that a lookup waits for the tiers' answers.
        load_deadline_s: seconds that a call waits for all its loads before the prompt is computed.
    """

    def __init__(
        self,
        session: Session,
        requests: OpenRequests,
        shape: CacheShape,
        *,
        probe_deadline_s: float,
        load_deadline_s: float,
    ) -> None:
        self._session = session
        self._requests = requests
        self._shape = shape
        self._probe_deadline_s = probe_deadline_s
        self._load_deadline_s = load_deadline_s

    def restore(self, rows: Sequence[RowRequest], columns: int) -> RestoreResult:
        """Return a cache for these rows, filled as far as possible.

        Args:
            rows: the rows of the call.
            columns: length of the prompt, including padding.
        """
        restored = RestoreResult()
        deadline = time.monotonic() + self._load_deadline_s
        for attempt in range(_ATTEMPTS):
            # Probe answers are kept by request id, so each attempt requires new ids.
            for row in rows:
                row.request = RequestId(f"{row.name}/{attempt}")
            try:
                is_over = self._attempt(rows, columns, deadline, restored)
            finally:
                # This cancels an open load. The copier keeps the load's tensors until it has ended.
                for row in rows:
                    self._session.release(row.request)
            if is_over or time.monotonic() >= deadline:
                break
        return restored

    def _attempt(self, rows: Sequence[RowRequest], columns: int, deadline: float, restored: RestoreResult) -> bool:
        """Plan and load once. Return False if another attempt may restore something."""
        started = time.perf_counter()
        column = self._plan(rows, columns)
        planned = time.perf_counter()
        restored.lookup_s += planned - started
        if not any(row_tokens(column, row.pad) for row in rows):
            return True
        is_filled = self._load(rows, column, deadline, restored)
        restored.load_s += time.perf_counter() - planned
        return is_filled

    # ---- lookup and plan -------------------------------------------------------------------------------------------

    def _plan(self, rows: Sequence[RowRequest], columns: int) -> int:
        """Return the column at which to resume."""
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
        """Shorten rows that resume inside a chunk but could not resume at its start. Return whether there were any."""
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
        """Look up prefixes, and wait for the tiers' answers until the probe deadline."""
        deadline = time.monotonic() + self._probe_deadline_s
        answers = [self._session.lookup(row.request, prefix) for row, prefix in questions]
        pause_s = _PROBE_POLL_MIN_S
        while any(answer.presence is Presence.PROBING for answer in answers) and time.monotonic() < deadline:
            # A probe's answer is not an event and does not end a poll. An index in memory answers immediately.
            self._requests.poll(pause_s)
            pause_s = min(2 * pause_s, _PROBE_POLL_MAX_S)
            for number, (row, prefix) in enumerate(questions):
                if answers[number].presence is Presence.PROBING:
                    answers[number] = self._session.lookup(row.request, prefix)
        return answers

    # ---- load ------------------------------------------------------------------------------------------------------

    def _load(self, rows: Sequence[RowRequest], column: int, deadline: float, restored: RestoreResult) -> bool:
        """Load all rows up to `column`. Return whether `restored` now has a cache."""
        spans = blank_spans(self._shape, [row.pad for row in rows], column)
        loaded: list[RowRequest] = []
        for number, row in enumerate(rows):
            tokens = row_tokens(column, row.pad)
            if tokens:
                self._requests.load(row, number, self._places(row, tokens), spans)
                loaded.append(row)
        done = self._requests.wait_for_loads([row.request for row in loaded], deadline)
        if len(done) < len(loaded):
            logger.warning("a load took longer than %g s; the prompt is computed", self._load_deadline_s)
            return False
        is_whole = True
        for row in loaded:
            failed = done[row.request].failed
            if failed:
                is_whole = False
                row.whole_chunks = min(chunk for _, chunk in failed)
                logger.info("a load did not find chunk %d; the load is planned again", row.whole_chunks)
        if is_whole:
            restored.cache = filled_cache(self._shape, spans, column)
            restored.columns = column
            restored.tokens = sum(row_tokens(column, row.pad) for row in rows)
            restored.sources = _sources(loaded, done, column)
        return is_whole

    def _places(self, row: RowRequest, tokens: int) -> list[Place]:
        """Return every chunk that the first `tokens` tokens of a row require, wholly or in part."""
        size = row.prefix.chunk_tokens
        boundary = -(-tokens // size) * size
        places: list[Place] = []
        for number, group in enumerate(self._shape.groups):
            past = group[0].past_tokens
            first = 0 if past is None else max(0, tokens - past) // size
            chunks = range(first, boundary // size)
            places += [Place(number, chunk, (chunk * size, (chunk + 1) * size)) for chunk in chunks]
        return places


def _sources(rows: Sequence[RowRequest], done: Mapping[RequestId, LoadDone], column: int) -> dict[str, int]:
    """Return the restored tokens by place, up to the common column."""
    total: dict[str, int] = {}
    for row in rows:
        left = row_tokens(column, row.pad)
        for place, tokens in done[row.request].sources:
            total[place] = total.get(place, 0) + min(tokens, left)
            left -= min(tokens, left)
    return {place: tokens for place, tokens in total.items() if tokens}
