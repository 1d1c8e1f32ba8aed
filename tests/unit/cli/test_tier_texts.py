"""`--tier` has one form: each text of the documents is accepted by each command, or what it lacks is named."""

import json
import re
from pathlib import Path

import pytest

from kvtier.bench.io_workloads import trial_settings
from kvtier.cli.engine_settings import server_settings
from kvtier.cli.main import run
from kvtier.config import tier_list
from kvtier.config.loader import Loaded, load
from kvtier.config.tier_list import SettingOrigin, describe
from kvtier.errors import ConfigError
from kvtier.plan.read_inputs import load as load_inputs
from kvtier.plan.read_inputs import tier_options
from kvtier.replay.tier_spec import parse_tier
from kvtier.size.capacity import WEIGHT_BYTES

TOP = Path(__file__).parents[3]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
FLAG = re.compile(r"--tier[ =]['\"]?([^\s'\"`)]+)")
TEXTS = sorted({text for page in PAGES for text in FLAG.findall(page.read_text()) if "…" not in text})


def served(*texts: str) -> Loaded:
    return load(environ={}, flags=["store.secret_file=/secret"], tiers=texts)


def refusal(act) -> str:
    """Why `act` is refused; empty: it is not."""
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_the_documents_means_the_same_in_every_command(text, tmp_path):
    pytest.importorskip("obstore")
    parts = tier_list._cut(text, SettingOrigin("flag", "--tier"))
    kind = None if parts.kind == "host" else tier_list.kind_of(text, "--tier")
    missing = "" if parts.where or kind is None else f"missing; a {kind.name} tier needs it"
    assert missing in (found := refusal(lambda: served(text)))
    assert bool(missing) == bool(found)

    has_capacity = kind is None or kind.has_cap or any(word.startswith("capacity=") for word in parts.words)
    for act in (lambda: parse_tier(text), lambda: load_inputs(options=tier_options([text]))):
        assert refusal(act) == "" if has_capacity else "no capacity; allowed: such as" in refusal(act)
    if kind is not None and kind.open_trial is not None:
        assert trial_settings(text, tmp_path).kind == kind.name


def test_what_describes_the_hardware_changes_no_server():
    plain, described = (served(f"disk:/kv?capacity=4TiB{more}") for more in ("", "&read=12GB/s&latency=1ms&drives=4xa"))
    assert plain.config == described.config
    with_host = served("disk:/kv", "host=64GiB")
    assert (with_host.config.host.capacity_bytes, len(with_host.config.tiers)) == (64 << 30, 1)
    assert str(with_host.origins["host.capacity_bytes"]) == "flag --tier"
    assert refusal(lambda: served("host=1GiB", "host=2GiB")).endswith("host memory is given twice; allowed: once")


def test_figures_of_a_text_are_those_of_the_whole_tier():
    drives = tier_options(["disk=4xpm1753?read=40GB/s", "host=1TiB?read=100GB/s"])
    assert (drives["disk.count"], drives["disk.read_bytes_per_s"]) == (4, 10e9)
    assert (drives["host.channels"], drives["host.channel_bytes_per_s"]) == (1, 10**11)
    assert parse_tier("disk=4xpm1753?read=40GB/s").read_bytes_per_s == 40e9
    assert describe("s3=4PiB", SettingOrigin("", "--tier")).capacity_bytes == 4 << 50


COMMANDS = [
    ["size", "llama-3.1-8b"],
    ["plan", "llama-3.1-8b"],
    ["replay", "nothing.jsonl"],
    ["probe"],
    *(["config", it] for it in ("show", "check")),
    *([engine, "config"] for engine in ("vllm", "sglang")),
]


@pytest.mark.parametrize("text", ["disk=4TiB,read=12GB/s", "pool=40TiB,shared", "10TB"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_another_form_is_refused_with_the_form_of_all_commands(command, text, capsys):
    assert run([*command, "--tier", text]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"tier '{text}' (from " in told
    assert "not of the form [NAME=]KIND[:WHERE][?key=value&key=value], or KIND=SIZE[?key=value&key=value]" in told


@pytest.mark.parametrize("command", [["size"], ["plan"], ["replay", "run", "trace.jsonl"]], ids=" ".join)
def test_two_kinds_of_gpu_are_refused(command, capsys):
    assert run([*command, "llama-3.1-8b", "--gpu", "h100-sxm", "--gpu", "2xh200-sxm"]) == 2
    assert "h100-sxm and 2xh200-sxm are given; allowed: one kind of GPU" in capsys.readouterr().err


def held_by(command: str, weights: str, capsys) -> float:
    """Bytes of the weights that a command computes with; 0: it refuses them, and names the forms."""
    code = run([command, "llama-3.1-8b", "--gpu", "8xh100-sxm", "--weights", weights, "--json"])
    out, err = capsys.readouterr()
    if code:
        assert f"--weights {weights!r}: neither a size nor one of bf16, fp16, fp8, fp4" in err
        return 0.0
    found = json.loads(out)
    if command == "size":
        return found["gpu"]["weight_bytes"]
    inputs = {name: found["inputs"][f"model.{name}"]["value"] for name in ("parameters", "weights")}
    return inputs["parameters"] * WEIGHT_BYTES[inputs["weights"]]


@pytest.mark.parametrize("weights", [*WEIGHT_BYTES, "5GB", "int4"])
def test_weights_have_the_same_forms_in_size_and_plan(weights, capsys):
    assert held_by("size", weights, capsys) == pytest.approx(held_by("plan", weights, capsys), rel=1e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "llama-3.1-8b", "--tier", "s3:bkt?capacity=1TB&latency=3ms&secret_access_key=Sesame"),
        ("size", "llama-3.1-8b", "--tier", "s3:bkt?drives=4xbogus&secret_access_key=Sesame"),
        ("replay", "trace", "--tier", "s3:bkt?drives=4xbogus&secret_access_key=Sesame"),
        ("bench", "io", "--tier", "valkey:h?password=Sesame&nonsense=1"),
        ("config", "show", "--tier", "s3:bkt?access_key_id=A&secret_access_key=x&latency=Sesame"),
        ("config", "show", "--tier", "s3:bkt?access_key_id=A&secret_access_key=x&read=4GB/s&nonsense=Sesame"),
    ],
)
def test_no_error_shows_a_secret_or_what_may_be_its_rest(capsys, arguments):
    assert run([*arguments]) == 2
    shown = "".join(capsys.readouterr())
    assert shown.startswith("kvtier: ")
    assert "Sesame" not in shown


def test_the_doctors_keep_the_engines_tiers_beside_host_memory_of_their_own():
    extra = {"tiers": [{"kind": "disk", "path": "/x"}], "host": {"capacity_bytes": 1 << 30}}
    seen = server_settings(("host=3GiB",), extra, "extra")
    assert [tier.kind for tier in seen.config.tiers] == ["disk"]
    assert (seen.config.host.capacity_bytes, seen.origins["host.capacity_bytes"].layer) == (3 << 30, "flag")
    assert [it.kind for it in server_settings(("directory:/y",), extra, "extra").config.tiers] == ["directory"]
    named = server_settings((), {"tiers": ["host=3GiB", "disk:/x"]}, "extra")
    assert (named.config.host.capacity_bytes, str(named.origins["host.capacity_bytes"])) == (3 << 30, "flag extra")


@pytest.mark.parametrize("arguments", [("--weights", "0"), ("--tier", "disk=0?read=1GB/s")])
def test_figures_that_would_do_nothing_are_refused(capsys, arguments):
    assert run(["plan", "llama-3.1-8b", *arguments]) == 2
    assert arguments[1].partition("?")[0] in capsys.readouterr().err
