"""`kvtier plan` on the command line: one line for every error, JSON on request, text of at most 100 columns."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.config.loader import load as load_settings
from kvtier.tools.plan.inputs import SETTINGS
from kvtier.tools.plan.lossy_classes import QUALITY

MODEL = "llama-3.1-8b"


@pytest.fixture
def quick(monkeypatch):
    """Plans without sensitivities, which take most of the time."""
    monkeypatch.setattr("kvtier.tools.plan.plan.sensitivities", lambda *_: [])


def output(capsys, *arguments):
    code = run(["plan", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no model is given"),
        (["nosuch-model-9b"], "nosuch-model-9b"),
        ([MODEL, "--gpu", "h100-smx"], "gpu.name = 'h100-smx' (from --gpu)"),
        ([MODEL, "--tier", "disk=pm1754"], "disk.name = 'pm1754' (from --tier)"),
        ([MODEL, "--users", "-5"], "traffic.users = '-5' (from --users)"),
        ([MODEL, "--users", "1e99"], "traffic.users = '1e99' (from --users)"),
        ([MODEL, "--interval", "0"], "traffic.interval_s = '0' (from --interval)"),
        ([MODEL, "--ttft", "0s"], "set a limit for one of them"),
        ([MODEL, "--ttft", "0.0"], "set a limit for one of them"),
        ([MODEL, "--ttft", "0"], "set a limit for one of them"),
        ([MODEL, "--ttft", "1us"], "target.ttft_s = '1us' (from --ttft)"),
        ([MODEL, "--time-unit", "s"], "traffic.trace_time_unit = 's' (from --time-unit)"),
        ([MODEL, "--set", "traffic.load=2"], "traffic.load = 2.0 (from --set traffic.load)"),
        ([MODEL, "--set", "traffic.trace_window_s=60"], "traffic.trace_window_s = 60.0 (from --set"),
        ([MODEL, "--ttft", "soon"], "target.ttft_s = 'soon' (from --ttft)"),
        ([MODEL, "--reuse", "1.5"], "traffic.reuse = '1.5' (from --reuse)"),
        ([MODEL, "--reuse", "1"], "traffic.reuse = 1 (from --reuse)"),
        ([MODEL, "--history", "200000"], "allows at most 131,072"),
        ([MODEL, "--tp", "16"], "is less than model.tp = 16"),
        ([MODEL, "--tp", "8", "--gpu", "4xh100-sxm"], "gpu.count = 4 (from --gpu)"),
        ([MODEL, "--gpu", "0xh100-sxm"], "'0xh100-sxm' is not allowed; allowed: 1 to"),
        ([MODEL, "--tier", "flash=1TB"], "tier kind 'flash' (from --tier): unknown kind"),
        ([MODEL, "--tier", "disk=1TB?latency=1s"], "a plan does not use latency= for disk"),
        (
            [MODEL, "--tier", "s3=1TB?latency=1ms"],
            "--tier 's3=1TB': a plan does not use latency= for shared; leave out latency=",
        ),
        ([MODEL, "--tier", "host=1TB?write=1GB/s"], "a plan does not use write= for host; leave out write="),
        ([MODEL, "--tier", "disk=1TB?drives=pm1753"], "gives a capacity and drives; give one of them"),
        ([MODEL, "--tier", "host=1TB", "--tier", "host=2TB"], "a plan takes only one host tier"),
        ([MODEL, "--tier", "host=lots"], "host memory has no drives; allowed: a size"),
        (["llama-3.1-405b"], "810.0 GB"),
        ([MODEL, "--dtype", "fp7"], "fp7"),
        ([MODEL, "--set", "gpu.flop=1"], "gpu.flop (from --set gpu.flop)"),
        ([MODEL, "--set", "gpus.flops=1"], "gpus (from --set gpus.flops)"),
        ([MODEL, "--set", "gpu.flops_share=nan"], "gpu.flops_share = 'nan' (from --set gpu.flops_share)"),
        ([MODEL, "--set", "gpu.flops_share"], "--set gpu.flops_share"),
        ([MODEL, "--example", "samsnug"], "samsung"),
        ([MODEL, "--trace", "nosuch.jsonl"], "nosuch.jsonl"),
        ([MODEL, "--file", "nosuch.toml"], "nosuch.toml"),
        ([MODEL, "--picture", "picture.pdf"], "--picture 'picture.pdf'"),
    ],
)
def test_an_error_is_exit_code_2_and_one_line_that_names_the_value(capsys, monkeypatch, tmp_path, arguments, why):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1
    assert why in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--report", "--picture"])
def test_charts_without_matplotlib_are_refused_before_planning(capsys, monkeypatch, tmp_path, option):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "kvtier.report.output.find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    assert run(["plan", MODEL, option, str(tmp_path / "plan.svg")]) == 2
    assert "needs matplotlib, which is not installed; run pip install 'matplotlib>=3.9'" in capsys.readouterr().err


def test_json_is_the_whole_plan(capsys):
    plan = json.loads(output(capsys, MODEL, "--users", "200", "--json"))
    assert plan["chunk_bytes"] == 33_554_432
    assert plan["inputs"]["traffic.users"] == {"value": 200, "from": "--users", "help": "Users at the same time."}
    assert plan["inputs"].keys() == SETTINGS.keys()
    assert plan["inputs"]["gpu.flops"] == {
        "value": 989e12,
        "from": "catalogue h100-sxm",
        "help": "Peak FLOP/s of one GPU, dense, in the weights' format.",
    }
    assert plan["tiered"]["users_at_ttft"] > plan["alone"]["users_at_ttft"]
    assert plan["binding_limit"] == next(it["name"] for it in plan["tiered"]["limits"] if not it["is_reserve"])
    assert plan["alone"]["cost"]["per_hour"] is None
    assert {it["name"] for it in plan["sources"]} == {"h100-sxm", "nvlink4", "pm1753", "ddr5-4800"}


def test_infinity_is_null_in_json(capsys):
    plan = json.loads(output(capsys, MODEL, "--users", "100000", "--json"))
    assert plan["alone"]["ttft_s"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3.3-70b", "--tp", "4", "--set", "price.gpu=20000", "--set", "price.drive=900", "--interval", "90s"),
        (
            "deepseek-r1",
            "--tp",
            "8",
            "--weights",
            "fp8",
            "--gpu",
            "8xb200-sxm",
            "--set",
            "shared.capacity_bytes=1000TB",
            "--set",
            "software.copies=0",
        ),
        (MODEL, "--turns", "1", "--users", "1000000"),
    ],
)
def test_the_text_fits_into_100_columns_and_begins_with_the_answer(capsys, arguments):
    lines = output(capsys, *arguments).splitlines()
    assert [line for line in lines if len(line) > 100] == []
    assert lines[0].startswith(("80 users fit on 8 x ", "1,000,000 users do not fit on 8 x "))
    first = " ".join(lines[: lines.index("")])
    assert re.search(r" with (GPU memory alone|host memory|local drives|shared storage)\b", first)
    answer, _, rest = "\n".join(lines).partition("\nWhat ")
    assert re.search(r" Within 1 s on average .* serve [\d,]+ users with ", " ".join(answer.split()))
    assert rest.startswith(("80 users need\n", "1,000,000 users need\n"))
    assert rest.index("\nGPUs ") < rest.index("\npower on average, kW ") < rest.index("\n- Binding limit")
    assert "# kvtier settings of " in "\n".join(lines[-24:])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--reuse", "0"), "no prompt repeats tokens of an earlier one"),
        (("--turns", "1", "--system", "0"), "no prompt repeats tokens of an earlier one"),
        (("--tier", "host=1GiB"), "host memory holds 1.074 GB, less than one conversation"),
        (
            ("--tier", "host=100GiB"),
            "host memory holds 107.4 GB, less than the 570.2 GB that GPU memory holds as tiers store it",
        ),
        (("--tier", "host=0"), "The plan has no tiers."),
        (
            ("--tier", "host=1GiB", "--tier", "disk=4xpm1753", "--set", "disk.write_bytes_per_s=5e7"),
            (
                "No tier is worth buying for a full server: not host memory, because host memory holds 1.074 GB, less "
                "than one conversation, and not local drives, because new KV is written too slowly, 2% of it in time "
                "at 288 users."
            ),
        ),
    ],
)
def test_tiers_that_gain_nothing_are_named_with_the_reason(capsys, arguments, why):
    text = " ".join(output(capsys, MODEL, *arguments).split("What 80 users need")[0].split())
    assert "users with GPU memory alone. " in text
    assert text.endswith(why if why.endswith(".") else f"No tier is worth buying for a full server, because {why}.")


@pytest.mark.usefixtures("quick")
def test_wear_costs_no_users(capsys):
    """Drives that last a day serve as many users as those that last for ever; the text says what would last."""
    worn, firm = (
        json.loads(output(capsys, MODEL, "--set", f"disk.drive_writes_per_day={rated}", "--json"))
        for rated in ("0.001", "1000")
    )
    assert worn["tiered"] == firm["tiered"]
    assert worn["verdict"] == firm["verdict"]
    assert worn["drives"]["life_years"] < 0.01
    assert worn["drives"]["write_policy"] == "budget"
    assert 0.98 < worn["drives"]["write_share"] / (worn["drives"]["life_years"] / 5) <= 1  # fewer hits compute more
    assert any("a write budget of" in it for it in worn["conclusion"])
    assert firm["drives"]["write_policy"] == "through"


@pytest.mark.usefixtures("quick")
def test_slow_drives_cost_no_users(capsys):
    slow = json.loads(output(capsys, MODEL, "--set", "disk.read_bytes_per_s=100e6", "--json"))
    assert slow["tiered"]["users_at_all_limits"] >= slow["alone"]["users_at_all_limits"]
    less = json.loads(output(capsys, MODEL, "--tier", "disk=4xpm1753", "--set", "disk.read_bytes_per_s=4e9", "--json"))
    assert any("drive bandwidth is short (" in it for it in less["conclusion"])


@pytest.mark.usefixtures("quick")
def test_the_size_that_serves_most_users_is_planned_for_each_arm(capsys):
    """With the fewest GPUs that hold the model it was 10 and 6 users."""
    plan = json.loads(output(capsys, "llama-3.3-70b", "--json"))
    assert (plan["tp_with_tiers"], plan["tp_without_tiers"]) == (8, 8)
    assert plan["inputs"]["model.tp"]["from"] == "the smallest size that serves most users"
    by_tp = {it["tp"]: (int(it["users_without_tiers"]), int(it["users_with_tiers"])) for it in plan["sizes"]}
    assert by_tp == {2: (5, 9), 4: (38, 51), 8: (53, 66)}
    assert (int(plan["users_without_tiers"]), int(plan["users_with_tiers"])) == by_tp[8]
    fixed = json.loads(output(capsys, "llama-3.3-70b", "--tp", "4", "--json"))
    assert (fixed["tp_with_tiers"], fixed["tp_without_tiers"]) == (4, 4)
    assert (int(fixed["users_without_tiers"]), int(fixed["users_with_tiers"])) == by_tp[4]
    assert run(["plan", "llama-3.3-70b", "--tp", "1"]) == 2
    assert "1 x h100-sxm leave 0.0 GB" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_gpus_and_tiers_have_the_grammar_of_all_commands(capsys):
    def values(*arguments):
        inputs = json.loads(output(capsys, MODEL, *arguments, "--json"))["inputs"]
        keys = ("gpu.name", "gpu.count", "host.capacity_bytes", "disk.name", "disk.count", "disk.capacity_bytes")
        return [inputs[key]["value"] for key in keys]

    assert values("--gpu", "4xh200-sxm", "--tier", "disk=2xpm9d3a")[:5] == ["h200-sxm", 4, 0, "pm9d3a", 2]
    assert values("--gpu", "mi300xx2", "--tier", "host=64GiB")[:5] == ["mi300x", 2, 2**36, "pm1753", 0]
    assert values("--gpu", "h200-sxm", "--tier", "disk=pm9d3a")[:5] == ["h200-sxm", 1, 0, "pm9d3a", 1]
    assert values("--tier", "disk=10x7.68TB")[4:] == [10, 7_680_000_000_000]
    assert values("--tier", "disk=0", "--tier", "host=1TB")[4] == 0

    def shared(text):
        return json.loads(output(capsys, MODEL, "--tier", text, "--json"))["inputs"]["shared.capacity_bytes"]["value"]

    assert shared("s3=1000TB") == shared("shared_directory=1000TB") == 10**15
    assert values("--tier", "directory=2xpm9d3a")[3:5] == ["pm9d3a", 2]
    assert run(["plan", MODEL, "--tier", "s3=1TB", "--tier", "valkey=1TB"]) == 2
    assert "a plan takes only one shared tier" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "arguments",
    [
        (MODEL,),
        (MODEL, "--set", "disk.drive_writes_per_day=100"),
        (MODEL, "--tier", "host=0", "--tier", "s3=1000TB"),
        ("deepseek-r1", "--gpu", "16xh200-sxm", "--weights", "fp8", "--set", "software.skips_slow_loads=false"),
    ],
)
def test_the_plan_ends_with_settings_that_kvtier_reads(capsys, tmp_path, arguments):
    plan = json.loads(output(capsys, *arguments, "--json"))
    path = tmp_path / "kvtier.toml"
    path.write_text(plan["settings"])
    config = load_settings(path, {}).config
    worth = {it["name"] for it in plan["tiers"] if it["worth_it"]}
    value, replicas = (lambda name: plan["inputs"][name]["value"]), plan["replicas"]
    if "host" in worth:
        assert config.host.capacity_bytes == value("host.capacity_bytes") // replicas
    kinds = [("disk", "disk"), ("shared_directory", "shared")]
    assert [tier.kind for tier in config.tiers] == [kind for kind, name in kinds if name in worth]
    if "disk" in worth:
        disk = config.tiers[0]
        drives = value("disk.count") * value("disk.capacity_bytes") * value("disk.filled")
        assert disk.capacity_bytes == pytest.approx(drives / replicas, rel=1e-3)
        is_bought = any(it["is_worth_buying_for_load"] for it in plan["choices"])
        is_free = is_bought and plan["drives"]["users"] >= value("traffic.users")
        assert bool(disk.write_bytes_per_day) == (plan["drives"]["write_policy"] == "budget" and is_free)
    if "shared" in worth:
        assert config.tiers[-1].capacity_bytes == pytest.approx(value("shared.capacity_bytes"), rel=1e-3)
    assert config.planner.enabled == value("software.skips_slow_loads")


def test_what_raises_the_limit_is_computed(capsys):
    """The text names inputs, their higher values and the users that they give; a plan with one of them agrees."""
    lines = " ".join(output(capsys, "llama-3.3-70b", "--users", "20").split())
    gpus, users = re.search(r"To raise it: .*?gpu\.count = (\d+) gives (\d+)", lines).groups()
    answer = output(capsys, "llama-3.3-70b", "--users", "20", "--gpu", f"{gpus}xh100-sxm")
    assert f"16 x h100-sxm serve {users} users with host memory" in " ".join(answer.split())


def test_every_input_in_use_is_printed_with_its_origin(capsys, tmp_path):
    (tmp_path / "site.toml").write_text("[gpu]\nflops_share = 0.4\n[price]\ngpu = 20000\n")
    options = ["--file", str(tmp_path / "site.toml"), "--gpu", "16xh100-sxm", "--set", "target.burst=3"]
    assert "Assumptions" not in output(capsys, MODEL, *options)
    out = output(capsys, MODEL, *options, "--show-inputs")
    lines = [line.split() for line in out.partition("Assumptions")[2].splitlines() if line]
    shown = {line[0]: line[1:] for line in lines}
    for name in SETTINGS:
        is_used = not name.startswith(("shared.", "traffic.trace", "traffic.load", "price."))
        assert name in shown or not is_used, name
    assert shown["gpu.count"][:2] == ["16", "--gpu"]
    for name, value in (("gpu.flops_share", "0.4"), ("price.gpu", "20,000")):
        assert shown[name][:3] == [value, "file", str(tmp_path / "site.toml")]
    assert "source of pm1753: Samsung PM1753 product page" in out


def test_later_wins(capsys, tmp_path):
    (tmp_path / "site.toml").write_text("[traffic]\nusers = 2\nturns = 3\nanswer_tokens = 4\n")
    arguments = ["--example", "samsung", "--file", str(tmp_path / "site.toml"), "--turns", "5", "--json"]
    inputs = json.loads(output(capsys, *arguments, "--set", "traffic.answer_tokens=6"))["inputs"]
    assert [inputs[f"traffic.{key}"]["value"] for key in ("users", "turns", "answer_tokens", "prefix_tokens")] == [
        2,
        5,
        6,
        1000,
    ]
    assert inputs["traffic.users"]["from"] == f"file {tmp_path / 'site.toml'}"
    assert inputs["traffic.prefix_tokens"]["from"] == "example samsung"


def test_hardware_outside_the_catalogue_needs_all_its_figures(capsys):
    figures = ["capacity_bytes=8TB", "read_bytes_per_s=9GB/s", "write_bytes_per_s=5GB/s", "drive_writes_per_day=1"]
    sets = [part for it in figures for part in ("--set", f"disk.{it}")]
    assert run(["plan", MODEL, "--tier", "disk=ours", *sets]) == 2
    assert "the catalogue has no such drive" in capsys.readouterr().err
    plan = json.loads(output(capsys, MODEL, "--tier", "disk=4xours", *sets, "--set", "disk.watts=12", "--json"))
    assert plan["inputs"]["disk.capacity_bytes"]["value"] == 8 * 10**12
    assert "ours" not in {it["name"] for it in plan["sources"]}


def test_every_item_of_the_catalogue_has_a_source_and_a_date(capsys):
    out = output(capsys, "--hardware")
    assert [line for line in out.splitlines() if len(line) > 100] == []
    items = json.loads(output(capsys, "--hardware", "--json"))
    assert {"h100-nvl", "pm1753", "ddr5-4800", "nic-400g"} <= {it["name"] for it in items}
    assert all(len(it["source"]) > 10 and it["date"].startswith("20") for it in items)
    assert run(["plan", "--hardware", "--gpu", "h100-sxm"]) == 2
    assert "--hardware is given with --gpu; allowed: --hardware alone" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_loss_shows_what_each_class_would_change(capsys):
    """The same drive holds more with a class, so it serves more users, lasts longer, and less of it is enough."""
    arguments = ["llama-3.3-70b", "--users", "300", "--interval", "300", "--tier", "disk=1x3.84TB", "--loss"]
    none, k8v4, int4 = json.loads(output(capsys, *arguments, "--json"))["loss"]
    assert [it["loss"] for it in (none, k8v4, int4)] == ["none", "k8v4", "int4"]
    assert [it["share"] for it in (none, k8v4, int4)] == [1, 0.388671875, 0.294921875]
    assert none["users"] < k8v4["users"] < int4["users"]
    assert none["life_years"] < k8v4["life_years"] < int4["life_years"]
    assert none["enough_bytes"] > k8v4["enough_bytes"] > int4["enough_bytes"]
    # A class that codes nothing changes nothing, and hits are those of the plan.
    plan = json.loads(output(capsys, "deepseek-v3", "--gpu", "8xh200-sxm", "--loss", "--json"))
    assert len({tuple(it.values())[1:] for it in plan["loss"]}) == 1
    assert plan["loss"][0]["users"] == pytest.approx(plan["needs"][-1]["users_at_most"], rel=0.05)
    assert "KV with loss on " in output(capsys, *arguments)
    assert "KV with loss" not in output(capsys, *arguments[:-1])
    # A class can be named, as in `kvtier replay`, and left out before the model.
    assert json.loads(output(capsys, *arguments, "int4", "--json"))["loss"] == [none, int4]
    assert json.loads(output(capsys, "--loss", *arguments[:-1], "--json"))["loss"] == [none, k8v4, int4]
    assert run(["plan", *arguments, "int3"]) == 2
    assert "--loss 'int3': no such class; allowed: none, k8v4, int4, or nothing" in capsys.readouterr().err


def test_the_quality_of_a_class_is_that_of_the_records():
    """`plan --loss` names the largest KL of all judges and texts."""
    records = (Path(__file__).parents[3] / "bench" / "records").glob("quality_*.json")
    rows = [row for record in records for row in json.loads(record.read_text())["results"]]
    for loss in ("k8v4", "int4"):
        worst = max(row["kl"] / row["noise_kl"] for row in rows if row["codec"] == loss)
        assert QUALITY[loss] == f"KL up to {worst:.1f} N"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("users", ["300", "5"])
def test_the_classes_with_loss_are_compared_on_the_hardware_of_the_load(capsys, users):
    """It said 300 users on 124 GPUs, and its figures were those of the given 4 GPUs, which serve 10."""
    given = ["--gpu", "4xl40s", "--ttft", "3s", "--interval", "60s", "--history", "30000", "--tier", "host=512GiB"]
    arguments = ["qwen3-32b", *given, "--users", users, "--tier", "disk=4x7.68TB?read=20GB/s", "--loss"]
    plan = json.loads(output(capsys, *arguments, "--json"))
    gpus = next(it["gpus"] for it in plan["needs"] if "disk" in it["tiers"])
    assert (gpus == 4) == (users == "5")
    assert all(it["users"] >= int(users) for it in plan["loss"])
    text = " ".join(output(capsys, *arguments).split())
    hardware = f"KV with loss on {gpus} x l40s with host memory and local drives: "
    assert f"{hardware}most users, and figures for {users} users store.loss" in text


def test_the_json_has_the_gpu_seconds_and_the_price_of_computing_a_token(capsys, quick, tmp_path):
    """A token of 22,000 takes two operations a parameter, and four a layer and channel for each of 11,000 others."""
    one = json.loads(output(capsys, MODEL, "--gpu", "1xh100-sxm", "--tp", "1", "--json"))
    flop = 2 * 8e9 + 4 * 32 * 4096 * 11_000
    assert one["prefill_gpu_s_per_token"] == pytest.approx(flop / (989e12 * 0.5))
    assert one["price_per_gpu_hour"] is None
    (tmp_path / "plan.json").write_text(output(capsys, MODEL, "--example", "prices", "--json"))
    many = json.loads((tmp_path / "plan.json").read_text())
    assert many["price_per_gpu_hour"] == pytest.approx(many["tiered"]["cost"]["per_hour"] / 8)
    assert many["prefill_gpu_s_per_token"] > one["prefill_gpu_s_per_token"], "its GPUs exchange"
    trace = Path(__file__).parents[2] / "golden/traces/claude_code_17sessions.jsonl.gz"
    assert run(["trace", "advise", str(trace), "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    cuts = json.loads(capsys.readouterr().out)["savings"][0]
    assert cuts["gpu_s"] == pytest.approx(213_952 * many["prefill_gpu_s_per_token"])
    assert cuts["cost"] == pytest.approx(cuts["gpu_s"] * many["tiered"]["cost"]["per_hour"] / 8 / 3600)
