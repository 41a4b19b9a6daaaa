"""The command `ds-ulysses`: parsing and printing, a subcommand a file."""

from ds_ulysses.commands.main import main

__all__ = ["main"]
