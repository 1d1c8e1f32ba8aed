"""Measures vLLM without a connector, with its native tiering and with kvtier, in one run.

    .venv-vllm/bin/python bench/vllm.py --record bench/records/vllm.json     (--quick: a smoke test of a minute)

Parts: time to first token of a long prompt as a miss, from host memory, and from disk in a new process; the cost of a
miss; a prompt larger than host memory; a prompt whose stored files are damaged; growing conversations under memory
pressure; conversations with pauses that fit host memory; and a slowed-down directory, where loading must never take
longer than computing. On a CPU vLLM computes on one core, its default on a small machine. `--device cuda` takes the
layers of an 8B model and vLLM's default engine. LMCache is another arm if it is installed. The record is written after
each arm, and --resume continues it. `python bench/tables.py` makes tables of docs/benchmarks.md and
docs/internals/measurements.md from it.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
# Engine processes inherit this path, so it must not have the folder of this file, which would hide vLLM.
sys.path[:1] = [str(TOP / "tests" / "vllm")]
sys.path += [str(TOP / "bench" / "vllm_arms"), str(TOP)]

from arms import (  # noqa: E402
    ARMS,
    MEANS,
    PROTECTED,
    Bench,
    ask,
    dtype_of,
    forget_pages,
    invert,
    settle,
    stored_bytes,
    summary,
)
from bench.parts.command import continued, earlier_record  # noqa: E402
from harness import Ask, Engine, in_process, use_gpu  # noqa: E402
from judge import prompt  # noqa: E402
from models import make_checkpoint  # noqa: E402
from sizes import FULL, GPU, QUICK, Sizes  # noqa: E402

from kvtier.errors import KvError  # noqa: E402
from kvtier.report.output import write_json  # noqa: E402
from kvtier.tools.run_record import RecordedSetting, commit, gpus, make_record, processor  # noqa: E402

FACTORS = (0.1, 0.8, 1.25, 2.0, 10.0)
"""Load times of a prompt from the slowed directory, divided by its compute time."""

RESAMPLES = 10_000

Samples = list[dict[str, Any]]


def first_tokens(bench: Bench, seed: int) -> tuple[dict[str, Any], Samples]:
    """Measure TTFT of a miss, then from host memory, then from disk in a new process."""
    prompts = [prompt(bench.sizes.prompt_tokens, seed + number) for number in range(bench.sizes.prompts)]
    samples = bench.rows
    for arm in bench.left(ARMS):
        directory, found = bench.store(arm, "ttft"), list[dict[str, Any]]()
        with bench.engine(arm, directory) as engine:
            for tokens in prompts:
                for kind in ("miss",) if arm == "none" else ("miss", "host"):
                    found.append(_timed(engine, tokens, arm, kind))
                    settle(engine, directory)
                    engine.forget()
        if arm != "none":
            forget_pages(directory)
            with bench.engine(arm, directory) as engine:
                for tokens in prompts:
                    found.append(_timed(engine, tokens, arm, "disk"))
                    engine.drain()
                    engine.forget()
        bench.keep(found)
    results: dict[str, Any] = {}
    for arm in ARMS:
        results[arm] = {}
        for kind in ("miss", "host", "disk"):
            rows = [it for it in samples if (it["arm"], it["kind"]) == (arm, kind)]
            if rows:
                results[arm][kind] = summary([it["s"] for it in rows]) | {"restored": rows[-1]["restored"]}
    firsts = {arm: [it["token"] for it in samples if (it["arm"], it["kind"]) == (arm, "miss")] for arm in ARMS}
    results["same_tokens"] = (
        all(it["token"] in firsts["none"] for it in samples) and len(set(map(str, firsts.values()))) == 1
    )
    return results, samples


def _timed(engine: Engine, tokens: list[int], arm: str, kind: str) -> dict[str, Any]:
    answer = ask(engine, tokens)
    return {
        "part": "ttft",
        "arm": arm,
        "kind": kind,
        "s": answer.ttft_s,
        "restored": answer.cached,
        "token": answer.tokens[0],
    }


def misses(bench: Bench, seed: int) -> tuple[dict[str, Any], Samples]:
    """Measure the extra cost of a miss. Every prompt goes to every arm, in random order.

    The cost is measured as elapsed time, and more exactly as CPU time of the process and of the connector's own code.
    """
    sizes, samples = bench.sizes, []
    draw = random.Random(seed)  # noqa: S311 - seeded on purpose
    stores = {arm: bench.store(arm, "misses") for arm in ARMS}
    counted = {arm: f"own_cost:count_{arm}" for arm in ("native", "kvtier")}
    engines = {arm: bench.engine(arm, stores[arm], sabotage=counted.get(arm, "")) for arm in ARMS}
    rows: list[dict[str, dict[str, float]]] = []
    for number in range(sizes.pairs):
        tokens = prompt(sizes.pair_tokens, seed + 1000 + number)
        row: dict[str, dict[str, float]] = {}
        for arm in draw.sample(ARMS, len(ARMS)):
            engine = engines[arm]
            before_s, before = engine.cpu_s(), engine.told_by("own_cost:own_cpu_s")
            answer = ask(engine, tokens)
            settle(engine, stores[arm])
            row[arm] = {"s": answer.ttft_s or math.nan, "cpu_s": engine.cpu_s() - before_s}
            after = engine.told_by("own_cost:own_cpu_s")
            own = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
            row[arm] |= {**own, "own_cpu_s": sum(own.values())}
            engine.forget()
        rows.append(row)
        samples.append({"part": "misses", **row})
    for engine in engines.values():
        engine.close()
    results: dict[str, Any] = {"tokens": sizes.pair_tokens, "pairs": sizes.pairs}
    for arm in ARMS:
        names = dict.fromkeys(name for row in rows for name in row[arm])
        results[arm] = {"seconds": {name: interval([row[arm].get(name, 0.0) for row in rows], draw) for name in names}}
        if arm != "none":
            ratios = [row[arm]["s"] / row["none"]["s"] for row in rows]
            cpu = [row[arm]["cpu_s"] / row["none"]["cpu_s"] for row in rows]
            results[arm] |= {"ttft": interval(ratios, draw), "cpu": interval(cpu, draw)}
        if arm in counted:
            own = [row[arm]["own_cpu_s"] / row["none"]["cpu_s"] for row in rows]
            results[arm]["own_cpu"] = interval(own, draw)
    against = [row["kvtier"]["cpu_s"] / row["native"]["cpu_s"] for row in rows]
    more = [(row["kvtier"]["own_cpu_s"] - row["native"]["own_cpu_s"]) / row["native"]["cpu_s"] for row in rows]
    results["kvtier"] |= {"cpu_of_native": interval(against, draw), "own_above_native": interval(more, draw)}
    return results, samples


def interval(ratios: list[float], draw: random.Random) -> dict[str, float]:
    """Return the median of ratios with a 95 % bootstrap interval."""
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return {
        "ratio": statistics.median(ratios),
        "low": medians[int(0.025 * RESAMPLES)],
        "high": medians[int(0.975 * RESAMPLES)],
    }


def larger_than_host(bench: Bench, seed: int) -> tuple[dict[str, Any], Samples]:
    """Repeat a prompt whose KV exceeds host memory in a new process."""
    sizes, samples = bench.sizes, []
    tokens = prompt(sizes.prompt_tokens, seed)
    results: dict[str, Any] = {"host_bytes": sizes.small_host_bytes}
    for arm in ARMS[1:]:
        directory = bench.store(arm, "ttft")
        if not stored_bytes(directory):
            # Store it with enough host memory, which `first_tokens` may already have done.
            with bench.engine(arm, directory) as engine:
                ask(engine, tokens)
                settle(engine, directory)
        forget_pages(directory)
        with bench.engine(arm, directory, host_bytes=sizes.small_host_bytes) as engine:
            answer = ask(engine, tokens)
        results[arm] = {"ttft_s": answer.ttft_s, "restored": answer.cached, "of": len(tokens)}
        samples.append({"part": "large", "arm": arm, **results[arm]})
    return results, samples


def damaged(bench: Bench, seed: int) -> tuple[dict[str, Any], Samples]:
    """Repeat a prompt in a new process, after 4 KiB of each of its stored files were inverted."""
    tokens = prompt(bench.sizes.prompt_tokens, seed + 6000)
    for arm in bench.left(ARMS[1:]):
        directory = bench.store(arm, "damaged")
        with bench.engine(arm, directory) as engine:
            computed = engine.ask(Ask(tokens, logprobs=None), limit_s=600.0)[0]
            settle(engine, directory)
        files = invert(directory)
        forget_pages(directory)
        with bench.engine(arm, directory) as engine:
            answer = engine.ask(Ask(tokens, logprobs=None), limit_s=600.0)[0]
        found = {
            "files": files,
            "restored": answer.cached,
            "of": len(tokens),
            "same_tokens": answer.tokens == computed.tokens,
        }
        bench.keep([{"part": "damaged", "arm": arm, **found}])
    return _by_arm(bench.rows), bench.rows


def _by_arm(rows: Samples) -> dict[str, Any]:
    return {row["arm"]: {name: value for name, value in row.items() if name not in {"part", "arm"}} for row in rows}


def salted(bench: Bench, seed: int) -> tuple[dict[str, Any], Samples]:
    """Repeat a stored prompt under its own salt, another one and none. Only the first may be restored."""
    tokens = prompt(bench.sizes.prompt_tokens, seed + 7000)
    for arm in bench.left(ARMS[1:]):
        directory = bench.store(arm, "salted")
        with bench.engine(arm, directory) as engine:
            restored: dict[str, int] = {}
            answers: set[tuple[int, ...]] = set()
            for name, salt in (("stored", "one"), ("own", "one"), ("other", "two"), ("none", "")):
                answer = engine.ask(Ask(tokens, salt=salt, count=8, logprobs=None), limit_s=600.0)[0]
                restored[name] = answer.cached
                answers.add(tuple(answer.tokens))
                settle(engine, directory)
                engine.forget()
        bench.keep(
            [{"part": "salt", "arm": arm, "of": len(tokens), "restored": restored, "same_tokens": len(answers) == 1}]
        )
    return _by_arm(bench.rows), bench.rows


def conversations(bench: Bench, seed: int) -> tuple[dict[str, Any], Samples]:
    """Run growing conversations all at once, in an engine that has no room for all."""
    sizes = bench.sizes
    arms = (*ARMS, PROTECTED)
    for repeat in range(sizes.talks):
        first = repeat % len(arms)
        for arm in bench.left((*arms[first:], *arms[:first]), repeat=repeat):
            run = _talk(bench, arm, bench.store(arm, f"talk{repeat}"), seed)
            bench.keep([{"part": "talk", "arm": arm, "repeat": repeat, **run}])
            print(f"talk {repeat}, {arm}: {run['s']:.1f} s", file=sys.stderr, flush=True)
    results: dict[str, Any] = {}
    for arm in arms:
        done = [row for row in bench.rows if row["arm"] == arm]
        rates = [sizes.conversations * sizes.turns / run["s"] for run in done]
        results[arm] = {
            "requests_per_s": statistics.median(rates),
            "requests_per_s_min": min(rates),
            "requests_per_s_max": max(rates),
            "prompt_tokens": done[0]["prompt_tokens"],
            "cached_tokens": round(statistics.median([run["cached_tokens"] for run in done])),
            "preemptions": max(run["preemptions"] for run in done),
            "ttft": summary([wait for run in done for turn in run["ttft_s"] for wait in turn if wait is not None]),
        }
    return results, bench.rows


def _talk(bench: Bench, arm: str, directory: Path, seed: int) -> dict[str, Any]:
    sizes = bench.sizes
    texts = [prompt(sizes.first_tokens, seed + 2000 + number) for number in range(sizes.conversations)]
    run: dict[str, Any] = {"s": 0.0, "prompt_tokens": 0, "cached_tokens": 0, "ttft_s": []}
    with bench.engine(arm, directory, engine_bytes=sizes.engine_bytes) as engine:
        for turn in range(sizes.turns):
            began = time.perf_counter()
            answers = engine.ask(
                *(Ask(text, count=sizes.answer_tokens, logprobs=None) for text in texts), limit_s=1800.0
            )
            run["s"] += time.perf_counter() - began
            run["prompt_tokens"] += sum(map(len, texts))
            run["cached_tokens"] += sum(it.cached for it in answers)
            run["ttft_s"].append([it.ttft_s for it in answers])
            for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
                text += [*answer.tokens, *prompt(sizes.turn_tokens, seed + 100 * turn + number)]
        run["preemptions"] = engine.metrics().get("vllm:num_preemptions", 0)
    return run


def thinking(bench: Bench, seed: int) -> tuple[list[dict[str, Any]], Samples]:
    """Run conversations with pauses whose KV fits in host memory. kvtier and native alternate, with new stores."""
    sizes, samples, pairs = bench.sizes, [], []
    texts = [
        [
            prompt(sizes.think_first_tokens if not turn else sizes.think_turn_tokens, seed + 5000 + 100 * number + turn)
            for turn in range(sizes.think_turns)
        ]
        for number in range(sizes.think_conversations)
    ]
    for pair in range(sizes.think_pairs):
        results = {}
        for arm in ("kvtier", "native") if pair % 2 else ("native", "kvtier"):
            with bench.engine(arm, bench.store(arm, f"think{pair}"), engine_bytes=sizes.engine_bytes) as engine:
                cpu_s, began = engine.cpu_s(), time.perf_counter()
                turns = engine.converse(texts, count=sizes.answer_tokens, think_s=1.0, limit_s=1800.0)
                results[arm] = {
                    "s": time.perf_counter() - began,
                    "cpu_s": engine.cpu_s() - cpu_s,
                    "cached_tokens": sum(it["cached"] for it in turns),
                    "ttft": summary([it["ttft_s"] for it in turns]),
                }
                samples.append({"part": "think", "arm": arm, "pair": pair, "turns": turns})
        pairs.append(results | {"ratio": results["kvtier"]["s"] / results["native"]["s"]})
        print(f"think {pair}: {pairs[-1]}", file=sys.stderr, flush=True)
    return pairs, samples


def throttled(bench: Bench, seed: int) -> tuple[list[dict[str, Any]], Samples]:
    """Load prompts from a directory slowed to several rates, and compute them, in alternating order."""
    from throttle import RATE  # noqa: PLC0415

    sizes, samples = bench.sizes, []
    prompts = [prompt(sizes.throttled_tokens, seed + 3000 + number) for number in range(sizes.throttled_prompts)]
    directory = bench.store("kvtier", "slow")
    with bench.engine("none", directory) as plain:
        computed = [ask(plain, tokens).ttft_s or math.nan for tokens in prompts]
        plain.forget()
        with bench.engine("kvtier", directory) as engine:
            for tokens in prompts:
                ask(engine, tokens)
                settle(engine, directory)
        stored = stored_bytes(directory / "objects")
        results = []
        for factor in FACTORS:
            rate = stored / len(prompts) / (factor * statistics.median(computed))
            environment = {RATE: str(rate)}
            pairs: list[tuple[float, float]] = []
            with bench.engine(
                "kvtier", directory, environment=environment, sabotage="throttle:throttle_reads"
            ) as engine:
                ask(engine, prompt(sizes.throttled_tokens, seed + 4000))  # measures the prefill rate
                for number, tokens in enumerate(prompts):
                    order = (engine, plain) if number % 2 else (plain, engine)
                    times = {id(it): ask(it, tokens).ttft_s or math.nan for it in order}
                    pairs.append((times[id(engine)], times[id(plain)]))
                    for it in order:
                        it.drain()
                        it.forget()
                    samples.append({"part": "slow", "factor": factor, "s": pairs[-1][0], "computed_s": pairs[-1][1]})
            ours_s, computed_s = map(sum, zip(*pairs, strict=True))
            ratios = [one / other for one, other in pairs]
            results.append(
                {
                    "load_over_compute": factor,
                    "bytes_per_s": rate,
                    "first": ratios[0],
                    "median": statistics.median(ratios),
                    "worst": max(ratios),
                    "all": ours_s / computed_s,
                }
            )
    return results, samples


PARTS: dict[str, Callable[[Bench, int], tuple[Any, Samples]]] = {
    "ttft": first_tokens,
    "misses": misses,
    "large": larger_than_host,
    "damaged": damaged,
    "salt": salted,
    "talk": conversations,
    "think": thinking,
    "slow": throttled,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few samples: a smoke test")
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; the record keeps the others; repeatable"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where vLLM computes")
    parser.add_argument("--pair-tokens", type=int, help="length of the prompts that measure the cost of a miss")
    parser.add_argument("--pairs", type=int, help="number of these prompts")
    parser.add_argument("--resume", action="store_true", help="without the parts that the record has")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the drive in question")
    parser.add_argument("--record", type=Path, help="write the JSON record to this file, after each part")
    parser.add_argument("--seed", type=int, default=1, help="draws the prompts")
    return parser


def main() -> None:
    """Run the parts, print a summary, write the record."""
    given = _parser().parse_args()
    if given.device == "cuda":
        use_gpu()
    sizes = _sizes(given)
    settings = _settings(sizes, given.device, "flag" if given.quick else "default")
    device = processor() if given.device == "cpu" else ", ".join(gpus())
    earlier = None
    if given.resume:
        earlier = earlier_record(given.record, "vllm", settings=settings, seed=given.seed, device=device)
    results, samples = _kept(given.record) if given.part or earlier else ({}, [])
    results |= {"arms": {arm: MEANS[arm] for arm in (*ARMS, PROTECTED)}, "device": device}
    made = results.setdefault("made", {})
    asked = given.part or list(PARTS)
    parts = [part for part in asked if earlier is None or part not in made]

    def keep() -> None:
        """Write the record: all parts so far, and the rows of the current part."""
        if given.record is not None:
            results["measured"] = list(made)
            results["is_complete"], results["continues"] = set(asked) <= made.keys(), continued(earlier)
            record = make_record(
                "vllm", settings=settings, seed=given.seed, results=results, samples=samples, directory=given.dir
            )
            write_json("--record", given.record, record)

    with tempfile.TemporaryDirectory(prefix=".bench-vllm-", dir=given.dir) as folder:
        work = Path(folder).resolve()
        if parts:
            in_process(make_checkpoint, sizes.model, work / "models" / sizes.model, 7, given.device)
        bench = Bench(sizes, work / "models", work, given.device)
        for part in parts:
            began = time.perf_counter()
            results.pop(part, None)
            made.pop(part, None)
            others = [it for it in samples if it["part"] != part]
            bench.rows = [it for it in samples if it["part"] == part and earlier is not None]

            def keep_rows(others: Samples = others) -> None:
                samples[:] = others + bench.rows
                keep()

            bench.on_rows = keep_rows
            results[part], taken = PARTS[part](bench, given.seed)
            samples[:] = others + taken
            print(f"{part}: {time.perf_counter() - began:.0f} s: {results[part]}", file=sys.stderr, flush=True)
            time_now = datetime.now(UTC).isoformat(timespec="seconds")
            made[part] = {"time": time_now, "commit": commit(), "sizes": asdict(sizes)}
            keep()


def _sizes(given: argparse.Namespace) -> Sizes:
    sizes = QUICK if given.quick else FULL if given.device == "cpu" else GPU
    return replace(sizes, pair_tokens=given.pair_tokens or sizes.pair_tokens, pairs=given.pairs or sizes.pairs)


def _settings(sizes: Sizes, device: str, source: str) -> dict[str, RecordedSetting]:
    found = {name: RecordedSetting(value, source) for name, value in asdict(sizes).items()}
    found["dtype"] = RecordedSetting(dtype_of(device), "default")
    return found | ({"threads": RecordedSetting(1, "default")} if device == "cpu" else {})


def _kept(path: Path | None) -> tuple[dict[str, Any], Samples]:
    """Return an earlier record's parts that this run leaves out. Each has its own time, commit and sizes."""
    if path is None or not path.exists():
        return {}, []
    known = json.loads(path.read_text(encoding="utf-8"))
    return known["results"], known["samples"]


if __name__ == "__main__":
    try:
        main()
    except KvError as error:
        sys.exit(f"vllm: {error}")
