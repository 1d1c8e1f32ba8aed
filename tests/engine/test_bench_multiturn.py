"""`bench/multiturn.py`: the same answers in every arm, and a wrong byte shows."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import multiturn as benchmark
from bench.multiturn import ARMS, MultiturnSettings
from bench.parts.server import GrowingKv, attending, step
from bench.parts.turns import ArmSummary, MultiturnResult
from bench.parts.workload import WorkloadSpec
from click.testing import CliRunner
from tiny_transformers import llama
from transformers import DynamicCache

from kvtier.connect.transformers.copier import CacheCopier

pytestmark = pytest.mark.engine

TOKEN_BYTES = 4 * 2 * 2 * 16 * 8
"""Of the tiny shape in float64: so exact that not even the last bit's order of additions decides about a token."""

SMALL = MultiturnSettings(
    shape="tiny", device="cpu", dtype="float64", users=(3,), chunk_tokens=16, threads=1,
    workload=WorkloadSpec(
        rounds=2, system_tokens=32, history_tokens=96, question_tokens=8, answer_tokens=4, rate_per_user=0.0,
        real_lengths=False,
    ),
    budget_bytes=260 * TOKEN_BYTES, host_bytes=1 << 20, disk_bytes=16 << 20,
)  # fmt: skip


FLAGS = (
    "--quick", "--shape", "tiny", "--dtype", "float64", "--rounds", "2", "--system", "32", "--history", "96",
    "--question", "8", "--answer", "4", "--rate", "0", "--kv-budget", str(SMALL.budget_bytes), "--host", "1MiB",
    "--disk", "16MiB", "--chunk-tokens", "16",
)  # fmt: skip
"""The same as options of the command."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_arm(result: MultiturnResult) -> dict[str, ArmSummary]:
    return {it.arm: it for it in result.summaries()}


def test_a_step_gives_each_row_the_token_that_it_would_have_alone() -> None:
    model = llama().double()
    prompts = [
        torch.randint(3, 200, (1, count), generator=torch.Generator().manual_seed(count)) for count in (5, 40, 17)
    ]
    alone = [
        model.generate(it, do_sample=False, max_new_tokens=6, min_new_tokens=6)[0, it.shape[1] :] for it in prompts
    ]
    rows = []
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=prompt[:, :-1], past_key_values=cache, use_cache=True)
        rows.append(GrowingKv(model.config, cache, 10))
    tokens = [int(prompt[0, -1]) for prompt in prompts]
    found: list[list[int]] = []
    with attending():
        for _ in range(6):
            tokens = step(model, rows, tokens)
            found.append(tokens)
    # No end token stops these.
    assert [list(column) for column in zip(*found, strict=True)] == [it.tolist() for it in alone]
    # What the rows hold now is the KV of the library.
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.cat([prompts[1], alone[1][None, :5]], 1), past_key_values=cache, use_cache=True)
    for layer, ours in zip(cache.layers, rows[1].view().layers, strict=True):
        torch.testing.assert_close(layer.keys, ours.keys)
        torch.testing.assert_close(layer.values, ours.values)


def test_the_command_measures_every_arm(tmp_path: Path) -> None:
    record, picture = tmp_path / "turns.json", tmp_path / "turns.svg"
    has_plots = importlib.util.find_spec("matplotlib") is not None
    drawn = ("--picture", str(picture)) if has_plots else ()
    done = CliRunner().invoke(
        benchmark.multiturn,
        [*FLAGS, "--users", "1,3", "--dir", str(tmp_path), "--record", str(record), *drawn],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    told = json.loads(record.read_text())
    points = {(it["users"], it["arm"]): it for it in told["results"]["points"]}
    assert set(points) == {(users, arm) for users in (1, 3) for arm in ARMS}
    assert told["results"]["same_tokens"] is True
    assert told["results"]["skipped"] == []
    for it in points.values():
        assert it["turns"] == 2 * it["users"]
        assert (
            it["prompt_tokens"] == it["resident_tokens"] + sum(it["restored_tokens"].values()) + it["computed_tokens"]
        )
        assert (it["watts"], it["joules_per_output_token"]) == (None, None), "nothing is invented"
        assert min(it["ttft_ms"]["p50"], it["output_tokens_per_s"]) > 0
    assert points[3, "recompute"]["evictions"] > 0
    # Both arms compute less than the one without kvtier: by what they restored.
    for arm in ("host", "host+disk"):
        assert points[3, arm]["computed_tokens"] < points[3, "recompute"]["computed_tokens"]
        assert points[3, arm]["equal_tokens"][0] == points[3, arm]["equal_tokens"][1] > 0
    assert told["settings"]["users"] == {"value": [1, 3], "origin": "flag"}
    origins = {name: it["origin"] for name, it in told["settings"].items()}
    assert (origins["host_bytes"], origins["repeats"], origins["threads"]) == ("flag", "default", "default")
    assert told["settings"]["rate_per_user"] == {"value": 0.0, "origin": "flag"}
    assert list(tmp_path.glob("kvtier-turns-*")) == []
    assert "host+disk" in done.output
    if has_plots:
        assert picture.stat().st_size > 1000


def test_a_budget_that_fits_everything_shows_no_reloads(tmp_path: Path) -> None:
    roomy = replace(SMALL, budget_bytes=1 << 30, host_bytes=16 << 20, directory=tmp_path)
    for name, it in by_arm(benchmark.run(roomy)).items():
        assert it.evictions == 0
        # The system prompt is all that a first turn may restore; later turns have everything.
        assert sum(it.restored_tokens.values()) == (0 if name == "recompute" else 3 * 32)
        assert it.is_same


def test_a_wrong_byte_behind_the_checks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of `equal`: damage where nothing could notice it does show."""
    scatter = CacheCopier.scatter

    def wrong(self: CacheCopier, request: Any, group: int, blocks: tuple[int, ...], payload: memoryview) -> Any:
        spoilt = bytearray(payload)
        for at in range(7, len(spoilt), 8):
            spoilt[at] ^= 0x80  # the sign of every number
        return scatter(self, request, group, blocks, memoryview(spoilt))

    monkeypatch.setattr(CacheCopier, "scatter", wrong)
    result = benchmark.run(replace(SMALL, disk_bytes=0, directory=tmp_path))
    assert set(by_arm(result)) == {"recompute", "host"}
    told = by_arm(result)["host"]
    assert not told.is_same
    assert told.equal_tokens is not None
    assert told.equal_tokens[0] < told.equal_tokens[1]
    # It has been asked the same all the same: the conversation went on with the right answers.
    assert told.prompt_tokens == by_arm(result)["recompute"].prompt_tokens


def test_an_interrupted_run_goes_on_with_the_workload_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "turns.json"
    flags = [*FLAGS, "--users", "1,2", "--dir", str(tmp_path), "--record", str(record)]
    run, most = benchmark.MultiturnBenchmark._run, [4]

    def and_stop(self: Any, *arguments: Any) -> Any:
        most[0] -= 1
        if most[0] < 0:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(benchmark.MultiturnBenchmark, "_run", and_stop)
    assert CliRunner().invoke(benchmark.multiturn, flags).exit_code != 0
    cut = json.loads(record.read_text())
    assert (cut["results"]["measured"], cut["results"]["is_complete"]) == ([[1, 0]], False)
    assert len(cut["samples"]) == 4
    most[0] = 3  # the second workload begins anew, because its arms are compared with each other
    done = CliRunner().invoke(benchmark.multiturn, [*flags, "--resume"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    whole = json.loads(record.read_text())
    assert (whole["results"]["measured"], whole["results"]["is_complete"]) == ([[1, 0], [2, 0]], True)
    assert whole["samples"][:3] == cut["samples"][:3]
    assert [(it["users"], it["arm"]) for it in whole["samples"]] == [(users, arm) for users in (1, 2) for arm in ARMS]
    assert whole["results"]["same_tokens"] is True
    again = CliRunner().invoke(benchmark.multiturn, [*flags, "--resume"], catch_exceptions=False)
    assert "complete, nothing is left to measure" in again.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--shape", "llama-9"), "unknown; allowed: tiny"),
        (("--users", "2,x"), "2,x: not a list of numbers"),
        (("--users", "0"), "allowed: one user or more"),
        (("--kv-budget", "much"), "much: not a size"),
        (("--shape", "tiny", "--kv-budget", "4KiB"), "allowed: a larger --kv-budget"),
    ],
)
def test_impossible_settings_are_named(flags: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(benchmark.multiturn, ["--quick", *flags])
    assert done.exit_code != 0
    assert told in f"{done.exception} {done.output}"
