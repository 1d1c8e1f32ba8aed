"""The demo: real conversations through a real engine, three times, each time in a process of its own.

`none` is the engine alone, `cold` has kvtier with nothing stored yet, `warm` is a new process that finds what `cold`
left on disk. In a directory that an earlier call has used, `reopened` restores what that call left.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvtier.bench.demo_ledger import Entry, Ledger, forget_without_store, read_ledger
from kvtier.bench.demo_model import SHAPES, WHY, ModelShape
from kvtier.bench.demo_oracle import StoredPrefixes
from kvtier.bench.demo_pass import Job
from kvtier.bench.demo_process import pass_events
from kvtier.bench.demo_result import DemoResult, Pass, Sample
from kvtier.bench.demo_trace import Plan, build_prompt, make_plan, read_trace
from kvtier.bench.record import cores, machine, software
from kvtier.config.loader import load
from kvtier.config.schema import settings as settings_of
from kvtier.config.sections import SECTIONS, value_of
from kvtier.errors import ConfigError
from kvtier.tier.marker import ALLOWED, open_store, read_marker
from kvtier.tier.store_root import opening

SEED = 11
"""Of those from 1 to 12 the one whose greedy choices are least close: with the small model the two best tokens of no
answer are nearer than 7e-4 logits, a hundred times float32's rounding. So it is no matter of luck that passes agree."""
SESSIONS = 8
NEW_TOKENS = 16

NEEDED = ("torch", "transformers", "tokenizers")


class Watcher(Protocol):
    """Is told how a demo gets on."""

    def note(self, text: str) -> None:
        """Something is being done that is not counted in requests, or has ended."""
        ...

    def passing(self, name: str, requests_total: int) -> None:
        """The pass `name` begins; all passes together have `requests_total` requests."""
        ...

    def answered(self) -> None:
        """One request more has its answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to run."""

    directory: Path | None = None
    """Where the store is kept; None: in a temporary directory, removed at the end."""
    model_size: str = "small"
    sessions: int = SESSIONS
    requests: int | None = None
    seed: int = SEED
    new_tokens: int = NEW_TOKENS
    threads: int = 0
    """Of torch; 0: as many as there are cores."""

    def __post_init__(self) -> None:
        if self.model_size not in SHAPES:
            raise ConfigError(f"--model-size must be one of {', '.join(SHAPES)}, got {self.model_size!r}")
        for name, value, least, most in (
            ("seed", self.seed, 0, 2**63 - 1),
            ("new-tokens", self.new_tokens, 1, 256),
            ("threads", self.threads, 0, 1024),
        ):
            if not least <= value <= most:
                raise ConfigError(f"--{name} must be in {least}..{most}, got {value}")
        if self.directory is not None and self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(f"--dir {str(self.directory)!r} is not a directory; give a directory or a new path")


def check_libraries() -> None:
    """Raise `ConfigError` when a library is missing that the demo needs, with the command that brings it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}, not installed here; `pip install 'kvtier[transformers]'` brings it"
        )


def run_demo(settings: DemoSettings, watcher: Watcher) -> DemoResult:
    """Run all passes.

    Raises:
        ConfigError: a setting is wrong, or a library is missing.
        DemoError: a pass failed.
    """
    check_libraries()
    cache_settings = told_settings()
    begin_s = time.perf_counter()
    with _work_directory() as work:
        watcher.note("training the tokenizer on the conversations' text")
        plan = make_plan(read_trace(), sessions=settings.sessions, requests=settings.requests)
        tokenizer_s = time.perf_counter() - begin_s
        store = _open_store(settings.directory, work)
        demo = _Demo(settings, plan, work, store, watcher)
        passes = demo.run()
        return DemoResult(
            model=_model_line(demo.shape, demo.parameters, settings.model_size),
            why=WHY[settings.model_size],
            conversations=_conversations_line(plan),
            shape=demo.shape.as_dict(),
            parameters=demo.parameters,
            kv_bytes_per_token=demo.shape.kv_bytes_per_token,
            seed=settings.seed,
            threads=demo.threads,
            chunk_tokens=demo.chunk_tokens,
            new_tokens=settings.new_tokens,
            passes=passes,
            elapsed_s=time.perf_counter() - begin_s,
            tokenizer_s=tokenizer_s,
            directory=None if settings.directory is None else str(settings.directory),
            machine=machine(store),
            software=software(),
            cache_settings=cache_settings,
            notes=tuple(demo.notes),
        )


def told_settings() -> dict[str, tuple[str, str]]:
    """The settings of kvtier itself as the passes will read them: (value, where from) by name. Secrets are not told.

    Raises:
        ConfigError: the file or the environment has a wrong one.
    """
    loaded = load()
    return {
        setting.name: (setting.kind.show(value_of(loaded.config, setting)), str(loaded.origins[setting.name]))
        for section in SECTIONS.values()
        for setting in settings_of(section)
    }


def _open_store(directory: Path | None, work: Path) -> Path:
    """Where the chunks go; a directory that cannot be used is refused before any pass has run."""
    if directory is None:
        return work / "store"
    forget_without_store(directory)
    with opening("directory", directory, ALLOWED):
        open_store(directory)
    return directory.resolve()


class _Demo:
    """One run of all passes over one plan."""

    def __init__(self, settings: DemoSettings, plan: Plan, work: Path, store: Path, watcher: Watcher) -> None:
        self.settings, self.plan, self.work, self.store, self.watcher = settings, plan, work, store, watcher
        self.shape: ModelShape = SHAPES[settings.model_size]
        self.threads = settings.threads or cores()
        self.parameters = 0
        self.chunk_tokens = 0
        self.notes: list[str] = []

    def run(self) -> tuple[Pass, ...]:
        identity = self._identity()
        ledger = read_ledger(self.store)
        earlier = ledger.latest(identity)
        namespace = f"demo-{secrets.token_hex(8)}"
        requests_total = len(self.plan.steps) * (3 if earlier is None else 4)

        none, _ = self._pass("none", None, (), requests_total)
        cold, stored = self._pass("cold", namespace, (), requests_total)
        ledger = self._keep(ledger, namespace, identity, stored)
        warm, stored = self._pass("warm", namespace, stored.digests, requests_total)
        ledger = self._keep(ledger, namespace, identity, stored)
        if earlier is None:
            return none, cold, warm
        known = earlier.digests if earlier.chunk_tokens == self.chunk_tokens else ()
        reopened, stored = self._pass("reopened", earlier.namespace, known, requests_total)
        self._keep(ledger, earlier.namespace, identity, stored)
        return none, cold, warm, reopened

    def _identity(self) -> str:
        """What an earlier call must have in common with this one for its KV to be of use here."""
        marker = read_marker(self.store) if self.store.exists() else None
        told = {
            **self.shape.as_dict(),
            "seed": self.settings.seed,
            "tokenizer": self.plan.tokenizer_digest,
            "store": None if marker is None else marker.store_id,
        }
        return json.dumps(told, sort_keys=True)

    def _keep(self, ledger: Ledger, namespace: str, identity: str, stored: StoredPrefixes) -> Ledger:
        """Write down in the store's directory what it holds now, for the next call; not for a temporary directory."""
        if self.settings.directory is None:
            return ledger
        grown = ledger.with_entry(Entry(namespace, identity, stored.chunk_tokens, tuple(stored.digests)))
        grown.write(self.store)
        return grown

    def _pass(
        self, name: str, namespace: str | None, digests: Iterable[str], total: int
    ) -> tuple[Pass, StoredPrefixes]:
        self.watcher.passing(name, total)
        job = Job(
            shape=self.shape,
            seed=self.settings.seed,
            new_tokens=self.settings.new_tokens,
            threads=self.threads,
            steps=self.plan.steps,
            directory=None if namespace is None else str(self.store),
            namespace=namespace or "",
        )
        before_bytes = directory_bytes(self.store)
        load = os.getloadavg()[0]
        with contextlib.closing(pass_events(name, job, self.work)) as events:
            ready = next(events)
            self.parameters = int(ready["parameters"])
            self.chunk_tokens = int(ready["chunk_tokens"]) or self.chunk_tokens
            answers: list[Mapping[str, Any]] = []
            done: Mapping[str, Any] = {}
            for event in events:
                if event["event"] == "request":
                    answers.append(event)
                    self.watcher.answered()
                else:
                    done = event
        oracle = StoredPrefixes(self.chunk_tokens, digests) if namespace is not None else None
        after_bytes = directory_bytes(self.store)
        found = Pass(
            name=name,
            samples=self._samples(answers, oracle),
            set_up_s=ready["set_up_s"],
            wall_s=done["wall_s"],
            flush_s=done["flush_s"],
            lost=done["lost"],
            disk_bytes=after_bytes if namespace is not None else 0,
            written_bytes=after_bytes - before_bytes,
            load=load,
        )
        for reason in dict.fromkeys(str(it["uncached_reason"]) for it in answers if it["uncached_reason"]):
            self.notes.append(f"pass {name}: some requests went without the cache: {reason}")
        self.watcher.note(f"{name}: {len(answers)} requests in {found.wall_s:.1f} s")
        return found, oracle or StoredPrefixes(1)

    def _samples(self, events: list[Mapping[str, Any]], oracle: StoredPrefixes | None) -> tuple[Sample, ...]:
        prompts: list[list[int]] = []
        answers: list[list[int]] = []
        samples: list[Sample] = []
        for position, (step, event) in enumerate(zip(self.plan.steps, events, strict=True)):
            prompt = build_prompt(self.plan.steps, position, prompts, answers)
            answer: list[int] = event["answer"]
            samples.append(
                Sample(
                    session=step.session,
                    turn=step.turn,
                    prompt_tokens=len(prompt),
                    answer=tuple(answer),
                    ttft_ms=event["ttft_ms"],
                    total_ms=event["total_ms"],
                    restored=event["restored"],
                    restorable_tokens=0 if oracle is None else oracle.restorable_tokens(prompt),
                    margins=tuple(event["margins"]),
                )
            )
            if oracle is not None:
                oracle.store(prompt, answer)
            prompts.append(prompt)
            answers.append(answer)
        return tuple(samples)


def directory_bytes(directory: Path) -> int:
    """Bytes of all files under `directory`; 0 when there is none."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a draft may be renamed while we look
                total += (Path(root) / name).stat().st_size
    return total


@contextlib.contextmanager
def _work_directory() -> Generator[Path]:
    """A temporary directory that goes away however the demo ends, SIGTERM included."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as work:
            yield Path(work)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _model_line(shape: ModelShape, parameters: int, size: str) -> str:
    return (
        f"{size}: Llama-shaped, {parameters / 1e6:.1f} M parameters, {shape.layers} layers, hidden {shape.hidden}, "
        f"{shape.heads} heads on {shape.kv_heads} KV heads, float32, normally distributed random weights"
    )


def _conversations_line(plan: Plan) -> str:
    cut = "" if len(plan.steps) > 1 else " (one only)"
    return (
        f"{len(plan.steps)} of the trace's {plan.requests_in_trace} requests{cut}, from {plan.sessions} of its "
        f"{plan.sessions_in_trace} conversations (those with the least text), sent one after another in the order "
        f"of their time stamps without waiting in between"
    )
