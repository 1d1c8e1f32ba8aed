"""Reads the files of a run and joins them into figures for each request and for each second.

A run is a directory: `run.json`, and one JSON object a line in `requests.jsonl` (the client), `engine.jsonl` (the
engine), `kvtier.jsonl` (its journals, FORMAT.md) and `samples.jsonl` (the machine). Times are Unix seconds. Figures of
a missing file are None. A line that is torn or not a JSON object is skipped and counted.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.report.output import write_file

LINE_BYTES_MAX = 1 << 20
LINES_MAX = 2_000_000
RUN_BYTES_MAX = 16 << 20
UNCOVERED_S = 2.0
"""Most seconds of an interval that samples may leave uncovered, at both ends together."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of one run's directory."""

    name: str
    run: Row
    requests: list[Row]
    engine: dict[str, Row] | None
    """Rows by request id; None if the file is missing."""
    kvtier: dict[str, Row] | None
    objects: list[Row]
    samples: list[Row]
    skipped: Mapping[str, int]
    """Number of skipped lines by file."""

    @property
    def arm(self) -> str:
        """The arm's name."""
        return str(self.run.get("arm", self.name))


def read_run(directory: Path) -> RunFiles:
    """Read the files of a run.

    Raises:
        ConfigError: `run.json` is missing, or is not a record of a run.
    """
    path = directory / "run.json"
    try:
        with path.open("rb") as file:
            run = as_row(json.loads(file.read(RUN_BYTES_MAX)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; allowed: a complete run of kvtier bench serve") from error
    if not run:
        raise ConfigError(f"{path} holds no JSON object; allowed: a complete run of kvtier bench serve")
    skipped: dict[str, int] = {}
    found = {
        name: _read_lines(directory / f"{name}.jsonl", skipped) for name in ("requests", "engine", "kvtier", "samples")
    }
    own = found["kvtier"]
    return RunFiles(
        name=directory.name,
        run=run,
        requests=[row for row in found["requests"] or () if number(row, "sent_s") is not None],
        engine=None if found["engine"] is None else _by_id(found["engine"]),
        kvtier=None if own is None else _by_id(row for row in own if row.get("kind") == "request"),
        objects=[row for row in own or () if row.get("kind") == "object"],
        samples=sorted(
            (row for row in found["samples"] or () if number(row, "time_s") is not None), key=lambda it: it["time_s"]
        ),
        skipped=skipped,
    )


def grown(samples: Sequence[Row], name: str, since_s: float, until_s: float) -> float | None:
    """Return by how much a counter grew in an interval. Its values at both ends are interpolated between samples.

    The result is None if the counter fell, or if the samples leave more than `UNCOVERED_S` of the interval uncovered.

    Args:
        samples: samples in order of time.
        name: dotted name, such as ``device.read_bytes``. A metric's name is ``metrics.`` and the sample's name.
        since_s: start in Unix seconds.
        until_s: end in Unix seconds.
    """
    times, values = column_of(samples, name)
    if not is_covered(times, since_s, until_s) or any(after < before for before, after in pairwise(values)):
        return None
    first, last = np.interp([since_s, until_s], times, values)
    return float(last - first)


def is_covered(times: Sequence[float], since_s: float, until_s: float) -> bool:
    """Return whether samples at `times` leave at most `UNCOVERED_S` of the interval uncovered."""
    return len(times) > 1 and max(0.0, times[0] - since_s) + max(0.0, until_s - times[-1]) <= UNCOVERED_S


def most(samples: Sequence[Row], name: str, since_s: float, until_s: float) -> float | None:
    """Return the largest value of a gauge in the samples of an interval, or None if there is no value."""
    times, values = column_of(samples, name)
    return max((value for at_s, value in zip(times, values, strict=True) if since_s <= at_s <= until_s), default=None)


def _read_lines(path: Path, skipped: dict[str, int]) -> list[Row] | None:
    """Return the JSON objects in a file, or None if the file is missing."""
    try:
        opened = path.open("rb")
    except OSError:
        return None
    with opened as file:
        lines = iter(partial(file.readline, LINE_BYTES_MAX), b"")
        rows = [_row_of(line) for line in islice(lines, LINES_MAX)]
        left_out = rows.count({}) + bool(file.readline(1))
    if left_out:
        skipped[path.name] = left_out
    return [row for row in rows if row]


def _row_of(line: bytes) -> Row:
    """Return the JSON object of a whole line, or an empty one for anything else."""
    with suppress(ValueError, RecursionError):
        return as_row(json.loads(line)) if line.endswith(b"\n") else {}
    return {}


def _by_id(rows: Iterable[Row]) -> dict[str, Row]:
    """Return rows by request id. If an id has several rows, the last one counts."""
    return {str(row["id"]): row for row in rows if "id" in row}


def as_row(value: object) -> Row:
    """Return `value` if it is a JSON object, else an empty one."""
    return cast("Row", value) if isinstance(value, dict) else {}


def number(row: Mapping[str, Any], name: str) -> float | None:
    """Return the finite number under `name`, or None for anything else."""
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def count(row: Mapping[str, Any], name: str) -> int | None:
    """Return the number under `name`, rounded, or None for anything else."""
    value = number(row, name)
    return None if value is None else round(value)


def counts(value: object) -> dict[str, int] | None:
    """Return the numbers in a JSON object, rounded, without its other values. Return None if it is no JSON object."""
    if not isinstance(value, dict):
        return None
    row = as_row(cast("object", value))
    return {name: known for name in row if (known := count(row, name)) is not None}


def column_of(samples: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Return times and values of the samples that have the number `name`. A dotted name leads into an inner object."""
    times: list[float] = []
    values: list[float] = []
    outer, _, inner = name.partition(".")
    for row in samples:
        value = number(as_row(row.get(outer)) if inner else row, inner or outer)
        if value is not None:
            times.append(float(row["time_s"]))
            values.append(value)
    return times, values


EDGES_MAX = 20_000
"""Most intervals of a run that are joined. Later intervals are left out."""

COMPUTED, RESIDENT, CACHED, EXTERNAL = "computed", "resident", "cached", "external"
ENGINE_PLACES = (COMPUTED, RESIDENT, CACHED)
"""Places that are not tiers."""
NO_CONNECTOR = "none"
"""The arm that computes everything that the engine's prefix cache lacks. Prefill times are fitted to its requests."""
SOURCE_COUNTERS = {
    COMPUTED: 'vllm:prompt_tokens_by_source_total{source="local_compute"}',
    RESIDENT: 'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}',
    EXTERNAL: 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
}

PLACES = (
    "Tokens by place: computed by the engine; resident in its own prefix cache; else the tier they were loaded from. "
    "Tokens that a load should have brought but did not count as computed. "
    "Without kvtier's log the engine has one sum for its own cache and a connector, including what did not arrive; its "
    "counters split the sum of all requests into resident and external."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRequest:
    """What the files of a run say about one request. None means unknown."""

    id: str
    user: int | None
    turn: int | None
    sent_s: float
    first_s: float | None
    ended_s: float | None
    error: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    queue_s: float | None
    """Time from arrival in the engine to the first step, minus the load, which the engine counts as queueing."""
    prefill_s: float | None
    tokens_by_place: dict[str, int] | None
    """Tokens by place. The values add up to `prompt_tokens`, unless `is_sum_wrong`."""
    is_sum_wrong: bool
    offered_tokens: dict[str, int] | None
    """Tokens of the prompt that each tier had and the engine did not."""
    chosen_tokens: int | None
    """Tokens that the planner decided to load."""
    expected_s: float | None
    """Time to first token that the planner expected."""
    loaded_bytes: int | None
    load_s: float | None
    regret_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one."""
        if self.first_s is None or self.ended_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun:
    """The measured part of a run."""

    files: RunFiles
    since_s: float
    until_s: float
    requests: list[JoinedRequest]
    """Requests sent in the measured part. Warm-up is excluded."""
    seconds: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """Columns by name; `at_s` is the end of each interval, counted from `since_s`."""


def join(files: RunFiles) -> JoinedRun:
    """Return the measured part of one run. The regret of its requests is not known yet."""
    sent = [float(row["sent_s"]) for row in files.requests]
    until_s = number(files.run, "ended_s")
    if until_s is None:
        until_s = max((number(row, "ended_s") or float(row["sent_s"]) for row in files.requests), default=0.0)
    since_s = number(files.run, "measured_from_s")
    # If a run failed before its first request, its measured part has no length.
    since_s = min(sent, default=until_s) if since_s is None else since_s
    rows = [row for row in files.requests if since_s <= row["sent_s"] <= until_s and row.get("is_warm_up") is not True]
    requests = [_joined(row, files) for row in rows]
    seconds = _per_second(files, requests, since_s, until_s)
    return JoinedRun(files=files, since_s=since_s, until_s=until_s, requests=requests, seconds=seconds)


def _joined(row: Row, files: RunFiles) -> JoinedRequest:
    key = str(row.get("id"))
    engine = (files.engine or {}).get(key, {})
    own = (files.kvtier or {}).get(key, {})
    planner = as_row(own.get("planner"))
    queued_s, load_s = number(engine, "queued_s"), number(own, "load_s")
    prompt = count(row, "prompt_tokens")
    places = _places(prompt, engine, own, files)
    error = row.get("error")
    return JoinedRequest(
        id=key,
        user=count(row, "user"),
        turn=count(row, "turn"),
        sent_s=float(row["sent_s"]),
        first_s=number(row, "first_s"),
        ended_s=number(row, "ended_s"),
        error=None if error is None else str(error),
        prompt_tokens=prompt,
        output_tokens=count(row, "output_tokens"),
        queue_s=None if queued_s is None else max(0.0, queued_s - (load_s or 0.0)),
        prefill_s=number(engine, "prefill_s"),
        tokens_by_place=places,
        is_sum_wrong=places is not None and (sum(places.values()) != prompt or min(places.values()) < 0),
        offered_tokens=_offered(own),
        chosen_tokens=count(planner, "chosen_tokens"),
        expected_s=number(planner, "expected_s"),
        loaded_bytes=count(own, "loaded_bytes"),
        load_s=load_s,
    )


def _places(prompt: int | None, engine: Row, own: Row, files: RunFiles) -> dict[str, int] | None:
    """Return tokens by place. The client counts the prompt, the engine the computed and kvtier the loaded tokens."""
    of_engine, cached = count(engine, "prompt_tokens"), count(engine, "cached_tokens")
    if prompt is None or of_engine is None or cached is None:
        return None
    computed = {COMPUTED: of_engine - cached}
    if files.kvtier is None:
        return computed | {RESIDENT if files.arm == NO_CONNECTOR else CACHED: cached}
    resident, loaded = count(own, "resident_tokens"), counts(own.get("loaded_tokens"))
    if resident is None or loaded is None:
        return None
    # vLLM counts a load when it starts. Tokens that did not arrive were computed.
    computed[COMPUTED] += max(0, (count(own, "wanted_tokens") or 0) - sum(loaded.values()))
    return computed | {RESIDENT: resident} | loaded


def write_joined(directory: Path, run: JoinedRun) -> None:
    """Write `joined.jsonl`, with a line for each request, and `seconds.json` into the run's directory.

    Raises:
        ConfigError: the files cannot be written.
    """
    names = JoinedRequest.__slots__
    rows = (
        {name: getattr(it, name) for name in names} | {"ttft_s": it.ttft_s, "tpot_s": it.tpot_s} for it in run.requests
    )
    write_file("--dir", directory / "joined.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    write_file("--dir", directory / "seconds.json", json.dumps(run.seconds) + "\n")


_COUNTERS = {
    "read_gb_per_s": ("read_bytes", "device.read_bytes", 1e-9),
    "write_gb_per_s": ("written_bytes", "device.written_bytes", 1e-9),
    "queue_depth": ("device.weighted_s", "", 1.0),
    "cpu_cores": ("cpu_s", "", 1.0),
    "client_cpu_cores": ("client_cpu_s", "", 1.0),
    "package_watts": ("package_joules", "", 1.0),
}
"""For each column its counter, another to use if that is missing, and a factor. A drive counts all processes' I/O."""
_GAUGES = {
    "rss_bytes": "rss_bytes",
    "memory_bytes": "memory_bytes",
    "gpu_utilisation": "gpu.utilisation",
    "gpu_watts": "gpu.watts",
}


def _offered(own: Row) -> dict[str, int] | None:
    """Return the found tokens of each tier without those that are resident in the engine.

    Resident tokens are at the beginning of the prompt, so they are subtracted from the first tiers.
    """
    found, resident = counts(own.get("found_tokens")), count(own, "resident_tokens")
    if found is None or resident is None:
        return None
    offered: dict[str, int] = {}
    for name, tokens in found.items():
        offered[name] = max(0, tokens - resident)
        resident = max(0, resident - tokens)
    return {name: tokens for name, tokens in offered.items() if tokens}


def _per_second(
    files: RunFiles, requests: Sequence[JoinedRequest], since_s: float, until_s: float
) -> dict[str, list[float | None]]:
    """Return columns over the intervals between samples, or over seconds if there are fewer than two samples."""
    inside = [float(row["time_s"]) for row in files.samples if since_s <= row["time_s"] <= until_s]
    whole = np.arange(since_s, min(until_s, since_s + EDGES_MAX), 1.0).tolist() if until_s > since_s else []
    edges = np.unique(inside if len(inside) > 1 else whole)[:EDGES_MAX]
    if len(edges) < 2:
        return {}
    widths = np.diff(edges)
    columns: dict[str, Any] = {"at_s": edges[1:] - since_s}
    done = [it for it in requests if it.first_s is not None and it.ended_s is not None and it.error is None]
    ended = np.histogram([it.ended_s or 0.0 for it in done], edges)[0]
    columns["requests_per_s"] = ended / widths
    columns["output_tokens_per_s"] = _streamed(done, edges) / widths
    placed = [it for it in done if it.tokens_by_place]
    prompts = _summed(placed, edges, lambda places: sum(places.values()))
    for name in dict.fromkeys(name for it in placed for name in it.tokens_by_place or ()):
        tokens = _summed(placed, edges, lambda places, name=name: places.get(name, 0))
        columns[f"{name}_share"] = [part / all_ if all_ else None for part, all_ in zip(tokens, prompts, strict=True)]
    for column, (name, second, factor) in _COUNTERS.items():
        times, values = column_of(files.samples, name)
        if len(times) < 2 and second:
            times, values = column_of(files.samples, second)
        if len(times) > 1:
            known = np.interp(edges, times, values, left=np.nan, right=np.nan)
            rates = np.diff(known) / widths * factor
            columns[column] = [rate if rate >= 0 else None for rate in rates.tolist()]  # a new process restarts at 0
    for column, name in _GAUGES.items():
        times, values = column_of(files.samples, name)
        if times:
            known = np.interp(edges[1:], times, values, left=np.nan, right=np.nan)
            columns[column] = [None if np.isnan(value) else value for value in known.tolist()]
    return {name: [None if it is None else float(it) for it in column] for name, column in columns.items()}


def _streamed(requests: Iterable[JoinedRequest], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the output tokens in each interval. The first counts on arrival; the others spread evenly to the end."""
    at_edges = np.zeros(len(edges))
    for it in requests:
        first_s, ended_s, tokens = it.first_s or 0.0, it.ended_s or 0.0, it.output_tokens or 0
        share = np.clip((edges - first_s) / max(ended_s - first_s, 1e-9), 0, 1)
        at_edges += (edges >= first_s) * (min(tokens, 1) + share * max(tokens - 1, 0))
    return np.diff(at_edges)


def _summed(
    requests: Sequence[JoinedRequest], edges: npt.NDArray[np.float64], of: Callable[[dict[str, int]], int]
) -> list[float]:
    """Sum a figure of the places over requests, by the interval of a request's first token."""
    weights = [float(of(it.tokens_by_place or {})) for it in requests]
    return np.histogram([it.first_s or 0.0 for it in requests], edges, weights=weights)[0].tolist()
