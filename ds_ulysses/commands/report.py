"""`ds-ulysses report`: one page with the plots of a run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `report` subcommand and its flags."""
    parser = commands.add_parser("report", help="one page with the plots of a run, or of several side by side")
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of runs")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="(default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Write the report of the given runs."""
    from ds_ulysses.training import write_report

    write_report(arguments.runs, arguments.out)
