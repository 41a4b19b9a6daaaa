"""`python -m ds_ulysses` is `ds-ulysses`."""

from ds_ulysses.commands import main

main()
