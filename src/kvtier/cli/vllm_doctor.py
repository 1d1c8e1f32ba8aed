"""Why prompts are not found again in vLLM: each thing that can be at fault, looked at from outside.

What a reader sees is a list: what was looked at, what was found, and what to do about it. Nothing is changed, and no
engine is started.
"""

import json
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

from kvtier.config.kinds import size_text
from kvtier.config.loader import Loaded, Origin, load
from kvtier.config.machine import check
from kvtier.config.sections import Config
from kvtier.connect.vllm import installed, selftest, support
from kvtier.connect.vllm.identity import identify, local_folder
from kvtier.connect.vllm.installed import CONNECTOR, engine_config
from kvtier.connect.vllm.settings import settings_from
from kvtier.connect.vllm.vllm_types import VllmConfig
from kvtier.errors import ConfigError, KvError, UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import checkpoint_files
from kvtier.report.output import progress
from kvtier.runtime.arena import SLOTS_MIN
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.size import of as size_of
from kvtier.store import open_store
from kvtier.store.base import FINGERPRINT_DIGITS, StoreStat
from kvtier.store.disk import is_disk
from kvtier.tier import notes
from kvtier.tier.marker import MARKER_NAME

Level = Literal["error", "warning", "note", "fine"]

HOST_CHUNKS_FEW = 16
"""With fewer chunks in host memory every prompt pushes out the one before it."""

FREE_BYTES_FEW = 1 << 30
"""A file system with less room may be full before the next prompt is stored."""

FULL_SHARE = 0.98
"""Of its cap: a store that holds so much makes room for each chunk that comes."""

DIFFERENCES_MAX = 6
"""Ingredients of a fingerprint that are named."""

SHOWN_MAX = 40
"""Characters of each of their values."""

ADVICE = {
    "directory": "use a directory that is empty or was made by kvtier, on a disk with room, and that the server's user "
    "may write to",
    "disk": "use a directory on a local drive with room that the server's user may write to",
    "host": "set host.capacity_bytes to what this machine can spare",
    "store": "use a file with mode 0600 that the server's user can read (chmod 600)",
    "limits": "see `kvtier config show` for what the setting is for",
    "planner": "see `kvtier config show` for what the setting is for",
}
"""By section: what to do about a setting that does not go with this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What the doctor is told about a server."""

    transfer: str | None = None
    """What ``--kv-transfer-config`` says."""
    directory: Path | None = None
    """Instead of the setting `directory.path`."""
    model: str | None = None
    block_tokens: int | None = None
    engine_arguments: Sequence[str] = ()
    """The rest of the server's command line."""
    is_tested: bool = False
    """Whether to run the test of this vLLM and model."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    An error means that nothing can be found again, a warning that less is found than one may expect. A note is true of
    every server and explains some misses.
    """

    level: Level
    about: str
    found: str
    advice: str = ""

    def row(self) -> tuple[str, str, str, str]:
        """Texts for a table."""
        return (self.level, self.about, self.found, self.advice)

    def plain(self) -> dict[str, str]:
        """A JSON object."""
        return asdict(self)


def examine(patient: Patient) -> list[Finding]:
    """Everything that can be told about `patient`, the worst first."""
    findings = list(_transfer(patient.transfer))
    try:
        loaded = _settings(patient)
    except ConfigError as error:
        findings.append(Finding("error", "settings", str(error), "correct the setting; the server refuses to start"))
        return _sorted([_version("refuse"), *findings])
    config = loaded.config
    findings += _machine(loaded)
    if patient.is_tested:
        findings.append(_selftest(config, patient))
    findings.append(_version("allow" if patient.is_tested else config.vllm.unsupported))
    engine, told = _engine(patient, config)
    findings += told
    block_tokens = patient.block_tokens or (engine.cache_config.block_size if engine is not None else None)
    chunk_tokens, told = _chunk(config, block_tokens)
    findings += told
    findings += _host(config, patient, engine, chunk_tokens)
    findings += _stores(config, None if engine is None else _fingerprint(engine), chunk_tokens)
    findings += _notes(config, chunk_tokens)
    return _sorted(findings)


def _sorted(findings: list[Finding]) -> list[Finding]:
    levels: tuple[Level, ...] = ("error", "warning", "note", "fine")
    return sorted(findings, key=lambda finding: levels.index(finding.level))


def _version(unsupported: str) -> Finding:
    try:
        version = installed.check_engine(unsupported)
    except ConfigError as error:
        advice = "install a release that is supported into the environment of this command, which must be the server's"
        return Finding("error", "vLLM", str(error), advice)
    if installed.is_supported(version):
        return Finding("fine", "vLLM", f"{version} is supported")
    advice = "kvtier vllm doctor --selftest, with --model and --engine-args"
    return Finding("note", "vLLM", f"{version} was never tried; a server needs the result of its test", advice)


def _selftest(config: Config, patient: Patient) -> Finding:
    if patient.model is None:
        return Finding("error", "selftest", "is of a model, and none was given", "give --model and --engine-args")
    if installed.installed() is None:
        return Finding("error", "selftest", "vLLM is not installed here", "run it in the server's environment")
    try:
        told = selftest.run(config, _arguments(patient))
    except (KvError, OSError) as error:
        advice = "do not use this vLLM with this model; report what was seen"
        return Finding("error", "selftest", str(error), advice)
    return Finding("fine", "selftest", told)


def _arguments(patient: Patient) -> list[str]:
    """The server's command line, as far as it is known."""
    told = ["--model", patient.model or "", *patient.engine_arguments]
    return told if patient.block_tokens is None else [*told, "--block-size", str(patient.block_tokens)]


def _transfer(text: str | None) -> Iterator[Finding]:
    about = "--kv-transfer-config"
    if text is None:
        found = "not given, so role and failure policy were not looked at"
        yield Finding("note", about, found, "give what the server's --kv-transfer-config says")
        return
    advice = "take what `kvtier vllm config` prints"
    try:
        told = _object(text)
    except ConfigError as error:
        yield Finding("error", about, str(error), advice)
        return
    for key in ("kv_connector", "kv_connector_module_path"):
        if told.get(key) != CONNECTOR[key]:
            yield Finding(
                "error", key, f"is {told.get(key)!r}, so kvtier is not asked", f"set it to {CONNECTOR[key]!r}"
            )
    view = SimpleNamespace(
        kv_role=told.get("kv_role"), kv_load_failure_policy=told.get("kv_load_failure_policy", "fail")
    )
    warnings = support.warnings(SimpleNamespace(kv_transfer_config=view))
    for warning in warnings:
        yield Finding("warning", about, warning, advice)
    if not warnings:
        yield Finding("fine", about, "role and failure policy are right")


def _object(text: str) -> Mapping[str, object]:
    """The JSON object that `text` is.

    Raises:
        ConfigError: it is none. The message does not repeat it, since it may hold a secret.
    """
    try:
        told: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"is no JSON: {error}; has the shell taken its quotes away?") from None
    if not isinstance(told, dict):
        raise ConfigError("is JSON, but no object")
    return cast("Mapping[str, object]", told)


def _settings(patient: Patient) -> Loaded:
    """The settings of the server, as far as they can be seen from here.

    Raises:
        ConfigError: one of them is wrong.
    """
    loaded = load()
    config, origins = loaded.config, dict(loaded.origins)
    extra: object = None
    if patient.transfer is not None:
        with suppress(ConfigError):  # that it is no JSON has been said
            extra = _object(patient.transfer).get("kv_connector_extra_config")
    if extra is not None:
        if not isinstance(extra, dict):
            raise ConfigError(f"kv_connector_extra_config is {extra!r}; allowed: an object of settings")
        told = cast("Mapping[str, object]", extra)
        config = settings_from(told, config)
        origins |= dict.fromkeys(_names(told), Origin("flag", "kv_connector_extra_config"))
    if patient.directory is not None:
        config = settings_from({"directory.path": str(patient.directory)}, config)
        origins["directory.path"] = Origin("flag", "--dir")
    return Loaded(config=config, origins=origins, file=loaded.file)


def _names(extra: Mapping[str, object]) -> Iterator[str]:
    for name, value in extra.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{key}" for key in cast("Mapping[str, object]", value))
        else:
            yield name


def _machine(loaded: Loaded) -> Iterator[Finding]:
    """What does not go with this machine."""
    findings = check(loaded.config, loaded.origins, loaded.file)
    for finding in findings:
        section = finding.setting.partition(".")[0]
        yield Finding(finding.level, finding.setting, f"{finding.value}: {finding.detail}", ADVICE[section])
    if not findings:
        yield Finding("fine", "settings", "can work on this machine")


def _engine(patient: Patient, config: Config) -> tuple[VllmConfig | None, list[Finding]]:
    """The engine that a server with this model would be, where that can be told here."""
    model = patient.model
    if model is None:
        return None, []
    if installed.installed() is None:
        return None, list(_weights(model))
    transfer = {**CONNECTOR, "kv_connector_extra_config": {"vllm.unsupported": config.vllm.unsupported}}
    told = [*_arguments(patient), "--kv-transfer-config", json.dumps(transfer)]
    try:
        engine = engine_config(told)
        support.check_engine(engine)
    except UnsupportedModelError as error:
        return None, [Finding("error", "model", str(error), "see the guide: what is refused")]
    except ConfigError as error:
        return None, [Finding("error", "model", str(error), "give --engine-args as they are on the server")]
    return engine, []


def _weights(model: str) -> Iterator[Finding]:
    """What can be told of a checkpoint without vLLM."""
    folder = local_folder(model, None, None)
    problem = f"the weights of {model} are in no folder of this machine" if folder is None else ""
    if folder is not None:
        try:
            checkpoint_files(folder)
        except ConfigError as error:
            problem = str(error)
    if problem:
        advice = "serve it from a folder with its weights: without them nothing is kept below host memory"
        yield Finding("error", "model", problem, advice)
        return
    advice = "run this command in the server's environment"
    yield Finding("note", "model", "only vLLM can tell this model's fingerprint, and it is not installed here", advice)


def _fingerprint(engine: VllmConfig) -> Fingerprint | Finding:
    """The fingerprint of an engine; or why its KV is shared with no other engine."""
    identity = identify(engine, installed.build_of(installed.installed() or ""))
    if identity.is_private:
        found = f"nothing is kept below host memory, and nothing survives the server: {identity.detail}"
        return Finding("error", "model", found, "serve real weights from a folder on this machine")
    return identity.fingerprint


def _chunk(config: Config, block_tokens: int | None) -> tuple[int, list[Finding]]:
    """Tokens of a chunk, and what is wrong with them."""
    wanted = config.store.chunk_tokens
    try:
        tokens = choose_chunk_tokens(wanted, block_tokens or 1)
    except ConfigError as error:
        advice = "leave store.chunk_tokens at 0: a size that fits is then chosen"
        return wanted, [Finding("error", "store.chunk_tokens", str(error), advice)]
    if block_tokens is None:
        return tokens, []
    return tokens, [Finding("fine", "store.chunk_tokens", f"{tokens}, a multiple of the block size {block_tokens}")]


def _host(config: Config, patient: Patient, engine: VllmConfig | None, chunk_tokens: int) -> Iterator[Finding]:
    """Whether host memory holds more than a moment's work."""
    folder = None if patient.model is None else local_folder(patient.model, None, None)
    if folder is None:
        return
    ranks = 1 if engine is None else engine.parallel_config.tensor_parallel_size
    try:
        kv = size_of(folder, tp=ranks, chunk_tokens=chunk_tokens)
    except ConfigError:  # a model that `kvtier size` does not know
        return
    chunk_bytes = int(kv.bytes_per_token_stored * chunk_tokens + kv.state_bytes_stored)
    chunks = config.host.capacity_bytes // max(chunk_bytes, 1)
    holds = f"{size_text(config.host.capacity_bytes)} of host memory: {chunks} chunks, {chunks * chunk_tokens} tokens"
    advice = f"set host.capacity_bytes to more; a chunk takes {size_text(chunk_bytes)} (as 16-bit numbers)"
    if chunks < SLOTS_MIN:
        yield Finding("error", "host.capacity_bytes", f"{holds}; the server refuses to start", advice)
    elif chunks < HOST_CHUNKS_FEW:
        yield Finding("warning", "host.capacity_bytes", f"{holds}; it hardly holds one prompt", advice)
    else:
        yield Finding("fine", "host.capacity_bytes", holds)


def _stores(config: Config, mine: Fingerprint | Finding | None, chunk_tokens: int) -> Iterator[Finding]:
    """What lies in the lower tiers."""
    if isinstance(mine, Finding):
        yield mine
        return
    directory, disk = config.directory.path, config.disk.path
    if directory is None and disk is None:
        found = "neither directory.path nor disk.path is set: a restart forgets everything"
        yield Finding("warning", "tiers", found, "set directory.path (`kvtier vllm config --dir DIR`)")
    secret_file = config.store.secret_file
    is_keyed = secret_file is not None or config.store.secret is not None
    for root in (directory, *([] if disk is None else sorted(disk.glob("rank-*")))):
        if root is None or not ((root / MARKER_NAME).is_file() or is_disk(root)):
            continue  # what is wrong with a place that is no store has been said
        try:
            found = _statistics(root, config)
        except (KvError, OSError) as error:
            yield Finding("error", str(root), f"cannot be read: {error}", ADVICE["directory"])
            continue
        if not is_keyed:
            yield from _secret(root if root == directory or directory is not None else root.parent, found)
        yield from _room(root, found)
        yield from _content(root, found, mine, chunk_tokens if config.store.chunk_tokens else 0)


def _statistics(root: Path, config: Config) -> StoreStat:
    store = open_store(root)
    found = store.objects()
    with progress("reading heads", len(found)) as advance:
        result = store.statistics(found, advance)
    return result if is_disk(root) else replace(result, capacity_bytes=config.directory.capacity_bytes)


def _secret(place: Path, found: StoreStat) -> Iterator[Finding]:
    """The secret that is kept beside a store: whoever may read it could tell which texts were cached."""
    file = place / "secret"
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except FileNotFoundError:
        if found.objects:
            told = f"{file} is missing: the names of the {found.objects} objects here were made with another secret"
            yield Finding("error", "secret", told, "bring the file back, or `kvtier inspect purge` the store")
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        told = f"{file} has mode {mode:04o}, so others can read it and the server refuses it"
        yield Finding("error", "secret", told, f"chmod 600 {file}")


def _room(root: Path, found: StoreStat) -> Iterator[Finding]:
    if found.free_bytes < FREE_BYTES_FEW:
        told = f"the file system has only {size_text(found.free_bytes)} left; when it is full nothing is stored"
        yield Finding("warning", str(root), told, "make room, or lower the tier's capacity_bytes")
    if found.capacity_bytes and (found.recorded_bytes or 0) >= FULL_SHARE * found.capacity_bytes:
        told = f"{size_text(found.capacity_bytes)} are full: each new chunk pushes out the one that was unused longest"
        yield Finding("warning", str(root), told, "raise directory.capacity_bytes if prompts are gone too soon")
    if found.unreadable:
        told = f"{found.unreadable} of {found.objects} objects cannot be read; each is a miss"
        yield Finding("warning", str(root), told, f"kvtier inspect verify --repair {root}")


def _content(root: Path, found: StoreStat, mine: Fingerprint | None, chunk_tokens: int) -> Iterator[Finding]:
    """Whether what is stored can be of use; `chunk_tokens` is 0 where vLLM chooses."""
    shares = found.fingerprints
    if not shares:
        told = "nothing has been stored yet"
        yield Finding("note", str(root), told, "a prompt's whole chunks are stored when it is computed; ask it first")
        return
    key = None if mine is None else mine.digest.hex()[:FINGERPRINT_DIGITS]
    if mine is not None and key not in shares:
        told = f"holds {', '.join(shares)}, but nothing of this model, which is {key}{_differences(root, shares, mine)}"
        advice = (
            "the same KV needs the same weights, configuration, dtype, --kv-cache-dtype, tensor parallel size and "
            "release of vLLM; give --engine-args as they are on the server"
        )
        yield Finding("error", str(root), told, advice)
        return
    if key is None and len(shares) > 1:
        told = f"holds KV of {len(shares)} fingerprints: {', '.join(shares)}"
        advice = "fine for several models; for one model, something that changes its numbers was changed (try --model)"
        yield Finding("warning", str(root), told, advice)
    sizes = {share.tokens // share.objects for name, share in shares.items() if key in (None, name)}
    if chunk_tokens and chunk_tokens not in sizes:
        told = f"holds chunks of {', '.join(map(str, sorted(sizes)))} tokens; store.chunk_tokens is {chunk_tokens}"
        yield Finding("error", str(root), told, "chunks of different sizes are never found: use one size")
    own = shares[key] if key is not None else None
    told = (
        f"{found.objects} objects, {size_text(found.bytes)}" if own is None else f"{own.objects} objects of this model"
    )
    yield Finding("fine", str(root), told)


def _differences(root: Path, shares: Iterable[str], mine: Fingerprint) -> str:
    """In what each fingerprint of a store differs from `mine`, where engines have left what theirs is made of."""
    place = root.parent if is_disk(root) else root
    known = {str(note.get("digest"))[:FINGERPRINT_DIGITS]: note.get("of") for note in notes.read(place, "fingerprint")}
    own = dict(_leaves(json.loads(mine.canonical)))
    told: list[str] = []
    for share in shares:
        if share not in known:
            continue
        other = dict(_leaves(known[share]))
        names = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
        named = (
            f"{name} is {_shown(own.get(name))}, there {_shown(other.get(name))}" for name in names[:DIFFERENCES_MAX]
        )
        more = f", and {len(names) - DIFFERENCES_MAX} more" if len(names) > DIFFERENCES_MAX else ""
        told.append(f"; {share} differs in: {', '.join(named)}{more}")
    return "".join(told)


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The values in a tree of mappings, by their path; without what all have in common, ``other``."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            yield from _leaves(inner, f"{name}.{key}".removeprefix(".").removeprefix("other."))
    else:
        yield name, value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."


def _notes(config: Config, chunk_tokens: int) -> Iterator[Finding]:
    """What is so everywhere, and is taken for a fault."""
    least = "at least " if config.store.chunk_tokens == 0 else ""
    told = f"only whole chunks are found again, of {least}{chunk_tokens} tokens; at least one token is always computed"
    yield Finding("note", "short prompts", told, "ask with a longer prompt, or set store.chunk_tokens lower")
    if config.planner.enabled:
        told = "where computing is expected to be faster than loading, it is computed: likely with small models"
        yield Finding("note", "planner", told, "to see every hit, set planner.enabled to false")
    told = "does not matter: kvtier's names do not depend on Python's hashes, nor on vLLM's"
    yield Finding("note", "PYTHONHASHSEED", told)
