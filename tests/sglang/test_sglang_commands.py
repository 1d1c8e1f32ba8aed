"""`kvtier sglang` with the real SGLang: its flags attach the backend, and the doctor names what SGLang decides."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from engines import PAGE, checkpoint, engine, equal, published
from server import PLACE, command, environment, flags, printed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import prepare_server_args

PROMPT = range(8 * PAGE)
SMALL_PAGES = ("--page-size", PAGE)


def doctor(*arguments: object) -> dict[str, dict[str, str]]:
    """What `kvtier doctor sglang` finds: level and text of each subject, by subject."""
    done = command("doctor", "sglang", "--timeout", 250, "--json", *arguments)
    result = json.loads(done.stdout)
    assert done.returncode == int(not result["ok"]), done.stderr
    found: dict[str, dict[str, str]] = {}
    for finding in result["findings"]:
        found.setdefault(finding["level"], {})[finding["about"]] = finding["found"]
    return found


@pytest.mark.parametrize("is_file", [False, True])
def test_the_printed_flags_attach_the_backend(model: Path, server: None, tmp_path: Path, *, is_file: bool) -> None:
    """SGLang parses them itself, and its controller stores and finds pages with what it parsed."""
    given = flags(tmp_path / "kv", *SMALL_PAGES)
    if is_file:
        file = tmp_path / "kv.json"
        given = shlex.split(printed(*SMALL_PAGES, "--file", str(file)))
        assert given[-1] == f"@{file}"
        file.write_text(file.read_text().replace(PLACE, str(tmp_path / "kv")))
    args = prepare_server_args(["--model-path", str(model), *given])
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
    flagged = flags(root, *SMALL_PAGES)
    for name, content in (("one", b"weights"), ("two", b"others")):
        folder = checkpoint(tmp_path / name, content)
        given = ("--model-path", folder, *flagged)
        with published(folder), engine({"tiers": [f"directory:{root}"]}) as made:
            assert made.backup(PROMPT)[0] == len(PROMPT)
        found = doctor("--prompt-tokens", 256, "--", *given)
        assert "error" not in found
        if name == "one":
            assert "warning" not in found
            assert found["fine"][str(root)].startswith("8 objects")
            other = doctor("--", *given, "--page-size", 2 * PAGE)
            assert other["error"] == {str(root): f"holds pages of {PAGE} tokens; --page-size is {2 * PAGE}"}
    assert "holds KV of 2 models" in found["warning"][str(root)]
    assert "differs in: weights is" in found["warning"][str(root)]


@pytest.mark.parametrize("compiler", ["c++", "/no/compiler"])
def test_a_compiler_that_sglang_lacks_is_one_error_at_the_start(tmp_path: Path, compiler: str) -> None:
    program = "import logging; from kvtier.connect.sglang import storage; logging.basicConfig(level='ERROR')"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; storage.check_page_hash()"],
        env=environment() | {"CXX": compiler, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:kvtier")]
    assert list(tmp_path.iterdir()) == [], "torch's folder is left alone, with its lock"
    if compiler == "c++":
        assert lines == []
    else:
        assert len(lines) == 1
        assert "/no/compiler: [Errno 2] No such file" in lines[0]
        assert "install a C++ compiler" in lines[0]


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
    found = doctor("--", "--model-path", model, *flags(tmp_path / "kv", *SMALL_PAGES), *further)
    texts = {about: text for level in ("error", "warning", "note") for about, text in found.get(level, {}).items()}
    assert {about: text for about, text in expected.items() if text not in texts.get(about, "")} == {}
    wrong = {*found["error"], *found.get("warning", {})}
    assert wrong == expected.keys() - {"memory layout"}
