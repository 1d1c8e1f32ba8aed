"""Time to first token by context length: computed anew, against restored from each place. Imports torch.

    recompute   the library alone
    store       computed with kvtier, which keeps it: what keeping costs
    host        restored from host memory
    disk        restored from disk; host memory is too small to have kept it, and direct I/O passes the page cache by
    split k     the leading k tokens restored from host memory, the rest computed

Computing and restoring from host memory take turns, so that drift hits both. Every restored call's first tokens are
compared with the recomputed ones, and its report says where the KV came from: a sample from elsewhere does not count.
"""

import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from kvtier.bench.ttft_links import LinkSpeed, device_name, measure
from kvtier.bench.ttft_plan import choose, every_split
from kvtier.bench.ttft_shapes import build, if_it_fits
from kvtier.connect.transformers import Attachment, attach
from kvtier.connect.transformers.call import FirstToken
from kvtier.connect.transformers.support import inspect_cache
from kvtier.errors import ConfigError
from kvtier.runtime.arena import chunk_bytes

logger = logging.getLogger(__name__)

FIRST_TOKENS = 4
"""Generated in each call, to compare; only the first is timed."""
SPLITS = (0.25, 0.5, 0.75)
REGRETS = {"host, tried": ("host", True), "host, every split": ("host", False), "disk, every split": ("disk", False)}
"""What the planner's choices are held against, by name."""
_FLUSH_S = 300.0
_JOIN_S = 600.0
_DISK_HOST_CHUNKS = 16
"""Slots of the attachment that reads from disk: a window to stream through."""

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure."""

    shape: str = "llama-3.1-8b"
    device: str = "cuda"
    dtype: str = "bfloat16"
    contexts: tuple[int, ...] = (1024, 4096, 8192, 16384, 32768, 65536, 131072)
    repeats: int = 5
    seed: int = 1
    host_bytes: int = 32 << 30
    disk_bytes: int = 40 << 30
    directory: Path | None = None
    chunk_tokens: int = 256
    with_decode: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1 or not self.contexts or min(self.contexts) < 2 * self.chunk_tokens:
            raise ConfigError(
                f"contexts = {self.contexts}, repeats = {self.repeats}; allowed: contexts of at least two chunks "
                f"({2 * self.chunk_tokens} tokens), at least one repeat"
            )


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to the first token, at one context."""

    name: str
    context: int
    restored_tokens: int
    ttft_s: tuple[float, ...]
    load_s: tuple[float, ...]
    """Of these, seconds in which nothing could be computed."""
    restored_bytes: int
    same_tokens: bool
    """Whether every call began with the tokens of the recomputed one."""

    @property
    def median_s(self) -> float:
        """Median time to first token."""
        return statistics.median(self.ttft_s)


@dataclass(frozen=True, slots=True)
class Split:
    """What the planner chose, against the best of all splits."""

    context: int
    best_tokens: int
    best_s: float
    chosen_tokens: int
    chosen_s: float
    place: str = "host"
    is_tried: bool = True
    """Whether each split's time was measured as it is; False: put together from measured loads and prefills, for every
    number of chunks (`ttft_plan.every_split`)."""

    @property
    def regret(self) -> float:
        """How much longer the planner's choice takes than the best one, as a share of that."""
        return self.chosen_s / self.best_s - 1


@dataclass(frozen=True, slots=True)
class Decoding:
    """Another request's time per token, alone and beside what this one does."""

    context: int
    alone_ms: float
    beside_recompute_ms: float
    beside_restore_ms: float


@dataclass(slots=True)
class TtftResult:
    """All of a run; it grows as the run goes on."""

    shape: str
    device: str
    bytes_per_token: int
    arms: list[Arm] = field(default_factory=list[Arm])
    splits: list[Split] = field(default_factory=list[Split])
    decoding: list[Decoding] = field(default_factory=list[Decoding])
    links: list[LinkSpeed] = field(default_factory=list[LinkSpeed])
    skipped: list[str] = field(default_factory=list[str])
    """Contexts that did not fit, with the reason."""

    def arm(self, name: str, context: int) -> Arm | None:
        """One of them."""
        return next((arm for arm in self.arms if (arm.name, arm.context) == (name, context)), None)

    def crossover(self, name: str) -> int | None:
        """The shortest context from which on `name` is never slower than computing; None where it always is."""
        pairs = [
            (arm.context, arm.median_s, plain.median_s)
            for arm in self.arms
            if arm.name == name and (plain := self.arm("recompute", arm.context)) is not None
        ]
        shortest = None
        for context, mine, plain_s in sorted(pairs, reverse=True):
            if mine > plain_s:
                break
            shortest = context
        return shortest


def run(
    settings: Settings, tick: Tick = lambda _what: None, keep: Callable[[TtftResult], None] | None = None
) -> TtftResult:
    """Measure every context, from the shortest on.

    Args:
        settings: what to measure.
        tick: told what comes next.
        keep: given the result after each context, so that what was measured survives what comes.

    Raises:
        ConfigError: a setting is impossible here.
    """
    tick("model")
    model = build(settings.shape, settings.device, settings.dtype, settings.seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-ttft-", dir=settings.directory) as place:
        bench = _Bench(model, settings, Path(place), tick)
        try:
            bench.measure_links()
            for context in sorted(settings.contexts):
                with if_it_fits(f"{context} tokens", bench.result.skipped):
                    bench.measure(context)
                if keep is not None:
                    keep(bench.result)
        finally:
            bench.close()
        return bench.result


class _Bench:
    def __init__(self, model: Any, settings: Settings, place: Path, tick: Tick) -> None:  # noqa: ANN401 - see `build`
        self._model, self._settings, self._tick = model, settings, tick
        common: dict[str, Any] = {
            "store__chunk_tokens": settings.chunk_tokens,
            "directory__capacity_bytes": settings.disk_bytes,
            "limits__load_deadline_s": 120.0,
            "limits__transfer_deadline_s": 60.0,
            "limits__store_patience_s": 60.0,
        }
        self._host = attach(model, config=None, host__capacity_bytes=settings.host_bytes, **common)
        layout = inspect_cache(model).layout(settings.chunk_tokens)
        least = max(1 << 20, _DISK_HOST_CHUNKS * chunk_bytes(layout))
        self._disk = attach(model, place / "kv", host__capacity_bytes=least, **common)
        self._disk_host_bytes = least
        self._layout = layout
        self.place = place
        self.result = TtftResult(settings.shape, device_name(settings.device), round(layout.bytes_per_token))

    def close(self) -> None:
        """Give everything back."""
        self._host.close(5.0)
        self._disk.close(5.0)

    def measure_links(self) -> None:
        """What the hardware allows."""
        self._tick("links")
        self.result.links += measure(self._settings.device, self.place, self._settings.repeats)

    def measure(self, context: int) -> None:
        """All arms of one context."""
        settings = self._settings
        self._tick(f"{context} tokens")
        # The last chunk is never whole in a prompt that ends with it, so a prompt is one token longer.
        prompt = self._prompt(context, 0)
        wanted = self._first(prompt)  # also warms up
        plain, stored, host = _Samples(), _Samples(), _Samples()
        self._cached(self._host, prompt, wanted, _Samples())
        self._host.flush(_FLUSH_S)
        for number in range(settings.repeats):
            plain.add(*self._plain(prompt, wanted))
            self._cached(self._host, prompt, wanted, host, "host")
            if number < max(2, settings.repeats // 2):
                fresh = self._prompt(context, 100 + number)
                self._cached(self._host, fresh, None, stored)
                self._host.flush(_FLUSH_S)
        self._note("recompute", context, plain)
        self._note("store", context, stored)
        self._note("host", context, host)
        self._measure_disk(context)
        self._measure_splits(context)
        if settings.with_decode:
            self._measure_decoding(context, prompt)

    def _measure_disk(self, context: int) -> None:
        """So many prompts in turn that host memory never has the next one."""
        size = -(-context // self._layout.chunk_tokens) * chunk_bytes(self._layout)
        count = 2 + int(1.5 * self._disk_host_bytes / size)
        if count * size > self._settings.disk_bytes:
            self.result.skipped.append(f"{context} tokens from disk: {count} prompts of {size} bytes do not fit")
            return
        prompts = [self._prompt(context, 1000 + number) for number in range(count)]
        wanted = [self._first(prompt) for prompt in prompts]
        for prompt, tokens in zip(prompts, wanted, strict=True):
            self._cached(self._disk, prompt, tokens, _Samples())
            self._disk.flush(_FLUSH_S)
        samples = _Samples()
        for number in range(max(self._settings.repeats, count)):
            self._cached(self._disk, prompts[number % count], wanted[number % count], samples, "directory")
        self._note("disk", context, samples)

    def _measure_splits(self, context: int) -> None:
        """Prompts whose leading part is known: what a planner could choose between."""
        found: dict[int, float] = {}
        for arm in ("recompute", "host"):
            known = self.result.arm(arm, context)
            if known is not None and known.ttft_s:
                found[known.restored_tokens] = known.median_s
        size = self._settings.chunk_tokens
        for number, share in enumerate(SPLITS):
            tokens = int(context * share) // size * size
            if tokens in found or not tokens:
                continue
            samples = _Samples()
            for repeat in range(self._settings.repeats):
                start = self._prompt(tokens, 2000 + 10 * number)
                rest = self._prompt(context - tokens, 3000 + 100 * number + repeat)
                if repeat == 0:
                    self._cached(self._host, start, None, _Samples())
                    self._host.flush(_FLUSH_S)
                prompt = torch.cat([start[:, :-1], rest], dim=1)
                self._cached(self._host, prompt, self._first(prompt), samples, "host", tokens)
                self._host.flush(_FLUSH_S)
            self._note(f"split {share:g}", context, samples)
            if samples.ttft_s:
                found[tokens] = statistics.median(samples.ttft_s)
        self.result.splits += chosen_splits(self.result, context, found, self._settings.chunk_tokens)

    def _measure_decoding(self, context: int, prompt: torch.Tensor) -> None:
        other = self._prompt(min(512, context), 4000)
        alone = self._decoding(other, lambda: time.sleep(0.0), calls=0)
        beside_plain = self._decoding(other, lambda: self._first(prompt), calls=self._settings.repeats)
        beside_restore = self._decoding(
            other, lambda: self._cached(self._host, prompt, None, _Samples()), calls=self._settings.repeats
        )
        self.result.decoding.append(Decoding(context, alone, beside_plain, beside_restore))

    def _decoding(self, other: torch.Tensor, act: Callable[[], object], calls: int) -> float:
        """Milliseconds for each token of `other`, which decodes in a thread while `act` is called."""
        clock = _TokenClock(64 if calls == 0 else 1 << 20)

        def decode() -> None:
            self._model.generate(
                other,
                attention_mask=torch.ones_like(other),
                do_sample=False,
                max_new_tokens=64 if calls == 0 else 4096,
                stopping_criteria=[clock],
            )

        thread = threading.Thread(target=decode, name="kvtier bench decode", daemon=True)
        thread.start()
        clock.begun.wait(_JOIN_S)
        first = len(clock.times)
        for _ in range(calls):
            act()
        last = len(clock.times)
        clock.stop = calls > 0
        thread.join(_JOIN_S)
        times = clock.times[first:last] if calls else clock.times
        gaps = [after - before for before, after in pairwise(times)]
        return 1e3 * statistics.mean(gaps) if gaps else float("nan")

    # ---- one call --------------------------------------------------------------------------------------------------

    def _prompt(self, tokens: int, number: int) -> torch.Tensor:
        """[1, tokens + 1], the same for the same number."""
        draw = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + number * 7919 + tokens)
        size = int(self._model.config.get_text_config(decoder=True).vocab_size)
        found = torch.randint(1, size, (1, tokens + 1), generator=draw)
        return found.to(self._settings.device)

    def _arguments(self, prompt: torch.Tensor) -> dict[str, Any]:
        return {
            "attention_mask": torch.ones_like(prompt),
            "do_sample": False,
            "max_new_tokens": FIRST_TOKENS,
            "min_new_tokens": FIRST_TOKENS,
        }

    def _first(self, prompt: torch.Tensor) -> torch.Tensor:
        return self._model.generate(prompt, **self._arguments(prompt))[:, prompt.shape[1] :]

    def _plain(self, prompt: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float, int, bool]:
        clock = FirstToken()
        found = self._model.generate(prompt, stopping_criteria=clock.among(None), **self._arguments(prompt))
        return clock.ttft_s, 0.0, 0, bool(torch.equal(found[:, prompt.shape[1] :], wanted))

    def _cached(
        self,
        kv: Attachment,
        prompt: torch.Tensor,
        wanted: torch.Tensor | None,
        samples: "_Samples",
        place: str = "",
        tokens: int | None = None,
    ) -> None:
        """Generate with kvtier; the sample counts when the KV came from `place`, all of it that was to come."""
        found = kv.generate(prompt, **self._arguments(prompt))
        report = kv.last
        if report.uncached_reason:
            logger.warning("a call went without the cache: %s", report.uncached_reason)
        expected = prompt.shape[1] - 1 if tokens is None else tokens
        if place and report.restored_by_source.get(place, 0) < expected:
            logger.info("%s instead of %d tokens from %s", report.restored_by_source, expected, place)
            return
        is_same = wanted is None or bool(torch.equal(found[:, prompt.shape[1] :], wanted))
        samples.add(report.ttft_s, report.load_s, report.restored_tokens, is_same)

    def _note(self, name: str, context: int, samples: "_Samples") -> None:
        if not samples.ttft_s:
            self.result.skipped.append(f"{context} tokens, {name}: no sample came from where it should")
            return
        tokens = max(samples.restored)
        self.result.arms.append(
            Arm(
                name,
                context,
                tokens,
                tuple(samples.ttft_s),
                tuple(samples.load_s),
                tokens * self.result.bytes_per_token,
                samples.is_same,
            )
        )


class _Samples:
    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.load_s: list[float] = []
        self.restored: list[int] = []
        self.is_same = True

    def add(self, ttft_s: float, load_s: float, restored: int, is_same: bool) -> None:  # noqa: FBT001 - a sample's values
        self.ttft_s.append(ttft_s)
        self.load_s.append(load_s)
        self.restored.append(restored)
        self.is_same = self.is_same and is_same


class _TokenClock(StoppingCriteria):
    """Notes when each token came; stops when it is told to."""

    def __init__(self, tokens: int) -> None:
        self.times: list[float] = []
        self.begun = threading.Event()
        self.stop = False
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:  # noqa: ANN401, ARG002 - the library's
        if input_ids.device.type == "cuda":
            torch.cuda.current_stream(input_ids.device).synchronize()
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.begun.set()
        is_over = self.stop or len(self.times) >= self._tokens
        return torch.full((input_ids.shape[0],), is_over, dtype=torch.bool, device=input_ids.device)


def chosen_splits(result: TtftResult, context: int, found: dict[int, float], step: int) -> list[Split]:
    """The planner's choices for a prompt, from the loads and prefills measured so far.

    Args:
        result: with the arms of all contexts so far.
        context: of the prompt.
        found: median time to first token by tokens restored from host memory, all measured.
        step: tokens of a chunk.
    """
    computed = [(arm.context, arm.median_s) for arm in result.arms if arm.name == "recompute"]
    splits: list[Split] = []
    for place in ("host", "disk"):
        # With the step that gives the first token; what the model waited for hides what overlapped.
        loaded = [(arm.restored_tokens, arm.median_s) for arm in result.arms if arm.name == place]
        if not loaded or not computed:
            continue
        tables = [(found, True)] if place == "host" and len(found) > 1 else []
        tables.append((every_split(context, step, computed=computed, loaded=loaded), False))
        for seconds, is_tried in tables:
            best = min(seconds, key=lambda tokens: seconds[tokens])
            chosen = choose(context, sorted(seconds), computed=computed, loaded=loaded, place=place)
            splits.append(Split(context, best, seconds[best], chosen, seconds[chosen], place, is_tried))
    return splits


def summary(result: TtftResult) -> dict[str, object]:
    """What a record keeps beside the samples."""
    names = dict.fromkeys(arm.name for arm in result.arms)
    return {
        "shape": result.shape,
        "device": result.device,
        "bytes_per_token": result.bytes_per_token,
        "ttft_ms": {
            name: {str(arm.context): round(1e3 * arm.median_s, 3) for arm in result.arms if arm.name == name}
            for name in names
        },
        "crossover_tokens": {name: result.crossover(name) for name in names if name in {"host", "disk"}},
        "planner_regret": {
            name: {str(it.context): round(it.regret, 4) for it in result.splits if (it.place, it.is_tried) == key}
            for name, key in REGRETS.items()
        },
        "same_tokens": all(arm.same_tokens for arm in result.arms),
        "skipped": list(result.skipped),
    }


def speeds(result: TtftResult) -> Sequence[tuple[str, int, float]]:
    """(arm, context, GB/s) of what was restored, over the whole time to first token."""
    return [
        (arm.name, arm.context, arm.restored_bytes / arm.median_s / 1e9)
        for arm in result.arms
        if arm.name in {"host", "disk"}
    ]
