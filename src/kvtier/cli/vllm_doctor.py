"""Checks of `kvtier vllm doctor`: why vLLM does not find KV that was stored.

Each check yields findings: what was checked, what was found, and what to do. No check changes anything or starts an
engine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

from kvtier.cli.doctor_findings import DoctorFinding, EngineTerms, in_order, json_object, machine, stores
from kvtier.cli.engine_settings import server_settings
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.connect.local_files import local_folder
from kvtier.connect.vllm import installed, support
from kvtier.connect.vllm.identity import identify
from kvtier.connect.vllm.installed import CONNECTOR, engine_config
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.report.output import progress
from kvtier.runtime.arena import SLOTS_MIN
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.size import of as size_of
from kvtier.tier.registry import kind_of

HOST_CHUNKS_FEW = 16
"""Host memory of fewer chunks is reported: each prompt evicts the previous one."""

TERMS = EngineTerms(
    command="vllm",
    unit="chunks",
    setting="store.chunk_tokens",
    equal="weights, configuration, dtype, --kv-cache-dtype, tensor parallel size and release of vLLM; give --model and "
    "the rest of the server's command line as --engine-args",
)


def examine(
    transfer: str | None,
    tiers: Sequence[str],
    model: str | None,
    block_tokens: int | None,
    engine_arguments: Sequence[str],
) -> list[DoctorFinding]:
    """All findings about a server, the most severe first.

    Args:
        transfer: its ``--kv-transfer-config``.
        tiers: overrides the list of tiers, as `--tier` gives them.
        model: a folder, or a name in the local hub cache.
        block_tokens: its ``--block-size``.
        engine_arguments: the rest of its command line.
    """
    try:
        loaded = server_settings(tiers, _extra(transfer), "kv_connector_extra_config")
    except ConfigError as error:
        wrong = DoctorFinding("error", "settings", str(error), "correct the setting; with it the server does not start")
        return in_order([_version(), *_transfer(transfer, has_shared=True), wrong])
    config = loaded.config
    has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
    findings = list(_transfer(transfer, has_shared=has_shared, write_policy=config.store.write_policy))
    findings += machine(loaded)
    findings.append(_version())
    with progress("asking vLLM what the server's command line means", None):
        block_size = () if block_tokens is None else ("--block-size", str(block_tokens))
        engine, found = _engine(model, [*engine_arguments, *block_size])
    findings += found
    block_tokens = block_tokens or (engine.cache_config.block_size if engine is not None else None)
    chunk_tokens, found = _chunk(config, block_tokens)
    findings += found
    findings += _host(config, model, engine, chunk_tokens)
    with progress("digesting the weights", None):
        mine = None if engine is None else _fingerprint(engine)
    findings += stores(config, mine, chunk_tokens if config.store.chunk_tokens else 0, TERMS)
    if config.tiers and not getattr(engine, "shutdown_timeout", 0):
        findings.append(DoctorFinding("note", "--shutdown-timeout", *support.SHUTDOWN.split(": ")))
    return in_order(findings)


def _version() -> DoctorFinding:
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


def _engine(model: str | None, arguments: Sequence[str]) -> tuple[VllmConfig | None, list[DoctorFinding]]:
    """VLLM's configuration of a server with this model, if vLLM is installed."""
    if model is None:
        return None, []
    if installed.installed() is None:
        found = "its fingerprint is unknown, because vLLM is not installed here"
        return None, [DoctorFinding("note", "model", found, "run this command in the server's environment")]
    try:
        engine = engine_config(["--model", model, *arguments, "--kv-transfer-config", json.dumps(CONNECTOR)])
        support.check_engine(engine)
    except UnsupportedModelError as error:
        return None, [DoctorFinding("error", "model", str(error), 'see "What is supported" in docs/guides/vllm.md')]
    except ConfigError as error:
        return None, [DoctorFinding("error", "model", str(error), "give the server's command line as --engine-args")]
    return engine, []


def _fingerprint(engine: VllmConfig) -> Fingerprint | DoctorFinding:
    """The fingerprint of an engine; or a finding, if its KV cannot be shared."""
    identity = identify(engine, installed.installed() or "")
    if identity.is_private:
        found = f"KV is kept in host memory only, and ends with the server: {identity.detail}"
        return DoctorFinding("error", "model", found, "serve real weights from a local folder")
    return identity.fingerprint


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


def _host(config: Config, model: str | None, engine: VllmConfig | None, chunk_tokens: int) -> Iterator[DoctorFinding]:
    """Whether host memory holds enough chunks."""
    folder = None if model is None else local_folder(model, None, None)
    if folder is None:
        return
    ranks = 1 if engine is None else engine.parallel_config.tensor_parallel_size
    try:
        kv = size_of(folder, tp=ranks, chunk_tokens=chunk_tokens)
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
