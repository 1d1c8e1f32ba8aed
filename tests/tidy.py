"""Rules that ruff, pyright and import-linter lack. As a program it prints breaches; `tests/unit/test_tidy.py` runs it.

A rule names the replacement. An exception is a line in `EXCEPTIONS`, with its reason.
"""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".html", ".sh", ""}
TEXT_BYTES_MAX = 1 << 20
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    ".venv-vllm",
    ".venv-sglang",
    ".venv-aiperf",
    ".venv-routers",
    ".nixl",
    ".lmcache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
}

WAITS = {"join", "wait", "get", "result", "communicate"}
UNBOUNDED = {"Queue", "LifoQueue", "PriorityQueue"}

PRIVATE_PATH = re.compile(r"""(?<![\w.~/:>})\]*-])/(home|root|Users|work|workspace|data\d?|scratch)(?=/\w)""")

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("environment", "src/kvtier/tools/demo/worker.py"): "starts processes with an environment of their own",
    ("environment", "src/kvtier/tools/bench/serve/server.py"): "starts servers with an environment of their own",
    ("environment", "src/kvtier/cli/main.py"): "a shell that asks for completions says so there",
    ("environment", "src/kvtier/cli/convert_settings.py"): "other caches have settings there, too",
    ("environment", "src/kvtier/cli/vllm_doctor.py"): "vLLM takes the seed of its block hashes from there",
    ("environment", "src/kvtier/connect/sglang/identity.py"): "variables of SGLang itself change its KV",
    ("environment", "src/kvtier/connect/sglang/environment_probe.py"): "SGLang itself chooses its plug-ins there",
    ("environment", "src/kvtier/tier/mooncake/client.py"): "Mooncake's library takes its limits from there only",
    (
        "environment",
        "src/kvtier/tools/bench/serve/vllm_stat_logger.py",
    ): "vLLM makes the plug-in, without settings of ours",
    ("logging_setup", "src/kvtier/connect/vllm/vllm_logging.py"): "vLLM configures its own logger alone",
    ("endless_waits", "src/kvtier/runtime/worker_queues.py"): "one wake-up for each idle thread",
    ("endless_waits", "src/kvtier/runtime/session_events.py"): "drops the oldest beyond `EVENTS_MAX`",
    (
        "endless_waits",
        "src/kvtier/tools/bench/io_harness.py",
    ): "one answer for each command in flight, which the core limits",
    ("raw_errors", "src/kvtier/runtime/protocol.py"): "an error of our own reading; its reader describes it again",
    ("raw_errors", "src/kvtier/connect/sglang/environment_probe.py"): "runs without kvtier; its reader hides secrets",
    ("endless_waits", "src/kvtier/keys/weights.py"): "a checkpoint is read before anything runs, as long as it takes",
}
"""Reasons by rule and file. An exception that is no longer needed is a finding too."""


class Finding(NamedTuple):
    """One breach of a rule."""

    place: str
    line: int
    rule: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.rule}: {self.advice}"


class Source(NamedTuple):
    """One Python file."""

    place: str
    """Path below the repository."""
    tree: ast.Module
    nodes: list[ast.AST]
    """All nodes of `tree`, walked once for all rules."""

    @property
    def inside(self) -> str:
        """Path below the package. Empty for files outside it."""
        return self.place.removeprefix("src/kvtier/") if self.place.startswith("src/kvtier/") else ""

    def is_in(self, *layers: str) -> bool:
        """Whether the file lies in one of the package's `layers`."""
        return bool(self.inside) and self.inside.startswith(layers)


Hits = Iterator[tuple[int, str]]


def environment(source: Source) -> Hits:
    """Settings come in through `kvtier.config`, where every value knows its origin."""
    if not source.inside or source.is_in("config/"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _dotted(node) in {"os.environ", "os.getenv", "os.environb", "os.putenv"}:
            yield node.lineno, f"{_dotted(node)}: add a setting to kvtier.config and take its value as an argument"


def logging_setup(source: Source) -> Hits:
    """A library never decides where logs go or how many there are."""
    if not source.inside or source.is_in("cli/"):
        return
    for call, name in _calls(source.nodes):
        if name.rpartition(".")[2] in {"basicConfig", "addHandler", "setLevel"}:
            yield call.lineno, f"{name}: leave handlers and levels to the program that uses us"


def asserted_data(source: Source) -> Hits:
    """If an assertion were the only check of bytes that come in from below, python -O would remove it."""
    if not source.is_in("codec/", "tier/"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: check data with `if` and raise CorruptChunkError or TierError"


def seeded_hash(source: Source) -> Hits:
    """`hash` differs between processes, so nothing that is stored or shared may depend on it."""
    if not source.inside:
        return
    for call, name in _calls(source.nodes):
        if name == "hash" and not _is_in_dunder_hash(source.tree, call):
            yield call.lineno, "hash: use hashlib or xxhash"


def endless_waits(source: Source) -> Hits:
    """Every wait has a deadline and every queue a limit, because a cache must never stall."""
    if not source.inside:
        return
    for call, name in _calls(source.nodes):
        last = name.rpartition(".")[2]
        if "." in name and last in WAITS and not call.args and not call.keywords:
            yield call.lineno, f"{name}(): give it a time-out"
        if last in UNBOUNDED and not call.args and not call.keywords:
            yield call.lineno, f"{name}(): give it a size"
        if last == "SimpleQueue":
            yield call.lineno, f"{name}: it has no bound; use queue.Queue with a size"
        if name == "subprocess.run" and "timeout" not in {keyword.arg for keyword in call.keywords}:
            yield call.lineno, "subprocess.run: give it a time-out"


def raw_errors(source: Source) -> Hits:
    """The text of another package's error may hold a password, a token or a login."""
    if not source.inside or source.inside == "errors.py":
        return
    for node in source.nodes:
        if isinstance(node, ast.JoinedStr) and "__name__}: {" in ast.unparse(node):
            yield node.lineno, "an error's type and text: use errors.described"


RULES: tuple[Callable[[Source], Hits], ...] = (
    environment,
    logging_setup,
    asserted_data,
    seeded_hash,
    endless_waits,
    raw_errors,
)


def check_source(place: str, text: str) -> list[Finding]:
    """Apply every rule to one Python file."""
    try:
        tree = ast.parse(text)
        source = Source(place, tree, list(ast.walk(tree)))
    except SyntaxError as error:
        return [Finding(place, error.lineno or 1, "syntax", f"{error.msg}: it must run on every Python we support")]
    return [Finding(place, line, rule.__name__, advice) for rule in RULES for line, advice in rule(source)]


def check_text(place: str, text: str, private: tuple[str, ...] = ()) -> list[Finding]:
    """Find paths of an author's machine in any text file, including `private` ones."""
    found: list[Finding] = []
    for number, line in enumerate(text.splitlines(), 1):
        hit = PRIVATE_PATH.search(line)
        named = hit[0] if hit else next((path for path in private if path in line), None)
        if named:
            found.append(Finding(place, number, "machine_paths", f"{named}: a path of one machine"))
    return found


def lonely_modules(files: dict[str, str], entries: set[str]) -> list[Finding]:
    """Find modules that nothing in the package imports or names.

    Args:
        files: text by dotted module name, for the whole package.
        entries: dotted names that are reached from outside.
    """
    reached: set[str] = set()
    for name, text in files.items():
        for node in ast.walk(_parsed(text)):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.findall(r"kvtier(?:\.\w+)+", node.value)  # as in a line of a registry
            reached.update(module for module in named if module != name)
    return [
        Finding(name, 1, "lonely_modules", "not imported: use it, register it or delete it")
        for name in sorted(files)
        if name not in reached | entries and not any(other.startswith(f"{name}.") for other in files)
    ]


def check_repository(root: Path = ROOT) -> list[Finding]:
    """Apply all rules to the repository at `root`."""
    found: list[Finding] = []
    # The author's own folders, wherever they are. Short ones such as "/" or "/src" would be found everywhere.
    own = tuple(str(path) for path in (root, Path.home(), Path(sys.prefix)) if len(path.parts) > 2)
    modules: dict[str, str] = {}
    for path in _files(root):
        place = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8", errors="replace")
        found += check_text(place, text, own)
        if path.suffix == ".py":
            found += check_source(place, text)
            if place.startswith("src/"):
                modules[_module(place)] = text
    found += lonely_modules(modules, _entries(root, modules))
    return without_exceptions(found)


def without_exceptions(found: list[Finding], exceptions: dict[tuple[str, str], str] = EXCEPTIONS) -> list[Finding]:
    """Remove what has an exception from `found`, and add every exception that nothing needs."""
    needed = {(finding.rule, finding.place) for finding in found}
    stale = [
        Finding(place, 1, "stale_exception", f"{rule} has no breach here any more: remove the exception")
        for rule, place in exceptions.keys() - needed
    ]
    return [finding for finding in found if (finding.rule, finding.place) not in exceptions] + stale


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.endswith("-out"))
        # Git ignores what `make test` leaves behind and the `.git` file of a worktree.
        kept = sorted(name for name in names if name != ".git" and not name.startswith(".coverage"))
        for path in (Path(folder, name) for name in kept):
            if path.suffix in TEXT_SUFFIXES and not path.is_symlink() and path.stat().st_size <= TEXT_BYTES_MAX:
                yield path


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:  # `check_source` reports it
        return ast.Module([], [])


def _module(place: str) -> str:
    return place.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _entries(root: Path, modules: dict[str, str]) -> set[str]:
    """Return modules used from outside: programs, entry points, and what third parties or only tests import."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    named = {target.partition(":")[0] for group in groups for target in group.values()}
    public = {name for name in modules if name.startswith(("kvtier.testing", "kvtier.connect"))}
    return named | public | {name for name in modules if name.endswith("__main__")}


def _calls(nodes: list[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    for node in nodes:
        if isinstance(node, ast.Call):
            yield node, _dotted(node.func)


def _dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for a chain of attributes. A part that is not a name becomes ``?``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def _is_in_dunder_hash(tree: ast.AST, call: ast.Call) -> bool:
    return any(
        isinstance(node, ast.FunctionDef) and node.name == "__hash__" and call in list(ast.walk(node))
        for node in ast.walk(tree)
    )


if __name__ == "__main__":
    findings = check_repository()
    for finding in findings:
        print(finding)
    sys.exit(1 if findings else 0)
