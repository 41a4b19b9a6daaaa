"""Distributed attention: one file per strategy, and the module that a model's layers hold."""
