"""`check` tells what will not work on this machine, and creates nothing while it looks."""

import os
import re
import sys
from pathlib import Path

import pytest

from kvtier.codec import lossy, registry
from kvtier.config import machine_checks
from kvtier.config.loader import load
from kvtier.config.machine_checks import check, memory_bytes
from kvtier.config.sections import Config, HostConfig, StoreConfig
from kvtier.config.tier_list import is_spec
from kvtier.device.control_groups import memory_limit
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.marker import open_marker
from kvtier.tier.files.directory_marker import MARKER_NAME, open_store

SMALL = HostConfig(capacity_bytes=2**20)
as_user = pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")


def findings(*words: str, file: Path | None = None) -> list[str]:
    """Of these tiers and flags, with little memory and small stores."""
    tiers = [word if "?" in word else f"{word}?capacity_bytes=1MiB" for word in words if is_spec(word)]
    flags = [word for word in words if not is_spec(word)]
    loaded = load(file, {}, ["host.capacity_bytes=1MiB", *flags], tiers)
    return [f"{finding.level}: {finding}" for finding in check(loaded.config, loaded.origins, loaded.file)]


def test_good_settings_have_no_findings_and_nothing_is_created(tmp_path):
    assert findings(f"directory:{tmp_path / 'a' / 'b'}", f"store.secret_file={tmp_path / 'secret'}") == []
    assert list(tmp_path.iterdir()) == []


def test_a_lossy_class_is_named_with_its_price(tmp_path, monkeypatch):
    coded = f"directory:{tmp_path / 'kv'}?capacity_bytes=64MiB"
    raw = f"{coded}&codec=raw"
    told = "note: store.loss = int4 (from flag --set store.loss): this engine stores KV with loss (int4): "
    for has_numba in (True, False):
        monkeypatch.setattr(machine_checks, "find_spec", lambda _name, found=has_numba: found or None)
        first, *rest = findings(coded, "store.loss=int4")
        assert first.startswith(told)
        assert [it for it in rest if "numba" in it] == rest
        assert len(rest) == (not has_numba)
        assert [it.startswith(told) for it in findings(raw, "store.loss=int4")] == [True], "nothing is coded there"
        assert findings(coded, "store.loss=none") == []


def test_a_class_needs_its_package_whatever_the_tiers_code(tmp_path, monkeypatch):
    """Other engines of the class may have coded what a tier holds."""
    monkeypatch.setattr(lossy, "find_spec", lambda _name: None)
    registry.lossy.cache_clear()
    for codec, setting in (("raw", "store.loss"), ("int4", "tiers.directory.codec")):
        given = f"directory:{tmp_path / 'kv'}?capacity_bytes=64MiB&codec={codec}", "store.loss=int4"
        (error,) = (it for it in findings(*given) if it.startswith("error"))
        assert error.startswith(f"error: {setting} = int4 ")
        assert "need the package numba, or torch" in error
    assert findings(f"directory:{tmp_path / 'kv'}?capacity_bytes=64MiB&codec=raw", "store.loss=none") == []


def test_a_path_that_is_a_file_or_lies_below_one_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path, culprit in (("file", "file"), ("file/below/it", "file"), ("dangling", "dangling")):
        (found,) = findings(f"directory:{tmp_path / path}")
        assert found.startswith(f"error: tiers.directory.path = {tmp_path / path} (from flag --tier): ")
        assert f"{tmp_path / culprit}" in found
        assert "is not a directory" in found


@as_user
def test_a_place_that_can_not_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    assert "this user cannot write to" in findings(f"directory:{tmp_path}")[0]
    assert "this user cannot write to its parent" in findings(f"directory:{tmp_path / 'kv'}")[0]


@pytest.mark.parametrize("tier", ["directory", "disk"])
def test_a_place_that_all_may_write_to_is_an_error(tmp_path, tier):
    tmp_path.chmod(0o777)
    words = f"error: tiers.{tier}.path = {tmp_path} .*has mode 0777: every user may replace cached data"
    assert [it for it in findings(f"{tier}:{tmp_path}") if re.match(words, it)]
    assert not any(it.startswith("error") for it in findings(f"{tier}:{tmp_path / 'below'}"))


@pytest.mark.parametrize("place", ["/proc/kvtier", "/tmp/" + "x" * 300], ids=["no files", "long name"])
def test_a_place_where_no_directory_can_be_made_is_an_error(place):
    (found,) = findings(f"directory:{place}")
    assert found.startswith("error: tiers.directory.path")


def test_other_peoples_files_are_an_error_and_a_store_of_ours_is_not(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "error: tiers.directory.path" in findings(f"directory:{tmp_path}")[0]
    assert "holds other files ('thesis.tex')" in findings(f"directory:{tmp_path}")[0]
    (tmp_path / "kv").mkdir()
    open_store(tmp_path / "kv")
    assert findings(f"directory:{tmp_path / 'kv'}") == []
    (tmp_path / "kv" / MARKER_NAME).write_text('{"version": 99, "store_id": "x", "created": "y"}')
    assert "store version 99, newer than the one known here, 1" in findings(f"directory:{tmp_path / 'kv'}")[0]
    (tmp_path / "kv" / MARKER_NAME).write_text("garbage")
    (found,) = findings(f"directory:{tmp_path / 'kv'}")
    assert found.startswith("error:")
    assert "is not a valid marker" in found
    assert "kvtier inspect repair" in found


def test_more_than_the_disk_has_is_a_warning(tmp_path):
    found = findings(f"directory:{tmp_path}?capacity_bytes=1000TiB")
    assert len(found) == 1
    assert found[0].startswith("warning: tiers.directory.capacity_bytes = 1000 TiB (from flag --tier)")
    assert "free space" in found[0]


def test_more_than_the_memory_is_an_error_and_nearly_all_a_warning():
    assert "error: host.capacity_bytes" in findings("host.capacity_bytes=1000TiB")[0]
    assert "warning: host.capacity_bytes" in findings(f"host.capacity_bytes={int(memory_bytes() * 0.95)}")[0]


SLICE = "0::/system.slice/vllm.slice/vllm@1.service\n"
SLURM = "9:name=systemd:/x\n4:cpuset,memory:/slurm/uid_1/job_7/step_0\n0::/\n"
NO_LIMIT_1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (SLICE, {"system.slice/vllm.slice/vllm@1.service": "max", "system.slice/vllm.slice": 2**20}, 2**20),
        (SLICE, {"system.slice/vllm.slice/vllm@1.service": 2**21, "system.slice/vllm.slice": 2**20}, 2**20),
        (SLICE, {"system.slice/vllm.slice/vllm@1.service": 2**20, "system.slice": 2**21}, 2**20),
        (SLICE, {"system.slice/vllm.slice/vllm@1.service": "max", "system.slice/other.slice": 2**20}, None),
        ("0::/\n", {"": 2**20}, 2**20),
        ("0::/docker/1f\n", {"": 2**20}, 2**20),
        ("0::/../../beside\n", {"": 2**20}, 2**20),
        (SLURM, {"memory/slurm/uid_1/job_7": 2**20, "memory/slurm/uid_1/job_7/step_0": NO_LIMIT_1}, 2**20),
        (SLURM, {"memory/slurm/uid_1/job_7/step_0": 2**20, "memory/slurm/uid_1/job_8": 2}, 2**20),
        (SLURM, {"memory": 2**20}, 2**20),
        ("", {"": 2**20}, 2**20),
        ("", {"memory": 2**20}, 2**20),
        ("rubbish\n", {}, None),
    ],
)
def test_the_smallest_limit_of_all_control_groups_counts(monkeypatch, tmp_path, own, files, limit):
    root, file = tmp_path / "root", tmp_path / "cgroup"
    file.write_text(own)
    for folder, text in files.items():
        name = "memory.limit_in_bytes" if folder.startswith("memory") else "memory.max"
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(f"{text}\n")
    found = memory_limit(root, file)
    assert (found and found[0]) == limit
    monkeypatch.setattr(machine_checks, "memory_limit", lambda: found)
    assert (memory_bytes() == 2**20) == (limit == 2**20)
    said = findings("host.capacity_bytes=1MiB") + findings("host.capacity_bytes=2MiB")
    assert len(said) == (2 if limit else 0)
    assert all(f"the memory limit 1 MiB of a control group ({root}/" in line for line in said)


def test_a_machine_without_control_groups_has_its_memory(tmp_path):
    assert memory_limit(tmp_path / "none", tmp_path / "none") is None


def test_a_place_of_ranks_that_holds_other_things_is_an_error(tmp_path):
    (tmp_path / "secret").touch()
    (tmp_path / "rank-3").mkdir()
    disk = [f"directory:{tmp_path / 'a'}", f"disk:{tmp_path}"]
    assert findings(*disk) == []
    (tmp_path / "mail").mkdir()
    (found,) = findings(*disk)
    assert found.startswith(f"error: tiers.disk.path = {tmp_path} (from flag --tier): root ")
    assert "holds other files ('mail')" in found
    open_marker(tmp_path / "rank-3", 1 << 20)
    assert findings(*disk) == []
    (tmp_path / "rank-3" / "kvtier-disk.json").write_text("garbage")
    (found,) = findings(*disk)
    assert found.startswith("error: tiers.disk.path")
    assert f"kvtier inspect repair {tmp_path / 'rank-3'}" in found


def test_a_reserve_of_all_that_is_free_is_told(tmp_path):
    disk = [f"directory:{tmp_path / 'a'}", f"disk:{tmp_path}"]
    (found,) = findings(*disk, "tiers.disk.reserve_bytes=1024TiB")
    assert found.startswith(
        "warning: tiers.disk.reserve_bytes = 1024 TiB (from flag --set tiers.disk.reserve_bytes): leaves no space"
    )
    assert findings(*disk, "tiers.disk.reserve_bytes=0") == []


def test_a_place_for_recordings_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    kv = f"directory:{tmp_path / 'kv'}"
    (found,) = findings(kv, f"trace.path={tmp_path / 'file'}")
    assert found.startswith(f"error: trace.path = {tmp_path / 'file'} (from flag --set trace.path): ")
    assert "is not a directory" in found
    assert findings(kv, f"trace.path={tmp_path / 'traces'}") == []
    assert "has no effect: trace.path is not set" in findings(kv, "trace.capacity_bytes=1MiB")[0]


def test_a_secret_that_others_can_read_is_told(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o644)
    path = f"directory:{tmp_path / 'kv'}"
    assert "which lets others read it; allowed: 0600" in findings(path, f"store.secret_file={secret}")[0]
    secret.chmod(0o600)
    assert findings(path, f"store.secret_file={secret}") == []
    secret.write_bytes(bytes(31))
    assert "must hold 32 bytes" in findings(path, f"store.secret_file={secret}")[0]
    assert "is not a regular file" in findings(path, f"store.secret_file={tmp_path}")[0]
    assert "not a writable directory" in findings(path, f"store.secret_file={tmp_path / 'no' / 'secret'}")[0]


def test_keys_that_cannot_be_read_or_are_in_a_flag_are_told_without_showing_them(tmp_path):
    keys, path, digits = tmp_path / "keys", f"directory:{tmp_path / 'kv'}", "5a" * 32
    assert "cannot be read: No such file" in findings(path, f"store.keys_file={keys}")[0]
    keys.write_text(f"1 - {digits}\n")
    keys.chmod(0o644)
    assert "allowed: 0600" in findings(path, f"store.keys_file={keys}")[0]
    keys.chmod(0o600)
    assert findings(path, f"store.keys_file={keys}") == []
    keys.write_text(f"one - {digits}\n")
    (found,) = findings(path, f"store.keys_file={keys}")
    assert "line 1 is not a key" in found
    (told,) = findings(path, f"store.keys=1 - {digits}")
    assert "other users can see a flag" in told
    assert digits not in found + told


def test_a_codec_or_a_seal_without_its_package_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(bytes(32))
    (tmp_path / "secret").chmod(0o600)
    path, secret = f"directory:{tmp_path / 'kv'}?capacity=1MiB", f"store.secret_file={tmp_path / 'secret'}"
    assert findings(f"{path}&codec=zstd&seal=on", secret) == []
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.delitem(sys.modules, "kvtier.codec.zstd")
    monkeypatch.delitem(sys.modules, "kvtier.codec.seal")
    registry.by_name.cache_clear()
    codec, seal = findings(f"{path}&codec=zstd&seal=on", secret)
    assert codec.startswith("error: tiers.directory.codec = zstd (from flag --tier): ")
    assert codec.endswith("pip install 'zstandard>=0.22'")
    assert seal.startswith(
        "error: tiers.directory.seal = on (from flag --tier): the seal needs the package cryptography"
    )
    assert findings(path, "store.codec=zstd")[0].startswith("error: store.codec = zstd (from flag --set store.codec): ")
    assert findings(f"{path}&codec=split") == []


def test_a_secret_in_a_flag_or_an_open_file_is_told_without_showing_it(tmp_path):
    digits, path = "ab" * 32, f"directory:{tmp_path / 'kv'}"
    (found,) = findings(path, f"store.secret={digits}")
    assert "process list" in found
    assert digits not in found
    file = tmp_path / "kvtier.toml"
    file.write_text(f'[store]\nsecret = "{digits}"\n')
    file.chmod(0o644)
    assert "chmod 600" in findings(path, file=file)[0]
    file.chmod(0o600)
    assert findings(path, file=file) == []


def test_deadlines_that_can_never_pass_and_settings_without_effect_are_told(tmp_path):
    path = f"directory:{tmp_path}"
    (found,) = findings(
        f"{path}?capacity_bytes=1MiB&probe_deadline_s=5&transfer_deadline_s=1", "limits.load_deadline_s=1"
    )
    assert found.startswith(
        "warning: tiers.directory.probe_deadline_s = 5 s (from flag --tier): longer than limits.load"
    )
    assert "tiers.directory.transfer_deadline_s" in findings(path, "limits.load_deadline_s=1")[0]


def test_a_tree_made_in_python_can_be_checked(tmp_path):
    config = Config(host=SMALL, tiers=(DirectorySettings(path=tmp_path, capacity_bytes=2**20),), store=StoreConfig())
    assert check(config) == []
    (tmp_path / "file").write_text("")
    bad = Config(host=SMALL, tiers=(DirectorySettings(path=tmp_path / "file", capacity_bytes=2**20),))
    assert "(from Python)" in str(check(bad)[0])
