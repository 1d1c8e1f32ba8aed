"""Explains why a request loaded nothing or little, from the recorded decisions about the last requests.

The scheduler's thread records requests. The thread of control calls reads them and derives the reasons. A reason has a
code for programs and a text:

    not_cached   the request has no keys                  planner     computing was expected to be faster
    skipped      vLLM reads no cache for it               cut         the load took longer than computing
    no_chunk     its prompt has no full chunk             failed      objects of the load did not arrive
    engine       vLLM's own prefix cache had the tokens   obstacle    kvtier is off, or a tier is down
    absent       no place had the next chunk              announced   announced chunks had not arrived
    hint         its hints let it load no more            no_lookup   the request ended, or waits, without a lookup
    removed      an earlier request had that chunk
    shared       the longest prefix shared with others    complete    nothing more could be loaded

The *cut* is where the prompt stops being equal to the most similar earlier one. Equality includes everything that keys
cover, so prompts with different salts or adapters have nothing in common. The tokens of the last prompts are
remembered, up to `PROMPT_BYTES_MAX`. Without them, chunk keys show in which chunk the cut lies.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.requests.account import RequestAccount, client_id_of_engine
from kvtier.connect.vllm.requests.tracked import TrackedRequest, shared_chunks
from kvtier.keys.chain import TOKEN_BYTES, token_words
from kvtier.runtime.control_socket import ControlError
from kvtier.runtime.session import Session
from kvtier.types import ChunkKey, Prefix

ENDED_MAX = 256
"""Maximum number of ended requests to remember."""
KEYS_MAX = 1024
"""Maximum number of chunk keys remembered per request. They take 75 kB."""
PROMPT_BYTES_MAX = 16 << 20
"""Maximum bytes of ended prompts' tokens, enough for four million tokens. The oldest are forgotten first."""
WINDOW_TOKENS = 8
"""Repetition of an earlier prompt is measured in windows of this many tokens, anywhere after the cut."""
RIVALS_MAX = 32
"""Maximum number of earlier prompts whose repetition is measured: those that share the most chunks, newest first."""
Decode = Callable[[list[int]], str | None]
AROUND_TOKENS = 16
"""Number of tokens that an answer shows before the cut, and after the cut in both prompts."""
NOW_S = 1.0
"""Seconds that a call waits for the tiers' answers."""

RESET = "its keys were dropped: the cache was reset or cleared, or the weights have changed, while it ran"


class Reason(NamedTuple):
    """One reason, as a code and a text."""

    code: str
    text: str


class PromptTokens(NamedTuple):
    """The tokens of a prompt, and everything else that determines its KV."""

    words: bytes = b""
    """The tokens as u32, little-endian."""
    extras: frozenset[tuple[int, bytes]] = frozenset()
    """What keys cover besides tokens, as (position, digest); see `Chain.extras`."""

    def shared(self, other: "PromptTokens") -> int:
        """Return the number of leading tokens whose KV is equal in both. 0 if the salts or adapters differ."""
        one, two = self.words, other.words
        most = min(len(one) // TOKEN_BYTES, len(two) // TOKEN_BYTES, *(it for it, _ in self.extras ^ other.extras))
        return bisect_left(
            range(most), 1, key=lambda at: one[: (at + 1) * TOKEN_BYTES] != two[: (at + 1) * TOKEN_BYTES]
        )

    def repeated(self, other: "PromptTokens", start: int) -> int:
        """Return how many tokens from `start` on also occur from `start` on in the other prompt."""
        width, first = WINDOW_TOKENS * TOKEN_BYTES, start * TOKEN_BYTES
        own = {self.words[at : at + width] for at in range(first, len(self.words) - width + 1, width)}
        places = range(first, len(other.words) - width + 1, TOKEN_BYTES)
        return WINDOW_TOKENS * len(own.intersection(other.words[at : at + width] for at in places))

    def around(self, start: int, decode: Decode) -> dict[str, Any]:
        """Return up to `AROUND_TOKENS` tokens from `start` on, and their text."""
        inside = range(max(0, start), min(start + AROUND_TOKENS, len(self.words) // TOKEN_BYTES))
        ids = [int.from_bytes(self.words[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES], "little") for at in inside]
        with suppress(Exception):  # vLLM's tokenizer, which may refuse anything
            return {"ids": ids, "text": decode(ids)}
        return {"ids": ids, "text": None}


class RequestRecord(NamedTuple):
    """What is remembered about a request."""

    id: str
    number: int
    """Order of arrival."""
    ended_s: float | None
    prompt_tokens: int
    most_tokens: int
    """Maximum number of tokens that could be loaded."""
    skips: bool
    max_load_tokens: int | None
    """Maximum number of tokens that its hints let it load."""
    keys: tuple[ChunkKey, ...] | None
    prompt: list[PromptTokens]
    """Its tokens; empty without keys. The scheduler's thread may forget them at any time, which empties the list."""
    account: RequestAccount

    @classmethod
    def of(cls, tracked: TrackedRequest, geometry: Geometry, ended_s: float | None) -> "RequestRecord":
        """Return the record of a request as it is now."""
        request, keys = tracked.request, tracked.keys
        return cls(
            request.request_id,
            tracked.number,
            ended_s,
            request.num_prompt_tokens,
            geometry.hit_tokens(request.num_prompt_tokens),
            bool(request.skip_reading_prefix_cache),
            tracked.hints.max_load_tokens,
            None if keys is None else keys.keys[:KEYS_MAX],
            []
            if keys is None
            else [PromptTokens(bytes(token_words(request.all_token_ids[: request.num_prompt_tokens])), keys.extras)],
            tracked.account,
        )


class RequestHistory:
    """The last requests of one engine.

    Args:
        session: the engine's session.
        geometry: gives the size of chunks.
        refusal: returns why the last request without keys has none.
        decode: turns token ids into text, or into None if the process has no tokenizer.
    """

    def __init__(
        self,
        session: Session,
        geometry: Geometry,
        refusal: Callable[[], str],
        decode: Decode = lambda _: None,
    ) -> None:
        self._session, self._geometry = session, geometry
        self._refusal, self._decode = refusal, decode
        self._open: dict[str, TrackedRequest] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=ENDED_MAX)

    # ---- the scheduler's thread ------------------------------------------------------------------------------------

    def arrived(self, tracked: TrackedRequest, problem: str) -> None:
        """Record a request that has arrived. `problem` says why loads and stores are off; empty if they are on."""
        tracked.account.announced_tokens = tracked.announced_tokens
        if tracked.keys is None:
            tracked.account.refusal = problem or self._refusal()
        self._open[tracked.id] = tracked

    def missed(self, tracked: TrackedRequest, lost: str) -> None:
        """Record what kept a lookup from finding everything. `lost` says why no worker can load; empty if they can."""
        tiers = [f"tier {name}: {tier.detail}" for name, tier in self._session.tier_faults().items() if tier.detail]
        tracked.account.obstacles = tuple(filter(None, [self._session.obstacle, lost, *tiers]))

    def ended(self, tracked: TrackedRequest) -> None:
        """Move a request that has ended from the open requests to the ended ones."""
        self._open.pop(tracked.id, None)
        self._ended.append(RequestRecord.of(tracked, self._geometry, time.monotonic()))
        while sum(len(it.words) for record in self._ended for it in record.prompt) > PROMPT_BYTES_MAX:
            next(it.prompt for it in self._ended if it.prompt).clear()

    # ---- the thread of control calls -------------------------------------------------------------------------------

    def why(self, name: str) -> dict[str, Any]:
        """Return the decisions about the newest request with this id, which may be the engine's or the client's.

        Raises:
            ControlError: no request with this id is remembered.
        """
        ended = list(self._ended)[::-1]
        running = [RequestRecord.of(it, self._geometry, None) for it in list(self._open.values())[::-1]]
        record = next((it for it in (*running, *ended) if name in (it.id, client_id_of_engine(it.id))), None)
        if record is None:
            off = f"; {self._session.obstacle}" if self._session.obstacle else ""
            raise ControlError(
                f"request {name[:80]!r} is unknown; the last {len(ended)} ended requests and {len(running)} open ones "
                f"are known{off}"
            )
        account, now_s = record.account, time.monotonic()
        others = [it for it in ended if it is not record and it.keys and it.ended_s is not None]
        earlier = [it for it in (*running, *ended) if it.number < record.number and it.keys is not None]
        return {
            "request": client_id_of_engine(record.id),
            "engine_request": record.id,
            "ended_ago_s": None if record.ended_s is None else round(now_s - record.ended_s, 3),
            "prompt_tokens": record.prompt_tokens,
            "resident_tokens": account.resident_tokens,
            "found_tokens": dict(account.found),
            "loaded_tokens": dict(account.loaded),
            "computed_tokens": max(0, record.prompt_tokens - account.resident_tokens - account.loaded.total()),
            "reasons": [it._asdict() for it in reasons_of(record, others, self._geometry.chunk_tokens, now_s)],
            "missing_chunk_now": self._now(record),
            "cuts": cuts_of(record, earlier, self._geometry.chunk_tokens, self._decode),
        }

    def _now(self, record: RequestRecord) -> list[str] | None:
        """Return the places that now have the first chunk that the lookup missed.

        Return None if the lookup found all chunks, or if the places did not answer.
        """
        chunk = _found_tokens(record) // self._geometry.chunk_tokens
        keys = (record.keys or ())[: chunk + 1]
        if len(keys) <= chunk or chunk * self._geometry.chunk_tokens >= record.most_tokens:
            return None
        survey = self._session.survey(Prefix(keys[-1:], self._geometry.chunk_tokens), NOW_S)
        return None if survey is None else list(survey.places(0))


def reasons_of(record: RequestRecord, others: list[RequestRecord], size: int, now_s: float) -> list[Reason]:
    """Return why the request loaded no more than it did, in the order of the decisions.

    Args:
        record: the request.
        others: ended requests with keys, newest first.
        size: tokens of a chunk.
        now_s: the current time.
    """
    account, found = record.account, _found_tokens(record)
    reasons, is_over = _before_lookup(record, size)
    if is_over:
        return reasons
    reasons += [Reason("obstacle", text) for text in account.obstacles]
    planned = account.planned
    if planned is None and not account.obstacles:
        reasons.append(
            Reason("no_lookup", "it was not looked up: it still waits, has ended first, or another connector loaded it")
        )
    elif found < _most_tokens(record, size):
        reasons += _absent(record, others, found // size, size, now_s)
    if planned is not None and planned.chosen_tokens < found:
        offer_s = planned.best_offer_s
        best = "there was no other choice" if offer_s is None else f"the best other choice takes {offer_s:.3g} s"
        text = f"{planned.chosen_tokens} of {found} tokens were chosen, which takes {planned.expected_s:.3g} s; {best}"
        if offer_s is not None and offer_s < planned.expected_s:
            text += ", but loads from its place have cost time, or may cost more than the budget"
        reasons.append(Reason("planner", text))
    return [*reasons, *([Reason(*account.shortfall)] if account.shortfall else [])]


def _before_lookup(record: RequestRecord, size: int) -> tuple[list[Reason], bool]:
    """Return reasons that are known before a lookup, and whether there are no others."""
    account, reasons = record.account, list[Reason]()
    if account.resident_tokens:
        reasons.append(Reason("engine", f"vLLM's own prefix cache had {account.resident_tokens} tokens of the prompt"))
    covered, most = account.resident_tokens + account.loaded.total(), _most_tokens(record, size)
    if record.max_load_tokens is not None:
        reasons.append(Reason("hint", f"its hints limit its load to {record.max_load_tokens} tokens"))
    if record.keys is None:
        last = Reason("not_cached", account.refusal or RESET)
    elif record.skips:
        last = Reason(
            "skipped",
            "vLLM does not use a cache for it, for example because it asks for the log probabilities of its prompt",
        )
    elif not record.most_tokens:
        text = f"no full chunk of {size} tokens: the prompt has {record.prompt_tokens}, and its last is always computed"
        last = Reason("no_chunk", text)
    elif covered >= most:
        last = Reason("complete", f"all {most} tokens that it could load were found")
    else:
        return reasons, False
    return [*reasons, last], True


def _most_tokens(record: RequestRecord, size: int) -> int:
    """Return the maximum number of tokens in the engine's blocks after a load."""
    if record.max_load_tokens is None:
        return record.most_tokens
    return min(record.most_tokens, (record.account.resident_tokens + record.max_load_tokens) // size * size)


def _absent(record: RequestRecord, others: list[RequestRecord], chunk: int, size: int, now_s: float) -> list[Reason]:
    """Return why a chunk was not found."""
    reasons = [Reason("absent", f"the chunk at token {chunk * size} was in none of the places that answered")]
    keys = record.keys or ()
    if (announced := record.account.announced_tokens) > chunk * size:
        text = f"another engine announced {announced} tokens, but only {chunk * size} of them arrived in time"
        reasons.append(Reason("announced", text))
    older = [it for it in others if it.keys and (it.ended_s or now_s) <= (record.ended_s or now_s)]
    had = next((it for it in older if it.keys and it.keys[chunk : chunk + 1] == keys[chunk : chunk + 1] != ()), None)
    if had is not None and had.ended_s is not None:
        why = (
            "the chunk was evicted or removed since, or not stored"
            if had.account.stored_tokens
            else "that request stored nothing"
        )
        text = (
            f"request {client_id_of_engine(had.id)}, which ended {now_s - had.ended_s:.0f} s ago, had the chunk; {why}"
        )
        return [*reasons, Reason("removed", text)]
    shares = [(shared_chunks(it.keys or (), keys), it.id) for it in older]
    longest, name = max(shares, default=(0, ""), key=lambda it: it[0])
    text = f"the longest prefix shared with the last {len(older)} requests has {longest * size} tokens"
    return [*reasons, Reason("shared", text + (f" (request {client_id_of_engine(name)})" if longest else ""))]


def _found_tokens(record: RequestRecord) -> int:
    return max(record.account.resident_tokens, sum(tokens for _, tokens in record.account.found))


class _Shared(NamedTuple):
    """What a prompt shares with an earlier one."""

    earlier: RequestRecord
    known: list[PromptTokens]
    """The tokens of the earlier prompt; empty if its tokens or this prompt's are forgotten."""
    tokens: int
    """Number of equal leading tokens, counted in whole chunks if the tokens are forgotten."""
    repeated: int = 0
    """Number of further tokens that occur in both prompts."""


def cuts_of(
    record: RequestRecord, earlier: Sequence[RequestRecord], size: int, decode: Decode = lambda _: None
) -> list[dict[str, Any]]:
    """Return the cut of a prompt; empty if the cut costs no chunk of the most similar earlier prompt.

    That prompt shares the most chunks and, among equals, the most tokens, wherever they occur. If it shares less than a
    chunk, at least half of what follows must be repeated. Otherwise the result is empty, because two conversations
    merely begin with the same template.

    Args:
        record: the request.
        earlier: requests with keys that arrived before it.
        size: tokens of a chunk.
        decode: turns token ids into text.
    """
    own, shares = [*record.prompt], list[_Shared]()
    for it in earlier:
        known = [*it.prompt] if own else []
        tokens = own[0].shared(known[0]) if known else size * shared_chunks(record.keys or (), it.keys or ())
        shares += [_Shared(it, known, tokens)] if tokens else []
    if not shares:
        return []
    rivals = sorted(shares, key=lambda it: (it.tokens // size, it.earlier.number))[-RIVALS_MAX:]
    rivals = [it._replace(repeated=own[0].repeated(it.known[0], it.tokens)) if it.known else it for it in rivals]
    other, known, at, repeated = max(
        rivals, key=lambda it: (it.tokens // size, it.tokens + it.repeated, it.tokens, it.earlier.number)
    )
    lost = min(record.prompt_tokens, other.prompt_tokens) - at
    last = min(record.most_tokens, other.prompt_tokens, *([] if known else [KEYS_MAX * size]))
    if last // size <= at // size or (at < size and 2 * repeated < lost):
        return []
    this, that = (own[0], known[0]) if known else (PromptTokens(), PromptTokens())
    return [
        {
            "request": client_id_of_engine(other.id),
            "at_token": at,
            "is_exact": bool(known),
            "lost_tokens": lost,
            "repeated_tokens": repeated if known else None,
            "before": this.around(at - AROUND_TOKENS, decode),
            "earlier": that.around(at, decode),
            "this": this.around(at, decode),
        }
    ]
