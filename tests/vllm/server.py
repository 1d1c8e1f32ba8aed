"""vLLM's OpenAI server, as its users start it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import ENVIRONMENT, EngineError

UP_S = 400.0
ANSWER_S = 300.0
END_S = 120.0


class Server:
    """A server on a free port of this machine; a context manager.

    Args:
        model: directory of the checkpoint.
        log: file for everything that it prints.
        transfer_config: text of ``--kv-transfer-config``.
        arguments: further ones of the command line.

    Raises:
        EngineError: it did not come up.
    """

    def __init__(self, model: Path, log: Path, transfer_config: str, *arguments: str) -> None:
        self._log = log
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # The engine in a process of its own, as it is by default.
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        environment |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        command += ["--kv-transfer-config", transfer_config, *arguments]
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
            )
        try:
            self._wait()
        except BaseException:
            self._process.kill()
            self._process.wait(END_S)
            raise

    def complete(self, tokens: Sequence[int], count: int, **fields: object) -> list[int]:
        """Generate `count` tokens, streamed one by one; `fields` are further ones of the request."""
        body = {
            "model": "m",
            "prompt": list(tokens),
            "max_tokens": count,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        found: list[int] = []
        for line in self._lines("/v1/completions", body):
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                found += choice.get("token_ids") or []
        return found

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics``, by name with labels, as it is written there."""
        lines = [line for line in self._lines("/metrics") if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def reset(self) -> None:
        """Forget vLLM's own prefix cache."""
        list(self._lines("/reset_prefix_cache", {}))

    def printed(self) -> str:
        """Everything that the server has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
            raise EngineError(f"the server did not end within {END_S:.0f} s") from error

    def _wait(self) -> None:
        until_s = time.monotonic() + UP_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise EngineError("\n".join(["the server has ended", *self.printed().splitlines()[-30:]]))
            try:
                list(self._lines("/health"))
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
            else:
                return
        raise EngineError(f"the server is not up after {UP_S:.0f} s")

    def _lines(self, path: str, body: dict[str, Any] | None = None) -> Iterator[str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                yield line.decode().rstrip("\n")
