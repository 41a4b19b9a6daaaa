"""Files that come with the package besides its code."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def shipped(name: str) -> Path:
    """Find `train/...` or `ds_configs/...` in the installed package or beside it in a checkout. Raises `ValueError`."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"{name} is not among the files that come with this package, nor in the working directory.")


def or_shipped(path: str | Path) -> Path:
    """Return a path, or where it is not in the working directory, the file of that name that comes with the package."""
    path = Path(path)
    if path.parts[:1] in (("train",), ("ds_configs",)) and not path.exists():
        with suppress(ValueError):  # whoever reads the file says that it is not there
            return shipped(str(path))
    return path
