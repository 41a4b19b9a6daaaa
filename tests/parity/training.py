"""One optimizer step under the engine, on real ranks, against the one-process oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import oracle
from tests.models import collate, pack, random_samples, tiny_model
from tests.oracle import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RTOL = 1e-5
LR = 0.1


@dataclass(frozen=True)
class Step:
    """What one optimizer step is made of. `lengths`: [micro-batch][replica][row] document lengths."""

    sp: int
    stage: int
    lengths: tuple[tuple[tuple[int, ...], ...], ...]
    model: str = "llama"
    model_changes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    side: str = "right"
    clipping: float = 0.0
    checkpointing: bool | None = None
    """Gradient checkpointing: None off, else whether it is the reentrant kind."""
    packed: bool = False
    """The documents of a micro-batch stand in one row."""

    def samples(self) -> list[list[list[Sample]]]:
        seeds = iter(range(1, 1000))
        return [[random_samples(list(rows), next(seeds)) for rows in micro] for micro in self.lengths]


def uniform(dp: int, micro: int, accumulation: int, length: int = 16) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows of one length in every micro-batch of every replica."""
    return ((tuple([length] * micro),) * dp,) * accumulation


def ds_config(step: Step) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1 if step.packed else len(step.lengths[0][0]),
        "gradient_accumulation_steps": len(step.lengths),
        "sequence_parallel_size": step.sp,
        "gradient_clipping": step.clipping,  # DeepSpeed clips at 1 by default
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": step.stage, **step.zero},
        **step.config,
    }


def new_topology(sp: int) -> Any:
    """Groups of `sp` ranks, for tests without an engine."""
    import ds_ulysses

    return ds_ulysses.Topology.create(ds_ulysses.SequenceParallelConfig(sequence_parallel_size=sp))


def start(step: Step, model: PreTrainedModel) -> Any:
    import ds_ulysses

    if step.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": step.checkpointing})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return ds_ulysses.initialize(model=model, config=ds_config(step), optimizer=optimizer)[0]


def backward(engine: Any, batches: list[list[dict[str, Tensor]]]) -> list[float]:
    """All of a step but the last `engine.step()`; `batches` are [micro-batch][replica]. Returns the losses."""
    import ds_ulysses

    losses = []
    for index, replicas in enumerate(batches):
        shard = ds_ulysses.shard_batch(replicas[engine.topology.dp_rank], engine.topology)
        loss = engine(**shard).loss
        engine.backward(loss)
        losses.append(loss.item())
        if index < len(batches) - 1:
            engine.step()
    return losses


def gradients(engine: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad}


def weights(engine: Any) -> dict[str, Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Elementwise within RTOL of each tensor's largest entry, plus rounding of the largest of all."""
    assert found.keys() == expected.keys()
    noise = 1e-7 * max(right.abs().max().item() for right in expected.values())
    for name, right in expected.items():
        error, size = (found[name].double() - right).abs().max().item(), right.abs().max().item()
        assert error <= RTOL * size + noise, f"{what} of {name}: off by {error:.3g}, largest entry {size:.3g}"


def check(step: Step) -> None:
    """On every rank: loss, gradients, gradient norm and weights after one SGD step equal the oracle's."""
    model = tiny_model(step.model, **step.model_changes)
    samples = step.samples()
    micro_batches = [[sample for replica in micro for sample in replica] for micro in samples]
    loss, expected = oracle.train_step(model, *micro_batches)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}

    engine = start(step, model)
    batches = [
        [pack(replica) if step.packed else collate(replica, step.side) for replica in micro] for micro in samples
    ]
    losses = backward(engine, batches)
    counts = [sum(sample.num_targets for replica in micro for sample in replica) for micro in samples]
    step_loss = sum(x * n for x, n in zip(losses, counts, strict=True)) / max(sum(counts), 1)
    assert abs(step_loss - loss) <= RTOL * abs(loss), (step_loss, loss)
    same_everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(same_everywhere, losses)
    assert same_everywhere == [losses] * dist.get_world_size()

    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    expected = {name: grad for name, grad in expected.items() if name in trained}
    assert_equal(gradients(engine), expected, f"{step}: gradient")
    engine.step()
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    assert abs(engine.get_global_grad_norm() - norm) <= RTOL * norm
    lr = LR * min(1.0, step.clipping / (norm + 1e-6)) if step.clipping else LR
    after = {name: w - lr * expected[name] if name in expected else w for name, w in before.items()}
    assert_equal(weights(engine), after, f"{step}: weight")
    engine.destroy()


def check_batch_and_accumulation(sp: int, dp: int, stage: int) -> None:
    """One cell of the grid: micro batch 1 and 2, accumulation 1 and 2."""
    for micro in (1, 2):
        for accumulation in (1, 2):
            check(Step(sp, stage, uniform(dp, micro, accumulation)))


def check_all(steps: list[Step]) -> None:
    """Several steps on the same ranks, each with an engine of its own."""
    for step in steps:
        check(step)


def at_every_stage(step: Step) -> list[Step]:
    return [replace(step, stage=stage) for stage in range(4)]
