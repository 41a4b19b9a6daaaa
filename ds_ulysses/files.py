"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def finished_folder(target: Path) -> Iterator[Path]:
    """A folder to write into; what it holds moves into `target` only if the block ends without an error."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        target.mkdir(parents=True, exist_ok=True)
        for file in scratch.iterdir():
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
