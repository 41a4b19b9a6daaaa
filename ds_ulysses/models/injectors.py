"""Who injects what into a model: a table of injectors, one for each kind of mixer, found by what a module is.

A new kind of mixer is a new row: how its modules are recognised, and what is put into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ds_ulysses.comm import Topology
from ds_ulysses.mixers import DistributedAttention, Mixer


class Injector(NamedTuple):
    """The way modules of one kind get their mixer, under the name `attribute`."""

    kind: type[Mixer]
    recognises: Callable[[nn.Module], bool]
    make: Callable[[Topology], Mixer]
    attribute: str


def _is_softmax_attention(module: nn.Module) -> bool:
    """Attention of transformers: it belongs to a layer, and says whether it is causal to the function that it calls."""
    return isinstance(getattr(module, "layer_idx", None), int) and isinstance(getattr(module, "is_causal", None), bool)


INJECTORS = (
    Injector(
        DistributedAttention,
        _is_softmax_attention,
        lambda topology: DistributedAttention(kernel=topology.config.kernel, topology=topology),
        "distributed_attention",
    ),
)


class Place(NamedTuple):
    """A module that mixes tokens, and who puts a mixer into it."""

    module: nn.Module
    injector: Injector

    def inject(self, topology: Topology) -> None:
        """Put a new mixer into the module."""
        setattr(self.module, self.injector.attribute, self.injector.make(topology))

    def remove(self) -> None:
        """Take the mixer out of the module."""
        delattr(self.module, self.injector.attribute)

    @property
    def mixer(self) -> Mixer:
        """The mixer that was injected."""
        mixer: Mixer = getattr(self.module, self.injector.attribute)
        return mixer


def find_places(model: PreTrainedModel) -> dict[str, Place]:
    """Find all modules that mix tokens, by name; each layer has one or several. Raises `ValueError` if one has none."""
    found = {
        name: Place(module, injector)
        for name, module in model.named_modules()
        for injector in INJECTORS
        if injector.recognises(module)
    }
    having = [(place.module.layer_idx, place.injector.kind) for place in found.values()]
    beyond = [name for name, place in found.items() if place.module.layer_idx >= model.config.num_hidden_layers]
    if beyond or len(set(having)) < len(having):
        raise ValueError(
            f"{type(model).__name__} has {len(having)} attention modules for {model.config.num_hidden_layers} layers"
            f"{', among them ' + beyond[0] if beyond else ''}: attention besides that of its layers has not been "
            f"tested. Use the architecture's own transformers class."
        )
    without = sorted(set(range(model.config.num_hidden_layers)) - {index for index, _ in having})
    if without:
        raise ValueError(
            f"{type(model).__name__} has {model.config.num_hidden_layers} layers, but in {len(without)} of them, first "
            f"layer {without[0]}, no module that mixes tokens is known, so that it would mix its shard only. Use "
            f"the architecture's own transformers class."
        )
    return found
