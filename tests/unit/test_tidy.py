"""The repository keeps the rules of `tests/tidy.py`, and each rule fires on a small bad example."""

import os
import subprocess
import sys

import pytest
from tests import tidy

BAD = [
    ("environment", "src/kvtier/tier/directory/tier.py", "import os\nx = os.environ['A']\n"),
    ("environment", "src/kvtier/runtime/mover.py", "import os\nx = os.getenv('A')\n"),
    ("logging_setup", "src/kvtier/runtime/mover.py", "import logging\nlogging.basicConfig()\n"),
    ("logging_setup", "src/kvtier/connect/x.py", "import logging\nlogging.getLogger('a').setLevel(1)\n"),
    ("asserted_data", "src/kvtier/codec/frame.py", "def f(x):\n    assert x\n"),
    ("seeded_hash", "src/kvtier/keys/object_names.py", "x = hash('a')\n"),
    ("endless_waits", "src/kvtier/runtime/mover.py", "def f(thread):\n    thread.join()\n"),
    ("endless_waits", "src/kvtier/runtime/mover.py", "def f(self):\n    self.event.wait()\n"),
    ("endless_waits", "src/kvtier/runtime/mover.py", "import queue\nx = queue.Queue()\n"),
    ("endless_waits", "src/kvtier/runtime/mover.py", "from queue import SimpleQueue\nx = SimpleQueue()\n"),
    ("endless_waits", "src/kvtier/tools/bench/io.py", "import subprocess\nsubprocess.run(['fio'])\n"),
    ("raw_errors", "src/kvtier/tools/bench/io.py", "def f(e):\n    return f'lost: {type(e).__name__}: {e}'\n"),
    ("syntax", "src/kvtier/core/cache.py", "def f(:\n"),
]

GOOD = [
    ("src/kvtier/config/loader.py", "import os\nx = os.environ\n"),
    ("src/kvtier/core/cache.py", "def f(x):\n    assert x, 'our own mistake'\n"),
    ("src/kvtier/layout.py", "class A:\n    def __hash__(self):\n        return hash(1)\n"),
    ("src/kvtier/runtime/mover.py", "def f(t, q):\n    t.join(1)\n    q.get(timeout=1)\n    return ','.join(['a'])\n"),
]


@pytest.mark.parametrize(("rule", "place", "text"), BAD)
def test_each_rule_fires_on_a_bad_example(rule, place, text):
    assert rule in {finding.rule for finding in tidy.check_source(place, text)}


@pytest.mark.parametrize(("place", "text"), GOOD)
def test_no_rule_fires_on_a_good_example(place, text):
    assert tidy.check_source(place, text) == []


def test_every_rule_has_a_bad_example():
    assert {rule.__name__ for rule in tidy.RULES} <= {rule for rule, _, _ in BAD}


@pytest.mark.parametrize("line", ["see /ho" + "me/ann/kv", 'path = "/ro' + 'ot/x"', "(/Us" + "ers/ann/x)"])
def test_paths_of_an_authors_machine_are_found(line):
    assert [finding.rule for finding in tidy.check_text("README.md", line)] == ["machine_paths"]


def test_the_checkouts_own_path_is_found_wherever_it_is():
    assert tidy.check_text("README.md", "cd /src/ann/kvtier && make", private=("/src/ann/kvtier",))


@pytest.mark.parametrize(
    "line", ["/tmp/kv", "https://host/data/x", "~/data/x", "$ROOT/data/x", "a/data/b", "/dev/nvme0n1"]
)
def test_paths_that_everybody_has_are_not(line):
    assert tidy.check_text("README.md", line) == []


def test_a_module_that_nobody_imports_is_found():
    files = {
        "kvtier": "",
        "kvtier.a": "from kvtier.b import thing\n",
        "kvtier.b": "import kvtier.b\n",
        "kvtier.c": "",
        "kvtier.d": "COMMANDS = {'x': 'kvtier.e:run'}\n",
        "kvtier.e": "",
        "kvtier.f": "import kvtier.f\n",
    }
    lonely = [finding.place for finding in tidy.lonely_modules(files, {"kvtier.a", "kvtier.d"})]
    assert lonely == ["kvtier.c", "kvtier.f"]


def test_an_exception_that_nothing_needs_is_found():
    breach = tidy.Finding("src/kvtier/a.py", 1, "seeded_hash", "no")
    assert tidy.without_exceptions([breach], {("seeded_hash", "src/kvtier/a.py"): "why"}) == []
    (stale,) = tidy.without_exceptions([], {("seeded_hash", "src/kvtier/a.py"): "why"})
    assert stale.rule == "stale_exception"


def test_the_repository_is_tidy():
    assert [str(finding) for finding in tidy.check_repository()] == []


def collected(folder, *args):
    """Names of the tests that a new process finds, a second or more after this module's import."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", *args]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=True)
    return set(done.stdout.splitlines())


def test_names_of_tests_depend_on_no_clock_and_no_seed(request):
    """Parallel workers collect for themselves: tests of other names are none that they share."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        return  # xdist has compared what these workers collected, see the second control
    here = {item.nodeid for item in request.session.items}
    assert here <= collected(request.config.invocation_params.dir, *request.config.args)


CLOCK = "import pytest, time\n@pytest.mark.parametrize('it', [str(time.time_ns())])\ndef test(it): pass\n"


def test_a_name_that_depends_on_the_clock_is_found(tmp_path):
    (tmp_path / "test_clock.py").write_text(CLOCK)
    one, other = (collected(tmp_path, "--rootdir", str(tmp_path), "test_clock.py") for _ in range(2))
    assert len(one | other) >= 2
    assert one != other


@pytest.mark.slow
def test_a_name_that_depends_on_the_clock_ends_a_parallel_run(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_clock.py").write_text(CLOCK)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "Different tests were collected" in done.stdout
