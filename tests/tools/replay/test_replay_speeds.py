"""Speeds of a replay: from the command line, a part, a probe, the GPUs or a default, each with its source."""

import json
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.plan.hardware import catalogue
from kvtier.tools.plan.read_inputs import load, tier_options
from kvtier.tools.plan.resolve import resolve
from kvtier.tools.replay.results import PrefillSpeed, TierSpec
from kvtier.tools.replay.tier_spec import ProbedSpeeds, find_parts, parse_tier, prefill_of
from kvtier.tools.replay.tiered import TieredSetup
from kvtier.tools.replay.tiered_report import inputs

TRACE = Path(__file__).parents[2] / "golden" / "traces" / "lmcache_miniswe_b64.jsonl.gz"
DRIVE = catalogue()["drive"]["pm1753"].values


def measure(op, size, depth, gb_per_s, latency_us):
    return {
        "op": op,
        "bytes": size,
        "depth": depth,
        "gb_per_s": gb_per_s,
        "latency_us_p50": latency_us,
        "latency_us_p99": latency_us,
        "count": 9,
    }


@pytest.fixture
def record(tmp_path):
    links = [
        {"name": "host", "measures": [measure("copy", 1 << 20, 1, 9.0, 110)]},
        {
            "name": "directory",
            "measures": [
                measure("read", 1 << 20, 1, 1.0, 850),
                measure("read", 1 << 22, 1, 1.5, 2500),
                measure("read", 1 << 22, 8, 2.0, 15_000),
                measure("write", 1 << 22, 8, 3.0, 9_000),
            ],
        },
    ]
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"results": {"links": links}}))
    return path


def test_tiers_are_read_from_text():
    spec = parse_tier("disk=4TiB?read=7GB/s&write=1.5GB/s&latency=2ms")
    assert spec == TierSpec(
        name="disk",
        capacity_bytes=4 << 40,
        read_bytes_per_s=7e9,
        write_bytes_per_s=1.5e9,
        latency_s=2e-3,
    )
    drives = parse_tier("disk=4x7.68TB?read=7GB/s")
    assert (drives.capacity_bytes, drives.drive_bytes) == (0.9 * 4 * 7_680 * 10**9, 4 * 7_680 * 10**9)
    assert drives.sources["capacity_bytes"] == "90% of --tier"
    assert drives.read_bytes_per_s == 7e9
    assert parse_tier("disk=4TiB?drives=40TB").drive_bytes == 40 * 10**12
    assert parse_tier("fast=disk:/mnt/kv?read_threads=9").capacity_bytes == 64 << 30, "the kind's default"
    assert parse_tier("disk=7.68TBx4").capacity_bytes == drives.capacity_bytes
    wrong = [
        "s3",
        "=4TiB",
        "disk=much",
        "disk=3xh100-sxm",
        "disk=0xpm1753",
        "disk=0x7.68TB",
        "disk=4x",
        "host=2x64GiB",
        "disk=1TiB?drives=none",
        "pool=1TiB",
    ]
    wrong += ["disk=8TiB?drives=4TB", "disk=4TiB?speed=3", "disk=4TiB?latency=2h", "disk=4TiB?read=12GB"]
    for text in wrong:
        with pytest.raises(ConfigError, match="--tier"):
            parse_tier(text)


def test_the_kind_decides_whether_a_tier_is_remote_and_shared():
    flags = {"disk=1TiB": False, "s3=1TiB": True, "pool=s3?capacity=1TiB": True, "s3=disk?capacity=1TiB": False}
    found = {text: parse_tier(text) for text in flags}
    assert {text: spec.is_remote for text, spec in found.items()} == flags
    assert {text: spec.is_shared for text, spec in found.items()} == flags


def test_the_latency_of_a_remote_tier_is_the_probes_round_trip(tmp_path):
    path = tmp_path / "probe.json"
    read = {"op": "read", "bytes": 1 << 20, "depth": 1, "gb_per_s": 1.0, "latency_us_p50": 3000}
    links = [{"name": name, "measures": [read], "round_trip_us": 800.0} for name in ("s3", "drawer")]
    path.write_text(json.dumps({"links": links}))
    probe = ProbedSpeeds(path)
    assert parse_tier("s3=1TiB", probe=probe).latency_s == 8e-4
    assert parse_tier("drawer=directory?capacity=1TiB", probe=probe).latency_s == pytest.approx(3e-3 - (1 << 20) / 1e9)


def test_precedence_of_option_part_probe_and_default(record):
    probe = ProbedSpeeds(record)
    drive = parse_tier("disk=2xpm1753?latency=2ms", probe=probe)
    assert drive.capacity_bytes == 0.9 * drive.drive_bytes == 0.9 * 2 * DRIVE["capacity_bytes"]
    plan = resolve(load(options={"model.name": "llama-3.1-8b"} | tier_options(["disk=2xpm1753"])))
    assert drive.capacity_bytes == plan.tiers[0].capacity_bytes
    assert (drive.read_bytes_per_s, drive.write_bytes_per_s) == (2 * 14.5e9, 2 * 10e9)
    assert (drive.latency_s, drive.rated_writes_per_day) == (2e-3, 1)
    assert drive.sources["read_bytes_per_s"].startswith("catalogue: 2 x pm1753 (Samsung")
    assert drive.sources["latency_s"] == "--tier"
    part = parse_tier("disk=1TiB?drives=pm1753&read=1GB/s", probe=probe)
    assert (part.capacity_bytes, part.drive_bytes) == (1 << 40, DRIVE["capacity_bytes"])
    assert (part.read_bytes_per_s, part.write_bytes_per_s) == (1e9, 10e9)
    probed = parse_tier("disk=1TiB", probe=probe)
    assert (probed.read_bytes_per_s, probed.write_bytes_per_s) == (2e9, 3e9)
    assert probed.latency_s == pytest.approx(850e-6 - (1 << 20) / 2e9)
    assert f"probe {record}: directory" in probed.sources["read_bytes_per_s"]
    drives = parse_tier("disk=3x7.68TB", probe=probe)
    assert (drives.read_bytes_per_s, drives.write_bytes_per_s, drives.latency_s) == (6e9, 9e9, probed.latency_s)
    assert drives.sources["read_bytes_per_s"].startswith("3 x probe ")
    drives = parse_tier("disk=4x7.68TB?write=1GB/s")
    assert (drives.read_bytes_per_s, drives.write_bytes_per_s, drives.latency_s) == (48e9, 1e9, 1e-4)
    assert drives.sources["read_bytes_per_s"] == "4 x default: one PCIe 5 drive"
    assert parse_tier("s3=4x10TB").read_bytes_per_s == 5e9
    other = parse_tier("pool=shared_directory?capacity=1TiB", probe=probe)
    assert (other.read_bytes_per_s, other.sources["read_bytes_per_s"]) == (5e9, "default")
    assert parse_tier("disk=1TiB").sources["read_bytes_per_s"].startswith("default")


def test_host_memory_is_as_fast_as_the_gpus_links_unless_it_was_probed(record):
    gpus = find_parts("8xh100-sxm", "--gpu", "gpu")
    host = parse_tier("host=1TiB", gpu=gpus)
    assert host.read_bytes_per_s == host.write_bytes_per_s == pytest.approx(0.8 * 8 * 64e9)
    assert "8 x h100-sxm" in host.sources["read_bytes_per_s"]
    assert parse_tier("host=1TiB", gpu=gpus, probe=ProbedSpeeds(record)).read_bytes_per_s == 9e9
    assert parse_tier("disk=1TiB", gpu=gpus).read_bytes_per_s == 12e9


def test_prefill_is_that_of_the_model_on_the_gpus():
    gpus = find_parts("8 x H100_SXM", "--gpu", "gpu")
    prefill = prefill_of("llama-3.3-70b", gpu=gpus)
    parameters = 70.55e9
    assert prefill.tokens_per_s == pytest.approx(8 * 989e12 * 0.5 / (2 * parameters), rel=0.01)
    assert prefill.attention_tokens == pytest.approx(2 * parameters / (80 * 2 * 64 * 2 * 128), rel=0.01)
    assert "8 x h100-sxm" in prefill.source
    assert prefill_of("llama-3.3-70b", tokens_per_s=123.0, gpu=gpus).tokens_per_s == 123
    assert prefill_of("llama-3.3-70b").tokens_per_s == PrefillSpeed().tokens_per_s
    # Half of this model's layers have a window of 128 tokens, with constant cost beyond it.
    windowed = prefill_of("gpt-oss-120b", gpu=gpus)
    assert [tokens for tokens, _ in windowed.windows] == [128]
    by_token = [windowed.seconds(at, at + 1) for at in (0, 64, 100_000, 100_064)]
    assert by_token[1] - by_token[0] > 1.5 * (by_token[3] - by_token[2])


def test_a_mixture_of_experts_computes_as_slowly_as_in_a_plan():
    """Mixtral's experts reached half of the GPUs' peak in a replay, but 15 % in a plan, as in published times."""
    prefill = prefill_of("mixtral-8x22b", gpu=find_parts("8xmi300x", "--gpu", "gpu"))
    assert prefill.tokens_per_s == pytest.approx(8 * 1307.4e12 * 0.15 / (2 * 39e9), rel=1e-3)
    # A token at 10,000 attends in 56 layers to 48 heads of 128, at half of the peak.
    attention_s = 10_000 * 56 * 4 * 48 * 128 / (8 * 1307.4e12 * 0.5)
    assert prefill.seconds(10_000, 10_001) == pytest.approx(1 / prefill.tokens_per_s + attention_s, rel=1e-3)
    planned = resolve(load(options={"model.name": "mixtral-8x22b", "gpu.name": "mi300x", "model.tp": 8}))
    assert planned.flops / (2 * 39e9) == pytest.approx(prefill.tokens_per_s, rel=1e-6)


def test_the_prefill_speed_of_a_model_without_a_number_of_parameters_is_the_given_one(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **config}))
    assert prefill_of(str(tmp_path)).tokens_per_s == PrefillSpeed().tokens_per_s
    assert prefill_of(str(tmp_path), tokens_per_s=5.0).tokens_per_s == 5.0
    with pytest.raises(ConfigError, match="the prefill speed is 0 tokens a second; allowed"):
        prefill_of(str(tmp_path), tokens_per_s=0.0)


@pytest.mark.parametrize("name", [*catalogue()["gpu"]])
def test_every_gpu_has_prefill_and_link_speeds(name):
    gpu = find_parts(name, "--gpu", "gpu")
    assert prefill_of("llama-3.1-8b", gpu=gpu).tokens_per_s > 1000
    assert gpu.speed.read_bytes_per_s > 1e9


@pytest.mark.parametrize("kind", ["drive", "gpu"])
def test_every_part_has_speeds(kind):
    for name in catalogue()[kind]:
        speeds = find_parts(f"2x{name}", "--tier", kind).speed
        assert min(speeds.read_bytes_per_s, speeds.write_bytes_per_s) > 1e9


def test_a_window_costs_what_its_tokens_cost():
    prefill = PrefillSpeed(tokens_per_s=1.0, attention_tokens=float("inf"), windows=((100, 50.0),))
    assert prefill.seconds(0, 10) == pytest.approx(10 * (1 + 5 / 50))
    assert prefill.seconds(1000, 1001) == pytest.approx(1 + 100 / 50)
    with pytest.raises(ConfigError, match="attention_tokens"):
        PrefillSpeed(windows=((100, 0.0),))


def test_inputs_have_their_sources(record, capsys):
    tiers = (parse_tier("host=1GiB"), parse_tier("disk=1TiB", probe=ProbedSpeeds(record)))
    rows = {it["what"]: it for it in inputs(TieredSetup(tiers=tiers, token_bytes=1.0))}
    assert rows["disk, reads"]["value"] == "2 GB/s"
    assert str(record) in rows["disk, reads"]["source"]
    assert rows["prefill of one prompt"]["source"].startswith("default")
    assert rows["host, capacity"]["source"] == "--tier"
    options = [
        "--tier",
        "host=1GiB",
        "--model",
        "llama-3.1-8b",
        "--probe",
        str(record),
        "--gpu",
        "h100-pcie",
        "--block",
        "512",
    ]
    assert run(["replay", str(TRACE), *options, "--json"]) == 0
    sources = {it["what"]: it["source"] for it in json.loads(capsys.readouterr().out)["inputs"]}
    assert "probe" in sources["host, to the engine"]
    assert "1 x h100-pcie" in sources["prefill of one prompt"]
    assert run(["replay", str(TRACE), *options]) == 0
    assert "1 x h100-pcie" in capsys.readouterr().out


def test_a_tier_without_sources_is_given():
    spec = TierSpec(name="host", capacity_bytes=1, read_bytes_per_s=1.0, write_bytes_per_s=1.0, latency_s=0.0)
    setup = TieredSetup(tiers=(spec,), token_bytes=1.0)
    assert {it["source"] for it in inputs(setup)} == {PrefillSpeed().source, "given"}
