"""Constants that all rooms need."""

IGNORE_INDEX = -100
"""Label of a token without a target."""
OPTIONS = "ds_ulysses"
"""Key of our block in a DeepSpeed JSON."""
