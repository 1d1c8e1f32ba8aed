"""Checks of `kvtier doctor vllm`: why vLLM does not find KV that was stored. No check starts an engine."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from kvtier.cli.doctor_findings import (
    ASK_SHARE,
    Check,
    DoctorFinding,
    EngineTerms,
    TimeLimit,
    json_object,
    run_checks,
    server_checks,
    started,
)
from kvtier.cli.engine_settings import server_settings
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.connect.local_files import local_folder
from kvtier.connect.vllm import installed, support
from kvtier.connect.vllm.identity import identify
from kvtier.connect.vllm.installed import CONNECTOR, engine_config
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.runtime.arena import SLOTS_MIN
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.size import of as size_of
from kvtier.tier.registry import kind_of

ENGINE_ARGS = "give the server's command line as --engine-args"

HOST_CHUNKS_FEW = 16
"""Host memory of fewer chunks is reported: each prompt evicts the previous one."""

TERMS = EngineTerms(
    naming="name one: `kvtier vllm config --tier disk:DIR`",
    unit="chunks",
    setting="store.chunk_tokens",
    equal="weights, configuration, dtype, --kv-cache-dtype, tensor parallel size and release of vLLM; give --model and "
    "the rest of the server's command line as --engine-args",
)

DESCRIBE = "import sys; from kvtier.cli import vllm_doctor; vllm_doctor.describe(sys.argv[1:])"
"""The program that asks vLLM, in a process of its own, which can be ended."""


class Engine(NamedTuple):
    """What vLLM makes of a server's command line."""

    block_tokens: int | None = None
    ranks: int = 1
    has_grace: bool = False
    """The server waits for transfers at its end."""
    fingerprint: Fingerprint | None = None
    findings: tuple[DoctorFinding, ...] = ()


def examine(
    transfer: str | None,
    tiers: Sequence[str],
    model: str | None,
    block_tokens: int | None,
    engine_arguments: Sequence[str],
    limit: TimeLimit,
) -> list[DoctorFinding]:
    """All findings about a server.

    Args:
        transfer: its ``--kv-transfer-config``.
        tiers: overrides the list of tiers, as `--tier` gives them.
        model: a folder, or a name in the local hub cache.
        block_tokens: its ``--block-size``.
        engine_arguments: the rest of its command line.
        limit: the time.
    """
    try:
        loaded = server_settings(tiers, _extra(transfer), "kv_connector_extra_config")
    except ConfigError as error:
        wrong = DoctorFinding("error", "settings", str(error), "correct the setting; with it the server does not start")
        return [version(), *_transfer(transfer, has_shared=True), wrong]
    config = loaded.config
    has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
    block_size = () if block_tokens is None else ("--block-size", str(block_tokens))
    asked = started("vLLM", lambda: _engine(model, [*engine_arguments, *block_size], limit))

    def of_engine() -> Iterator[DoctorFinding]:
        engine = asked.result()
        yield from engine.findings
        chunk_tokens, found = _chunk(config, block_tokens or engine.block_tokens)
        yield from found
        yield from _host(config, model, engine, chunk_tokens)
        if config.tiers and not engine.has_grace:
            yield DoctorFinding("note", "--shutdown-timeout", *support.SHUTDOWN.split(": "))

    checks = server_checks(loaded, lambda: asked.result().fingerprint, config.store.chunk_tokens, TERMS, limit)
    return [
        *_transfer(transfer, has_shared=has_shared, write_policy=config.store.write_policy),
        version(),
        *run_checks([*checks, Check("model", of_engine)], limit),
    ]


def version() -> DoctorFinding:
    """Whether the installed vLLM is supported."""
    try:
        return DoctorFinding("fine", "vLLM", f"{installed.check_engine()} is supported")
    except ConfigError as error:
        advice = "run this command in the server's environment, with a supported release of vLLM installed there"
        return DoctorFinding("error", "vLLM", str(error), advice)


def _transfer(text: str | None, *, has_shared: bool, write_policy: str = "through") -> Iterator[DoctorFinding]:
    about, advice = "--kv-transfer-config", "use the output of `kvtier vllm config`"
    if text is None:
        found = "not given, so role and failure policy were not checked"
        yield DoctorFinding("note", about, found, "give the server's --kv-transfer-config")
        return
    try:
        transfer = json_object(text)
    except ConfigError as error:
        yield DoctorFinding("error", about, str(error), advice)
        return
    for key in ("kv_connector", "kv_connector_module_path"):
        if transfer.get(key) != CONNECTOR[key]:
            found = f"is {transfer.get(key)!r}, so vLLM does not use kvtier"
            yield DoctorFinding("error", key, found, f"set it to {CONNECTOR[key]!r}")
    role = transfer.get("kv_role")
    try:
        support.check_role(role, write_policy)
    except ConfigError as error:
        yield DoctorFinding("error", about, str(error), "with it the server does not start; " + advice)
        return
    view = SimpleNamespace(kv_load_failure_policy=transfer.get("kv_load_failure_policy", "fail"))
    warnings = support.warnings(view, str(role), has_shared=has_shared)
    for warning in warnings:
        yield DoctorFinding("warning", about, warning, advice)
    if not warnings:
        yield DoctorFinding("fine", about, "role and failure policy are right")


def _extra(transfer: str | None) -> Mapping[str, object] | None:
    """The settings in a ``--kv-transfer-config``; None: it has none, or it is no JSON, which `_transfer` reports.

    Raises:
        ConfigError: they are no object.
    """
    extra: object = None
    with suppress(ConfigError):
        extra = None if transfer is None else json_object(transfer).get("kv_connector_extra_config")
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError(f"kv_connector_extra_config is {extra!r}; allowed: an object of settings")
    return cast("Mapping[str, object] | None", extra)


def _engine(model: str | None, arguments: Sequence[str], limit: TimeLimit) -> Engine:
    """VLLM's reading of a server's command line with this model, if vLLM is installed."""
    if model is None:
        return Engine()
    if installed.installed() is None:
        found = "its fingerprint is unknown, because vLLM is not installed here"
        return Engine(findings=(DoctorFinding("note", "model", found, "run this command in the server's environment"),))
    lines, is_late = _lines(["--model", model, *arguments], limit.left_s(ASK_SHARE))
    seen = {name: value for line in lines for name, value in line.items()}
    findings = [DoctorFinding("error", "model", it["problem"], it["advice"]) for it in lines if "problem" in it]
    if is_late:
        missing = "its weights were not digested" if "ranks" in seen else "vLLM has not read the command line"
        findings.append(limit.unchecked("model", missing))
    fields = seen.get("fingerprint")
    return Engine(
        block_tokens=seen.get("block_tokens"),
        ranks=seen.get("ranks", 1),
        has_grace=seen.get("has_grace", False),
        fingerprint=None if fields is None else Fingerprint(**fields | {"weights": bytes.fromhex(fields["weights"])}),
        findings=tuple(findings),
    )


def _lines(arguments: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], bool]:
    """What `describe` writes in a process of its own; and whether it was ended before it was through."""
    command = [sys.executable, "-P", "-c", DESCRIBE, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        return _read(late.stdout or b""), True
    lines = _read(done.stdout)
    if done.returncode or not lines:
        end = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        lines.append({"problem": f"vLLM ended with exit code {done.returncode}: {end}", "advice": ENGINE_ARGS})
    return lines, False


def _read(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith(b"{") and line.endswith(b"}")]


def describe(arguments: Sequence[str]) -> None:
    """Print what vLLM makes of a server's command line: a line of JSON, and a second with its fingerprint."""
    for line in described(arguments):
        print(json.dumps(line), flush=True)  # noqa: T201


def described(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The lines of `describe`."""
    try:
        engine = engine_config([*arguments, "--kv-transfer-config", json.dumps(CONNECTOR)])
        support.check_engine(engine)
    except UnsupportedModelError as error:
        yield {"problem": str(error), "advice": 'see "What is supported" in docs/vllm.md'}
        return
    except ConfigError as error:
        yield {"problem": str(error), "advice": ENGINE_ARGS}
        return
    yield {
        "block_tokens": engine.cache_config.block_size,
        "ranks": engine.parallel_config.tensor_parallel_size,
        "has_grace": bool(getattr(engine, "shutdown_timeout", 0)),
    }
    identity = identify(engine, installed.installed() or "")
    if identity.is_private:
        found = f"KV is kept in host memory only, and ends with the server: {identity.detail}"
        yield {"problem": found, "advice": "serve real weights from a local folder"}
        return
    fields = json.loads(identity.fingerprint.canonical)
    del fields["version"]
    yield {"fingerprint": fields}


def _chunk(config: Config, block_tokens: int | None) -> tuple[int, list[DoctorFinding]]:
    """Tokens of a chunk, with findings."""
    wanted = config.store.chunk_tokens
    try:
        tokens = choose_chunk_tokens(wanted, block_tokens or support.BLOCK_TOKENS)
    except ConfigError as error:
        advice = "set store.chunk_tokens to 0: kvtier then chooses a valid size"
        return wanted, [DoctorFinding("error", "store.chunk_tokens", str(error), advice)]
    if block_tokens is None:
        return tokens, []
    return tokens, [
        DoctorFinding("fine", "store.chunk_tokens", f"{tokens}, a multiple of the block size {block_tokens}")
    ]


def _host(config: Config, model: str | None, engine: Engine, chunk_tokens: int) -> Iterator[DoctorFinding]:
    """Whether host memory holds enough chunks."""
    folder = None if model is None else local_folder(model, None, None)
    if folder is None:
        return
    try:
        kv = size_of(folder, tp=engine.ranks, chunk_tokens=chunk_tokens)
    except ConfigError:  # a model unknown to `kvtier size`
        return
    chunk_bytes = int(kv.bytes_per_token_stored * chunk_tokens + kv.state_bytes_stored)
    chunks = config.host.capacity_bytes // max(chunk_bytes, 1)
    holds = f"{size_text(config.host.capacity_bytes)} of host memory: {chunks} chunks, {chunks * chunk_tokens} tokens"
    about, advice = "host.capacity_bytes", f"raise it; a chunk takes {size_text(chunk_bytes)} (in 16-bit numbers)"
    if chunks < SLOTS_MIN:
        yield DoctorFinding("error", about, f"{holds}; too few, so the server does not start", advice)
    elif chunks < HOST_CHUNKS_FEW:
        yield DoctorFinding("warning", about, f"{holds}; each prompt evicts the previous one", advice)
    else:
        yield DoctorFinding("fine", about, holds)
