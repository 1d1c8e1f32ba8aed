"""Conversations of many users, with less room for KV on the device than they need. Imports torch.

    recompute   what has left the device is computed again
    host        kvtier, with host memory
    host+disk   kvtier, with the same host memory and a directory below it

All arms are asked the same questions with the same pauses, and go on with the same answers: those of the arm that went
first, with which the others are compared. For each number of users the arms take turns, and another one begins at each
repeat, so that drift hits all of them. `multiturn_server` says what kind of server it is.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvtier.bench.multiturn_load import Load, Workload, draw
from kvtier.bench.multiturn_power import Meter, find_sensor
from kvtier.bench.multiturn_result import MultiturnResult, Run
from kvtier.bench.multiturn_server import Answers, Server
from kvtier.bench.ttft_links import device_name
from kvtier.bench.ttft_shapes import build, if_it_fits
from kvtier.connect.transformers import Attachment, attach
from kvtier.connect.transformers.support import inspect_cache
from kvtier.errors import ConfigError

RECOMPUTE, HOST, DISK = ARMS = ("recompute", "host", "host+disk")
_HELD_CALLS = 8
"""Each keeps its conversation on the device, beside the budget, until its new chunks are in host memory."""
_WARM_TOKENS = 64
_WARM_NUMBER = 1 << 20

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    shape: str = "llama-3.1-8b"
    device: str = "cuda"
    dtype: str = "bfloat16"
    users: tuple[int, ...] = (2, 6, 12, 20)
    workload: Workload = field(default_factory=Workload)
    budget_bytes: int = 6 << 30
    """KV that the device may hold."""
    host_bytes: int = 32 << 30
    disk_bytes: int = 64 << 30
    """0: without the arm that has a disk."""
    directory: Path | None = None
    chunk_tokens: int = 256
    at_once: int = 32
    threads: int = 0
    """Of the model on a CPU; 0: as many as torch takes. On a busy machine several wait for each other."""
    repeats: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        work = self.workload
        counts = (work.rounds, work.history_tokens, work.question_tokens, work.answer_tokens, self.repeats)
        if not self.users or min(self.users) < 1 or min(counts) < 1 or work.rate_per_user < 0:
            raise ConfigError(
                f"users = {self.users}, workload = {work}, repeats = {self.repeats}; allowed: at least one of each, "
                "and a rate from 0 on"
            )
        if work.system_tokens < 2:
            raise ConfigError(f"system = {work.system_tokens}; allowed: at least 2 tokens")


def run(
    settings: Settings, tick: Tick = lambda _what: None, keep: Callable[[MultiturnResult], None] | None = None
) -> MultiturnResult:
    """Measure every number of users, from the fewest on.

    Args:
        settings: what to measure.
        tick: told what comes next.
        keep: given the result after each run, so that what was measured survives what comes.

    Raises:
        ConfigError: a setting is impossible here.
    """
    tick("model")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = build(settings.shape, settings.device, settings.dtype, settings.seed)
    shape = inspect_cache(model)
    if shape.has_windows:
        raise ConfigError(
            f"shape = {settings.shape}: has sliding windows, which this server cannot batch; allowed: one without"
        )
    layout = shape.layout(settings.chunk_tokens)
    per_token = round(layout.bytes_per_token)
    result = MultiturnResult(
        settings.shape,
        device_name(settings.device),
        per_token,
        sum(group.payload_bytes for group in layout.groups),
        settings.budget_bytes // per_token,
    )
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-turns-", dir=settings.directory)))
        tick("attach")
        bench = _Bench(model, settings, result, _attached(model, settings, place, stack))
        bench.warm_up()
        pairs = [(users, repeat) for users in sorted(settings.users) for repeat in range(settings.repeats)]
        for number, (users, repeat) in enumerate(pairs):
            with if_it_fits(f"{users} users", result.skipped):
                bench.measure(users, repeat, number, tick, keep)
    return result


def _attached(model: Any, settings: Settings, place: Path, stack: ExitStack) -> dict[str, Attachment | None]:  # noqa: ANN401 - depends on its class
    common: dict[str, Any] = {
        "held_calls": _HELD_CALLS,
        "host__capacity_bytes": settings.host_bytes,
        "store__chunk_tokens": settings.chunk_tokens,
        "limits__transfer_deadline_s": 60.0,
        "limits__load_deadline_s": 60.0,
    }
    arms: dict[str, Attachment | None] = {RECOMPUTE: None}
    arms[HOST] = stack.enter_context(attach(model, **common))
    if settings.disk_bytes:
        common["directory__capacity_bytes"] = settings.disk_bytes
        arms[DISK] = stack.enter_context(attach(model, place / "kv", **common))
    return arms


class _Bench:
    def __init__(
        self,
        model: Any,  # noqa: ANN401 - depends on its class
        settings: Settings,
        result: MultiturnResult,
        arms: dict[str, Attachment | None],
    ) -> None:
        self._model, self._settings, self._result, self._arms = model, settings, result, arms
        self._sensor, self._told = find_sensor(settings.device)

    def warm_up(self) -> None:
        """One short conversation with each arm: kernels are compiled and memory is taken before anything is timed."""
        work = Workload(
            rounds=2,
            system_tokens=_WARM_TOKENS,
            history_tokens=2 * self._settings.chunk_tokens,
            question_tokens=_WARM_TOKENS,
            answer_tokens=4,
            rate_per_user=0.0,
            real_lengths=False,
        )
        load = draw(work, 2, self._model.config.vocab_size, self._settings.seed, _WARM_NUMBER)
        for kv in self._arms.values():
            # Room for one of the two at a time, so that KV leaves and comes back.
            most = 2 * len(load.system) + load.conversations[0].most_tokens
            server = Server(self._model, most, kv, at_once=1, expected=None)
            server.serve(load)
            server.settle()

    def measure(
        self, users: int, repeat: int, number: int, tick: Tick, keep: Callable[[MultiturnResult], None] | None
    ) -> None:
        """All arms with the same load."""
        load = draw(self._settings.workload, users, self._model.config.vocab_size, self._settings.seed, number)
        names = list(self._arms)
        expected: Answers | None = None
        first = repeat % len(names)
        for name in (*names[first:], *names[:first]):
            tick(f"{users} users, {name}")
            expected = self._run(name, users, repeat, load, expected)
            if keep is not None:
                keep(self._result)

    def _run(self, name: str, users: int, repeat: int, load: Load, expected: Answers | None) -> Answers:
        """One arm with one load; the answers that the others are compared with."""
        settings = self._settings
        server = Server(
            self._model, self._result.budget_tokens, self._arms[name], at_once=settings.at_once, expected=expected
        )
        meter = Meter(self._sensor, self._told)
        with meter:
            server.serve(load)
        server.settle()
        self._result.runs.append(
            Run(
                arm=name,
                users=users,
                repeat=repeat,
                working_set_tokens=load.most_tokens,
                evictions=server.evictions,
                seconds=server.seconds,
                joules=meter.energy.joules,
                energy_source=meter.energy.source,
                turns=server.samples,
            )
        )
        return server.answers if expected is None else expected
