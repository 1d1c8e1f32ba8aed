"""One call that the cache can serve: its rows, their keys, and which chunks it completed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtier.connect.transformers.positions import moving_rope
from kvtier.connect.transformers.report import Report
from kvtier.connect.transformers.restore import Asked, Restored
from kvtier.connect.transformers.rows import kept_tokens, row_end, row_tokens
from kvtier.connect.transformers.support import Options
from kvtier.connect.transformers.upstream import Argument, Model, Output, integers
from kvtier.keys.chain import Chain, Extra
from kvtier.runtime.recorder import Recorder, Served
from kvtier.types import Place, Prefix


def sequences_of(output: Output) -> torch.Tensor:
    """[rows, columns] tokens of what `generate` returned: prompts, then what was generated."""
    return output if isinstance(output, torch.Tensor) else output.sequences


def extras_of(model: Model, options: Options, columns: int, padding: Sequence[int]) -> list[Extra] | str:
    """What besides its tokens the KV of a call depends on; or why that cannot be said."""
    rope = moving_rope(model)
    if rope is None:
        return []
    side = rope.side(columns - min(padding), options.total_tokens(columns))
    # A prefill in pieces begins with the frequencies of a short text.
    if side is None or (side == "long" and options.get("prefill_chunk_size")):
        return f"the text may cross the {rope.original_tokens} tokens at which the position encoding changes"
    return [Extra("rope", side.encode())]


@dataclass(slots=True)
class Row:
    """One row of a call."""

    asked: Asked
    prompt_tokens: int
    chain: Chain
    restored_tokens: int = 0

    @classmethod
    def begun(cls, name: str, tokens: Sequence[int], pad: int, chain: Chain, session: str | None) -> "Row":
        """Name the chunks of a prompt of `tokens`, which are preceded by `pad` columns of padding."""
        chain.extend(tokens)
        return cls(Asked(name, pad, chain.prefix(), session), len(tokens), chain)

    def new_places(self, sequence: torch.Tensor, end_tokens: frozenset[int], groups: int) -> tuple[Prefix, list[Place]]:
        """The chunks that this call completed, of each of `groups` KV groups.

        Only whole ones, and none of which a part was restored: those are known.

        Args:
            sequence: the row's tokens with its padding.
            end_tokens: tokens that end a row.
            groups: how many KV groups there are.
        """
        tokens = integers(sequence[self.asked.pad :])
        kept = kept_tokens(tokens, row_end(tokens, self.prompt_tokens, end_tokens))
        self.chain.extend(tokens[self.prompt_tokens : kept])
        # The prompt's last token has KV only if another was generated after it; so the kept tokens may be fewer.
        return self.places(-(-self.restored_tokens // self.asked.prefix.chunk_tokens), kept, groups)

    def places(self, first: int, tokens: int, groups: int) -> tuple[Prefix, list[Place]]:
        """The whole chunks of the leading `tokens` tokens, from chunk `first` on."""
        prefix = self.chain.prefix()
        size = prefix.chunk_tokens
        chunks = range(first, tokens // size)
        return prefix, [
            Place(group, chunk, (chunk * size, (chunk + 1) * size)) for chunk in chunks for group in range(groups)
        ]


@dataclass(slots=True)
class Call:
    """The rows of a call, and what it needs when it ends."""

    number: int
    input_ids: torch.Tensor
    mask: torch.Tensor
    end_tokens: frozenset[int]
    rows: list[Row]
    keys_s: float
    """Seconds that naming the chunks took."""
    arrived_s: float
    recorder: Recorder | None = None

    @classmethod
    def begun(
        cls,
        number: int,
        *,
        root: bytes,
        chunk_tokens: int,
        extras: Sequence[Extra],
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        padding: Sequence[int],
        end_tokens: frozenset[int],
        sessions: Sequence[str | None],
        recorder: Recorder | None = None,
    ) -> "Call":
        """Name the chunks of each row."""
        started, arrived_s = time.perf_counter(), time.monotonic()
        rows = [
            Row.begun(f"{number}/{index}", integers(tokens[pad:]), pad, Chain(root, chunk_tokens, extras), session)
            for index, (tokens, pad, session) in enumerate(zip(input_ids, padding, sessions, strict=True))
        ]
        keys_s = time.perf_counter() - started
        return cls(number, input_ids, mask, end_tokens, rows, keys_s, arrived_s, recorder)

    def report(self, output: Output, restored: Restored, clock: "FirstToken", reason: str) -> Report:
        """What the call did, before anything of it is stored."""
        prompt_tokens = sum(row.prompt_tokens for row in self.rows)
        generated_tokens = 0
        for row, sequence in zip(self.rows, sequences_of(output), strict=True):
            row.restored_tokens = row_tokens(restored.columns, row.asked.pad)
            tokens = integers(sequence[row.asked.pad :])
            new_tokens = row_end(tokens, row.prompt_tokens, self.end_tokens) - row.prompt_tokens
            generated_tokens += new_tokens
            if self.recorder is not None:
                keys = row.asked.prefix.keys
                self.recorder.served(Served(self.arrived_s, keys, row.prompt_tokens, new_tokens, row.asked.session))
        return Report(
            prompt_tokens=prompt_tokens,
            restored_tokens=restored.tokens,
            restored_by_source=restored.sources,
            computed_tokens=prompt_tokens - restored.tokens,
            generated_tokens=generated_tokens,
            ttft_s=clock.ttft_s,
            lookup_s=self.keys_s + restored.lookup_s,
            load_s=restored.load_s,
            wall_s=clock.elapsed_s,
            uncached_reason=reason,
        )


class FirstToken(StoppingCriteria):
    """Notes when the first new token was there. It never stops anything, and works beside any streamer."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._go_on: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Argument, **_: Argument) -> Argument:  # noqa: ARG002
        """Called by the library after each new token."""
        if self._first is None or self._go_on is None:
            if input_ids.device.type == "cuda":
                torch.cuda.current_stream(input_ids.device).synchronize()
            self._first = time.perf_counter()
            self._go_on = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._go_on

    def among(self, others: Argument) -> StoppingCriteriaList:
        """The caller's stopping criteria and this one."""
        return StoppingCriteriaList([*(others or ()), self])

    @property
    def ttft_s(self) -> float:
        """Seconds to the first new token; 0 when there was none."""
        return 0.0 if self._first is None else self._first - self._started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self._started
