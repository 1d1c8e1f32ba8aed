"""`bench/gpu.py`: its slices run on a CPU, stay within their time, go on where they were interrupted; their packs."""

import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from bench import gpu, pack
from bench.parts import gpu_slices
from bench.parts.gpu_slices import QUICK, SIMULATED, SLICES, Rates
from click.testing import CliRunner
from tests.programs import program
from tests.waiting import wait_until

TOP = Path(__file__).parents[2]
SCRIPT = str(TOP / "bench" / "gpu.py")
ENGINE = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
needs_engine = pytest.mark.skipif(not ENGINE, reason="torch and Transformers are not installed")
REPORT = '<testsuites><testsuite><testcase classname="a" name="b" time="1.5">{}</testcase></testsuite></testsuites>'


Output = Callable[..., str]


def programs() -> dict[str, click.Command]:
    from bench import links, multiturn, ttft

    return {"bench/ttft.py": ttft.ttft, "bench/multiturn.py": multiturn.multiturn, "bench/links.py": links.links}


def in_this_process(command: list[str], _environment: dict[str, str], _limit_s: float) -> int:
    """In place of `gpu.end_of`: torch is imported once."""
    import torch

    torch.set_num_threads(1)
    _, script, *words = command
    done = CliRunner().invoke(programs()[script], words)
    print(done.output, done.exception)
    return done.exit_code


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Output:
    """What `bench/gpu.py` prints; its slices run in this process."""
    monkeypatch.setattr(gpu, "end_of", in_this_process)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)

    def printed(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        try:
            found: object = gpu.main()
        except SystemExit as error:
            found = error.code
        told = "".join(capsys.readouterr())
        assert found == code, told
        return told

    return printed


def test_it_names_its_slices_and_what_is_missing(tmp_path: Path, output: Output) -> None:
    listed = output("--list", "--out", str(tmp_path))
    for name in SLICES:
        assert f"\n{name} " in listed
        assert gpu.record_of(name, tmp_path).name in listed
    # The beginning of a name stands for all that have it.
    some = output("--list", "ttft", "--out", str(tmp_path))
    assert "ttft-8b-128k" in some
    assert "links" not in some
    assert "no slice ttft-9b" in output("ttft-9b", code=2)
    # An interpreter without site packages has none of what is needed.
    bare = subprocess.run(
        [sys.executable, "-S", "-I", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert bare.returncode == 2
    assert "missing: torch, transformers, numpy, xxhash, click, rich" in bare.stderr


@pytest.mark.parametrize("name", SLICES)
def test_every_slice_is_expected_to_end_within_its_limit(name: str) -> None:
    assert 20 < SLICES[name].estimate_s(Rates()) < 0.9 * gpu_slices.LIMIT_S


def test_the_slices_of_most_worth_come_first_and_fit_together() -> None:
    first = list(SLICES)[:3]
    assert first == ["tests", "links", "ttft-8b-32k"]
    assert sum(SLICES[name].estimate_s(Rates()) for name in first) < 0.8 * gpu_slices.LIMIT_S


@needs_engine
def test_the_programs_take_the_options_of_their_slices(tmp_path: Path) -> None:
    import torch

    has_gpu = torch.cuda.is_available()
    for name, each in {**SLICES, **{f"quick {name}": it for name, it in QUICK.items()}}.items():
        if each.is_tests:
            continue
        script, *words = gpu.command_of(name, each, tmp_path)[1:]
        if script == "bench/vllm.py":
            continue  # which imports vLLM's test harness; tests/vllm runs it
        context = programs()[script].make_context(script, words)
        assert context.params["record"] == gpu.record_of(name, tmp_path)
        if "cuda" not in words and "cpu" not in words and "--quick" not in words and not has_gpu:
            done = CliRunner().invoke(programs()[script], words)
            assert "torch sees no CUDA device; allowed here: cpu" in str(done.exception)
    with pytest.raises(click.NoSuchOption):  # the negative control
        programs()["bench/multiturn.py"].make_context("multiturn", ["--user", "1"])


@needs_engine
@pytest.mark.engine
def test_every_program_runs_on_the_cpu_and_its_record_is_complete(tmp_path: Path, output: Output) -> None:
    printed = output("--quick", "sanitizer", "links", "turns", "--out", str(tmp_path))
    assert "== sanitizer: left out, no program compute-sanitizer" in printed
    assert re.search(r"^succeeded: links, turns$", printed, re.MULTILINE)
    assert json.loads((tmp_path / "gpu_turns.json").read_text())["results"]["same_tokens"] is True
    found = json.loads((tmp_path / "gpu_links.json").read_text())["results"]
    assert [it["name"] for it in found["copies"]] == ["host to device", "device to host", "both ways at once"]
    assert found["lock"]["bytes"] == 64 << 20
    assert min(found["product"][key] for key in ("alone", "plain_gb_per_s", "kvtier_gb_per_s")) > 0
    # Nothing is run again that is complete; a slice that fails leaves the others alone.
    (tmp_path / "gpu_ttft.json").write_text("{}")
    printed = output("--quick", "ttft", "turns", "--out", str(tmp_path), code=1)
    assert "gpu_ttft.json is no record that can be continued" in printed
    assert "failed: ttft\ncomplete before: turns" in printed
    assert "stopped: ttft" in output("--quick", "ttft", "--within", "-1", "--out", str(tmp_path), code=1)


@needs_engine
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("first", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_dry_run_of_what_a_machine_with_a_gpu_would_run(first: int, tmp_path: Path) -> None:
    """The tests in it run on the simulated device in tests/unit/device as well."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    names = list(SIMULATED)
    chosen = names[first:]
    assert names == list(SLICES)[:3]
    for name in names:
        assert not {"--device", "--dtype", "--no-splits", "--no-decode"} & SIMULATED[name].words.keys(), "only sizes"
    command = [sys.executable, SCRIPT, "--simulated", "--within", "560", *chosen, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"succeeded: {', '.join(chosen)}" in done.stdout
    *tests, links, ttft = (json.loads(gpu.record_of(name, tmp_path).read_text())["results"] for name in chosen)
    assert [(it["passed"], it["is_complete"]) for it in tests] == [(gpu_slices.TESTS, True)] * (1 - first)
    assert (links["device"], links["lock"]["bytes"]) == ("simulated", 64 << 20)
    assert min(links["product"][key] for key in ("alone", "plain_gb_per_s", "kvtier_gb_per_s")) > 0
    assert (ttft["device"], ttft["same_tokens"], ttft["skipped"]) == ("simulated", True, [])
    assert {*ttft["ttft_ms"]} == {"recompute", "store", "host", "disk", *(f"split {it:g}" for it in (0.25, 0.5, 0.75))}
    assert [it["name"] for it in ttft["links"]] == ["disk", "host to device", "device to host", "both ways at once"]
    # Beside a call that is shorter than a token nothing is decoded.
    assert all(ms is None or ms > 0 for ms in ttft["decoding"][0].values())
    assert ttft["decoding"][0]["alone_ms"] > 0


def test_a_slice_is_stopped_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "END_S", 0.2)
    for script in (
        "import time; time.sleep(60)",
        "import signal, time; signal.signal(2, lambda *_: 0); time.sleep(60)",
    ):
        monkeypatch.setattr(gpu, "command_of", lambda *_, script=script: [sys.executable, "-c", script])
        assert gpu.run("links", QUICK["links"], gpu.Options(tmp_path, 0.5, again=False, is_dry=True)) == "stopped"


def test_the_record_of_tests_that_hang_has_those_that_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, begun, limit_s = tmp_path / "test_hangs.py", tmp_path / "begun", 77.0
    script.write_text(f"""import time
def test_a(): pass
def test_b():
    open({str(begun)!r}, "w").close()
    time.sleep(90)
""")

    class Limited(subprocess.Popen[bytes]):
        """Its time is over once the second test has begun."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == limit_s:
                wait_until(begun.exists, "the second test")
                raise subprocess.TimeoutExpired([], limit_s)
            return super().wait(timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", Limited)
    hanging = gpu_slices.Slice("", ("-m", "pytest", "-o", "addopts=", "-o", "timeout=0", str(script)), lambda *_: 0.0)
    assert gpu.run("tests", hanging, gpu.Options(tmp_path, limit_s, again=False, is_dry=False)) == "stopped"
    found = json.loads((tmp_path / "gpu_tests.json").read_text())["results"]
    assert (found["passed"], found["failed"], found["is_complete"]) == (1, [], False)


def test_a_slice_that_would_take_all_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available_bytes", lambda: 50 << 30)
    assert gpu.reason_against(SLICES["links"]) == "it page-locks 64 GiB of host memory, and 50 GiB are available"
    assert [SLICES[name].host_bytes >> 30 for name in ("tests", "ttft-8b-32k", "ttft-mla", "turns-8b-4k")] == [
        0, 40, 32, 16,
    ]  # fmt: skip
    assert "page-locks" not in (gpu.reason_against(SLICES["ttft-8b-32k"]) or "")


def test_what_killed_runs_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(gpu.tempfile, "tempdir", str(tmp_path))
    names = (f"kvtier-gpu-{ended.pid}-x", f"kvtier-gpu-{os.getpid()}-x", "kvtier-gpu-x", "other")
    for name in names:
        (tmp_path / name).mkdir()
    for name in (".gpu_links.json.0123456789abcdef", "gpu_links.json"):
        (tmp_path / name).touch()
    gpu.remove_leftovers(tmp_path)
    assert {it.name for it in tmp_path.iterdir()} == {*names[1:], "gpu_links.json"}


def samples_of(record: dict[str, Any]) -> dict[tuple[int, str], list[float]]:
    return {(it["context"], it["name"]): it["ttft_s"] for it in record["samples"]}


def processes_below(folder: Path) -> list[str]:
    """The commands of processes that have this folder among their arguments."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(place.read_text().replace("\0", " "))
    return [it for it in found if str(folder) in it]


KILLS = [
    (count, number, is_all)
    for count in (1, 9, 28, 40)
    for number, is_all in ((signal.SIGKILL, True), (signal.SIGTERM, False))
]
"""Complete samples when the run is killed, the signal, and whether all of its group get it."""


@needs_engine
@pytest.mark.engine
@pytest.mark.nightly
def test_a_killed_run_loses_nothing_and_goes_on_with_what_is_left(
    tmp_path: Path, output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    record, cut = tmp_path / "gpu_ttft.json", {"samples": []}
    command = [sys.executable, SCRIPT, "--quick", "ttft", "--out", str(tmp_path)]
    for count, number, is_all in KILLS:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            until_s = time.monotonic() + 200
            while not record.exists() or sum(map(len, samples_of(json.loads(record.read_text())).values())) < count:
                assert time.monotonic() < until_s
                assert process.poll() is None
                time.sleep(0.002)
            (os.killpg if is_all else os.kill)(process.pid, number)
        wait_until(lambda: not processes_below(tmp_path), "the slice to end, too")
        before, cut = cut, json.loads(record.read_text())
        found = samples_of(cut)
        assert all(found[arm][: len(times)] == times for arm, times in samples_of(before).items()), "measured once"
        assert cut["results"]["is_complete"] is False
        assert gpu.state_of("ttft", QUICK["ttft"], tmp_path) == "begun"
    words = gpu.command_of("ttft", QUICK["ttft"], tmp_path)
    assert in_this_process([*words, "--repeats", "3"], {}, 60) != 0
    assert "gpu_ttft.json was measured with repeats = 2, here it is 3" in capsys.readouterr().out
    assert json.loads(record.read_text()) == cut, "measured with other options"
    output("--quick", "ttft", "--out", str(tmp_path))
    whole = json.loads(record.read_text())
    assert (whole["results"]["measured"], whole["results"]["is_complete"]) == ([64, 256], True)
    assert {arm for _, arm in samples_of(whole)} == {arm for _, arm in samples_of(cut)} | {
        "disk",
        *(f"split {share:g}" for share in (0.25, 0.5, 0.75)),
    }
    assert all(samples_of(whole)[arm][: len(times)] == times for arm, times in samples_of(cut).items()), "measured once"
    assert {len(times) for (_, arm), times in samples_of(whole).items() if arm != "disk"} == {2}
    assert whole["results"]["links"] == cut["results"]["links"]
    assert {"time": cut["time"], "commit": cut["commit"]} in whole["results"]["continues"]
    assert gpu.state_of("ttft", QUICK["ttft"], tmp_path) == "complete"
    assert gpu.state_of("ttft", SLICES["ttft-mla"], tmp_path) == "of other options"
    # A run that is killed while it draws leaves a complete record, from which the next one draws.
    picture = tmp_path / "gpu_ttft.svg"
    picture.unlink(missing_ok=True)
    record.write_text(json.dumps({name: it for name, it in whole.items() if name != "command"}))
    assert "complete, nothing is left to measure" in output("--quick", "ttft", "--out", str(tmp_path))
    assert picture.exists() is (importlib.util.find_spec("matplotlib") is not None)
    assert json.loads(record.read_text()) == whole


@pytest.mark.parametrize(
    ("inside", "code", "is_dry", "outcome"),
    [
        ("", 0, False, "succeeded"),
        ("<failure/>", 1, False, "failed"),
        ("<error/>", 1, True, "failed"),
        ('<skipped message="no GPU"/>', 0, False, "failed"),
        ('<skipped message="no GPU"/>', 0, True, "skipped"),
        ('</testcase><testcase name="c"><skipped message="no GPU"/>', 0, False, "failed"),
        ("", None, False, "stopped"),
    ],
)
def test_tests_are_complete_only_if_all_passed(
    tmp_path: Path, inside: str, code: int | None, is_dry: bool, outcome: str
) -> None:
    report, record = tmp_path / "report.xml", tmp_path / "gpu_tests.json"
    report.write_text(REPORT.format(inside))
    assert gpu.keep_tests("tests", SLICES["tests"], record, report, code, is_dry=is_dry) == outcome
    assert (gpu.state_of("tests", SLICES["tests"], tmp_path) == "complete") is (outcome == "succeeded")


def test_what_the_sanitizer_finds_fails_the_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = tmp_path / "arguments"
    script = f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" > {arguments}\nexit 9\n'
    program(tmp_path / "compute-sanitizer", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = gpu.Options(tmp_path, 60, again=False, is_dry=False)
    assert gpu.run("sanitizer-memcheck", SLICES["sanitizer-memcheck"], options) == "failed"
    assert arguments.read_text().startswith("1 --tool memcheck --report-api-errors no --error-exitcode 9 ")
    found = json.loads((tmp_path / "gpu_sanitizer_memcheck.json").read_text())
    assert (found["results"]["exit_code"], found["results"]["is_complete"]) == (9, False)
    assert gpu.state_of("sanitizer-memcheck", SLICES["sanitizer-memcheck"], tmp_path) == "begun"


def target(**fields: Any) -> pack.Target:
    given = {
        "installed": {},
        "python": "3.12",
        "glibc": 28,
        "transfer_bytes": 64 << 20,
        "transfer_s": 30.0,
        "seconds": 600,
    }
    return pack.Target(**given | fields)


LOCK = {
    "packages": [
        {"name": "vllm", "version": "0.33.0", "wheels": [{"size": 100 << 20}, {"size": 300 << 20}]},
        {"name": "torch", "version": "2.14.0+cu130", "wheels": [{"size": 500 << 20}]},
        {"name": "Typing_Extensions", "version": "4.16.0", "wheels": [{"size": 1 << 20}]},
        {"name": "old", "version": "1"},
    ]
}


def test_only_what_is_not_installed_is_brought() -> None:
    installed = pack.installed_of("torch==2.14.0+cpu\n# a comment\ntyping.extensions==4.15\n-e git+https://x#egg=y\n")
    assert installed == {"torch": "2.14.0", "typing-extensions": "4.15"}
    wheels = pack.brought(LOCK, installed)
    assert [(it.name, it.size_bytes >> 20, it.installed) for it in wheels] == [
        ("vllm", 300, ""),
        ("typing-extensions", 1, "4.15"),
        ("old", 0, ""),
    ]


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"installed": {"torch": "2.14.0"}}, ["old 1 has no wheel for Python 3.12"]),
        ({"installed": {"torch": "2.14.0", "old": "1"}}, []),
        ({"installed": {"torch": "2.11.0", "old": "1"}}, ["needs torch 2.14.0+cu130, and 2.11.0 is installed"]),
        (
            {"installed": {"torch": "2.14.0", "old": "1"}, "seconds": 100},
            ["301 MiB are 5 transfers, 150 s at 30 s each; there are 100 s"],
        ),
    ],
)
def test_what_cannot_travel_is_refused_with_the_reason(fields: dict[str, Any], reasons: list[str]) -> None:
    asked = target(**fields)
    assert asked.refusals(pack.brought(LOCK, asked.installed)) == reasons


def test_a_pack_without_its_resolver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("torch==2.11.0\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(pack.pack, ["links", "--installed", str(freeze)])
    assert "install the package uv" in str(done.exception)


def wheel(folder: Path, name: str, content: bytes) -> Path:
    path, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "DATA = " + repr(content))
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


def test_a_pack_is_put_together_whatever_the_order_of_its_transfers(tmp_path: Path) -> None:
    draw = random.Random(1)
    wheels = [wheel(tmp_path, f"packed{number}", draw.randbytes(700_000)) for number in range(2)]
    size = sum(it.stat().st_size for it in wheels)
    count = pack.split(wheels, tmp_path / "pack", 3 << 19)
    assert count == -(-size // (3 << 19)) >= 3
    folders = sorted((tmp_path / "pack").iterdir())
    carried = [sum(it.stat().st_size for it in folder.iterdir() if ".whl." in it.name) for folder in folders]
    assert max(carried) <= 3 << 19
    assert sum(carried) == size

    def carry(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(folder / "join.py"), str(tmp_path / "store")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    for folder in reversed(folders[1:]):
        assert "not whole yet" in carry(folder).stdout
    assert "not whole yet" in carry(folders[1]).stdout, "a transfer may come twice"
    part = next(it for it in folders[0].iterdir() if ".whl." in it.name)
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "another checksum" in carry(folders[0]).stderr
    assert not (tmp_path / "store" / "site").exists()
    part.write_bytes(whole)
    done = carry(folders[0])
    assert "all 2 wheels are in" in done.stdout, done.stderr
    for name in wheels:
        assert (tmp_path / "store" / name.name).read_bytes() == name.read_bytes()
        assert (tmp_path / "store" / "site" / f"{name.name.partition('-')[0]}.py").exists()
