"""Drives a server with a workload by aiperf, a load generator in an environment of its own (ADR 21).

`run` writes ``requests.jsonl``, one line for each request that has ended, while the run goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.bench.serve.workload import ServeWorkload

AIPERF = "aiperf"
VERSION = "0.13.0"
INSTALL = f"python -m venv aiperf && aiperf/bin/pip install aiperf=={VERSION}"
REQUESTS_FILE = "requests.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a server says about its model."""

    name: str
    context_tokens: int | None
    """None: unknown; vLLM and SGLang say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """How a workload is sent."""

    url: str
    """Of the server, without ``/v1``."""
    model: str
    """The name that the server knows."""
    command: str = AIPERF
    """``--generator``: aiperf's command, or the Python of an environment that has it."""
    cores: str = ""
    """Cores of the generator, as ``1`` or ``2-3``; empty: all."""
    seconds: float
    """No request is sent later than this after the first counted one."""
    request_deadline_s: float = 60.0
    """A request that takes longer has failed."""
    end_deadline_s: float = 30.0
    """Time for the last requests, beyond `seconds`."""
    start_deadline_s: float = 120.0
    """Time until the first counted request: start-up and warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorResult:
    """One run. All times are Unix seconds."""

    began_s: float
    measured_from_s: float | None
    """The first counted request; None: none was sent."""
    ended_s: float
    requests: int
    """Counted ones that ended, as is `failed`."""
    failed: int
    cpu_s: float
    """Of the generator and its processes."""
    error: str | None
    """Why the run is not whole: the server ended, or the generator did."""
    version: str


def find_generator(command: str = AIPERF) -> tuple[str, ...]:
    """The command that starts aiperf.

    Args:
        command: as in `GeneratorSettings`.

    Raises:
        ConfigError: it does not run; the message has the command that installs it.
    """
    raise NotImplementedError(command)


def served_model(url: str, model: str = "") -> ServedModel:
    """Ask a server for its model, and whether it can chat, by one request of one token.

    Args:
        url: as in `GeneratorSettings`.
        model: its name; empty: the first one that the server lists.

    Raises:
        ConfigError: the server does not answer, does not have the model, or the model has no chat template.
    """
    raise NotImplementedError(url, model)


def run(
    workload: ServeWorkload,
    settings: GeneratorSettings,
    directory: Path,
    *,
    started: Callable[[int], None] = lambda _pid: None,
    is_over: Callable[[], str] = lambda: "",
) -> GeneratorResult:
    """Send `workload` and write ``requests.jsonl`` in `directory`, which may hold nothing of that name.

    A run that is cut short returns within seconds, with its `error`; what has ended until then is in the file.

    Args:
        workload: what to send.
        settings: where to, and how.
        directory: of the run. aiperf's own files are in ``generator`` below it.
        started: called with the process id of the generator, whose process group it leads.
        is_over: called about ten times a second; a text ends the run: why the server is over.

    Raises:
        ConfigError: the generator is missing, or the workload cannot be sent.
    """
    raise NotImplementedError(workload, settings, directory, started, is_over)
