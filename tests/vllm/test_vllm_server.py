"""The way of the guide: `kvtier vllm config`, vLLM's OpenAI server, a restart, and what its metrics say."""

import itertools
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engines import LONG, SHORT, Start
from harness import EngineError
from server import SIZES, Server
from settings import connector, whole

pytestmark = pytest.mark.engine

NUMBERS = itertools.count(1)
HITS = "vllm:external_prefix_cache_hits_total"
SOURCES = "vllm:prompt_tokens_cached_by_source_total"


def among_others(ours: dict[str, Any]) -> dict[str, Any]:
    """kvtier below vLLM's `MultiConnector`, as a user of several connectors writes it."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours]},
    }


def config(*arguments: str) -> str:
    """What `kvtier vllm config` prints."""
    command = [sys.executable, "-m", "kvtier.cli.main", "vllm", "config", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


@pytest.mark.parametrize("is_one_of_several", [pytest.param(False, marks=pytest.mark.vllm_core), True])
def test_the_server_streams_restarts_and_hits(
    is_one_of_several: bool, checkpoints: Path, start: Start, tmp_path: Path
) -> None:
    plain, arguments = start("llama").ask_in_turn(LONG, SHORT, count=16), SIZES
    if is_one_of_several:
        tier = ("--tier", f"directory:{tmp_path}/kv", "--set", "host.capacity_bytes=64MiB")
        given = json.dumps(among_others(json.loads(config(*tier, "--set", "planner.enabled=false"))))
    else:  # as a user of LMCache comes
        disk = f"local_cpu: false\nmax_local_cpu_size: 0.0625\nlocal_disk: file://{tmp_path}\nmax_local_disk_size: 1\n"
        (tmp_path / "lmcache.yaml").write_text(disk)
        given = config("--from-lmcache", f"{tmp_path}/lmcache.yaml", "--set", "planner.enabled=false")
        arguments = (*SIZES, "--shutdown-timeout", "60")  # `disk` syncs once a second
    for turn in range(2):
        with Server(checkpoints / "llama", tmp_path / f"server{turn}.log", given, *arguments) as server:
            found = [server.complete(tokens, 16) for tokens in (LONG, SHORT)]
            assert found == [it.tokens for it in plain]
            both = whole(len(LONG)) + whole(len(SHORT))
            assert server.total(HITS) == turn * both
            sources = {name: value for name, value in server.metrics().items() if name.startswith(SOURCES) and value}
            assert list(sources.values()) == turn * [both]
            assert all('source="disk"' in name for name in sources)
            found = "vllm:kvtier_load_tokens_total" if turn else "vllm:kvtier_store_chunks_total"
            until_s = time.monotonic() + 120
            while not server.total(found):
                assert time.monotonic() < until_s, "\n".join(name for name in server.metrics() if "kvtier" in name)
                server.complete([5], 1)  # counts travel with steps
                time.sleep(0.2)
            assert "EngineDeadError" not in server.printed()


@pytest.mark.vllm_core
def test_the_configuration_is_checked_without_importing_vllm() -> None:
    found = "import sys; from kvtier.cli.main import run; run(['vllm', 'config']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, timeout=300, check=True)
    assert '"kv_role": "kv_both"' in done.stdout
    assert not {"vllm", "torch", "transformers"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runner", "pooling"), "runner 'pooling' is not supported: a pooling model's requests leave no reusable"),
        (
            ("--speculative-config", '{"method": "draft_model", "model": "MODEL", "num_speculative_tokens": 2}'),
            "speculative decoding with 'draft_model' is not supported",
        ),
    ],
)
def test_what_is_refused_is_refused_before_the_weights_are_loaded(
    arguments: tuple[str, str], message: str, checkpoints: Path, tmp_path: Path
) -> None:
    model = checkpoints / "llama"
    given = [each.replace("MODEL", str(model)) for each in arguments]
    with (
        pytest.raises(EngineError, match="the server has ended"),
        Server(model, tmp_path / "server.log", config(), "--dtype", "float32", "--max-model-len", "4096", *given),
    ):
        pass
    printed = (tmp_path / "server.log").read_text()
    assert message in printed
    assert "Loading weights" not in printed
    assert "EngineCore" not in printed, "nothing but the server's own process was started"


def line(level: str, text: str) -> re.Pattern[str]:
    """A line of kvtier as vLLM writes its own: process, level, time and file."""
    return re.compile(rf"pid=\d+\) {level} \d\d-\d\d \d\d:\d\d:\d\d \[\S+\.py:\d+\] .*{text}")


def until_printed(server: Server, pattern: re.Pattern[str], since: int = 0) -> None:
    """Ask different prompts, so that there is something to write, until the log has such a line."""
    until_s = time.monotonic() + 120
    while not pattern.search(server.printed()[since:]):
        found = [each for each in server.printed()[since:].splitlines() if "kvtier/" in each]
        assert time.monotonic() < until_s, f"no line like {pattern.pattern}\n" + "\n".join(found)
        server.complete([*divmod(next(NUMBERS), 100), *LONG[:300]], 1)
        time.sleep(0.2)


def remount(where: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(where)], check=True)


def test_the_log_says_what_the_guide_promises(checkpoints: Path, small_disk: Path, tmp_path: Path) -> None:
    limits = (
        "tiers.directory.failures=1",
        "tiers.directory.retry_s=0.2",
        "host.capacity_bytes=64MiB",
        "log.level=info",
    )
    given = json.loads(
        config("--tier", f"directory:{small_disk}/kv", *(part for it in limits for part in ("--set", it)))
    )
    given |= {"kv_load_failure_policy": "fail"}
    remount(small_disk, "ro")
    with Server(checkpoints / "llama", tmp_path / "server.log", json.dumps(given), *SIZES) as server:
        # The engine has done nothing yet.
        for name in ('kvtier_capacity_bytes{engine="0",model_name="m",place="host"}', "kvtier_tier_up{"):
            assert any(each.startswith(f"vllm:{name}") for each in server.metrics()), sorted(server.metrics())
        found = server.printed()
        for pattern in (
            line("INFO", "kvtier is ready: chunks of 256 tokens"),
            line("INFO", "weights of .* were digested"),
            line("WARNING", "kv_load_failure_policy is 'fail'"),
            line("WARNING", "Read-only file system.*kvtier starts without this tier"),
            line("WARNING", "kvtier uses a temporary secret"),
        ):
            assert pattern.search(found), f"no line like {pattern.pattern}\n{found}"
        remount(small_disk, "rw")
        until_printed(server, line("INFO", "tier directory is open now"))
        server.complete(SHORT, 1, kv_transfer_params={"session": "s", "next_turn": "sometime"})
        until_printed(server, line("WARNING", "next_turn = 'sometime'; allowed: "))
        until_printed(server, line("INFO", "tier directory writes succeed again"))
        # Longer files cannot be written: chunks, while the log is short.
        (worker,) = {int(pid) for pid in re.findall(r"\(Worker pid=(\d+)\)", server.printed())}
        before = resource.prlimit(worker, resource.RLIMIT_FSIZE, (128 << 10, resource.RLIM_INFINITY))
        until_printed(server, line("WARNING", "tier directory writes failed"))
        since = len(server.printed())
        resource.prlimit(worker, resource.RLIMIT_FSIZE, before)
        until_printed(server, line("INFO", "tier directory writes succeed again"), since)
        assert "Traceback" not in server.printed()


@pytest.mark.parametrize("is_killed", [False, True])
def test_at_shutdown_the_store_is_closed_within_the_timeout(checkpoints: Path, is_killed: bool, tmp_path: Path) -> None:
    """A store writes its index when it is closed. The control is a server that is killed after its answer."""
    given, index = json.dumps(connector(tmp_path / "kv")), tmp_path / "kv" / "index"
    with Server(checkpoints / "llama", tmp_path / "server.log", given, *SIZES, "--shutdown-timeout", "30") as server:
        server.complete(SHORT, 16)
        if is_killed:
            server.kill()
    assert index.exists() == (not is_killed)


@pytest.mark.vllm_core
def test_the_log_says_why_there_are_no_hits_after_a_mistake_of_ours(start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"), sabotage="sabotage:fail_lookups")
    wanted = engine.ask(SHORT)[0].tokens
    assert len(wanted) == 8
    assert line("ERROR", "kvtier has failed and is off until a restart").search(engine.printed())
    assert engine.printed().count("RuntimeError: a mistake of ours") == 1
