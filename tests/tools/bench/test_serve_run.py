"""Order, resumption and failures of the runs of `kvtier bench serve`, and what the sampler writes.

The servers are real HTTP servers that are started elsewhere, as the arm NAME=URL has them.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
from tests.programs import program

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.tools.bench.serve.arms import Arm, parse_arms, transfer_config
from kvtier.tools.bench.serve.campaign import Record, RunKey, ServeSettings, known_context, pinned, run_order
from kvtier.tools.bench.serve.generator import GeneratorResult, find_generator
from kvtier.tools.bench.serve.load_driver import GeneratedLoad, LoadSettings
from kvtier.tools.bench.serve.machine_limits import drive_of
from kvtier.tools.bench.serve.sampler import Processes, Rapl, Sampler, drive_figures, parse_metrics
from kvtier.tools.bench.serve.server import Server, VllmPython, find_lmcache, find_vllm, free_ports, vllm_environment
from kvtier.tools.bench.serve.workload import PRESETS

METRICS = """# HELP vllm:prompt_tokens_total Number of prefill tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 4096.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 4000.0
vllm:kvtier_load_bytes_total{engine="0",model_name="m",place="host"} 1.5e+06
vllm:kvtier_load_seconds_bucket{engine="0",le="0.1",model_name="m"} 3.0
vllm:kvtier_load_seconds_created{engine="0"} 1.7e9
python_gc_objects_collected_total{generation="0"} 5.0
vllm:num_requests_running 2
vllm:prompt_tokens_total torn
"""


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


class TwoRequests:
    """A load of a warm-up and a measured request; fails on the run whose number is given."""

    prompt_tokens = 8

    def __init__(self, fails: int = -1, failed: int = 0) -> None:
        self.runs = 0
        self.asked: list[float | None] = []
        self.fails = fails
        self.failed = failed

    def drive(
        self, url: str, directory: Path, *, repetition: int, requests_per_s: float | None, is_over: Callable[[], str]
    ) -> GeneratorResult:
        self.runs += 1
        self.asked.append(requests_per_s)
        (directory / "requests.jsonl").write_text('{"sent_s": 12.5}\n')
        problem = "the server was killed by signal 9" if self.runs - 1 == self.fails else None
        return GeneratorResult(
            began_s=10.0, measured_from_s=12.5, ended_s=13.0, requests=1, failed=self.failed, error=problem
        )

    def pids(self) -> list[int]:
        return [os.getpid()]


def settings(*urls: str, **more: object) -> ServeSettings:
    arms = tuple(parse_arms([f"s{number}={url}" for number, url in enumerate(urls)]))
    made = ServeSettings(
        arms=arms, repeats=2, ratios=(), rates=(), model=None, vllm=None, device_kv_bytes=1, host_bytes=1,
        store_bytes=1, memory_bytes=None, running=1, context_tokens=16, server_cores=(),
        client_cores=(), load={"users": 1},
    )  # fmt: skip
    return replace(made, **more)


def run_all(record: Record) -> dict[str, str]:
    todo = [key for key in record.order() if not record.is_done(key)]
    return {key.name: record.run(key, lambda: None)["status"] for key in todo}


def test_arms_alternate_and_the_first_one_changes() -> None:
    arms = parse_arms(["none", "native", "kvtier"])
    order = run_order(arms, 3, (0.1, 1.0))
    assert len(order) == 3 * (1 + 2 * 2)
    assert [key.repetition for key in order] == sorted(key.repetition for key in order), "repetitions are outermost"
    assert [key.name for key in order if key.arm.name == "none"] == ["none-0", "none-1", "none-2"]
    within = [(one, other) for one, other in pairwise(order) if one.repetition == other.repetition]
    assert all(one.arm != other.arm for one, other in within), "no arm runs twice in a row"
    firsts = [next(key.arm.name for key in order if key.repetition == number) for number in range(3)]
    assert len(set(firsts)) > 1
    before = {key.repetition: key.arm.name for key in reversed(order) if key.ratio == 0.1}
    assert set(before.values()) == {"native", "kvtier"}, "each is first at times"
    rates = run_order(arms, 2, (), (0.5, 1.0))
    assert [key.name for key in rates[:3]] == ["none-0-0.5rps", "native-0-0.5rps", "kvtier-0-0.5rps"]
    assert rates[6].requests_per_s == 1.0
    assert RunKey(arms[2], 1, 0.5).name == "kvtier-1-R0.5"
    assert len({key.name for key in order}) == len(order)
    assert [key.name for key in run_order(arms, 1, ())] == ["none-0", "native-0", "kvtier-0"]
    assert run_order([Arm("a", "url", "http://h")], 2, (1.0,))[0].ratio is None, "a server of others is not throttled"


def test_loads_are_shares_of_the_measured_computing_rate_and_may_be_added(url: str, tmp_path: Path) -> None:
    load = TwoRequests()
    record = Record(settings(url, repeats=1, shares=(0.5,)), load, tmp_path)
    # 16 tokens in 0.5 s are four prompts of 8 tokens a second.
    (record.runs / "calibration.json").write_text('{"tokens": 16.0, "prefill_s": 0.5, "kv_bytes_per_s": 1.0}')
    assert record.capacity_per_s() == 4.0
    assert run_all(record) == {"s0-0-0.5load": "ok"}
    more = Record(settings(url, repeats=1, shares=(0.5, 1.3), rates=(3.0,)), load, tmp_path)
    assert run_all(more) == {"s0-0-3rps": "ok", "s0-0-1.3load": "ok"}, "and what was run stays"
    assert load.asked == [2.0, 3.0, 5.2]
    loads = [json.loads((place / "run.json").read_text())["load"] for place in more.done()]
    assert loads == [
        {"requests_per_s": 3.0},
        {"requests_per_s": 2.0, "share_of_capacity": 0.5},
        {"requests_per_s": 5.2, "share_of_capacity": 1.3},
    ]


def test_lmcache_gets_the_same_memory_drive_and_chunks_and_its_best_settings() -> None:
    (arm,) = parse_arms(["lmcache"])
    assert arm.has_tiers
    made = transfer_config(
        arm, Path("/store of it"), 512 << 20, 8 << 30, is_cpu=True, chunk_tokens=512, ports=(7001, 7002)
    )
    assert made is not None
    assert (made["kv_connector"], made["kv_role"]) == ("LMCacheMPConnector", "kv_both")
    extra = made["kv_connector_extra_config"]
    assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://127.0.0.1", 7001)
    assert extra["lmcache.mp.mp_transfer_mode"] == "lmcache_driven"
    assert extra["lmcache.mp.save_decode_cache"] is extra["lmcache.mp.autostart"] is True
    options = dict(it.partition("=")[::2] for it in shlex.split(extra["lmcache.mp.autostart.server_args"]))
    assert json.loads(options.pop("--l2-adapter")) == {
        "type": "fs_native", "base_path": "/store of it", "use_odirect": True, "num_workers": 4,
        "max_capacity_gb": 8.0, "eviction": {"eviction_policy": "LRU"},
    }  # fmt: skip
    assert options == {
        "--disable-observability": "", "--chunk-size": "512", "--l1-size-gb": "0.5", "--eviction-policy": "LRU",
        "--http-port": "7002", "--eviction-trigger-watermark": "0.625",
        "--eviction-ratio": "0.4",
    }  # fmt: skip
    assert "LMCache's own CPU path, unmodified" in arm.means(is_cpu=True)


def test_lmcache_is_read_from_its_folder_and_comes_last_on_the_path(tmp_path: Path) -> None:
    python = VllmPython(Path(sys.executable), "1", is_cpu=True)
    connector = tmp_path / "lmcache" / "integration" / "vllm" / "lmcache_mp_connector.py"
    connector.parent.mkdir(parents=True)
    (tmp_path / "lmcache-0.5.6.dist-info").mkdir()
    (tmp_path / "lmcache-0.5.6.dist-info" / "METADATA").write_text("Name: lmcache\nVersion: 0.5.6\n")
    with pytest.raises(ConfigError, match=rf"--lmcache {tmp_path}: .*No module named 'lmcache.*pip install --target"):
        find_lmcache(tmp_path, python)
    connector.write_text("import os\nassert os.environ['LMCACHE_TRACK_USAGE'] == 'false'\n")
    found = find_lmcache(tmp_path, python)
    assert found.version == "0.5.6"
    environment = vllm_environment(python, Path("/packages"), [0], found)
    assert environment["PYTHONPATH"] == f"/packages:{tmp_path}"
    assert environment["LMCACHE_TRACK_USAGE"] == "false"
    assert not any("LMCACHE" in name for name in vllm_environment(python, Path("/packages"), [0]))


def test_ports_that_are_free_together_differ() -> None:
    assert len(set(free_ports(20))) == 20


def test_a_failed_run_leaves_the_others_and_is_repeated(url: str, tmp_path: Path) -> None:
    load = TwoRequests(fails=1)
    record = Record(settings(url, url), load, tmp_path)
    assert run_all(record) == {"s0-0": "ok", "s1-0": "failed", "s1-1": "ok", "s0-1": "ok"}
    result = json.loads((record.runs / "s1-0" / "run.json").read_text())
    assert result["error"] == "the server was killed by signal 9"
    assert result["measured_from_s"] == 12.5
    assert len(result["load_average"]) == 2
    assert (record.runs / "s1-0" / "requests.jsonl").exists(), "what was measured is kept"
    assert len(record.done()) == 4
    again = Record(settings(url, url, repeats=3), TwoRequests(), tmp_path)
    assert set(run_all(again)) == {"s1-0", "s0-2", "s1-2"}
    (again.runs / "s0-0" / "run.json").unlink()
    assert set(run_all(again)) == {"s0-0"}


def test_a_run_without_a_good_request_has_failed_and_is_repeated(url: str, tmp_path: Path) -> None:
    assert run_all(Record(settings(url, repeats=1), TwoRequests(failed=1), tmp_path)) == {"s0-0": "failed"}
    result = json.loads((tmp_path / "runs" / "s0-0" / "run.json").read_text())
    assert result["error"].startswith("0 of 1 requests completed; errors are in ")
    assert run_all(Record(settings(url, repeats=1), TwoRequests(), tmp_path)) == {"s0-0": "ok"}


@pytest.mark.parametrize("is_local", [True, False])
def test_a_server_elsewhere_does_not_get_this_machines_drive_and_energy(
    is_local: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arm, "is_local", property(lambda _: is_local))
    monkeypatch.setattr(Rapl, "joules", lambda _: 5.0)
    record = Record(settings(url, repeats=1), TwoRequests(), tmp_path)
    record.drive = drive_of(tmp_path)
    run_all(record)
    first = json.loads((record.runs / "s0-0" / "samples.jsonl").read_text().splitlines()[0])
    assert (first["device"] is not None, first["package_joules"] is not None) == (is_local, is_local)


@pytest.mark.parametrize(
    ("url", "is_local"),
    [("http://127.0.0.1:8", True), ("http://[::1]:8", True), ("http://localhost", True), ("http://10.0.0.1:8", False)],
)
def test_servers_of_this_machine_are_known_by_their_address(url: str, is_local: bool) -> None:
    assert Arm("a", "url", url).is_local is is_local
    assert Arm("none", "none").is_local


def test_a_record_keeps_the_context_for_when_its_servers_are_away(url: str, tmp_path: Path) -> None:
    assert known_context(tmp_path) is None
    Record(settings(url, load={"context_tokens": 512}), TwoRequests(), tmp_path)
    assert known_context(tmp_path) == 512


def test_the_context_is_in_tokens_of_the_models_tokenizer() -> None:
    given = LoadSettings(
        sizes=PRESETS["dell"].here, seconds=10, seed=1, warm_up=1, context_tokens=32768, generator="", cores=""
    )
    words, characters = (GeneratedLoad(settings=given, tokens_per_word=count) for count in (1.0, 4.9))
    assert words.context_tokens == 6144
    assert characters.context_tokens >= 4.9 * words.workload(0, None).context_tokens
    assert characters.prompt_tokens == pytest.approx(4.9 * words.prompt_tokens, rel=1e-3)
    with pytest.raises(ConfigError, match=r"the model, with 12\.00 tokens a word, holds 2730"):
        GeneratedLoad(settings=given, tokens_per_word=12.0)


def test_a_server_that_does_not_answer_fails_its_run_alone(url: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvtier.tools.bench.serve.campaign.START_LIMIT_S", 0.3)
    found = run_all(Record(settings("http://127.0.0.1:1", url, repeats=1), TwoRequests(), tmp_path))
    assert found == {"s0-0": "failed", "s1-0": "ok"}


def test_a_directory_of_other_settings_is_refused(url: str, tmp_path: Path) -> None:
    Record(settings(url), TwoRequests(), tmp_path)
    with pytest.raises(ConfigError, match=r"load was \{'users': 1\} and is now \{'users': 2\}"):
        Record(settings(url, load={"users": 2}), TwoRequests(), tmp_path)
    (tmp_path / "runs" / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="use an empty directory"):
        Record(settings(url), TwoRequests(), tmp_path)


def test_the_sampler_writes_what_a_process_does(url: str, tmp_path: Path) -> None:
    class Busy(Server):
        def pids(self) -> list[int]:
            return [process.pid]

    file = tmp_path / "written"
    script = f"""
import os, sys
data = os.urandom(16 << 20)
with open({str(file)!r}, "wb") as out:
    out.write(data); out.flush(); os.fsync(out.fileno())
print("done", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        ticked = threading.Event()
        sampler = Sampler(
            tmp_path / "samples.jsonl", Busy(url), client_pids=lambda: [os.getpid()], drive=drive_of(tmp_path),
            limits=None, gpu=None, tick=ticked.set,
        )  # fmt: skip
        with closing(sampler):
            assert ticked.wait(60)
        process.communicate("\n", timeout=60)
    (first, *_) = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert 16 << 20 <= first["written_bytes"] < 17 << 20
    assert first["rss_bytes"] > 16 << 20
    assert 0 < first["cpu_s"] < 60
    assert first["client_cpu_s"] > 0
    assert first["device"]["written_bytes"] >= 16 << 20
    assert first["memory_bytes"] is first["gpu"] is None
    assert first["metrics"]["vllm:num_requests_running"] == 2


def test_metrics_are_kept_without_buckets_and_constant_labels() -> None:
    assert parse_metrics(METRICS) == {
        "vllm:prompt_tokens_total": 4096.0,
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': 4000.0,
        'vllm:kvtier_load_bytes_total{place="host"}': 1.5e6,
        "vllm:num_requests_running": 2.0,
    }


def test_processes_that_end_keep_their_counters_but_not_their_memory() -> None:
    processes = Processes()
    before = processes.figures([os.getpid()])
    after = processes.figures([])
    assert (after.cpu_s, after.written_bytes, after.rss_bytes) == (before.cpu_s, before.written_bytes, 0)
    assert before.rss_bytes > 0
    assert processes.figures([1 << 22]) == after


def test_memory_that_processes_share_counts_once() -> None:
    script = """
import mmap, os
shared = mmap.mmap(-1, 64 << 20)
shared.write(bytes(64 << 20))
os.fork()
sum(shared[::4096])
os.write(1, b"%d\\n" % os.getpid())
os.read(0, 1)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pids = {int(process.stdout.readline()) for _ in range(2)}
        found = Processes().figures(pids).rss_bytes
        process.communicate("\n\n", timeout=60)
    assert found is not None
    assert 64 << 20 < found < 2 * (64 << 20)


def test_a_drive_that_has_gone_has_no_figures(tmp_path: Path) -> None:
    assert drive_figures(replace(drive_of(tmp_path), name="gone")) is None


def test_rapl_sums_packages_and_continues_beyond_the_range(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text("9000000\n")
        (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")
    rapl = Rapl(tmp_path)
    assert rapl.joules() == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("9500000\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1000000\n")
    assert rapl.joules() == 2.5
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert rapl.joules() is None
    assert Rapl(tmp_path / "none").joules() is None


def test_a_python_without_vllm_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a program.*--vllm PYTHON"):
        find_vllm(tmp_path / "python")
    other = program(tmp_path / "other", f'#!/bin/sh\nexec {sys.executable} -c "import no_such_vllm"\n')
    with pytest.raises(ConfigError, match="No module named 'no_such_vllm'"):
        find_vllm(other)


def test_programs_named_from_here_are_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    for name in ("bin/python", "bin/aiperf"):
        program(Path(name), "#!/bin/sh\necho '[\"0.32.0\", true]'\n")
    assert find_vllm(Path("bin/python")) == VllmPython(tmp_path / "bin" / "python", "0.32.0", is_cpu=True)
    assert find_generator("bin/aiperf") == (str(tmp_path / "bin" / "aiperf"),)
    assert find_generator("bin/python")[0] == str(tmp_path / "bin" / "python")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--generator", "no-such-program"], "--generator 'no-such-program' does not run"),
        (["--generator", "true", "--arm", "a=http://127.0.0.1:1", "--ratio", "1"], "--ratio throttles the drive"),
        (["--generator", "true", "--arm", "a=http://127.0.0.1:1", "--load", "1"], "--load needs a server that is"),
        (["--generator", "true", "--preset", "single-shot", "--load", "1"], "its sizes are fixed"),
        (["--generator", "true", "--trace", "t.jsonl", "--load", "2"], "leave out --load"),
        (["--generator", "true", "--arm", "lmcache", "--lmcache", "nowhere"], "--lmcache nowhere: "),
        (["--generator", "true", "--no-limits", "--ratio", "1"], "--ratio needs a control group"),
        (
            ["--generator", "true", "--preset", "other"],
            "--preset other is unknown; allowed: dell, samsung, agent, single-shot",
        ),
        (["--generator", "true", "--preset", "single-shot", "--users", "3"], "its sizes are fixed"),
        (["--generator", "true", "--set", "planner.enabled=perhaps"], "allowed: true or false"),
        (["--generator", "true", "--set", "planner.enabled=no", "--arm", "none"], "add --arm kvtier"),
        (["--generator", "true", "--history", "40000"], "Multiply lengths by"),
        (["--generator", "true", "--trace", "t.jsonl", "--rate", "2"], "leave out --rate"),
        (["--generator", "true", "--trace", "no-such-trace.jsonl"], "no-such-trace.jsonl"),
        (["--generator", "true", "--device-kv", "1MiB"], "give at least that"),
        (["--generator", "true", "--store", "1000TiB"], "use less, or another --dir"),
        (["--generator", "true", "--arm", "a=http://127.0.0.1:1"], "does not answer"),
        (["--generator", "true", "--arm", "none", "--arm", "a=http://127.0.0.1:1"], "does not answer"),
        (["--generator", "true", "--set", "store.secret=" + "ab" * 32], "a secret is never printed"),
    ],
)
def test_a_wrong_option_is_refused_before_a_server_starts(
    options: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    found = VllmPython(Path("python"), "1", is_cpu=True)
    monkeypatch.setattr("kvtier.tools.bench.serve.server.find_vllm", lambda _given: found)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--dir", str(tmp_path), *options])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not any(tmp_path.iterdir())


def test_the_client_is_pinned_for_the_runs_only():
    before = os.sched_getaffinity(0)
    with pinned([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
