"""Checks of a figure: the convention that gives it is named, and none where none does."""

import json

import pytest

from kvtier.cli.main import run
from kvtier.config.value_types import parse_count
from kvtier.errors import ConfigError
from kvtier.report.format import decimal
from kvtier.tools import size
from kvtier.tools.size.printed_figure import check

SESSION, LONG = (4096, 1), (131_072, 1)


@pytest.mark.parametrize(
    ("name", "figure", "sessions", "parts"),
    [
        ("qwen3-8b", "150 KB", [], ["a token", "147,456 B", "KB = 1,000 B", "fewer digits"]),
        ("qwen3-8b", "144 KiB", [], ["a token", "KB = 1,024 B"]),
        ("qwen3-8b", "147,456 B", [], ["a token", "bytes"]),
        ("llama-3.1-8b", "128 KB", [], ["KB = 1,024 B"]),
        ("llama-3.1-8b", "512 KB", [], ["32 attention heads as KV heads"]),
        ("llama-3.1-8b", "64 KB", [], ["half as many bytes"]),
        ("qwen3-32b", "160 KB", [], ["hidden size / heads = 80"]),
        ("qwen3-32b", "1.31 MB", [], ["64 attention heads", "hidden size / heads = 80"]),
        ("deepseek-r1", "562 KB", [], ["the copies that 8 tensor-parallel ranks keep"]),
        ("deepseek-v3", "5 MB", [], ["every head's keys and values instead of the latent"]),
        ("llama-3.1-8b", "33 MB", [], ["a chunk of 256 tokens"]),
        ("llama-3.1-8b", "500 MB", [SESSION], ["4,000 tokens", "MB = 1,024^2 B"]),
        ("llama-3.1-8b", "15.6 GB", [LONG], ["128,000 tokens", "GB = 1,024^3 B"]),
        ("deepseek-r1", "286 MB", [SESSION], ["a token rounded to 70 kB before multiplying"]),
        ("llama-3.3-70b", "1,282 MB", [SESSION], ["a token rounded to 0.313 MiB"]),
        ("gpt-oss-120b", "9.2 GB", [LONG], ["units mixed"]),
        ("gpt-oss-20b", "3.22 GB", [LONG], ["minimum"]),
        ("qwen3.5-27b", "147 MiB", [], ["windows and states"]),
        ("llama-3.1-8b", "3.36 TB", [(10_000, 2500)], ["10,240 tokens"]),
    ],
)
def test_the_convention_is_named(name, figure, sessions, parts):
    verdict = check(size.of(name), figure, sessions)
    assert verdict.matches
    for part in parts:
        assert part in verdict.text


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("qwen3-8b", "77 MB"),
        ("qwen3-8b", "149 KB"),
        ("qwen3-8b", "145 KB"),
        ("gpt-oss-20b", "150 KB"),
        ("deepseek-v3", "4 MB"),
    ],
)
def test_no_convention_is_named_where_none_matches(name, figure):
    verdict = check(size.of(name), figure, [SESSION, LONG])
    assert not verdict.matches
    assert "no convention known here" in verdict.text


def test_no_convention_gives_a_wrong_published_cell():
    assert not check(size.of("gpt-oss-20b"), "6.2 GB", [LONG]).matches


def test_our_own_figure_needs_no_convention():
    for name in ("qwen3-8b", "deepseek-r1", "llama-3.1-405b"):
        kv = size.of(name)
        best = check(kv, decimal(kv.bytes_per_token)).matches[0]
        assert best.cost == 0
        assert best.steps == ()


def test_the_nearest_is_one_of_ours():
    verdict = check(size.of("qwen3-8b"), "151 MB", [LONG])
    assert not verdict.matches
    assert "4 times a chunk" in verdict.text


@pytest.mark.parametrize(
    ("arguments", "nothing"),
    [
        (("--tier", "disk=1kB", "--check", "5 tokens"), "no tokens fit into the tier"),
        (("--tier", "disk=1kB", "--check", "5 users"), "no users fit into the tier"),
    ],
)
def test_a_place_that_holds_nothing(capsys, arguments, nothing):
    first, *_ = answers(capsys, "llama-3.1-8b", *arguments)
    assert first == f"{arguments[-1]}: no convention known here gives it; {nothing}"


def test_a_model_that_keeps_no_kv():
    config = {
        "model_type": "nemotron-nas", "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64,
        "block_configs": [{"attention": {"no_op": True}}],
    }  # fmt: skip
    for sessions in ([], [SESSION]):
        found = check(size.of(size.from_config(config, "mine")), "150 KB", sessions)
        assert found.text == "150 KB: no convention known here gives it; mine keeps no KV"


@pytest.mark.parametrize(
    "text", ["", "150", "KB", "-3 KB", "150 parsecs", "0 KB", "1e3 KB", "9" * 40 + " KB", "1,5 GB", "1_50 KB"]
)
def test_a_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match=r"check: .*150 KB, 0\.33 GB or 144 KiB"):
        check(size.of("qwen3-8b"), text)


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("131,072", 131_072), ("128k", 128_000), ("128Ki", 131_072), ("1.5k", 1500)]
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1.5", "0.1k1", "1e9", "many", "1.0001k"])
def test_texts_that_are_not_counts(text):
    with pytest.raises(ValueError, match="not a whole number"):
        parse_count(text)


def answers(capsys, *arguments: str) -> list[str]:
    assert run(["size", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_answer_is_the_first_line(capsys):
    first, *others = answers(capsys, "qwen3-8b", "--check", "150 KB")
    assert first.startswith("150 KB is a token: 147,456 B (bf16, KB = 1,000 B, TP 1")
    assert all(line.startswith("  or ") for line in others)
    (none,) = answers(capsys, "qwen3-8b", "--check", "77 MB")
    assert none.startswith("77 MB: no convention known here gives it; it is 2.04 times a chunk")
    both = answers(capsys, "qwen3-8b", "--check", "150 KB", "--check", "77 MB")
    assert [line.split()[0] for line in both if not line.startswith("  or ")] == ["150", "77"]


@pytest.mark.parametrize(
    ("figure", "parts"),
    [
        # SDC 2025: 1 TB of DRAM holds 3M tokens of a 70B model; 10^12 / 327,680 are 3,051,757.
        ("3M tokens", ["what fits into the tier", "3,051,264 tokens"]),
        ("3,051,757 tokens", ["the bytes of the tier / a token: 3,051,757 tokens"]),
        ("3.36M tokens", ["1,024 for 1,000 in the bytes of the tier", "3,355,443"]),
        ("6.1M tokens", ["half as many bytes"]),
        ("23 users", ["what fits into the tier in sessions of 131,072 tokens: 23 users"]),
        ("25 sessions", ["1,024 for 1,000 in the bytes of the tier"]),
        ("46 users", ["half as many bytes"]),
    ],
)
def test_tokens_and_users_are_those_that_a_tier_holds(capsys, figure, parts):
    first, *_ = answers(capsys, "llama-3.3-70b", "--tier", "disk=1TB", "--tokens", "128Ki", "--check", figure)
    assert all(part in first for part in parts), first


def test_users_of_gpus_and_figures_that_nothing_holds(capsys):
    first, *_ = answers(
        capsys, "gemma-4-31b", "--gpu", "h200-sxm", "--in-flight", "8192", "--tokens", "256Ki", "--check", "2 users"
    )
    assert first.startswith("2 users is what fits into the GPUs in sessions of 262,144 tokens")
    none, *_ = answers(capsys, "llama-3.3-70b", "--tier", "disk=1TB", "--tokens", "128Ki", "--check", "29 users")
    assert "no convention known here gives it; it is 1.26 times what fits into the tier" in none
    assert run(["size", "llama-3.3-70b", "--check", "12 users"]) == 2
    assert "'12 users' counts users; --gpu, --memory or --tier must say what holds them" in capsys.readouterr().err


def test_the_document_of_checks(capsys):
    assert run(["size", "qwen3-8b", "--check", "150 KB", "--check", "77 MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "qwen3-8b"
    assert [(each["figure"], each["is_explained"]) for each in found["checks"]] == [("150 KB", True), ("77 MB", False)]
