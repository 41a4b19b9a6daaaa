"""`ds-ulysses export`: a Hugging Face folder of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `export` subcommand and its flags."""
    parser = commands.add_parser("export", help="make a Hugging Face folder of a checkpoint")
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoint-STEP of a run")
    parser.add_argument("out", type=Path, help="folder to write: model or adapter, and tokenizer")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (%(default)s)"
    )
    parser.add_argument("--merge", action="store_true", help="write an adapter together with its base model, as one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Export a checkpoint in this process, without ranks."""
    from ds_ulysses.engine import export

    export(arguments.checkpoint, arguments.out, arguments.dtype, arguments.merge)
