"""State of one vLLM request on the scheduler side, and what a request carries for kvtier in `kv_transfer_params`.

    do_remote_decode     a prefill engine shall announce what it has stored, in the response
    kvtier.tokens        the announcement, in the request to the decode engine: leading tokens that another engine has
                         stored, or is storing
    (hints)              see `request_hints`

Hints and announcements never affect correctness: loads are of the request's own keys. An invalid one is ignored.
"""

import sys
import time
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, NamedTuple, cast

from kvtier.connect.vllm.request_hints import (
    ENVELOPE,
    HINTS,
    NO_HINTS,
    RequestHints,
    params_of,
    problem,
    unknown_hints,
)
from kvtier.connect.vllm.request_journal import RequestAccount
from kvtier.connect.vllm.vllm_types import Request, StateOffer
from kvtier.core.planner import LoadPlan
from kvtier.keys.chain import Chain
from kvtier.runtime.trace_recorder import Served
from kvtier.types import Lookup, Prefix, RequestId

_ENDED_BY_OUTPUT = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""Statuses that the output of a step sets, which proves that the step has run."""

ANNOUNCEMENT = "kvtier"
"""Field of `kv_transfer_params`."""

_FIELDS = frozenset({*HINTS, "do_remote_decode", "do_remote_prefill", ANNOUNCEMENT, ENVELOPE})


def announced_tokens(request: Request) -> tuple[int, str]:
    """Leading tokens of the request that another engine has announced; also what is invalid, or ``""``."""
    announcement = params_of(request).get(ANNOUNCEMENT)
    if announcement is None:
        return 0, ""
    tokens = cast("dict[str, object]", announcement).get("tokens") if isinstance(announcement, dict) else announcement
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        return 0, problem(f"{ANNOUNCEMENT}.tokens", tokens, "a number of tokens, as the prefill engine announced it")
    return min(tokens, request.num_tokens), ""


def unknown_fields(request: Request) -> str:
    """Fields of `kv_transfer_params`, or actions of `kv_hints`, that kvtier does not know, in a sentence; or ``""``."""
    found = sorted(str(name) for name, value in params_of(request).items() if name not in _FIELDS and value is not None)
    if found:
        return f"kv_transfer_params has {short(found)}; known: {', '.join(sorted(_FIELDS))}"
    return unknown_hints(request)


def wants_announcement(request: Request) -> bool:
    """Whether another engine goes on with the request, by the convention of vLLM's proxies."""
    return params_of(request).get("do_remote_decode") is True


def comes_from_another(request: Request) -> bool:
    """Whether another engine has computed the prompt, by the convention of vLLM's proxies, and no load has begun."""
    return params_of(request).get("do_remote_prefill") is True


def announcement_of(tokens: int) -> dict[str, Any]:
    """`kv_transfer_params` of a response, which a proxy passes on to the decode engine as they are."""
    return {"do_remote_prefill": True, "do_remote_decode": False, ANNOUNCEMENT: {"tokens": tokens}}


class LookupAnswer(NamedTuple):
    """A lookup's result, and the arguments that it is valid for."""

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
        """Tokens to load, beyond vLLM's own cache."""
        return self.plan.tokens - self.plan.resident_tokens


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request. All token counts are measured from the start of its prompt."""

    request: Request
    number: int
    """Unique; two requests may have the same id, one after the other."""
    keys: Chain | None
    """None: the request is neither looked up nor stored."""
    hints: RequestHints = NO_HINTS
    began_step: int | None = None
    """First step that computed into the request's current blocks."""
    handed_tokens: int = 0
    """Leading tokens that are cached or were handed to the session. (Of windows and states it has fewer.)"""
    windows: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Chunks of each window group that are cached or were handed to the session."""
    announced_tokens: int = 0
    """Leading tokens that another engine has announced."""
    published_tokens: int = 0
    """Leading tokens that are cached or were handed to the session, up to a boundary from which a request can go on."""
    junction_tokens: int = 0
    """Length of the cached history that another request shares with this one; 0: none."""
    offers: list[StateOffer] = field(default_factory=list[StateOffer])
    """States past `handed_tokens` that vLLM offers. Their blocks are pinned."""
    cap_tokens: int | None = None
    """A load found a hole behind these tokens. A tier may list a bad object for a while after it was read."""
    drafted_tokens: int = sys.maxsize
    """Leading tokens that no step has computed without the draft model."""
    attempts: int = 0
    """Loads that delivered less than planned."""
    answer: LookupAnswer | None = None
    match: PrefixMatch | None = None
    outdated: PrefixMatch | None = None
    """A match made before a cache reset. Its load is void."""
    load: RequestId | None = None
    """The open load."""
    loaded_s: float | None = None
    """End of its load, on a clock that stops while the engine computes."""
    arrived_s: float = field(default_factory=time.monotonic)
    account: RequestAccount = field(default_factory=RequestAccount)
    """For the journal."""
    _prefix: tuple[int, Prefix] | None = None

    @property
    def id(self) -> str:
        """Request id in vLLM."""
        return self.request.request_id

    @property
    def name(self) -> str:
        """Its id, for the names of its look-ups and for the log; empty for a request that opts out."""
        return "" if self.hints.opt_out else self.id

    @property
    def question(self) -> RequestId:
        """Request id of its lookups. Probe answers are kept per id, so each attempt has a new one."""
        return RequestId(f"Q{self.number}.{self.attempts}/{self.name}")

    def renew(self, keys: Chain | None) -> None:
        """Replace the keys after a cache reset."""
        self.keys, self.outdated = keys, self.match
        self.answer = self._prefix = None

    def prefix(self, tokens: int) -> Prefix:
        """The full chunks within the leading `tokens`; the same object each time, since lookups compare by identity.

        Each token is hashed once.

        Raises:
            ValueError: vLLM has removed tokens, so keys that cover them would be wrong.
        """
        assert self.keys is not None
        if self._prefix is None or self._prefix[0] != tokens:
            known = self.request.all_token_ids
            if len(known) < self.keys.tokens:
                raise ValueError(f"{self.name} has {len(known)} tokens, and had {self.keys.tokens}")
            self.keys.extend(list(known[self.keys.tokens :]))
            self._prefix = (tokens, self.keys.prefix(tokens))
        return self._prefix[1]

    def stores_up_to(self, tokens: int) -> int:
        """How many of the leading `tokens` may be stored."""
        most = self.hints.max_offload_tokens
        return tokens if most is None else min(tokens, most)

    def served(self) -> Served:
        """Trace entry of the finished request."""
        prompt = self.request.num_prompt_tokens
        keys = () if self.keys is None else self.prefix(prompt).keys
        return Served(self.arrived_s, keys, prompt, self.request.num_tokens - prompt, *self.hints[:2])

    def computed_tokens(self, confirmed_step: int) -> int:
        """Leading tokens whose KV in the request's blocks is final: computed by steps whose output has returned.

        A request may share blocks that another request computes in a step still in flight. So nothing counts until the
        request's own first step has returned. Where keys look ahead, a token counts once the next one is known. A stop
        may remove tokens that the draft model has already read.
        """
        request = self.request
        if self.began_step is None:
            return 0
        if self.began_step > confirmed_step and str(request.status) not in _ENDED_BY_OUTPUT:
            return 0
        known = request.num_tokens - (self.keys is not None and self.keys.looks_ahead)
        return min(request.num_computed_tokens - request.num_in_flight_tokens, known, self.drafted_tokens)
