"""Keeps the account of a vLLM request for the journal and the history, under the id that the client knows."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.connect.vllm.vllm_types import Request
from kvtier.core.planner import LoadPlan, Planner
from kvtier.layout import Loss
from kvtier.runtime.observers.journal import Planned, RequestLine
from kvtier.types import LoadDone, Lookup, Place

_RANDOM = re.compile(r"-[0-9a-f]{8}\Z")
"""Suffix that vLLM appends to every id, so that no two open requests have the same id. With the deprecated variable
`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION` vLLM appends none, and a client's id that happens to end like this loses its
end."""
_CHILD = re.compile(r"^\d+_(?=(?:chat)?cmpl-)")
"""Prefix that vLLM adds to the id of one of several samples."""
_COMPLETION = re.compile(r"^cmpl-(.+)-\d+$", re.DOTALL)
"""The id of a completion ends with the prompt's position, because a request may have several prompts."""


def client_id(request_id: str) -> str:
    """Return the client's `X-Request-ID` from an id of vLLM's server. Return other ids as they are."""
    name = _CHILD.sub("", request_id)
    found = _COMPLETION.match(name)
    return found[1] if found else name.removeprefix("chatcmpl-")


def client_id_of_engine(request_id: str) -> str:
    """Return the client's id for an id in vLLM's scheduler."""
    return client_id(_RANDOM.sub("", request_id))


@dataclass(slots=True, eq=False)
class RequestAccount:
    """What is known about one request so far."""

    resident_tokens: int = 0
    found: tuple[tuple[str, int], ...] = ()
    planned: Planned | None = None
    has_begun: bool = False
    """Whether the engine has computed anything or a load has started. Lookups after a preemption do not count."""
    wanted_tokens: int = 0
    loaded: Counter[str] = field(default_factory=Counter[str])
    loaded_bytes: int = 0
    load_s: float = 0.0
    loads: int = 0
    stored_tokens: int = 0
    loss: Loss = "none"
    """Class of the stored KV that the request may get; ``none`` if it demands exact KV."""
    announced_tokens: int = 0
    """Leading tokens that another engine had announced. This field and those below are only for the history."""
    refusal: str = ""
    """Why the request has no keys."""
    obstacles: tuple[str, ...] = ()
    """What kept its lookup from finding more."""
    shortfall: tuple[str, str] | None = None
    """Code and text of the reason why its last load delivered less than planned."""

    def resident(self, tokens: int) -> None:
        """Record how many leading tokens the engine's own cache has."""
        if not self.has_begun:
            self.resident_tokens, self.found, self.planned = tokens, (), None

    def chosen(self, lookup: Lookup, plan: LoadPlan, planner: Planner) -> None:
        """Record that the planner has chosen `plan`."""
        if self.has_begun:
            return
        self.found = lookup.sources
        offers = [seconds for tokens, seconds in planner.offers(lookup, plan) if tokens != plan.tokens]
        self.planned = Planned(
            plan.tokens,
            plan.load_s + plan.compute_s,
            plan.recompute_s,
            min(offers, default=None),
            plan.ahead_s,
            plan.source,
            plan.is_trial,
        )

    def load_begins(self, tokens: int) -> None:
        """Record that a load of `tokens` starts."""
        self.has_begun = True
        self.loads += 1
        self.wanted_tokens += tokens

    def load_ended(self, done: LoadDone, seconds: float, places: Sequence[Place], sizes: Sequence[int]) -> None:
        """Record that a load ended after `seconds`. `sizes` has an object's bytes in each group, over all ranks."""
        self.load_s += seconds
        if done.was_cut:
            self.shortfall = (
                "cut",
                f"the load was cut after {seconds:.3g} s, because computing the rest was faster by then",
            )
        elif done.tokens < done.wanted_tokens:
            self.shortfall = (
                "failed",
                f"{len(done.failed)} objects of the load did not arrive",
            )
        for place, tokens in done.sources:
            self.loaded[place] += tokens
        if done.sources:  # otherwise the load was void, or nothing arrived
            failed = set(done.failed)
            self.loaded_bytes += sum(sizes[it.group] for it in places if (it.group, it.chunk) not in failed)

    def line(self, request: Request, arrived_s: float) -> RequestLine:
        """Return the journal line of the request, which has ended. It arrived at `arrived_s` of `time.monotonic`."""
        prompt_tokens = request.num_prompt_tokens
        return RequestLine(
            id=client_id_of_engine(request.request_id),
            arrived_s=time.time() - (time.monotonic() - arrived_s),
            prompt_tokens=prompt_tokens,
            output_tokens=request.num_tokens - prompt_tokens,
            resident_tokens=self.resident_tokens,
            found_tokens=dict(self.found),
            wanted_tokens=self.wanted_tokens,
            loaded_tokens=dict(self.loaded),
            loaded_bytes=self.loaded_bytes,
            load_s=self.load_s,
            loads=self.loads,
            stored_tokens=self.stored_tokens,
            planner=self.planned,
            loss=self.loss,
        )
