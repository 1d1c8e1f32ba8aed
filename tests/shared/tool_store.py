"""A shared store as the commands name it: `kvtier inspect`, `probe` and `bench tier` on real stores."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.rig import FINGERPRINT, LAYOUT, Engine, places_of, prefix_of, stored

from kvtier.config.loader import load
from kvtier.keys.secret import model_id
from kvtier.runtime.open import open_session

FEW = ("--size", "64KiB", "--in-flight", "2", "--repeats", "1", "--sample", "128KiB", "--json")
DEADLINE_S = 120


class Store:
    """One shared store as the commands name it."""

    def __init__(self, url: str, folder: Path, **variables: str) -> None:
        self.url = url
        self.secret = folder / "secret"
        self.secret.write_bytes(bytes(range(32)))
        self.model = model_id(bytes(range(32)), FINGERPRINT).hex()
        self.secret.chmod(0o600)
        self.environment = {"KVTIER_STORE__SECRET_FILE": str(self.secret)} | variables

    def kvtier(self, *arguments: object, code: int = 0, **variables: str) -> str:
        done = subprocess.run(
            [Path(sys.executable).parent / "kvtier", *map(str, arguments)],
            env=os.environ | self.environment | variables,
            timeout=DEADLINE_S,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def fill(self) -> None:
        environment = self.environment | {"KVTIER_HOST__CAPACITY_BYTES": "16MiB", "KVTIER_TIERS": self.url}
        kv = open_session(load(environ=environment).config, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
        assert stored(kv.session, "a", prefix_of(6, kv.root), places_of(range(6))).dropped == 0
        assert kv.session.close().flushed


def use_tools(store: Store, kind: str, paths: Iterable[str] = ("raw", "tier", "session")) -> None:
    """Fill `store`, measure it with every tool, which leaves nothing, and purge it. `paths`: of `bench tier`."""
    url = store.url
    store.fill()
    before = json.loads(store.kvtier("inspect", "stat", url, "--json"))
    assert (before["objects"], list(before["models"])) == (12, [store.model[:12]])
    rows = json.loads(store.kvtier("bench", "tier", url, *FEW))["results"]
    assert {(row["op"], row["path"]) for row in rows} == {
        (op, path) for op in ("store", "load", "lookup") for path in paths
    }
    small = ("--size", "64KiB", "--depth", "1", "--seconds", "50ms", "--bytes", "8MiB")
    probed = json.loads(store.kvtier("probe", "--tier", url, *small, "--json"))
    (link,) = [link for link in probed["links"] if link["name"] == kind]
    assert {each["op"] for each in link["measures"]} == {"read", "write"}
    assert link["round_trip_us"] > 0
    after = json.loads(store.kvtier("inspect", "stat", url, "--json"))
    assert (after["objects"], after["bytes"]) == (before["objects"], before["bytes"]), "measurements leave nothing"
    assert "12 objects" in store.kvtier("inspect", "verify", url)
    assert json.loads(store.kvtier("inspect", "purge", url, "--yes", "--json"))["objects"] == 12
    assert json.loads(store.kvtier("inspect", "stat", url, "--json"))["objects"] == 0
