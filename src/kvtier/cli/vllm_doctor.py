"""Checks of `kvtier doctor vllm`: why vLLM does not find KV that was stored. No check starts an engine."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from kvtier.cli.doctor_findings import (
    ASK_SHARE,
    Check,
    DoctorFinding,
    EngineTerms,
    TimeLimit,
    json_object,
    read_settings,
    run_checks,
    server_checks,
    started,
)
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.connect.local_files import NotInTimeError, ask_program, local_folder
from kvtier.connect.vllm import installed, support
from kvtier.connect.vllm.identity import identify, shares_of_ranks
from kvtier.connect.vllm.installed import CONNECTOR, engine_config
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.runtime.arena import SLOTS_MIN
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.size import of as size_of
from kvtier.tier.registry import kind_of

HOST_CHUNKS_FEW = 16
"""Host memory of fewer chunks is reported: each prompt evicts the previous one."""

TERMS = EngineTerms(
    naming="name one: `kvtier vllm config --tier disk:DIR`",
    unit="chunks",
    setting="store.chunk_tokens",
    equal="weights, configuration, dtype, --kv-cache-dtype, tensor parallel size and release of vLLM; give --model and "
    "the rest of the server's command line as --engine-args",
)

DESCRIBE = "import json, sys; from kvtier.cli.vllm_doctor import described; print(json.dumps(described(sys.argv[1:])))"
"""Asks vLLM in a process of its own, which can be ended."""


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
    name, advice = "kv_connector_extra_config", "correct the setting; with it the server does not start"
    try:
        loaded = read_settings(tiers, _extra(transfer), name, advice, limit)
    except ConfigError as error:
        loaded = DoctorFinding("error", "settings", str(error), advice)
    if isinstance(loaded, DoctorFinding):
        return [version(), *_transfer(transfer, has_shared=True), loaded]
    config = loaded.config
    has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
    block_size = () if block_tokens is None else ("--block-size", str(block_tokens))
    asked = started("vLLM", lambda: _asked(model, [*engine_arguments, *block_size], limit))

    def of_engine() -> Iterator[DoctorFinding]:
        engine, findings = asked.result(limit.left_s())
        yield from findings
        chunk_tokens, found = _chunk(config, block_tokens or engine.get("block_tokens"))
        yield from found
        yield from _host(config, model, engine.get("ranks", 1), chunk_tokens)
        if config.tiers and not engine.get("shutdown_timeout"):
            yield DoctorFinding("note", "--shutdown-timeout", *support.SHUTDOWN.split(": "))

    def mine() -> Fingerprint | None:
        engine = asked.result(limit.left_s())[0]
        fields = engine.get("fingerprint")
        if fields and config.store.token_shares and engine.get("has_latents"):
            fields["other"]["ranks"] = shares_of_ranks(config.store.token_shares)
        return fields and Fingerprint(**fields | {"weights": bytes.fromhex(fields["weights"])})

    return [
        *_transfer(transfer, has_shared=has_shared, write_policy=config.store.write_policy),
        version(),
        *run_checks(
            [*server_checks(loaded, mine, config.store.chunk_tokens, TERMS, limit), Check("model", of_engine)], limit
        ),
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
    try:
        connector, others = _connector(transfer)
    except ConfigError as error:
        yield DoctorFinding("error", about, str(error), "add the output of `kvtier vllm config` to its connectors")
        return
    for key in ("kv_connector", "kv_connector_module_path"):
        if connector.get(key) != CONNECTOR[key]:
            found = f"is {connector.get(key)!r}, so vLLM does not use kvtier"
            yield DoctorFinding("error", key, found, f"set it to {CONNECTOR[key]!r}")
    role = connector.get("kv_role")
    try:
        support.check_others(others)
        support.check_role(transfer.get("kv_role"), "through")
        support.check_role(role, write_policy)
    except (ConfigError, UnsupportedModelError) as error:
        yield DoctorFinding("error", about, str(error), "with it the server does not start; " + advice)
        return
    view = SimpleNamespace(kv_load_failure_policy=transfer.get("kv_load_failure_policy", "fail"))
    warnings = support.warnings(view, str(role), has_shared=has_shared)
    for warning in warnings:
        yield DoctorFinding("warning", about, warning, advice)
    if not warnings:
        yield DoctorFinding("fine", about, "role and failure policy are right")


def _connector(transfer: Mapping[str, object]) -> tuple[Mapping[str, object], list[object]]:
    """The entry of kvtier in a ``--kv-transfer-config``, or all of it without a `MultiConnector`; names of the others.

    Raises:
        ConfigError: a `MultiConnector` has no list of connectors, or kvtier is not among them.
    """
    if transfer.get("kv_connector") != "MultiConnector":
        return transfer, []
    extra = transfer.get("kv_connector_extra_config")
    listed = cast("Mapping[str, object]", extra).get("connectors") if isinstance(extra, dict) else None
    entries = cast("list[object]", listed) if isinstance(listed, list) else []
    found = [cast("Mapping[str, object]", it) for it in entries if isinstance(it, dict)]
    own = next((it for it in found if it.get("kv_connector") == CONNECTOR["kv_connector"]), None)
    if own is None:
        raise ConfigError(
            f"its MultiConnector has no {CONNECTOR['kv_connector']} in kv_connector_extra_config.connectors"
        )
    return own, [it.get("kv_connector") for it in found if it is not own]


def _extra(transfer: str | None) -> Mapping[str, object] | None:
    """The settings in a ``--kv-transfer-config``; None: it has none, or is wrong in a way that `_transfer` reports.

    Raises:
        ConfigError: they are no object.
    """
    extra: object = None
    with suppress(ConfigError):
        extra = None if transfer is None else _connector(json_object(transfer))[0].get("kv_connector_extra_config")
    if extra is not None and not isinstance(extra, dict):
        raise ConfigError(f"kv_connector_extra_config is a {type(extra).__name__}; allowed: an object of settings")
    return cast("Mapping[str, object] | None", extra)


def _asked(
    model: str | None, arguments: Sequence[str], limit: TimeLimit
) -> tuple[Mapping[str, Any], list[DoctorFinding]]:
    """What vLLM makes of a server's command line with this model, see `described`; and findings about it."""
    if model is None:
        return {}, []
    if installed.installed() is None:
        found = "its fingerprint is unknown, because vLLM is not installed here"
        return {}, [DoctorFinding("note", "model", found, "run this command in the server's environment")]
    try:
        program = [sys.executable, "-P", "-c", DESCRIBE, "--model", model, *arguments]
        engine = ask_program(program, limit.left_s(ASK_SHARE), "allowed: an environment with vLLM")
    except NotInTimeError:
        return {}, [limit.unchecked("model", "its command line was not read, or its weights were not digested,")]
    except ConfigError as error:
        engine = {"problem": str(error), "advice": "see vLLM's message"}
    is_bad = "problem" in engine
    return engine, [DoctorFinding("error", "model", engine["problem"], engine["advice"])] if is_bad else []


def described(arguments: Sequence[str]) -> dict[str, object]:
    """What vLLM makes of a server's command line: facts with the fingerprint, or a problem with advice."""
    try:
        engine = engine_config([*arguments, "--kv-transfer-config", json.dumps(CONNECTOR)])
        support.check_engine(engine)
    except UnsupportedModelError as error:
        return {"problem": str(error), "advice": 'see "What is supported" in docs/vllm.md'}
    except ConfigError as error:
        return {"problem": str(error), "advice": "give the server's command line as --engine-args"}
    identity = identify(engine, installed.installed() or "")
    private = f"KV is kept in host memory only, and ends with the server: {identity.detail}"
    fields = {name: value for name, value in json.loads(identity.fingerprint.canonical).items() if name != "version"}
    return {
        "block_tokens": engine.cache_config.block_size,
        "ranks": engine.parallel_config.tensor_parallel_size,
        "has_latents": bool(engine.model_config.use_mla),
        "shutdown_timeout": getattr(engine, "shutdown_timeout", 0),
        **(
            {"problem": private, "advice": "serve real weights from a local folder"}
            if identity.is_private
            else {"fingerprint": fields}
        ),
    }


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


def _host(config: Config, model: str | None, ranks: int, chunk_tokens: int) -> Iterator[DoctorFinding]:
    """Whether host memory holds enough chunks."""
    folder = None if model is None else local_folder(model, None, None)
    if folder is None:
        return
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
