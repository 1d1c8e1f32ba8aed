"""What the documents say is what the records and the code say."""

import json
import pkgutil
import re
import statistics
import subprocess
from pathlib import Path

import pytest
from bench import tables

from kvtier.bench.ratio import ratio, ratio_text
from kvtier.cli.main import COMMANDS

TOP = Path(__file__).parents[2]
DOCUMENTS = [*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md"), *(TOP / "deploy").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


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
