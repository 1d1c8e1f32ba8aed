"""vLLM's OpenAI server, as its users start it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import ENVIRONMENT, EngineError
from tests.waiting import free_port

SIZES = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20))
"""Arguments of a small server."""
UP_S = 400.0
ANSWER_S = 300.0
END_S = 120.0


class Client:
    """A client of a server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def complete(self, tokens: Sequence[int], count: int, **fields: object) -> list[int]:
        """Generate `count` tokens, streamed one by one; `fields` are further ones of the request."""
        return self.stream("/v1/completions", {"prompt": list(tokens), "max_tokens": count, **fields})

    def stream(self, path: str, fields: dict[str, object], name: str = "") -> list[int]:
        """The tokens of a streamed answer; `name` is the request's `X-Request-ID`."""
        body = {"model": "m", "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True, **fields}
        found: list[int] = []
        for line in self._lines(path, body, {"X-Request-ID": name} if name else {}):
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                found += choice.get("token_ids") or []
        return found

    def post(self, path: str, fields: dict[str, object], name: str = "") -> dict[str, Any]:
        """An answer that is not streamed; `name` is the request's `X-Request-ID`."""
        body = {"model": "m", "temperature": 0, "ignore_eos": True, **fields}
        return json.loads("".join(self._lines(path, body, {"X-Request-ID": name} if name else {})))

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics``, by name with labels, as it is written there."""
        lines = [line for line in self._lines("/metrics") if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def total(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(value for series, value in self.metrics().items() if series.partition("{")[0] == name)

    def await_health(self, is_over: Callable[[], str]) -> None:
        """Wait until the server answers; `is_over` says why it never will.

        Raises:
            EngineError: it does not.
        """
        until_s = time.monotonic() + UP_S
        while time.monotonic() < until_s:
            if reason := is_over():
                raise EngineError(reason)
            try:
                list(self._lines("/health"))
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
            else:
                return
        raise EngineError(f"the server is not up after {UP_S:.0f} s")

    def _lines(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Iterator[str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                yield line.decode().rstrip("\n")


class Server(Client):
    """A server on a free port of this machine; a context manager.

    Args:
        model: directory of the checkpoint.
        log: file for everything that it prints.
        transfer_config: text of ``--kv-transfer-config``.
        arguments: further ones of the command line.
        cores: that it computes on, as ``0-3``; by default vLLM chooses the same for each server.

    Raises:
        EngineError: it did not come up.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer_config: str,
        *arguments: str,
        cores: str = "",
    ) -> None:
        self._log = log
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        # The engine in a process of its own, as it is by default.
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        command += ["--kv-transfer-config", transfer_config, *arguments]
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.await_health(self._why_over)
        except BaseException:
            self._process.kill()
            self._process.wait(END_S)
            raise

    def printed(self) -> str:
        """Everything that the server has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
            raise EngineError(f"the server did not end within {END_S:.0f} s") from error

    def pause(self) -> None:
        """Stop the server and its engine: connections stay open, and nothing answers."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End the server and its engine at once, as a crash would."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)

    def _why_over(self) -> str:
        if self._process.poll() is None:
            return ""
        return "\n".join(["the server has ended", *self.printed().splitlines()[-30:]])
