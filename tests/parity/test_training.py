"""Whole models under the DeepSpeed engine equal one process: loss, gradients, norm, weights after one step."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.models import ARCHITECTURES, collate, random_samples, tiny_model
from tests.parity.training import (
    Step,
    at_every_stage,
    backward,
    check_all,
    check_batch_and_accumulation,
    gradients,
    start,
    uniform,
)
from tests.quick import slow, slow_but

SIZES = [slow(1, 1), slow(1, 2), slow(2, 1), (2, 2), slow(4, 1), slow(4, 2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("sp", "dp"), SIZES)
def test_grid(sp: int, dp: int, stage: int) -> None:
    run_ranks(check_batch_and_accumulation, sp * dp, sp, dp, stage)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_other_architectures_at_every_stage(model: str) -> None:
    run_ranks(check_all, 4, at_every_stage(Step(2, 0, uniform(2, 2, 1), model=model)))


UNEVEN = (((16, 9), (5, 12)), ((11, 3), (16, 16)))
"""Two micro-batches of two replicas."""


@pytest.mark.parametrize(
    "model", slow_but({"gemma2", "mixtral"}, ["gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
)
def test_peculiar_architectures_at_every_stage(model: str) -> None:
    """Padded, accumulated and replicated: the balancing loss of experts is that of all real tokens of a micro-batch."""
    run_ranks(check_all, 4, at_every_stage(Step(2, 0, UNEVEN, model=model, model_changes=ARCHITECTURES[model])))


def test_bidirectional_attention_does_not_see_padding() -> None:
    run_ranks(check_all, 2, [Step(2, 1, (((15, 9),),), model_changes={"is_causal": False})])


def test_experts_with_recomputation() -> None:
    step = Step(2, 0, uniform(1, 2, 2), model="mixtral", model_changes=ARCHITECTURES["mixtral"], checkpointing=False)
    run_ranks(check_all, 2, at_every_stage(step))


def check_hidden_router() -> None:
    model = tiny_model("mixtral", **ARCHITECTURES["mixtral"])
    engine = start(Step(2, 2, uniform(1, 1, 1), checkpointing=True), model)
    with pytest.raises(ValueError, match="balancing loss of the experts would have no gradient"):
        backward(engine, [[collate(random_samples([16]))]])


def test_experts_whose_router_would_get_no_gradient_are_refused() -> None:
    run_ranks(check_hidden_router, 2)


def check_no_target() -> None:
    """Nothing supervised anywhere: loss and gradients are 0, the balancing loss's too."""
    model = tiny_model("mixtral", **ARCHITECTURES["mixtral"])
    engine = start(Step(2, 2, uniform(1, 1, 1), model="mixtral"), model)
    assert backward(engine, [[collate(random_samples([16], prompt=1.0))]]) == [0.0]
    assert all(not gradient.any() for gradient in gradients(engine).values())


def test_experts_without_a_target() -> None:
    run_ranks(check_no_target, 2)


@pytest.mark.parametrize("strategy", ["ulysses", slow("auto")])
@pytest.mark.parametrize("sp", [slow(2), 4])
@pytest.mark.parametrize("heads", [(9, 3), (8, 2), (8, 1), (3, 3), (14, 2), (4, 4)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_head_counts(heads: tuple[int, int], sp: int, strategy: str) -> None:
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 8 * heads[0]}
    config = {"ds_ulysses": {"strategy": strategy}}
    run_ranks(check_all, sp, [Step(sp, 2, uniform(1, 2, 1), model_changes=changes, config=config)])


@pytest.mark.parametrize("sp", [2, 4])
def test_any_length(sp: int) -> None:
    """Lengths that do not divide by sp, down to one token."""
    run_ranks(check_all, sp, [Step(sp, 1, (((length,),),)) for length in (2, 3, 15, 17)])


@pytest.mark.parametrize("side", ["left", slow("right")])
def test_padding(side: str) -> None:
    run_ranks(check_all, 4, at_every_stage(Step(2, 0, UNEVEN, side=side)))


def test_replicas_and_micro_batches_of_unequal_length() -> None:
    """Replicas see other lengths and so other tile and target counts; nothing may hang or be misweighed."""
    lengths = (((48,), (16,)), ((7,), (30,)), ((16,), (64,)))
    run_ranks(check_all, 4, at_every_stage(Step(2, 0, lengths, config={"ds_ulysses": {"logits_tile_size": 8}})))


@pytest.mark.parametrize("reentrant", [False, slow(True)])
def test_gradient_checkpointing(reentrant: bool) -> None:
    run_ranks(check_all, 2, at_every_stage(Step(2, 0, uniform(1, 2, 2), checkpointing=reentrant)))


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "contiguous_gradients": False},
        {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500},
        {"stage": 2, "reduce_scatter": False},
        {"stage": 3, "contiguous_gradients": False},
        {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500},
    ],
    ids=str,
)
def test_zero_settings(zero: dict[str, object]) -> None:
    run_ranks(check_all, 4, [Step(2, int(str(zero["stage"])), uniform(2, 1, 2), zero=zero)])


@pytest.mark.parametrize("stage", [slow(1), 2, 3])
def test_optimizer_offload(stage: int) -> None:
    """Three micro-batches: dropping the later ones is how offload has gone wrong before."""
    zero, config = {"offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}
    lengths = (((16,),), ((9,),), ((30,),))
    run_ranks(
        check_all,
        2,
        [Step(2, stage, lengths, zero=zero, config=config, clipping=clip) for clip in (0.0, 0.5)],
    )


def test_clipping_by_the_norm_of_the_whole_step() -> None:
    run_ranks(check_all, 2, at_every_stage(Step(2, 0, (((16,),), ((9,),)), clipping=0.5)))


def test_tied_embeddings() -> None:
    step = Step(2, 0, uniform(1, 2, 2), model_changes={"tie_word_embeddings": True})
    run_ranks(check_all, 2, at_every_stage(step))


def test_sliding_window_layers() -> None:
    changes = {
        "use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    run_ranks(check_all, 4, [Step(4, 2, uniform(1, 2, 1), model="qwen2", model_changes=changes)])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16, "rope_theta": 10000.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_rope_scaling(rope: dict[str, object]) -> None:
    run_ranks(check_all, 2, [Step(2, 2, uniform(1, 1, 1, 32), model_changes={"rope_parameters": rope})])
