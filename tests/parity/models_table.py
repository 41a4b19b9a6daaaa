"""The table of docs/models.md, made by running its architectures' tests: `python -m tests.parity.models_table`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from tests.distributed import run_ranks
from tests.models import ARCHITECTURES, tiny_model
from tests.parity.architecture import WAYS, check_architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARKS = "<!-- models: python -m tests.parity.models_table -->\n", "<!-- end of models -->\n"
HEADER = "| `model_type` | class | what the tested one has | largest error |\n|---|---|---|---|\n"


def peculiarities(model: nn.Module) -> str:
    """What sets an architecture apart from a plain Llama, read off the tested model."""
    config: Any = model.config
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    kinds = set(getattr(config, "layer_types", None) or [])
    found = {
        "windows in some layers": len(kinds) > 1,
        "a window": len(kinds) < 2 and getattr(config, "sliding_window", None),
        "capped scores": getattr(config, "attn_logit_softcapping", None),
        "sinks": any("sinks" in name for name in names),
        "keys and values of other dims (MLA)": getattr(config, "kv_lora_rank", None),
        "a scale of its own": {"attention_multiplier", "query_pre_attn_scalar", "scale_attn_by_inverse_layer_idx"}
        & {name for name, value in vars(config).items() if value},
        "norms of q and k": any("q_norm" in name for name in names),
        "partial rotary": _partial_rotary(config),
        "layers without RoPE": 0 in (getattr(config, "no_rope_layers", None) or []),
        "learned positions": any("wpe" in name for name in names),
        "experts": any("experts" in name for name in names),
        "balancing loss": getattr(config, "output_router_logits", False),
        "scaled logits": getattr(config, "logits_scaling", None) or getattr(config, "logit_scale", None),
        "capped logits": getattr(config, "final_logit_softcapping", None),
    }
    return ", ".join(name for name, applies in found.items() if applies)


def _partial_rotary(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("partial_rotary_factor", 1.0) < 1


def row(kind: str) -> str:
    model = tiny_model(kind, **ARCHITECTURES[kind])
    error = max(error for world in WAYS for error in run_ranks(check_architecture, world, kind, ARCHITECTURES[kind]))
    return f"| `{kind}` | {type(model).__name__} | {peculiarities(model)} | {error:.0e} |\n"


def rows_in_docs() -> dict[str, float]:
    """Model type and error of each row."""
    text = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    return {kind: float(error) for kind, error in re.findall(r"^\| `(\w+)` .* \| (\S+) \|$", text, re.MULTILINE)}


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    table = HEADER + "".join(map(row, ARCHITECTURES))
    PAGE.write_text(before + MARKS[0] + table + MARKS[1] + after, encoding="utf-8")


if __name__ == "__main__":
    main()
