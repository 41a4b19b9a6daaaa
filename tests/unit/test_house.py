"""The house keeps its order: who may import whom, who may touch what, and how long a file may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ds_ulysses"
FILES = sorted(PACKAGE.glob("**/*.py"))
AROUND = sorted(path for folder in ("train", "benchmarks", "tests") for path in (ROOT / folder).glob("**/*.py"))
SPEAKING = {"new_group", "all_to_all_single", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "isend"}
SPEAKING |= {"all_gather_into_tensor", "reduce_scatter_tensor", "irecv", "batch_isend_irecv", "all_gather_object"}
FRAGMENTS = {"Of", "As", "By", "On", "In", "At", "For", "With", "To", "From", "That", "Alike"}
FRAGMENTS |= {"Between", "Its", "Their"}
"""Words that begin what is no sentence."""


def table(first_column: str) -> list[list[str]]:
    """Rows of the table of docs/house.md whose head begins so."""
    text = (ROOT / "docs" / "house.md").read_text()
    body = re.search(rf"^\| ?{first_column}.*\|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert body, first_column
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[1].splitlines()]


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", cell))


MAY_IMPORT = {quoted(room).pop(): quoted(allowed) for room, _, allowed in table("room ")}
TOUCH = {tuple(sorted(quoted(what))): quoted(rooms) for what, rooms in table(" \\|")}


@cache
def imports(path: Path) -> dict[str, set[str]]:
    """Every module that a file imports, wherever in it, and the names that it takes from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def door_of(room: str) -> set[str]:
    """The names that others may import from a room."""
    if room == "batch":
        return {"shard_batch"}
    door = PACKAGE / room / "__init__.pyi"
    if door.exists():  # loaded when they are asked for
        lines = [node for node in ast.parse(door.read_text()).body if isinstance(node, ast.ImportFrom)]
        return {alias.asname or alias.name for line in lines for alias in line.names}
    body = ast.parse((PACKAGE / room / "__init__.py").read_text()).body
    return next(set(ast.literal_eval(node.value)) for node in body if isinstance(node, ast.Assign))


def is_room_file(path: Path) -> bool:
    return path.parent != PACKAGE or path.name == "batch.py"


@pytest.mark.parametrize("path", [*filter(is_room_file, FILES)], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_go_down(path: Path) -> None:
    own = room_of(path)
    for module, names in imports(path).items():
        assert module.split(".")[0] not in ("train", "tests", "benchmarks"), f"{path} imports {module}"
        if module.startswith("ds_ulysses."):
            _, room, *inside = module.split(".")
            if room != own:
                assert room in MAY_IMPORT[own], f"{path} imports {module}"
                assert not inside, f"{path} reaches inside a room: {module}"
                assert names <= door_of(room), f"{path} reaches inside a room: {names - door_of(room)} of {room}"
            elif not inside and path.name != "__init__.py":
                there = {other.stem for other in (PACKAGE / own).iterdir()}
                assert names <= there, f"{path} goes out by the door of its own room: {names - there}"
        else:
            assert module != "ds_ulysses", f"{path} imports the package from within"


def test_every_room_is_in_the_table_and_no_arrow_goes_up() -> None:
    assert {room_of(path) for path in FILES if is_room_file(path)} == set(MAY_IMPORT)
    rooms = list(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        assert all(rooms.index(other) < rooms.index(room) for other in allowed), room


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_cycle_inside_a_room(room: str) -> None:
    graph = {}
    for path in FILES:
        if is_room_file(path) and room_of(path) == room and path.name != "__init__.py":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            graph[name] = {m for m in imports(path) if m.startswith(f"ds_ulysses.{room}.")}
            graph[name] |= {
                f"{m}.{n}" for m, names in imports(path).items() if m == f"ds_ulysses.{room}" for n in names
            }
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", AROUND, ids=lambda p: str(p.relative_to(ROOT)))
def test_those_around_the_package(path: Path) -> None:
    """They come in by the door; only tests look inside, and the package's own tests alone import them."""
    own = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        first, *inside = module.split(".")
        if first == "ds_ulysses" and own != "tests":
            assert len(inside) < 2, f"{path} reaches inside a room: {module}"
        if first in ("train", "benchmarks", "tests") and own == "train":
            assert first == "train", f"{path} imports {module}"


def test_rooms_say_what_lives_in_them() -> None:
    for room in MAY_IMPORT:
        if room != "batch":
            text = (PACKAGE / room / "__init__.py").read_text()
            assert len(ast.get_docstring(ast.parse(text)) or "") > 60, room
            assert "__all__" in text, room


@pytest.mark.parametrize("path", [*filter(is_room_file, FILES)], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_who_may_touch_what(path: Path) -> None:
    room = room_of(path)
    modules = imports(path)
    for module, names in modules.items():
        if module.split(".")[0] == "deepspeed":
            assert room in TOUCH["deepspeed",], f"{path} imports {module}"
        if module.startswith("torch.distributed") or (module == "torch" and "distributed" in names):
            assert room in TOUCH["torch.distributed",], f"{path} imports {module}"
        if module.split(".")[0] in ("transformers", "peft") and any("Model" in n or "Auto" in n for n in names):
            assert room in ("models", "engine"), f"{path} imports {names} of {module}"
    called = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    if room != "comm":
        assert not called & SPEAKING, f"{path}: {called & SPEAKING}"


@pytest.mark.parametrize("path", FILES + AROUND, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40, node.name
            assert len(node.args.args) + len(node.args.kwonlyargs) <= (8 if path in FILES else 40), node.name


def public(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Classes, functions and methods in it whose names are public, but for overloads; none inside a function."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            overload = any("overload" in ast.unparse(decorator) for decorator in child.decorator_list)
            if not child.name.startswith("_") and not overload:
                yield child
        if isinstance(child, ast.ClassDef):
            yield from public(child)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_docstrings_are_sentences(path: Path) -> None:
    for node in public(ast.parse(path.read_text())):
        first = (ast.get_docstring(node) or "").split("\n\n")[0]
        sentence = re.match(r"[A-Z`].*?[.](?=\s|$)", first, re.DOTALL)
        assert sentence, f"{node.name}: {first!r}"
        words = sentence[0].split()
        assert len(words) > 2, f"{node.name}: {first!r}"
        assert words[0].strip(",:;") not in FRAGMENTS, f"{node.name}: {first!r}"


def test_the_ground_floor_is_light() -> None:
    """Neither torch nor deepspeed is loaded by whoever only plans or asks for help, which comes within a second."""
    for code in (
        "import ds_ulysses, ds_ulysses.config, ds_ulysses.planning",
        "from ds_ulysses.commands import main\ntry:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass",
    ):
        heavy = "import sys; print([m for m in ('torch', 'torch.distributed', 'deepspeed') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", f"{code}\n{heavy}"], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", done.stdout
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", "ds_ulysses", "plan", "--help"], capture_output=True, check=True)
        seconds.append(time.monotonic() - begun)
    assert min(seconds) < 1.0, seconds
