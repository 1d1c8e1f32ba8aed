"""Absurd and hostile files end in one line of error, within a second of processor time and 200 MB of memory."""

import json
import os
import subprocess
import sys

SHAPE = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096,
}  # fmt: skip
OPEN = json.dumps(SHAPE)[:-1] + ", "
DEEP = 200_000

FILES: dict[str, str] = {
    "heads": json.dumps({**SHAPE, "num_attention_heads": 10**18, "num_key_value_heads": 10**18}),
    "digits": '{"num_hidden_layers": ' + "9" * 100_000 + "}",
    "largest": json.dumps(
        {**SHAPE, "num_hidden_layers": 4096, "num_attention_heads": 1 << 24, "num_key_value_heads": 1 << 24,
         "head_dim": 1 << 24}
    ),
    "layers": json.dumps({**SHAPE, "num_hidden_layers": 10**9}),
    "list": json.dumps({**SHAPE, "layer_types": ["full_attention"] * 100_000}),
    "deep list": '{"attention": ' + "[" * DEEP + "]" * DEEP + "}",
    "deep objects": '{"a": ' * DEEP + "1" + "}" * DEEP,
    "deep fields": OPEN + '"kv": ' + '{"kv": ' * 800 + "1" + "}" * 801,
    "deep parts": '{"text_config": ' * 800 + "1" + "}" * 800,
    "many lists": OPEN + '"attention": [' + "[]," * 1_380_000 + "[]]}",
    "many objects": OPEN + '"attention": [' + "{}," * 1_380_000 + "{}]}",
    "many fields": json.dumps({**SHAPE} | {f"kv_{index}": 1 for index in range(220_000)}),
    "huge": " " * (64 << 20),
    "infinite": json.dumps({**SHAPE, "head_dim": float("inf")}),
    "escapes": json.dumps({**SHAPE, "model_type": "\x1b[2J\ud800", "\x1b[31mkv_\udfff": 3}),
}  # fmt: skip


PROGRAM = """
import json, sys, time
from pathlib import Path
from kvtier.cli.main import run
for path in sys.argv[1:]:
    start = time.process_time()
    status = run(["size", path])
    sys.stderr.flush()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps([path, status, time.process_time() - start, int(peak.split()[1])]), flush=True)
"""


def refused(*paths: str) -> str:
    """What the command prints about files that it must refuse, all in one process."""
    command = [sys.executable, "-c", PROGRAM, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [path for path, *_ in results] == list(paths)
    for path, status, seconds, peak_kib in results:
        assert (path, status) == (path, 2)
        assert seconds < 1, path
        assert peak_kib < 200 << 10, path
    lines = done.stderr.splitlines()
    assert len(lines) == len(paths)
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    return done.stderr


def test_files_are_refused_soon(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    refused(*(str(tmp_path / name) for name in FILES))


def test_what_is_no_file_is_not_waited_for(tmp_path):
    fifo = tmp_path / "fifo" / "config.json"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    link = tmp_path / "link.json"
    link.symlink_to("link.json")
    found = refused(str(fifo), str(fifo.parent), "/dev/zero", "/dev/null", "/dev/tty", str(link))
    assert found.count("not a regular file") >= 4
