"""`bench/gpu.py`: its slices run on a CPU, stay within their time, and go on where they were interrupted."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from bench import gpu
from bench.parts import gpu_slices
from bench.parts.gpu_slices import QUICK, SLICES, Rates

TOP = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(TOP / "bench" / "gpu.py")]
ENGINE = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
needs_engine = pytest.mark.skipif(not ENGINE, reason="torch and Transformers are not installed")
REPORT = '<testsuites><testsuite><testcase classname="a" name="b" time="1.5">{}</testcase></testsuite></testsuites>'


def output(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_names_its_slices_and_what_is_missing(tmp_path: Path) -> None:
    listed = output("--list", "--out", str(tmp_path))
    for name in SLICES:
        assert f"\n{name} " in listed
        assert gpu.record_of(name, tmp_path).name in listed
    # The beginning of a name stands for all that have it.
    assert "ttft-8b-128k" in output("--list", "ttft", "--out", str(tmp_path))
    assert "links" not in output("--list", "ttft", "--out", str(tmp_path))
    assert "no slice ttft-9b" in output("ttft-9b", code=2)
    # An interpreter without site packages has none of what is needed.
    bare = subprocess.run(
        [sys.executable, "-S", "-I", SCRIPT[1]], capture_output=True, text=True, timeout=120, check=False
    )
    assert bare.returncode == 2
    assert "missing: torch, transformers, triton, numpy, xxhash, click, rich" in bare.stderr


@pytest.mark.parametrize("name", SLICES)
def test_every_slice_is_expected_to_end_within_its_limit(name: str) -> None:
    assert 20 < SLICES[name].estimate_s(Rates()) < 0.9 * gpu_slices.LIMIT_S


def test_the_estimate_follows_the_work() -> None:
    words = SLICES["ttft-8b-32k"].words
    rates = Rates()
    once = gpu_slices.ttft_s(words, rates)
    assert gpu_slices.ttft_s(words | {"--contexts": "65536"}, rates) > 1.8 * once
    assert gpu_slices.ttft_s(words | {"--no-decode": "--no-decode"}, rates) < once
    links = gpu_slices.links_s({"--lock": "64GiB"}, rates) - gpu_slices.links_s({"--lock": "1GiB"}, rates)
    assert links == pytest.approx(63 * 2**30 / gpu_slices.LOCK_BYTES_PER_S)


@needs_engine
def test_the_programs_take_the_options_of_their_slices(tmp_path: Path) -> None:
    from bench import links, multiturn, ttft

    programs = {"bench/ttft.py": ttft.ttft, "bench/multiturn.py": multiturn.multiturn, "bench/links.py": links.links}
    for name, each in {**SLICES, **{f"quick {name}": it for name, it in QUICK.items()}}.items():
        if each.is_tests:
            continue
        script, *words = gpu.command_of(name, each, tmp_path)[1:]
        context = programs[script].make_context(script, words)
        assert context.params["record"] == gpu.record_of(name, tmp_path)
    with pytest.raises(click.NoSuchOption):  # the negative control
        multiturn.multiturn.make_context("multiturn", ["--user", "1"])


@needs_engine
@pytest.mark.engine
def test_every_program_runs_on_the_cpu_and_its_record_is_complete(tmp_path: Path) -> None:
    told = output("--quick", "--out", str(tmp_path))
    assert "== sanitizer: left out, no program compute-sanitizer" in told
    assert "succeeded: links, ttft, turns" in told
    for name in ("ttft", "turns"):
        assert json.loads((tmp_path / f"gpu_{name}.json").read_text())["results"]["same_tokens"] is True
    found = json.loads((tmp_path / "gpu_links.json").read_text())["results"]
    assert [it["name"] for it in found["copies"]] == ["host to device", "device to host", "both ways at once"]
    assert found["lock"]["bytes"] == 64 << 20
    assert min(found["product"][key] for key in ("alone", "plain_gb_per_s", "kvtier_gb_per_s")) > 0
    # Nothing is run again that is complete; a slice that fails leaves the others alone.
    (tmp_path / "gpu_ttft.json").write_text("{}")
    told = output("--quick", "ttft", "turns", "--out", str(tmp_path), code=1)
    assert "gpu_ttft.json is no record that can be continued" in told
    assert "failed: ttft\ncomplete before: turns" in told
    assert "stopped: turns" in output("--quick", "turns", "--again", "--seconds", "1", "--out", str(tmp_path), code=1)
    assert "left out: turns" in output("--quick", "turns", "--within", "-1", "--out", str(tmp_path))


@needs_engine
@pytest.mark.engine
def test_a_killed_slice_goes_on_with_what_is_left(tmp_path: Path) -> None:
    record = tmp_path / "gpu_ttft.json"
    command = gpu.command_of("ttft", QUICK["ttft"], tmp_path)
    with subprocess.Popen(
        command, cwd=TOP, env=gpu.environment_of(QUICK["ttft"]), stdout=subprocess.DEVNULL
    ) as process:
        until_s = time.monotonic() + 200
        while not record.exists():
            assert time.monotonic() < until_s
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    cut = json.loads(record.read_text())
    assert (cut["results"]["measured"], cut["results"]["is_complete"]) == ([64], False)
    assert gpu.state_of("ttft", QUICK["ttft"], tmp_path) == "begun"
    other = [*command, "--repeats", "3"]
    done = subprocess.run(other, cwd=TOP, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "gpu_ttft.json was measured with repeats = 2, here it is 3" in done.stderr
    output("--quick", "ttft", "--out", str(tmp_path))
    whole = json.loads(record.read_text())
    assert (whole["results"]["measured"], whole["results"]["is_complete"]) == ([64, 256], True)
    kept = [it for it in whole["samples"] if it["context"] == 64]
    assert kept == cut["samples"], "measured once"
    assert [it["name"] for it in whole["samples"] if it["context"] == 256] == [it["name"] for it in kept]
    assert whole["results"]["links"] == cut["results"]["links"]
    assert whole["results"]["continues"] == [{"time": cut["time"], "commit": cut["commit"]}]
    assert gpu.state_of("ttft", QUICK["ttft"], tmp_path) == "complete"
    assert gpu.state_of("ttft", SLICES["ttft-mla"], tmp_path) == "of other options"


@pytest.mark.parametrize(
    ("inside", "code", "is_quick", "outcome"),
    [
        ("", 0, False, "succeeded"),
        ("<failure/>", 1, False, "failed"),
        ("<error/>", 1, True, "failed"),
        ('<skipped message="no GPU"/>', 0, False, "failed"),
        ('<skipped message="no GPU"/>', 0, True, "skipped"),
    ],
)
def test_tests_are_complete_only_if_some_passed_and_none_failed(
    tmp_path: Path, inside: str, code: int, is_quick: bool, outcome: str
) -> None:
    report, record = tmp_path / "report.xml", tmp_path / "gpu_tests.json"
    report.write_text(REPORT.format(inside))
    assert gpu.keep_tests("tests", record, report, code, is_quick=is_quick) == outcome
    assert (gpu.state_of("tests", SLICES["tests"], tmp_path) == "complete") is (outcome == "succeeded")
