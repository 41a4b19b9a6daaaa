"""`ds-ulysses ask`: a question to a chat model or an adapter that was saved."""

from __future__ import annotations

import argparse


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `ask` subcommand and its flags."""
    parser = commands.add_parser("ask", help="ask a model or an adapter that was saved")
    parser.add_argument("folder", help="what from_pretrained opens")
    parser.add_argument("question")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Print the answer to a question, by plain transformers and peft, in this process."""
    from ds_ulysses.models import answer

    print(f"{arguments.question}\n\n{answer(arguments.folder, arguments.question)}")
