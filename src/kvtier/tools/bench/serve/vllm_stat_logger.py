"""A plug-in for vLLM's server. It writes a line with vLLM's figures about each request that has ended.

It is an entry point of the group `vllm.stat_logger_plugins`, which vLLM loads in the process of its API server. kvtier
does not install it. `kvtier bench serve` gives it to all servers that it starts, including those without kvtier.

The environment variable `KVTIER_REQUEST_STATS` names the file; without it, nothing is written. Each server has a new
file, and a line is in it within a second:

    id               as the client named it (`X-Request-ID`)
    time_s           the end, in Unix seconds
    queued_s         from arrival in the scheduler to the first step, with the wait for a load
    prefill_s        from there to the first token
    decode_s         from there to the last token; each of the three is null if its end never came
    prompt_tokens, output_tokens
    cached_tokens    prompt tokens in vLLM's own prefix cache, plus those that a connector began to load; tokens that
                     did not arrive are counted too, although they are computed
"""

import atexit
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.connect.vllm.requests.account import client_id
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.observers.line_file import LineFile

if TYPE_CHECKING:
    AggregateStatLoggerBase: Any = object
else:
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

VARIABLE: Final = "KVTIER_REQUEST_STATS"
CAPACITY_BYTES: Final = 1 << 30
WAITING_MAX: Final = 1 << 14
CLOSE_S: Final = 1.0


class RequestStats(AggregateStatLoggerBase):
    """Writes the lines of the requests of all engines of a server.

    Raises:
        ConfigError: the file cannot be created, or already exists.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:  # noqa: ANN401, ARG002 - vLLM's interface
        self._file: LineFile[tuple[float, Any]] | None = None
        path = os.environ.get(VARIABLE)
        if path:
            self._file = LineFile(
                Path(path),
                capacity_bytes=CAPACITY_BYTES,
                setting=VARIABLE,
                lines=_lines,
                waiting_max=WAITING_MAX,
                metrics=Metrics(),
                metric=table.JOURNAL_LINES,
            )
            atexit.register(self._file.close, CLOSE_S)

    def record(self, scheduler_stats: object, iteration_stats: Any, **_: object) -> None:  # noqa: ANN401, ARG002
        """Queue the requests that have ended. vLLM calls this after each step."""
        if self._file is not None and iteration_stats is not None:
            for finished in iteration_stats.finished_requests:
                self._file.put((time.time(), finished))

    def log_engine_initialized(self) -> None:
        """Do nothing. vLLM calls this at its start."""


def _lines(noted: tuple[float, Any]) -> Iterator[bytes]:
    time_s, finished = noted
    # An event that has not happened has the time 0, the machine's start. So the time up to it is negative.
    has_begun, has_answered = finished.queued_time >= 0, finished.num_generation_tokens > 0
    line = {
        "id": client_id(finished.request_id or ""),
        "time_s": time_s,
        "queued_s": finished.queued_time if has_begun else None,
        "prefill_s": finished.prefill_time if has_begun and has_answered else None,
        "decode_s": finished.decode_time if has_answered else None,
        "prompt_tokens": finished.num_prompt_tokens,
        "cached_tokens": finished.num_cached_tokens,
        "output_tokens": finished.num_generation_tokens,
    }
    yield json.dumps(line, separators=(",", ":")).encode() + b"\n"
