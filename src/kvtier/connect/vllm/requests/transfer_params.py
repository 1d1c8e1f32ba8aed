"""Reads what a request passes to kvtier in `kv_transfer_params`, and writes what its response passes on.

    do_remote_decode     asks a prefill engine to announce in its response what it has stored
    kvtier.tokens        the announcement, in the request to the decode engine: leading tokens that another engine has
                         stored or is storing
    kvtier.loss          in a response of an engine with a lossy class: class of the stored KV that the request may have
                         used
    kvtier.loaded_tokens with `loss`: tokens that kvtier loaded for the request. vLLM's own cache may have had more that
                         were loaded earlier
    (hints)              what `hints.request_hints` reads

Hints and announcements never affect correctness, because loads use the request's own keys. Invalid ones are ignored.
"""

import logging
import math
from enum import Enum, auto
from functools import partial
from reprlib import repr as short
from typing import Any, cast

from kvtier.connect.vllm.requests.hints import (
    ENVELOPE,
    HINTS,
    NO_HINTS,
    OPTED_OUT,
    HintProblem,
    RequestHints,
    params_of,
    problem,
    request_hints,
    unknown_hints,
)
from kvtier.connect.vllm.requests.keys import loss_of
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.connect.vllm.vllm_types import Request
from kvtier.layout import Loss
from kvtier.observe import metric_definitions as table
from kvtier.runtime.observers.guards import Feature
from kvtier.runtime.session import Session
from kvtier.types import Priority, RequestId

logger = logging.getLogger(__name__)

ANNOUNCEMENT = "kvtier"
"""Field of `kv_transfer_params` with an announcement."""

_FIELDS = frozenset({*HINTS, "do_remote_decode", "do_remote_prefill", ANNOUNCEMENT, ENVELOPE})


def announced_tokens(request: Request) -> tuple[int, str]:
    """Return how many leading tokens another engine has announced, and why the announcement is invalid, or ``""``."""
    announcement = params_of(request).get(ANNOUNCEMENT)
    if announcement is None:
        return 0, ""
    tokens = announcement
    if isinstance(announcement, dict):
        said = cast("dict[str, object]", announcement)
        tokens = said.get("tokens", 0 if "loss" in said else None)  # a proxy may pass any response on
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        return 0, problem(f"{ANNOUNCEMENT}.tokens", tokens, "a number of tokens, as the prefill engine announced it")
    return min(tokens, request.num_tokens), ""


def unknown_fields(request: Request) -> str:
    """Return a sentence about fields of `kv_transfer_params` or actions of `kv_hints` that are unknown, or ``""``."""
    found = sorted(str(name) for name, value in params_of(request).items() if name not in _FIELDS and value is not None)
    if found:
        return f"kv_transfer_params has the unknown fields {short(found)}; known: {', '.join(sorted(_FIELDS))}"
    return unknown_hints(request)


def wants_announcement(request: Request) -> bool:
    """Return whether another engine will continue the request, as vLLM's proxies say with `do_remote_decode`."""
    return params_of(request).get("do_remote_decode") is True


def announcement_of(tokens: int) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a response. A proxy passes them to the decode engine unchanged."""
    return {"do_remote_prefill": True, "do_remote_decode": False, ANNOUNCEMENT: {"tokens": tokens}}


class Announces(Enum):
    """Which responses announce what the engine has stored."""

    NEVER = auto()
    """No response, because no other engine finds the KV."""
    IF_ASKED = auto()
    ALWAYS = auto()
    """Every response of a prefill engine."""


class TransferParams:
    """Reads the hints and announcements in one engine's requests, and writes the announcements in its responses.

    Args:
        session: receives hints of requests that have ended.
        announces: which responses announce what was stored.
        is_alone: False if another connector passes KV between engines. That connector then loads the KV of requests
            with `do_remote_prefill`. kvtier announces nothing, and waits for nothing that is announced.
        allows_high_priority: whether requests may retain KV with a high priority.
        loss: the engine's class. If it is not ``none``, each response contains the class that `loss_of` returns.
    """

    def __init__(
        self,
        session: Session,
        announces: Announces = Announces.IF_ASKED,
        *,
        is_alone: bool = True,
        allows_high_priority: bool = False,
        loss: Loss = "none",
    ) -> None:
        self._session = session
        self._loss: Loss = loss
        self._announces = announces if is_alone else Announces.NEVER
        self._is_alone, self._allows_high_priority = is_alone, allows_high_priority
        self._warned: set[str] = set()
        self._ended: list[TrackedRequest] = []
        """Requests that have ended and whose hints the session has not received yet."""

    def read(self, request: Request) -> tuple[RequestHints, int]:
        """Return the hints of a request, and the leading tokens that another engine has announced. Never raises."""
        has_said = request.kv_transfer_params is not None or getattr(request, "kv_hints", None) is not None
        otherwise = OPTED_OUT if has_said else NO_HINTS, 0
        return self._session.guards.run(Feature.HINTS, self._read, request, otherwise=otherwise)

    def _read(self, request: Request) -> tuple[RequestHints, int]:
        hints, problems = request_hints(request)
        announced, lie = announced_tokens(request)
        who, outcome = "a request that opts out", "nothing of it is stored"
        if not hints.opt_out:
            who, outcome = f"request {request.request_id}", "this is ignored"
            unknown = unknown_fields(request) if self._is_alone else ""
            problems += [HintProblem("tokens", lie), HintProblem("unknown", unknown)]
        if hints.priority == "high" and not self._allows_high_priority:
            hints = hints._replace(priority="normal")
            text = "priority = 'high'; allowed: 'low', 'normal'; with vllm.allow_high_priority = true also 'high'"
            problems.append(HintProblem("high priority", text))
            count = partial(self._session.metrics.add, table.REFUSED_HINTS, reason="priority")
            self._session.guards.run(Feature.METRICS, count, otherwise=None)
        for field, text in problems:
            if text and field not in self._warned:
                self._warned.add(field)
                logger.warning("%s: %s; %s (logged once)", who, text, outcome)
        return hints, announced if self._is_alone else 0

    def is_ours(self, request: Request) -> bool:
        """Return whether kvtier, and not another connector, loads KV for the request.

        By the convention of vLLM's proxies, `do_remote_prefill` means that another engine has computed the prompt and
        no load has started.
        """
        return self._is_alone or params_of(request).get("do_remote_prefill") is not True

    def response(self, tracked: TrackedRequest, *, is_found: bool) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of a response.

        Args:
            tracked: the request, which has ended.
            is_found: whether other engines find what this engine has stored of the request.
        """
        said = self._announcement(tracked, is_found=is_found)
        if self._loss == "none":
            return said
        own = {"loss": tracked.account.loss, "loaded_tokens": tracked.account.loaded.total()}
        return {**(said or {}), ANNOUNCEMENT: {**(said or {}).get(ANNOUNCEMENT, {}), **own}}

    def loss_of(self, request: Request) -> Loss:
        """Return the class of the stored KV that a request may get; ``none`` if it demands exact KV."""
        return loss_of(request.cache_salt, self._loss)

    def _announcement(self, tracked: TrackedRequest, *, is_found: bool) -> dict[str, Any] | None:
        """Return the part of a response for another engine, or None. Arguments are as in `response`."""
        request = tracked.request
        is_asked = self._announces is Announces.ALWAYS or wants_announcement(request)
        if tracked.hints.opt_out and is_asked:  # the proxy passes this on, so the next engine stores nothing either
            return {"store": False}
        if tracked.hints.opt_out or not is_asked or not is_found or self._announces is Announces.NEVER:
            return None
        return announcement_of(min(tracked.published_tokens, request.num_prompt_tokens))

    # ---- hints for the time after a request ------------------------------------------------------------------------

    def ended(self, tracked: TrackedRequest) -> None:
        """Take the hints of a request that has ended."""
        hints = tracked.hints
        if hints.conversation is not None and hints.next_turn is not None:
            self._session.expects(hints.conversation, hints.next_turn)
        if tracked.keys is not None and hints.concern_the_end:
            self._ended.append(tracked)

    def pass_on(self) -> None:
        """Pass the hints of requests that have ended to the session, which now knows their last stores."""
        for tracked in self._ended:
            self._session.guards.run(Feature.HINTS, self._pass_on, tracked, otherwise=None)
        self._ended.clear()

    def _pass_on(self, tracked: TrackedRequest) -> None:
        session, hints, conversation = self._session, tracked.hints, tracked.hints.conversation
        prefix = tracked.prefix(tracked.request.num_tokens)
        priority = Priority.HIGH if hints.priority == "high" else Priority.NORMAL
        if priority or hints.retain_s is not None:
            session.retain(prefix, math.inf if hints.retain_s is None else hints.retain_s, priority)
        elif hints.priority == "low":
            session.lower(prefix, conversation)
        if hints.prefetch_in_s is not None:
            name = RequestId(f"P{tracked.number}/{tracked.id}")
            session.prefetch(name, prefix, hints.prefetch_in_s, conversation)

    def forget(self) -> None:
        """Forget the hints that `pass_on` has not passed on, because keys have changed."""
        self._ended.clear()
