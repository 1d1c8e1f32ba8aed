"""`kvtier size`: the JSON contract, the text, and exit code 2 with one line for an error."""

import json
import re

import pytest

from kvtier.cli.main import run

CONTRACT = {
    "model", "layers", "bytes_per_token", "bytes_per_token_growing", "bytes_per_session_constant", "tp",
    "bytes_per_token_stored", "chunk_bytes_per_rank", "totals",
}  # fmt: skip


def output(capsys, *arguments: str) -> dict:
    assert run(["size", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_contract(capsys):
    found = output(
        capsys, "llama-3.3-70b", "--tokens", "10000", "--tokens", "100000", "--users", "1", "--users", "1000"
    )
    assert set(found) >= CONTRACT
    (layer,) = found["layers"]
    assert {key: layer[key] for key in ("kind", "count", "kv_heads", "head_dim", "window")} == {
        "kind": "full", "count": 80, "kv_heads": 8, "head_dim": 128, "window": None,
    }  # fmt: skip
    assert "2 x KV heads x head dim" in layer["formula"]
    assert "80 layers x 2 x 8 x 128 x 2 B" in layer["formula"]
    assert found["bytes_per_token"] == found["bytes_per_token_growing"] == found["bytes_per_token_stored"] == 327_680
    assert (found["bytes_per_session_constant"], found["tp"], found["chunk_bytes_per_rank"]) == (0, 1, 83_886_080)
    assert [(each["tokens"], each["users"], each["bytes"], each["bytes_minimum"]) for each in found["totals"]] == [
        (10_000, 1, 3_276_800_000, 3_276_800_000),
        (10_000, 1000, 3_276_800_000_000, 3_276_800_000_000),
        (100_000, 1, 32_768_000_000, 32_768_000_000),
        (100_000, 1000, 32_768_000_000_000, 32_768_000_000_000),
    ]


def test_whole_numbers_are_whole(capsys):
    assert run(["size", "gpt-oss-20b", "--json"]) == 0
    assert ".0" not in capsys.readouterr().out.replace("gpt-oss", "")


def test_ranks_and_formats(capsys):
    copies = output(capsys, "deepseek-r1", "--tp", "8", "--dtype", "fp8_ds_mla")
    assert (copies["bytes_per_token"], copies["bytes_per_token_stored"]) == (40_016, 8 * 40_016)


def test_the_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["size", "deepseek-v3.2", "--tp", "8"]) == 0
    page = capsys.readouterr().out
    for part in (
        "deepseek-ai/DeepSeek-V3.2",
        "85.89 kB  83.88 KiB",
        "61 layers x (512 x 2 B + 64 x 2 B)",
        "kv_lora_rank",
    ):
        assert part in page
    assert max(len(line) for line in page.splitlines()) <= 100


def test_an_ignored_field_is_named_in_the_answer(capsys, tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 64, "kv_source_layers": [0, 0],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["size", str(tmp_path)]) == 2
    assert "'kv_source_layers'; these fields may change what is cached; --ignore FIELD" in capsys.readouterr().err
    for more in ([], ["--check", "2 KiB"]):
        assert run(["size", str(tmp_path), "--ignore", "kv_source_layers", *more]) == 0
        page = " ".join(capsys.readouterr().out.split())
        assert more or ", ignoring kv_source_layers" in page
        assert "Ignored as requested (--ignore): kv_source_layers = [0, 0]. If they change what is cached" in page
    assert output(capsys, str(tmp_path), "--ignore", "kv_source_layers")["ignored"] == {"kv_source_layers": [0, 0]}
    plan = ["plan", str(tmp_path), "--set", "model.parameters=1e9"]
    assert run(plan) == 2
    assert "--ignore FIELD" in capsys.readouterr().err
    assert run([*plan, "--ignore", "kv_source_layers"]) == 0
    assert "kv_source_layers, as requested: if they change what is cached" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("given", [["--ignore", "kv_a", "--ignore", "kv_b"], ["--ignore", "kv_a, kv_b"]])
@pytest.mark.parametrize("command", [["size"], ["plan", "--set", "model.parameters=1e9"]], ids=lambda it: it[0])
def test_fields_to_ignore_are_repeated_or_stand_between_commas(command, given, capsys, tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 64, "kv_a": 1, "kv_b": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run([*command, str(tmp_path), *given]) == 0
    assert "kv_a, kv_b" in capsys.readouterr().out
    assert run([*command, str(tmp_path), "--ignore", "kv_a"]) == 2
    assert "'kv_b'" in capsys.readouterr().err


def test_the_list(capsys):
    assert run(["size", "--list"]) == 0
    assert "qwen3.5-27b" in capsys.readouterr().out
    assert len(output(capsys, "--list")["models"]) >= 40


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "name a MODEL"),
        (["llama-3.1-9b"], "nearest names are llama-3.1-8b"),
        (["nowhere/below/config.json"], "no such file or folder"),
        (["qwen3-8b", "--tp", "5"], "tp: 5 ranks cannot share the 32 attention heads"),
        (["qwen3-8b", "--tp", "-1"], "'--tp': -1 is not in the range"),
        (["qwen3-8b", "--tp", "0"], "'--tp': 0 is not in the range x>=1"),
        (["qwen3-8b", "--tp", "0", "--memory", "80GB"], "'--tp': 0 is not in the range x>=1"),
        (["qwen3-8b", "--gpu", "8xh100-sxm", "--tp", "0"], "'--tp': 0 is not in the range x>=1"),
        (["qwen3-8b", "--gpu", "8xh100-sxm", "--pp", "0"], "'--pp': 0 is not in the range x>=1"),
        (["qwen3-8b", "--pp", "37"], "pp: 37 is not allowed"),
        (["qwen3-8b", "--dtype", "fp7"], "unknown format 'fp7'"),
        (["qwen3-8b", "--tokens", "-5"], "'--tokens': -5 is not in the range"),
        (["qwen3-8b", "--tokens", "0"], "'--tokens': 0 is not in the range x>=1"),
        (["qwen3-8b", "--tokens", "9999999999999"], "tokens: 9999999999999 is not allowed"),
        (["qwen3-8b", "--users", "many"], "'many' is not a whole number"),
        (["qwen3-8b", "--users", "0"], "'--users': 0 is not in the range x>=1"),
        (["qwen3-8b", "--chunk-tokens", "0"], "'--chunk-tokens': 0 is not in the range x>=1"),
        (["qwen3-8b", "--list"], "--list is given with model; allowed: --list alone, or with --json"),
        (["--list", "--tier", "disk=1TB", "--tokens", "1k"], "--list is given with --tokens, --tier; allowed"),
        (["qwen3-8b", "--tier", "disk=1TB", "--tier", "host=1TB"], "disk=1TB and host=1TB are given; give one"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(capsys, arguments, named):
    assert run(["size", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err
    assert "Traceback" not in err


def test_the_help_allows_no_number_that_is_refused(capsys):
    """It allowed 0 tokens, users, ranks and stages."""
    assert run(["size", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("x>=0]") == 1  # --in-flight
    assert text.count("x>=1]") == 5
    assert run(["size", "gemma-3-27b", "--gpu", "h100-sxm", "--in-flight", "0"]) == 0


def test_a_tier_of_drives_says_that_it_fills_a_part_of_them(capsys):
    """Four drives of 2.5 TB were "a tier of 9 TB" without a word, and disk=10TB one of 10 TB."""
    shown: list[str] = []
    for tier in ("disk=10TB", "disk=4x2.5TB", "disk?drives=10TB", "s3=10TB", "disk=4xpm1753"):
        assert run(["size", "qwen3-8b", "--tier", tier]) == 0
        shown += re.findall("a tier of .*", capsys.readouterr().out)
    drives = ", 90% of the drives"
    assert shown == [
        f"a tier of {it}" for it in ("10 TB", f"9 TB{drives}", f"9 TB{drives}", "10 TB", f"55.3 TB{drives}")
    ]
