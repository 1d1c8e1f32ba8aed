"""Checks why vLLM does not find stored KV (`kvtier doctor vllm`). No check starts an engine."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from kvtier.cli.doctor_checks import (
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
from kvtier.config.sections import Config, all_settings
from kvtier.config.value_types import size_text
from kvtier.connect.installed_programs import NotInTimeError, ask_program
from kvtier.connect.model_files import local_folder
from kvtier.connect.vllm import installed_engine, support
from kvtier.connect.vllm.identity import identify, shares_of_ranks
from kvtier.connect.vllm.installed_engine import CONNECTOR, engine_config
from kvtier.connect.vllm.tiering import engine_setup as tiering_setup
from kvtier.connect.vllm.tiering.engine_setup import ORIGIN, TIER
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.layout import EXACT_SALT, Loss
from kvtier.runtime.arena import SLOTS_MIN
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.tier.registry import kind_of

HOST_CHUNKS_FEW = 16
"""Number of chunks below which host memory is reported as small, because one prompt may evict another."""

TERMS = EngineTerms(
    naming="name one: `kvtier vllm config --tier disk:DIR`",
    unit="chunks",
    setting="store.chunk_tokens",
    equal="weights, configuration, dtype, --kv-cache-dtype, tensor parallel size and release of vLLM; give --model and "
    "the rest of the server's command line as --engine-args",
    exact=f"expected with this setting; a request with a cache_salt that begins with {EXACT_SALT!r} gets no stored KV",
)

TIER_TERMS = TERMS._replace(
    naming='add "tiers": ["disk:DIR"] to kvtier\'s entry in secondary_tiers: without a tier the server does not start',
    setting="block_size",
)

EXTRA = "kv_connector_extra_config"

MEMORY = "cpu_bytes_to_use"
"""vLLM's setting for the bytes of its own host memory."""

SPEC = "TieringOffloadingSpec"

OFFLOADING: Mapping[str, object] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    EXTRA: {"spec_name": SPEC, MEMORY: 1},
}
"""Configuration of vLLM's own offloading, with only the settings that vLLM needs to read a command line."""

DESCRIBE = "import json, sys; from kvtier.cli.vllm_doctor import described; print(json.dumps(described(sys.argv[1:])))"
"""Program that asks vLLM to describe a server. It runs in a separate process, which can be killed."""


def examine(
    transfer: str | None,
    tiers: Sequence[str],
    model: str | None,
    block_tokens: int | None,
    engine_arguments: Sequence[str],
    limit: TimeLimit,
) -> list[DoctorFinding]:
    """Return all findings about a server.

    Args:
        transfer: the server's ``--kv-transfer-config``.
        tiers: values of `--tier`, which override the list of tiers.
        model: a folder, or a name in the local hub cache.
        block_tokens: the server's ``--block-size``.
        engine_arguments: the rest of the server's command line.
        limit: the time for all checks.
    """
    place, findings = _placed(transfer)
    advice, origin = "correct the setting; with it the server does not start", EXTRA if place.tier is None else ORIGIN
    try:
        loaded = read_settings(tiers, place.settings(), origin, advice, limit)
    except ConfigError as error:
        loaded = DoctorFinding("error", "settings", str(error), advice)
    if isinstance(loaded, DoctorFinding):
        return [version(), *findings, *_named(place, has_shared=True), loaded]
    config = loaded.config
    has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
    as_connector = ("--kv-transfer-config", json.dumps(CONNECTOR if place.tier is None else OFFLOADING))
    block_size = () if block_tokens is None else ("--block-size", str(block_tokens))
    asked = started("vLLM", lambda: _asked(model, [*engine_arguments, *block_size, *as_connector], limit))

    def of_engine() -> Iterator[DoctorFinding]:
        engine, findings = asked.result(limit.left_s())
        yield from findings
        chunk_tokens, found = _chunk(config, place, block_tokens or engine.get("block_tokens"))
        yield from found
        yield from _host(config, place, model, engine.get("ranks", 1), chunk_tokens)
        if config.tiers and not engine.get("shutdown_timeout"):
            yield DoctorFinding("note", "--shutdown-timeout", *support.SHUTDOWN.split(": "))

    def mine() -> Fingerprint | None:
        engine = asked.result(limit.left_s())[0]
        fields = engine.get("fingerprint")
        if fields and config.store.token_shares and engine.get("has_latents"):
            fields["other"]["ranks"] = shares_of_ranks(config.store.token_shares)
        return fields and Fingerprint(**fields | {"weights": bytes.fromhex(fields["weights"])})

    unused = [it.name for it in all_settings(config) if place.tier and not tiering_setup.USED.fullmatch(it.name)]
    idle = [name for name in unused if loaded.origins[name].where == origin]
    is_connector, policy = place.tier is None, config.store.write_policy
    unit = config.store.chunk_tokens if is_connector else _count(place.extra.get("block_size"))
    terms = TERMS._replace(without_tiers="note" if transfer is None else "warning") if is_connector else TIER_TERMS
    checks = server_checks(loaded, mine, unit, terms, limit, unused)
    return [
        *findings,
        *_named(place, has_shared=has_shared, write_policy=policy, idle=idle, loss=config.store.loss),
        version(),
        *run_checks([*checks, Check("model", of_engine)], limit),
    ]


def server_flags(words: Sequence[str]) -> tuple[str | None, str | None, Sequence[str]]:
    """Split off a server's ``--kv-transfer-config`` and model from the rest of its command line.

    Args:
        words: the JSON alone, or the words after ``vllm serve``.

    Raises:
        ConfigError: a flag has no value.
    """
    if len(words) == 1 and not words[0].startswith("-"):
        return words[0], None, ()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--kv-transfer-config", "--kv_transfer_config")
    parser.add_argument("--model")
    try:
        known, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"the server's flags: {error}; allowed: those of `vllm serve`") from None
    is_first = bool(rest) and rest[0] == words[0] and not rest[0].startswith("-")
    return known.kv_transfer_config, rest.pop(0) if is_first else known.model, rest


def version() -> DoctorFinding:
    """Check whether the installed vLLM is supported."""
    try:
        return DoctorFinding("fine", "vLLM", f"{installed_engine.check_release()} is supported")
    except ConfigError as error:
        advice = "run this command in the server's environment, with a supported release of vLLM installed there"
        return DoctorFinding("error", "vLLM", str(error), advice)


class _Place(NamedTuple):
    """The place where a ``--kv-transfer-config`` names kvtier."""

    whole: Mapping[str, Any]
    connector: Mapping[str, Any]
    """The whole configuration, or the part of a `MultiConnector` that is kvtier or has kvtier below it."""
    others: list[object]
    """Names of the other connectors."""
    tier: Mapping[str, Any] | None = None
    """kvtier's entry in `secondary_tiers`; None if kvtier is the connector."""

    @property
    def entry(self) -> Mapping[str, Any]:
        """The object that names kvtier."""
        return self.connector if self.tier is None else self.tier

    @property
    def names(self) -> Mapping[str, object]:
        """The keys of `entry`, with the values that make vLLM use kvtier."""
        return TIER if self.tier is not None else {key: CONNECTOR[key] for key in CONNECTOR if "connector" in key}

    @property
    def extra(self) -> Mapping[str, Any]:
        """The connector's own configuration."""
        extra = self.connector.get(EXTRA)
        return cast("Mapping[str, Any]", extra) if isinstance(extra, dict) else {}

    def settings(self) -> Mapping[str, object]:
        """Return the settings of kvtier.

        Raises:
            ConfigError: they are not an object.
        """
        if self.tier is not None:
            return {name: value for name, value in self.tier.items() if name not in tiering_setup.VLLM_KEYS}
        extra = self.connector.get(EXTRA)
        if extra is not None and not isinstance(extra, dict):
            raise ConfigError(f"{EXTRA} has the type {type(extra).__name__}; allowed: an object of settings")
        return self.extra


_NOWHERE = _Place({}, {}, [])


def _placed(text: str | None) -> tuple[_Place, list[DoctorFinding]]:
    """Find kvtier in a ``--kv-transfer-config``. If it is not there, also return a finding that says why."""
    about, advice = "--kv-transfer-config", "use the output of `kvtier vllm config`"
    if text is None:
        found = "not given, so role and failure policy were not checked"
        return _NOWHERE, [DoctorFinding("note", about, found, "give the server's --kv-transfer-config")]
    try:
        whole = json_object(text)
    except ConfigError as error:
        return _NOWHERE, [DoctorFinding("error", about, str(error), advice)]
    is_multi = whole.get("kv_connector") == "MultiConnector"
    entries = _tables(_Place(whole, whole, []).extra.get("connectors")) if is_multi else [whole]
    places = [_Place(whole, entry, [it.get("kv_connector") for it in entries if it is not entry]) for entry in entries]
    places += [it._replace(tier=tier) for it in places for tier in _tables(it.extra.get("secondary_tiers"))]
    for place in places:
        if any(place.entry.get(key) == name for key, name in place.names.items()):
            return place, []
    found = "kvtier is not in it: no KvtierConnector, and no KvtierSecondaryTier in secondary_tiers"
    return _NOWHERE, [DoctorFinding("error", about, found, f"{advice}, alone or in the connectors of a MultiConnector")]


def _tables(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a JSON list."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("Mapping[str, Any]", it) for it in items if isinstance(it, dict)]


def _count(value: object) -> int:
    """Return a number as vLLM reads it, or 0 if there is none."""
    try:
        return max(int(cast("Any", value)), 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def _named(
    place: _Place,
    *,
    has_shared: bool,
    write_policy: str = "through",
    idle: Sequence[str] = (),
    loss: Loss = "none",
) -> Iterator[DoctorFinding]:
    """Check that vLLM uses kvtier where a ``--kv-transfer-config`` names it. `idle` settings have no effect there."""
    about, advice, entry = "--kv-transfer-config", "use the output of `kvtier vllm config`", place.entry
    if place is _NOWHERE:
        return
    for key, wanted in place.names.items():
        if entry.get(key) != wanted:
            found = f"is {entry.get(key)!r}, so vLLM does not use kvtier"
            yield DoctorFinding("error", key, found, f"set it to {wanted!r}")
    try:
        support.check_others(place.others if place.tier is None else ())
        if place.tier is None:
            support.check_alone(place.others, loss)
        else:
            tiering_setup.check_class(loss)
        support.check_role(place.whole.get("kv_role"), "through")
        support.check_role(place.connector.get("kv_role"), write_policy if place.tier is None else "through")
    except (ConfigError, UnsupportedModelError) as error:
        yield DoctorFinding("error", about, str(error), "with it the server does not start; " + advice)
        return
    if place.tier is not None:
        yield from _tier(place.extra, idle, has_shared=has_shared)
        return
    view = SimpleNamespace(kv_load_failure_policy=place.whole.get("kv_load_failure_policy", "fail"))
    warnings = support.transfer_warnings(view, str(place.connector.get("kv_role")), has_shared=has_shared)
    for warning in warnings:
        yield DoctorFinding("warning", about, warning, advice)
    if not warnings:
        yield DoctorFinding("fine", about, "role and failure policy are right")


def _tier(extra: Mapping[str, object], idle: Sequence[str], *, has_shared: bool) -> Iterator[DoctorFinding]:
    """Check whether kvtier can work below vLLM's own offloading with this configuration of the connector."""
    spec, memory = extra.get("spec_name"), extra.get(MEMORY)
    if spec != SPEC and "spec_module_path" not in extra:
        found = f"is {spec!r}, with which vLLM reads no secondary_tiers"
        yield DoctorFinding("error", "spec_name", found, f"set it to {SPEC!r}")
    if not _count(memory):
        found = f"is {memory!r}; vLLM needs the bytes of its host memory, through which all KV goes"
        yield DoctorFinding("error", MEMORY, found, "set it to a number of bytes, such as 34359738368")
    if idle:
        found = f"{', '.join(idle)}: only the connector of kvtier has this, so it has no effect here"
        yield DoctorFinding("warning", "secondary_tiers", found, "remove it, or use kvtier as the connector")
    if has_shared:
        seed = os.environ.get("PYTHONHASHSEED")
        found = f"is {'not set' if seed is None else repr(seed)} here; engines with another value find none of the KV"
        yield DoctorFinding("note", "PYTHONHASHSEED", found, "give all engines of a store one value, or none")
    yield DoctorFinding("fine", "--kv-transfer-config", "names kvtier below vLLM's own offloading")


def _asked(
    model: str | None, arguments: Sequence[str], limit: TimeLimit
) -> tuple[Mapping[str, Any], list[DoctorFinding]]:
    """Ask vLLM to describe a server's command line with this model (`described`). Also return findings about it."""
    if model is None:
        return {}, []
    if installed_engine.installed() is None:
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
    """Describe a server's command line as vLLM reads it: facts with the fingerprint, or a problem with advice."""
    try:
        engine = engine_config(arguments)
        is_tier = engine.kv_transfer_config.kv_connector == OFFLOADING["kv_connector"]
        (tiering_setup.check_tiering_engine if is_tier else support.check_engine)(engine)
    except UnsupportedModelError as error:
        return {"problem": str(error), "advice": 'see "What is supported" in docs/vllm.md'}
    except ConfigError as error:
        return {"problem": str(error), "advice": "correct the server's command line, and give it as --engine-args"}
    identity = identify(engine, installed_engine.installed() or "")
    private = f"KV is kept in host memory only, and is lost when the server ends: {identity.detail}"
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


def _chunk(config: Config, place: _Place, block_tokens: int | None) -> tuple[int, list[DoctorFinding]]:
    """Return the number of tokens per chunk, which is 0 if unknown, and findings about it."""
    about, wanted, block = "store.chunk_tokens", config.store.chunk_tokens, block_tokens or support.BLOCK_TOKENS
    if place.tier is not None:
        about, given, blocks = "block_size", place.extra.get("block_size"), place.extra.get("blocks_per_chunk")
        if given is None:
            return (block_tokens or 0) * (1 if blocks is None else _count(blocks)), []
        wanted = _count(given)
        if blocks is not None or not wanted or wanted % block:
            found = f"is {given!r}{'' if blocks is None else ', beside blocks_per_chunk'}: the server does not start"
            advice = f"give either block_size, a multiple of vLLM's block size ({block}), or blocks_per_chunk"
            return wanted, [DoctorFinding("error", about, found, advice)]
    try:
        tokens = choose_chunk_tokens(wanted, block)
    except ConfigError as error:
        advice = "set store.chunk_tokens to 0: kvtier then chooses a valid size"
        return wanted, [DoctorFinding("error", about, str(error), advice)]
    if block_tokens is None:
        return tokens, []
    return tokens, [DoctorFinding("fine", about, f"{tokens}, a multiple of the block size {block_tokens}")]


def _host(config: Config, place: _Place, model: str | None, ranks: int, chunk_tokens: int) -> Iterator[DoctorFinding]:
    """Check whether host memory has room for enough chunks."""
    folder = None if model is None else local_folder(model, None, None)
    if folder is None or not chunk_tokens:
        return
    from kvtier.tools.size import of as size_of

    try:
        kv = size_of(folder, tp=ranks, chunk_tokens=chunk_tokens)
    except ConfigError:  # `kvtier size` does not know the model
        return
    chunk_bytes = int(kv.bytes_per_token_stored * chunk_tokens + kv.state_bytes_stored)
    memory = {"host.capacity_bytes": config.host.capacity_bytes}
    if place.tier is not None:
        memory = {"host.staging_bytes": config.host.staging_bytes, MEMORY: _count(place.extra.get(MEMORY))}
    for about, capacity_bytes in memory.items():
        chunks = capacity_bytes // max(chunk_bytes, 1)
        holds = f"{size_text(capacity_bytes)} of host memory: {chunks} chunks, {chunks * chunk_tokens} tokens"
        advice = f"raise it; a chunk takes {size_text(chunk_bytes)} (in 16-bit numbers)"
        if chunks < SLOTS_MIN:
            yield DoctorFinding("error", about, f"{holds}; too few, so the server does not start", advice)
        elif chunks < HOST_CHUNKS_FEW and about != "host.staging_bytes":
            yield DoctorFinding("warning", about, f"{holds}; one prompt may evict another", advice)
        else:
            yield DoctorFinding("fine", about, holds)
