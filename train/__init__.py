"""Supervised fine-tuning on long sequences: `deepspeed train/sft.py --help`."""
