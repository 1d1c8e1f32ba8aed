"""What the documents say is what the records and the code say."""

import json
import os
import pkgutil
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import click
import pytest
from bench import tables
from bench.compare import SERVED
from bench.parts import ages

from kvtier.cli.main import COMMANDS, cli, run
from kvtier.tools.bench.repeats import ratio, ratio_text
from kvtier.tools.bench.serve.command import serve

TOP = Path(__file__).parents[2]
DOCUMENTS = [*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md"), *(TOP / "deploy").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")

PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- (not run|without ([\w, -]+)): .+ -->\n)?```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
"""A fenced block, and perhaps a comment on the line before it: ``not run: REASON``, or ``without PROGRAM, PROGRAM:
REASON``, which runs it with stand-ins for these programs that do nothing."""
Block = tuple[str, str, str, str, str]
"""A fenced block: its page, mark, programs with stand-ins, language and text."""


def is_run(block: Block) -> bool:
    _, mark, _, language, _ = block
    return mark != "not run" and language not in {"text", "toml", "yaml", "json"}


def blocks(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page."""
    found = [(page, *it) for it in BLOCK.findall(text)]
    assert 2 * len(found) == len(re.findall("^```", text, re.MULTILINE)), f"{page}: a fence is not understood"
    return found


BLOCKS = [it for page in PAGES for it in blocks(str(page.relative_to(TOP)), page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_are_made_from_the_records(document):
    text = document.read_text(encoding="utf-8")
    assert "<!-- table:" in text
    assert tables.rendered(document, text) == text


def test_every_table_is_in_a_document():
    shown = {
        name for document in tables.DOCUMENTS for name in re.findall(r"<!-- table: (\w+) -->", document.read_text())
    }
    assert shown == {*tables.TABLES, *tables.SHORT}


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("internals/measurements.md", r"(\| without kvtier \| )[\d,]+( ms)"),
        ("benchmarks.md", r"(\| agents \| )[\d,]+( /)"),
    ],
)
def test_a_changed_figure_would_be_noticed(name: str, cell: str) -> None:
    document = TOP / "docs" / name
    text = document.read_text(encoding="utf-8")
    changed = re.sub(cell, r"\g<1>1\g<2>", text)
    assert changed != text
    assert tables.rendered(document, changed) == text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_every_link_leads_somewhere(document):
    wrong = []
    for target, _, anchor in (it.partition("#") for it in LINK.findall(document.read_text(encoding="utf-8"))):
        page = document.parent / target if target else document
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in _anchors(page)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def test_the_controls_a_heading_has_an_anchor_and_no_other_text(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("## A `tier`, and [more](x.md)\n```\n# no heading\n```\n")
    assert _anchors(page) == {"a-tier-and-more"}


def test_the_document_on_security_names_tests_that_exist():
    text = (TOP / "docs" / "security.md").read_text(encoding="utf-8")
    claims, _, tests = text.partition("## Tests")
    named = re.findall(r"^(\d+)\. `(test_\w+\.py)::(test_\w+)`$", tests, re.MULTILINE)
    assert [int(number) for number, _, _ in named] == list(range(1, len(named) + 1))
    cited = {int(it) for group in re.findall(r"\[(\d+(?:, \d+)*)\]", claims) for it in group.split(",")}
    assert cited == set(range(1, len(named) + 1))
    files = {path.name: path.read_text(encoding="utf-8") for path in (TOP / "tests").rglob("test_*.py")}
    assert [test for _, file, test in named if f"def {test}(" not in files.get(file, "")] == []


def test_no_module_can_unpickle():
    """What a store or a server returns is parsed by fixed structures and JSON, and runs no code."""
    taken = re.compile(r"^\s*(?:import|from) (?:pickle|marshal|shelve|dill|cloudpickle|joblib)\b", re.MULTILINE)
    assert taken.search("import pickle")
    assert [path for path in (TOP / "src").rglob("*.py") if taken.search(path.read_text(encoding="utf-8"))] == []


def test_the_readme_names_only_commands_that_exist():
    named = set(re.findall(r"^kvtier (\w+)", (TOP / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= set(COMMANDS)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which commands of the documents run: it has a model, a secret, stores, and what is /mnt and /run."""
    for name in ("bin", "my-model", "mnt/nvme", "mnt/hdd", "mnt/cephfs", "run", "tests/golden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tests/golden/traces").symlink_to(TOP / "tests/golden/traces")
    config = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "kv.secret").write_bytes(bytes(range(32)))
    (tmp_path / "kv.secret").chmod(0o600)
    for name, kind in (("mnt/nvme/kv", "directory"), ("sealed", "shared_directory")):
        with tarfile.open(TOP / f"tests/golden/stores/format3/{kind}.tar.gz") as archive:
            archive.extractall(tmp_path / name, filter="data")
    for program in ("pip", "make", "curl", "apt-get"):
        stand_in(tmp_path, program, "echo this needs a mark: not run, or without >&2; exit 1")
    stand_in(tmp_path, "kvtier", f'exec {sys.executable} -m kvtier.cli.main "$@"')
    stand_in(tmp_path, "python", f'exec {sys.executable} "$@"')
    return tmp_path


def stand_in(folder: Path, program: str, script: str = "") -> None:
    (folder / "bin" / program).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / program).chmod(0o755)


def printed(folder: Path, command: str) -> str:
    """What commands of a document print when bash runs them in `folder`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    environ |= {
        "PATH": f"{folder / 'bin'}:{environ['PATH']}",
        "PYTHONPATH": str(TOP / "src"),
        "COLUMNS": "100",
        "HOME": str(folder),
    }
    text = re.sub(r"/(mnt|run)/", rf"{folder}/\1/", command.replace("STORE", "/mnt/nvme/kv"))
    line = ["timeout", "120", "bash", "-euo", "pipefail", "-c", text]  # with all that it starts
    done = subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout.replace(str(folder), "")


def check(block: Block, folder: Path) -> None:
    """Run a block, and compare what it prints with what it shows; … stands for what is left out."""
    page, _, programs, language, text = block
    for program in re.findall(r"[\w-]+", programs):
        stand_in(folder, program)
    if language == "python":
        printed(folder, f"python - <<'END'\n{text}END")
    elif language in {"", "sh"}:
        printed(folder, text)
    else:
        assert language == "console", f"{page}: {language!r} is neither commands nor data"
        for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*\n)((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            found, wanted = printed(folder, command), shown
            if not command.startswith(
                ("kvtier size", "kvtier plan", "kvtier replay")
            ):  # figures of others are measured
                number = r"-?\d[\d,.]*(?: ?(?:[kMGT]i?)?B\b| ?[mu]?s\b)?"
                found, wanted = (re.sub(number, "#", re.sub("[ -]+", " ", it)) for it in (found, shown))
            pattern = re.sub(r"(?m)^…\\\n", r"(?:.*\\n)*?", re.escape(wanted)).replace("…", ".*")
            assert re.match(pattern, found), f"{command}\n{found}"


@pytest.mark.parametrize("block", [*filter(is_run, BLOCKS)], ids=lambda it: f"{it[0]} {it[4][:40]!r}")
def test_the_commands_of_a_page_run_and_print_what_it_shows(block: Block, checkout: Path) -> None:
    check(block, checkout)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```console\n$ kvtier size qwen3-8b --check '150 KB'\n150 KB is a token: 147,455 B", "150 KB is"),
        ("```console\n$ echo '3 tiers, 1.5 GB/s'; echo more; echo end\n4 tiers, 25 MB/s\n…\nends", "tiers"),
        ("```sh\nkvtier size qwen3-8b --tokns 1k", "--tokns"),
        ("```sh\nnosuch-server && true", "nosuch-server"),
        ("<!-- without one: it is not here -->\n```\none\ntwo", "two"),
        ("```python\nimport kvtier.nothing", "kvtier.nothing"),
        ("```ruby\nputs 1", "ruby"),
    ],
)
def test_the_controls_a_command_that_fails_or_prints_something_else_is_noticed(text, wrong, checkout):
    (block,) = blocks("page.md", f"{text}\n```\n")
    with pytest.raises(AssertionError, match=wrong):
        check(block, checkout)


def unknown_options(text: str) -> set[str]:
    """Options of kvtier's commands in a text, also in its sentences, that the command does not have."""
    found: set[str] = set()
    for line in re.findall(r"\bkvtier ([a-z][^\n|;()`\"]*)", text.replace("\\\n", "")):
        command, words = cli, re.split(" -- |#| '", re.sub("'[^']*'", "", line))[0].split()
        for word in [*words, "run"]:  # what `kvtier replay` stands for
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word) or command
        known = {name for it in command.params for name in it.opts}
        found |= {word.split("=")[0] for word in words if word.startswith("--")} - known
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(TOP)))
def test_every_option_of_a_page_exists(page: Path) -> None:
    assert unknown_options(page.read_text(encoding="utf-8")) == set()


def test_the_controls_an_option_that_does_not_exist_is_noticed():
    text = "`kvtier bench io --fast` and\nkvtier replay X --policy lru --tokns 1 | less --no; kvtier probe --dir_=x"
    assert unknown_options(text) == {"--fast", "--tokns", "--dir_"}


def undefined_terms(text: str) -> set[str]:
    """Terms whose first use in the text is not in italics, as a definition is."""
    prose = re.sub(r"^```.*?^```|^#[^\n]*|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose)
    first: dict[str, str] = {}
    for found in re.finditer(r"\*?\b(TTFT|R|goodput|chunk|object|tier|planner)s?\b", prose):
        first.setdefault(found[1], found[0])
    return {term for term, found in first.items() if not found.startswith("*")}


@pytest.mark.parametrize(
    "page",
    [it for it in PAGES if it.parent.name == "docs" and it.stem not in {"comparison", "migrating"}],
    ids=lambda path: path.name,
)
def test_a_page_says_what_a_term_means_where_it_first_uses_it(page: Path) -> None:
    assert undefined_terms(page.read_text(encoding="utf-8")) == set()


def test_the_controls_a_term_without_a_definition_is_noticed():
    assert undefined_terms("# TTFT\n`chunk`, [it](object.md) and *R* are fine, R above 1, and two tiers") == {"tier"}


def test_a_block_that_does_not_run_says_why():
    marked = "<!-- not run -->\n```\nserver\n```\n<!-- not run: needs a server -->\n```\nserver\n```\n"
    assert [is_run(it) for it in blocks("page.md", marked)] == [True, False]


@pytest.mark.engine
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    (snippet,) = re.findall(r"```python\n(.*?)```", (TOP / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names = {"model": model, "input_ids": torch.randint(1, 64, (1, 600))}
    exec(snippet, names)
    exec(snippet, names)
    assert names["kv"].last.restored_tokens == 512


MIGRATING = (TOP / "docs" / "migrating.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_settings", "large_machine")
@pytest.mark.parametrize(
    ("line", "shown"), re.findall(r"```console\n\$ kvtier (.*?['\d])\n(-.*?)```", MIGRATING, re.DOTALL)
)
def test_converted_settings_are_those_of_the_page(line, shown, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", "mooncake.json")
    mooncake = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "10.0.0.5:50051"}
    Path("mooncake.json").write_text(json.dumps(mooncake | {"global_segment_size": "4GB", "protocol": "tcp"}))
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", MIGRATING, re.DOTALL):
        Path(name).write_text(text)
    assert run(shlex.split(line)) == 0
    out, err = capsys.readouterr()
    table = "".join(row for row in err.splitlines(keepends=True) if not row.startswith("note: "))
    assert (table + out).replace(str(tmp_path), "/srv") == shown


def test_the_life_of_a_chunk_names_functions_that_exist():
    text = (TOP / "ARCHITECTURE.md").read_text(encoding="utf-8")
    life = text.partition("## Life of a chunk")[2].partition("\n## ")[0]
    steps = re.findall(r"^(\d+)\. ", life, re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) <= 24
    named = re.findall(r"`([a-z_.]+\.[A-Za-z_.]+)`", life)
    assert len(named) >= 15
    for path in named:
        assert callable(pkgutil.resolve_name(f"kvtier.{path}")), path


def test_every_file_that_the_architecture_names_exists():
    text = (TOP / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+(?:\.py)?)`", text)
    assert named
    places = (TOP, TOP / "src" / "kvtier")
    missing = [path for path in named if not any((it / path).exists() or (it / f"{path}.py").exists() for it in places)]
    assert missing == []


@pytest.mark.parametrize("path", sorted(tables.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_names_no_file_of_the_machine_that_made_it(path: Path) -> None:
    assert not re.findall(r'"/[^"/]+/[^"]*"', path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(tables.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_is_of_a_clean_tree_in_the_history(path: Path) -> None:
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no history here")
    made = json.loads(path.read_text(encoding="utf-8"))["commit"]
    is_right = _git("merge-base", "--is-ancestor", made["id"], "HEAD") is not None and not made["is_modified"]
    assert is_right, made


def test_the_ratio_of_a_table_is_the_quotient_of_what_it_prints() -> None:
    # The median of the pairs is 1.2: a table that prints it next to 0.82 and 1.17 contradicts itself.
    ours, theirs = [0.66, 0.82, 1.99], [1.17, 0.68, 1.66]
    assert statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) == pytest.approx(1.2, abs=0.01)
    found = ratio(ours, theirs)
    assert found == (pytest.approx(0.82 / 1.17, abs=1e-3), (0.564, 1.206))
    assert ratio_text(*found) == "0.70 (0.56 to 1.21)"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", it.strip().lower()).replace(" ", "-") for it in headings}


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.mark.parametrize("name", SERVED)
def test_the_comparison_is_run_with_the_settings_of_its_record(name: str, tmp_path: Path) -> None:
    """`bench/compare.py` is the command that the page names for these records."""
    given = serve.make_context("serve", [*SERVED[name], "--dir", str(tmp_path)]).params
    settings = json.loads((tables.RECORDS / f"{name}.json").read_text(encoding="utf-8"))["settings"]
    recorded = {key: it["value"] for key, it in settings.items() if it["origin"] == "flag"}
    assert len(recorded) >= 5
    plain = {tuple: list, type(TOP): lambda it: it.name}
    assert {key: plain.get(type(given[key]), lambda it: it)(given[key]) for key in recorded} == recorded


def test_a_record_is_old_once_the_code_that_moves_bytes_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docstrings, comments and other directories may change. The control is one number, and a file that moves."""
    monkeypatch.setattr(ages, "TOP", tmp_path)
    module = tmp_path / "src" / "kvtier" / "tier" / "base.py"
    module.parent.mkdir(parents=True)

    def commit() -> str:
        who = ("-c", "user.name=kvtier", "-c", "user.email=kvtier@localhost", "-c", "commit.gpgsign=false")
        for words in (("add", "-A"), (*who, "commit", "-qm", "next"), ("rev-parse", "HEAD")):
            shown = subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        return shown.strip()

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    module.write_text('"""Tiers."""\n\nSIZE = 1\n')
    first = commit()
    module.write_text('"""Places for KV."""\n\nSIZE = 1  # bytes\n')
    (tmp_path / "README.md").write_text("new")
    second = commit()
    assert ages.is_shipped.__wrapped__(first)
    assert ages.age({"time": "2026-12-01T00:00:00", "commit": {"id": first}}) == ("2026-12-01", "1", "yes")
    module.write_text("SIZE = 2\n")
    third = commit()
    assert not ages.is_shipped.__wrapped__(second)
    module.rename(module.with_name("tier.py"))
    commit()
    assert not ages.is_shipped.__wrapped__(third)
