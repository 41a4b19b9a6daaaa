"""The command `ds-ulysses`."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from ds_ulysses.check import TOLERANCE, Subject, check
from ds_ulysses.estimate import GIB, Hardware
from ds_ulysses.export import DTYPES, export
from ds_ulysses.run_page import write_page
from ds_ulysses.sizing import Wish, plan


def main(argv: list[str] | None = None) -> None:
    """Parse and run; a refusal is one line and code 1."""
    parser = argparse.ArgumentParser("ds-ulysses", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_export(commands)
    _add_check(commands)
    _add_plan(commands)
    _add_report(commands)
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments, argv)
    except ValueError as error:
        sys.exit(f"ds-ulysses: {error}")


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", help="make a Hugging Face folder of a checkpoint")
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoint-STEP of train/sft.py")
    parser.add_argument("out", type=Path, help="folder to write: model or adapter, and tokenizer")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: %(default)s)")
    parser.add_argument("--merge", action="store_true", help="write an adapter together with its base model, as one")
    parser.set_defaults(run=lambda a, _: export(a.checkpoint, a.out, a.dtype, a.merge))


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("check", help="compare loss and gradients on all ranks with those of one process")
    parser.add_argument("--model", required=True, help="folder or hub name; only its config is read, unless --layers 0")
    parser.add_argument("--deepspeed", required=True, help="the DeepSpeed JSON to train with")
    parser.add_argument("--layers", type=int, default=2, help="of random weights; 0: the whole model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1001, help="of a row of two documents (default: %(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCE, default="fp32", help="to compute in (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="default: all GPUs, or 2")
    parser.set_defaults(run=_check)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="from a model's config: which set-up holds a sequence, and how fast")
    parser.add_argument("--model", required=True, help="folder or hub name; only its config is read")
    parser.add_argument("--seq", required=True, type=_tokens, help="tokens of a row, such as 131072, 128K or 1M")
    parser.add_argument("--gpus", required=True, type=int, help="all together")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--gpu_memory", type=float, default=79.6, help="GiB of one (default: %(default)s, an H100)")
    parser.add_argument("--peak_tflops", type=float, default=989, help="in bf16 (default: %(default)s, an H100)")
    parser.add_argument("--out", type=Path, help="where to write the DeepSpeed JSON; without it, it is shown")
    parser.set_defaults(run=lambda a, _: _plan(a))


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="one page with the plots of a run, or of several side by side")
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of train/sft.py")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="(default: %(default)s)")
    parser.set_defaults(run=lambda a, _: write_page(a.runs, a.out))


def _tokens(text: str) -> int:
    """128K is 128 * 1024."""
    scale = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    return round(float(text[:-1] if scale > 1 else text) * scale)


def _plan(arguments: argparse.Namespace) -> None:
    hardware = Hardware(
        memory=arguments.gpu_memory * GIB,
        peak_flops=arguments.peak_tflops * 1e12,
        gpus_per_node=arguments.gpus_per_node,
    )
    page, config = plan(Wish(arguments.model, arguments.seq, arguments.gpus, hardware))
    print(page)
    if config is None:
        sys.exit(1)
    text = json.dumps(config, indent=2)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n", encoding="utf-8")


def _check(arguments: argparse.Namespace, argv: list[str]) -> None:
    """On ranks that a launcher started, or first through DeepSpeed's."""
    if "RANK" not in os.environ:
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        with socket.socket() as free:  # a training run may hold the launcher's own port
            free.bind(("", 0))
            port = free.getsockname()[1]
        ranks = ["--num_accelerators", str(arguments.ranks), "--master_port", str(port)]
        sys.exit(subprocess.call([launcher, "--quiet", "--no_local_rank", *ranks, "--module", "ds_ulysses.cli", *argv]))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's own calls
    subject = Subject(arguments.model, arguments.deepspeed, arguments.layers, arguments.tokens, arguments.dtype)
    table, same = check(subject)
    if os.environ["RANK"] == "0":
        print(table, flush=True)
    sys.exit(not same)


if __name__ == "__main__":
    main()
