"""The loop over optimizer steps, and what happens between them."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import torch

from ds_ulysses.batch import shard_batch
from ds_ulysses.comm import Ledger, ledger
from ds_ulysses.data import ReadyStep, Samples, Survey, order_steps, ready_steps
from ds_ulysses.engine import SequenceParallelEngine
from ds_ulysses.training.evaluation import Evaluation, evaluate
from ds_ulysses.training.run import Run
from ds_ulysses.training.saving.checkpoints import save_checkpoint
from ds_ulysses.training.watching.faults import NotFinite, StepGuard, StopRequest, watchdog
from ds_ulysses.training.watching.log import TrainingLog
from ds_ulysses.training.watching.spikes import SpikeWatch


def train(run: Run) -> bool:
    """Take all steps that are left; False if the run was asked to stop before, and left a checkpoint. Collective.

    Raises `NotFinite` unless such steps are to be skipped.
    """
    num_samples = len(run.samples) if isinstance(run.samples, Samples) else None
    orders = islice(order_steps(run.samples.documents, num_samples, run.batching), run.progress.step, run.num_steps)
    topology = run.engine.topology
    guard = StepGuard(run.engine)
    limit = run.arguments.step_timeout
    with TrainingLog(run) as log, StopRequest().listening() as stop, watchdog(limit) as feed:
        spikes = SpikeWatch(run.arguments.loss_spike_threshold, log.losses_before)
        if run.arguments.eval_on_start and run.progress.step == 0:
            log.evaluation(evaluate_now(run))
        if run.gives_up:  # it did before, and is started again
            return True
        for step in ready_steps(orders, run.samples, run.batching, topology.dp_rank):
            feed()  # not before the first: a stream may have to be read again up to here
            one_step(run, step, guard, log, spikes)
            if is_due(run, step, run.arguments.eval_strategy, run.arguments.eval_steps, at_end=True):
                evaluation = evaluate_now(run)
                run.progress.note(evaluation)
                log.evaluation(evaluation)
            stopped = stop.agreed(topology.device)
            if stopped or is_due(run, step, run.arguments.save_strategy, run.arguments.save_steps):
                save_checkpoint(run)
            if stopped or run.gives_up:
                return not stopped
        return True


def is_due(run: Run, step: ReadyStep, strategy: str, every: int, at_end: bool = False) -> bool:
    """Say whether something that happens every few steps or every epoch comes after this one."""
    if at_end and strategy != "no" and run.progress.step == run.num_steps:
        return True
    if strategy == "epoch":
        return step.order.epoch.is_integer()
    return strategy == "steps" and run.progress.step % every == 0


def evaluate_now(run: Run) -> Evaluation:
    """Evaluate with the weights as they are."""
    assert run.eval_samples is not None and run.eval_batching is not None  # noqa: PT018
    return evaluate(run.engine, run.eval_samples, run.eval_batching)


def one_step(run: Run, step: ReadyStep, guard: StepGuard, log: TrainingLog, spikes: SpikeWatch) -> None:
    """Train on one step, and say so."""
    learning_rate = run.engine.get_lr()[0]
    trained = train_step(run.engine, step)
    if (left_out := guard.left_out()) and not run.arguments.skip_nonfinite_steps:
        raise NotFinite(run.progress.step + 1, step.order.documents)
    survey = Survey(run.batching, run.engine.topology.sp_size).add(step.order)
    run.progress.step += 1
    run.progress.num_tokens += survey.real_tokens
    log.step(
        survey,
        epoch=step.order.epoch,
        loss=trained.loss,
        learning_rate=learning_rate,
        grad_norm=run.engine.get_global_grad_norm(),
        exchange_seconds=trained.book.seconds_waited(),
        sent_gib=trained.book.bytes_sent() / 2**30,
    )
    if left_out:
        log.left_out(step.order, trained.micro_losses)
    if spike := spikes.see(trained.loss):
        log.spike(spike, step.order, trained.micro_losses)


class Trained(NamedTuple):
    """The result of an optimizer step."""

    loss: float
    """The mean over the targets of all its samples."""
    micro_losses: list[float]
    """That of each accumulated micro-batch, on all replicas."""
    book: Ledger


def train_step(engine: SequenceParallelEngine, step: ReadyStep) -> Trained:
    """Take one optimizer step."""
    losses = []
    with ledger() as book:
        for batch in step.batches:
            loss = engine(**shard_batch(batch, engine.topology)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    micro_losses = torch.stack(losses).tolist()
    num_targets = step.order.num_targets()
    mean = sum(targets * loss for targets, loss in zip(num_targets, micro_losses, strict=True)) / sum(num_targets)
    return Trained(mean, micro_losses, book)
