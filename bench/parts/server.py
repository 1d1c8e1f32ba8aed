"""A small server around one Transformers model. Imports torch.

One loop in one thread. Prompts wait in order of arrival. Between two decode steps one prompt is prefilled whole; then
it decodes with the others, one token each per step. KV of finished turns stays on the device while the budget allows.
Eviction is LRU, by whole conversations; the system prompt is never evicted. With kvtier, a prompt whose KV was evicted
goes through `Attachment.generate`. In every arm KV on the device is reused, and the tokens of a finished turn are
stored.

This is not vLLM: no pages, no chunked prefill beside decoding, no CUDA graphs, and no prefix sharing on the device
except the system prompt. Its figures compare arms only.

A decode step runs all rows as one batch, except attention. Transformers pads a batch to one length and would copy all
KV at every token; here each row has room for its answer, and a step writes one column. `attending` replaces
Transformers' attention function for these steps and passes every other call on.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from bench.parts.turns import TurnSample
from bench.parts.workload import Conversation, Turn, Workload
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.connect.transformers import Attachment
from kvtier.connect.transformers.call import FirstToken
from kvtier.errors import ConfigError

ATTENTION = "sdpa"
"""The attention implementation that `attending` replaces."""
_IDLE_S = 0.002
_FLUSH_S = 300.0

Answers = dict[tuple[int, int], list[int]]
"""(user, turn) to the tokens of the answer."""


class GrowingKv:
    """The KV of one conversation on the device, with room for more columns.

    Args:
        config: the model's.
        cache: Transformers' cache of one row, which is copied.
        room: columns that may be added.
    """

    def __init__(self, config: Any, cache: DynamicCache, room: int) -> None:  # noqa: ANN401 - depends on the model
        self._config = config
        self.length = cache.get_seq_length()
        """Columns that hold KV."""
        self.capacity = self.length + room
        layers = cast("Sequence[Any]", cache.layers)
        self.layers = [(self._longer(layer.keys), self._longer(layer.values)) for layer in layers]

    def _longer(self, states: torch.Tensor) -> torch.Tensor:
        rows, heads, _, dim = states.shape
        longer = torch.empty((rows, heads, self.capacity, dim), dtype=states.dtype, device=states.device)
        longer[:, :, : self.length] = states
        return longer

    def view(self) -> DynamicCache:
        """Transformers' cache over the same memory; appending to it makes new tensors."""
        cache = DynamicCache(config=self._config)
        layers = cast("Sequence[Any]", cache.layers)
        for layer, (keys, values) in zip(layers, self.layers, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, : self.length], values[:, :, : self.length]
        return cache


@dataclass(frozen=True, slots=True)
class _RowStates:
    """K or V of all rows of a step, each [1, heads, columns, dim]."""

    rows: list[torch.Tensor]


class _StepCache(DynamicCache):
    """The cache argument of a step: writes the new column of each row and returns all rows."""

    def __init__(self, rows: Sequence[GrowingKv]) -> None:
        super().__init__()
        self._rows = rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - Transformers'
        """Write the new column of each row."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for number, row in enumerate(self._rows):
            row_keys, row_values = row.layers[layer_idx]
            row_keys[0, :, row.length] = key_states[number, :, 0]
            row_values[0, :, row.length] = value_states[number, :, 0]
            keys.append(row_keys[:, :, : row.length + 1])
            values.append(row_values[:, :, : row.length + 1])
        return _RowStates(keys), _RowStates(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - Transformers'
        """The longest row; positions are passed explicitly, so no length is derived from it."""
        return max(row.length for row in self._rows)


@contextmanager
def attending() -> Generator[None]:
    """Replace Transformers' attention function for the rows of a step."""
    functions = cast("Any", ALL_ATTENTION_FUNCTIONS)
    own: Callable[..., Any] = functions[ATTENTION]

    def attention(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **more: Any) -> Any:  # noqa: ANN401
        if not isinstance(key, _RowStates):
            return own(module, query, key, value, mask, **more)
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                query[number : number + 1],
                keys,
                values,
                scale=more.get("scaling"),
                enable_gqa=keys.shape[1] != query.shape[1],
            )
            for number, (keys, values) in enumerate(zip(key.rows, value.rows, strict=True))
        ]
        return torch.cat(parts).transpose(1, 2).contiguous(), None

    functions[ATTENTION] = attention
    try:
        yield
    finally:
        del functions[ATTENTION]


def step(model: Any, rows: Sequence[GrowingKv], tokens: Sequence[int]) -> list[int]:  # noqa: ANN401 - depends on its class
    """Feed each row its last token; returns the next token of each, greedily. Within `attending`."""
    device = model.device
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=torch.tensor([row.length for row in rows], device=device)[:, None],
            # Passed on unchanged; every row attends to all of its own columns.
            attention_mask=torch.ones((len(rows), 1, 1, 1), dtype=torch.bool, device=device),
            past_key_values=_StepCache(rows),
            use_cache=True,
        )
        following: list[int] = output.logits[:, -1].argmax(-1).tolist()
    for row in rows:
        row.length += 1
    return following


@dataclass(slots=True)
class _Talk:
    """State of one conversation."""

    user: int
    conversation: Conversation
    tokens: list[int]
    """Prompts and answers so far."""
    place: int = 0
    """Number of the current turn."""
    row: GrowingKv | None = None
    """Its KV, while on the device."""
    stored_tokens: int = 0
    """Leading tokens passed to kvtier."""
    used: int = 0
    """Counter value at the end of its last turn, for LRU."""
    arrived_s: float = 0.0
    started_s: float = 0.0
    first_s: float = 0.0
    answer: list[int] = field(default_factory=list[int])
    prompt_tokens: int = 0
    resident_tokens: int = 0
    restored: dict[str, int] = field(default_factory=dict[str, int])
    load_s: float = 0.0
    stored_chunks: int = 0

    @property
    def turn(self) -> Turn:
        """The current turn."""
        return self.conversation.turns[self.place]

    @property
    def is_over(self) -> bool:
        """Whether all turns have ended."""
        return self.place == len(self.conversation.turns)


class Server:
    """Serves one workload with one arm.

    Args:
        model: of Transformers, with SDPA attention.
        budget_tokens: KV budget of the device, in tokens.
        kv: the attachment of the arm; None recomputes evicted KV.
        at_once: most conversations that decode together.
        expected: answers of the first arm. A different answer is counted, and the conversation continues with the
            expected one, so that all arms get the same prompts. None: this is the first arm.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - depends on its class
        budget_tokens: int,
        kv: Attachment | None,
        *,
        at_once: int,
        expected: Answers | None,
    ) -> None:
        implementation = getattr(model.config, "_attn_implementation", None)
        if implementation != ATTENTION:
            raise ConfigError(f"the model's attention is {implementation}; allowed: {ATTENTION}")
        self._model, self._kv = model, kv
        self._budget_tokens, self._at_once = budget_tokens, at_once
        self._expected = expected
        self._talks: list[_Talk] = []
        self._waiting: deque[_Talk] = deque()
        self._running: list[_Talk] = []
        self._coming: list[_Talk] = []
        self._counter = 0
        self._began = 0.0
        self.samples: list[TurnSample] = []
        self.answers: Answers = {}
        self.evictions = 0
        self.seconds = 0.0

    def serve(self, load: Workload) -> None:
        """Serve all turns.

        Raises:
            ConfigError: one conversation exceeds the budget.
        """
        most = len(load.system) + max(it.tokens for it in load.conversations)
        if len(load.system) + most > self._budget_tokens:
            raise ConfigError(
                f"a conversation grows to {most} tokens, and the device holds {self._budget_tokens} including the "
                "system prompt; allowed: a larger --kv-budget, or shorter conversations"
            )
        with attending():
            self._begin(load)
            try:
                while self._coming or self._waiting or self._running:
                    self._turn()
            finally:
                self.seconds = self._now()
                self._talks.clear()

    def settle(self) -> None:
        """Wait until kvtier has stored everything; not part of the measured time."""
        if self._kv is not None:
            self._kv.flush(_FLUSH_S)

    def _begin(self, load: Workload) -> None:
        system: list[int] = load.system.tolist()
        # One extra token, discarded: `generate` needs at least one token without KV.
        prompt = torch.tensor([[*system, 1]], device=self._model.device)
        output = self._model.generate(prompt, **_arguments(prompt))
        self._system = GrowingKv(self._model.config, output.past_key_values, 0)
        self._system.length = len(system)
        if self._kv is not None:
            self._kv.store(torch.tensor([system]), self._system.view())
            self._kv.flush(_FLUSH_S)
        self._talks = [_Talk(user, it, list(system)) for user, it in enumerate(load.conversations)]
        self._began = time.perf_counter()
        for talk in self._talks:
            talk.arrived_s = talk.turn.gap_s
        self._coming = list(self._talks)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Queue arrivals, prefill one prompt, decode one token of each."""
        now = self._now()
        self._coming.sort(key=lambda it: it.arrived_s)
        while self._coming and self._coming[0].arrived_s <= now:
            self._waiting.append(self._coming.pop(0))
        if self._waiting and len(self._running) < self._at_once and self._make_room(self._waiting[0]):
            self._prefill(self._waiting.popleft())
        if self._running:
            self._decode()
        elif not self._waiting and self._coming:
            time.sleep(min(_IDLE_S, max(0.0, self._coming[0].arrived_s - self._now())))

    def _make_room(self, talk: _Talk) -> bool:
        """Evict until the KV of this turn fits; False if it does not."""
        needed = len(talk.tokens) + len(talk.turn.question) + talk.turn.answer_tokens
        others = [it for it in self._talks if it.row is not None and it is not talk]
        used = self._system.length + sum(it.row.capacity for it in others if it.row is not None)
        idle = sorted((it for it in others if it not in self._running), key=lambda it: it.used)
        for other in idle:
            if used + needed <= self._budget_tokens:
                break
            assert other.row is not None
            used -= other.row.capacity
            other.row = None
            self.evictions += not other.is_over  # a finished conversation is never needed again
        return used + needed <= self._budget_tokens

    def _prefill(self, talk: _Talk) -> None:
        talk.started_s = self._now()
        talk.tokens += talk.turn.question.tolist()
        talk.prompt_tokens = len(talk.tokens)
        talk.restored, talk.load_s, talk.stored_chunks = {}, 0.0, 0
        prompt = torch.tensor([talk.tokens], device=self._model.device)
        began = time.perf_counter()
        if talk.row is None and self._kv is not None:
            output, ttft_s = self._through_kvtier(talk, prompt, self._kv)
        else:
            row = talk.row or self._system
            talk.resident_tokens, talk.row = row.length, None
            output, ttft_s = self._computed(prompt, row.view())
        talk.first_s = began - self._began + ttft_s
        # The first token of the answer has no KV yet.
        talk.row = GrowingKv(self._model.config, output.past_key_values, talk.turn.answer_tokens)
        talk.answer = output.sequences[0, -1:].tolist()
        self._running.append(talk)
        self._end([talk])

    def _computed(self, prompt: torch.Tensor, cache: DynamicCache) -> tuple[Any, float]:
        clock = FirstToken()
        output = self._model.generate(
            prompt, past_key_values=cache, stopping_criteria=clock.among(None), **_arguments(prompt)
        )
        return output, clock.ttft_s

    def _through_kvtier(self, talk: _Talk, prompt: torch.Tensor, kv: Attachment) -> tuple[Any, float]:
        output = kv.generate(prompt, **_arguments(prompt))
        report = kv.last
        talk.resident_tokens = 0
        talk.restored, talk.load_s = dict(report.restored_by_source), report.load_s
        talk.stored_chunks = report.stored_chunks
        talk.stored_tokens = max(talk.stored_tokens, len(talk.tokens) - 1)
        return output, report.ttft_s

    def _decode(self) -> None:
        rows = [talk.row for talk in self._running if talk.row is not None]
        following = step(self._model, rows, [talk.answer[-1] for talk in self._running])
        for talk, token in zip(self._running, following, strict=True):
            talk.answer.append(token)
        self._end(self._running)

    # ---- the end of a turn -----------------------------------------------------------------------------------------

    def _end(self, talks: Sequence[_Talk]) -> None:
        """End the turn of each conversation that has its whole answer."""
        now = self._now()
        for talk in list(talks):
            if len(talk.answer) < talk.turn.answer_tokens:
                continue
            self._running.remove(talk)
            self._counter += 1
            talk.used = self._counter
            equal = self._compare(talk)
            talk.tokens += talk.answer
            if self._kv is not None:
                self._store(talk, self._kv)
            self._note(talk, now, equal)
            talk.place += 1
            if talk.is_over:
                continue  # its KV stays until evicted: an engine does not know that a conversation is over
            talk.arrived_s = max(talk.arrived_s + talk.turn.gap_s, now)
            self._coming.append(talk)

    def _compare(self, talk: _Talk) -> int | None:
        """The number of leading tokens that are as expected; the conversation continues with the expected answer."""
        if self._expected is None:
            self.answers[talk.user, talk.place] = list(talk.answer)
            return None
        wanted = self._expected[talk.user, talk.place]
        equal = next(
            (place for place, (a, b) in enumerate(zip(talk.answer, wanted, strict=True)) if a != b), len(wanted)
        )
        if equal < len(wanted):
            talk.answer = list(wanted)
            assert talk.row is not None
            talk.row.length = min(talk.row.length, talk.prompt_tokens + equal)
        return equal

    def _store(self, talk: _Talk, kv: Attachment) -> None:
        assert talk.row is not None
        size = kv.chunk_tokens
        talk.stored_chunks += kv.store(torch.tensor([talk.tokens]), talk.row.view(), known_tokens=talk.stored_tokens)
        talk.stored_tokens = max(talk.stored_tokens, talk.row.length // size * size)

    def _note(self, talk: _Talk, now: float, equal: int | None) -> None:
        restored = sum(talk.restored.values())
        self.samples.append(
            TurnSample(
                user=talk.user,
                turn=talk.place,
                arrived_s=talk.arrived_s,
                started_s=talk.started_s,
                first_s=talk.first_s,
                ended_s=now,
                prompt_tokens=talk.prompt_tokens,
                resident_tokens=talk.resident_tokens,
                restored=talk.restored,
                computed_tokens=talk.prompt_tokens - talk.resident_tokens - restored,
                answer_tokens=len(talk.answer),
                load_s=talk.load_s,
                stored_chunks=talk.stored_chunks,
                equal_tokens=equal,
            )
        )


def _arguments(prompt: torch.Tensor) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "max_new_tokens": 1,
        "min_new_tokens": 1,
        "return_dict_in_generate": True,
    }
