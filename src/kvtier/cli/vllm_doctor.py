"""Checks of `kvtier vllm doctor`: why vLLM does not find KV that was stored.

Each check yields findings: what was checked, what was found, and what to do. No check changes anything or starts an
engine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from kvtier.cli.doctor_findings import DoctorFinding, EngineTerms, in_order, json_object, machine, stores
from kvtier.cli.engine_settings import overridden
from kvtier.config.loader import TIERS, Loaded, load
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """The server to check, as given on the command line."""

    transfer: str | None = None
    """The server's ``--kv-transfer-config``."""
    tiers: Sequence[str] = ()
    """Overrides the list of tiers, as `--tier` gives them."""
    model: str | None = None
    block_tokens: int | None = None
    engine_arguments: Sequence[str] = ()
    """The rest of the server's command line."""


def examine(server: ServerDescription) -> list[DoctorFinding]:
    """All findings about `server`, the most severe first."""
    try:
        loaded = _settings(server)
    except ConfigError as error:
        advice = "correct the setting; with it the server does not start"
        findings = [
            *_transfer(server.transfer, has_shared=True),
            DoctorFinding("error", "settings", str(error), advice),
        ]
        return in_order([_version(), *findings])
    config = loaded.config
    has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
    findings = list(_transfer(server.transfer, has_shared=has_shared, write_policy=config.store.write_policy))
    findings += machine(loaded)
    findings.append(_version())
    with progress("asking vLLM what the server's command line means", None):
        engine, found = _engine(server)
    findings += found
    block_tokens = server.block_tokens or (engine.cache_config.block_size if engine is not None else None)
    chunk_tokens, found = _chunk(config, block_tokens)
    findings += found
    findings += _host(config, server, engine, chunk_tokens)
    with progress("digesting the weights", None):
        mine = None if engine is None else _fingerprint(engine)
    findings += stores(config, mine, chunk_tokens if config.store.chunk_tokens else 0, TERMS)
    if config.tiers and not getattr(engine, "shutdown_timeout", 0):
        findings.append(DoctorFinding("note", "--shutdown-timeout", *support.SHUTDOWN.split(": ")))
    return in_order(findings)


def _version() -> DoctorFinding:
    try:
        version = installed.check_engine()
    except ConfigError as error:
        advice = "run this command in the server's environment, with a supported release of vLLM installed there"
        return DoctorFinding("error", "vLLM", str(error), advice)
    return DoctorFinding("fine", "vLLM", f"{version} is supported")


def _arguments(server: ServerDescription) -> list[str]:
    """The known part of the server's command line."""
    known = ["--model", server.model or "", *server.engine_arguments]
    return known if server.block_tokens is None else [*known, "--block-size", str(server.block_tokens)]


def _transfer(text: str | None, *, has_shared: bool, write_policy: str = "through") -> Iterator[DoctorFinding]:
    about = "--kv-transfer-config"
    if text is None:
        found = "not given, so role and failure policy were not checked"
        yield DoctorFinding("note", about, found, "give the server's --kv-transfer-config")
        return
    advice = "use the output of `kvtier vllm config`"
    try:
        transfer = json_object(text)
    except ConfigError as error:
        yield DoctorFinding("error", about, str(error), advice)
        return
    for key in ("kv_connector", "kv_connector_module_path"):
        if transfer.get(key) != CONNECTOR[key]:
            found = f"is {transfer.get(key)!r}, so vLLM does not use kvtier"
            yield DoctorFinding("error", key, found, f"set it to {CONNECTOR[key]!r}")
    role, view = transfer.get("kv_role"), SimpleNamespace()
    view.kv_load_failure_policy = transfer.get("kv_load_failure_policy", "fail")
    try:
        support.check_role(role, write_policy)
    except ConfigError as error:
        yield DoctorFinding("error", about, str(error), "with it the server does not start; " + advice)
        return
    warnings = support.warnings(view, str(role), has_shared=has_shared)
    for warning in warnings:
        yield DoctorFinding("warning", about, warning, advice)
    if not warnings:
        yield DoctorFinding("fine", about, "role and failure policy are right")


def _settings(server: ServerDescription) -> Loaded:
    """The server's settings, as visible from here.

    Raises:
        ConfigError: a setting is wrong.
    """
    loaded = load(tiers=server.tiers)
    extra: object = None
    if server.transfer is not None:
        with suppress(ConfigError):  # `_transfer` reports it
            extra = json_object(server.transfer).get("kv_connector_extra_config")
    if extra is None:
        return loaded
    if not isinstance(extra, dict):
        raise ConfigError(f"kv_connector_extra_config is {extra!r}; allowed: an object of settings")
    given = {it: each for it, each in cast("Mapping[str, object]", extra).items() if it != TIERS or not server.tiers}
    return overridden(loaded, given, "kv_connector_extra_config")


def _engine(server: ServerDescription) -> tuple[VllmConfig | None, list[DoctorFinding]]:
    """VLLM's configuration of a server with this model, if vLLM is installed."""
    model = server.model
    if model is None:
        return None, []
    if installed.installed() is None:
        found = "its fingerprint is unknown, because vLLM is not installed here"
        return None, [DoctorFinding("note", "model", found, "run this command in the server's environment")]
    try:
        engine = engine_config([*_arguments(server), "--kv-transfer-config", json.dumps(CONNECTOR)])
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


def _host(
    config: Config, server: ServerDescription, engine: VllmConfig | None, chunk_tokens: int
) -> Iterator[DoctorFinding]:
    """Whether host memory holds enough chunks."""
    folder = None if server.model is None else local_folder(server.model, None, None)
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
    advice = f"raise host.capacity_bytes; a chunk takes {size_text(chunk_bytes)} (in 16-bit numbers)"
    if chunks < SLOTS_MIN:
        yield DoctorFinding("error", "host.capacity_bytes", f"{holds}; too few, so the server does not start", advice)
    elif chunks < HOST_CHUNKS_FEW:
        yield DoctorFinding("warning", "host.capacity_bytes", f"{holds}; each prompt evicts the previous one", advice)
    else:
        yield DoctorFinding("fine", "host.capacity_bytes", holds)
