"""What is loaded once, in the server that ranks are forked from: all that training and the tests import on their way.

A rank would need a second or two for it, and DeepSpeed, which collects garbage whenever it makes an optimizer, would
look through it many times. Nothing here changes what a rank does; without it tests take twice as long.
"""

from __future__ import annotations

import gc
from importlib import import_module

import deepspeed.ops
from transformers import AutoConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.models import ARCHITECTURES

for name in (
    "datasets",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "ds_ulysses",
    "hypothesis",
    "pandas",
    "peft",
    "pytest",
    "tests.parity.attention",
    "tests.parity.training",
    "tests.training.trainer",
    "torch._dynamo.backends.debugging",
    "torch._subclasses.schema_check_mode",
    "torch.export._unlift",
    "torch.profiler._cupti_monitor",
    "train.sft",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
):
    import_module(name)
for kind in ARCHITECTURES:
    MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(kind))]

_ = deepspeed.ops.__compatible_ops__  # looked up at the first start of an engine, by compiling a program
get_checkpoint_conversion_mapping("llama")  # hundreds of patterns, compiled when the first model is read

gc.collect()
gc.freeze()
