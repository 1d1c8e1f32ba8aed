"""`--fetch`: only config.json comes from the Hub, and every failure says how to get it by hand."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvtier.cli.main import run

pytest.importorskip("huggingface_hub")

NAME = "acme/own-model"
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_size": 512, "max_position_embeddings": 32768,
}  # fmt: skip
BY_HAND = f"`hf download {NAME} config.json`"


@pytest.fixture
def hub():
    """The address of a Hub that has one file, and the paths that it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            content = json.dumps(CONFIG).encode()
            has_it = self.path == f"/{NAME}/resolve/main/config.json"
            self.send_response(200 if has_it else 401)
            told = {"ETag": '"e1"', "X-Repo-Commit": "a" * 40} if has_it else {"X-Error-Code": "RepoNotFound"}
            for name, value in {**told, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815 - the name that the server looks for

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def kvtier(endpoint, home, *arguments):
    """A process of its own: huggingface_hub reads its address and its cache when it is imported."""
    program = "from kvtier.cli.main import main; from kvtier.tools.size import hub; hub.DEADLINE_S = 5; main()"
    command = [sys.executable, "-c", program, *arguments]
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_only_the_configuration_is_fetched_and_then_it_is_known(hub, tmp_path):
    endpoint, asked = hub
    done = kvtier(endpoint, tmp_path, "size", NAME, "--fetch", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["model"], found["bytes_per_token"]) == (NAME, 2 * 4 * 2 * 64 * 2)
    assert {it for it in asked if NAME in it} == {f"/{NAME}/resolve/main/config.json"}
    known = kvtier("http://127.0.0.1:9", tmp_path, "plan", NAME, "--json", "--set", "model.parameters=1e9")
    assert json.loads(known.stdout)["model"] == NAME


def test_without_network_the_error_says_how_to_get_it(tmp_path):
    done = kvtier("http://127.0.0.1:9", tmp_path, "plan", NAME, "--fetch")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"no config.json of {NAME} from the Hub (no answer within 5 s)" in done.stderr
    assert BY_HAND in done.stderr


def test_what_the_hub_does_not_have_is_named(hub, tmp_path):
    done = kvtier(hub[0], tmp_path, "size", "acme/none", "--fetch")
    assert done.returncode == 2
    assert "no config.json of acme/none from the Hub (401" in done.stderr


@pytest.mark.parametrize("command", ["size", "plan"])
def test_without_the_flag_the_error_names_it(command, capsys):
    assert run([command, NAME]) == 2
    err = capsys.readouterr().err
    assert f"unknown model '{NAME}'" in err
    assert "--fetch" in err
    assert BY_HAND in err


@pytest.mark.parametrize("name", ["own-model", "../etc/passwd", "a/b/c", "acme/own model", "-acme/x", "acme/x;y"])
def test_other_names_are_not_asked_for(name, capsys):
    assert run(["size", "--fetch", "--", name]) == 2
    assert f"--fetch: {name!r} is not a name of the Hub; allowed: ORG/NAME" in capsys.readouterr().err


def test_a_model_of_the_catalogue_is_not_fetched(capsys):
    assert run(["size", "meta-llama/Llama-3.1-8B", "--fetch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "llama-3.1-8b"


def test_without_the_library_the_error_names_the_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert run(["size", NAME, "--fetch"]) == 2
    err = capsys.readouterr().err
    assert "--fetch needs huggingface_hub, which is not installed: pip install huggingface_hub" in err
    assert BY_HAND in err
