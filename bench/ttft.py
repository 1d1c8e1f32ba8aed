"""Measures time to first token by context length: computed, and restored from each tier.

    python bench/ttft.py --record bench/records/ttft.json                       # llama-3.1-8b on a GPU
    python bench/ttft.py --shape tiny --device cpu --dtype float32 --contexts 64,128 --chunk-tokens 16

    recompute   Transformers without kvtier
    store       computed, and stored by kvtier: the cost of a store
    host        restored from host memory
    disk        restored from disk with direct I/O; host memory is too small to hold the prompt
    split k     the leading share k restored from host memory, the rest computed

Samples of recompute and host alternate, so that drift affects both. The first tokens of every restored call are
compared with the recomputed ones. A split compares only its first call. A sample counts only if the call's report says
that all KV came from the tier. The record (--record) is rewritten after each sample, and --resume continues it with
the next. The picture is drawn last, from the record. Imports torch.
"""

import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import torch
from bench.parts.command import (
    Counts,
    continued,
    dir_option,
    earlier_record,
    link_chunks_option,
    picture_option,
    record_option,
    recorded_settings,
    resume_option,
    taken,
)
from bench.parts.command import run as run_script
from bench.parts.links import CHUNKS, LinkSpeed, measure_links
from bench.parts.models import attach_locked, build, check_device, device_name, skip_out_of_memory
from bench.parts.planner import PlannerChoice, choices
from transformers import StoppingCriteria

from kvtier.cli.options import tell_written
from kvtier.connect.transformers import Attachment
from kvtier.connect.transformers.call import FirstToken
from kvtier.connect.transformers.support import inspect_cache
from kvtier.errors import ConfigError
from kvtier.report.output import check_chart, print_json, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.runtime.arena import chunk_bytes
from kvtier.tools.options import Bytes
from kvtier.tools.run_record import make_record

logger = logging.getLogger(__name__)

FIRST_TOKENS = 4
"""Number of tokens generated and compared in each call. Only the first is timed."""
SPLITS = (0.25, 0.5, 0.75)
REGRETS = {"host, tried": ("host", True), "host, every split": ("host", False), "disk, every split": ("disk", False)}
"""(tier, measured) by name: the sets of splits that the planner's choice is compared with."""
_FLUSH_S = 300.0
_JOIN_S = 600.0
_DISK_HOST_CHUNKS = 16
"""Host slots of the disk arm, a window to stream through."""

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftSettings:
    """What to measure."""

    shape: str
    device: str
    dtype: str
    contexts: tuple[int, ...]
    repeats: int
    seed: int = 1
    host_bytes: int
    disk_bytes: int
    directory: Path | None = None
    chunk_tokens: int
    link_chunks: int = CHUNKS
    with_decode: bool = True
    with_splits: bool = True

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 2 * self.chunk_tokens:
            raise ConfigError(
                f"contexts = {self.contexts}; allowed: contexts of at least two chunks ({2 * self.chunk_tokens} tokens)"
            )


@dataclass(frozen=True, slots=True)
class Arm:
    """The samples of one arm at one context length. An interrupted run has fewer than it should."""

    name: str
    context: int
    restored_tokens: int
    ttft_s: tuple[float, ...]
    load_s: tuple[float, ...]
    """The part of `ttft_s` in which the model waited for KV."""
    restored_bytes: int
    same_tokens: bool
    """Whether every call started with the recomputed tokens."""

    @property
    def median_s(self) -> float:
        """Median time to first token."""
        return statistics.median(self.ttft_s)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Another request's time per token, alone and beside this one."""

    context: int
    alone_ms: float | None
    """None if no token was generated meanwhile."""
    beside_recompute_ms: float | None
    beside_restore_ms: float | None


@dataclass(slots=True)
class TtftResult:
    """The result, which grows while the benchmark runs."""

    shape: str
    device: str
    bytes_per_token: int
    arms: list[Arm] = field(default_factory=list[Arm])
    splits: list[PlannerChoice] = field(default_factory=list[PlannerChoice])
    decoding: list[Decoding] = field(default_factory=list[Decoding])
    links: list[LinkSpeed] = field(default_factory=list[LinkSpeed])
    skipped: list[str] = field(default_factory=list[str])
    """What was not measured, and why."""
    measured: list[int] = field(default_factory=list[int])
    """Contexts that are done, including those for which memory was too small."""

    def restore(self, record: Mapping[str, Any]) -> None:
        """Add all samples of `record`."""
        results = record["results"]
        self.measured += results["measured"]
        self.skipped += results["skipped"]
        self.links += [LinkSpeed(**{k: v for k, v in it.items() if k != "ratio"}) for it in results["links"]]
        rows = record["samples"]
        self.arms += [Arm(**it | {"ttft_s": tuple(it["ttft_s"]), "load_s": tuple(it["load_s"])}) for it in rows]
        self.splits += [PlannerChoice(**{k: v for k, v in it.items() if k != "regret"}) for it in results["splits"]]
        self.decoding += [Decoding(**it) for it in results["decoding"]]

    def arm(self, name: str, context: int) -> Arm | None:
        """Return the arm of that name at that context length, if it was measured."""
        return next((arm for arm in self.arms if (arm.name, arm.context) == (name, context)), None)

    def put(self, arm: Arm) -> None:
        """Add or replace an arm, with its samples so far."""
        names = [(it.name, it.context) for it in self.arms]
        if (arm.name, arm.context) in names:
            self.arms[names.index((arm.name, arm.context))] = arm
        else:
            self.arms.append(arm)

    def skip(self, reason: str) -> None:
        """Note what was not measured, once."""
        if reason not in self.skipped:
            self.skipped.append(reason)

    def medians(self, name: str) -> list[tuple[int, float]]:
        """Return (context, median seconds) of an arm."""
        return [(arm.context, arm.median_s) for arm in self.arms if arm.name == name]

    def crossover(self, name: str) -> int | None:
        """Return the shortest context from which on `name` is never slower than computing. None if there is none."""
        computed, shortest = dict(self.medians("recompute")), None
        for context, seconds in sorted(self.medians(name), reverse=True):
            if context not in computed:
                continue
            if seconds > computed[context]:
                break
            shortest = context
        return shortest

    def summary(self) -> dict[str, Any]:
        """Return the record's results, without the samples."""
        names = dict.fromkeys(arm.name for arm in self.arms)
        return {
            "shape": self.shape,
            "device": self.device,
            "bytes_per_token": self.bytes_per_token,
            "ttft_ms": {
                name: {str(context): round(1e3 * seconds, 3) for context, seconds in self.medians(name)}
                for name in names
            },
            "crossover_tokens": {name: self.crossover(name) for name in names if name in {"host", "disk"}},
            "planner_regret": {
                name: {str(it.context): round(it.regret, 4) for it in self.splits if (it.place, it.is_tried) == key}
                for name, key in REGRETS.items()
            },
            "same_tokens": all(arm.same_tokens for arm in self.arms),
            "skipped": list(self.skipped),
        }

    def add_choices(self, context: int, step: int, splits: dict[int, float]) -> None:
        """Add the planner's choices at `context`, given everything measured so far."""
        self.splits = [it for it in self.splits if it.context != context]
        loaded = {
            place: [(arm.restored_tokens, arm.median_s) for arm in self.arms if arm.name == place]
            for place in ("host", "disk")
        }
        self.splits += choices(context, step, computed=self.medians("recompute"), loaded=loaded, splits=splits)


def run(
    settings: TtftSettings,
    tick: Tick = lambda _what: None,
    keep: Callable[[TtftResult], None] = lambda _result: None,
    earlier: Mapping[str, Any] | None = None,
) -> TtftResult:
    """Measure every context length, in ascending order.

    Args:
        settings: what to measure.
        tick: called before each step with its name.
        keep: called with the result after each sample.
        earlier: a record of the same settings, whose samples are not measured again.

    Raises:
        ConfigError: a setting is impossible here.
    """
    tick("model")
    model = build(settings.shape, settings.device, settings.dtype, settings.seed)
    with tempfile.TemporaryDirectory(prefix="kvtier-ttft-", dir=settings.directory) as place:
        bench = TtftBenchmark(model, settings, Path(place), keep)
        result = bench.result
        try:
            if earlier is not None:
                result.restore(earlier)
            tick("links")
            if not result.links:
                result.links += measure_links(settings.device, Path(place), settings.repeats, settings.link_chunks)
                keep(result)
            for context in sorted(set(settings.contexts) - set(result.measured)):
                tick(f"{context} tokens")
                with skip_out_of_memory(f"{context} tokens", result.skipped):
                    bench.measure(context)
                result.measured.append(context)
                keep(result)
        finally:
            bench.close()
        return result


class TtftBenchmark:
    """One model with two attachments: one with enough host memory, one that reads from disk."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - see `build`
        settings: TtftSettings,
        place: Path,
        keep: Callable[[TtftResult], None] = lambda _result: None,
    ) -> None:
        self._model, self._settings, self._keep = model, settings, keep
        common: dict[str, Any] = {
            "store__chunk_tokens": settings.chunk_tokens,
            "limits__load_deadline_s": 120.0,
            "limits__store_deadline_s": 60.0,
        }
        self._layout = inspect_cache(model).layout(settings.chunk_tokens)
        self._disk_host_bytes = max(1 << 20, _DISK_HOST_CHUNKS * chunk_bytes(self._layout))
        self.result = TtftResult(settings.shape, device_name(settings.device), round(self._layout.bytes_per_token))
        skip = self.result.skip
        self._host = attach_locked(model, skip, config=None, host__capacity_bytes=settings.host_bytes, **common)
        below = {
            "kind": "directory",
            "path": place / "kv",
            "capacity_bytes": settings.disk_bytes,
            "transfer_deadline_s": 60,
        }
        self._disk = attach_locked(model, skip, tiers=[below], host__capacity_bytes=self._disk_host_bytes, **common)

    def close(self) -> None:
        """Close both attachments."""
        self._host.close(5.0)
        self._disk.close(5.0)

    def measure(self, context: int) -> None:
        """Take the missing samples of one context length."""
        # The prompt is one token longer, because the chunk with a prompt's last token is never loaded.
        prompt = self._prompt(context, 0)
        self._measure_whole(context, prompt, self._first(prompt))  # this also warms up
        self._measure_disk(context)
        self._measure_splits(context)
        if self._settings.with_decode and all(it.context != context for it in self.result.decoding):
            self._measure_decoding(context, prompt)

    def _measure_whole(self, context: int, prompt: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compute the prompt, restore it from host memory, and store others like it, in turn."""
        repeats = self._settings.repeats
        plain, stored, host = (self._samples(name, context) for name in ("recompute", "store", "host"))
        if plain.count < repeats:
            self._store(self._host, prompt, wanted)
        for number in range(plain.count, repeats):
            plain.add(*self._plain(prompt, wanted))
            self._cached(self._host, prompt, wanted, host, "host")
            if number < max(2, repeats // 2):
                self._store(self._host, self._prompt(context, 100 + number), None, stored)
            self._show(plain, stored, host)
        self._end(plain, stored, host)

    def _measure_disk(self, context: int) -> None:
        """Use prompts in turn, too many for host memory ever to have the next one."""
        size = -(-context // self._layout.chunk_tokens) * chunk_bytes(self._layout)
        count = 2 + int(1.5 * self._disk_host_bytes / size)
        if count * size > self._settings.disk_bytes:
            self.result.skip(f"{context} tokens from disk: {count} prompts of {size} bytes do not fit")
            return
        samples, wanted_count = self._samples("disk", context), max(self._settings.repeats, count)
        if samples.count >= wanted_count:
            return
        prompts = [self._prompt(context, 1000 + number) for number in range(count)]
        wanted = [self._first(prompt) for prompt in prompts]
        for prompt, tokens in zip(prompts, wanted, strict=True):
            self._store(self._disk, prompt, tokens)
        for number in range(wanted_count - samples.count):
            self._cached(self._disk, prompts[number % count], wanted[number % count], samples, "directory")
            self._show(samples)
        self._end(samples)

    def _measure_splits(self, context: int) -> None:
        """Use prompts whose leading part is stored, for the splits that the planner can choose from."""
        found: dict[int, float] = {}
        for arm in ("recompute", "host"):
            measured = self.result.arm(arm, context)
            if measured is not None:
                found[measured.restored_tokens] = measured.median_s
        size = self._settings.chunk_tokens
        for number, share in enumerate(SPLITS if self._settings.with_splits else ()):
            tokens = int(context * share) // size * size
            if tokens in found or not tokens:
                continue
            samples = self._samples(f"split {share:g}", context)
            start = self._prompt(tokens, 2000 + 10 * number)
            if samples.count < self._settings.repeats:
                self._store(self._host, start, None)
            for repeat in range(samples.count, self._settings.repeats):
                rest = self._prompt(context - tokens, 3000 + 100 * number + repeat)
                prompt = torch.cat([start[:, :-1], rest], dim=1)
                wanted = self._first(prompt) if repeat == 0 else None
                self._cached(self._host, prompt, wanted, samples, "host", tokens)
                self._host.flush(_FLUSH_S)
                self._show(samples)
            self._end(samples)
            if samples.count:
                found[tokens] = statistics.median(samples.ttft_s)
        self.result.add_choices(context, size, found)

    def _measure_decoding(self, context: int, prompt: torch.Tensor) -> None:
        other = self._prompt(min(512, context), 4000)
        calls = self._settings.repeats
        self._store(self._host, prompt, None)  # the splits may have evicted it
        restored = _Samples("beside a decode", context)
        alone = self._decoding(other, lambda: None, calls=0)
        beside_plain = self._decoding(other, lambda: self._first(prompt), calls=calls)
        beside_restore = self._decoding(
            other, lambda: self._cached(self._host, prompt, None, restored, "host"), calls=calls
        )
        if restored.count < calls:
            self.result.skip(f"{context} tokens beside a decode: {calls - restored.count} of {calls} not restored")
            beside_restore = None
        self.result.decoding.append(Decoding(context, alone, beside_plain, beside_restore))

    def _decoding(self, other: torch.Tensor, act: Callable[[], object], calls: int) -> float | None:
        """Return mean ms per token of `other`, which decodes in a thread while `act` runs. None without a token."""
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
        return 1e3 * statistics.mean(gaps) if gaps else None

    def _prompt(self, tokens: int, number: int) -> torch.Tensor:
        """Return a prompt of shape [1, tokens + 1]. The same `number` gives the same tokens."""
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

    def _store(
        self, kv: Attachment, prompt: torch.Tensor, wanted: torch.Tensor | None, samples: "_Samples | None" = None
    ) -> None:
        """Generate with kvtier, and wait until everything is stored."""
        self._cached(kv, prompt, wanted, samples or _Samples("store", prompt.shape[1]))
        kv.flush(_FLUSH_S)

    def _cached(
        self,
        kv: Attachment,
        prompt: torch.Tensor,
        wanted: torch.Tensor | None,
        samples: "_Samples",
        place: str = "",
        tokens: int | None = None,
    ) -> None:
        """Generate with kvtier. The sample counts if `tokens` tokens came from `place`."""
        found = kv.generate(prompt, **self._arguments(prompt))
        report = kv.last
        if report.uncached_reason:
            logger.warning("a call did not use the cache: %s", report.uncached_reason)
        expected = prompt.shape[1] - 1 if tokens is None else tokens
        if place and report.restored_by_source.get(place, 0) < expected:
            logger.info("%s instead of %d tokens from %s", report.restored_by_source, expected, place)
            return
        is_same = wanted is None or bool(torch.equal(found[:, prompt.shape[1] :], wanted))
        samples.add(report.ttft_s, report.load_s, report.restored_tokens, is_same)

    def _samples(self, name: str, context: int) -> "_Samples":
        """Return the record's samples of an arm."""
        found, arm = _Samples(name, context), self.result.arm(name, context)
        if arm is not None:
            found.ttft_s, found.load_s = list(arm.ttft_s), list(arm.load_s)
            found.restored, found.is_same = arm.restored_tokens, arm.same_tokens
        return found

    def _show(self, *arms: "_Samples") -> None:
        """Write these samples to the record."""
        for it in arms:
            if it.count:
                size = it.restored * self.result.bytes_per_token
                times = tuple(it.ttft_s), tuple(it.load_s)
                self.result.put(Arm(it.name, it.context, it.restored, *times, size, it.is_same))
        self._keep(self.result)

    def _end(self, *arms: "_Samples") -> None:
        for it in arms:
            if not it.count:
                self.result.skip(f"{it.context} tokens, {it.name}: no sample was restored from this tier alone")


class _Samples:
    """The samples of an arm so far."""

    def __init__(self, name: str, context: int) -> None:
        self.name = name
        self.context = context
        self.ttft_s: list[float] = []
        self.load_s: list[float] = []
        self.restored = 0
        self.is_same = True

    @property
    def count(self) -> int:
        return len(self.ttft_s)

    def add(self, ttft_s: float, load_s: float, restored: int, is_same: bool) -> None:  # noqa: FBT001 - a sample's values
        self.ttft_s.append(ttft_s)
        self.load_s.append(load_s)
        self.restored = max(self.restored, restored)
        self.is_same = self.is_same and is_same


class _TokenClock(StoppingCriteria):
    """Notes the time of each token, and ends the generation when `stop` is set."""

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


@click.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="Model shape; the weights are random.")
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:1, cpu.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and KV.")
@click.option("--contexts", type=Counts(), default="1024,4096,8192,16384,32768,65536,131072", show_default=True,
              help="Prompt lengths in tokens.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Samples per median.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws weights and tokens.")
@click.option("--host", "host_bytes", type=Bytes(), default="32GiB", show_default=True, help="Host memory for chunks.")
@click.option("--disk", "disk_bytes", type=Bytes(), default="40GiB", show_default=True, help="Capacity on disk.")
@dir_option
@click.option("--chunk-tokens", type=click.IntRange(16, 65536), default=256, show_default=True)
@link_chunks_option
@click.option("--splits/--no-splits", "with_splits", default=True, show_default=True, help="Also partial hits.")
@click.option("--decode/--no-decode", "with_decode", default=True, show_default=True, help="Also beside a decode.")
@record_option
@resume_option
@picture_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ttft(record: Path | None, resume: bool, picture: Path | None, as_json: bool, **given: Any) -> None:  # noqa: ANN401, FBT001 - flags
    """Time to first token by context length: computed, restored from host memory, restored from disk."""
    if picture is not None:
        check_chart("--picture", picture)
    settings, recorded = taken(TtftSettings, given), recorded_settings(given)
    check_device(settings.device)
    earlier = None
    if resume:
        name = device_name(settings.device)
        earlier = earlier_record(record, "ttft", settings=recorded, seed=settings.seed, device=name)
    if earlier is not None and earlier["results"]["is_complete"]:
        click.echo(f"{record}: complete, nothing is left to measure")
        draw(earlier["results"], picture)
        return
    # Git and the driver are asked only once, because the record is rewritten often.
    made = make_record("ttft", settings=recorded, seed=settings.seed, results={}, directory=settings.directory)

    def keep(result: TtftResult) -> None:
        if record is None:
            return
        results = {
            **result.summary(),
            "links": [{**asdict(link), "ratio": round(link.ratio, 4)} for link in result.links],
            "splits": [{**asdict(split), "regret": round(split.regret, 4)} for split in result.splits],
            "decoding": [asdict(it) for it in result.decoding],
            "measured": result.measured,
            "is_complete": set(settings.contexts) <= set(result.measured),
            "continues": continued(earlier),
        }
        write_json("--record", record, made | {"results": results, "samples": [asdict(arm) for arm in result.arms]})

    with progress("ttft", len(settings.contexts) + 2) as advance:
        result = run(settings, lambda _what: advance(1), keep, earlier)
    draw(result.summary(), picture)
    tell_written(picture, record)
    if as_json:
        print_json({**result.summary(), "arms": [asdict(arm) for arm in result.arms]})
    else:
        show(result)


def draw(summary: Mapping[str, Any], picture: Path | None) -> None:
    """Draw the results of a record, which is complete and written by now."""
    if picture is not None:
        from bench.parts.pictures import draw_ttft  # noqa: PLC0415 - needs matplotlib

        draw_ttft(summary, picture)


def show(result: TtftResult) -> None:
    """Print the result."""
    rows = [
        (
            f"{arm.context:,}",
            arm.name,
            f"{1e3 * arm.median_s:,.1f}",
            f"{plain.median_s / arm.median_s:.2f}" if (plain := result.arm("recompute", arm.context)) else "-",
            f"{arm.restored_bytes / arm.median_s / 1e9:.2f}",
            "yes" if arm.same_tokens else "NO",
        )
        for arm in result.arms
    ]
    title = f"{result.shape}, {result.device}"
    print_table(Table(("context", "arm", "TTFT ms", "speed-up", "GB/s", "same tokens"), rows, title=title, numeric=4))
    for link in result.links:
        click.echo(f"{link.name}: {link.gb_per_s:.2f} GB/s, {link.ratio:.2f} of a plain copy ({link.note})")
    for it in result.decoding:
        alone, plain, restore = (
            "-" if ms is None else f"{ms:.1f} ms" for ms in (it.alone_ms, it.beside_recompute_ms, it.beside_restore_ms)
        )
        click.echo(
            f"{it.context:,} tokens, time per token of another request: {alone} alone, {plain} beside a recompute, "
            f"{restore} beside a restore"
        )
    for split in result.splits:
        source = "measured" if split.is_tried else "interpolated"
        click.echo(
            f"{split.context:,} tokens from {split.place}: the planner loads {split.chosen_tokens:,}, the best "
            f"{source} split is {split.best_tokens:,}; regret {split.regret:.1%}"
        )
    for text in result.skipped:
        click.echo(f"left out: {text}", err=True)


if __name__ == "__main__":
    run_script(ttft)
