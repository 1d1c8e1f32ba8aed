"""Handles what makes KV unusable (new weights, cache resets, cleared salts), and updates open requests.

    weights      after an unknown change, nothing is loaded or stored until a cache reset. A known change, or vLLM's
                 sleep, stops loads and stores only until `go_on`
    reset        a reset of the connector's cache gives requests other keys
    own reset    a reset of vLLM's own cache requires the blocks of all waiting requests
    salt         requests with a cleared salt get other keys
    adapter      requests are not cached if the files of their adapter, or an image or other item, are in doubt

Only the scheduler's thread uses this module, except where a method says otherwise.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from kvtier.connect.vllm.requests.keys import KeyMaker
from kvtier.connect.vllm.requests.request_events import RequestEvents
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.connect.vllm.requests.transfer_params import TransferParams
from kvtier.connect.vllm.scheduler.loads import Loads
from kvtier.connect.vllm.scheduler.stores import Stores
from kvtier.connect.vllm.step_metadata import StepDone
from kvtier.connect.vllm.vllm_types import Request
from kvtier.keys.chain import Chain
from kvtier.runtime.session import Session

logger = logging.getLogger(__name__)


class Invalidation:
    """Decides for one engine which KV is still valid, and renews the keys of its open requests.

    Args:
        session: the session, whose hints end when keys are renewed.
        keys: makes the keys of requests.
        requests: the open requests, by vLLM's id.
        loads: the open loads.
        stores: the open stores.
        params: hints of requests that have ended.
        log: withdraws what was published under the old keys.
        restart: restarts requests, as `EngineCache.restart` does.
    """

    def __init__(
        self,
        session: Session,
        keys: KeyMaker,
        requests: Mapping[str, TrackedRequest],
        loads: Loads,
        stores: Stores,
        params: TransferParams,
        log: RequestEvents,
        restart: Callable[[Collection[str]], None],
    ) -> None:
        self._session, self._keys, self._requests = session, keys, requests
        self._loads, self._stores = loads, stores
        self._params, self._log, self._restart = params, log, restart
        self.on_unknown_change: Callable[[], None] = lambda: None
        """Called when the weights have, or may have, changed and no call says when they are complete."""
        self._step = 0
        self._is_off = False
        """Whether the weights have changed since the last cache reset. If so, nothing is loaded or stored."""
        self.stopped_by = ""
        """What has stopped loads and stores until `go_on`; empty if nothing has."""
        self._has_mixed_weights = False
        """Whether vLLM's own cache may contain KV of other weights."""
        self.reset_step = 0
        """First step after the last cache reset of an idle engine."""
        self._trusted_step = 0
        """First step whose reports of changed weights count. In earlier steps, workers compared with older weights."""
        self._own_is_empty = False
        """Whether vLLM's own cache was reset and no step has been scheduled since."""
        self.has_run = False
        """Whether a step has computed something, perhaps with other weights, since loads and stores were stopped."""
        self.is_encoder_empty = True
        """Whether vLLM's cache of encoded items, such as images, was reset and no step has computed anything since."""
        self.has_undrafted = False
        """Whether vLLM's own cache may contain blocks of a step without the draft model."""
        self._is_reset = False
        """Whether a cache reset has given this engine other keys than other engines."""
        self._cleared_salts: set[str] = set()
        """Salts whose requests have other keys in other engines. After a cache reset, all requests have other keys."""
        self.wishes: deque[str | None] = deque()
        """Salts to clear (None for all), added by other threads for the scheduler's thread."""

    # ---- validity --------------------------------------------------------------------------------------------------

    @property
    def is_off(self) -> bool:
        """Whether nothing may be loaded or stored."""
        return self._is_off or bool(self.stopped_by)

    @property
    def problem(self) -> str:
        """Why nothing may be loaded or stored. Empty in normal operation. Any thread may ask."""
        return (
            "the weights have changed, or may have, since the last reset of the cache"
            if self._is_off
            else self.stopped_by
        )

    def keys_of(self, request: Request) -> Chain | None:
        """Return a request's key chain, still without tokens, or None if the request must not be cached."""
        keys = self._keys.begin(request)  # this identifies an adapter even while kvtier is off
        return None if self.is_off else keys

    def has_own_keys(self, request: Request) -> bool:
        """Return whether other engines have other keys for the request."""
        return self._is_reset or (request.cache_salt or "") in self._cleared_salts

    def is_own_kv_mixed(self, request: Request) -> bool:
        """Return whether the request's KV in vLLM's own cache may be from other weights or adapter files."""
        return self._has_mixed_weights or _adapter_of(request) in self._keys.adapters.mixed

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step_goes_out(self, step: int, *, is_busy: bool) -> None:
        """Record that vLLM has scheduled a step, which computes something if `is_busy`."""
        self._step, self._own_is_empty = step, False
        self.has_run = self.has_run or is_busy
        self.is_encoder_empty = self.is_encoder_empty and not is_busy

    def stepped(self, done: StepDone) -> None:
        """Process the changes that workers noticed in a step that has returned."""
        if done.changed and done.step >= self._trusted_step and not self.stopped_by:
            self.weights_change(done.changed)
        if done.adapters and (adapters := self._keys.adapters.read(done.adapters)):
            # vLLM's workers have read files that kvtier has not identified.
            self._keys.adapters.mixed |= adapters
            # Stores of the step that has returned contain what it computed, and have not been sent yet.
            self._stores.cancel_all()
            self._renew_keys([it for it in self._requests.values() if _adapter_of(it.request) in adapters])

    # ---- weights ---------------------------------------------------------------------------------------------------

    def weights_change(self, what: str) -> None:
        """Stop loads and stores until the next reset. The weights are, or may be, different from now on.

        Args:
            what: what has changed them, for the log.
        """
        self.on_unknown_change()
        if self._is_off:
            return
        self._is_off = True
        logger.warning(
            "the weights have changed, or may have (%s). kvtier loads and stores nothing, and all prompts are "
            "computed, until a restart or reset_prefix_cache(reset_connector=True). After the reset, this engine uses "
            "new keys, so it shares no KV with other engines",
            what,
        )
        self._cancel_all()

    def stop(self, why: str) -> None:
        """Stop loads and stores until `go_on`.

        Args:
            why: what stops them, for `problem`.
        """
        self.has_run = self.has_run and bool(self.stopped_by)
        self.stopped_by = why
        self._cancel_all()

    def mixes_weights(self) -> None:
        """Store nothing that builds on KV in vLLM's own cache until vLLM resets it. Other weights computed that KV.

        If vLLM's own cache is empty, this has no effect.
        """
        self._has_mixed_weights = self._has_mixed_weights or not (self._own_is_empty or self._stores.pins.is_blank)

    def go_on(self, *, has_own_keys: bool, cleared_salts: Collection[str]) -> None:
        """Resume loads and stores, now that the workers have identified the current weights.

        Args:
            has_own_keys: whether other engines have other keys for all requests.
            cleared_salts: salts whose requests have other keys in other engines.
        """
        self.stopped_by = ""
        self._trusted_step = self._step + 1
        self._renew()
        self._is_reset = has_own_keys
        self._cleared_salts.update(cleared_salts)

    def _cancel_all(self) -> None:
        self._stores.cancel_all()
        self._stores.yield_idle(is_thorough=True)
        self._renew()
        self._restart_waiting()

    def _restart_waiting(self) -> None:
        """Restart requests that were offered a load and have not started since, and discard what their loads bring."""
        waiting = {name: it for name, it in self._requests.items() if it.match is not None and it.began_step is None}
        for tracked in waiting.values():
            if tracked.load is not None:
                self._loads.void(tracked.load)
        self._loads.landed.clear()
        self._restart(waiting)

    # ---- resets ----------------------------------------------------------------------------------------------------

    def own_reset_begins(self, is_running: bool) -> None:  # noqa: FBT001 - one fact
        """Return to vLLM all blocks that no running request uses, because vLLM is about to reset its own cache.

        Args:
            is_running: whether requests are running. If so, vLLM keeps its cache.
        """
        self._stores.yield_idle(is_thorough=True)
        if not is_running:
            for tracked in self._requests.values():
                if not tracked.request.num_in_flight_tokens:
                    self._stores.forget_offers(tracked)
            self._restart_waiting()

    def own_reset_ended(self, was_reset: bool) -> None:  # noqa: FBT001
        """Record whether vLLM has reset its own cache."""
        self._own_is_empty = was_reset
        self._has_mixed_weights = self._has_mixed_weights and not was_reset

    def reset(self) -> bool:
        """Make everything cached before now unreachable, because vLLM resets its caches.

        Return False after a change of weights if vLLM has kept its own cache, with KV of the earlier weights.
        """
        is_empty = self._own_is_empty or self._stores.pins.is_idle
        if self._is_off and not is_empty:
            return False
        self._is_off = False
        if is_empty:  # else a change that is noticed after the reset may have happened before it
            self.reset_step = self._trusted_step = self._step + 1
            self.has_undrafted = False
            self._keys.adapters.mixed.clear()
        self._renew()
        return True

    def clear(self, salt: str | None) -> None:
        """Renew the keys of open requests with this salt (``""`` for none, None for all). Any thread may call this.

        Later requests already have new keys. Open requests get new keys before their next lookup. All hints end now,
        because another salt may get a new pin before an idle engine's next step.
        """
        self.wishes.append(salt)
        self._session.forget_hints()

    def clear_wished(self) -> None:
        """Renew the keys of requests whose salts `clear` has queued."""
        while self.wishes:
            salt = self.wishes.popleft()
            if salt is None:
                self._renew()
            else:
                self._cleared_salts.add(salt)
                self._params.forget()
                self._log.salt_cleared(salt)
                self._renew_keys([it for it in self._requests.values() if (it.request.cache_salt or "") == salt])

    def item_doubted(self, identifier: str) -> None:
        """Stop caching open requests with this image or other item. vLLM may reuse another item's results."""
        requests = self._requests.values()
        self._renew_keys([it for it in requests if identifier in {item.identifier for item in it.request.mm_features}])

    def _renew(self) -> None:
        self._params.forget()
        self._session.forget_hints()
        self._is_reset = True
        self._cleared_salts.clear()
        self._log.keys_renewed()
        self._renew_keys(self._requests.values())

    def _renew_keys(self, requests: Iterable[TrackedRequest]) -> None:
        self._loads.landed.clear()
        for tracked in requests:
            tracked.announced_tokens = 0
            # Blocks that a running request has computed date from before the reset.
            has_old_blocks = tracked.request.num_computed_tokens > 0
            if tracked.load is not None:
                load = self._loads.void(tracked.load)
                # The request is computed again from the end of vLLM's own blocks. A load that has ended may already be
                # reported as complete: `Loads` sets its end time before it checks whether the load is void.
                has_old_blocks = load.match.plan.resident_tokens > 0 or load.ended_s > 0
            if tracked.answer is not None:
                self._session.release(tracked.question)
            tracked.renew(None if has_old_blocks else self.keys_of(tracked.request))


def _adapter_of(request: Request) -> int | None:
    return None if request.lora_request is None else request.lora_request.lora_int_id
