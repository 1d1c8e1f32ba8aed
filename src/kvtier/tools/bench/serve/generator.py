"""Sends a workload to a server with aiperf, a load generator in a separate environment (ADR 21).

During the run, `run` writes ``requests.jsonl``, with one line for each request that has ended. aiperf requires a
tokenizer from Hugging Face's hub even if the server counts tokens. It gets one of a single word, in a hub cache of its
own.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import kvtier
from kvtier.errors import ConfigError
from kvtier.tools.bench.serve.server import ServerError, get
from kvtier.tools.bench.serve.workload import Conversation, Pace, ServeWorkload, text_of

AIPERF = "aiperf"
VERSION = "0.13.0"
BESIDE = Path(kvtier.__file__).parents[2] / ".venv-aiperf" / "bin" / AIPERF
"""aiperf in the environment that `make` builds in the checkout's folder."""
INSTALL = f"python -m venv aiperf && aiperf/bin/pip install aiperf=={VERSION}"
REQUESTS_FILE = "requests.jsonl"
_POLL_S = 0.1
_CANCEL_S = 5.0
"""Time that aiperf has to end after a signal, before it is killed."""
_ANSWER_S = 60.0
"""The longest wait for a request of one token, and for aiperf to print its version."""
_REFUSED_MAX = 3
"""Consecutive failed connections, at least `_CONNECT_S` apart, after which the server counts as dead."""
_CONNECT_S = 0.5
_WARM_UP_S = 2.0
"""Time between the warm-up requests that precede a recorded trace."""
_LOG_LINES = 5
_BODY_MAX = 500
_SURROUNDINGS = (
    "AIPERF_RECORD_EXPORT_BATCH_SIZE=1",  # write each record as soon as its request has ended
    "AIPERF_DATASET_MMAP_CACHE_ENABLED=false",  # it would grow in the home directory
)
_FIELDS: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "skip_special_tokens": False}
"""Fields of every request. With them, answers have the requested length and contain special tokens too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSettings:
    """The settings for sending a workload."""

    url: str
    """The server's address, without ``/v1``."""
    model: str
    """The model's name on the server."""
    command: str = AIPERF
    """The value of ``--generator``: aiperf's command, or the Python of an environment that has it."""
    cores: tuple[int, ...] = ()
    """Cores on which the generator runs. Empty means all."""
    seconds: float
    """No request is sent later than this many seconds after the first counted one."""
    request_deadline_s: float = 60.0
    """Seconds after which a request counts as failed."""
    end_deadline_s: float = 30.0
    """Additional time for the last requests after `seconds`."""
    start_deadline_s: float = 120.0
    """Time limit for start-up and warm-up, up to the first counted request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorResult:
    """The result of one run. All times are Unix seconds."""

    began_s: float
    measured_from_s: float | None
    """Time at which the first counted request was sent, or None if none was sent."""
    ended_s: float
    requests: int
    """Counted requests that have ended, including failed ones."""
    failed: int
    error: str | None
    """Why the run failed or is incomplete, such as a server that ended early; None if it is complete."""


def find_generator(command: str = AIPERF) -> tuple[str, ...]:
    """Return the command that starts aiperf.

    Args:
        command: as in `GeneratorSettings`. The default is aiperf on the path, else that in the checkout's
            ``.venv-aiperf``.

    Raises:
        ConfigError: aiperf does not run. The message contains the command that installs it.
    """
    is_beside = command == AIPERF and shutil.which(AIPERF) is None and BESIDE.exists()
    parts = (str(BESIDE),) if is_beside else tuple(shlex.split(command))
    if parts and Path(parts[-1]).name.startswith("python"):
        parts = (*parts, "-m", "aiperf")
    if parts and (found := shutil.which(parts[0])):
        parts = (str(Path(found).absolute()), *parts[1:])  # aiperf starts in a run's directory
    try:
        subprocess.run((*parts, "--version"), check=True, capture_output=True, timeout=_ANSWER_S)
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"--generator {command!r} does not run ({type(error).__name__}); allowed: the command of aiperf {VERSION}, "
            f"or the Python of an environment that has it. Install: {INSTALL}"
        ) from error
    return parts


def served_model(url: str, model: str = "") -> tuple[str, int | None]:
    """Return a server's model and its context in tokens, after a one-token chat request has succeeded.

    The context is None if the server does not report it. vLLM and SGLang report it.

    Args:
        url: as in `GeneratorSettings`.
        model: name of the model. An empty name means the first model that the server lists.

    Raises:
        ConfigError: the server does not answer, does not have the model, or the model has no chat template.
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"server {url} is not a URL; allowed: one such as http://127.0.0.1:8000")
    listed: list[dict[str, Any]] = _asked(f"{url}/v1/models").get("data", [])
    names = [str(it.get("id")) for it in listed]
    name = model or next(iter(names), "")
    if name not in names:
        raise ConfigError(f"server {url} has no model {name!r}; allowed: {', '.join(names) or 'a server with a model'}")
    question = {"model": name, "messages": [{"role": "user", "content": "t7"}], "max_tokens": 1}
    _asked(f"{url}/v1/chat/completions", question)
    return name, next((it.get("max_model_len") for it in listed if it.get("id") == name), None)


def _asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        found = json.loads(get(url, body, _ANSWER_S))
    except ServerError as error:
        if "chat template" in str(error).lower().replace("_", " "):
            raise ConfigError(
                f"the model at {url} has no chat template; use a model with one, or vLLM's --chat-template FILE"
            ) from error
        raise ConfigError(f"server {error}; start an OpenAI-compatible server there") from error
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"server {url} does not answer with a JSON object; use an OpenAI-compatible server")
    return cast("dict[str, Any]", found)


def run(
    workload: ServeWorkload,
    settings: GeneratorSettings,
    directory: Path,
    *,
    started: Callable[[int], None] = lambda _pid: None,
    is_over: Callable[[], str] = lambda: "",
) -> GeneratorResult:
    """Send `workload` and write ``requests.jsonl`` in `directory`, where this file must not exist.

    A run that is cut short returns within seconds, with its `error`. The file then has the requests that have ended.

    Args:
        workload: the requests to send.
        settings: the server, and the settings for sending.
        directory: directory of the run. aiperf's own files are in its subdirectory ``generator``.
        started: called with the process id of the generator, which leads its own process group.
        is_over: called about ten times a second. If it returns a reason why the server has ended, the run ends.

    Raises:
        ConfigError: the generator is missing, or the workload cannot be sent.
    """
    if (directory / REQUESTS_FILE).exists():
        raise ConfigError(f"{directory / REQUESTS_FILE} exists; use a directory without earlier requests")
    command = find_generator(settings.command)
    room = directory.absolute() / "generator"
    room.mkdir(parents=True)
    configured = _configured(workload, settings, room)
    # `env` extends the environment without changing this process's. aiperf reads dozens of settings there.
    surroundings = ("HF_HUB_OFFLINE=1", f"HF_HUB_CACHE={room / 'hub'}", *_SURROUNDINGS)
    began_s, error = time.time(), None
    with (
        # aiperf leaves its sockets, whose paths must be short, and a copy of its data behind.
        tempfile.TemporaryDirectory(prefix="kvtier-", ignore_cleanup_errors=True) as scratch,
        (directory / REQUESTS_FILE).open("w", encoding="utf-8") as kept,
        (room / "log.txt").open("wb") as log,
    ):
        arguments = ("env", f"TMPDIR={scratch}", *surroundings, *command, "profile", "-f", str(configured))
        requests = _EndedRequests(room / "profile_export.jsonl", kept)
        process = subprocess.Popen(
            (*arguments, "--ui", "none"),
            cwd=room,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            if settings.cores:
                os.sched_setaffinity(process.pid, settings.cores)  # before it starts any process
            started(process.pid)
            error = _watched(process, requests, settings, is_over)
        finally:
            _end(process)
        requests.read()
    completed = f"{requests.count - requests.failed} of {requests.count} requests completed"
    if error is None and requests.count and requests.failed == requests.count:
        error = f"{completed}; the first error: {requests.first_error}"
    if error is None and process.returncode:
        error = f"aiperf ended with {process.returncode} after {completed}: {_last_lines(room / 'log.txt')}"
    if error is None and not requests.count:
        error = f"no request was counted: {_last_lines(room / 'log.txt')}"
    return GeneratorResult(
        began_s=began_s,
        measured_from_s=requests.first_sent_s,
        ended_s=time.time(),
        requests=requests.count,
        failed=requests.failed,
        error=error,
    )


def _watched(
    process: subprocess.Popen[bytes],
    requests: "_EndedRequests",
    settings: GeneratorSettings,
    is_over: Callable[[], str],
) -> str | None:
    """Wait for the generator. Return the reason to end it, or None if it ended by itself."""
    until_s = time.monotonic() + settings.start_deadline_s + settings.seconds + settings.end_deadline_s
    refused, tried_s = 0, 0.0
    while process.poll() is None:
        requests.read()
        if reason := is_over():
            return f"the server has ended: {reason}"
        now_s = time.monotonic()
        if now_s > until_s:
            return "the run exceeded its deadline"
        if requests.is_last_failed and now_s > tried_s + _CONNECT_S:
            tried_s = now_s
            refused = 0 if _accepts(settings.url) else refused + 1
            if refused >= _REFUSED_MAX:
                return f"the server at {settings.url} no longer accepts connections"
        time.sleep(_POLL_S)
    return None


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except TimeoutError:
        return True  # a busy server is not dead
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the generator and all its processes."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None or number == signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CANCEL_S)


def _last_lines(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return " ".join([line.strip(" │") for line in lines if line.strip(" │╭╰─╮╯")][-_LOG_LINES:])


# ---- what aiperf reads -----------------------------------------------------------------------------------------------


def _configured(workload: ServeWorkload, settings: GeneratorSettings, room: Path) -> Path:
    """Write aiperf's configuration, data and tokenizer into `room`. Return the path of the configuration."""
    _write_tokenizer(room / "hub" / "models--kvtier--words")
    is_trace = workload.pace is Pace.TIMES
    with (room / "data.jsonl").open("w", encoding="utf-8") as data:
        turns = (_turns_line(it, workload) for it in workload.conversations)
        data.writelines(json.dumps(line) + "\n" for line in (_trace_lines(workload) if is_trace else turns))
    warm = len(_leading(workload))
    phases: list[dict[str, Any]] = []
    common = {"grace_period": settings.end_deadline_s, "duration": settings.seconds}
    if is_trace:
        common["duration"] += warm * _WARM_UP_S
        phases.append({"name": "profiling", "type": "fixed_schedule", "auto_offset": False, **common})
    else:
        if warm:
            phases.append({"name": "warmup", "type": "concurrency", "concurrency": 1, "sessions": warm})
        counted: dict[str, Any] = {"type": "concurrency", "concurrency": 1}
        if workload.pace is Pace.USERS:
            counted = {"type": "user_centric", "rate": workload.requests_per_s, "users": workload.users}
        else:
            counted["sessions"] = len(workload.conversations) - warm
        phases.append({"name": "profiling", **counted, **common})
    endpoint = {
        "urls": [settings.url],
        "type": "chat",
        "streaming": True,
        "use_server_token_count": True,
        "use_legacy_max_tokens": True,
        "timeout": settings.request_deadline_s,
        "extra": _FIELDS,
    }
    benchmark = {
        "models": [settings.model],
        "endpoint": endpoint,
        "datasets": [
            {
                "name": "main",
                "type": "file",
                "path": str(room / "data.jsonl"),
                "format": "mooncake_trace" if is_trace else "multi_turn",
                "sampling": "sequential",
            }
        ],
        "phases": phases,
        "tokenizer": {"name": "kvtier/words"},
        "artifacts": {"dir": str(room)},
        "runtime": {"workers": 1, "record_processors": 1},
        "gpu_telemetry": {"enabled": False},
        "server_metrics": {"enabled": False},
    }
    written = room / "aiperf.yaml"  # JSON is YAML
    written.write_text(json.dumps({"schemaVersion": "2.0", "benchmark": benchmark}, indent=1), encoding="utf-8")
    return written


def _leading(workload: ServeWorkload) -> list[Conversation]:
    """Return the warm-up conversations at the start. Fillers between counted conversations do not belong to them."""
    return list(takewhile(lambda it: it.is_warm_up, workload.conversations))


def _label(conversation: Conversation) -> str:
    """Return a label that `_EndedRequests` reads back."""
    return f"{'warm' if conversation.is_warm_up else 'user'}.{conversation.user}.{conversation.first_turn}"


def _turns_line(conversation: Conversation, workload: ServeWorkload) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    if len(workload.system):
        turns.append({"role": "system", "text": text_of(workload.system)})
    turns += [{"text": text_of(it.question), "output_length": it.answer_tokens} for it in conversation.turns]
    return {"session_id": _label(conversation), "turns": turns}


def _trace_lines(workload: ServeWorkload) -> Iterator[dict[str, Any]]:
    """Yield one line per request. Warm-up requests precede the recorded ones, `_WARM_UP_S` apart."""
    later_s = _WARM_UP_S * len(_leading(workload))
    for place, conversation in enumerate(workload.conversations):
        (turn,) = conversation.turns
        at_s = place * _WARM_UP_S if conversation.is_warm_up else later_s + turn.at_s
        yield {
            "session_id": _label(conversation),
            "timestamp": round(1000 * at_s),
            "text_input": text_of(turn.question),
            "output_length": turn.answer_tokens,
        }


def _write_tokenizer(place: Path) -> None:
    """Write a model in the form of a hub cache, with the tokenizer that aiperf asks for."""
    revision = "0" * 40
    files = place / "snapshots" / revision
    files.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(revision, encoding="utf-8")
    contents: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": "llama"},
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
            "pre_tokenizer": {"type": "WhitespaceSplit"},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"},
    }
    for name, content in contents.items():
        (files / name).write_text(json.dumps(content), encoding="utf-8")


# ---- what aiperf writes ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _EndedRequests:
    """Copies ended requests from aiperf's growing records into ``requests.jsonl``."""

    records: Path
    kept: IO[str]
    count: int = 0
    """Counted requests that have ended, including failed ones."""
    failed: int = 0
    first_sent_s: float | None = None
    is_last_failed: bool = False
    first_error: str | None = None
    """The error of the first counted request that failed."""
    _read_bytes: int = field(default=0, init=False)

    def read(self) -> None:
        """Copy the requests that have ended since the last call."""
        if not self.records.exists():
            return
        with self.records.open("rb") as records:
            records.seek(self._read_bytes)
            whole, newline, _torn = records.read().rpartition(b"\n")
        self._read_bytes += len(whole + newline)
        for line in whole.splitlines():
            self._take(json.loads(line))
        self.kept.flush()

    def _take(self, record: dict[str, Any]) -> None:
        about: dict[str, Any] = record["metadata"]
        kind, user, first_turn = str(about["conversation_id"]).split(".")
        sent_s, ended_s, is_warm_up = about["request_start_ns"] / 1e9, about["request_end_ns"] / 1e9, kind == "warm"
        error = _error_of(record)
        ttft_ms = None if error else _value(record, "time_to_first_token")
        row: dict[str, Any] = {
            "id": about["x_request_id"],
            "user": int(user),
            "turn": int(first_turn) + int(about["turn_index"]),
            "sent_s": sent_s,
            "first_s": None if ttft_ms is None else min(sent_s + ttft_ms / 1e3, ended_s),  # aiperf rounds
            "ended_s": ended_s,
            "prompt_tokens": _whole(_value(record, "usage_prompt_tokens")),
            "output_tokens": _whole(_value(record, "usage_completion_tokens")) or 0,
            "is_warm_up": is_warm_up,
            "error": error,
        }
        self.kept.write(json.dumps(row) + "\n")
        self.is_last_failed = error is not None
        if not is_warm_up:
            self.count += 1
            self.failed += error is not None
            self.first_error = self.first_error or error
            self.first_sent_s = sent_s if self.first_sent_s is None else min(self.first_sent_s, sent_s)


def _value(record: dict[str, Any], name: str) -> float | None:
    metrics: dict[str, dict[str, Any]] = record.get("metrics") or {}
    return metrics.get(name, {}).get("value")


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _error_of(record: dict[str, Any]) -> str | None:
    if error := record.get("error"):
        return f"{error.get('type')}: {error.get('message')}"[:_BODY_MAX]
    return "cancelled at the end of the run" if record["metadata"].get("was_cancelled") else None
