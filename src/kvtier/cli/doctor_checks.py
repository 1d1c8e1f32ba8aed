"""Checks of `kvtier doctor` for every engine: settings on this machine, contents of the tiers, a running engine.

Each check yields findings: what was checked, what was found, and what to do. No check changes anything. All checks run
at the same time, each in its own thread, until a common deadline.
"""

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from errno import ENOENT
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from kvtier.cli.cache import sockets
from kvtier.cli.engine_settings import server_settings
from kvtier.cli.main import CHECK_THREAD
from kvtier.codec.registry import class_of
from kvtier.config.loader import TIERS, Loaded
from kvtier.config.machine_checks import check
from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError, KvError, UnusablePathError
from kvtier.inspection.inspector import MODEL_DIGITS, StoreInspector
from kvtier.inspection.results import StoreStat
from kvtier.keys.fingerprint import Fingerprint, digest_of_class, ingredients
from kvtier.keys.secret import load, model_id
from kvtier.layout import TOKEN_GROUP
from kvtier.report.output import print_json, progress
from kvtier.report.table import Table, print_table
from kvtier.runtime.control_socket import FORMS, HEALTH, SETTING, ControlError, ask
from kvtier.tier.files import fingerprint_notes as notes
from kvtier.tier.files.path_checks import nearest_existing, path_problem
from kvtier.tier.registry import TierKind, TierSettings, kind_of

Level = Literal["error", "warning", "unchecked", "note", "fine"]
T = TypeVar("T")

TIMEOUT_S = 10.0
"""Default of `--timeout`, in seconds."""

READ_SHARE, ASK_SHARE, END_SHARE = 0.8, 0.88, 0.95
"""Shares of the time after which reading objects stops, an engine's process is ended, and waiting for checks stops.
The remaining time is for printing."""

FREE_BYTES_FEW = 1 << 30
"""Free bytes below which a file system may be full before the next prompt is stored."""

FULL_SHARE = 0.98
"""Share of the cap above which a store evicts for every new chunk."""

DIFFERENCES_MAX = 6
"""Maximum number of differences listed per fingerprint."""

SHOWN_MAX = 40
"""Maximum number of characters shown of a value."""

EXPLAIN = "`kvtier config show` explains the setting"

REACH = "start it, or correct its address and its login"
"""Advice if a remote tier does not answer."""

MISSING = "create the file {file}, or correct its path; in a container, mount it"
"""Advice for a file that a setting names and that does not exist."""

STORE_ADVICE = (
    "use an empty directory, or one made by kvtier, with free space and write permission for the server's user"
)

ADVICE = {
    "path": STORE_ADVICE,
    **dict.fromkeys(("trace.path", "journal.path"), "use a directory in which the server's user may write"),
    **dict.fromkeys(
        ("ca_file", "certificate_file", "key_file", "password_file", "credentials_file"),
        "give the path of such a file, which the server's user can read and owns; in a container, mount it",
    ),
    "host.capacity_bytes": "lower it to memory that this machine has free",
    "codec": "install the package, or set another codec",
    "store.loss": "install numba, or torch, where the server runs",
    "seal": "install the package: shared tiers with a secret are sealed",
    **dict.fromkeys(
        ("secret", "secret_file", "keys", "keys_file"),
        "use a file with mode 0600 that the server's user can read (chmod 600)",
    ),
}
"""Advice for settings that do not work on this machine, by the setting's whole name or the last part of it."""


class DoctorFinding(NamedTuple):
    """The result of one check.

    Error: stored KV cannot be found. Warning: less KV is found than expected. Unchecked: the time ran out. Note: a fact
    that may explain some misses. Fine: no problem was found.
    """

    level: Level
    about: str
    found: str
    advice: str = ""


class EngineTerms(NamedTuple):
    """Words that differ between engines in findings about a store."""

    naming: str
    """Advice on how to name a tier."""
    unit: str
    """The word for objects: ``chunks`` or ``pages``."""
    setting: str
    """The setting that determines the tokens per unit."""
    equal: str
    """Advice on the values that must be equal for KV to be found."""
    exact: str
    """Advice on how to get answers without loss from an engine with a lossy class."""
    without_tiers: Level = "warning"
    """Level of the finding that no tier is set. It is a note if flags of the server that are not known may name one."""


class TimeLimit:
    """The time limit of all checks together. The clock starts when the object is made.

    Args:
        total_s: total time in seconds.
    """

    def __init__(self, total_s: float = TIMEOUT_S) -> None:
        self._total_s, self._start_s = total_s, time.monotonic()

    def left_s(self, share: float = END_SHARE) -> float:
        """Return the seconds until `share` of the time has passed, at least 0."""
        return max(0.0, self._start_s + share * self._total_s - time.monotonic())

    def unchecked(self, about: str, found: str) -> DoctorFinding:
        """Return the finding that a check did not end. `found` says how far it got."""
        return DoctorFinding(
            "unchecked", about, f"{found}{self}", f"give it more time: --timeout {6 * self._total_s:g}"
        )

    def __str__(self) -> str:
        return f" within {self._total_s:g} s"


class Check(NamedTuple):
    """One check, which runs in its own thread."""

    about: str
    find: Callable[[], Iterable[DoctorFinding]]
    late: DoctorFinding | None = None
    """The finding if the check does not end in time. With None, the check is reported as unchecked."""


def started(about: str, call: Callable[[], T]) -> Future[T]:
    """Run `call` in its own thread. The thread may hang: `main` does not wait for it at the end of the process."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001 - the main thread raises it again
            result.set_exception(error)

    threading.Thread(target=run, name=f"{CHECK_THREAD} {about}", daemon=True).start()
    return result


def run_checks(checks: Sequence[Check], limit: TimeLimit) -> list[DoctorFinding]:
    """Return the findings of `checks`, in their order. A check that does not end in time yields one finding."""
    running = [started(it.about, lambda find=it.find: list(find())) for it in checks]
    findings: list[DoctorFinding] = []
    for (about, _, late), result in zip(checks, running, strict=True):
        with progress(f"checking {about}", None):
            try:
                findings += result.result(limit.left_s())
            except TimeoutError:
                findings.append(late or limit.unchecked(about, "no answer"))
            except (KvError, OSError) as error:
                findings.append(DoctorFinding("error", about, f"cannot be checked: {error}", "act on the message"))
    return findings


def read_settings(
    tiers: Sequence[str], extra: Mapping[str, object] | None, name: str, advice: str, limit: TimeLimit
) -> Loaded | DoctorFinding:
    """Return the settings, or a finding if they are wrong or not read in time. For arguments see `server_settings`."""
    try:
        return started("settings", lambda: server_settings(tiers, extra, name)).result(limit.left_s())
    except TimeoutError:
        return DoctorFinding(
            "error", "settings", f"cannot be read{limit}", "check the file system that holds the settings file"
        )
    except ConfigError as error:
        return DoctorFinding("error", "settings", str(error), advice)


def report(findings: Iterable[DoctorFinding], *, as_json: bool) -> int:
    """Print the findings. Return the command's exit code, 1 if there is an error or a warning."""
    findings = in_order(findings)
    is_bad = any(finding.level in {"error", "warning"} for finding in findings)
    if as_json:
        print_json({"ok": not is_bad, "findings": cast("object", [finding._asdict() for finding in findings])})
    else:
        print_table(Table(("", "about", "what was found", "what to do"), findings))
    return 1 if is_bad else 0


def in_order(findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Sort findings by severity, the most severe first."""
    return sorted(findings, key=lambda finding: get_args(Level).index(finding.level))


def json_object(text: str) -> Mapping[str, object]:
    """Parse a JSON object.

    Raises:
        ConfigError: `text` is not a JSON object. The message does not repeat it, because it may contain a secret.
    """
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"is not valid JSON: {error}; did the shell remove its quotes?") from None
    except RecursionError:
        raise ConfigError("is JSON that is nested too deeply") from None
    if not isinstance(value, dict):
        raise ConfigError("is JSON, but not an object")
    return cast("Mapping[str, object]", value)


def _machine(loaded: Loaded, unused: Iterable[str], exact: str = EXPLAIN) -> Iterator[DoctorFinding]:
    """Report settings that do not work on this machine, except settings that the engine does not use."""
    found = [it for it in check(loaded.config, loaded.origins, loaded.file) if it.setting not in unused]
    for it in found:
        advice = ADVICE.get(it.setting) or ADVICE.get(it.setting.rpartition(".")[2], EXPLAIN)
        if it.setting.endswith("_file") and ("it does not exist" in it.detail or os.strerror(ENOENT) in it.detail):
            advice = MISSING.format(file=it.value)
        if it.level == "note":
            advice = exact
        yield DoctorFinding(it.level, it.setting, f"{it.value}: {it.detail}", advice)
    if all(it.level == "note" for it in found):
        yield DoctorFinding("fine", "settings", "work on this machine")


def server_checks(
    loaded: Loaded,
    mine: Callable[[], Fingerprint | None],
    unit_tokens: int,
    terms: EngineTerms,
    limit: TimeLimit,
    unused: Collection[str] = (),
) -> list[Check]:
    """Return the checks of every engine: settings, lower tiers, a running engine.

    Args:
        loaded: the server's settings.
        mine: waits for the server's fingerprint and returns it; None if unknown.
        unit_tokens: tokens per object; 0 means any.
        terms: words for this engine.
        limit: the time for all checks.
        unused: settings that the engine does not use.
    """
    config = loaded.config
    checks = [Check("settings", lambda: _machine(loaded, unused, terms.exact))]
    if config.store.loss != "none" and 0 < unit_tokens < TOKEN_GROUP:
        text = f"{unit_tokens}: numbers of up to 256 tokens share a scale, so small {terms.unit} take more bytes"
        small = DoctorFinding("warning", terms.setting, text, f"use {TOKEN_GROUP} or more")
        checks.append(Check(terms.setting, lambda: [small]))
    if not config.tiers:
        none = DoctorFinding(
            terms.without_tiers, "tiers", "no tier is configured, so KV is lost when the server ends", terms.naming
        )
        checks.append(Check("tiers", lambda: [none]))
    is_keyed = config.store.secret_file is not None or config.store.secret is not None
    for tier in config.tiers:
        content = partial(_content, config, mine, unit_tokens, terms)
        find = partial(_tier, tier, content, limit, is_keyed=is_keyed)
        late = DoctorFinding("error", tier.label, f"does not answer{limit}", REACH) if kind_of(tier).is_remote else None
        checks.append(Check(tier.label, find, late))
        is_keyed |= kind_of(tier).secret_path(tier) is not None  # the first tier's secret keys all names
    socket = config.control.socket
    if socket is not None and SETTING not in unused:
        checks.append(Check(SETTING, lambda: _running(socket, limit)))
    return checks


def _running(socket: Path, limit: TimeLimit) -> Iterator[DoctorFinding]:
    """Ask the engines that listen at `socket` for their health."""
    for path in sockets(socket) or [socket]:
        try:
            health = ask(path, HEALTH, {}, max(limit.left_s(READ_SHARE), 0.1), FORMS[HEALTH])
        except ControlError as error:
            level = "warning" if os.access(path, os.F_OK) else "note"
            yield DoctorFinding(
                level, SETTING, str(error), "start the server, or check its log if it should be running"
            )
            continue
        yield from _health(path, health)


def _health(path: Path, health: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """Report the health that the engine at `path` returned."""
    is_ready, advice = health["ready"], "see its log; `kvtier cache health` shows more"
    text = f"the engine at {path} is {'ready' if is_ready else 'not ready: ' + health['problem']}"
    yield DoctorFinding("fine" if is_ready else "error", SETTING, text, "" if is_ready else advice)
    for name, tier in health["tiers"].items():
        if down := " and ".join(way for way in ("reads", "writes") if not tier[way]):
            text = f"{down} of this tier are stopped in the engine at {path}: {tier['detail']}"
            yield DoctorFinding("warning", f"{TIERS}.{name}", text, "repair the storage; kvtier retries by itself")


def _tier(
    tier: TierSettings, content: Callable[..., Iterator[DoctorFinding]], limit: TimeLimit, *, is_keyed: bool
) -> Iterator[DoctorFinding]:
    """Check one tier: whether it answers, or what its stores contain."""
    kind = kind_of(tier)
    secret, folder = kind.secret_path(tier), kind.folder(tier)
    if folder is not None and _is_unused(folder):
        yield DoctorFinding("note", tier.label, f"no store yet in {folder}", "the first start creates it")
        return
    for store in _inspectors(tier):
        try:
            found, listed = _statistics(store, tier, limit)
        except (KvError, OSError) as error:
            yield DoctorFinding("error", store.place, f"cannot be read: {error}", STORE_ADVICE)
            continue
        if not is_keyed and secret is not None:
            yield from _secret(secret, found)
        yield from _room(found, tier)
        is_sample = found.objects < listed and not limit.left_s(READ_SHARE)
        if is_sample:
            yield limit.unchecked(store.place, f"only {found.objects} of {listed} objects were read")
        yield from content(found, folder, is_sample=is_sample)
    if kind.is_remote:
        yield _remote(tier, kind)


def _is_unused(folder: Path) -> bool:
    """Return whether a first start can make a store in `folder`, because it is absent or empty, and writable."""
    nearest = nearest_existing(folder)
    return path_problem(folder, nearest) is None and (nearest != folder or not any(folder.iterdir()))


def _remote(tier: TierSettings, kind: TierKind[TierSettings]) -> DoctorFinding:
    """Check whether a remote tier answers. If its client hangs, the check does not end in time."""
    text, advice = "its objects are not read here, because each costs a request", f"kvtier inspect stat {tier.kind}:..."
    if kind.inspect is None:
        return DoctorFinding("note", tier.label, text, advice)
    try:
        kind.inspect(tier)
    except (KvError, OSError) as error:
        silence = "" if isinstance(error, UnusablePathError) else "does not answer: "
        problem = f"{silence}{getattr(error, 'strerror', None) or error}"
        missing = getattr(error.__cause__, "filename", None) if isinstance(error.__cause__, FileNotFoundError) else None
        return DoctorFinding("error", tier.label, problem, MISSING.format(file=missing) if missing else REACH)
    return DoctorFinding("note", tier.label, f"answers; {text}", advice)


def _inspectors(tier: TierSettings) -> list[StoreInspector]:
    """Return the tier's stores, if they can be read without opening the tier. `_machine` reports unusable folders."""
    kind = kind_of(tier)
    if kind.inspect is None or kind.is_remote:
        return []
    with suppress(ConfigError):
        return [StoreInspector([view], view.place) for view in kind.inspect(tier)]
    return []


def _statistics(store: StoreInspector, tier: TierSettings, limit: TimeLimit) -> tuple[StoreStat, int]:
    """Return the totals of the objects whose heads can be read in time, in order of name, and the number of all."""
    found = store.objects()
    result = store.statistics(takewhile(lambda _: limit.left_s(READ_SHARE), found))
    if result.capacity_bytes is None and kind_of(tier).has_cap:
        result = replace(result, capacity_bytes=getattr(tier, "capacity_bytes", None))
    return result, len(found)


def _secret(file: Path, found: StoreStat) -> Iterator[DoctorFinding]:
    """Check the secret next to a store. With it, a reader of the store could test which texts were cached."""
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
        cap = size_text(found.capacity_bytes)
        text = f"its cap of {cap} is reached, so each new chunk evicts the least recently used one"
        yield DoctorFinding("warning", root, text, f"raise {tier.label}.capacity_bytes if prompts are evicted too soon")
    if found.unreadable:
        bad = f"{found.unreadable} of {found.objects} objects"
        text = f"{bad} are damaged or have another version; a lookup of one is a miss"
        yield DoctorFinding("warning", root, text, f"kvtier inspect verify --repair {root}")


def _content(
    config: Config,
    mine: Callable[[], Fingerprint | None],
    unit_tokens: int,
    terms: EngineTerms,
    found: StoreStat,
    folder: Path | None,
    *,
    is_sample: bool,
) -> Iterator[DoctorFinding]:
    """Check whether the server can use the stored objects, or a sample of them. Arguments are as in `server_checks`."""
    shares, root = found.models, found.directory
    if not shares and is_sample:
        return
    if not shares:
        advice = f"send a request first; its full {terms.unit} are stored"
        yield DoctorFinding("note", root, "nothing has been stored yet", advice)
        return
    left = [] if folder is None else notes.read(folder)
    known = {str(note.get("model"))[:MODEL_DIGITS]: note.get("of") for note in left}
    named = [share for share in shares if share in known]
    own = mine()
    key = None if own is None else _model(config, own)
    if own is not None and key not in shares:
        unlike = _unlike(ingredients(own, class_of(config.store.loss)), known, named)
        text = f"holds {', '.join(shares)}, but nothing of this model, which is {key}{unlike}"
        level = "warning" if is_sample else "error"
        yield DoctorFinding(level, root, text, f"KV is found only with equal {terms.equal}")
        return
    if key is None and len(shares) > 1:
        unlike = f"; next to {named[0]}{_unlike(known[named[0]], known, named[1:])}" if len(named) > 1 else ""
        advice = "expected with several models; with one model, its weights or settings have changed"
        text = f"holds KV of {len(shares)} models: {', '.join(shares)}{unlike}"
        yield DoctorFinding("warning", root, text, f"{advice}: KV is found only with equal {terms.equal}")
    sizes = {tokens for name, share in shares.items() if key in (None, name) for tokens in share.lengths}
    if unit_tokens and sizes and unit_tokens not in sizes:  # there are no sizes if all heads are sealed
        there = ", ".join(map(str, sorted(sizes)))
        text = f"holds {terms.unit} of {there} tokens; {terms.setting} is {unit_tokens}"
        yield DoctorFinding("error", root, text, f"{terms.unit} of another size are never found: use one size")
    if key is None:
        yield DoctorFinding("fine", root, f"{found.objects} objects, {size_text(found.bytes)}")
    else:
        yield DoctorFinding("fine", root, f"{shares[key].objects} objects of this model")


def _model(config: Config, mine: Fingerprint) -> str:
    """Return the first digits of the model's id in `config`'s stores. Unlike a session, this creates no secret."""
    secret, file = config.store.secret, config.store.secret_file
    if secret is None and file is not None:
        with suppress(ConfigError):  # `_machine` reports it
            secret = load(file)
    return model_id(secret, digest_of_class(mine.digest, class_of(config.store.loss))).hex()[:MODEL_DIGITS]


def _unlike(mine: object, known: Mapping[str, object], shares: Iterable[str]) -> str:
    """Return how the models `shares` differ from the ingredients `mine`. `known` has the ingredients of each model."""
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
    """Yield (path, value) for each leaf in a tree of mappings, without the common prefix ``other.``."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, object]", value).items():
            yield from _leaves(inner, f"{name}.{key}".removeprefix(".").removeprefix("other."))
    else:
        yield name, value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."
