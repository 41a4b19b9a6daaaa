"""`ds-ulysses sft`: fine-tune on the ranks of this machine."""

from __future__ import annotations

import argparse
import sys

from ds_ulysses.commands.launcher import launch
from ds_ulysses.config import shipped


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `sft` subcommand and its own flag; all others are those of train/sft.py."""
    about = "fine-tune a model; takes the flags of train/sft.py"
    # No abbreviations: they would swallow flags of train/sft.py.
    parser = commands.add_parser("sft", help=about, add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, help="ranks to start (default: all GPUs)")
    parser.add_argument("-h", "--help", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Hand everything after `sft` on, through DeepSpeed's launcher; only the help needs no ranks."""
    if arguments.help:
        from ds_ulysses.training import parse_arguments

        print("--ranks RANKS: ranks to start on this machine (default: all GPUs). All other flags:\n")
        parse_arguments(["--help"])
    flags = argv[1:]
    if arguments.ranks is not None:
        at = next(i for i, flag in enumerate(flags) if flag.startswith("--ranks"))
        del flags[at : at + (1 if "=" in flags[at] else 2)]
    sys.exit(launch(arguments.ranks, str(shipped("train/sft.py")), *flags))
