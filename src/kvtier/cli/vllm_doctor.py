"""Checks of `kvtier vllm doctor`: why vLLM does not find KV that was stored.

Each check yields findings: what was checked, what was found, and what to do. Without the self-test no check changes
anything or starts an engine.
"""

import json
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, cast

from kvtier.config.loader import TIERS, Loaded, load
from kvtier.config.machine_checks import check
from kvtier.config.sections import Config
from kvtier.config.tier_list import Origin
from kvtier.config.value_types import size_text
from kvtier.connect.vllm import installed, selftest, support
from kvtier.connect.vllm.identity import identify, local_folder
from kvtier.connect.vllm.installed import CONNECTOR, engine_config
from kvtier.connect.vllm.settings import settings_from
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, KvError, UnsupportedModelError
from kvtier.inspection.inspector import FINGERPRINT_DIGITS, StoreInspector, StoreStat
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import checkpoint_files
from kvtier.report.output import progress
from kvtier.runtime.arena import SLOTS_MIN
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.size import of as size_of
from kvtier.tier import store_notes as notes
from kvtier.tier.registry import TierSettings, kind_of

Level = Literal["error", "warning", "note", "fine"]

HOST_CHUNKS_FEW = 16
"""Host memory of fewer chunks is reported: each prompt evicts the previous one."""

FREE_BYTES_FEW = 1 << 30
"""A file system with less free space may be full before the next prompt is stored."""

FULL_SHARE = 0.98
"""Share of the cap above which a store evicts for every new chunk."""

DIFFERENCES_MAX = 6
"""Fingerprint differences listed per fingerprint."""

SHOWN_MAX = 40
"""Characters shown of a value."""

ADVICE = {
    "tiers": "use an empty directory, or one made by kvtier, with free space and write permission for the server's "
    "user; `kvtier config show` explains the setting",
    "host": "lower host.capacity_bytes to memory that this machine has free",
    "store": "use a file with mode 0600 that the server's user can read (chmod 600)",
    "limits": "`kvtier config show` explains the setting",
    "planner": "`kvtier config show` explains the setting",
}
"""Advice by section, for a setting that does not work on this machine."""


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
    is_selftest: bool = False
    """Run the self-test of this vLLM and model."""


class DoctorFinding(NamedTuple):
    """Result of one check.

    Error: stored KV cannot be found. Warning: less KV is found than expected. Note: a property of every server that
    explains some misses.
    """

    level: Level
    about: str
    found: str
    advice: str = ""


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
        return _sorted([_version("refuse"), *findings])
    config = loaded.config
    has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
    findings = list(_transfer(server.transfer, has_shared=has_shared, write_policy=config.store.write_policy))
    findings += _machine(loaded)
    if server.is_selftest:
        findings.append(_selftest(config, server))
    findings.append(_version("allow" if server.is_selftest else config.vllm.unsupported))
    engine, found = _engine(server, config)
    findings += found
    block_tokens = server.block_tokens or (engine.cache_config.block_size if engine is not None else None)
    chunk_tokens, found = _chunk(config, block_tokens)
    findings += found
    findings += _host(config, server, engine, chunk_tokens)
    findings += _stores(config, None if engine is None else _fingerprint(engine), chunk_tokens)
    findings += _notes(config, chunk_tokens)
    return _sorted(findings)


def _sorted(findings: list[DoctorFinding]) -> list[DoctorFinding]:
    levels: tuple[Level, ...] = ("error", "warning", "note", "fine")
    return sorted(findings, key=lambda finding: levels.index(finding.level))


def _version(unsupported: str) -> DoctorFinding:
    try:
        version = installed.check_engine(unsupported)
    except ConfigError as error:
        advice = "run this command in the server's environment, with a supported release of vLLM installed there"
        return DoctorFinding("error", "vLLM", str(error), advice)
    if installed.is_supported(version):
        return DoctorFinding("fine", "vLLM", f"{version} is supported")
    advice = "run `kvtier vllm doctor --selftest` with --model and --engine-args"
    return DoctorFinding(
        "note", "vLLM", f"{version} is not supported; a server needs the result of its self-test", advice
    )


def _selftest(config: Config, server: ServerDescription) -> DoctorFinding:
    if server.model is None:
        return DoctorFinding("error", "selftest", "needs a model, and none was given", "give --model and --engine-args")
    if installed.installed() is None:
        return DoctorFinding("error", "selftest", "vLLM is not installed here", "run it in the server's environment")
    try:
        summary = selftest.run(config, _arguments(server))
    except (KvError, OSError) as error:
        advice = "do not use this vLLM with this model; report this message"
        return DoctorFinding("error", "selftest", str(error), advice)
    return DoctorFinding("fine", "selftest", summary)


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
        transfer = _object(text)
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


def _object(text: str) -> Mapping[str, object]:
    """Parse a JSON object.

    Raises:
        ConfigError: `text` is not one. The message does not repeat it, since it may contain a secret.
    """
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"is not valid JSON: {error}; did the shell remove its quotes?") from None
    if not isinstance(value, dict):
        raise ConfigError("is JSON, but not an object")
    return cast("Mapping[str, object]", value)


def _settings(server: ServerDescription) -> Loaded:
    """The server's settings, as visible from here.

    Raises:
        ConfigError: a setting is wrong.
    """
    loaded = load(tiers=server.tiers)
    config, origins = loaded.config, dict(loaded.origins)
    extra: object = None
    if server.transfer is not None:
        with suppress(ConfigError):  # `_transfer` reports it
            extra = _object(server.transfer).get("kv_connector_extra_config")
    if extra is not None:
        if not isinstance(extra, dict):
            raise ConfigError(f"kv_connector_extra_config is {extra!r}; allowed: an object of settings")
        given = {
            it: each for it, each in cast("Mapping[str, object]", extra).items() if it != TIERS or not server.tiers
        }
        config = settings_from(given, config)
        origins |= dict.fromkeys(_names(given, config), Origin("flag", "kv_connector_extra_config"))
    return Loaded(config=config, origins=origins, file=loaded.file)


def _names(extra: Mapping[str, object], config: Config) -> Iterator[str]:
    for name, value in extra.items():
        if name == TIERS:
            yield from (each.name for tier in config.tiers for each in tier.settings())
        elif isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in cast("Mapping[str, object]", value))
        else:
            yield name


def _machine(loaded: Loaded) -> Iterator[DoctorFinding]:
    """Settings that do not work on this machine."""
    findings = check(loaded.config, loaded.origins, loaded.file)
    for finding in findings:
        section = finding.setting.partition(".")[0]
        yield DoctorFinding(finding.level, finding.setting, f"{finding.value}: {finding.detail}", ADVICE[section])
    if not findings:
        yield DoctorFinding("fine", "settings", "work on this machine")


def _engine(server: ServerDescription, config: Config) -> tuple[VllmConfig | None, list[DoctorFinding]]:
    """VLLM's configuration of a server with this model, if vLLM is installed."""
    model = server.model
    if model is None:
        return None, []
    if installed.installed() is None:
        return None, list(_weights(model))
    transfer = {**CONNECTOR, "kv_connector_extra_config": {"vllm.unsupported": config.vllm.unsupported}}
    try:
        engine = engine_config([*_arguments(server), "--kv-transfer-config", json.dumps(transfer)])
        support.check_engine(engine)
    except UnsupportedModelError as error:
        return None, [DoctorFinding("error", "model", str(error), 'see "What is supported" in docs/guides/vllm.md')]
    except ConfigError as error:
        return None, [DoctorFinding("error", "model", str(error), "give the server's command line as --engine-args")]
    return engine, []


def _weights(model: str) -> Iterator[DoctorFinding]:
    """Check a checkpoint without vLLM."""
    folder = local_folder(model, None, None)
    problem = f"the weights of {model} are in no local folder" if folder is None else ""
    if folder is not None:
        try:
            checkpoint_files(folder)
        except ConfigError as error:
            problem = str(error)
    if problem:
        advice = "serve it from a local folder with its weights; without them KV is kept in host memory only"
        yield DoctorFinding("error", "model", problem, advice)
        return
    advice = "run this command in the server's environment"
    yield DoctorFinding("note", "model", "its fingerprint is unknown, because vLLM is not installed here", advice)


def _fingerprint(engine: VllmConfig) -> Fingerprint | DoctorFinding:
    """The fingerprint of an engine; or a finding, if its KV cannot be shared."""
    identity = identify(engine, installed.build_of(installed.installed() or ""))
    if identity.is_private:
        found = f"KV is kept in host memory only, and ends with the server: {identity.detail}"
        return DoctorFinding("error", "model", found, "serve real weights from a local folder")
    return identity.fingerprint


def _chunk(config: Config, block_tokens: int | None) -> tuple[int, list[DoctorFinding]]:
    """Tokens of a chunk, with findings."""
    wanted = config.store.chunk_tokens
    try:
        tokens = choose_chunk_tokens(wanted, block_tokens or 1)
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


def _stores(config: Config, mine: Fingerprint | DoctorFinding | None, chunk_tokens: int) -> Iterator[DoctorFinding]:
    """The contents of the lower tiers."""
    if isinstance(mine, DoctorFinding):
        yield mine
        return
    if not config.tiers:
        found = "no tier is configured, so KV ends with the server"
        yield DoctorFinding("warning", "tiers", found, "name one (`kvtier vllm config --tier disk:DIR`)")
    is_keyed = config.store.secret_file is not None or config.store.secret is not None
    for tier in config.tiers:
        kind = kind_of(tier)
        secret, folder = kind.secret_path(tier), kind.folder(tier)
        for store in _inspectors(tier):
            try:
                found = _statistics(store, tier)
            except (KvError, OSError) as error:
                yield DoctorFinding("error", store.place, f"cannot be read: {error}", ADVICE[TIERS])
                continue
            if not is_keyed and secret is not None:
                yield from _secret(secret, found)
            yield from _room(found, tier)
            yield from _content(found, folder, mine, chunk_tokens if config.store.chunk_tokens else 0)
        is_keyed |= secret is not None  # the first tier with a secret keys all names
        if kind.is_remote:
            text = "its objects are not read here, because each costs a request"
            yield DoctorFinding("note", tier.label, text, f"kvtier inspect stat {tier.kind}:...")


def _inspectors(tier: TierSettings) -> list[StoreInspector]:
    """The tier's stores, where they can be read without opening the tier; `_machine` reports what is not a store."""
    kind = kind_of(tier)
    if kind.inspect is None or kind.is_remote:
        return []
    with suppress(ConfigError):
        return [StoreInspector([view], view.place) for view in kind.inspect(tier)]
    return []


def _statistics(store: StoreInspector, tier: TierSettings) -> StoreStat:
    found = store.objects()
    with progress("reading heads", len(found)) as advance:
        result = store.statistics(found, advance)
    if result.capacity_bytes is None and kind_of(tier).has_cap:
        result = replace(result, capacity_bytes=getattr(tier, "capacity_bytes", None))
    return result


def _secret(file: Path, found: StoreStat) -> Iterator[DoctorFinding]:
    """The secret next to a store. With it, a reader of the store could test which texts were cached."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except FileNotFoundError:
        if found.objects:
            missing = f"{file} is missing, so the {found.objects} objects here cannot be found"
            yield DoctorFinding(
                "error", "secret", missing, "restore the file, or run `kvtier inspect purge` on the store"
            )
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        readable = f"{file} has mode {mode:04o}: other users can read it, so the server refuses it"
        yield DoctorFinding("error", "secret", readable, f"chmod 600 {file}")


def _room(found: StoreStat, tier: TierSettings) -> Iterator[DoctorFinding]:
    root = found.directory
    if found.free_bytes is not None and found.free_bytes < FREE_BYTES_FEW:
        text = f"the file system has only {size_text(found.free_bytes)} free; when it is full nothing is stored"
        yield DoctorFinding("warning", root, text, "free some space, or lower the tier's capacity_bytes")
    if found.capacity_bytes and (found.recorded_bytes or 0) >= FULL_SHARE * found.capacity_bytes:
        text = f"its cap of {size_text(found.capacity_bytes)} is reached: each new chunk evicts the least recently used"
        yield DoctorFinding("warning", root, text, f"raise {tier.label}.capacity_bytes if prompts are evicted too soon")
    if found.unreadable:
        text = f"{found.unreadable} of {found.objects} objects cannot be read; each is a miss"
        yield DoctorFinding("warning", root, text, f"kvtier inspect verify --repair {root}")


def _content(
    found: StoreStat, folder: Path | None, mine: Fingerprint | None, chunk_tokens: int
) -> Iterator[DoctorFinding]:
    """Whether the server can use the stored objects. `chunk_tokens` is 0 if kvtier chooses it."""
    shares, root = found.fingerprints, found.directory
    if not shares:
        text = "nothing has been stored yet"
        yield DoctorFinding("note", root, text, "send a request first; its full chunks are stored after each step")
        return
    key = None if mine is None else mine.digest.hex()[:FINGERPRINT_DIGITS]
    if mine is not None and key not in shares:
        text = (
            f"holds {', '.join(shares)}, but nothing of this model, which is {key}{_differences(folder, shares, mine)}"
        )
        advice = (
            "KV is found only with equal weights, configuration, dtype, --kv-cache-dtype, tensor parallel size and "
            "release of vLLM; give the server's command line as --engine-args"
        )
        yield DoctorFinding("error", root, text, advice)
        return
    if key is None and len(shares) > 1:
        text = f"holds KV of {len(shares)} fingerprints: {', '.join(shares)}"
        advice = "expected with several models; with one model, its weights or settings have changed (give --model)"
        yield DoctorFinding("warning", root, text, advice)
    sizes = {share.tokens // share.objects for name, share in shares.items() if key in (None, name)}
    if chunk_tokens and chunk_tokens not in sizes:
        text = f"holds chunks of {', '.join(map(str, sorted(sizes)))} tokens; store.chunk_tokens is {chunk_tokens}"
        yield DoctorFinding("error", root, text, "chunks of another size are never found: use one size")
    own = shares[key] if key is not None else None
    text = (
        f"{found.objects} objects, {size_text(found.bytes)}" if own is None else f"{own.objects} objects of this model"
    )
    yield DoctorFinding("fine", root, text)


def _differences(folder: Path | None, shares: Iterable[str], mine: Fingerprint) -> str:
    """Differences of a store's fingerprints from `mine`, for fingerprints with a note next to the store."""
    left = [] if folder is None else notes.read(folder, "fingerprint")
    known = {str(note.get("digest"))[:FINGERPRINT_DIGITS]: note.get("of") for note in left}
    own = dict(_leaves(json.loads(mine.canonical)))
    found: list[str] = []
    for share in shares:
        if share not in known:
            continue
        other = dict(_leaves(known[share]))
        names = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
        named = (
            f"{name} is {_shown(own.get(name))}, there {_shown(other.get(name))}" for name in names[:DIFFERENCES_MAX]
        )
        more = f", and {len(names) - DIFFERENCES_MAX} more" if len(names) > DIFFERENCES_MAX else ""
        found.append(f"; {share} differs in: {', '.join(named)}{more}")
    return "".join(found)


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of the leaves in a tree of mappings; the common prefix ``other.`` is omitted."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            yield from _leaves(inner, f"{name}.{key}".removeprefix(".").removeprefix("other."))
    else:
        yield name, value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."


def _notes(config: Config, chunk_tokens: int) -> Iterator[DoctorFinding]:
    """Properties of every server that are mistaken for faults."""
    least = "at least " if config.store.chunk_tokens == 0 else ""
    text = f"only full chunks are found, of {least}{chunk_tokens} tokens; the last token is always computed"
    yield DoctorFinding("note", "short prompts", text, "use a longer prompt, or lower store.chunk_tokens")
    if config.planner.enabled:
        text = "KV is computed where that is expected to be faster than loading, which is likely with small models"
        yield DoctorFinding("note", "planner", text, "to see every hit, set planner.enabled to false")
    text = "has no effect: kvtier's names depend on neither Python's hashes nor vLLM's"
    yield DoctorFinding("note", "PYTHONHASHSEED", text)
