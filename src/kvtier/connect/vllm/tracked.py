"""What the scheduler's half remembers of one request of vLLM's, from its arrival to its end."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtier.connect.vllm.sessions import Said
from kvtier.connect.vllm.vllm_types import Offer, Request
from kvtier.core.planner import Plan
from kvtier.runtime.recorder import Served
from kvtier.types import Lookup, Prefix, Presence, RequestId

_ENDED_BY_OUTPUT = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})
"""How a request ends that a step's output has ended, so that this step has run."""


class Keys(Protocol):
    """Who the chunks of one request are (`requests.RequestKeys`)."""

    def extend(self, all_token_ids: list[int]) -> None:
        """Hash what is new in the request's tokens."""
        ...

    def prefix(self, tokens: int | None = None) -> Prefix:
        """The full chunks within the leading `tokens`."""
        ...


class Answer(NamedTuple):
    """What the session has said about a request."""

    prefix: Prefix
    resident_tokens: int
    time_s: float
    lookup: Lookup

    def counts_for(self, prefix: Prefix, resident_tokens: int) -> bool:
        """Whether it is an answer, and to this question."""
        is_same = self.prefix is prefix and self.resident_tokens == resident_tokens
        return is_same and self.lookup.presence is not Presence.PROBING


@dataclass(frozen=True, slots=True)
class Match:
    """What vLLM has been told that can be loaded."""

    plan: Plan
    prefix: Prefix
    lookup: Lookup
    is_async: bool

    @property
    def external_tokens(self) -> int:
        """Tokens beyond those that vLLM has itself."""
        return self.plan.tokens - self.plan.resident_tokens

    @property
    def sources(self) -> list[tuple[str, int]]:
        """(place, tokens) of what is loaded."""
        left = self.external_tokens
        found: list[tuple[str, int]] = []
        # The slowest place first: what vLLM has itself is most likely in host memory, too.
        for place, tokens in reversed(self.lookup.sources):
            found.append((place, min(tokens, left)))
            left -= found[-1][1]
        return [source for source in found if source[1]]


@dataclass(slots=True, eq=False)
class Tracked:
    """One request. All counts of tokens are from the start of its prompt."""

    request: Request
    number: int
    """Tells its questions to the session apart from those of another one of the same name."""
    keys: Keys | None
    """None: it is neither looked up nor stored."""
    said: Said = Said()  # noqa: RUF009  it never changes
    began_step: int | None = None
    """The first step that computed into the blocks which it has now."""
    handed_tokens: int = 0
    """What the cache has, or was given to store. (Of windows and states it has less.)"""
    windows: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """For each group with a window, the chunks of it that the cache has or was given."""
    junction_tokens: int = 0
    """Where another request parted from it, of which the cache has the history up to there; 0: nowhere."""
    offers: list[Offer] = field(default_factory=list[Offer])
    """States at boundaries past `handed_tokens` that vLLM has named; their blocks are pinned."""
    cap_tokens: int | None = None
    """A load found a hole behind these; a tier may list a bad object for a while after it was read."""
    attempts: int = 0
    """Loads that brought less than they promised."""
    answer: Answer | None = None
    match: Match | None = None
    outdated: Match | None = None
    """A match of before a reset; a load of it does not count."""
    load: RequestId | None = None
    """The load that is under way."""
    loaded_s: float | None = None
    """When its load had ended, by the clock that stands still while the engine computes."""
    arrived_s: float = field(default_factory=time.monotonic)
    _prefix: tuple[int, Prefix] | None = None

    @property
    def id(self) -> str:
        """VLLM's name of it."""
        return self.request.request_id

    @property
    def question(self) -> RequestId:
        """The name under which tiers are asked. What they have said is kept with it, so every attempt asks anew."""
        return RequestId(f"Q{self.number}.{self.attempts}/{self.id}")

    def renew(self, keys: Keys | None) -> None:
        """Its chunks have other names from now on."""
        self.keys, self.outdated = keys, self.match
        self.answer = self._prefix = None

    def prefix(self, tokens: int) -> Prefix:
        """The chunks within the leading `tokens`; the same object each time, which spares a lookup work."""
        assert self.keys is not None
        if self._prefix is None or self._prefix[0] != tokens:
            self.keys.extend(self.request.all_token_ids)
            self._prefix = (tokens, self.keys.prefix(tokens))
        return self._prefix[1]

    def served(self) -> Served:
        """What a trace tells of it, once it has ended."""
        prompt = self.request.num_prompt_tokens
        keys = () if self.keys is None else self.prefix(prompt).keys
        return Served(self.arrived_s, keys, prompt, self.request.num_tokens - prompt, *self.said)

    def computed_tokens(self, confirmed_step: int) -> int:
        """Leading tokens whose KV is in its blocks: all computed, in steps whose output has come back, and all final.

        A request may have been given blocks that another one is computing in a step which is still under way. So
        nothing of it counts before its own first step has come back.
        """
        request = self.request
        if self.began_step is None:
            return 0
        if self.began_step > confirmed_step and str(request.status) not in _ENDED_BY_OUTPUT:
            return 0
        return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
