"""Measures conversations of several users whose KV does not fit on the device, with and without kvtier.

    python bench/multiturn.py --record bench/records/multiturn.json          # llama-3.1-8b on a GPU
    python bench/multiturn.py --quick         # a smoke test on the CPU

    recompute   evicted KV is computed again
    host        kvtier with host memory
    host+disk   kvtier with the same host memory and a directory below it

All arms get the same prompts with the same pauses. They continue with the first arm's answers, with which their own
answers are compared. The arms take turns at each number of users, and each repeat starts with another arm, so that
drift affects all of them. `parts/server.py` describes the server. The record (--record) is rewritten after each run,
and --resume continues it with the first workload that not all arms have run. Imports torch.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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
    picture_option,
    record_option,
    recorded_settings,
    resume_option,
    taken,
)
from bench.parts.command import run as run_script
from bench.parts.models import attach_locked, build, check_device, device_name, skip_out_of_memory
from bench.parts.power import PowerMeter, find_sensor
from bench.parts.server import Answers, Server
from bench.parts.turns import ARMS, DISK, HOST, RECOMPUTE, ArmRun, ArmSummary, MultiturnResult
from bench.parts.workload import Workload, WorkloadSpec, draw

from kvtier.cli.options import tell_written
from kvtier.connect.transformers import Attachment
from kvtier.connect.transformers.support import inspect_cache
from kvtier.errors import ConfigError
from kvtier.report.output import check_chart, print_json, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.tools.options import Bytes
from kvtier.tools.run_record import make_record

QUICK = {
    "shape": "small", "device": "cpu", "dtype": "float32", "users": "1,2,4,6", "rounds": 3, "system_tokens": 64,
    "history_tokens": 768, "question_tokens": 16, "answer_tokens": 6, "rate_per_user": 0.5, "budget_bytes": "12MiB",
    "host_bytes": "16MiB", "disk_bytes": "1GiB", "chunk_tokens": 64, "threads": 1,
}  # fmt: skip
"""Defaults of `--quick`: a model and lengths that show the effect on two cores."""
_HELD_CALLS = 8
"""Calls whose KV stays on the device, outside the budget, until its new chunks are in host memory."""
_WARM_TOKENS = 64
_WARM_NUMBER = 1 << 20

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiturnSettings:
    """What to measure."""

    shape: str
    device: str
    dtype: str
    users: tuple[int, ...]
    workload: WorkloadSpec
    budget_bytes: int
    """KV budget of the device."""
    host_bytes: int
    disk_bytes: int
    """Capacity of the disk. 0: leave out the arm with a disk."""
    directory: Path | None = None
    chunk_tokens: int
    at_once: int = 32
    threads: int = 0
    """Threads of a model on the CPU. 0: torch's default."""
    repeats: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.users or min(self.users) < 1:
            raise ConfigError(f"users = {self.users}; allowed: one user or more")

    @property
    def workloads(self) -> list[tuple[int, int]]:
        """Return (users, repeat) of each workload, in order."""
        return [(users, repeat) for users in sorted(set(self.users)) for repeat in range(self.repeats)]


def run(
    settings: MultiturnSettings,
    tick: Tick = lambda _what: None,
    keep: Callable[[MultiturnResult], None] = lambda _result: None,
    earlier: Mapping[str, Any] | None = None,
) -> MultiturnResult:
    """Measure every number of users, in ascending order.

    Args:
        settings: what to measure.
        tick: called before each step with its name.
        keep: called with the result after each run.
        earlier: a record of the same settings, whose workloads are not run again.

    Raises:
        ConfigError: a setting is impossible here.
    """
    tick("model")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = build(settings.shape, settings.device, settings.dtype, settings.seed)
    cache = inspect_cache(model)
    if cache.has_windows:
        raise ConfigError(f"shape = {settings.shape}: the server cannot batch sliding windows; allowed: one without")
    layout = cache.layout(settings.chunk_tokens)
    per_token = round(layout.bytes_per_token)
    result = MultiturnResult(
        settings.shape,
        device_name(settings.device),
        per_token,
        sum(group.payload_bytes for group in layout.groups),
        settings.budget_bytes // per_token,
    )
    if earlier is not None:
        result.restore(earlier)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-turns-", dir=settings.directory)))
        tick("attach")
        bench = MultiturnBenchmark(model, settings, result, _attached(model, settings, place, stack, result.skipped))
        bench.warm_up()
        for number, (users, repeat) in enumerate(settings.workloads):
            if (users, repeat) in result.measured:
                continue
            with skip_out_of_memory(f"{users} users", result.skipped):
                bench.measure(users, repeat, number, tick, keep)
            result.measured.append((users, repeat))
            keep(result)
    return result


def _attached(
    model: Any,  # noqa: ANN401 - depends on its class
    settings: MultiturnSettings,
    place: Path,
    stack: ExitStack,
    skipped: list[str],
) -> dict[str, Attachment | None]:
    common: dict[str, Any] = {
        "held_calls": _HELD_CALLS,
        "host__capacity_bytes": settings.host_bytes,
        "store__chunk_tokens": settings.chunk_tokens,
        "limits__load_deadline_s": 60.0,
    }
    arms: dict[str, Attachment | None] = {RECOMPUTE: None}
    arms[HOST] = stack.enter_context(attach_locked(model, skipped.append, **common))
    if settings.disk_bytes:
        below = {
            "kind": "directory",
            "path": place / "kv",
            "capacity_bytes": settings.disk_bytes,
            "transfer_deadline_s": 60,
        }
        arms[DISK] = stack.enter_context(attach_locked(model, skipped.append, tiers=[below], **common))
    return arms


class MultiturnBenchmark:
    """One model, and an attachment for each arm."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - depends on its class
        settings: MultiturnSettings,
        result: MultiturnResult,
        arms: dict[str, Attachment | None],
    ) -> None:
        self._model, self._settings, self._result, self._arms = model, settings, result, arms
        self._sensor, self._sensor_name = find_sensor(settings.device)

    def warm_up(self) -> None:
        """Run one short conversation with each arm, to compile kernels and allocate memory."""
        spec = WorkloadSpec(
            rounds=2,
            system_tokens=_WARM_TOKENS,
            history_tokens=2 * self._settings.chunk_tokens,
            question_tokens=_WARM_TOKENS,
            answer_tokens=4,
            rate_per_user=0.0,
            real_lengths=False,
        )
        load = draw(spec, 2, self._model.config.vocab_size, self._settings.seed, _WARM_NUMBER)
        for kv in self._arms.values():
            # There is room for one of the two at a time, so that KV is evicted and restored.
            most = 2 * len(load.system) + load.conversations[0].tokens
            server = Server(self._model, most, kv, at_once=1, expected=None)
            server.serve(load)
            server.settle()

    def measure(
        self, users: int, repeat: int, number: int, tick: Tick, keep: Callable[[MultiturnResult], None]
    ) -> None:
        """Run all arms with the same workload."""
        load = draw(self._settings.workload, users, self._model.config.vocab_size, self._settings.seed, number)
        names = list(self._arms)
        expected: Answers | None = None
        first = repeat % len(names)
        for name in (*names[first:], *names[:first]):
            tick(f"{users} users, {name}")
            expected = self._run(name, users, repeat, load, expected)
            keep(self._result)

    def _run(self, name: str, users: int, repeat: int, load: Workload, expected: Answers | None) -> Answers:
        """Run one arm with one workload. Return the answers that the other arms' are compared with."""
        server = Server(
            self._model,
            self._result.budget_tokens,
            self._arms[name],
            at_once=self._settings.at_once,
            expected=expected,
        )
        with PowerMeter(self._sensor, self._sensor_name) as meter:
            server.serve(load)
        server.settle()
        self._result.runs.append(
            ArmRun(
                arm=name,
                users=users,
                repeat=repeat,
                working_set_tokens=load.tokens,
                evictions=server.evictions,
                seconds=server.seconds,
                joules=meter.joules,
                energy_source=meter.source,
                turns=server.samples,
            )
        )
        return server.answers if expected is None else expected


def _use_quick_defaults(context: click.Context, _option: click.Parameter, is_quick: bool) -> None:  # noqa: FBT001 - a flag
    if is_quick:
        context.default_map = QUICK


@click.command()
@click.option("--quick", is_flag=True, is_eager=True, expose_value=False, callback=_use_quick_defaults,
              help="Other defaults: a small model and short texts on the CPU; minutes.")  # fmt: skip
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="Model shape; the weights are random.")
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:1, cpu.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and KV.")
@click.option("--users", type=Counts(), default="2,6,12,20", show_default=True, help="Points of the curves.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=4, show_default=True, help="Questions of each user.")
@click.option("--system", "system_tokens", type=click.IntRange(2), default=1000, show_default=True,
              help="Tokens of the shared system prompt.")  # fmt: skip
@click.option("--history", "history_tokens", type=click.IntRange(1), default=4000, show_default=True,
              help="Tokens of each user's own history.")  # fmt: skip
@click.option("--question", "question_tokens", type=click.IntRange(1), default=100, show_default=True,
              help="Mean tokens of a question.")  # fmt: skip
@click.option("--answer", "answer_tokens", type=click.IntRange(1), default=100, show_default=True,
              help="Mean tokens of an answer.")  # fmt: skip
@click.option("--real-lengths/--equal-lengths", default=True, show_default=True,
              help="Questions and answers vary as in ShareGPT, or all have the mean.")  # fmt: skip
@click.option("--rate", "rate_per_user", type=click.FloatRange(0), default=0.1, show_default=True,
              help="Questions per second of each user; 0: no pause.")  # fmt: skip
@click.option("--kv-budget", "budget_bytes", type=Bytes(), default="6GiB", show_default=True, help="KV on the device.")
@click.option("--host", "host_bytes", type=Bytes(), default="32GiB", show_default=True, help="Host memory for chunks.")
@click.option("--disk", "disk_bytes", type=Bytes(), default="64GiB", show_default=True, help="0: without that arm.")
@dir_option
@click.option("--chunk-tokens", type=click.IntRange(16, 65536), default=256, show_default=True)
@click.option("--at-once", type=click.IntRange(1, 1024), default=32, show_default=True, help="Largest decode batch.")
@click.option("--repeats", type=click.IntRange(1, 100), default=1, show_default=True, help="Runs of each arm.")
@click.option("--threads", type=click.IntRange(0), default=0, show_default=True, help="Of torch on a CPU; 0: default.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws weights, tokens, lengths, arrivals.")
@record_option
@resume_option
@picture_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def multiturn(record: Path | None, resume: bool, picture: Path | None, as_json: bool, **given: Any) -> None:  # noqa: ANN401, FBT001 - flags
    """Conversations whose KV does not fit on the device: time to first token and tokens/s, with and without kvtier."""
    if picture is not None:
        check_chart("--picture", picture)
    settings = taken(MultiturnSettings, given | {"workload": taken(WorkloadSpec, given)})
    check_device(settings.device)
    recorded, earlier = recorded_settings(given), None
    if resume:
        name = device_name(settings.device)
        earlier = earlier_record(record, "multiturn", settings=recorded, seed=settings.seed, device=name)
    if earlier is not None and earlier["results"]["is_complete"]:
        click.echo(f"{record}: complete, nothing is left to measure")
        results = earlier["results"]
        per_token = results["bytes_per_token"]
        whole = MultiturnResult(
            settings.shape, results["device"], per_token, settings.chunk_tokens * per_token, results["budget_tokens"]
        )
        whole.restore(earlier)
        draw_picture(whole, picture)
        return

    def keep(result: MultiturnResult) -> None:
        if record is None:
            return
        made = make_record(
            "multiturn",
            settings=recorded,
            seed=settings.seed,
            results={
                **summary(result),
                "measured": result.measured,
                "is_complete": set(settings.workloads) <= set(result.measured),
                "continues": continued(earlier),
            },
            samples=[asdict(run) for run in result.runs],
            directory=settings.directory,
        )
        write_json("--record", record, made)

    with progress("multiturn", len(settings.users) * settings.repeats * len(ARMS) + 2) as advance:
        result = run(settings, lambda _what: advance(1), keep, earlier)
    draw_picture(result, picture)
    tell_written(picture, record)
    if as_json:
        print_json(summary(result))
    else:
        show(result)


def draw_picture(result: MultiturnResult, picture: Path | None) -> None:
    """Draw the record, which is complete and written by now."""
    if picture is not None:
        from bench.parts.pictures import draw_multiturn  # noqa: PLC0415 - needs matplotlib

        draw_multiturn(result, picture)


def summary(result: MultiturnResult) -> dict[str, object]:
    """The record's results, without the samples."""
    found = result.summaries()
    return {
        "shape": result.shape,
        "device": result.device,
        "bytes_per_token": result.bytes_per_token,
        "budget_tokens": result.budget_tokens,
        "points": [{**_rounded(asdict(it)), "is_same": it.is_same} for it in found],
        "users_within_ms": {
            f"{limit:g}": {arm: None if users is None else round(users, 1) for arm, users in counts.items()}
            for limit, counts in result.users_within_ms().items()
        },
        "same_tokens": all(it.is_same for it in found),
        "skipped": list(result.skipped),
    }


def _rounded(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(item) if isinstance(item, dict) else round(item, 3) if isinstance(item, float) else item
        for name, item in value.items()
    }


COLUMNS = (
    "users", "arm", "equal", "TTFT ms", "p95", "queue ms", "ms a token", "tokens/s", "turns/s", "resident", "host",
    "disk", "computed", "GB loaded", "W", "J a token",
)  # fmt: skip


def show(result: MultiturnResult) -> None:
    """Print a row for each number of users and arm. TTFT is of later turns, and shares are of prompt tokens."""
    found = result.summaries()
    title = f"{result.shape}, {result.device}: {result.budget_tokens:,} tokens of KV fit on the device"
    print_table(Table(COLUMNS, [_row(it) for it in found], title=title, numeric=13))
    most = max((it.users for it in found), default=0)
    for limit, counts in result.users_within_ms().items():
        if any(users is not None and users < most for users in counts.values()):
            shown = [f"{arm} {'none' if users is None else f'{users:.3g}'}" for arm, users in counts.items()]
            click.echo(f"users within {limit:g} ms to the first token (median): {', '.join(shown)}", err=True)
    for source in dict.fromkeys(it.energy_source for it in found):
        click.echo(f"energy: {source}", err=True)
    for text in result.skipped:
        click.echo(f"left out: {text}", err=True)


def _row(it: ArmSummary) -> tuple[str, ...]:
    disk = sum(tokens for place, tokens in it.restored_tokens.items() if place != "host")
    sources = (it.resident_tokens, it.restored_tokens.get("host", 0), disk, it.computed_tokens)
    return (
        f"{it.users}",
        it.arm,
        _equality(it),
        f"{it.ttft_ms['p50']:,.0f}",
        f"{it.ttft_ms['p95']:,.0f}",
        f"{it.queue_ms:,.0f}",
        f"{it.per_token_ms['p50']:.1f}",
        f"{it.output_tokens_per_s:.1f}",
        f"{it.requests_per_s:.2f}",
        *(f"{tokens / it.prompt_tokens:.0%}" for tokens in sources),
        f"{sum(it.restored_bytes.values()) / 1e9:.3g}",
        "-" if it.watts is None else f"{it.watts:.0f}",
        "-" if it.joules_per_output_token is None else f"{it.joules_per_output_token:.2f}",
    )


def _equality(it: ArmSummary) -> str:
    """Say how the arm's answers compare with the first arm's."""
    if it.equal_tokens is None or it.equal_first_tokens is None:
        return "-"
    if it.is_same:
        return "all"
    (first, of_first), (equal, of) = it.equal_first_tokens, it.equal_tokens
    return f"NO: {equal / of:.1%} of tokens, {first / of_first:.1%} of first ones"


if __name__ == "__main__":
    run_script(multiturn)
