"""Reads whole conversations without times: ShareGPT's `conversations`, or `conversation` (LMSYS-Chat-1M, WildChat).

ShareGPT is one JSON array of `{"id": …, "conversations": [{"from": "human", "value": …}, …]}`, the input of
ShareGPTDataset in vllm/benchmarks/datasets. The others have `role` and `content`. Each answer of the model is a
request. Its prompt is everything before the answer.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.tools.trace.formats.base import CONVERSATION_FIELDS, TraceRequest, by_time
from kvtier.tools.trace.formats.chat_text import chat_text, messages_of
from kvtier.tools.trace.formats.prompt_lines import PromptLines, notes_on
from kvtier.tools.trace.trace_files import json_lines

TURN_S = 30.0
"""Assumed seconds between two requests of a conversation."""


class Conversations(PromptLines):
    """Reads conversations. Their starts are uniform in a window, drawn from `numpy.random.default_rng(seed)`.

    Args:
        path: the file, or a directory of such files.
        block_tokens: number of tokens per block; None means 64.
        tokenizer: a tokenizer.json of Hugging Face; None means a simple rule.
        window_h: hours within which conversations start.
        seed: seed of the start times.

    Raises:
        ConfigError: the file or the tokenizer cannot be read.
    """

    options = ("tokenizer", "window_h")

    def __init__(
        self,
        path: Path,
        block_tokens: int | None = None,
        tokenizer: Path | None = None,
        window_h: float = 10.0,
        seed: int = 1,
    ) -> None:
        super().__init__(path, block_tokens, tokenizer)
        self._window_s, self._seed = window_h * 3600, seed
        self._starts = (
            f"conversations without times: they start uniformly within {window_h:g} h, seed {seed}, with a request "
            f"every {TURN_S:g} s"
        )

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests of all conversations, sorted by time."""
        draw = np.random.default_rng(self._seed)
        numbers: dict[bytes, int] = {}
        other_parts = 0

        def requests_of(file: Path, number: int, record: dict[str, Any]) -> list[TraceRequest]:
            nonlocal other_parts
            time_s = float(draw.uniform(0.0, self._window_s))
            name = str(record.get("id", record.get("conversation_id", f"{file.name}:{number}")))
            field = next((it for it in CONVERSATION_FIELDS if it in record), "conversations")
            messages = messages_of(record, field)
            found: list[TraceRequest] = []
            for place, message in enumerate(messages):
                other_parts += message.other_parts
                if place and message.role == "assistant":
                    tokens = self._tokenize(chat_text(messages[:place]))
                    lengths = len(tokens), len(self._tokenize(message.text))
                    found.append(TraceRequest(time_s, *lengths, self._blocks(tokens, numbers), name, number))
                    time_s += TURN_S
            return found

        requests = by_time(self.path, chain.from_iterable(json_lines(self.path, requests_of)))
        self.notes = (self._how, self._starts, *notes_on(other_parts))
        yield from requests
