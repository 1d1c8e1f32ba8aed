"""The dashboard and the alert rules, on a real server's metrics, in a real Prometheus and in a browser."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from judge import prompt
from server import Server
from settings import connector
from tests import browser
from tests.waiting import free_port

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "kvtier.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "kvtier.json"
VARIABLES = {"$__rate_interval": "1m", "$model": ".+", "$instance": ".+", "$tier": ".+"}
SELECTOR = re.compile(r"(?:vllm|instance):[\w:]+(?:\{[^}]*\})?")
DEADLINE_S = 30.0
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(8 << 20))


class Prometheus:
    """A Prometheus server on a port of this machine that scrapes one target every second."""

    def __init__(self, folder: Path, target: str) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("needs Prometheus: apt-get install prometheus")
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self.console = folder / "kvtier.html"
        """Served as ``/consoles/kvtier.html``."""
        command = [
            program,
            f"--web.console.templates={folder}",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--web.listen-address={address}",
        ]
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen([*command, f"--storage.tsdb.path={folder / 'data'}"], stderr=log)

    def ask(self, path: str, **fields: str) -> Any:
        """The data of an answer of the HTTP API; an error is an exception."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def await_(self, server: Server, condition: str) -> None:
        """Ask more prompts in turn than vLLM and host memory can keep, until the condition holds."""
        until_s = time.monotonic() + DEADLINE_S
        for number in itertools.cycle(range(7)):
            with suppress(urllib.error.URLError):  # it starts
                if self.ask("query", query=condition)["result"]:
                    return
            assert time.monotonic() < until_s, condition
            server.complete(prompt(1400, number), 2)
            time.sleep(0.1)


@pytest.fixture(scope="module")
def prometheus(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has scraped a server that stored, evicted and loaded, from a drive and from a directory behind it."""
    folder = tmp_path_factory.mktemp("monitoring")
    given = connector(None, host__capacity_bytes="2MiB")
    tiers = [f"disk:{folder / 'disk'}?capacity_bytes=64MiB", f"directory:{folder / 'directory'}"]
    given["kv_connector_extra_config"]["tiers"] = tiers
    with Server(checkpoints / "llama", folder / "server.log", json.dumps(given), *ARGUMENTS) as server:
        it = Prometheus(folder, server.url.removeprefix("http://"))
        try:
            it.await_(server, 'rate(vllm:kvtier_transfer_bytes_total{link="promote"}[1m]) > 0')
            it.await_(server, 'vllm:kvtier_held_bytes{place="directory"} > 0')
            yield it
        finally:
            it.process.terminate()
            it.process.wait(30)


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def targets() -> list[tuple[str, str]]:
    """Expression and legend of every curve."""
    return [(filled(it["expr"]), it["legendFormat"]) for panel in panels() for it in panel["targets"]]


def selects_nothing(prometheus: Prometheus, expression: str) -> list[str]:
    """Selectors of an expression for which Prometheus has no series: a wrong name, label or value."""
    found = SELECTOR.findall(re.sub(r"\[[^]]*\]", "", expression))
    assert found, expression
    return [each for each in found if not prometheus.ask("series", **{"match[]": each})]


def test_every_panel_has_data_and_every_selector_finds_a_series(prometheus: Prometheus) -> None:
    for expression, legend in targets():
        assert selects_nothing(prometheus, expression) == [], expression
        curves = prometheus.ask("query", query=expression)["result"]
        assert curves, expression
        names = set(re.findall(r"{{(\w+)}}", legend))
        assert all(names <= set(curve["metric"]) for curve in curves), f"{expression}: {legend}"


def test_every_variable_of_the_dashboard_has_values(prometheus: Prometheus) -> None:
    queries = [it["definition"] for it in json.loads(DASHBOARD.read_text())["templating"]["list"] if "definition" in it]
    found = {}
    for query in queries:
        selector, name = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        found[name] = {each[name] for each in prometheus.ask("series", **{"match[]": filled(selector)})}
    assert found["tier"] == {"disk", "directory"}
    assert found["model_name"] == {"m"}
    assert len(found["instance"]) == 1


def test_every_rule_is_evaluated_on_series_that_exist(prometheus: Prometheus) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while True:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        missing = {rule["name"]: found for rule in rules if (found := selects_nothing(prometheus, rule["query"]))}
        if not missing and all(rule["health"] != "unknown" for rule in rules):
            break
        assert time.monotonic() < until_s, missing
        time.sleep(0.5)
    assert len(rules) == RULES.read_text().count("expr:")
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


@pytest.mark.parametrize(
    ("good", "bad"),
    [("kvtier_load_tokens_total", "kvtier_loaded_tokens_total"), ("place=", "tiers="), ('"demote"', '"write"')],
)
def test_a_wrong_name_label_or_value_would_be_noticed(prometheus: Prometheus, good: str, bad: str) -> None:
    changed = [expression.replace(good, bad) for expression, _ in targets() if good in expression]
    assert changed
    assert all(selects_nothing(prometheus, expression) for expression in changed)


def test_a_browser_draws_every_panel(prometheus: Prometheus) -> None:
    prometheus.console.write_text(console(panels()))
    page = browser.rendered(prometheus.url + "/consoles/kvtier.html", settle_s=20)
    drawn = page.split("<h2>")[1:]
    assert len(drawn) == len(panels())
    assert [each for each in drawn if "<path" not in each or "prom_graph_error" in each] == []


def test_a_panel_without_data_would_be_noticed_in_the_browser(prometheus: Prometheus) -> None:
    prometheus.console.write_text(console([{"title": "wrong", "targets": [{"expr": "vllm:no", "legendFormat": ""}]}]))
    page = browser.rendered(prometheus.url + "/consoles/kvtier.html", settle_s=20)
    assert "prom_graph_error" in page
    assert "<path" not in page


def test_a_gauge_is_the_last_one_of_several_server_processes(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from prometheus_client import Counter, Gauge, Histogram
        from kvtier.connect.engine_metrics import LABEL_SEPARATOR, PromMetrics
        kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
        shown = PromMetrics(kinds, ["model_name", "engine"], {0: ["m", "0"]})
        shown.observe({"kvtier_tier_up": {LABEL_SEPARATOR.join(("disk", "read")): [float(sys.argv[1])]}})
    """
    scrape = """if True:
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        print(generate_latest(registry).decode())
    """
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for arguments in ([code, "0"], [code, "1"], [scrape]):  # the tier is down, then up
        done = subprocess.run(
            [sys.executable, "-c", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
    series = [line for line in done.stdout.splitlines() if line.startswith("vllm:kvtier_tier_up{")]
    assert series == ['vllm:kvtier_tier_up{engine="0",model_name="m",tier="disk",way="read"} 1.0']


def console(shown: list[dict[str, Any]]) -> str:
    """A page of Prometheus's own graphs, one for each panel. See "Console templates" in its manual."""
    scripts = ("jquery/jquery.min.js", "d3/d3.min.js", "rickshaw/rickshaw.min.js", "js/prom_console.js")
    parts = ["<!doctype html><body><script>var PATH_PREFIX = '';</script>"]
    parts += [f'<script src="/classic/static/{each}"></script>' for each in scripts]
    for number, panel in enumerate(shown):
        names = [re.sub(r"{{(\w+)}}", r"[[ \1 ]]", it["legendFormat"]) for it in panel["targets"]]
        graph = {"expr": [filled(it["expr"]) for it in panel["targets"]], "name": names, "duration": 60, "width": 600}
        node = f"node: document.getElementById('p{number}')"
        parts.append(f'<h2>{panel["title"]}</h2><div id="p{number}"></div>')
        parts.append(f"<script>new PromConsole.Graph({{{node}, ...{json.dumps(graph)}}});</script>")
    return "\n".join(parts)
