"""Measures what hints of requests are worth on vLLM: a tool call, a shared document, a sub-agent that ends.

    .venv-vllm/bin/python bench/hints.py --record bench/records/hints.json     (--quick: a smoke test)

    tool       two conversations wait for a tool of 20 s while others need the room; one has `prefetch_in_s`. Measured:
               time to the first token of the next turn, whose KV a throttled directory has
    document   two documents, one with `retain_s`, then a scan of other prompts, then a question about each. Host memory
               only, so that what has left it is computed
    subagent   conversations wait while a sub-agent works and ends: without a hint, with `next_turn` nobody, and with
               `priority` low. Then other work comes. Measured: tokens of the conversations that are still there

All arms of a case share one engine and host memory, and have prompts of their own. The order of the arms changes with
each round. The engine's own cache is emptied before each measurement. The planner is off, so everything that is stored
is loaded.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
# Engine processes inherit this path, so it must not have the folder of this file, which would hide vLLM.
sys.path[:1] = [str(TOP / "tests" / "vllm"), str(TOP)]
sys.path.append(str(TOP / "bench" / "vllm_arms"))

from arms import dtype_of  # noqa: E402
from harness import Answer, Ask, Engine, in_process  # noqa: E402
from judge import prompt  # noqa: E402
from models import CONFIGS, make_checkpoint  # noqa: E402
from settings import CHUNK, connector, whole  # noqa: E402
from throttle import RATE  # noqa: E402

from kvtier.report.output import write_json  # noqa: E402
from kvtier.tools.run_record import RecordedSetting, make_record  # noqa: E402

DTYPE = dtype_of("cpu")
VALUE_BYTES = 2 if DTYPE == "bfloat16" else 4
TURN_TOKENS = 40
"""Tokens that a question or a further turn adds."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    model: str
    prompt_tokens: int
    host_chunks: int
    """Approximate number of slots in host memory."""
    others: int
    """Number of other prompts that need the room."""
    tool_s: float
    rounds: int
    read_bytes_per_s: int

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        fields = CONFIGS[self.model]
        per_token = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * fields["head_dim"] * VALUE_BYTES
        return self.host_chunks * CHUNK * per_token + (1 << 20)


FULL = Sizes("llama-137m", 1800, host_chunks=32, others=4, tool_s=20.0, rounds=3, read_bytes_per_s=100 << 20)
QUICK = Sizes("llama", 1800, host_chunks=32, others=4, tool_s=5.0, rounds=1, read_bytes_per_s=10 << 20)

Row = dict[str, Any]


class Prompts:
    """Prompts that are new each time."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self._tokens, self._next = sizes.prompt_tokens, seed * 100_000

    def new(self, tokens: int = 0) -> list[int]:
        """Return a new prompt."""
        self._next += 1
        return prompt(tokens or self._tokens, self._next)


def tool(engine: Engine, sizes: Sizes, prompts: Prompts, arms: Sequence[str]) -> list[Row]:
    """Run one round: a conversation of each arm calls a tool, others come, and both continue."""
    hints = {"none": {}, "prefetch": {"prefetch_in_s": sizes.tool_s}}
    waiting = {arm: prompts.new() for arm in arms}
    ended_s: dict[str, float] = {}
    for arm, tokens in waiting.items():
        _ask(engine, tokens, session=arm + str(tokens[:4]), **hints[arm])
        ended_s[arm] = time.monotonic()
    for _ in range(sizes.others):
        _ask(engine, prompts.new())
    busy_s = time.monotonic() - min(ended_s.values())
    engine.forget()
    rows: list[Row] = []
    for arm in sorted(arms, key=ended_s.__getitem__):
        time.sleep(max(0.0, ended_s[arm] + sizes.tool_s - time.monotonic()))
        rows.append(_row(arm, _ask(engine, waiting[arm] + prompts.new(TURN_TOKENS))) | {"busy_s": busy_s})
    computed = _ask(engine, prompts.new(sizes.prompt_tokens + TURN_TOKENS))
    return [*rows, _row("computed", computed)]


def document(engine: Engine, sizes: Sizes, prompts: Prompts, arms: Sequence[str]) -> list[Row]:
    """Run one round: a document of each arm, other prompts, and a question about each document."""
    hints = {"none": {}, "retain": {"retain_s": 600}}
    documents = {arm: prompts.new() for arm in arms}
    for arm, tokens in documents.items():
        _ask(engine, tokens, **hints[arm])
    for _ in range(2 * sizes.others):
        _ask(engine, prompts.new())
    rows: list[Row] = []
    for arm, tokens in documents.items():
        engine.forget()
        answer = _ask(engine, tokens + prompts.new(TURN_TOKENS), store=False)  # else the next question would find it
        rows.append(_row(arm, answer))
    return rows


def subagent(engine: Engine, sizes: Sizes, prompts: Prompts, arms: Sequence[str]) -> list[Row]:
    """For each arm, run two conversations, a sub-agent of two prompts that ends, other work, and the next turns."""
    hints = {"none": {}, "nobody": {"next_turn": "nobody"}, "low": {"priority": "low"}}
    rows: list[Row] = []
    for arm in arms:
        waiting = [prompts.new() for _ in range(sizes.others // 2)]
        for number, tokens in enumerate(waiting):
            _ask(engine, tokens, session=f"{arm} {number} {tokens[:4]}")
        for tokens in [prompts.new() for _ in range(sizes.others // 2)]:
            _ask(engine, tokens, session=f"{arm} sub {tokens[:4]}", **hints[arm])
        for _ in range(sizes.others // 2):
            _ask(engine, prompts.new())
        for tokens in waiting:
            engine.forget()
            rows.append(_row(arm, _ask(engine, tokens + prompts.new(TURN_TOKENS), store=False)))
    return rows


@dataclass(frozen=True)
class Case:
    """One case."""

    round: Callable[[Engine, Sizes, Prompts, Sequence[str]], list[Row]]
    arms: tuple[str, ...]
    has_directory: bool = False


CASES = {
    "tool": Case(tool, ("none", "prefetch"), has_directory=True),
    "document": Case(document, ("none", "retain")),
    "subagent": Case(subagent, ("none", "nobody", "low")),
}


def _ask(engine: Engine, tokens: list[int], **hints: object) -> Answer:
    """Ask for the first token."""
    answer = engine.ask(Ask(tokens, count=1, logprobs=None, transfer=hints or None))[0]
    engine.drain()
    return answer


def _row(arm: str, answer: Answer) -> Row:
    return {"arm": arm, "ttft_s": answer.ttft_s, "cached_tokens": answer.cached}


@contextmanager
def _engine(case: Case, sizes: Sizes, checkpoint: Path, root: Path) -> Iterator[Engine]:
    given = connector(root / "kv" if case.has_directory else None, host__capacity_bytes=sizes.host_bytes)
    arguments: dict[str, Any] = {"dtype": DTYPE, "max_model_len": 4096, "kv_cache_memory_bytes": 512 << 20}
    throttled = {"sabotage": "throttle:throttle_reads", "environment": {RATE: str(sizes.read_bytes_per_s)}}
    with Engine(checkpoint, root / "log", given, **arguments, **throttled) as engine:
        yield engine


def measure(name: str, sizes: Sizes, checkpoint: Path, root: Path, seed: int) -> tuple[dict[str, Any], list[Row]]:
    """Run all rounds of one case."""
    case, prompts, rows = CASES[name], Prompts(sizes, seed), list[Row]()
    with _engine(case, sizes, checkpoint, root) as engine:
        for _ in range(1 + sizes.host_chunks * CHUNK // sizes.prompt_tokens):  # fill host memory
            _ask(engine, prompts.new())
        engine.forget()
        for number in range(sizes.rounds):
            turn = number % len(case.arms)
            found = case.round(engine, sizes, prompts, [*case.arms[turn:], *case.arms[:turn]])
            rows += [{"case": name, "round": number} | row for row in found]
            engine.forget()
    results: dict[str, Any] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        results[arm] = {
            "ttft_s": statistics.median(row["ttft_s"] for row in of_arm),
            "hit_rate": sum(row["cached_tokens"] for row in of_arm) / (len(of_arm) * whole(sizes.prompt_tokens)),
            "n": len(of_arm),
        }
    for arm in case.arms[1:]:
        results[arm]["ttft_of_none"] = results[arm]["ttft_s"] / results["none"]["ttft_s"]
    return results, rows


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, short pauses and one round")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    sizes = QUICK if given.quick else FULL
    results: dict[str, Any] = {}
    samples: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        in_process(make_checkpoint, sizes.model, Path(folder, "checkpoint"))
        for name in given.case or CASES:
            root = Path(folder, name)
            root.mkdir()
            began_s = time.monotonic()
            results[name], rows = measure(name, sizes, Path(folder, "checkpoint"), root, given.seed)
            samples += rows
            print(f"{name} ({time.monotonic() - began_s:.0f} s)", json.dumps(results[name], indent=1), flush=True)
        if given.record is not None:
            settings = {name: RecordedSetting(value, "default") for name, value in vars(sizes).items()}
            settings["dtype"] = RecordedSetting(DTYPE, "measured")
            record = make_record(
                "hints",
                settings=settings,
                seed=given.seed,
                results=results,
                samples=samples,
                directory=Path(folder),
            )
            write_json("--record", given.record, record)


if __name__ == "__main__":
    main()
