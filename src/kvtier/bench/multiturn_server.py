"""A small server around one model, so that conversations can be measured as they come. Imports torch.

What it is: one loop in one thread. Prompts wait in the order of their arrival. Between two steps of decoding one prompt
is computed, whole, and then decodes with the others, a token each in every step. KV of finished turns stays on the
device as long as the budget lets it; who has been silent longest leaves first, whole conversations at a time. The
system prompt is always there. With kvtier, a prompt whose KV has left goes through `Attachment.generate`; what the
device still has is used from there, in every arm. What a turn has added is handed to kvtier when it ends.

What it is not: vLLM. There are no pages, no prefill in pieces beside decoding, no CUDA graphs, and no sharing of KV
between conversations on the device but the system prompt. Its figures compare arms; they are no engine's figures.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvtier.bench.multiturn_decode import ATTENTION, Row, attending, step
from kvtier.bench.multiturn_load import Conversation, Load, Turn
from kvtier.bench.multiturn_result import TurnSample
from kvtier.connect.transformers import Attachment
from kvtier.connect.transformers.call import FirstToken
from kvtier.errors import ConfigError

_IDLE_S = 0.002
_FLUSH_S = 300.0

Answers = dict[tuple[int, int], list[int]]
"""(user, turn) to the tokens of the answer."""


@dataclass(slots=True)
class _Talk:
    """One conversation as the server sees it."""

    user: int
    asked: Conversation
    tokens: list[int]
    """All prompts and answers so far."""
    place: int = 0
    """Number of its turn."""
    row: Row | None = None
    """Its KV, while it is on the device."""
    stored_tokens: int = 0
    """Leading ones that were handed to kvtier."""
    used: int = 0
    """When it last spoke; a counter."""
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
        """What it asks now."""
        return self.asked.turns[self.place]

    @property
    def is_over(self) -> bool:
        """Whether it has asked everything."""
        return self.place == len(self.asked.turns)


class Server:
    """Serves one load with one arm.

    Args:
        model: of the library, with its SDPA attention.
        budget_tokens: KV that the device may hold, counted in tokens.
        kv: the attachment of the arm; None computes what the device does not have.
        at_once: conversations that decode together at most.
        expected: answers of the arm that went first. Where one differs that is noted, and the conversation goes on with
            the expected one, so that all arms are asked the same. None: this is that arm.
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

    def serve(self, load: Load) -> None:
        """Answer everything.

        Raises:
            ConfigError: a conversation alone has more KV than the device may hold.
        """
        most = len(load.system) + max(it.most_tokens for it in load.conversations)
        if len(load.system) + most > self._budget_tokens:
            raise ConfigError(
                f"a conversation grows to {most} tokens, and the device may hold {self._budget_tokens} with the system "
                "prompt beside it; allowed: a larger --kv-budget, or shorter conversations"
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
        """Wait until kvtier has what it was handed; not a part of the measured time."""
        if self._kv is not None:
            self._kv.flush(_FLUSH_S)

    def _begin(self, load: Load) -> None:
        system: list[int] = load.system.tolist()
        # One token more, which is thrown away: a prompt is at least one token longer than what is known of it.
        prompt = torch.tensor([[*system, 1]], device=self._model.device)
        output = self._model.generate(prompt, **_arguments(prompt))
        self._system = Row(self._model.config, output.past_key_values, 0)
        self._system.length = len(system)
        if self._kv is not None:
            self._kv.store(torch.tensor([system]), self._system.view())
            self._kv.flush(_FLUSH_S)
        self._talks = [_Talk(user, asked, list(system)) for user, asked in enumerate(load.conversations)]
        self._began = time.perf_counter()
        for talk in self._talks:
            talk.arrived_s = talk.turn.gap_s
        self._coming = list(self._talks)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    # ---- the loop --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Take in who has come, compute one prompt, decode one token of each."""
        now = self._now()
        come = sorted((talk for talk in self._coming if talk.arrived_s <= now), key=lambda it: it.arrived_s)
        self._coming = [talk for talk in self._coming if talk.arrived_s > now]
        self._waiting.extend(come)
        if self._waiting and len(self._running) < self._at_once and self._make_room(self._waiting[0]):
            self._prefill(self._waiting.popleft())
        if self._running:
            self._decode()
        elif not self._waiting and self._coming:
            time.sleep(min(_IDLE_S, max(0.0, min(talk.arrived_s for talk in self._coming) - self._now())))

    def _make_room(self, talk: _Talk) -> bool:
        """Evict until the KV of this turn fits; whether it does."""
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
            # Who will never speak again is no loss.
            self.evictions += not other.is_over
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
        # Of one token the library has no KV yet: the first of the answer.
        talk.row = Row(self._model.config, output.past_key_values, talk.turn.answer_tokens)
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
        """Of those that have their whole answer."""
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
                # Its KV stays until others need the room, as an engine that knows of no conversations would have it.
                continue
            talk.arrived_s = max(talk.arrived_s + talk.turn.gap_s, now)
            self._coming.append(talk)

    def _compare(self, talk: _Talk) -> int | None:
        """How many leading tokens are as expected; the conversation goes on with the expected ones."""
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
