"""The command `ds-ulysses`: finds the subcommand, whose own file parses and prints."""

from __future__ import annotations

import argparse
import sys

from ds_ulysses.commands import ask, check, export, plan, report, sft


def main(argv: list[str] | None = None) -> None:
    """Parse the flags and run the subcommand; a refusal is one line and code 1."""
    parser = argparse.ArgumentParser("ds-ulysses", description="Exact long-context training on DeepSpeed.")
    commands = parser.add_subparsers(required=True)
    for command in (sft, plan, check, export, report, ask):
        command.add_to(commands)
    argv = sys.argv[1:] if argv is None else argv
    arguments, others = parser.parse_known_args(argv)
    if others and arguments.run is not sft.run:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        arguments.run(arguments, argv)
    except ValueError as error:
        sys.exit(f"ds-ulysses: {error}")
