"""`Attachment`: generation with a cache that outlives the process. See `docs/guides/transformers.md`.

One call, step by step: read the options and the padding; name the chunks of each row's prompt; look up and load what is
known; let the library generate from there; hand the new chunks over for storing. Only the last step goes on after the
call, and it never delays one.
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

from kvtier.config.sections import Config
from kvtier.connect.transformers import identity
from kvtier.connect.transformers.arriving import MissingLayerError
from kvtier.connect.transformers.caches import Spans, empty_cache, recorded_spans
from kvtier.connect.transformers.call import Call, FirstToken, sequences_of
from kvtier.connect.transformers.opening import Opened, open_model
from kvtier.connect.transformers.prompt import checked_turn, prompt_of, session_names
from kvtier.connect.transformers.report import Report, Stored
from kvtier.connect.transformers.restore import Restored
from kvtier.connect.transformers.support import (
    accepts_padding,
    is_compiled,
)
from kvtier.connect.transformers.upstream import Argument, Model, Output
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest
from kvtier.runtime.base import Closed, Session
from kvtier.types import NextTurn, Place, Prefix, RequestId

logger = logging.getLogger(__name__)

_HANDOVER_DEADLINE_S = 5.0
"""How long a call that returns its cache waits until the copies out of it are made."""
_REOPEN_DEADLINE_S = 5.0
"""How long a changed model waits until what its former self had stored is on its way."""
_SAID_MAX = 100
_REPLACED = {"input_ids", "attention_mask", "past_key_values", "stopping_criteria"}
"""Arguments that a cached call passes on in a form of its own."""

Answer = TypeVar("Answer")


class Attachment:
    """A model with its cache; made by `attach`.

    One `generate` runs at a time: a second thread waits. `close` it, or use it as a context manager, so that what was
    stored reaches the disk; the end of the process does so too, as far as its deadline allows.
    """

    def __init__(
        self,
        model: Model,
        config: Config,
        *,
        checkpoint: Path | None,
        revision: str,
        epoch: int,
        held_calls: int,
        layerwise: bool,
    ) -> None:
        self.model = model
        self.config = config
        self.last = Report()
        """What the latest call did."""
        self._checkpoint = checkpoint
        self._revision = revision
        self._epoch = epoch
        self._held_calls = held_calls
        self._layerwise = layerwise
        self._accepts_padding = accepts_padding(model)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._before = Stored()
        """What was stored in sessions that are closed, and dropped before it reached one."""
        self._said: set[str] = set()
        self._is_closed = False
        self._refused: tuple[identity.Watch, str] | None = None
        """A changed model that could not be opened, and why."""
        self._opened: Opened | None = None
        self._open()

    # ---- for the user ----------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        return_report: bool = False,
        session: str | Sequence[str | None] | None = None,
        **arguments: Argument,
    ) -> Output:
        """What `model.generate` gives for the same arguments, with KV restored where there is some.

        Args:
            inputs: [rows, columns] tokens; also as `input_ids`. Padding is on the left, shown by `attention_mask`.
            generation_config: as for `model.generate`.
            session: name of the conversation, for `expects`; with several rows one for each. It goes into a recorded
                trace under another name.
            return_report: return (output, `Report`) instead of the output; `last` has the report in any case.
            arguments: as for `model.generate`.

        Nothing that goes wrong in kvtier makes the call fail: it is then computed as if kvtier were not there. A call
        that the cache cannot serve is computed likewise; `Report.uncached_reason` says why.
        """
        with self._lock:
            output = self._generate(inputs, generation_config, arguments, session)
            return (output, self.last) if return_report else output

    def store(
        self, input_ids: torch.Tensor, cache: DynamicCache, *, known_tokens: int = 0, session: str | None = None
    ) -> int:
        """Keep KV that was computed outside `generate`, such as an answer that a server has decoded by itself.

        Args:
            input_ids: [1, columns] tokens without padding.
            cache: the KV of some leading ones. Its tensors are copied in the background: nobody changes these columns
                in place before `flush`.
            known_tokens: leading tokens that have been stored; their whole chunks are left out.
            session: as for `generate`.

        Returns:
            Objects that were handed over. As with `generate`, nothing that goes wrong in kvtier makes the call fail;
            of a model with sliding windows nothing is kept, because its cache has only the last tokens.
        """
        with self._lock:
            count = self._guarded(lambda: self._store(input_ids, cache, known_tokens, session))
            return 0 if isinstance(count, str) else count

    def expects(self, session: str, next_turn: NextTurn | str | None) -> None:
        """Say who goes on with a conversation after its latest answer: the cache learns what that is worth.

        Args:
            session: as given to `generate`; one that nobody knows is ignored.
            next_turn: "tool" (a tool or an agent, within seconds), "user", "nobody" (it is over); None takes back what
                was said.

        Raises:
            ConfigError: `session` is no text, or `next_turn` none of these.
        """
        known = checked_turn(session, next_turn)

        def tell() -> str:
            if self._opened is not None:
                self._opened.session.expects(session, known)
            return ""

        with self._lock:
            self._guarded(tell)

    @property
    def stored(self) -> Stored:
        """What has become of all that was handed over for storing."""
        with self._lock:
            total = self._before
            if self._opened is None:
                return total
            waiting = self._opened.waiting
            waiting.take()
            held, dropped = total.held + waiting.held, total.dropped + waiting.dropped
            return Stored(held=held, dropped=dropped, pending_calls=waiting.storing_calls)

    @property
    def fingerprint(self) -> Fingerprint:
        """Who the model is; another fingerprint shares no KV."""
        return self._current().fingerprint

    @property
    def weights(self) -> WeightsDigest:
        """The digest of the weights, with the bytes and seconds that it cost."""
        return self._current().weights

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk: the grain in which KV is kept and restored."""
        return self._current().layout.chunk_tokens

    @property
    def session(self) -> Session:
        """The session underneath; another one after the model has changed."""
        return self._current().session

    def set_epoch(self, epoch: int) -> None:
        """Say that the weights were updated in place for the `epoch`-th time. KV of other epochs is not used any more.

        Raises:
            ConfigError: a negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch must be at least 0, got {epoch}")
        with self._lock:
            if epoch != self._epoch:
                self._epoch = epoch
                if not self._is_closed:
                    self._open()

    def flush(self, deadline_s: float = 30.0) -> bool:
        """Wait until all that was handed over has been copied to host memory; whether it was in time."""
        with self._lock:
            return self._opened is None or self._opened.waiting.stores(deadline_s)

    def close(self, deadline_s: float | None = None) -> Closed | None:
        """Bring what was stored to the lower tiers and end all threads. Twice is fine.

        Args:
            deadline_s: None takes ``limits.close_deadline_s``.

        Returns:
            How it ended; None when it was closed before. `generate` goes on working, without the cache.
        """
        with self._lock:
            self._is_closed = True
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
            self.model, self.config, checkpoint=self._checkpoint, revision=self._revision, epoch=self._epoch
        )
        self._finalizer = weakref.finalize(self, opened.session.close, self.config.limits.close_deadline_s)

    def _shut(self, deadline_s: float) -> Closed | None:
        opened, self._opened = self._opened, None
        if opened is None:
            return None
        self._finalizer.detach()
        until = time.monotonic() + deadline_s
        opened.waiting.stores(deadline_s)
        closed = opened.session.close(max(0.0, until - time.monotonic()))
        opened.waiting.forget()
        before, waiting = self._before, opened.waiting
        self._before = Stored(held=before.held + waiting.held, dropped=before.dropped + waiting.dropped)
        return closed

    def _current(self) -> Opened:
        if self._opened is None:
            raise ConfigError("the attachment is closed; attach the model again")
        return self._opened

    def _refreshed(self) -> "Opened | str":
        """The session for the model as it is now, for a model that has changed is another one; or why there is none."""
        opened = self._opened
        if opened is not None and not opened.watch.has_changed():
            return opened
        if opened is None and self._refused is not None and not self._refused[0].has_changed():
            return self._refused[1]
        logger.warning("%s has changed since it was attached; it is digested anew", type(self.model).__name__)
        if self._checkpoint is not None:
            logger.warning("%s may no longer tell its weights; from now on its tensors do", self._checkpoint)
            self._checkpoint = None
        try:
            self._open()
        except Exception as error:
            refusal = f"the model has changed and cannot be served any more: {error}"
            self._refused = (identity.Watch(self.model), refusal)
            raise
        return self._current()

    # ---- one call --------------------------------------------------------------------------------------------------

    def _generate(
        self,
        inputs: Argument,
        given: GenerationConfig | None,
        arguments: dict[str, Argument],
        session: str | Sequence[str | None] | None,
    ) -> Output:
        clock = FirstToken()
        call = self._guarded(lambda: self._prepare(inputs, given, arguments, session))
        if isinstance(call, str):
            return self._generate_uncached(call, clock, inputs, given, arguments)
        opened = self._current()
        # A streamer is given the prompt before the model has seen a layer; it must not be given it twice.
        is_layerwise = self._layerwise and arguments.get("streamer") is None and not is_compiled(self.model)
        restored = self._guarded(lambda: self._restore(opened, call, is_layerwise=is_layerwise))
        reason = restored if isinstance(restored, str) else ""
        found: Restored = Restored() if isinstance(restored, str) else restored
        del restored
        rest = {name: value for name, value in arguments.items() if name not in _REPLACED}

        def compute(cache: DynamicCache) -> Output:
            return self.model.generate(
                call.input_ids,
                generation_config=given,
                attention_mask=call.mask,
                past_key_values=cache,
                stopping_criteria=clock.among(arguments.get("stopping_criteria")),
                **rest,
            )

        rows = [row.asked for row in call.rows]
        cache = _handed_out(found, opened)
        try:
            output = compute(cache)
        except MissingLayerError as error:
            logger.info("%s; the call begins again", error)
            again = self._guarded(lambda: opened.restorer.resume(rows, call.input_ids.shape[1], found))
            reason = again if isinstance(again, str) else reason
            found = Restored() if isinstance(again, str) else again
            del again
            cache = _handed_out(found, opened)
            output = compute(cache)
        finally:
            unsettled = self._guarded(lambda: opened.restorer.finish(rows, found) or "")
        reason = reason or str(unsettled)
        report = self._guarded(partial(call.report, output, found, clock, reason))
        if isinstance(report, str):
            self.last = Report(uncached_reason=report)
            return output
        kept = self._guarded(lambda: self._keep(opened, call, output, cache, report))
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
        self._say(reason, "generated without the cache: %s (said once)")
        changed = dict(arguments)
        if arguments.get("custom_generate") is None:
            changed["stopping_criteria"] = clock.among(arguments.get("stopping_criteria"))
        output = self.model.generate(inputs, generation_config=given, **changed)
        prompt = inputs if inputs is not None else arguments.get("input_ids")
        mask = arguments.get("attention_mask")
        shown = mask if isinstance(mask, torch.Tensor) else prompt
        tokens = (
            0 if not isinstance(shown, torch.Tensor) else int((mask != 0).sum()) if shown is mask else shown.numel()
        )
        self.last = Report(
            prompt_tokens=tokens,
            computed_tokens=tokens,
            ttft_s=clock.ttft_s,
            wall_s=clock.elapsed_s,
            uncached_reason=reason,
        )
        return output

    def _prepare(
        self,
        inputs: Argument,
        given: GenerationConfig | None,
        arguments: dict[str, Argument],
        session: str | Sequence[str | None] | None = None,
    ) -> "Call | str":
        """All that is known before the first lookup; or why the call goes without the cache."""
        if self._is_closed:
            return "the attachment is closed"
        asked = prompt_of(self.model, inputs, given, arguments, accepts_padding=self._accepts_padding)
        if isinstance(asked, str):
            return asked
        names, reason = session_names(session, len(asked.padding))
        if reason:
            self._say(reason, "%s; ignored (said once)")
        opened = self._refreshed()
        if isinstance(opened, str):
            return opened
        return Call.begun(
            next(self._numbers),
            root=opened.root,
            chunk_tokens=opened.layout.chunk_tokens,
            extras=asked.extras,
            input_ids=asked.input_ids,
            mask=asked.mask,
            padding=asked.padding,
            end_tokens=asked.end_tokens,
            sessions=names,
            recorder=opened.recorder,
        )

    def _restore(self, opened: Opened, call: Call, *, is_layerwise: bool) -> Restored:
        opened.waiting.take()
        rows = [row.asked for row in call.rows]
        if not any(row.prefix.keys for row in rows):
            return Restored()
        return opened.restorer.restore(rows, call.input_ids.shape[1], is_layerwise=is_layerwise)

    def _keep(self, opened: Opened, call: Call, output: Output, cache: DynamicCache, report: Report) -> Report:
        """Hand the new chunks of each row over for storing; the report with how many there are."""
        sequences = sequences_of(output)
        spans = recorded_spans(opened.shape, cache, sequences.shape[1] - 1)
        if spans is None:
            # It threw ours away, and computed everything.
            return replace(
                report,
                restored_tokens=0,
                restored_by_source={},
                computed_tokens=report.prompt_tokens,
                uncached_reason="the model went on with a cache of its own",
            )
        groups = len(opened.shape.groups)
        ends = call.end_tokens
        new = [row.new_places(tokens, ends, groups) for row, tokens in zip(call.rows, sequences, strict=True)]
        count = self._hand_over(opened, call, new, spans)
        if not isinstance(output, torch.Tensor):
            # The caller gets the cache and may do with it as it likes: nothing is copied from it after that.
            opened.waiting.stores(_HANDOVER_DEADLINE_S, call.number)
        return replace(report, stored_chunks=count)

    def _store(self, input_ids: torch.Tensor, cache: DynamicCache, known_tokens: int, session: str | None) -> int:
        arguments = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 0}
        call = self._prepare(input_ids, None, arguments, session)
        if isinstance(call, str):
            self._say(call, "not stored: %s (said once)")
            return 0
        opened, tokens = self._current(), min(cache.get_seq_length(), input_ids.shape[1])
        spans = recorded_spans(opened.shape, cache, cache.get_seq_length())
        if spans is None or opened.shape.has_windows or len(call.rows) > 1:
            return 0
        new = call.rows[0].places(known_tokens // opened.layout.chunk_tokens, tokens, len(opened.shape.groups))
        return self._hand_over(opened, call, [new], spans)

    def _hand_over(self, opened: Opened, call: Call, new: Sequence[tuple[Prefix, list[Place]]], spans: Spans) -> int:
        """Begin to store the new places of each row; how many there are."""
        opened.waiting.take()
        is_full = opened.waiting.storing_calls >= self._held_calls
        if is_full:
            self._say(
                f"{self._held_calls} calls hold their tensors for stores", "%s (held_calls): no others are stored"
            )
        count = 0
        for number, (row, (prefix, places)) in enumerate(zip(call.rows, new, strict=True)):
            if is_full:
                self._before = replace(self._before, dropped=self._before.dropped + len(places))
            elif places:
                request = RequestId(f"{row.asked.name}/store")
                opened.waiting.store(
                    request,
                    call.number,
                    prefix,
                    places,
                    row=number,
                    pad=row.asked.pad,
                    spans=spans,
                    session=row.asked.session,
                )
                count += len(places)
        return count

    # ---- mishaps ---------------------------------------------------------------------------------------------------

    def _guarded(self, act: "Callable[[], Answer | str]") -> "Answer | str":
        """What `act` gives; when something goes wrong in it, what it was: a guest never makes the host fail."""
        try:
            return act()
        except Exception as error:
            reason = f"kvtier failed: {type(error).__name__}: {error}"
            logger.debug("%s", reason, exc_info=True)
            self._say(reason, "%s (said once; the traceback is logged at DEBUG); the call goes on without the cache")
            return reason

    def _say(self, reason: str, message: str) -> None:
        if reason not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(reason)
            logger.warning(message, reason)


def _handed_out(found: Restored, opened: Opened) -> DynamicCache:
    """The cache, which nothing else holds any more: its tensors go as soon as the library has made longer ones."""
    cache, found.cache = found.cache, None
    return cache or empty_cache(opened.shape)
