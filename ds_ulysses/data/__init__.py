"""Samples: a row becomes a conversation, tokens and a mask; packs; the order of an epoch; reading ahead."""

from ds_ulysses.data.ahead import ReadyStep, ready_steps
from ds_ulysses.data.cost import Cost, cost_of
from ds_ulysses.data.samples import Samples, Stream, count, load_rows, mix, tokenize
from ds_ulysses.data.steps import (
    WINDOW,
    Batching,
    Document,
    Documents,
    StepOrder,
    count_steps,
    order_epoch,
    order_steps,
)
from ds_ulysses.data.survey import Survey, survey_epoch

__all__ = [
    "WINDOW",
    "Batching",
    "Cost",
    "Document",
    "Documents",
    "ReadyStep",
    "Samples",
    "StepOrder",
    "Stream",
    "Survey",
    "cost_of",
    "count",
    "count_steps",
    "load_rows",
    "mix",
    "order_epoch",
    "order_steps",
    "ready_steps",
    "survey_epoch",
    "tokenize",
]
