"""`kvtier sglang` with the real SGLang: its flags attach the backend, and the doctor names what SGLang decides."""

import functools
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from engines import PAGE, checkpoint, engine, equal, published
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level

PROMPT = range(8 * PAGE)
KEY = "the-admin-key"
PLACE = "/PLACE"
"""Stands for the store in flags that are printed once."""


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A run of `kvtier sglang`."""
    words = [sys.executable, "-m", "kvtier.cli.main", "sglang", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def _printed(*further: str) -> str:
    done = command("config", "--tier", f"directory:{PLACE}?capacity_bytes=1GiB", "--page-size", PAGE, *further)
    notes = [line for line in done.stderr.splitlines() if not line.startswith("Written: ")]
    assert (done.returncode, notes) == (0, [])
    return done.stdout


def flags(root: Path) -> list[str]:
    """What `kvtier sglang config` prints for a store at `root`, as words. SGLang is asked once for all."""
    return shlex.split(_printed().replace(PLACE, str(root)))


def doctor(*arguments: object) -> dict[str, dict[str, str]]:
    """What `kvtier sglang doctor` finds: level and text of each subject, by subject."""
    done = command("doctor", "--json", *arguments)
    result = json.loads(done.stdout)
    assert done.returncode == int(not result["ok"]), done.stderr
    found: dict[str, dict[str, str]] = {}
    for finding in result["findings"]:
        found.setdefault(finding["level"], {})[finding["about"]] = finding["found"]
    return found


@pytest.mark.parametrize("is_file", [False, True])
def test_the_printed_flags_attach_the_backend(model: Path, server: None, tmp_path: Path, *, is_file: bool) -> None:
    """SGLang parses them itself, and its controller stores and finds pages with what it parsed."""
    printed = flags(tmp_path / "kv")
    if is_file:
        file = tmp_path / "kv.json"
        printed = shlex.split(_printed("--file", str(file)))
        assert printed[-1] == f"@{file}"
        file.write_text(file.read_text().replace(PLACE, str(tmp_path / "kv")))
    args = prepare_server_args(["--model-path", str(model), *printed])
    assert (args.enable_hierarchical_cache, args.page_size, args.hicache_storage_backend) == (True, PAGE, "dynamic")
    parsed = HybridCacheController.parse_storage_backend_extra_config(args.hicache_storage_backend_extra_config)
    with engine(parsed[0], backend=args.hicache_storage_backend) as made:
        assert isinstance(made.controller, HiCacheController)
        stored, pages = made.backup(PROMPT)
        found = made.prefetch(PROMPT)
    assert (stored, found.completed) == (len(PROMPT), len(PROMPT))
    assert equal(found.pages, pages)


def test_the_doctor_finds_what_the_engine_has_stored(tmp_path: Path) -> None:
    """A healthy server; another page size; another model in the same store."""
    root = tmp_path / "kv"
    printed = flags(root)
    for name, content in (("one", b"weights"), ("two", b"others")):
        folder = checkpoint(tmp_path / name, content)
        given = ("--model-path", folder, *printed)
        with published(folder), engine({"tiers": [f"directory:{root}"]}) as made:
            assert made.backup(PROMPT)[0] == len(PROMPT)
        found = doctor("--prompt-tokens", 256, "--", *given)
        assert "error" not in found
        if name == "one":
            assert "warning" not in found
            assert found["fine"][str(root)].startswith("8 objects")
            other = doctor("--", *given, "--page-size", 2 * PAGE)
            assert other["error"] == {str(root): f"holds pages of {PAGE} tokens; --page-size is {2 * PAGE}"}
    assert "holds KV of 2 fingerprints" in found["warning"][str(root)]
    assert "differs in: weights is" in found["warning"][str(root)]


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        (
            ["--hicache-io-backend", "direct", "--hicache-write-policy", "write_back", "--load-format", "dummy"],
            {
                "memory layout": "changes page_first to page_first_direct",
                "write policy": "without an eviction nothing is stored",
                "model": "random",
            },
        ),
        (
            ["--hicache-storage-backend", "file", "--page-size", "1"],
            {"storage backend": "is 'file'", "--page-size": "1: each page is an object"},
        ),
        (["--hicache-io-backend", "dirct"], {"flags": "invalid choice: 'dirct'"}),
    ],
)
def test_sglangs_own_rules_decide(model: Path, tmp_path: Path, further: list[str], expected: dict[str, str]) -> None:
    """Flags that SGLang takes, changes or refuses."""
    found = doctor("--", "--model-path", model, *flags(tmp_path / "kv"), *further)
    texts = {about: text for level in ("error", "warning", "note") for about, text in found.get(level, {}).items()}
    assert {about: text for about, text in expected.items() if text not in texts.get(about, "")} == {}
    wrong = {*found["error"], *found.get("warning", {})}
    assert wrong == expected.keys() - {"memory layout"}


# ---- a running server ------------------------------------------------------------------------------------------------


@contextmanager
def served(args: ServerArgs, **now: object) -> Iterator[str]:
    """The routes that the doctor asks, below SGLang's own check of keys; a server itself needs a GPU.

    They answer with SGLang's own resolution of `args`, and with `now` for what was attached later.
    """
    app = FastAPI()
    resolved = args.resolved_dict()

    @app.get("/server_info")
    async def server_info() -> Any:
        return {**resolved, "version": "0.5.23", "internal_states": []}

    @app.get("/metrics")
    async def metrics() -> Any:
        return PlainTextResponse('# HELP x\nsglang:backuped_tokens_total{tp_rank="0"} 640.0\n')

    @app.get("/hicache/storage-backend")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def storage_backend() -> Any:
        if not args.admin_api_key:
            return JSONResponse({"error": "This endpoint requires admin API key"}, 400)
        names = ("backend", "backend_extra_config", "prefetch_policy")
        fields = [*(f"hicache_storage_{name}" for name in names), "hicache_write_policy"]
        return {name: resolved[name] for name in fields} | now

    add_api_key_middleware(app, api_key=args.api_key, admin_api_key=args.admin_api_key)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until_s = time.monotonic() + 60
    while not server.started and time.monotonic() < until_s:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


def test_a_running_server_is_asked(model: Path, tmp_path: Path) -> None:
    """With its key, its state and counters are known; a backend that was detached is an error."""
    printed = flags(tmp_path / "kv")
    keys = ["--admin-api-key", KEY, "--enable-metrics"]
    args = prepare_server_args(["--model-path", str(model), *printed, *keys])
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    with served(args) as url:
        found = doctor("--url", url, "--key-file", key_file)
        assert "error" not in found
        assert "warning" not in found
        assert found["fine"]["/hicache/storage-backend"] == "dynamic is attached"
        assert found["fine"]["counters"].startswith("640 tokens were written to the backend")
        assert "cannot be read" in doctor("--url", url)["note"]["/hicache/storage-backend"]
    with served(args, hicache_storage_backend=None) as url:
        found = doctor("--url", url, "--key-file", key_file)
        assert found["note"]["/hicache/storage-backend"] == "'dynamic' was replaced at run time by None"
        assert list(found["error"]) == ["storage backend"]


def test_a_server_that_refuses_is_named(model: Path, tmp_path: Path) -> None:
    """A wrong key is never repeated."""
    args = prepare_server_args(["--model-path", str(model), *flags(tmp_path / "kv"), "--api-key", KEY])
    key_file = tmp_path / "key"
    key_file.write_text("another-key")
    with served(args) as url:
        assert doctor("--url", url)["error"][url] == "refuses to answer without its key"
        found = doctor("--url", url, "--key-file", key_file)
    assert found["error"][url] == "refuses this key"
    assert "another-key" not in json.dumps(found)
