"""Keeps the scheduler side's state of one vLLM request."""

import sys
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.connect.vllm.requests.account import RequestAccount
from kvtier.connect.vllm.requests.hints import NO_HINTS, RequestHints
from kvtier.connect.vllm.vllm_types import Request, StateOffer
from kvtier.core.planner import LoadPlan
from kvtier.keys.chain import Chain
from kvtier.runtime.observers.trace_recorder import Served
from kvtier.types import ChunkKey, Lookup, Prefix, RequestId

_ENDED_BY_OUTPUT = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Statuses that the output of a step sets. They prove that the step has run."""


def shared_chunks(one: tuple[ChunkKey, ...], other: tuple[ChunkKey, ...]) -> int:
    """Return how many leading chunks two prefixes share. Bisects, because equal keys imply equal keys before them."""
    return bisect_left(range(min(len(one), len(other))), 1, key=lambda chunk: one[chunk] != other[chunk])


class LookupAnswer(NamedTuple):
    """A lookup's result, and the arguments for which it is valid."""

    prefix: Prefix
    resident_tokens: int
    time_s: float
    lookup: Lookup


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The load that was offered to vLLM for a request."""

    plan: LoadPlan
    prefix: Prefix

    @property
    def external_tokens(self) -> int:
        """Number of tokens to load, beyond vLLM's own cache."""
        return self.plan.tokens - self.plan.resident_tokens


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request. All token counts are measured from the start of its prompt."""

    request: Request
    number: int
    """A unique number, because two successive requests may have the same id."""
    keys: Chain | None
    """The key chain; None if the request is neither looked up nor stored."""
    hints: RequestHints = NO_HINTS
    began_step: int | None = None
    """First step that computed into the request's current blocks."""
    handed_tokens: int = 0
    """Leading tokens that are cached or were handed to the session. Windows and states may cover fewer."""
    windows: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Chunks of each window group that are cached or were handed to the session."""
    announced_tokens: int = 0
    """Leading tokens that another engine has announced; 0 if the request need not wait for them any more."""
    published_tokens: int = 0
    """Leading tokens that are cached or were handed to the session, up to a boundary where a request can resume."""
    junction_tokens: int = 0
    """Length of the cached history that another request shares with this one; 0 if there is none."""
    offers: list[StateOffer] = field(default_factory=list[StateOffer])
    """States past `handed_tokens` that vLLM offers. Their blocks are pinned."""
    cap_tokens: int | None = None
    """Maximum number of tokens to load after a load that failed in part: those before the first missing chunk, or 0.
    It is needed because a tier may list a bad object for some time after a read."""
    drafted_tokens: int = sys.maxsize
    """Leading tokens that no step has computed without the draft model."""
    attempts: int = 0
    """Number of loads that delivered less than planned."""
    answer: LookupAnswer | None = None
    match: PrefixMatch | None = None
    outdated: PrefixMatch | None = None
    """A match made before a cache reset. The load that it leads to is void."""
    load: RequestId | None = None
    """Id of the open load."""
    loaded_s: float | None = None
    """Time when the last load ended, on a clock that stops while the engine computes."""
    arrived_s: float = field(default_factory=time.monotonic)
    account: RequestAccount = field(default_factory=RequestAccount)
    """What the journal and the history say about the request."""
    _prefix: tuple[int, Prefix] | None = None

    @property
    def id(self) -> str:
        """Request id in vLLM."""
        return self.request.request_id

    @property
    def name(self) -> str:
        """Its id, for the names of its lookups and for the log. Empty if the request opts out."""
        return "" if self.hints.opt_out else self.id

    @property
    def question(self) -> RequestId:
        """Request id of its lookups. Probe answers are kept per id, so each attempt has a new id."""
        return RequestId(f"Q{self.number}.{self.attempts}/{self.name}")

    def renew(self, keys: Chain | None) -> None:
        """Replace the keys after a cache reset."""
        self.keys, self.outdated = keys, self.match
        self.account.refusal = self.account.refusal if keys is None else ""
        self.answer = self._prefix = None

    def prefix(self, tokens: int) -> Prefix:
        """Return the full chunks in the leading `tokens`.

        Repeated calls return the same object, because lookups compare by identity. Each token is hashed once.

        Raises:
            ValueError: vLLM has removed tokens, so keys that cover them would be wrong.
        """
        assert self.keys is not None
        if self._prefix is None or self._prefix[0] != tokens:
            known = self.request.all_token_ids
            if len(known) < self.keys.tokens:
                raise ValueError(f"request {self.name} has {len(known)} tokens, but had {self.keys.tokens} before")
            self.keys.extend(list(known[self.keys.tokens :]))
            self._prefix = (tokens, self.keys.prefix(tokens))
        return self._prefix[1]

    def stores_up_to(self, tokens: int) -> int:
        """Return how many of the leading `tokens` may be stored."""
        most = self.hints.max_offload_tokens
        return tokens if most is None else min(tokens, most)

    def served(self) -> Served:
        """Return the trace entry of the finished request."""
        prompt = self.request.num_prompt_tokens
        keys = () if self.keys is None else self.prefix(prompt).keys
        return Served(self.arrived_s, keys, prompt, self.request.num_tokens - prompt, *self.hints[:2])

    def computed_tokens(self, confirmed_step: int) -> int:
        """Return how many leading tokens have final KV in the request's blocks.

        The output of their steps has returned. A request may share blocks that another request computes in a step still
        in flight. So no token counts until the request's own first step has returned. If keys look ahead, a token
        counts once the next one is known. A stop may remove tokens that the draft model has already read.
        """
        request = self.request
        if self.began_step is None:
            return 0
        if self.began_step > confirmed_step and str(request.status) not in _ENDED_BY_OUTPUT:
            return 0
        known = request.num_tokens - (self.keys is not None and self.keys.looks_ahead)
        return min(request.num_computed_tokens - request.num_in_flight_tokens, known, self.drafted_tokens)
