"""The engine: DeepSpeed's, whose gradients are those of the whole step's tokens."""

from __future__ import annotations

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from ds_ulysses.comm import Topology
from ds_ulysses.engine.gradients import scale_gradients
from ds_ulysses.loss import StepNormalizer


class SequenceParallelEngine(DeepSpeedEngine):  # type: ignore[misc]
    """A DeepSpeed engine whose gradients equal those of one process that sees the whole step's tokens."""

    topology: Topology
    normalizer: StepNormalizer

    @classmethod
    def adopt(
        cls, engine: DeepSpeedEngine, topology: Topology, normalizer: StepNormalizer, divisor: int
    ) -> SequenceParallelEngine:
        """Make a DeepSpeed engine one of these; `divisor` is what it divides the sum of gradients by."""
        engine.__class__ = cls  # deepspeed.initialize offers no way to name a class
        engine.topology, engine.normalizer = topology, normalizer
        normalizer.factor = float(divisor * engine.gradient_accumulation_steps())
        return engine

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run DeepSpeed's backward; division by accumulation steps is part of the loss's arithmetic and stays on."""
        if not scale_wrt_gas:
            raise ValueError("scale_wrt_gas=False: the loss counts the tokens of the whole step already. Leave it out.")
        scaled: Tensor = super().backward(loss, retain_graph=retain_graph)
        return scaled

    def _backward_epilogue(self) -> None:
        super()._backward_epilogue()
        if self.is_gradient_accumulation_boundary():
            missing = self.normalizer.close()
            if missing is not None:
                scale_gradients(self, missing)
            if not (self.zero_optimization() or self.bfloat16_enabled() or self.fp16_enabled()):
                # Plain fp32 is the one mode in which DeepSpeed keeps no norm.
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                self._global_grad_norm = nn.utils.get_total_norm(grads)

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient before clipping, by then the one of all tokens on all ranks."""
        norm = super().get_global_grad_norm()
        return None if norm is None else float(norm)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the whole gradient of each parameter that has one, by name, before the step. Collective."""
        grads = {name: safe_get_full_grad(parameter) for name, parameter in self.module.named_parameters()}
        return {name: grad for name, grad in grads.items() if grad is not None}
