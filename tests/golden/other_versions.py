"""Another version of kvtier on a store of a golden kind: format 2 from the history, or a later format of this one.

Each runs in a process of its own: `used` finds out what it has of the golden prompt, lets it store the prompt, and load
it in a new session.
"""

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

TOP = Path(__file__).parents[2]
FORMAT_2 = "38b397432b40e8c7df450ce47fda7930f23e3cf5~1"
"""The last commit that writes format 2."""
DEADLINE_S = 120.0
_PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
kind, folder, port, changes, later = json.loads(sys.argv[1])
if later:
    from kvtier.codec import frame_header as head
    from kvtier.keys import object_names
    head.VERSION += later
    object_names._VERSION += later
from tests.golden.small_stores import CHUNKS, PREFIX, TOKENS, engine, opened, settings
from tests.rig import Engine, load_places, loaded, looked_up, places_of, stored
folder = Path(folder)
tier = replace(settings(kind, folder, port), **changes)
source, target = engine(), Engine(4 * CHUNKS, seed=9)
session = opened(tier, source, folder).session
found = looked_up(session, "a", PREFIX).tokens
assert stored(session, "a", PREFIX, places_of(range(CHUNKS))).dropped == 0
assert session.close().flushed
session = opened(tier, target, folder).session
places = load_places(TOKENS)
assert looked_up(session, "b", PREFIX).tokens == TOKENS
assert loaded(session, "b", PREFIX, TOKENS, places).tokens == TOKENS
assert target.same(source, places)
session.close()
print(found)
"""


def checked_out(folder: Path) -> Path | None:
    """Sources and tests of the last commit with format 2, in `folder`; None without the history."""
    command = ["git", "archive", FORMAT_2, "src", "tests"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, check=False, timeout=DEADLINE_S)
    if done.returncode:
        return None
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def used(kind: str, folder: Path, top: Path = TOP, *, port: int = 0, later: int = 0, **changes: object) -> int:
    """Tokens of the prompt that the version at `top` finds in a store. It stores the prompt then, and loads it.

    Args:
        kind: of the tier.
        folder: of the store; its secret is beside it.
        top: a checkout.
        port: of the server of S3 or Valkey.
        later: formats after that of the checkout.
        changes: settings of the tier that differ from `small_stores.settings`.
    """
    words = json.dumps([kind, str(folder), port, changes, later])
    variables = os.environ | {"PYTHONPATH": f"{top / 'src'}:{top}"}
    command = [sys.executable, "-c", _PROGRAM, words]
    done = subprocess.run(
        command, cwd=top, env=variables, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return int(done.stdout)
