"""`ds-ulysses check`: loss and gradients on all ranks against those of one process."""

from __future__ import annotations

import argparse
import os
import sys
import warnings

from ds_ulysses.commands.launcher import launch


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `check` subcommand and its flags."""
    parser = commands.add_parser("check", help="compare loss and gradients on all ranks with those of one process")
    parser.add_argument("--model", required=True, help="folder or hub name; only its config is read, unless --layers 0")
    parser.add_argument("--deepspeed", required=True, help="the DeepSpeed JSON to train with")
    parser.add_argument("--layers", type=int, default=2, help="of random weights; 0: the whole model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1001, help="of a row of two documents (default: %(default)s)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="to compute in (%(default)s)")
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or 2")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Compare on ranks that a launcher started, or start them through DeepSpeed's first; code 1 if they differ."""
    if "RANK" not in os.environ:
        import torch

        sys.exit(launch(arguments.ranks or max(2, torch.cuda.device_count()), "--module", "ds_ulysses", *argv))
    from ds_ulysses.engine import Subject, check

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's own calls
    subject = Subject(arguments.model, arguments.deepspeed, arguments.layers, arguments.tokens, arguments.dtype)
    table, same = check(subject)
    if os.environ["RANK"] == "0":
        print(table, flush=True)
    sys.exit(not same)
