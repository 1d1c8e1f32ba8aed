"""Puts one transfer of a pack (`bench/pack.py`) into a store; installs the wheels when all parts have come.

    python PACK/03/join.py STORE

Only the standard library and pip. The wheels go to STORE/site, which PYTHONPATH must name. Transfers may come in any
order, and more than once.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path


def join(transfer: Path, store: Path) -> list[str]:
    """Put the parts of `transfer` into `store`; returns what is still missing.

    Raises:
        ValueError: a part or a whole file has another checksum than the pack says; it is not kept.
    """
    pack = json.loads((transfer / "pack.json").read_text(encoding="utf-8"))
    store.mkdir(parents=True, exist_ok=True)
    missing: list[str] = []
    for name, wheel in pack["wheels"].items():
        target = store / name
        if target.exists():
            continue
        pieces = [store / f".{name}.{part['sha256']}" for part in wheel["parts"]]
        for piece, part in zip(pieces, wheel["parts"], strict=True):
            source = transfer / part["file"]
            if part["transfer"] != pack["transfer"] or piece.exists():
                continue
            if sha256(source) != part["sha256"]:
                raise ValueError(f"{source} has another checksum than the pack says: carry it again")
            piece.with_suffix(".new").write_bytes(source.read_bytes())
            piece.with_suffix(".new").replace(piece)
        if not all(piece.exists() for piece in pieces):
            missing.append(name)
            continue
        draft = store / f".{name}.new"
        with draft.open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
        if sha256(draft) != wheel["sha256"]:
            draft.unlink()
            raise ValueError(f"{name} has another checksum than the pack says: carry all of its parts again")
        draft.replace(target)
        for piece in pieces:
            piece.unlink(missing_ok=True)
    return missing


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Join one transfer; 0 even if more must come."""
    transfer, store = Path(__file__).resolve().parent, Path(sys.argv[1])
    missing = join(transfer, store)
    if missing:
        print(f"{len(missing)} wheels are not whole yet: {', '.join(missing)}")
        return 0
    wheels = sorted(map(str, store.glob("*.whl")))
    site = str(store / "site")
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade", "--target", site, *wheels]
    done = subprocess.run([sys.executable, *install], check=False)
    print(f"all {len(wheels)} wheels are in {site}" if done.returncode == 0 else "pip failed, see above")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
