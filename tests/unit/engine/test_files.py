"""Folders are there whole or not at all, and what is missing in one is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_ulysses.engine.files import fault_of, finished_folder, flush, write_manifest


def test_a_folder_is_seen_when_it_is_whole_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    replace = os.replace

    def noted(old: str, new: str) -> None:
        happened.append(f"seen {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(
        os, "fsync", lambda handle: happened.append(f"on disk {Path(f'/proc/self/fd/{handle}').readlink().name}")
    )
    monkeypatch.setattr(os, "replace", noted)
    with finished_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
        (folder / "b").write_text("b")
        assert not (tmp_path / "out").exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a", "b"}
    assert sorted(happened[:2]) == ["on disk a", "on disk b"]
    assert sorted(happened[2:]) == ["seen a", "seen b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with finished_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_faults_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_text("four")
    (tmp_path / "b").write_text("b")
    assert fault_of(tmp_path) == "it has no manifest.json, which is written last"
    write_manifest(tmp_path)
    flush(tmp_path)
    assert fault_of(tmp_path) is None
    (tmp_path / "more").write_text("may be there")
    assert fault_of(tmp_path) is None
    (tmp_path / "inner" / "a").write_text("five!")
    assert fault_of(tmp_path) == "inner/a has 5 bytes instead of 4"
    (tmp_path / "inner" / "a").unlink()
    assert fault_of(tmp_path) == "inner/a is missing"
    (tmp_path / "manifest.json").write_text("{")
    assert fault_of(tmp_path) == "its manifest.json is cut off"
