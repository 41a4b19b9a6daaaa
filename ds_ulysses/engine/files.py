"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"


@contextmanager
def finished_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write into; what it holds moves into `target` only if the block ends without an error."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        flush(scratch)
        target.mkdir(parents=True, exist_ok=True)
        for file in scratch.iterdir():
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def flush(folder: Path) -> None:
    """Flush the files of a folder to the disk: a machine that loses power afterwards keeps them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_manifest(folder: Path) -> None:
    """Write down every file in a folder and its size; whoever reads the folder can tell whether it is whole."""
    (folder / MANIFEST).write_text(json.dumps(_sizes(folder), indent=1))


def fault_of(folder: Path) -> str | None:
    """Return what is wrong with a folder that has, or should have, a manifest."""
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}, which is written last"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except json.JSONDecodeError:
        return f"its {MANIFEST} is cut off"
    there = _sizes(folder)
    for name, size in manifest.items():
        if name not in there:
            return f"{name} is missing"
        if there[name] != size:
            return f"{name} has {there[name]:,} bytes instead of {size:,}"
    return None


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
