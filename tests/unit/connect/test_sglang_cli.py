"""`kvtier sglang`: the flags that SGLang takes, and a doctor that names what is wrong. SGLang is not needed."""

import json
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli import sglang, sglang_doctor
from kvtier.cli.main import run
from kvtier.config import machine_checks
from kvtier.config.loader import flat, override
from kvtier.config.sections import Config
from kvtier.connect.installed_programs import NotInTimeError
from kvtier.connect.sglang.environment_probe import FIELDS, HASH_LIBRARY, HASH_SOURCE
from kvtier.connect.sglang.installed_engine import EXTRA, Environment, look, read_extra, settings_in
from kvtier.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_settings", "large_machine")

SECRET = "5e" * 32

RECORDED = dict.fromkeys(FIELDS) | {
    "disable_radix_cache": False,
    "enable_hierarchical_cache": True,
    "enable_metrics": False,
    "enable_unified_cache_external_linker": False,
    "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_write_policy": "write_through",
    "load_format": "auto",
    "page_size": 64,
}
"""What `environment_probe` wrote for the flags of `kvtier sglang config` with SGLang 0.5.23."""


@pytest.fixture
def environment(monkeypatch) -> SimpleNamespace:
    """The environment of SGLang; by default of a supported release, which takes every flag."""
    result = SimpleNamespace(
        version="0.5.23", has_kvtier=True, fields={}, asked={}, refused="", no_plug_in="", no_page_hash=""
    )

    def look_there(_python: Path | None = None, arguments: object = None, _deadline_s: float = 0) -> Environment:
        return Environment(
            version=result.version,
            has_kvtier=result.has_kvtier,
            fields=result.fields,
            asked=result.asked or result.fields,
            refused=result.refused if arguments else "",
            no_plug_in=result.no_plug_in,
            no_page_hash=result.no_page_hash,
        )

    monkeypatch.setattr(sglang, "look", look_there)
    monkeypatch.setattr(sglang_doctor, "look", look_there)
    return result


@pytest.fixture
def config(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["sglang", "config", *map(str, arguments)])
        result = capsys.readouterr()
        return code, result.out, result.err

    return call


@pytest.fixture
def model(tmp_path) -> Path:
    where = tmp_path / "model"
    where.mkdir()
    (where / "config.json").write_text("{}")
    (where / "model.safetensors").write_bytes(b"weights")
    return where


@pytest.fixture
def served(environment, model, tmp_path):
    """Sets the server's flags; each is changed by name, and its backend's configuration with `extra`."""

    def serve(extra: dict[str, object] | None = None, **changes: object) -> None:
        backend = {
            "backend_name": "kvtier",
            "module_path": "kvtier.connect.sglang",
            "class_name": "KvtierStorage",
            "interface_v1": 1,
            "tiers": [{"kind": "directory", "path": str(tmp_path / "kv")}],
        } | (extra or {})
        text = json.dumps({key: value for key, value in backend.items() if value is not None})
        environment.fields = RECORDED | {
            "model_path": str(model), "hicache_storage_backend_extra_config": text
        } | changes  # fmt: skip

    serve()
    return serve


@pytest.fixture
def doctor(capsys):
    def call(*arguments: object) -> list[dict[str, str]]:
        code = run(["doctor", "sglang", "--json", *map(str, arguments)])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert code == int(bad(findings) != [])
        return findings

    return call


def bad(findings: list[dict[str, str]]) -> list[str]:
    """Subjects of errors and warnings; each of them must have advice."""
    found = [it for it in findings if it["level"] in ("error", "warning")]
    assert [it for it in found if not it["advice"]] == []
    return [it["about"] for it in found]


# ---- config ----------------------------------------------------------------------------------------------------------


def test_config_prints_flags_to_paste_and_nothing_else(config, environment, tmp_path):
    code, out, err = config(
        "--tier", f"directory:{tmp_path}/k v", "--set", "limits.stores_in_flight=7", "--page-size", 32
    )
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    *flags, text = shlex.split(out)
    assert flags == [
        *("--enable-hierarchical-cache", "--page-size", "32", "--hicache-storage-backend", "dynamic"),
        "--hicache-storage-backend-extra-config",
    ]
    extra = json.loads(text)
    there = override(Config(), flat(settings_in(extra), "the test"), "the test")
    assert [tier.path for tier in there.tiers] == [tmp_path / "k v"]
    assert there.limits.stores_in_flight == 7
    assert {key: extra[key] for key in ("backend_name", "module_path", "class_name", "interface_v1")} == {
        "backend_name": "kvtier",
        "module_path": "kvtier.connect.sglang",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
    }


def test_config_writes_a_file_that_sglang_reads(config, environment, tmp_path):
    file = tmp_path / "kv.json"
    code, out, _ = config("--tier", f"directory:{tmp_path}/kv", "--file", file)
    assert code == 0
    assert out.split()[-1] == f"@{file}"
    assert read_extra(f"@{file}")["tiers"] == [{"kind": "directory", "path": str(tmp_path / "kv")}]
    assert config("--tier", f"directory:{tmp_path}/kv", "--file", tmp_path / "kv.conf")[0] == 2


@pytest.mark.parametrize(
    ("flag", "setting", "problem", "allowed"),
    [
        ("sglang.unsupportd=allow", "sglang.unsupportd", "did you mean unsupported?", "unsupported"),
        ("nosuch.key=1", "nosuch", "unknown section", "host, store, "),
        (f"store.secret={SECRET}", "store.secret", "never printed", "--set store.secret_file=PATH"),
    ],
)
def test_a_wrong_setting_is_refused(config, environment, refusal, flag, setting, problem, allowed):
    error = refusal("sglang", "config", "--set", flag)
    assert (error.setting, error.origin) == (setting, f"flag --set {flag.partition('=')[0]}")
    assert problem in error.problem
    assert allowed in error.allowed
    assert SECRET not in f"{error}{vars(error)}"
    assert config("--set", flag)[:2] == (2, "")


def test_without_sglang_the_flags_are_printed_with_a_note(config, tmp_path):
    code, out, err = config("--tier", f"directory:{tmp_path}/kv")
    assert code == 0
    assert out.startswith("--enable-hierarchical-cache ")
    assert err == "note: SGLang is not installed in this environment, so the flags were not checked\n"


def test_a_release_that_was_not_tested_is_an_error_unless_it_is_allowed(config, environment, tmp_path):
    environment.version = "0.5.24"
    code, out, err = config("--tier", f"directory:{tmp_path}/kv")
    assert (code, out) == (2, "")
    assert "SGLang 0.5.24 is not supported by this release of kvtier; allowed: SGLang 0.5.23" in err
    code, out, err = config("--tier", f"directory:{tmp_path}/kv", "--set", "sglang.unsupported=allow")
    assert code == 0
    assert "SGLang 0.5.24 is not supported" in err


def test_flags_that_sglang_refuses_are_an_error(config, environment, tmp_path):
    environment.refused = "unrecognized arguments: --hicache-storage-backend"
    code, out, err = config("--tier", f"directory:{tmp_path}/kv")
    assert (code, out) == (2, "")
    assert "does not take these flags: unrecognized arguments" in err


def test_a_python_that_cannot_be_run_is_an_error(config, tmp_path):
    code, _, err = config("--python", tmp_path / "python")
    assert code == 2
    assert "No such file or directory; allowed: the Python of SGLang's environment, 3.11 or later" in err
    assert config("--python", "/bin/false")[0] == 2


def test_the_program_for_the_other_environment_describes_this_one(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    found = look(Path(sys.executable), ["--model-path", "m"])
    assert found._replace(no_plug_in="") == Environment(version=None, has_kvtier=True, fields={}, asked={}, refused="")


@pytest.mark.parametrize(
    ("names", "chosen", "problem"),
    [
        ("kvtier", None, ""),
        ("kvtier", "other, kvtier", ""),
        ("kvtier", "", ""),
        ("kvtier", "other", "SGLANG_PLUGINS is 'other'"),
        ("another", None, "has no plug-in for SGLang"),
    ],
)
def test_whether_sglang_loads_the_plug_in_is_seen(tmp_path, monkeypatch, names, chosen, problem):
    """Without it kvtier stores and finds nothing."""
    about = tmp_path / "kvtier-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier\nVersion: 9\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{names} = kvtier.connect.sglang:register\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    if chosen is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", chosen)
    found = look().no_plug_in
    assert problem in found
    assert bool(found) is bool(problem)


def test_a_note_says_that_sglang_does_not_load_the_plug_in(config, environment, tmp_path):
    environment.no_plug_in = "SGLANG_PLUGINS is 'other'"
    code, _, err = config("--tier", f"directory:{tmp_path}/kv")
    assert code == 0
    assert "SGLANG_PLUGINS is 'other'" in err


PROGRAMS = {
    "ninja": "true",
    "c++": 'case "$*" in *-lcrypto*) grep -q "include <Python.h>" && exec true;; esac; exit 9',
    "no headers": "echo '<stdin>:1:10: fatal error: Python.h: No such file' >&2; exit 1",
}


@pytest.mark.parametrize(
    ("compiler", "missing", "built_by", "problem"),
    [
        (None, None, None, ""),
        (None, "c++", None, "c++: [Errno 2] No such file"),
        (None, "ninja", None, "ninja: [Errno 2] No such file"),
        ("no headers", None, None, "no_headers: <stdin>:1:10: fatal error: Python.h: No such file"),
        (None, "c++", "c++", ""),
        (None, "c++", "g++", "c++: [Errno 2] No such file"),
        (None, "ninja", "c++", "ninja: [Errno 2] No such file"),
    ],
)
def test_whether_sglang_can_compile_its_page_hash_is_seen(tmp_path, monkeypatch, compiler, missing, built_by, problem):
    """Without it SGLang finds none of its stored pages, and goes on."""
    source = tmp_path / "sglang" / HASH_SOURCE
    source.parent.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    for name, act in PROGRAMS.items():
        if name != missing:
            program = tmp_path / "bin" / name.replace(" ", "_")
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{act}\n")
            program.chmod(0o755)
    if built_by:
        built = tmp_path / "extensions" / "hicache_hash_cpp" / HASH_LIBRARY
        built.parent.mkdir(parents=True)
        built.touch()
        built.with_name("build.ninja").write_text(f"ninja_required_version = 1.3\ncxx = {built_by}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    if compiler:
        monkeypatch.setenv("CXX", str(tmp_path / "bin" / "no_headers"))
    assert look().no_page_hash == "", "the control: this SGLang has no such source"
    source.touch()
    found = look().no_page_hash
    assert problem in found
    assert bool(found) is bool(problem)


# ---- the backend's configuration -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kv.json", '{"tiers": ["directory:/x"], "prefetch_threshold": 64}'),
        ("kv.toml", 'tiers = ["directory:/x"]\nprefetch_threshold = 64'),
    ],
)
def test_the_configuration_is_read_as_sglang_reads_it(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    extra = read_extra(f"@{tmp_path / name}")
    assert extra["prefetch_threshold"] == 64
    assert settings_in(extra) == {"tiers": ["directory:/x"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{tiers:[" + SECRET + "]}", "is not valid JSON: .*did the shell remove its quotes"),
        (f'["{SECRET}"]', "has the type list; allowed: a JSON object"),
        ("@{}/none.json", "No such file"),
        ("@{}/kv.ini", "suffix is '.ini'; allowed: .json"),
        ("@{}/kv.toml", "kv.toml cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, text, message):
    for name in ("kv.ini", "kv.toml"):
        (tmp_path / name).write_text(f"secret: {SECRET}")
    with pytest.raises(ConfigError, match=message) as caught:
        read_extra(text.replace("{}", str(tmp_path)) if text.startswith("@") else text)
    assert SECRET not in str(caught.value)


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_a_healthy_server_is_fine(doctor, served):
    findings = doctor("--", "--model-path", "m")
    assert bad(findings) == []
    notes = {it["about"] for it in findings if it["level"] == "note"}
    assert notes == {"prefetch_threshold", "hits", "tiers.directory"}


@pytest.mark.parametrize(("loss", "page"), [("none", 32), ("k8v4", 64), ("k8v4", 32)])
def test_the_doctor_says_that_a_server_stores_kv_with_loss(doctor, served, monkeypatch, loss, page):
    monkeypatch.setattr(machine_checks, "find_spec", lambda _name: None)
    served({"store.loss": loss}, page_size=page)
    findings = [it for it in doctor("--", "--model-path", "m") if it["about"] in {"store.loss", "--page-size"}]
    levels = sorted(it["level"] for it in findings if it["about"] == "store.loss")
    assert levels == ([] if loss == "none" else ["note", "warning"]), "numba is missing"
    assert all("SGLang passes storage no salts" in it["advice"] for it in findings if it["level"] == "note")
    small = [it["level"] for it in findings if it["about"] == "--page-size"]
    assert small == (["warning", "fine"] if (loss, page) == ("k8v4", 32) else ["fine"])
    for mode, is_wrong in (("null", False), ("prefill", True), ("decode", True)):
        served({"store.loss": loss}, page_size=page, disaggregation_mode=mode)
        wrong = [it["about"] for it in doctor("--", "--model-path", "m") if it["level"] == "error"]
        assert wrong == ["store.loss"] * (is_wrong and loss != "none"), mode


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"enable_hierarchical_cache": False}, ["hierarchical cache"]),
        ({"disable_radix_cache": True}, ["radix cache"]),
        ({"radix_cache_backend": "lmcache"}, ["--radix-cache-backend"]),
        ({"enable_unified_cache_external_linker": True}, ["--enable-unified-cache-external-linker"]),
        ({"hicache_storage_backend": "file"}, ["storage backend"]),
        ({"hicache_storage_backend": None}, ["storage backend"]),
        ({"hicache_storage_backend_extra_config": None}, ["storage backend", "tiers"]),
        ({"hicache_storage_backend_extra_config": "{x}"}, ["--hicache-storage-backend-extra-config", "tiers"]),
        ({"page_size": None}, ["--page-size"]),
        ({"hicache_mem_layout": "page_first_kv_split"}, ["memory layout"]),
        ({"load_format": "dummy"}, ["model"]),
        ({"model_path": "a/model"}, ["model"]),
        ({"hicache_write_policy": "write_back"}, ["write policy"]),
        ({"hicache_storage_prefetch_policy": "best_effort"}, ["prefetch policy"]),
        ({"extra": {"class_name": "Other"}}, ["class_name"]),
        ({"extra": {"module_path": None}}, ["module_path"]),
        ({"extra": {"backend_name": None}}, ["backend_name"]),
        ({"extra": {"interface_v1": None}}, ["interface_v1"]),
        ({"extra": {"prefetch_threshold": "64"}}, ["prefetch_threshold"]),
        ({"extra": {"tiers": []}}, ["tiers"]),
        ({"extra": {"hots": {}}}, ["settings"]),
        ({"extra": {"tiers": ["shared_directory:/mnt/none"]}}, ["settings"]),  # it has no secret
    ],
)
def test_the_doctor_finds_a_wrong_configuration(doctor, served, changes, about):
    served(**changes)
    assert bad(doctor("--", "--model-path", "m")) == about


@pytest.mark.parametrize(("backend", "about"), [("dynamic", EXTRA), ("mooncake", "storage backend")])
def test_the_configuration_of_another_backend_is_one_finding(doctor, served, environment, tmp_path, backend, about):
    served(hicache_storage_backend=backend)
    environment.fields["hicache_storage_backend_extra_config"] = '{"master_server_address": "10.0.0.1:50051"}'
    assert bad(doctor("--tier", f"directory:{tmp_path}/kv?capacity=64MiB", "--", "--model-path", "m")) == [about]


def test_a_compiler_that_sglang_lacks_is_an_error(doctor, served, environment):
    environment.no_page_hash = "c++: No such file or directory"
    findings = doctor("--", "--model-path", "m")
    assert bad(findings) == ["page hash"]
    assert "apt-get install g++" in str(findings)


def test_a_layout_that_sglang_changes_is_named(doctor, served, environment):
    served(hicache_mem_layout="page_first_direct", hicache_io_backend="direct")
    environment.asked = environment.fields | {"hicache_mem_layout": "page_first"}
    (found,) = [it["found"] for it in doctor("--", "--model-path", "m") if it["about"] == "memory layout"]
    assert found.startswith("SGLang changes page_first to page_first_direct because of the io backend direct")


@pytest.mark.parametrize(("tokens", "threshold", "about"), [(255, 256, ["prefetch_threshold"]), (256, 256, []),
    (63, 1, ["prefetch_threshold"]), (64, 1, [])])  # fmt: skip
def test_a_prompt_below_the_threshold_is_found(doctor, served, tokens, threshold, about):
    served({"prefetch_threshold": threshold})
    assert bad(doctor("--prompt-tokens", tokens, "--", "--model-path", "m")) == about


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"version": None}, "SGLang"),
        ({"version": "0.5.24"}, "SGLang"),
        ({"has_kvtier": False}, "kvtier"),
        ({"no_plug_in": "SGLANG_PLUGINS is 'other'"}, "plug-in"),
        ({"refused": "unrecognized arguments: --hicache"}, "flags"),
    ],
)
def test_the_doctor_finds_a_wrong_environment(doctor, served, environment, changes, about):
    vars(environment).update(changes)
    assert bad(doctor("--", "--model-path", "m")) == [about]


def test_without_sglang_the_settings_in_the_flags_are_checked(doctor, tmp_path):
    (tmp_path / "thesis.tex").touch()
    extra = json.dumps({"tiers": [f"directory:{tmp_path}"]})
    found = bad(doctor("--", "--hicache-storage-backend-extra-config", extra))
    assert found[:2] == ["backend_name", "module_path"]
    assert {"SGLang", "tiers.directory.path"} < set(found)


def test_a_remote_tier_that_is_down_is_found(doctor, served, tmp_path, monkeypatch):
    pytest.importorskip("obstore")
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("KVTIER_STORE__SECRET_FILE", str(tmp_path / "secret"))
    login = {"access_key_id": "id", "secret_access_key": SECRET}
    away = {"kind": "s3", "url": "s3://bucket/kv", "endpoint": "http://127.0.0.1:9", "allow_http": True, **login}
    served({"tiers": [away]})
    findings = doctor("--", "--model-path", "m")
    assert bad(findings) == ["tiers.s3"]
    assert "does not answer" in str(findings)
    assert SECRET not in str(findings)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away["endpoint"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        served({"tiers": [away]})
        started_s = time.monotonic()
        findings = doctor("--timeout", "2", "--", "--model-path", "m")
        assert time.monotonic() - started_s < 6
    assert [it["found"] for it in findings if it["level"] == "error"] == ["does not answer within 2 s"]


@pytest.mark.parametrize("is_late", [False, True])
def test_flags_that_sglang_has_not_read_in_time_are_named(doctor, served, environment, monkeypatch, tmp_path, is_late):
    served(page_size=1)

    def late(_python: Path | None = None, arguments: object = None, _deadline_s: float = 0) -> Environment:
        if arguments and is_late:
            raise NotInTimeError("no answer")
        return Environment(
            "0.5.23", has_kvtier=True, fields={} if is_late else environment.fields, asked={}, refused=""
        )

    monkeypatch.setattr(sglang_doctor, "look", late)
    (tmp_path / "thesis.tex").touch()
    given = environment.fields["hicache_storage_backend_extra_config"].replace(f"{tmp_path}/kv", str(tmp_path))
    environment.fields["hicache_storage_backend_extra_config"] = given
    findings = doctor("--", "--page-size", "1", "--hicache-storage-backend-extra-config", given)
    assert ("--page-size" in bad(findings)) is not is_late
    assert "tiers.directory.path" in bad(findings), "the tiers are read from the flags as they are written"
    assert [it["found"] for it in findings if it["level"] == "unchecked"] == (
        ["SGLang has not read the flags within 10 s"] if is_late else []
    )


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_does_not_answer_costs_no_more_than_the_time(doctor, tmp_path):
    slow = script(tmp_path / "slow", "exec sleep 60")
    for flags in ((), ("--", "--page-size", "64")):
        started_s = time.monotonic()
        findings = doctor("--timeout", "2", "--python", slow, *flags)
        assert time.monotonic() - started_s < 20
        found = [it["found"] for it in findings if it["level"] == "unchecked" and it["about"] == "SGLang"]
        assert found == [f"the Python of {slow} has not answered within 2 s"]


def test_a_python_whose_output_is_no_text_is_refused(capsys, tmp_path):
    odd = script(tmp_path / "odd", "printf '\\377\\376\\n'; printf '\\377' >&2")
    assert run(["doctor", "sglang", "--python", str(odd)]) == 2
    assert f"{odd}: exit code 0" in capsys.readouterr().err


def test_a_file_of_the_extra_config_that_is_not_read_in_time_is_named(doctor, environment, tmp_path):
    file = tmp_path / "extra.json"
    os.mkfifo(file)
    environment.fields = {}
    findings = doctor("--timeout", "1", "--", "--hicache-storage-backend-extra-config", f"@{file}")
    os.close(os.open(file, os.O_RDWR))  # ends the thread
    assert "its file was not read within 1 s" in [it["found"] for it in findings if it["level"] == "unchecked"]


def test_an_extra_config_that_is_nested_too_deeply_is_refused():
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_extra('{"a":' + "[" * 100_000)
