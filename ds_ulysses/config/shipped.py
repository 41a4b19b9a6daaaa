"""Files that come with the package besides its code."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """`train/...` or `ds_configs/...`: in the installed package, or beside it in a checkout. Raises `ValueError`."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"{name} is not among the files that come with this package, nor in the working directory.")
