"""A real model and real text that ship inside Python packages, so that a machine without a model hub can train."""
