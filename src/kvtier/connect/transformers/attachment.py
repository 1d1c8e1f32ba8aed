"""Gives `generate` a cache that outlives the process (`attach`, `Attachment`). See `docs/transformers.md`.

A call reads the options and the padding, and computes the chunk keys of each row. It then looks up and loads the known
prefix. The library generates from there, and new chunks are stored. Only the store continues after the call.
"""

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import GenerationConfig

from kvtier.config.loader import TIERS, load, override
from kvtier.config.sections import Config
from kvtier.connect.transformers.caches import Argument, Model, Output, Spans, empty_cache, recorded_spans
from kvtier.connect.transformers.call import (
    Call,
    CallReport,
    FirstToken,
    StoreCounts,
    checked_turn,
    conversation_names,
    prompt_of,
    sequences_of,
)
from kvtier.connect.transformers.open import ModelSession, open_model
from kvtier.connect.transformers.restore import RestoreResult
from kvtier.connect.transformers.support import accepts_padding, check_model
from kvtier.errors import ConfigError, described
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest
from kvtier.runtime.session import Closed, Session
from kvtier.types import NextTurn, Place, Prefix

logger = logging.getLogger(__name__)

_HANDOVER_DEADLINE_S = 5.0
"""Maximum seconds that a call waits for copies of its chunks before it returns its cache."""
_REOPEN_DEADLINE_S = 5.0
"""Maximum seconds that a changed model waits for pending writes of its previous session."""
_LOGGED_MAX = 100
_REPLACED = {"input_ids", "attention_mask", "past_key_values", "stopping_criteria"}
"""Arguments that a cached call replaces."""
_ORIGIN = "a keyword of attach"

T = TypeVar("T")


def attach(
    model: Model,
    directory: str | Path | None = None,
    *,
    config: Config | None = None,
    checkpoint: str | Path | None = None,
    revision: str = "",
    held_calls: int = 4,
    **settings: object,
) -> "Attachment":
    """Give `model` a KV cache that outlives calls and processes.

    Args:
        model: a decoder-only model of the Transformers library, in evaluation mode.
        directory: where KV is stored on disk, as in ``tiers=["directory:PATH"]``. None uses the tiers in the settings.
        config: all settings. None reads the file that ``KVTIER_CONFIG`` names and the ``KVTIER_…`` environment.
        checkpoint: file or directory from which the model's current weights were loaded. Its digest is cached across
            processes. Without it, every attach digests the tensors in memory.
        revision: name of the weights. Models with different revisions share nothing.
        held_calls: how many calls may keep their tensors while their KV is copied to host memory. Further calls are
            not stored.
        settings: single settings by section and name, such as ``host__capacity_bytes="8GiB"``; ``tiers``, a list of
            strings or tables; or values of one tier, such as ``tiers__disk__capacity_bytes="200GiB"``.

    Raises:
        UnsupportedModelError: the model cannot be served correctly. The message says which models are allowed.
        ConfigError: a setting is unknown or invalid, or names a path that cannot be used.
    """
    checked = check_model(model)
    if held_calls < 1:
        raise ConfigError(f"held_calls must be at least 1, got {held_calls}")
    return Attachment(
        checked,
        _settings(config, directory, settings),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        revision=revision,
        held_calls=held_calls,
    )


def _settings(config: Config | None, directory: Path | str | None, settings: dict[str, object]) -> Config:
    """Return the settings of one attachment: `config`, overridden by `directory` and `settings`.

    Raises:
        ConfigError: a name is unknown, or a value is invalid.
    """
    named = {name.replace("__", "."): value for name, value in settings.items()}
    if directory is not None:
        if TIERS in named:
            raise ConfigError("directory and tiers are both given; allowed: one of them")
        named[TIERS] = [{"kind": "directory", "path": Path(directory)}]
    return override(load().config if config is None else config, named.items(), _ORIGIN)


class Attachment:
    """A model with its cache, returned by `attach`.

    Only one `generate` runs at a time; a second thread waits. `close` writes stored chunks to the lower tiers. So do
    the exit of the context manager and the end of the process, with the same deadline.
    """

    def __init__(
        self,
        model: Model,
        config: Config,
        *,
        checkpoint: Path | None,
        revision: str,
        held_calls: int,
    ) -> None:
        self.model = model
        self.config = config
        self.last = CallReport()
        """The report of the latest call."""
        self._checkpoint = checkpoint
        self._revision = revision
        self._held_calls = held_calls
        self._accepts_padding = accepts_padding(model)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._earlier = StoreCounts()
        """Counts of closed sessions, plus the objects dropped because of `held_calls`."""
        self._logged: set[str] = set()
        self._ended = ""
        """Why calls do not use the cache; empty while the cache is open."""
        self._opened: ModelSession | None = None
        self._open()

    # ---- for the user ----------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        return_report: bool = False,
        session: str | Sequence[str | None] | None = None,
        store: bool = True,
        **arguments: Argument,
    ) -> Output:
        """Return what `model.generate` returns for the same arguments, computed from restored KV if possible.

        Args:
            inputs: [rows, columns] tokens, also accepted as `input_ids`. Padding is on the left; `attention_mask` marks
                it.
            generation_config: see `model.generate`.
            session: name of the conversation, for `expects`; a list if there are several rows. A recorded trace
                contains only a digest of it.
            store: False keeps tokens, keys and names of the call out of tiers, host memory, traces and logs. `session`
                then has no effect. The call may still restore KV that others stored. Any value except True counts as
                False.
            return_report: whether to return (output, `CallReport`). `last` has the report in either case.
            arguments: see `model.generate`.

        An error inside kvtier never makes the call fail. The model then computes without the cache, as in a call that
        the cache cannot serve. `CallReport.uncached_reason` gives the reason.
        """
        with self._lock:
            output = self._generate(inputs, generation_config, arguments, session, opts_out=self._opts_out(store))
            return (output, self.last) if return_report else output

    def store(
        self, input_ids: torch.Tensor, cache: DynamicCache, *, known_tokens: int = 0, session: str | None = None
    ) -> int:
        """Store KV that was computed outside `generate`, for example by a server's own decode loop.

        Args:
            input_ids: [1, columns] tokens without padding.
            cache: KV of the leading tokens. Its tensors are copied in the background. Do not change these columns in
                place before `flush`.
            known_tokens: number of leading tokens that are already stored. Their full chunks are skipped.
            session: see `generate`.

        Returns:
            Number of objects passed on for storing; 0 after an error inside kvtier. Models with sliding windows store
            nothing, because their cache holds only the last tokens.
        """
        with self._lock:
            count = self._guarded(lambda: self._store(input_ids, cache, known_tokens, session))
            return 0 if isinstance(count, str) else count

    def expects(self, session: str, next_turn: NextTurn | str | None) -> None:
        """Declare where a conversation's next turn comes from. The cache learns how soon turns from each source follow.

        Args:
            session: the name passed to `generate`. An unknown session is ignored.
            next_turn: "tool" (a tool or an agent, within seconds), "user", or "nobody" (the conversation is over).
                None withdraws the declaration.

        Raises:
            ConfigError: `session` is not a string, or `next_turn` is unknown.
        """
        known = checked_turn(session, next_turn)

        def announce() -> str:
            if self._opened is not None:
                self._opened.session.expects(session, known)
            return ""

        with self._lock:
            self._guarded(announce)

    @property
    def stored(self) -> StoreCounts:
        """The results of all stores so far."""
        with self._lock:
            total = self._earlier
            if self._opened is None:
                return total
            requests = self._opened.requests
            requests.poll()
            held, dropped = total.held + requests.held, total.dropped + requests.dropped
            return StoreCounts(held=held, dropped=dropped, pending_calls=requests.storing_calls)

    @property
    def fingerprint(self) -> Fingerprint:
        """The model's identity. Models with different fingerprints share no KV."""
        return self._current().fingerprint

    @property
    def weights(self) -> WeightsDigest:
        """The digest of the weights, with the bytes read and the seconds taken."""
        return self._current().weights

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens per chunk, the unit in which KV is stored and restored."""
        return self._current().layout.chunk_tokens

    @property
    def session(self) -> Session:
        """The underlying session. A new session replaces it after the model has changed."""
        return self._current().session

    def flush(self, deadline_s: float = 30.0) -> bool:
        """Wait until all KV that is being stored has been copied to host memory or dropped.

        Return False if the deadline passes first.
        """
        with self._lock:
            return self._opened is None or self._opened.requests.wait_for_stores(deadline_s)

    def close(self, deadline_s: float | None = None) -> Closed | None:
        """Write stored chunks to the lower tiers and end all threads. `generate` then works without the cache.

        Args:
            deadline_s: seconds that this may take; None means ``limits.close_deadline_s``.

        Returns:
            The result of closing the session; None if it was already closed.
        """
        with self._lock:
            self._ended = "the attachment is closed"
            return self._shut(self.config.limits.close_deadline_s if deadline_s is None else deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._shut(_REOPEN_DEADLINE_S)
        self._opened = opened = open_model(
            self.model, self.config, checkpoint=self._checkpoint, revision=self._revision
        )
        self._finalizer = weakref.finalize(self, opened.session.close, self.config.limits.close_deadline_s)

    def _shut(self, deadline_s: float) -> Closed | None:
        opened, self._opened = self._opened, None
        if opened is None:
            return None
        self._finalizer.detach()
        until = time.monotonic() + deadline_s
        requests = opened.requests
        requests.wait_for_stores(deadline_s)
        closed = opened.session.close(max(0.0, until - time.monotonic()))
        requests.release_all()
        self._earlier = StoreCounts(
            held=self._earlier.held + requests.held, dropped=self._earlier.dropped + requests.dropped
        )
        return closed

    def _current(self) -> ModelSession:
        if self._opened is None:
            raise ConfigError("the attachment is closed; attach the model again")
        return self._opened

    def _refreshed(self) -> ModelSession:
        """Return the session, reopened if the model has changed."""
        opened = self._current()
        if not opened.watch.has_changed():
            return opened
        logger.warning(
            "%s has changed since it was attached; its weights are digested again", type(self.model).__name__
        )
        if self._checkpoint is not None:
            logger.warning("%s may no longer match the weights; the tensors are digested instead", self._checkpoint)
            self._checkpoint = None
        try:
            self._open()
        except Exception as error:
            self._ended = f"the model has changed and can no longer be served: {error}; attach it again"
            raise
        return self._current()

    # ---- one call --------------------------------------------------------------------------------------------------

    def _generate(
        self,
        inputs: Argument,
        given: GenerationConfig | None,
        arguments: dict[str, Argument],
        session: str | Sequence[str | None] | None,
        *,
        opts_out: bool,
    ) -> Output:
        clock = FirstToken()
        names = None if opts_out else session
        call = self._guarded(lambda: self._prepare(inputs, given, arguments, names, opts_out=opts_out))
        if isinstance(call, str):
            if not opts_out:  # a reason may contain an argument of the call
                self._log_once(call, "a call did not use the cache: %s (logged once)")
            return self._generate_uncached(call, clock, inputs, given, arguments)
        opened, columns = self._current(), call.prompt.input_ids.shape[1]
        rows = [row.request for row in call.rows]

        def restore() -> RestoreResult:
            opened.requests.poll()
            if not any(row.prefix.keys for row in rows):
                return RestoreResult()
            return opened.restorer.restore(rows, columns)

        restored = self._guarded(restore)
        reason = restored if isinstance(restored, str) else ""
        found: RestoreResult = RestoreResult() if isinstance(restored, str) else restored
        cache = empty_cache(opened.shape) if found.cache is None else found.cache
        rest = {name: value for name, value in arguments.items() if name not in _REPLACED}
        output = self.model.generate(
            call.prompt.input_ids,
            generation_config=given,
            attention_mask=call.prompt.mask,
            past_key_values=cache,
            stopping_criteria=clock.among(arguments.get("stopping_criteria")),
            **rest,
        )
        report = self._guarded(partial(call.report, output, found, clock, reason))
        if isinstance(report, str):
            self.last = CallReport(uncached_reason=report)
            return output
        kept = self._guarded(lambda: self._store_call(opened, call, output, cache, report))
        self.last = replace(report, uncached_reason=kept) if isinstance(kept, str) else kept
        return output

    def _generate_uncached(
        self,
        reason: str,
        clock: FirstToken,
        inputs: Argument,
        given: GenerationConfig | None,
        arguments: dict[str, Argument],
    ) -> Output:
        changed = dict(arguments)
        if arguments.get("custom_generate") is None:
            changed["stopping_criteria"] = clock.among(arguments.get("stopping_criteria"))
        output = self.model.generate(inputs, generation_config=given, **changed)
        prompt = inputs if inputs is not None else arguments.get("input_ids")
        mask = arguments.get("attention_mask")
        if isinstance(mask, torch.Tensor):
            tokens = int((mask != 0).sum())
        else:
            tokens = prompt.numel() if isinstance(prompt, torch.Tensor) else 0
        self.last = CallReport(
            prompt_tokens=tokens,
            computed_tokens=tokens,
            ttft_s=clock.ttft_s,
            wall_s=clock.elapsed_s,
            uncached_reason=reason,
        )
        return output

    def _opts_out(self, store: object) -> bool:
        """Return whether nothing of a call may be stored."""
        if not isinstance(store, bool):
            what = f"store is of type {type(store).__name__}; allowed: True, False"
            self._log_once(what, "%s; nothing of the call is stored (logged once)")
        return store is not True

    def _prepare(
        self,
        inputs: Argument,
        given: GenerationConfig | None,
        arguments: dict[str, Argument],
        session: str | Sequence[str | None] | None = None,
        *,
        opts_out: bool = False,
    ) -> "Call | str":
        """Return the call, ready for the first lookup, or the reason why it does not use the cache."""
        if self._ended:
            return self._ended
        prompt = prompt_of(self.model, inputs, given, arguments, accepts_padding=self._accepts_padding)
        if isinstance(prompt, str):
            return prompt
        names, problem = conversation_names(session, len(prompt.padding))
        if problem:
            self._log_once(problem, "%s; it is ignored (logged once)")
        opened = self._refreshed()
        recorder, chunk_tokens = None if opts_out else opened.recorder, opened.layout.chunk_tokens
        call = Call.begun(next(self._numbers), prompt, opened.root, chunk_tokens, names, recorder)
        call.opts_out = opts_out
        return call

    def _store_call(
        self, opened: ModelSession, call: Call, output: Output, cache: DynamicCache, report: CallReport
    ) -> CallReport:
        """Store the new chunks of each row, and return the report with their number."""
        sequences = sequences_of(output)
        spans = recorded_spans(opened.shape, cache, sequences.shape[1] - 1)
        if spans is None:
            # The model discarded the restored cache and computed everything.
            return replace(
                report,
                restored_tokens=0,
                restored_by_source={},
                computed_tokens=report.prompt_tokens,
                uncached_reason="the model replaced the cache with its own",
            )
        if call.opts_out:
            return report
        groups, ends = len(opened.shape.groups), call.prompt.end_tokens
        new = [row.new_places(tokens, ends, groups) for row, tokens in zip(call.rows, sequences, strict=True)]
        count = self._begin_stores(opened, call, new, spans)
        if not isinstance(output, torch.Tensor):
            # The caller gets the cache and may change it, so copies must end first.
            opened.requests.wait_for_stores(_HANDOVER_DEADLINE_S, call.number)
        return replace(report, stored_chunks=count)

    def _store(self, input_ids: torch.Tensor, cache: DynamicCache, known_tokens: int, session: str | None) -> int:
        arguments = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 0}
        call = self._prepare(input_ids, None, arguments, session)
        if isinstance(call, str):
            self._log_once(call, "the KV of a call was not stored: %s (logged once)")
            return 0
        opened, tokens = self._current(), min(cache.get_seq_length(), input_ids.shape[1])
        spans = recorded_spans(opened.shape, cache, cache.get_seq_length())
        if spans is None or opened.shape.has_windows or len(call.rows) > 1:
            return 0
        new = call.rows[0].places(known_tokens // opened.layout.chunk_tokens, tokens, len(opened.shape.groups))
        return self._begin_stores(opened, call, [new], spans)

    def _begin_stores(
        self, opened: ModelSession, call: Call, new: Sequence[tuple[Prefix, list[Place]]], spans: Spans
    ) -> int:
        """Start storing the new places of each row. Return how many were passed on; 0 if too many calls are open."""
        opened.requests.poll()
        is_full = opened.requests.storing_calls >= self._held_calls
        if is_full:
            self._log_once(
                f"{self._held_calls} calls are still being stored",
                "%s (held_calls), so the KV of another call was not stored (logged once)",
            )
        count = 0
        for number, (row, (prefix, places)) in enumerate(zip(call.rows, new, strict=True)):
            if is_full:
                self._earlier = replace(self._earlier, dropped=self._earlier.dropped + len(places))
            elif places:
                opened.requests.store(row.request, number, call.number, prefix, places, spans)
                count += len(places)
        return count

    # ---- errors ----------------------------------------------------------------------------------------------------

    def _guarded(self, act: "Callable[[], T | str]") -> "T | str":
        """Return the result of `act`, or a description of its exception, because kvtier must never make a call fail."""
        try:
            return act()
        except Exception as error:
            reason = f"kvtier failed: {described(error)}"
            logger.debug("%s", reason, exc_info=True)
            self._log_once(reason, "%s; the call goes on without the cache (logged once; traceback at DEBUG)")
            return reason

    def _log_once(self, reason: str, message: str) -> None:
        if reason not in self._logged and len(self._logged) < _LOGGED_MAX:
            self._logged.add(reason)
            logger.warning(message, reason)
