"""The dashboard and the alert rules as files. On a real server's metrics: tests/vllm/test_vllm_monitoring.py."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.observe.metric_definitions import METRICS, MetricKind
from kvtier.observe.metrics import Metrics

TOP = Path(__file__).parents[3]
DASHBOARD = TOP / "deploy" / "grafana" / "kvtier.json"
RULES = TOP / "deploy" / "prometheus" / "kvtier.rules.yml"
RULE_TESTS = RULES.with_name("kvtier.rules.test.yml")
GUIDE = TOP / "docs" / "operations.md"
NOT_SHOWN = {
    "kvtier_objects_total",
    "kvtier_object_call_seconds",
    "kvtier_lookups_total",
    "kvtier_stores_total",
    "kvtier_probes_total",
}
"""SGLang has its own of the first two. The others count calls; tokens, chunks and seconds say more."""

ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())


def promtool(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_rules_are_rules():
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_and_does_not_as_its_cases_say():
    done = promtool("test", "rules", RULE_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = RULE_TESTS.read_text()
    assert [
        name for name in ALERTS if not re.search(rf"alertname: {name}\n +eval_time: .*\n +exp_alerts:\n", cases)
    ] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kvtier_tier_up == 0", "kvtier_tier_up == 2"),
        ('reason="corrupt"', 'reason="failed"'),
        ("< 0.5 * avg", "< 1.5 * avg"),
        ('place!="host"', 'place!="disk"'),
        ("== 1\n        for: 30m", ">= 0\n        for: 30m"),
    ],
)
def test_a_wrong_rule_would_be_noticed(right, wrong, tmp_path):
    text = RULES.read_text()
    assert right in text
    (tmp_path / RULES.name).write_text(text.replace(right, wrong))
    shutil.copy(RULE_TESTS, tmp_path)
    done = promtool("test", "rules", RULE_TESTS.name, folder=tmp_path)
    assert done.returncode == 1, done.stdout


def sections(text: str) -> dict[str, str]:
    """Name and text of the section of each alert in the guide."""
    return dict(re.findall(r"^### (Kvtier\w+)\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL))


def test_the_guide_has_cause_and_action_of_every_alert():
    found = sections(GUIDE.read_text())
    assert sorted(found) == sorted(ALERTS)
    assert [name for name, text in found.items() if not re.search(r"Cause: .*Action: ", text, re.DOTALL)] == []
    anchors = re.findall(r"runbook: docs/operations\.md#(\w+)", RULES.read_text())
    assert anchors == [name.lower() for name in ALERTS]


def test_an_alert_without_a_section_would_be_noticed():
    text = GUIDE.read_text()
    assert "KvtierTierDown" not in sections(text.replace("### KvtierTierDown", "### Tiers"))
    assert "KvtierWritesAvoided" in sections(text), "the last one"


def test_every_metric_is_on_the_dashboard():
    used = set(re.findall(r"vllm:(kvtier_\w+?)(?:_bucket|_sum)?\b", DASHBOARD.read_text()))
    known = {metric.name for metric in METRICS}
    assert used <= known
    assert known - used == NOT_SHOWN
    buckets = set(re.findall(r"vllm:(kvtier_\w+)_bucket", DASHBOARD.read_text()))
    assert buckets <= {metric.name for metric in METRICS if metric.kind is MetricKind.HISTOGRAM}


def test_a_server_without_tiers_can_be_chosen_on_the_dashboard():
    queries = {it["name"]: it.get("definition", "") for it in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    used = [re.findall(r"vllm:(\w+)", queries[name]) for name in ("model", "instance")]
    shown = {series.metric.name for series in Metrics().series()}
    assert all(len(names) == 1 and names[0] in shown for names in used), used


def lost(given, found, path=""):
    """Paths of what Grafana's own types drop or change."""
    if isinstance(given, dict) and isinstance(found, dict):
        return [each for key in given for each in lost(given[key], found.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        return [
            each
            for number, pair in enumerate(zip(given, found, strict=True))
            for each in lost(*pair, f"{path}/{number}")
        ]
    return [] if given == found else [path]


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")  # Grafana 11 and 12 read this one
@pytest.mark.parametrize("mistake", [False, True])
def test_grafanas_own_types_know_every_field(mistake):
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    if mistake:
        given["panels"][1]["targets"][0]["expression"] = given["panels"][1]["targets"][0].pop("expr")
    found = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(given)))
    assert lost(given, found) == (["/panels/1/targets/0/expression"] if mistake else [])
