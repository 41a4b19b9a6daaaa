"""`ds-ulysses plan`: which set-up holds a sequence, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `plan` subcommand and its flags."""
    parser = commands.add_parser("plan", help="from a model's config: which set-up holds a sequence, and how fast")
    parser.add_argument("--model", required=True, help="folder or hub name; only its config is read")
    parser.add_argument("--seq", required=True, type=_tokens, help="tokens of a row, such as 131072, 128K or 1M")
    parser.add_argument("--gpus", required=True, type=int, help="all together")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--gpu_memory", type=float, default=79.6, help="GiB of one (default: %(default)s, an H100)")
    parser.add_argument("--peak_tflops", type=float, default=989, help="in bf16 (default: %(default)s, an H100)")
    parser.add_argument("--out", type=Path, help="where to write the DeepSpeed JSON; without it, it is shown")
    parser.set_defaults(run=run)


def _tokens(text: str) -> int:
    """128K is 128 * 1024."""
    scale = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    try:
        return round(float(text[:-1] if scale > 1 else text) * scale)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: write 131072, 128K or 1M") from None


def run(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Print the page, and write or print the JSON; code 1 if nothing fits."""
    from ds_ulysses.models import load_model_config
    from ds_ulysses.planning import GIB, Hardware, Wish, plan

    hardware = Hardware(
        memory=arguments.gpu_memory * GIB,
        peak_flops=arguments.peak_tflops * 1e12,
        gpus_per_node=arguments.gpus_per_node,
    )
    page, config = plan(Wish(load_model_config(arguments.model), arguments.seq, arguments.gpus, hardware))
    print(page)
    if config is None:
        sys.exit(1)
    text = json.dumps(config, indent=2)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n", encoding="utf-8")
