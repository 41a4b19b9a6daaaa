"""The house keeps its order: who may import whom, and how long a file may get."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("ds_ulysses/**/*.py"), *ROOT.glob("train/**/*.py")])
# A module imports only from modules that stand before it; modules of one line stand side by side.
ORDER = [
    ["heads", "layout", "ledger", "deepspeed_json", "kernels", "files", "run_page"],
    ["config", "collectives", "plan", "support"],
    ["mesh", "exchange", "routing", "rope"],
    ["topology", "loss"],
    ["attention", "batch"],
    ["predict", "causal_lm"],
    ["estimate"],
    ["sizing"],
    ["patch"],
    ["gradients"],
    ["engine"],
    ["checkpoint"],
    ["export", "check"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return found


def part(module: str) -> str:
    """ds_ulysses.attention.local -> attention"""
    return module.split(".")[1]


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parts[-2:] != ("ds_ulysses", "__init__.py")], ids=lambda p: p.name
)
def test_imports_go_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").parts
    for module in imports(path):
        if own[0] == "ds_ulysses":
            assert not module.startswith(("train", "tests", "benchmarks")), f"{path} imports {module}"
            if module.startswith("ds_ulysses.") and part(module) != own[1]:
                assert LEVEL[part(module)] < LEVEL[own[1]], f"{path} imports {module}"
        if module.split(".")[0] == "transformers":
            assert own[1] in ("patch", "causal_lm", "export", "check", "sizing") or own[0] == "train", (
                f"{path} imports {module}"
            )


def test_every_module_has_its_place() -> None:
    names = {p.relative_to(ROOT / "ds_ulysses").parts[0].removesuffix(".py") for p in ROOT.glob("ds_ulysses/**/*.py")}
    assert names - {"__init__"} == set(LEVEL)


def test_only_two_files_touch_process_groups() -> None:
    """Groups are made in topology, messages sent in collectives; others may ask for rank, size and barrier."""
    speaking = {"new_group", "all_to_all_single", "all_reduce", "all_gather", "broadcast", "reduce_scatter"}
    speaking |= {"all_gather_into_tensor", "reduce_scatter_tensor", "isend", "irecv", "batch_isend_irecv"}
    for path in ROOT.glob("ds_ulysses/**/*.py"):
        called = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        if path.name not in ("topology.py", "collectives.py"):
            assert not called & speaking, f"{path}: {called & speaking}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40, node.name
            assert len(node.args.args) + len(node.args.kwonlyargs) <= 8, node.name
