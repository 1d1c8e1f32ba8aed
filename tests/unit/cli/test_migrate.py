"""Settings of LMCache, vLLM's own offloading, Mooncake and HiCache become kvtier's, and no key of them is lost."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.config.loader import flat, override
from kvtier.config.sections import Config
from kvtier.connect.sglang.installed_engine import settings_in
from kvtier.tier import registry

pytestmark = pytest.mark.usefixtures("no_settings", "large_machine", "in_a_folder")

GIB = 1 << 30
PASSWORD = "pass-w0rd"
LOST, UNKNOWN, NOT_NEEDED = "(no counterpart)", "(not known)", "(not needed)"


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def convert(capsys):
    """Runs a command; what it prints as kvtier's own loader reads it, and the table's rows by key."""

    def call(engine: str, *arguments: object) -> tuple[Config, dict[str, str], dict[str, object]]:
        assert run([engine, "config", *map(str, arguments)]) == 0
        out, err = capsys.readouterr()
        assert PASSWORD not in out + err
        printed = json.loads(shlex.split(out)[-1] if engine == "sglang" else out)
        extra = settings_in(printed) if engine == "sglang" else printed["kv_connector_extra_config"]
        rows = dict(line.split(None, 1) for line in err.splitlines() if not line.startswith("note: "))
        return override(Config(), flat(extra, "the test"), "the test"), rows, printed

    return call


def values(config: Config) -> dict[str, object]:
    """The tiers' settings that are no defaults, and other settings that conversions make."""
    made: dict[str, object] = {}
    for tier in config.tiers:
        own = {each.key: getattr(tier, each.key) for each in tier.settings()}
        changed = {each.key: own[each.key] for each in tier.settings() if own[each.key] != each.default}
        made[tier.name] = {key: value.name if key.endswith("_file") else value for key, value in changed.items()}
    host, store = config.host, config.store
    return made | {"host": host.capacity_bytes / GIB, "evictor": host.evictor, "chunk": store.chunk_tokens}


def own(host: float = 5, evictor: str = "adaptive", chunk: int = 0, **tiers: object) -> dict[str, object]:
    return {"host": host, "evictor": evictor, "chunk": chunk, **tiers}


LMCACHE = {
    "host memory": (
        "chunk_size: 512\nlocal_cpu: true\nmax_local_cpu_size: 20.0\ncache_policy: LRU\n",
        own(40, "lru", 512),
    ),
    "its defaults": ("chunk_size: 256\n", own(10)),
    "a disk": (
        "local_cpu: false\nmax_local_cpu_size: 5\nlocal_disk: 'file:///mnt/nvme/lm/'\nmax_local_disk_size: 10.5\n",
        own(10, disk={"path": Path("/mnt/nvme/lm/kvtier"), "capacity_bytes": 21 * GIB}),
    ),
    "a disk of no size": ("local_disk: /mnt/nvme\nmax_local_cpu_size: 5\n", own(10)),
    "several drives": (
        "max_local_disk_size: 1\nlocal_disk: /mnt/a/,file:///mnt/b/\n",
        own(10, disk={"path": Path("/mnt/a/kvtier"), "capacity_bytes": 2 * GIB}),
    ),
    "redis": (
        "remote_url: redis://10.0.0.5:6379\nremote_serde: naive\n",
        own(10, valkey={"addresses": "10.0.0.5:6379"}),
    ),
    "redis with a password": (
        f"remote_url: rediss://kv:{PASSWORD}@h:6380/3?ssl_cert_reqs=none\n",
        own(
            10,
            valkey={
                "addresses": "h:6380",
                "username": "kv",
                "password_file": "valkey.password",
                "database": 3,
                "tls": True,
            },
        ),
    ),
    "sentinels": ("remote_url: 'redis-sentinel://h:26379,i:26379'\n", own(10)),
    "a cluster of Valkey": (
        (
            "remote_url: valkey://a:6379,b:6379\nextra_config: {valkey_mode: cluster, valkey_username: kv, "
            f"valkey_password: {PASSWORD}, valkey_enable_ttl: true, valkey_ttl_sec: 60}}\n"
        ),
        own(
            10,
            valkey={
                "addresses": "a:6379,b:6379",
                "username": "kv",
                "password_file": "valkey.password",
                "lifetime_s": 60,
            },
        ),
    ),
    "a bucket": (
        (
            "remote_url: s3://bucket-1.t3.example.com\nlocal_disk: /d\nmax_local_disk_size: 1\nextra_config:\n"
            "  s3_region: auto\n  s3_file_prefix: a/b\n  s3_num_io_threads: 64\n  s3_prefer_http2: true\n"
            f"  aws_access_key_id: A{PASSWORD}\n  aws_secret_access_key: {PASSWORD}\n"
        ),
        own(
            10,
            disk={"path": Path("/d/kvtier"), "capacity_bytes": 2 * GIB},
            s3={
                "url": "s3://bucket-1/a/b/",
                "endpoint": "https://bucket-1.t3.example.com",
                "virtual_host": True,
                "region": "auto",
            },
        ),
    ),
    "a bucket of AWS": (
        "remote_url: s3://bucket-1.s3.us-west-2.amazonaws.com\nextra_config: {s3_region: us-west-2}\n",
        own(10, s3={"url": "s3://bucket-1/", "region": "us-west-2"}),
    ),
    "Mooncake": (
        (
            "remote_url: 'mooncakestore://10.0.0.5:50051/'\nextra_config:\n  local_hostname: h\n  protocol: rdma\n"
            "  metadata_server: http://h:8080/metadata\n  device_name: mlx5_0\n  global_segment_size: 3355443200\n"
        ),
        own(10, mooncake={"master": "10.0.0.5:50051", "protocol": "rdma", "devices": "mlx5_0"}),
    ),
    "a bucket of a server with a port": (
        ("remote_url: s3://minio.local:9000/bucket/prefix\nextra_config: {disable_tls: true, s3_file_prefix: more}\n"),
        own(
            10,
            s3={"url": "s3://bucket/prefix/more/", "endpoint": "http://minio.local:9000", "allow_http": True},
        ),
    ),
    "a bucket with a prefix": (
        "remote_url: s3://bucket-1.t3.example.com/a/b\n",
        own(
            10,
            s3={"url": "s3://bucket-1/a/b/", "endpoint": "https://bucket-1.t3.example.com", "virtual_host": True},
        ),
    ),
    "a file system": (
        "remote_url: fs://localhost:0/mnt/nfs/lm\nextra_config: {save_chunk_meta: false, use_odirect: true}\n",
        own(10, shared_directory={"path": Path("/mnt/nfs/lm/kvtier")}),
    ),
    "a plug-in": (
        "remote_storage_plugins: [fs]\nextra_config: {remote_storage_plugin.fs.base_path: /mnt/nfs}\n",
        own(10, shared_directory={"path": Path("/mnt/nfs/kvtier")}),
    ),
    "others' servers": ("remote_url: infinistore://h:12345/?device=mlx5_0\nenable_p2p: true\np2p_host: h\n", own(10)),
}


@pytest.mark.parametrize("case", LMCACHE)
def test_a_file_of_lmcache_becomes_settings_that_the_loader_takes(case, convert):
    text, wanted = LMCACHE[case]
    Path("f.yaml").write_text(text)
    config, rows, _ = convert("vllm", "--from-lmcache", "f.yaml", "--workers", 2)
    assert values(config) == wanted
    keys = [line.split(":")[0] for line in text.splitlines() if not line.startswith((" ", "extra_config"))]
    assert {*keys} <= rows.keys()
    made = [key for key in rows if key in keys and not rows[key].startswith("(n")]
    assert made == [key for key in keys if key in made], "not in the order of the file"
    assert UNKNOWN not in str(rows)
    shared = {"valkey", "s3", "mooncake", "shared_directory"} & wanted.keys()
    assert (config.store.secret_file is not None) == bool(shared)


def test_every_key_is_named_and_what_is_off_needs_nothing(convert):
    Path("f.yaml").write_text(
        f"enable_blending: true\nenable_p2p: false\nsave_unfull_chunk: true\nremote_url: null\n"
        f"no_such_key: {PASSWORD}\nextra_config: {{neither_this: {PASSWORD}}}\n"
    )
    _, rows, _ = convert("vllm", "--from-lmcache", "f.yaml")
    fates = {key: row.partition(")")[0] + ")" for key, row in rows.items() if row[:2] in ("(n", "(s")}
    assert fates == {
        "enable_blending": LOST,
        "no_such_key": UNKNOWN,
        "extra_config.neither_this": UNKNOWN,
        "enable_p2p": NOT_NEEDED,
        "save_unfull_chunk": NOT_NEEDED,
        "PYTHONHASHSEED": NOT_NEEDED,
    }


def test_sizes_of_a_worker_ask_for_the_number_of_workers(convert):
    Path("f.yaml").write_text("max_local_cpu_size: 3\n")
    config, rows, _ = convert("vllm", "--from-lmcache", "f.yaml")
    assert (config.host.capacity_bytes, "--workers N" in rows["max_local_cpu_size"]) == (3 * GIB, True)
    config, rows, _ = convert("vllm", "--from-lmcache", "f.yaml", "--workers", 8)
    assert (config.host.capacity_bytes, "--workers N" in rows["max_local_cpu_size"]) == (24 * GIB, False)


def test_variables_of_lmcache_override_its_file(convert, monkeypatch):
    Path("f.yaml").write_text("chunk_size: 512\nmax_local_cpu_size: 1\n")
    for name, value in (
        ("MAX_LOCAL_CPU_SIZE", "2.0"),
        ("REMOTE_URL", f"redis://:{PASSWORD}@h"),
        ("EXTRA_CONFIG", '{"valkey_database": 4}'),
        ("LOCAL_DISK", "None"),
    ):
        monkeypatch.setenv(f"LMCACHE_{name}", value)
    config, rows, _ = convert("vllm", "--from-lmcache", "f.yaml")
    assert (config.store.chunk_tokens, config.host.capacity_bytes, config.tiers[0].database) == (512, 2 * GIB, 4)
    assert {
        "LMCACHE_MAX_LOCAL_CPU_SIZE",
        "chunk_size",
        "extra_config.valkey_database",
    } <= rows.keys()
    config, _, _ = convert("vllm", "--from-lmcache", "env")
    assert (config.store.chunk_tokens, config.host.capacity_bytes) == (0, 2 * GIB)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "f.yaml")
    config, rows, _ = convert("vllm", "--from-lmcache", "env")
    assert (config.store.chunk_tokens, config.host.capacity_bytes) == (512, 2 * GIB)
    assert rows["LMCACHE_CONFIG_FILE"].endswith("this file was read")


def test_flags_of_lmcaches_server_become_settings(convert):
    adapters = (
        {"type": "fs_native", "base_path": "/d", "max_capacity_gb": 3, "use_odirect": True, "num_workers": 4},
        {"type": "resp", "host": "h", "port": 6379, "password": PASSWORD},
        {"type": "raw_block", "device_path": "/dev/nvme0n1"},
    )
    words = [
        "lmcache",
        "server",
        "--l1-size-gb",
        "60",
        "--eviction-policy",
        "LRU",
        "--chunk-size=512",
        "--port",
        "5555",
    ]
    for each in adapters:
        words += ["--l2-adapter", json.dumps(each)]
    config, rows, _ = convert("vllm", "--from-lmcache", shlex.join(words))
    assert values(config) == own(
        60,
        "lru",
        512,
        directory={"path": Path("/d/kvtier"), "capacity_bytes": 3 * GIB},
        valkey={"addresses": "h:6379", "password_file": "valkey.password"},
    )
    assert rows["--l2-adapter.raw_block"].startswith(LOST)


NATIVE = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 10 * GIB,
    "block_size": 64,
    "eviction_policy": "arc",
    "secondary_tiers": [
        {"type": "fs", "root_dir": "/mnt/nvme/kv", "n_read_threads": 8, "enable_kv_events": False},
        {"type": "fs", "root_dir": "/mnt/nfs/kv", "locality": "REMOTE"},
        {
            "type": "obj",
            "prefix": "kv",
            "store_config": {
                "bucket": "b-1",
                "endpoint_override": "minio:9000",
                "secret_key": PASSWORD,
                "access_key": PASSWORD,
            },
        },
        {"type": "p2p", "host": "h"},
    ],
}
TRANSFER = {
    "OffloadingConnector": (
        NATIVE,
        own(
            10,
            directory={"path": Path("/mnt/nvme/kv/kvtier"), "read_threads": 8},
            shared_directory={"path": Path("/mnt/nfs/kv/kvtier")},
            s3={"url": "s3://b-1/kv/", "endpoint": "http://minio:9000", "allow_http": True},
        ),
    ),
    "SimpleCPUOffloadConnector": (
        {"disk_capacity_bytes": GIB, "disk_path": "/d/kv.bin", "kv_offload_backend": "disk", "cpu_bytes_to_use": GIB},
        own(1, disk={"path": Path("/d/kvtier"), "capacity_bytes": GIB}),
    ),
    "LMCacheConnectorV1": ({"lmcache.max_local_cpu_size": 6, "lmcache.local_cpu": True, "use_native": False}, own(6)),
    "LMCacheMPConnector": ({"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 5555}, own(4)),
    "MooncakeStoreConnector": (
        {"load_async": True, "store_tp_size": 8},
        own(4, mooncake={"master": "m:50051", "protocol": "rdma"}),
    ),
}


@pytest.mark.parametrize("name", TRANSFER)
def test_a_transfer_config_becomes_settings_alone_and_beside_others(name, convert, tmp_path, monkeypatch):
    extra, wanted = TRANSFER[name]
    mooncake = tmp_path / "mooncake.json"
    mooncake.write_text('{"master_server_address": "m:50051", "protocol": "rdma", "global_segment_size": "4GB"}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(mooncake))
    given = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "fail",
    }
    config, rows, printed = convert("vllm", "--from-transfer-config", json.dumps(given))
    assert (values(config), printed["kv_role"]) == (wanted, "kv_both")
    assert UNKNOWN not in str(rows)
    assert {key.removeprefix("lmcache.") for key in extra} - {"secondary_tiers"} <= rows.keys()
    file = tmp_path / "transfer.json"
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [nixl, given]},
    }
    file.write_text(json.dumps(multi))
    config, rows, printed = convert("vllm", "--from-transfer-config", file)
    assert (values(config), printed["kv_role"]) == (wanted, "kv_producer")
    assert rows["NixlConnector"].startswith("(stays)")
    assert convert("vllm", "--from-transfer-config", file, "--role", "decode")[2]["kv_role"] == "kv_consumer"


def test_both_sources_of_an_lmcache_user_are_converted_together(convert, capsys):
    Path("f.yaml").write_text("chunk_size: 512\nmax_local_cpu_size: 1\n")
    given = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.chunk_size": 1024},
    }
    assert run(["vllm", "config", "--from-lmcache", "f.yaml", "--from-transfer-config", json.dumps(given)]) == 0
    err = capsys.readouterr().err
    assert err.startswith("--from-lmcache f.yaml, --from-transfer-config  ")
    assert [line.split(None, 1)[1].strip() for line in err.splitlines() if line.startswith("chunk_size ")] == [
        "store.chunk_tokens: (overridden by --from-transfer-config)",
        "store.chunk_tokens = 1024",
    ]
    assert "--from-lmcache FILE" not in err, "advice that is followed already"
    config, _, _ = convert("vllm", "--from-lmcache", "f.yaml", "--from-transfer-config", json.dumps(given))
    assert (config.store.chunk_tokens, config.host.capacity_bytes) == (1024, GIB)
    given["kv_connector_extra_config"] = {"lmcache.chunk_size": 256}
    config, _, _ = convert("vllm", "--from-lmcache", "f.yaml", "--from-transfer-config", json.dumps(given))
    assert config.store.chunk_tokens == 0


def test_flags_of_hicache_become_settings(convert):
    extra = {"max_size": "2Gi", "prefetch_threshold": 128, "eviction_ratio": 0.9}
    given = (
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=/mnt/kv python -m sglang.launch_server --model-path M --page-size 32 "
        "--enable-hierarchical-cache \\\n --hicache-ratio 2 --hicache-storage-backend file "
        f"--hicache-storage-backend-extra-config {shlex.quote(json.dumps(extra))} --hicache-new-flag 1"
    )
    config, rows, printed = convert("sglang", "--from-flags", given, "--workers", 2)
    assert values(config) == own(4, directory={"path": Path("/mnt/kv/kvtier"), "capacity_bytes": 4 * GIB})
    assert printed["prefetch_threshold"] == 128
    for key, fate in (
        ("--hicache-ratio", "(stays)"),
        ("--model-path", "(stays)"),
        ("--hicache-new-flag", UNKNOWN),
        ("eviction_ratio", NOT_NEEDED),
        ("prefetch_threshold", "(stays)"),
    ):
        assert rows[key].startswith(fate), key


def test_the_page_size_of_pasted_flags_is_printed_unless_another_is_given(capsys):
    for more, wanted in (([], "32"), (["--page-size", "128"], "128")):
        assert run(["sglang", "config", "--from-flags", "--page-size 32 --hicache-storage-backend file", *more]) == 0
        words = shlex.split(capsys.readouterr().out)
        assert words[words.index("--page-size") + 1] == wanted


def test_mooncake_in_hicache_becomes_a_tier(convert):
    extra = {
        "master_server_address": "m:50051",
        "protocol": "rdma",
        "device_name": "mlx5_0",
        "global_segment_size": "4gb",
    }
    given = f"--hicache-storage-backend mooncake --hicache-storage-backend-extra-config '{json.dumps(extra)}'"
    config, rows, _ = convert("sglang", "--from-flags", f"MOONCAKE_MASTER=other:1 MOONCAKE_TENANT_ID=t {given}")
    assert values(config) == own(
        4, mooncake={"master": "m:50051", "protocol": "rdma", "devices": "mlx5_0", "tenant_id": "t"}
    )
    assert rows["global_segment_size"].startswith(LOST)


def test_own_flags_win(convert):
    Path("f.yaml").write_text("max_local_cpu_size: 1\nremote_url: redis://h\nremote_serde: naive\n")
    start = ("vllm", "--from-lmcache", "f.yaml")
    own_flags = ("--tier", "host=2GiB", "--set", "tiers.valkey.prefix=p", "--set", "store.secret_file=s")
    config, _, _ = convert(*start, *own_flags)
    assert (config.host.capacity_bytes, config.tiers[0].prefix, config.store.secret_file.name) == (2 * GIB, "p", "s")
    config, _, _ = convert(*start, "--tier", "disk:/mnt/nvme", "--set", "host.capacity_bytes=3GiB")
    assert ([tier.kind for tier in config.tiers], config.host.capacity_bytes) == (["disk"], 3 * GIB)
    for more, is_shared in ((["disk:/d", "host=2GiB"], False), (["redis://h"], True), (["host=2GiB"], True)):
        config, rows, _ = convert(*start, *(word for tier in more for word in ("--tier", tier)))
        assert (config.store.secret_file is not None, "(secret)" in rows) == (is_shared, is_shared), more


def printed_values(printed: dict[str, object]) -> dict[str, object]:
    """What the printed JSON sets, by ``section.key``."""
    extra = printed["kv_connector_extra_config"]
    tiers = {f"tiers.{tier['kind']}": tier for tier in extra.get("tiers", [])}
    parts = tiers | {name: section for name, section in extra.items() if name != "tiers"}
    return {f"{name}.{key}": it for name, section in parts.items() for key, it in section.items()}


OVERRIDES = [
    ([], {}),
    (["--tier", "disk:/other"], {"local_disk": "--tier", "max_local_disk_size": "--tier", "remote_url": "--tier"}),
    (["--tier", "host=2GiB"], {"max_local_cpu_size": "--tier"}),
    (["--set", "tiers.disk.capacity_bytes=1GiB"], {"max_local_disk_size": "--set"}),
    (
        ["--set", "host.evictor=fifo", "--set", "store.chunk_tokens=64"],
        {"cache_policy": "--set", "chunk_size": "--set"},
    ),
]


@pytest.mark.parametrize(("more", "wanted"), OVERRIDES)
def test_each_row_shows_what_is_printed_or_the_flag_that_overrides_it(more, wanted, convert):
    Path("f.yaml").write_text(
        "chunk_size: 256\nlocal_disk: /mnt/x\nmax_local_disk_size: 2\nmax_local_cpu_size: 1\ncache_policy: LRU\n"
        "remote_url: s3://minio:9000/bucket/prefix\n"
    )
    _, rows, printed = convert("vllm", "--from-lmcache", "f.yaml", *more)
    assert {
        key: row.partition("(overridden by ")[2].partition(")")[0] for key, row in rows.items() if "(over" in row
    } == (wanted)
    given = printed_values(printed)
    shown = {name: text for row in rows.values() for name, text in re.findall(r"([a-z_]+\.[a-z0-9_.]+) = (\S+)", row)}
    assert shown.keys() <= given.keys()
    for name, text in shown.items():
        if isinstance(given[name], str):
            assert given[name].rpartition("/")[2].strip("/") in text, name
    if not more:
        assert (shown["tiers.s3.url"], shown["tiers.s3.endpoint"]) == (
            f"{given['tiers.s3.url']},",
            "https://minio:9000",
        )


def test_a_size_of_a_disk_that_is_not_used_names_no_tier(convert):
    for text in ("local_disk: null\nmax_local_disk_size: 0\n", "max_local_disk_size: 20\n", "local_disk: /d\n"):
        Path("f.yaml").write_text(text)
        config, rows, _ = convert("vllm", "--from-lmcache", "f.yaml")
        assert config.tiers == ()
        assert "tiers." not in str(rows)
        assert rows.get("max_local_disk_size", NOT_NEEDED).startswith(NOT_NEEDED)


@pytest.mark.parametrize(
    ("text", "fate", "reason"),
    [
        ("remote_serde: naive", NOT_NEEDED, "naive is kvtier's raw"),
        ("remote_serde: cachegen", LOST, "store.loss"),
        ("save_decode_cache: true", NOT_NEEDED, "answers are stored, too"),
        ("save_decode_cache: false", LOST, "writes more"),
        ("discard_partial_chunks: false", NOT_NEEDED, "whole chunks"),
    ],
)
def test_a_reason_is_that_of_the_value_of_its_own_key(text, fate, reason, convert):
    Path("f.yaml").write_text(text)
    _, rows, _ = convert("vllm", "--from-lmcache", "f.yaml")
    row = rows[text.partition(":")[0]]
    assert row.startswith(fate)
    assert reason in row


def test_the_table_comes_before_an_error_of_a_package_that_is_missing(refusal, capsys, monkeypatch):
    registry.by_name.cache_clear()
    monkeypatch.setitem(sys.modules, "kvtier.tier.mooncake.kind", None)
    Path("f.yaml").write_text("remote_url: mooncakestore://h:1\n")
    assert run(["vllm", "config", "--from-lmcache", "f.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    table, _, error = err.partition("kvtier: ")
    assert "tiers.mooncake.master = h:1" in table
    assert "needs a package" in " ".join(error.split())
    caught = refusal("vllm", "config", "--from-lmcache", "f.yaml")
    assert (caught.setting, caught.value, caught.origin) == ("tier kind", "'mooncake'", "flag --from-lmcache f.yaml")


FILE = ["vllm", "config", "--from-lmcache", "f.yaml"]
JSON = ["vllm", "config", "--from-transfer-config"]
FLAGS = ["sglang", "config", "--from-flags"]


def native(**changes: object) -> list[str]:
    """Arguments with vLLM's own offloading."""
    extra = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {}}
    return [*JSON, json.dumps(extra | changes)]


YAML = "--from-lmcache f.yaml"
PLUG = "--from-transfer-config"
PATHS = "a path, or file:// and a path"
ADDRESSES = "HOST[:PORT], several with commas between them"
BUCKETS = "s3://BUCKET.HOST[/PREFIX], or s3://HOST:PORT/BUCKET[/PREFIX]"
CHUNKS = "0, or a multiple of 16"
BAD = [
    (FILE, "chunk_size: [", YAML, "", "", "YAML"),
    (FILE, "a: 1\nb 2\nc: 3", YAML, "", "", "YAML"),
    (FILE, f"a: 1\nb: *{PASSWORD}", YAML, "", "", "YAML"),
    (FILE, f"a: !{PASSWORD} 1", YAML, "", "", "YAML"),
    (FILE, f"- {PASSWORD}", YAML, "", "", "keys with values"),
    (FILE, "local_disk: true", "local_disk", "True", YAML, PATHS),
    (FILE, "local_disk: nfs://h/d", "local_disk", "'nfs://h/d'", YAML, PATHS),
    (FILE, "max_local_disk_size: 2GB", "max_local_disk_size", "'2GB'", YAML, "a number of GB"),
    (FILE, "max_local_cpu_size: a lot", "max_local_cpu_size", "'a lot'", YAML, "a number"),
    (FILE, "remote_url: s3://minio:9000/", "remote_url", "s3://minio:9000", YAML, BUCKETS),
    (FILE, f"remote_url: redis://u:{PASSWORD}/x@h", "remote_url", "redis://(hidden)", YAML, "%2F, %23 and %3F"),
    (FILE, f"remote_url: redis://u:{PASSWORD}#x@h", "remote_url", "redis://(hidden)", YAML, "%2F, %23 and %3F"),
    (FILE, "remote_url: redis://h/db", "remote_url", "'redis://h/db'", YAML, "the number of a database"),
    (
        FILE,
        "local_disk: /d\nmax_local_disk_size: 0.0001",
        "tiers.disk.capacity_bytes",
        "107374",
        f"flag {YAML}: max_local_disk_size",
        "from ",
    ),
    (FILE, "chunk_size: 100", "store.chunk_tokens", "100", f"flag {YAML}: chunk_size", CHUNKS),
    ([*FILE, "--set", "store.chunk_tokens=100"], "chunk_size: 512", "store.chunk_tokens", "100", "--set", CHUNKS),
    (FILE, "max_local_cpu_size: 9999999", "host.capacity_bytes", "", f"flag {YAML}: max_local_cpu_size", "GiB"),
    (FILE, "remote_url: redis://h:99999", "tiers.valkey.addresses", "'h", f"flag {YAML}: remote_url", ADDRESSES),
    (FILE, "remote_url: s3://UPPER", "tiers.s3.url", "", f"flag {YAML}: remote_url", "s3://BUCKET"),
    ([*FILE[:-1], "none.yaml"], "", "--from-lmcache", "none.yaml", "", "a readable file"),
    ([*JSON, "{'kv_connector': 1}"], "", PLUG, "", "", "JSON"),
    ([*JSON, "{}"], "", "kv_connector", "'None'", PLUG, "MultiConnector, "),
    (native(kv_connector="NixlConnector"), "", "kv_connector", "'NixlConnector'", PLUG, "MultiConnector, "),
    (native(kv_connector="MultiConnector"), "", PLUG, "", "", "a list"),
    (native(kv_connector_extra_config={"cpu_bytes_to_use": "ten"}), "", "cpu_bytes_to_use", "'ten'", PLUG, "a number"),
    (native(kv_connector_extra_config={"block_size": 264}), "", "store.chunk_tokens", "264", "block_size", CHUNKS),
    (native(kv_connector_extra_config=[1]), "", PLUG, "", "", "keys with values"),
    (native(kv_role="both"), "", "kv_role", "'both'", "", "'kv_both'"),
    ([*FLAGS, "--a 'b"], "", "--from-flags", "", "", "a command line"),
    ([*FLAGS, "--hicache-storage-backend-extra-config '{'"], "", "--from-flags", "", "", "YAML"),
]


@pytest.mark.parametrize(("arguments", "content", "setting", "value", "origin", "allowed"), BAD)
def test_what_is_wrong_is_named_with_its_origin_and_what_is_allowed(
    arguments, content, setting, value, origin, allowed, refusal, capsys
):
    Path("f.yaml").write_text(content)
    error = refusal(*arguments)
    assert error.setting == setting
    for found, text in ((error.value, value), (error.origin, origin), (error.allowed, allowed)):
        assert text in found
    assert PASSWORD not in f"{error}{vars(error)}"
    assert run(arguments) == 2
    assert str(error) in " ".join(capsys.readouterr().err.split())


def test_an_error_in_yaml_has_its_line_and_no_secret(refusal):
    for content, problem in (
        ("chunk_size: [", "is not valid YAML, line 1: expected the node content, but found "),
        ("a: 1\nb 2\nc: 3", "is not valid YAML, line 2: could not find expected ':'"),
        (f"a: 1\nb: *{PASSWORD}", "is not valid YAML, line 2: found undefined alias (hidden)"),
        (f"a: !{PASSWORD} 1", "is not valid YAML, line 1: could not determine a constructor for the tag (hidden)"),
    ):
        Path("f.yaml").write_text(content)
        assert refusal(*FILE).problem.startswith(problem)


def test_a_wrong_page_size_in_pasted_flags_is_refused(capsys):
    assert run([*FLAGS, "--page-size x"]) == 2
    assert "'x' is not a whole number" in capsys.readouterr().err


def test_settings_that_contradict_a_conversion_name_the_file_and_the_foreign_key(refusal, monkeypatch):
    Path("kvtier.toml").write_text(f'[store]\nsecret = "{"5e" * 32}"\n')
    monkeypatch.setenv("KVTIER_CONFIG", "kvtier.toml")
    Path("f.yaml").write_text("remote_url: redis://h\n")
    error = refusal(*FILE)
    assert error.setting == "store.secret, store.secret_file"
    assert re.fullmatch(rf"file .*kvtier\.toml and flag {YAML}", error.origin)


def test_without_pyyaml_the_message_says_where_it_is(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("f.yaml").write_text("chunk_size: 256")
    assert run(["vllm", "config", "--from-lmcache", "f.yaml"]) == 2
    assert "needs PyYAML, which is installed with vLLM and SGLang" in capsys.readouterr().err
