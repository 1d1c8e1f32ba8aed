"""`kvtier sglang` with the real SGLang: its flags attach the backend, and the doctor names what SGLang decides."""

import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from engines import PAGE, checkpoint, engine, equal, published
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import prepare_server_args

PROMPT = range(8 * PAGE)
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
