"""`bench/ttft.py` on a tiny model; the planner's regret."""

import importlib.util
import json
from pathlib import Path

import pytest
from bench.parts import planner
from bench.parts.planner import between, choices, every_split
from click.testing import CliRunner

ENGINE = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
needs_engine = pytest.mark.skipif(not ENGINE, reason="torch and Transformers are not installed")

TINY = ("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--chunk-tokens", "16", "--repeats", "2")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """More of them wait for each other on a machine that has other things to do."""
    if ENGINE:
        import torch

        torch.set_num_threads(1)


@needs_engine
@pytest.mark.engine
def test_every_arm_is_measured_and_recorded(tmp_path: Path) -> None:
    from bench import ttft

    record, picture = tmp_path / "ttft.json", tmp_path / "ttft.svg"
    sizes = ("--contexts", "64", "--host", "16MiB", "--disk", "64MiB", "--dir", str(tmp_path))
    has_plots = importlib.util.find_spec("matplotlib") is not None
    drawn = ("--picture", str(picture)) if has_plots else ()
    done = CliRunner().invoke(ttft.ttft, [*TINY, *sizes, "--record", str(record), *drawn], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(record.read_text())
    arms = {arm["name"]: arm for arm in told["samples"]}
    assert {"recompute", "store", "host", "disk", "split 0.5"} <= set(arms)
    assert {name: arm["restored_tokens"] for name, arm in arms.items()} == {
        "recompute": 0,
        "store": 0,
        "host": 64,
        "disk": 64,
        "split 0.25": 16,
        "split 0.5": 32,
        "split 0.75": 48,
    }
    assert told["results"]["same_tokens"] is True
    assert told["results"]["skipped"] == []
    assert all(arm["ttft_s"] and min(arm["ttft_s"]) > 0 for arm in arms.values())
    splits = {(it["place"], it["is_tried"]): it for it in told["results"]["splits"]}
    assert set(splits) == {("host", True), ("host", False), ("disk", False)}
    assert min(it["regret"] for it in splits.values()) >= 0
    assert told["results"]["planner_regret"]["disk, every split"] == {"64": splits["disk", False]["regret"]}
    assert "the best interpolated split is" in done.output
    assert told["results"]["decoding"][0]["context"] == 64
    assert told["settings"]["shape"] == {"value": "tiny", "origin": "flag"}
    assert list(tmp_path.glob("kvtier-ttft-*")) == []
    assert picture.exists() is has_plots


@needs_engine
@pytest.mark.engine
def test_a_wrong_token_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The negative control of `same tokens`."""
    from bench import ttft

    monkeypatch.setattr(ttft.TtftBenchmark, "_first", lambda self, prompt: prompt[:, : ttft.FIRST_TOKENS])
    settings = ttft.TtftSettings(
        shape="tiny", device="cpu", dtype="float32", contexts=(32,), repeats=1, chunk_tokens=16,
        host_bytes=1 << 24, disk_bytes=1 << 20, directory=tmp_path, with_decode=False,
    )  # fmt: skip
    result = ttft.run(settings)
    assert result.summary()["same_tokens"] is False
    assert any("from disk" in told for told in result.skipped), "what does not fit is left out, and said"


@needs_engine
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--shape", "llama-9", "--device", "cpu"), "unknown; allowed: tiny, small, llama-3.1-8b"),
        (("--shape", "tiny", "--device", "cpu", "--dtype", "int8"), "dtype = int8: unknown; allowed: bfloat16"),
        (("--contexts", "1k"), "1k: not a list of numbers"),
        (("--contexts", "100"), "contexts of at least two chunks"),
    ],
)
def test_impossible_settings_are_named(flags: tuple[str, ...], told: str) -> None:
    from bench import ttft

    done = CliRunner().invoke(ttft.ttft, flags)
    assert done.exit_code != 0
    assert told in f"{done.exception} {done.output}"


@needs_engine
@pytest.mark.engine
def test_only_what_the_device_has_no_memory_for_is_left_out() -> None:
    import torch
    from bench.parts.models import skip_out_of_memory

    skipped: list[str] = []
    with skip_out_of_memory("64 tokens", skipped):
        raise torch.OutOfMemoryError("no room for 2 GiB\nand what else torch says")
    with pytest.raises(ValueError, match="ours"), skip_out_of_memory("128 tokens", skipped):
        raise ValueError("ours")
    assert skipped == ["64 tokens: no room for 2 GiB"]


@needs_engine
def test_every_shape_has_a_configuration() -> None:
    import transformers
    from bench.parts.models import SHAPES

    for kind, fields in SHAPES.values():
        assert getattr(transformers, kind)(**fields).num_hidden_layers == fields["num_hidden_layers"]


@needs_engine
def test_the_crossover_is_where_it_stays_faster() -> None:
    from bench.ttft import Arm, TtftResult

    def arm(name: str, context: int, seconds: float) -> Arm:
        return Arm(name, context, 0, (seconds,), (0.0,), 0, same_tokens=True)

    result = TtftResult("tiny", "cpu", 1)
    for context, computed, fetched in ((1, 1.0, 0.5), (2, 2.0, 3.0), (4, 4.0, 3.0), (8, 9.0, 4.0)):
        result.arms += [arm("recompute", context, computed), arm("disk", context, fetched)]
    assert result.crossover("disk") == 4
    assert result.crossover("host") is None


def test_every_split_is_put_together_from_what_was_measured() -> None:
    computed, loaded = [(100, 1.0), (200, 3.0)], [(200, 0.5)]
    found = every_split(200, 50, computed=computed, loaded=loaded)
    assert found == pytest.approx({0: 3.0, 50: 0.125 + 2.5, 100: 0.25 + 2.0, 150: 0.375 + 1.0, 200: 0.5})
    assert between(loaded, 400) == 1.0
    assert between([], 10) == 0.0
    # A load that is slow up to 100 tokens and free from there on: neither nothing nor everything is best.
    kinked = every_split(200, 50, computed=[(100, 0.1), (200, 3.0)], loaded=[(100, 0.2), (150, 0.2), (200, 9.0)])
    assert min(kinked, key=lambda tokens: kinked[tokens]) == 150


@pytest.mark.parametrize("slope", [1e-6, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2], ids=lambda it: f"{it:g} s a token")
def test_the_planner_is_close_to_the_best_of_all_splits(slope: float) -> None:
    """Links from far faster than computing to far slower; computing grows with the square of the length."""
    contexts = (1024, 4096, 16384)
    computed = [(context, 2e-4 * context + 1e-9 * context**2 / 2) for context in contexts]
    loaded = {"host": [(context, slope * context) for context in contexts]}
    for context in contexts:
        (choice,) = choices(context, 256, computed=computed, loaded=loaded, splits={})
        assert (choice.place, choice.is_tried) == ("host", False)
        assert 0 <= choice.regret <= 0.06, choice


def test_a_choice_that_is_not_the_best_has_a_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of it."""
    monkeypatch.setattr(planner, "choose", lambda *_args, **_more: 0)
    (choice,) = choices(1024, 256, computed=[(1024, 1.0)], loaded={"host": [(1024, 0.1)]}, splits={})
    assert (choice.best_tokens, choice.chosen_tokens) == (1024, 0)
    assert choice.regret == pytest.approx(9.0)


@needs_engine
@pytest.mark.engine
def test_memory_that_the_driver_does_not_lock_is_said_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.parts.models import attach_locked, build
    from tests.simulated_cuda import installed

    from kvtier.device.page_lock import CudaRegistrar
    from kvtier.errors import ConfigError

    monkeypatch.setattr(CudaRegistrar, "register", lambda *_: 801)
    said: list[str] = []
    with installed():
        model = build("tiny", "cuda", "float32", 1)
        attach_locked(model, said.append, host__capacity_bytes="2MiB").close()
        (reason,) = said
        assert reason.startswith("host.page_lock = on: 0 of ")
        assert "CUDA error 801" in reason
        with pytest.raises(ConfigError, match="capacity_bytes"):
            attach_locked(model, said.append, host__capacity_bytes="2 apples")
    assert said == [reason]
