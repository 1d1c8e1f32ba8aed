"""Represents one `generate` call: its prompt, the rows of its batch with their chunk keys, and its report.

A batch is padded on the left, so that all rows end at the same column. Row `i` has `pad_i` columns of padding, and its
token `t` is in column `pad_i + t`. The library's cache has one length in columns for all rows. Resuming at column `C`
requires the KV of the first `C - pad_i` tokens of each row. The attention mask hides padding columns.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationConfig

from kvtier.connect.transformers.caches import Argument, Model, Output, integers
from kvtier.connect.transformers.identity import fixed_rope_tokens
from kvtier.connect.transformers.open_requests import RowRequest
from kvtier.connect.transformers.restore import RestoreResult, row_tokens
from kvtier.connect.transformers.support import Options, padding_mask, reason_against
from kvtier.errors import ConfigError
from kvtier.keys.chain import Chain
from kvtier.runtime.observers.trace_recorder import Recorder, Served
from kvtier.types import NextTurn, Place, Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """Reports what one `generate` call restored, computed and stored. Tokens are summed over the rows of a batch."""

    prompt_tokens: int = 0
    """Tokens of all prompts, without padding."""
    restored_tokens: int = 0
    """Prompt tokens whose KV was restored."""
    restored_by_source: dict[str, int] = field(default_factory=dict[str, int])
    """Restored tokens by place: ``host``, or the name of a lower tier."""
    computed_tokens: int = 0
    """Prompt tokens that the model computed."""
    generated_tokens: int = 0
    """New tokens, up to and including each row's end token; 0 for a call without the cache."""
    ttft_s: float = 0.0
    """Seconds from the call to the first new token, including all of kvtier's work."""
    lookup_s: float = 0.0
    """Part of `ttft_s` spent on keys and lookups."""
    load_s: float = 0.0
    """Part of `ttft_s` spent waiting for loads."""
    wall_s: float = 0.0
    """Duration of the whole call in seconds."""
    stored_chunks: int = 0
    """Objects (each a chunk of one KV group) passed on for storing. Copies continue after the call."""
    uncached_reason: str = ""
    """Why the call, or a part of it, did not use the cache; empty if all of it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """The results of all stores so far, in objects."""

    held: int = 0
    """Objects stored: readable in host memory, and on their way to the tiers that the write policy selects."""
    dropped: int = 0
    """Objects that were not admitted, found no room in time, failed, or were refused because `held_calls` calls were
    being stored."""
    pending_calls: int = 0
    """Calls whose KV is still being copied."""


class Prompt(NamedTuple):
    """The checked prompt of a call that the cache can serve."""

    input_ids: torch.Tensor
    """[rows, columns] tokens."""
    mask: torch.Tensor
    padding: tuple[int, ...]
    """Number of padding columns before each row."""
    end_tokens: frozenset[int]


def prompt_of(
    model: Model,
    inputs: Argument,
    given: GenerationConfig | None,
    arguments: dict[str, Argument],
    *,
    accepts_padding: bool,
) -> Prompt | str:
    """Return the prompt from the arguments of `generate`, or the reason why the cache cannot serve the call."""
    options = Options(arguments, given, model.generation_config)
    reason = reason_against(model, options)
    if reason:
        return reason
    input_ids = inputs if inputs is not None else arguments.get("input_ids")
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.shape[1] == 0:
        return "the prompt is not a tensor input_ids [rows, columns]"
    mask = padding_mask(input_ids, options)
    if mask.shape != input_ids.shape:
        return f"attention_mask has shape {tuple(mask.shape)}; allowed: that of input_ids, {tuple(input_ids.shape)}"
    padding = left_padding(mask)
    if padding is None:
        return "attention_mask pads on the right, has holes or hides a whole row; allowed: padding on the left"
    if any(padding) and not accepts_padding:
        return f"{type(model).__name__} takes no position_ids: KV of a padded row may depend on its padding"
    limit = fixed_rope_tokens(model)
    # Stay one token below the limit. At the limit, "dynamic" scaling keeps the frequencies that an earlier call set.
    if limit is not None and options.total_tokens(input_ids.shape[1]) >= limit:
        return f"the text may reach the {limit} tokens at which the position encoding changes"
    return Prompt(input_ids, mask, padding, options.tokens("eos_token_id"))


def left_padding(mask: torch.Tensor) -> tuple[int, ...] | None:
    """Return the number of padding columns before each row.

    Args:
        mask: [rows, columns]. Zero hides a column.

    Returns:
        One number per row; None if a row has padding elsewhere than on the left, a hole, or no token.
    """
    shown = mask != 0
    columns = shown.shape[1]
    padding = columns - shown.sum(dim=1)
    expected = torch.arange(columns, device=mask.device)[None, :] >= padding[:, None]
    if not bool((shown == expected).all()) or bool((padding >= columns).any()):
        return None
    return tuple(integers(padding))


def conversation_names(session: object, rows: int) -> tuple[Sequence[str | None], str]:
    """Return the name of each row's conversation, and what is wrong with `session`; empty if nothing is.

    If something is wrong, all names are None.
    """
    none = [None] * rows
    if session is None:
        return none, ""
    given = cast("Sequence[object]", session) if isinstance(session, list | tuple) else [session]
    names = [name for name in given if name is None or isinstance(name, str)]
    if len(names) == len(given) == rows:
        return names, ""
    return none, f"session = {session!r}; allowed: a string, or one for each of {rows} rows"


def checked_turn(session: object, next_turn: object) -> NextTurn | None:
    """Check the arguments of `Attachment.expects`.

    Raises:
        ConfigError: `session` is not a string, or `next_turn` is unknown.
    """
    if not isinstance(session, str):
        raise ConfigError(f"session is {session!r}; allowed: a string")
    try:
        return None if next_turn is None else NextTurn(next_turn)
    except ValueError:
        allowed = ", ".join(repr(turn.value) for turn in NextTurn)
        raise ConfigError(f"next_turn is {next_turn!r}; allowed: {allowed}, None") from None


def sequences_of(output: Output) -> torch.Tensor:
    """Return the [rows, columns] prompt and generated tokens in the output of `generate`."""
    return output if isinstance(output, torch.Tensor) else output.sequences


def row_end(sequence: Sequence[int], prompt_tokens: int, end_tokens: Collection[int]) -> int:
    """Return the length of a row, up to and including its first generated end token.

    After that token the library feeds the model padding.

    Args:
        sequence: the row's prompt and generated tokens, without left padding.
        prompt_tokens: length of the prompt.
        end_tokens: tokens that end a row.
    """
    for position in range(prompt_tokens, len(sequence)):
        if sequence[position] in end_tokens:
            return position + 1
    return len(sequence)


@dataclass(slots=True)
class CallRow:
    """One row of a call."""

    request: RowRequest
    prompt_tokens: int
    chain: Chain
    restored_tokens: int = 0

    def new_places(self, sequence: torch.Tensor, end_tokens: frozenset[int], groups: int) -> tuple[Prefix, list[Place]]:
        """Return the row's prefix, and the places of the full chunks that this call completed, in every KV group.

        A chunk that was restored in part is skipped, because it is already stored.

        Args:
            sequence: the row's tokens, including padding.
            end_tokens: tokens that end a row.
            groups: number of KV groups.
        """
        tokens = integers(sequence[self.request.pad :])
        # The last token of a sequence is sampled but never fed to the model, so it has no KV.
        kept = min(row_end(tokens, self.prompt_tokens, end_tokens), len(tokens) - 1)
        self.chain.extend(tokens[self.prompt_tokens : kept])
        return self.places(-(-self.restored_tokens // self.request.prefix.chunk_tokens), kept, groups)

    def places(self, first: int, tokens: int, groups: int) -> tuple[Prefix, list[Place]]:
        """Return the row's prefix, and the places of the full chunks in its first `tokens` tokens, from `first` on."""
        prefix = self.chain.prefix()
        size = prefix.chunk_tokens
        chunks = range(first, tokens // size)
        return prefix, [
            Place(group, chunk, (chunk * size, (chunk + 1) * size)) for chunk in chunks for group in range(groups)
        ]


@dataclass(slots=True)
class Call:
    """The rows of a call, and the values for its report."""

    number: int
    prompt: Prompt
    rows: list[CallRow]
    keys_s: float
    """Seconds spent on chunk keys."""
    arrived_s: float
    recorder: Recorder | None = None
    opts_out: bool = False
    """Whether nothing of the call may be stored."""

    @classmethod
    def begun(
        cls,
        number: int,
        prompt: Prompt,
        root: bytes,
        chunk_tokens: int,
        conversations: Sequence[str | None],
        recorder: Recorder | None = None,
    ) -> "Call":
        """Return a new call, with the chunk keys of each row."""
        started, arrived_s = time.perf_counter(), time.monotonic()
        rows: list[CallRow] = []
        for index, (row, pad, name) in enumerate(zip(prompt.input_ids, prompt.padding, conversations, strict=True)):
            tokens, chain = integers(row[pad:]), Chain(root, chunk_tokens)
            chain.extend(tokens)
            rows.append(CallRow(RowRequest(f"{number}/{index}", pad, chain.prefix(), name), len(tokens), chain))
        return cls(number, prompt, rows, time.perf_counter() - started, arrived_s, recorder)

    def report(self, output: Output, restored: RestoreResult, clock: "FirstToken", reason: str) -> CallReport:
        """Return the report of the call before anything is stored."""
        prompt_tokens = sum(row.prompt_tokens for row in self.rows)
        generated_tokens = 0
        for row, sequence in zip(self.rows, sequences_of(output), strict=True):
            row.restored_tokens = row_tokens(restored.columns, row.request.pad)
            tokens = integers(sequence[row.request.pad :])
            new_tokens = row_end(tokens, row.prompt_tokens, self.prompt.end_tokens) - row.prompt_tokens
            generated_tokens += new_tokens
            if self.recorder is not None:
                keys = row.request.prefix.keys
                self.recorder.served(
                    Served(self.arrived_s, keys, row.prompt_tokens, new_tokens, row.request.conversation)
                )
        return CallReport(
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
    """Records the time of the first new token. It never stops generation and works with any streamer."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._continue: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Argument, **_: Argument) -> Argument:  # noqa: ARG002
        """Record the time of the first call. The library calls this after each new token."""
        if self._first is None or self._continue is None:
            if input_ids.device.type == "cuda":
                torch.cuda.current_stream(input_ids.device).synchronize()
            self._first = time.perf_counter()
            self._continue = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._continue

    def among(self, others: Argument) -> StoppingCriteriaList:
        """Return the caller's stopping criteria together with this one."""
        return StoppingCriteriaList([*(others or ()), self])

    @property
    def ttft_s(self) -> float:
        """Seconds to the first new token; 0 if there was none."""
        return 0.0 if self._first is None else self._first - self._started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self._started
