"""Responds to vLLM's calls to its workers that affect the weights or the KV's memory.

    CHANGES     methods that replace the weights in a known way. Nothing is loaded or stored from before the first call
                until the last one has returned. KV is then named after the new weights, by a digest of all of them or
                by random bytes. If these are the initial weights, it has its initial names again
    sleep       (and `discard`) stores end, and no copy touches blocks until the engine is awake. vLLM resets its caches
                when it falls asleep. kvtier undoes that reset at wake-up, because the weights' name distinguishes KV
    others      anything may be different afterwards, so kvtier is off until a cache reset

`docs/internals/vllm-inside.md` has the table of all methods.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from kvtier.connect.vllm.engine_hooks import WorkerCall, is_running
from kvtier.connect.vllm.requests.keys import KeyMaker
from kvtier.connect.vllm.scheduler.scheduler import Scheduler
from kvtier.runtime.session import Session

logger = logging.getLogger(__name__)

CHANGES: Mapping[str, bool] = MappingProxyType({
    "reload_weights": True,
    "reset_weights": True,
    "start_weight_update": False,
    "start_draft_weight_update": False,
    "update_weights": False,
    "finish_weight_update": True,
})  # fmt: skip
"""Methods that change the weights, and whether the weights are complete afterwards."""

SLEEPS = frozenset({"sleep", "discard"})
TAGS = frozenset({"weights", "kv_cache"})
"""Parts of an engine's memory that can sleep (`vllm.v1.executor.abstract.SLEEP_TAGS`)."""

DRAIN_S = 5.0
"""Seconds that vLLM's sleep waits for open stores. Stores that have not ended by then are lost."""


class WeightCalls:
    """Follows the calls of one engine. Only the scheduler's thread uses it.

    Args:
        ask: calls a method of `WorkerSide`, by name, in all workers, and returns their answers.
        scheduler: the scheduler, whose loads and stores stop and resume.
        keys: makes the keys, which contain the name of the weights.
        can_keep: whether sleep level 2 may keep all weights (`sleep_preserve_parameter_names`); False with adapters.
        lends_host: the session whose host memory is given back while vLLM sleeps. None if it is kept.
    """

    def __init__(
        self,
        ask: Callable[..., Sequence[Any]],
        scheduler: Scheduler,
        keys: KeyMaker,
        *,
        can_keep: bool,
        lends_host: Session | None,
    ) -> None:
        self._ask, self._scheduler, self._keys = ask, scheduler, keys
        self._invalidation = scheduler.invalidation
        self._invalidation.on_unknown_change = self.unknown_change
        self._can_keep = can_keep
        self._lender = lends_host
        self._asleep: frozenset[str] = frozenset()
        """The parts that sleep."""
        self._first: bytes | None = None
        """Digest of the weights before the first known change since the last unknown one; empty if there is no digest.
        None before a known change."""
        self._is_changing = False
        """Whether a known change has started and not ended, or the weights were discarded."""
        self._is_fenced = False
        """Whether no copy may touch the memory of KV and weights, and host memory may be given back."""
        self._is_host_free = False
        self._has_warned = False

    @contextmanager
    def around(self, call: WorkerCall) -> Generator[None]:
        """Stop loads and stores before a `call` that changes the weights or puts the engine to sleep.

        Resume them after the call that leaves the engine awake and the weights complete. An unknown call stops them
        until a cache reset. Errors in kvtier's own code propagate to the caller.
        """
        name, asleep = call.method, self._asleep
        if not call.is_plain or not (name in CHANGES or name in SLEEPS or name == "wake_up"):
            self._invalidation.weights_change(f"{name}()")
            yield
            return
        if name in CHANGES:
            self._invalidation.stop(f"the weights are being changed: {name}()")
            self._know_first()
            self._is_changing = True
        elif name in SLEEPS:
            self._before_sleep(call)
        try:
            yield
        except BaseException:
            if name == "sleep":  # vLLM counts as awake, and any of its memory may be lost
                self._asleep, self._is_changing = asleep, True
                self._invalidation.weights_change("sleep() has failed")
            raise
        if name == "reload_weights":  # the workers have reset it, too
            self.encoder_was_reset()
        if name == "wake_up":
            self._after_wake(frozenset(call.argument("tags") or TAGS))
        elif CHANGES.get(name) and "weights" not in self._asleep:
            self._is_changing = False
            self._name(self._digest("digest_weights"))
        self._go_on()

    def unknown_change(self) -> None:
        """Separate later KV from earlier KV, because the weights have changed or may have."""
        self._keys.unknown_weights()
        self._first = None
        self._doubt_items()

    def encoder_was_reset(self) -> None:
        """Trust vLLM's encoded images and other items from now on, because only the present weights encode them."""
        self._invalidation.is_encoder_empty = True
        self._keys.has_old_items = False

    def _doubt_items(self) -> None:
        self._keys.has_old_items = self._keys.has_old_items or not self._invalidation.is_encoder_empty

    def was_reset(self) -> bool:
        """Record a reset of the connector's cache. Return whether it is part of vLLM's sleep.

        With any other reset, the user declares the weights complete.
        """
        if is_running("sleep", "release_kv_cache_memory"):
            self._keys.reset_was_sleep()
            return True
        if self._is_changing and not self._asleep:
            self._is_changing = False
            self._name(None)
            self._go_on()
        return False

    def _before_sleep(self, call: WorkerCall) -> None:
        if is_running("pause_complete"):  # the reset came when the last request had ended
            self._keys.reset_was_sleep()
        self._scheduler.drain(DRAIN_S)
        self._invalidation.stop("vLLM sleeps")
        tags = TAGS if call.method == "sleep" else frozenset(call.argument("tags", ()))
        if "weights" in tags - self._asleep and (call.method != "sleep" or call.argument("level", 1) != 1):
            self._know_first()
            self._is_changing = True
        self._asleep |= tags
        self._is_fenced = True
        self._ask("sleep")
        if self._lender is not None and not self._is_host_free:
            self._give_host_back(self._lender)

    def _give_host_back(self, lender: Session) -> None:
        kept: list[tuple[int, int]] = []
        self._is_host_free = lender.emptied(lambda: kept.extend(self._ask("free_host")), DRAIN_S)
        if not self._is_host_free:
            logger.warning(
                "kvtier keeps its host memory while vLLM sleeps: objects in it were still being written after %g s",
                DRAIN_S,
            )
        shared, locked = max((it[0] for it in kept), default=0), sum(it[1] for it in kept)
        if (shared or locked) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "while vLLM sleeps, kvtier keeps %d bytes of host memory that ranks share, and %d bytes that may still "
                "be page-locked (logged once)",
                *(shared, locked),
            )

    def _after_wake(self, tags: frozenset[str]) -> None:
        self._asleep -= tags
        if self._asleep:
            return
        self._open()
        if self._is_changing and self._can_keep and self._first and self._digest("digest_weights") == self._first:
            self._is_changing = False

    def _open(self) -> None:
        """Let copies use all memory again."""
        if self._lender is not None and self._is_host_free:
            self._ask("take_host")
            self._is_host_free = self._lender.is_lent = False
        self._ask("wake_up")
        self._is_fenced = False

    def _go_on(self) -> None:
        if self._asleep or self._is_changing or not self._invalidation.stopped_by:
            return
        if self._is_fenced:  # vLLM's sleep has failed, and the weights are complete
            self._open()
        self._keys.awake()
        has_own, salts = self._keys.own
        self._invalidation.go_on(has_own_keys=has_own, cleared_salts=salts)

    def _know_first(self) -> None:
        """Digest the weights before their first change."""
        if self._first is None:
            can_read = "weights" not in self._asleep and not self._is_changing
            self._first = (self._digest("digest_unchanged") if can_read else None) or b""

    def _digest(self, how: str) -> bytes | None:
        """Return a digest of the weights of all workers, or None if a worker has none."""
        found = self._ask(how)
        return None if None in found else hashlib.sha256(b"".join(found)).digest()

    def _name(self, digest: bytes | None) -> None:
        """Name the weights by their digest from now on, or by random bytes if it is None."""
        before = self._keys.weights
        if digest is not None and digest == self._first:
            self._keys.weights = b""
        else:
            self._keys.weights = digest or secrets.token_bytes(hashlib.sha256().digest_size)
        self._keys.are_weights_private = digest is None
        if self._keys.weights != before or self._invalidation.has_run:
            self._invalidation.mixes_weights()
            self._doubt_items()
        logger.info(
            "the weights are now %s; KV stored with the previous weights %s",
            "those of the start" if not self._keys.weights else (digest or b"").hex()[:16] or "not identified",
            "can be loaded" if self._keys.weights == before else "is not used",
        )
