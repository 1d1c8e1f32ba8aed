"""Findings of every engine's doctor: settings that do not work on this machine, and what the tiers hold.

Each check yields findings: what was checked, what was found, and what to do. No check changes anything.
"""

import json
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from kvtier.config.loader import TIERS, Loaded
from kvtier.config.machine_checks import check
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError, KvError
from kvtier.inspection.inspector import MODEL_DIGITS, StoreInspector
from kvtier.inspection.results import StoreStat
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.secret import load, model_id
from kvtier.report.output import print_json, progress
from kvtier.report.table import Table, print_table
from kvtier.tier import store_notes as notes
from kvtier.tier.registry import TierKind, TierSettings, kind_of

Level = Literal["error", "warning", "note", "fine"]

FREE_BYTES_FEW = 1 << 30
"""A file system with less free space may be full before the next prompt is stored."""

FULL_SHARE = 0.98
"""Share of the cap above which a store evicts for every new chunk."""

DIFFERENCES_MAX = 6
"""Fingerprint differences listed per fingerprint."""

SHOWN_MAX = 40
"""Characters shown of a value."""

REMOTE_DEADLINE_S = 15.0
"""How long a remote tier may take to answer."""

ADVICE = {
    "tiers": "use an empty directory, or one made by kvtier, with free space and write permission for the server's "
    "user; `kvtier config show` explains the setting",
    "host": "lower host.capacity_bytes to memory that this machine has free",
    "store": "use a file with mode 0600 that the server's user can read (chmod 600)",
    "limits": "`kvtier config show` explains the setting",
    "planner": "`kvtier config show` explains the setting",
}
"""Advice by section, for a setting that does not work on this machine."""


class DoctorFinding(NamedTuple):
    """Result of one check.

    Error: stored KV cannot be found. Warning: less KV is found than expected. Note: a property of every server that
    explains some misses.
    """

    level: Level
    about: str
    found: str
    advice: str = ""


class EngineTerms(NamedTuple):
    """What differs between the engines in a finding about a store."""

    command: str
    """The engine's group of commands, such as ``vllm``."""
    unit: str
    """What an object holds: ``chunks`` or ``pages``."""
    setting: str
    """The setting that decides the tokens of one unit."""
    equal: str
    """What must be equal for KV to be found, as advice."""


def report(findings: list[DoctorFinding], *, as_json: bool) -> int:
    """Print the findings; the command's exit code, 1 with an error or a warning."""
    is_bad = any(finding.level in {"error", "warning"} for finding in findings)
    if as_json:
        print_json({"ok": not is_bad, "findings": cast("object", [finding._asdict() for finding in findings])})
    else:
        print_table(Table(("", "about", "what was found", "what to do"), findings))
    return 1 if is_bad else 0


def in_order(findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """The findings, the most severe first."""
    return sorted(findings, key=lambda finding: get_args(Level).index(finding.level))


def json_object(text: str) -> Mapping[str, object]:
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


def machine(loaded: Loaded, unused: Iterable[str] = ()) -> Iterator[DoctorFinding]:
    """Settings that do not work on this machine, without those that the engine does not use."""
    found = [it for it in check(loaded.config, loaded.origins, loaded.file) if it.setting not in unused]
    for it in found:
        yield DoctorFinding(it.level, it.setting, f"{it.value}: {it.detail}", ADVICE[it.setting.partition(".")[0]])
    if not found:
        yield DoctorFinding("fine", "settings", "work on this machine")


def stores(
    config: Config, mine: Fingerprint | DoctorFinding | None, unit_tokens: int, terms: EngineTerms
) -> Iterator[DoctorFinding]:
    """The contents of the lower tiers.

    Args:
        config: the server's settings.
        mine: the server's fingerprint, or why it has none; None: unknown.
        unit_tokens: tokens of an object; 0: any.
        terms: the engine's.
    """
    if isinstance(mine, DoctorFinding):
        yield mine
        return
    if not config.tiers:
        found = "no tier is configured, so KV ends with the server"
        yield DoctorFinding("warning", "tiers", found, f"name one (`kvtier {terms.command} config --tier disk:DIR`)")
    model = "" if mine is None else _model(config, mine)
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
            yield from _content(found, folder, mine, model, unit_tokens, terms)
        is_keyed |= secret is not None  # the first tier with a secret keys all names
        if kind.is_remote:
            yield _remote(tier, kind)


def _remote(tier: TierSettings, kind: TierKind[TierSettings]) -> DoctorFinding:
    """Whether a remote tier answers. Runs in its own thread, since its client may hang."""
    inspect = kind.inspect
    text, advice = "its objects are not read here, because each costs a request", f"kvtier inspect stat {tier.kind}:..."
    if inspect is None:
        return DoctorFinding("note", tier.label, text, advice)
    problems = [f"does not answer within {REMOTE_DEADLINE_S:g} s"]

    def ask() -> None:
        try:
            inspect(tier)
        except (KvError, OSError) as error:
            problems[0] = f"does not answer: {getattr(error, 'strerror', None) or error}"
        else:
            problems.clear()

    thread = threading.Thread(target=ask, name="kvtier doctor", daemon=True)
    thread.start()
    thread.join(REMOTE_DEADLINE_S)
    if problems:
        return DoctorFinding("error", tier.label, problems[0], "start it, or correct its address and its login")
    return DoctorFinding("note", tier.label, f"answers; {text}", advice)


def _inspectors(tier: TierSettings) -> list[StoreInspector]:
    """The tier's stores, where they can be read without opening the tier; `machine` reports what is not a store."""
    kind = kind_of(tier)
    if kind.inspect is None or kind.is_remote:
        return []
    with suppress(ConfigError):
        return [StoreInspector([view], view.place) for view in kind.inspect(tier)]
    return []


def _statistics(store: StoreInspector, tier: TierSettings) -> StoreStat:
    with progress("listing objects", None):
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
            advice = "restore the file, or run `kvtier inspect purge` on the store"
            yield DoctorFinding("error", "secret", missing, advice)
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
        text = f"{found.unreadable} of {found.objects} objects are damaged, or of another version; each is a miss"
        yield DoctorFinding("warning", root, text, f"kvtier inspect verify --repair {root}")


def _content(
    found: StoreStat, folder: Path | None, mine: Fingerprint | None, model: str, unit_tokens: int, terms: EngineTerms
) -> Iterator[DoctorFinding]:
    """Whether the server can use the stored objects."""
    shares, root = found.models, found.directory
    if not shares:
        advice = f"send a request first; its full {terms.unit} are stored"
        yield DoctorFinding("note", root, "nothing has been stored yet", advice)
        return
    left = [] if folder is None else notes.read(folder)
    known = {str(note.get("model"))[:MODEL_DIGITS]: note.get("of") for note in left}
    named = [share for share in shares if share in known]
    key = None if mine is None else model
    if mine is not None and key not in shares:
        unlike = _unlike(json.loads(mine.canonical), known, named)
        text = f"holds {', '.join(shares)}, but nothing of this model, which is {key}{unlike}"
        yield DoctorFinding("error", root, text, f"KV is found only with equal {terms.equal}")
        return
    if key is None and len(shares) > 1:
        unlike = f"; next to {named[0]}{_unlike(known[named[0]], known, named[1:])}" if len(named) > 1 else ""
        advice = "expected with several models; with one model, its weights or settings have changed"
        text = f"holds KV of {len(shares)} models: {', '.join(shares)}{unlike}"
        yield DoctorFinding("warning", root, text, f"{advice}: KV is found only with equal {terms.equal}")
    sizes = {share.tokens // share.objects for name, share in shares.items() if key in (None, name)}
    if unit_tokens and unit_tokens not in sizes:
        text = f"holds {terms.unit} of {', '.join(map(str, sorted(sizes)))} tokens; {terms.setting} is {unit_tokens}"
        yield DoctorFinding("error", root, text, f"{terms.unit} of another size are never found: use one size")
    if key is None:
        yield DoctorFinding("fine", root, f"{found.objects} objects, {size_text(found.bytes)}")
    else:
        yield DoctorFinding("fine", root, f"{shares[key].objects} objects of this model")


def _model(config: Config, mine: Fingerprint) -> str:
    """First digits of the id that the server's model has in `config`'s stores. Creates no secret, unlike a session."""
    secret, file = config.store.secret, config.store.secret_file
    if secret is None and file is not None:
        with suppress(ConfigError):  # `machine` reports it
            secret = load(file)
    return model_id(secret, mine.digest).hex()[:MODEL_DIGITS]


def _unlike(mine: object, known: Mapping[str, object], shares: Iterable[str]) -> str:
    """How models `shares` differ from the ingredients `mine`; `known` has the ingredients of each."""
    own = dict(_leaves(mine))
    found: list[str] = []
    for share in shares:
        other = dict(_leaves(known[share]))
        names = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
        named = [f"{it} is {_shown(own.get(it))}, there {_shown(other.get(it))}" for it in names[:DIFFERENCES_MAX]]
        if len(names) > DIFFERENCES_MAX:
            named.append(f"and {len(names) - DIFFERENCES_MAX} more")
        found.append(f"; {share} differs in: {', '.join(named)}")
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
