"""Executes the runs of a record in order, each in a directory of its own, and resumes a stopped record.

A record consists of all runs of one benchmark. A run makes a new store, starts a server under its limits, sends the
warm-up and the measured load, waits until the server has written everything, and ends it. Runs of different arms
alternate. `run.json` is written last. The same command, given again, repeats runs that failed or have no such file.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError, KvError
from kvtier.report.output import write_json
from kvtier.tools.bench.serve import checkpoint
from kvtier.tools.bench.serve.arms import Arm, chunk_tokens, server_command, transfer_config
from kvtier.tools.bench.serve.generator import REQUESTS_FILE
from kvtier.tools.bench.serve.join import as_row
from kvtier.tools.bench.serve.load_driver import GeneratedLoad
from kvtier.tools.bench.serve.machine_limits import Drive, MachineLimits, drive_of
from kvtier.tools.bench.serve.sampler import Processes, Sampler, Sensor, first_gpu, parse_metrics
from kvtier.tools.bench.serve.server import (
    LmcachePackages,
    Server,
    ServerError,
    ServerProcess,
    VllmPython,
    await_health,
    free_ports,
    get,
    python_output,
    vllm_environment,
    write_packages,
)
from kvtier.tools.size import of

CALIBRATION = "calibration.json"
SETTINGS = "settings.json"
CONTEXT = "context_tokens"
"""The name of the field of `LoadSettings` with the model's longest context."""
CALIBRATION_PROMPTS = 8
CHECKPOINT_S = 300.0
DRAIN_S = 20.0
START_LIMIT_S = 400.0
START_S = 40.0
"""Expected time of a server's start, for the progress bar."""
STATISTICS = {
    "vllm.stat_logger_plugins": "kvtier_request_stats = kvtier.tools.bench.serve.vllm_stat_logger:RequestStats"
}
STATISTICS_PATH = "KVTIER_REQUEST_STATS"
"""The environment variable with the path of ``engine.jsonl``. vLLM's plug-in `STATISTICS` writes this file."""
JOURNAL = "journal"
"""Directory of kvtier's journal in a run. `kvtier.jsonl` is made from it."""
_QUIET_S = 1.0
_OPTION = "--dir"


class RunKey(NamedTuple):
    """Identifies one run of a record: its arm, its repetition, and the values that are varied."""

    arm: Arm
    repetition: int
    """Number of the repetition, from 0."""
    ratio: float | None = None
    """R: KV bytes computed per second, divided by the tier's bytes per second; None if the drive is not throttled."""
    requests_per_s: float | None = None
    """Requests per second; None means the workload's own rate, or the rate of `capacity_share`."""
    capacity_share: float | None = None
    """Requests per second as a share of `Record.capacity_per_s`."""

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        ratio = "" if self.ratio is None else f"-R{self.ratio:g}"
        rate = "" if self.requests_per_s is None else f"-{self.requests_per_s:g}rps"
        share = "" if self.capacity_share is None else f"-{self.capacity_share:g}load"
        return f"{self.arm.name}-{self.repetition}{ratio}{rate}{share}"


def run_order(
    arms: Sequence[Arm],
    repeats: int,
    ratios: Sequence[float],
    rates: Sequence[float] = (),
    shares: Sequence[float] = (),
) -> list[RunKey]:
    """Return all runs. For each repetition and rate, tiered arms run at every R in turn, and the others run once.

    The order of the arms and of the rates changes from one repetition to the next.
    """
    tiered = [arm for arm in arms if arm.has_tiers]
    others = [arm for arm in arms if not arm.has_tiers]
    found: list[RunKey] = []
    for repetition in range(repeats):
        loads = [(rate, None) for rate in rates] + [(None, share) for share in shares]
        for load in _rotated(loads or [(None, None)], repetition):
            runs = [RunKey(arm, repetition, None, *load) for arm in _rotated(others, repetition)]
            for ratio in ratios or (None,):
                runs += [RunKey(arm, repetition, ratio, *load) for arm in _rotated(tiered, repetition)]
            found += _rotated(runs, repetition * max(1, len(others)))
    return found


def _rotated(items: Sequence[Any], by: int) -> list[Any]:
    by = by % len(items) if items else 0
    return [*items[by:], *items[:by]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings on which the figures depend. All runs of a record have equal settings."""

    arms: tuple[Arm, ...]
    repeats: int
    ratios: tuple[float, ...]
    rates: tuple[float, ...]
    """Requests per second of all users together."""
    shares: tuple[float, ...] = ()
    """Further rates, as shares of `Record.capacity_per_s`."""
    model: Path | None
    """Directory of a checkpoint; None means the checkpoint that `checkpoint` makes."""
    vllm: VllmPython | None
    """The Python that runs vLLM; None if every arm is a server that was started elsewhere."""
    lmcache: LmcachePackages | None = None
    """Packages for the arm ``lmcache``."""
    device_kv_bytes: int
    host_bytes: int
    store_bytes: int
    memory_bytes: int | None
    """Memory limit of the server's control group; None means no limits at all."""
    running: int
    context_tokens: int
    server_cores: tuple[int, ...]
    client_cores: tuple[int, ...]
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The workload and the settings of the generator, as plain values."""

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return json.loads(json.dumps(asdict(self), default=str))


class Record:
    """The runs of one record in a directory.

    Args:
        settings: settings of all runs.
        load: the load that every run sends.
        directory: directory for the runs, and for their stores while they run.

    Raises:
        ConfigError: the directory has runs with other settings.
    """

    def __init__(self, settings: ServeSettings, load: GeneratedLoad, directory: Path) -> None:
        self.settings = settings
        self._load = load
        self.runs = directory / "runs"
        self._store = directory / "store"
        self._model = settings.model or directory / f"model-{_digest(checkpoint.SHAPE)}"
        self._gpu: Sensor | None = first_gpu()
        self.drive: Drive | None = None
        if any(arm.is_ours for arm in settings.arms):
            self.drive = drive_of(directory)
            if settings.memory_bytes is not None:
                with closing(MachineLimits(settings.memory_bytes, self.drive)) as limits:
                    limits.throttle(1e9)  # a refusal must come before hours of runs
        self.runs.mkdir(parents=True, exist_ok=True)
        # A record may grow by repetitions, values of R and loads.
        may_grow = {"repeats", "ratios", "rates", "shares"}
        kept = {name: value for name, value in settings.plain().items() if name not in may_grow}
        _same_settings(self.runs / SETTINGS, kept)

    def order(self) -> list[RunKey]:
        """Return all runs in order."""
        it = self.settings
        return run_order(it.arms, it.repeats, it.ratios, it.rates, it.shares)

    def done(self) -> list[Path]:
        """Return the directories of the runs that have ended, in the order of the runs."""
        found = [self.runs / key.name for key in self.order()]
        return [it for it in found if (it / "run.json").exists()]

    def is_done(self, key: RunKey) -> bool:
        """Return whether the run has ended without an error."""
        return _read(self.runs / key.name / "run.json").get("status") == "ok"

    def make_model(self) -> None:
        """Write the benchmark's own checkpoint if the record uses it and it is missing.

        Raises:
            ConfigError: vLLM's Python cannot write it.
        """
        vllm = self.settings.vllm
        if vllm is None or self.settings.model is not None or self._model.exists():
            return
        try:
            python_output(vllm.python, checkpoint.__file__, str(self._model.absolute()), limit_s=CHECKPOINT_S)
        except ServerError as error:
            raise ConfigError(f"{vllm.python} cannot write a checkpoint: {error}") from error

    def calibrated(self) -> dict[str, float] | None:
        """Return the measurements of `calibrate`, or None if it has not run."""
        return _read(self.runs / CALIBRATION) or None

    def calibrate(self) -> dict[str, float]:
        """Measure, once per record, the KV bytes that the model computes per second for a typical prompt of the load.

        An idle server computes prompts one at a time. Times are the prefill times that the engine itself reports.

        Raises:
            KvError: the server fails.
        """
        if (known := self.calibrated()) is not None:
            return known
        tokens = self._load.prompt_tokens
        draw = random.Random(1)  # noqa: S311 - words of a prompt
        place = self.runs / "calibration"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        with self._serving(Arm("none", "none"), place) as (server, _):

            def compute() -> None:
                words = (f"t{draw.choice(checkpoint.WORDS)}" for _ in range(tokens))
                asked = {"model": "m", "prompt": " ".join(words), "max_tokens": 1, "temperature": 0}
                get(f"{server.url}/v1/completions", asked, limit_s=120.0)

            compute()  # a warm-up
            # The fastest prompt counts, because other work of the machine slows down the others.
            found = [_prefills(server)]
            for _ in range(CALIBRATION_PROMPTS):
                compute()
                found.append(_prefills(server))
        pairs = [(late[0] - early[0], late[1] - early[1]) for early, late in pairwise(found)]
        pairs = [pair for pair in pairs if min(pair) > 0]
        if not pairs:
            raise ServerError(f"{server.url}/metrics counts no prefill")
        seconds, computed = min(pairs, key=lambda pair: pair[0] / pair[1])
        per_token = of(self._model).bytes_per_token
        result = {
            "tokens": computed,
            "prefill_s": seconds,
            "kv_bytes_per_token": float(per_token),
            "kv_bytes_per_s": computed * float(per_token) / seconds,
        }
        write_json(_OPTION, self.runs / CALIBRATION, result)
        return result

    def capacity_per_s(self) -> float:
        """Return how many prompts of mean length a server without offloading computes per second, one at a time.

        Raises:
            KvError: the server fails during the calibration.
        """
        known = self.calibrate()
        return known["tokens"] / known["prefill_s"] / self._load.prompt_tokens

    def _load_of(self, key: RunKey) -> dict[str, float]:
        """Return the figures of a run's load that differ between runs, as `run.json` has them."""
        if key.capacity_share is None:
            return {} if key.requests_per_s is None else {"requests_per_s": key.requests_per_s}
        rate = float(f"{key.capacity_share * self.capacity_per_s():.3g}")
        return {"requests_per_s": rate, "share_of_capacity": key.capacity_share}

    def run(self, key: RunKey, tick: Callable[[], None]) -> dict[str, Any]:
        """Execute one run in a new directory with a new store. Return the content of `run.json`.

        If the server or the generator fails, the run fails, but its measurements are kept.
        """
        rate = None if key.ratio is None else self.calibrate()["kv_bytes_per_s"] / key.ratio
        load = self._load_of(key)
        place = self.runs / key.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        result: dict[str, Any] = {
            "arm": key.arm.name,
            "repetition": key.repetition,
            "tier_ratio": key.ratio,
            "tier_bytes_per_s": rate,
            "began_s": time.time(),
            "load": load,
            "measured_from_s": None,
            "load_average": [os.getloadavg()[0]],
            "status": "failed",
            "error": None,
            "command": None,
            "settings": self.settings.plain(),
        }
        try:
            with self._serving(key.arm, place) as (server, limits):
                result["command"] = server.command if isinstance(server, ServerProcess) else None
                result["started_s"] = time.time()
                if limits is not None:
                    limits.throttle(rate)
                sampler = Sampler(
                    place / "samples.jsonl",
                    server,
                    client_pids=self._load.pids,
                    drive=self.drive if key.arm.is_local else None,
                    limits=limits,
                    gpu=self._gpu if key.arm.is_local else None,
                    has_processors=key.arm.is_local,
                    tick=tick,
                )
                with closing(sampler):
                    sent = self._load.drive(
                        server.url,
                        place,
                        repetition=key.repetition,
                        requests_per_s=load.get("requests_per_s"),
                        is_over=server.why_over,
                    )
                    result["ended_s"] = time.time()
                    result["generator"] = asdict(sent)
                    result["measured_from_s"] = sent.measured_from_s
                    _drain(server)
                if problem := sent.error or server.why_over():
                    raise ServerError(problem)
                if sent.failed == sent.requests:
                    raise ServerError(f"0 of {sent.requests} requests completed; errors are in {place / REQUESTS_FILE}")
            result["status"] = "ok"
        except KvError as error:
            result["error"] = str(error)
        _gather_journal(place)
        result["load_average"].append(os.getloadavg()[0])
        result.setdefault("ended_s", time.time())
        write_json(_OPTION, place / "run.json", result)
        return result

    @contextmanager
    def _serving(self, arm: Arm, place: Path) -> Generator[tuple[Server, MachineLimits | None]]:
        """Start an arm's server with a new store, and wait until it is healthy. Remove server and store at the end."""
        settings, vllm = self.settings, self.settings.vllm
        if not arm.is_ours:
            server = Server(arm.url)
            await_health(server, "/v1/models", START_LIMIT_S)
            yield server, None
            return
        assert vllm is not None
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._store, ignore_errors=True)
            shutil.rmtree(self._store, ignore_errors=True)
            self._store.mkdir(mode=0o700)
            (self._store / "kv").mkdir(mode=0o700)
            assert self.drive is not None
            limits = None
            if settings.memory_bytes is not None:
                limits = stack.enter_context(closing(MachineLimits(settings.memory_bytes, self.drive)))
            logged = place.absolute()
            port, *further_ports = free_ports(3)
            transfer = transfer_config(
                arm,
                self._store.absolute() / "kv",
                settings.host_bytes,
                settings.store_bytes,
                is_cpu=vllm.is_cpu,
                journal=logged / JOURNAL,
                chunk_tokens=chunk_tokens(settings.arms),
                ports=further_ports,
            )
            command = server_command(
                vllm,
                port,
                self._model,
                transfer,
                device_kv_bytes=settings.device_kv_bytes,
                context_tokens=settings.context_tokens,
                running=settings.running,
            )
            packages = write_packages(self._store.absolute(), STATISTICS)
            lmcache = settings.lmcache if arm.kind == "lmcache" else None
            environment = vllm_environment(vllm, packages, settings.server_cores, lmcache)
            # vLLM's sockets need short paths, and vLLM leaves them behind.
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-", ignore_cleanup_errors=True))
            environment |= {STATISTICS_PATH: str(logged / "engine.jsonl"), "TMPDIR": scratch}
            server = ServerProcess(
                command,
                f"http://127.0.0.1:{port}",
                logged / "server.log",
                environment=environment,
                cores=settings.server_cores,
                limits=limits,
            )
            stack.callback(server.close)
            await_health(server, limit_s=START_LIMIT_S)
            yield server, limits


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if there is none."""
    with suppress(OSError, ValueError):
        return as_row(json.loads(path.read_text(encoding="utf-8")))
    return {}


def known_context(directory: Path) -> int | None:
    """Return the model's context in tokens from the record in `directory`, or None without a record.

    With it, a record can be shown and continued while servers that were started elsewhere are unreachable.
    """
    with suppress(KeyError, TypeError):
        return int(_read(directory / "runs" / SETTINGS)["settings"]["load"][CONTEXT])
    return None


@contextmanager
def pinned(cores: Sequence[int]) -> Generator[None]:
    """Run this process and its children on `cores`, if any are given. Restore the previous cores at the end."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _drain(server: Server) -> None:
    """Wait until the server's processes no longer write, so that the run includes all of its I/O."""
    until_s = time.monotonic() + DRAIN_S
    processes, before = Processes(), None
    while time.monotonic() < until_s and (pids := server.pids()) and not server.why_over():
        figures = processes.figures(pids)
        now = figures.read_bytes, figures.written_bytes
        if now == before:
            return
        before = now
        time.sleep(_QUIET_S)


def _prefills(server: Server) -> tuple[float, float]:
    """Return the seconds of prefill and the number of prompt tokens since the server's start."""
    found = parse_metrics(get(f"{server.url}/metrics"))
    try:
        return found["vllm:request_prefill_time_seconds_sum"], found["vllm:prompt_tokens_total"]
    except KeyError as error:
        raise ServerError(f"{server.url}/metrics has no {error.args[0]}") from error


def _gather_journal(place: Path) -> None:
    """Combine the files of a run's journal into `kvtier.jsonl`."""
    files = sorted((place / JOURNAL).glob("*.jsonl"))
    if files:
        with (place / "kvtier.jsonl").open("wb") as out:
            for file in files:
                out.write(file.read_bytes().rpartition(b"\n")[0] + b"\n")
    shutil.rmtree(place / JOURNAL, ignore_errors=True)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings, or compare them with the settings that were written earlier."""
    try:
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        write_json(_OPTION, path, {"digest": _digest(settings), "settings": settings})
        return
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_OPTION}: {path}: {error}; use an empty directory, or the directory of an earlier run"
        ) from error
    if before.get("digest") == _digest(settings):
        return
    known: dict[str, Any] = before.get("settings", {})
    other = [
        f"{name} was {known.get(name)!r} and is now {settings.get(name)!r}"
        for name in sorted({*known, *settings})
        if known.get(name) != settings.get(name)
    ]
    raise ConfigError(
        f"{_OPTION}: {path.parent} holds runs with other settings ({'; '.join(other)[:600]}); "
        "use the same settings to resume them, or another directory"
    )
