"""`--tier` has one form: each text of the documents is accepted by each command, or what it lacks is named."""

import json
import re
from pathlib import Path

import pytest

from kvtier.cli.engine_settings import server_settings
from kvtier.cli.main import run
from kvtier.config import tier_list
from kvtier.config.loader import Loaded, load
from kvtier.config.tier_list import SettingOrigin, describe
from kvtier.errors import ConfigError
from kvtier.tools.bench.io_harness import trial_settings
from kvtier.tools.plan.read_inputs import load as load_inputs
from kvtier.tools.plan.read_inputs import tier_options
from kvtier.tools.replay.tier_spec import parse_tier
from kvtier.tools.size.sizes import WEIGHT_BYTES

TOP = Path(__file__).parents[3]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
FLAG = re.compile(r"--tier[ =]['\"]?([^\s'\"`)]+)")
TEXTS = sorted({text for page in PAGES for text in FLAG.findall(page.read_text()) if "…" not in text})
TEXTS = [text.replace("$PWD", "/work") for text in TEXTS]  # as the shell does


def served(*texts: str) -> Loaded:
    return load(environ={}, flags=["store.secret_file=/secret"], tiers=texts)


def refused(act) -> ConfigError:
    """Why `act` is refused; an error without a text: it is not."""
    try:
        act()
    except ConfigError as error:
        return error
    return ConfigError()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_the_documents_means_the_same_in_every_command(text, tmp_path):
    pytest.importorskip("obstore")
    parts = tier_list._cut(text, SettingOrigin("flag", "--tier"))
    kind = None if parts.kind == "host" else tier_list.kind_of(text, "--tier")
    missing = "" if parts.where or kind is None else f"tiers.{kind.name}.{kind.where}"
    assert refused(lambda: served(text)).setting == missing

    has_capacity = kind is None or kind.has_cap or any(word.startswith("capacity=") for word in parts.words)
    for act in (lambda: parse_tier(text), lambda: load_inputs(options=tier_options([text]))):
        error = refused(act)
        assert (str(error) == "") == has_capacity
        assert has_capacity or error.problem.startswith("has no capacity; give one, as in ")
    if kind is not None and kind.open_trial is not None:
        assert trial_settings(text, tmp_path).kind == kind.name


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("redis:h", "valkey", {}),
        ("redis://h:7000", "valkey", {"addresses": "h:7000"}),
        ("valkey://h,h2:7000/3?prefix=p", "valkey", {"addresses": "h:6379,h2:7000", "database": 3, "prefix": "p"}),
        ("rediss://h/", "valkey", {"tls": True}),
        ("valkeys://[::1]:7000?lifetime=1h", "valkey", {"addresses": "[::1]:7000", "tls": True, "lifetime_s": 3600.0}),
        ("far=rediss://h/2", "far", {"tls": True, "database": 2}),
        ("valkey:h", "valkey", {}),
    ],
)
def test_urls_of_redis_and_valkey_are_texts(text, name, expected):
    pytest.importorskip("valkey", reason="the extra 'valkey' is not installed")
    (tier,) = served(text).config.tiers
    assert (tier.kind, tier.name) == ("valkey", name)
    default = {"addresses": "h:6379", "tls": False, "database": 0, "prefix": "kvtier", "lifetime_s": 7 * 86400.0}
    assert {key: getattr(tier, key) for key in default} == default | expected
    assert tier_list.kind_of(text, "--tier").name == "valkey"


@pytest.mark.parametrize(
    ("text", "setting", "problem", "allowed"),
    [
        ("redis://:Sesame@h", "tiers", "the URL contains a login", "KVTIER_TIERS__VALKEY__PASSWORD"),
        ("rediss://u:Sesame@h:1/2?prefix=p", "tiers", "the URL contains a login", "password_file=PATH"),
        ("redis://u:Ses/ame@h", "tiers", "the URL contains a login", "password_file=PATH"),
        ("far=valkey://u:Sesame@h", "tiers", "the URL contains a login", "password_file=PATH"),
        ("redis://u:Ses?ame@h", "tiers", "not key=value", tier_list.FORM),
        ("rediss://h?tls=false", "tiers.valkey.tls", "given twice", "once"),
        ("redis://h/1?database=2", "tiers.valkey.database", "given twice", "once"),
        ("redis://h/x", "tiers.valkey.database", "not a whole number", "a whole number"),
        ("redis://", "tiers.valkey.addresses", "missing", ""),
    ],
)
def test_a_login_in_a_url_is_refused_and_not_shown(text, setting, problem, allowed):
    pytest.importorskip("valkey", reason="the extra 'valkey' is not installed")
    error = refused(lambda: served(text))
    assert (error.setting, error.origin) == (setting, "flag --tier")
    assert problem in error.problem
    assert allowed in error.allowed
    assert not re.search("Ses|ame@", f"{error}{vars(error)}")


def test_what_describes_the_hardware_changes_no_server():
    plain, described = (served(f"disk:/kv?capacity=4TiB{more}") for more in ("", "&read=12GB/s&latency=1ms&drives=4xa"))
    assert plain.config == described.config
    with_host = served("disk:/kv", "host=64GiB")
    assert (with_host.config.host.capacity_bytes, len(with_host.config.tiers)) == (64 << 30, 1)
    assert str(with_host.origins["host.capacity_bytes"]) == "flag --tier"
    error = refused(lambda: served("host=1GiB", "host=2GiB"))
    assert (error.setting, error.allowed) == ("tiers", "once")


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
def test_another_form_is_refused_with_the_form_of_all_commands(command, text, refusal):
    error = refusal(*command, "--tier", text)
    assert (error.setting, error.value) == ("tiers", repr(text))
    assert error.origin.endswith("--tier")
    assert tier_list.FORM in error.allowed


@pytest.mark.parametrize("command", [["size"], ["plan"], ["replay", "run", "trace.jsonl"]], ids=" ".join)
def test_two_kinds_of_gpu_are_refused(command, capsys):
    assert run([*command, "llama-3.1-8b", "--gpu", "h100-sxm", "--gpu", "2xh200-sxm"]) == 2
    assert "h100-sxm and 2xh200-sxm are given; give one kind of GPU" in capsys.readouterr().err


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
