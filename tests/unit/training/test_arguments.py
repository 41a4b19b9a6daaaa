"""Flags, recipes and the "auto" values of DeepSpeed JSONs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ulysses import SequenceParallelConfig
from ds_ulysses.config.deepspeed_json import load_deepspeed_json, resolve_batch_sizes
from ds_ulysses.engine.deepspeed_config import deepspeed_config
from ds_ulysses.training.arguments import SftArguments, parse_arguments
from ds_ulysses.training.auto_values import fill_from_arguments, fill_from_data, fill_from_model
from tests.unit.test_batch import topology

REQUIRED = ["--model_name_or_path", "m", "--dataset", "d", "--deepspeed", "z", "--output_dir", "o"]
EVALUATED = [*REQUIRED, "--eval_dataset", "e", "--eval_strategy", "steps", "--load_best_model_at_end"]
CONFIGS = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def test_flags_go_before_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: m\ndataset: d\ndeepspeed: z\noutput_dir: o\nlearning_rate: 1e-4\nmax_length: 99\n"
        "gradient_checkpointing: false\n"
    )
    arguments = parse_arguments(["--config", str(recipe), "--max_length", "7", "--local_rank=1"])
    assert (arguments.learning_rate, arguments.max_length, arguments.gradient_checkpointing) == (1e-4, 7, False)
    assert (arguments.model_name_or_path, arguments.dry_run) == ("m", False)


def test_trl_names() -> None:
    arguments = parse_arguments([*REQUIRED[:2], "--dataset_name", "x", *REQUIRED[4:], "--dry_run"])
    assert (arguments.dataset, arguments.dry_run) == (["x"], True)


def test_lists_are_lists_in_recipes_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: m\ndataset: [a, b]\ndataset_weights: [1, 0.5]\ndeepspeed: z\noutput_dir: o\n"
        "lora_target_modules: all-linear\n"
    )
    arguments = parse_arguments(["--config", str(recipe)])
    assert (arguments.dataset, arguments.dataset_weights) == (["a", "b"], [1.0, 0.5])
    assert arguments.lora_target_modules == ["all-linear"]
    flags = ["--dataset", "c", "--dataset_weights", "2", "--lora_target_modules", "q_proj", "v_proj"]
    arguments = parse_arguments(["--config", str(recipe), *flags])
    assert (arguments.dataset, arguments.dataset_weights) == (["c"], [2.0])
    assert arguments.lora_target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model_name_or_path is missing"),
        ([*REQUIRED, "--max_length", "0"], "--max_length is 0"),
        ([*REQUIRED, "--max_length", "1"], "--max_length is 1"),
        ([*REQUIRED, "--per_device_train_batch_size", "0"], "--per_device_train_batch_size is 0"),
        ([*REQUIRED, "--max_steps", "0"], "would train nothing"),
        ([*REQUIRED, "--lr_scheduler_type", "cosin"], "lr_scheduler_type is 'cosin'. Choose one of: linear, cosine"),
        ([*REQUIRED, "--some_flag", "1"], "some_flag"),
        ([*REQUIRED, "--dataset_weights", "1", "2"], "--dataset_weights has 2 values for 1 datasets"),
        ([*REQUIRED, "--dataset_weights", "0"], "give each one above 0"),
        ([*REQUIRED, "--streaming"], "--streaming needs --max_steps"),
        ([*REQUIRED, "--lora_r", "0", "--use_peft"], "--lora_r is 0"),
        ([*REQUIRED, "--eval_strategy", "step"], "--eval_strategy is 'step'. Choose one of: no, steps, epoch"),
        ([*REQUIRED, "--eval_strategy", "steps"], "together with --eval_dataset"),
        ([*REQUIRED, "--eval_dataset", "e"], "together with --eval_dataset"),
        ([*REQUIRED, "--eval_dataset", "e", "--eval_strategy", "steps", "--eval_steps", "0"], "must be at least 1"),
        ([*REQUIRED, "--early_stopping_patience", "2"], "watches the loss of --eval_strategy, which is no"),
        ([*REQUIRED, "--load_best_model_at_end"], "needs a checkpoint of every evaluation"),
        ([*EVALUATED, "--save_strategy", "epoch"], "needs a checkpoint of every evaluation"),
        ([*EVALUATED, "--eval_steps", "4", "--save_steps", "8"], "--eval_steps that are a multiple of --save_steps"),
        ([*REQUIRED, "--save_strategy", "best"], "--save_strategy is 'best'. Choose one of: no, steps, epoch"),
        ([*REQUIRED, "--report_to", "mlflow"], "--report_to is mlflow. Choose of: none, tensorboard, wandb"),
        ([*REQUIRED, "--save_total_limit", "0"], "--save_steps and --save_total_limit must be at least 1"),
        ([*REQUIRED, "--streaming", "--max_steps", "2", "--save_strategy", "epoch"], "--streaming does not: use steps"),
        (
            [*REQUIRED, "--streaming", "--max_steps", "2", "--eval_dataset", "e", "--eval_strategy", "epoch"],
            "use steps",
        ),
    ],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "must hold"),
        ("a: [", "not valid YAML"),
        ("learning_rat: 1", "unknown arguments: learning_rat"),
        (None, "Cannot"),
    ],
)
def test_bad_recipes(tmp_path: Path, text: str | None, message: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--config", str(recipe)])


def filled(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    arguments = SftArguments(model_name_or_path="m", dataset=["d"], deepspeed="z", output_dir="o", **changes)
    config = fill_from_arguments(config, arguments, world_size=4)
    fill_from_model(config, hidden_size=100)
    fill_from_data(config, num_steps=50)
    return config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_filled_completely(path: Path) -> None:
    config = filled(load_deepspeed_json(path), sequence_parallel_size=2, gradient_accumulation_steps=3)
    assert SequenceParallelConfig.from_deepspeed(config).sequence_parallel_size == 2
    ours = deepspeed_config(config, topology(2).dp_size)
    assert (ours["train_batch_size"], ours["train_micro_batch_size_per_gpu"], ours["gradient_accumulation_steps"]) == (
        3,
        1,
        3,
    )
    assert "sequence_parallel_size" not in ours
    assert ours["optimizer"]["params"]["lr"] == 2e-5


def test_there_are_the_four_that_the_docs_name() -> None:
    assert [path.stem for path in CONFIGS] == ["zero1", "zero2", "zero3", "zero3_offload"]


def test_auto_sequence_parallel_size_is_all_ranks_by_default() -> None:
    assert filled({"sequence_parallel_size": "auto"})["sequence_parallel_size"] == 4
    assert filled({"sequence_parallel_size": "auto"}, sequence_parallel_size=2)["sequence_parallel_size"] == 2
    assert "sequence_parallel_size" not in filled({})


def test_no_argument_is_ignored_for_want_of_a_place_in_the_json() -> None:
    config = filled({}, sequence_parallel_size=2, bf16=True, learning_rate=0.1, weight_decay=0.2, max_grad_norm=0.3)
    assert (config["sequence_parallel_size"], config["bf16"], config["gradient_clipping"]) == (
        2,
        {"enabled": True},
        0.3,
    )
    assert config["optimizer"]["params"] == {
        "torch_adam": True, "lr": 0.1, "weight_decay": 0.2, "betas": [0.9, 0.999], "eps": 1e-8,
    }  # fmt: skip
    sgd = filled({"optimizer": {"type": "SGD"}}, learning_rate=0.1)["optimizer"]
    assert sgd == {"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0.0}}


def test_a_schedule_of_deepspeeds_own_is_filled() -> None:
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = filled({"scheduler": {"type": "WarmupDecayLR", "params": auto}}, warmup_steps=5, learning_rate=0.1)
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 5, "total_num_steps": 50,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, {}, '"train_micro_batch_size_per_gpu" is 2 in the JSON, 1 by the arg'),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}, '"gradient_clipping" is 0.5 in the JSON'),
        ({"sequence_parallel_size": 4}, {"sequence_parallel_size": 2}, '"sequence_parallel_size" is 4 in the JSON'),
        ({"scheduler": {"type": "WarmupLR"}}, {"lr_scheduler_type": "cosine"}, '"scheduler" is in the JSON'),
        ({"bf16": {"enabled": True}}, {"bf16": False}, '"bf16.enabled" is True in the JSON'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, {}, '"optimizer.params.lr" is 1.0 in the JSON'),
    ],
)
def test_json_and_arguments_that_disagree(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(config, **changes)


def test_packing_tells_the_strategy() -> None:
    assert filled({}, packing=True)["ds_ulysses"] == filled({}, padding_free=True)["ds_ulysses"] == {"packed": True}
    assert filled({"ds_ulysses": {"packed": False}}, packing=True)["ds_ulysses"] == {"packed": False}
    assert "ds_ulysses" not in filled({})


def test_monitors_are_deepspeeds() -> None:
    config = filled({"wandb": {"project": "p"}}, report_to=["tensorboard", "wandb"])
    assert config["tensorboard"] == {"enabled": True, "output_path": "o", "job_name": "tensorboard"}
    assert config["wandb"] == {"enabled": True, "project": "p"}
    assert not {"tensorboard", "wandb"} & filled({}, report_to=["none"]).keys()


def test_a_json_without_batch_sizes_takes_those_of_the_arguments() -> None:
    config = filled({"train_batch_size": "auto"}, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert resolve_batch_sizes(config, dp_size=2).train == 12


def test_what_comes_with_the_package_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe and a DeepSpeed JSON by the paths they have in a checkout; a file of one's own goes first."""
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments(["--config", "train/recipes/smollm2_python_docs.yaml"])
    assert load_deepspeed_json(arguments.deepspeed) == load_deepspeed_json(CONFIGS[0].with_name("zero3.json"))
    assert arguments.model_name_or_path == ".cache/smollm2-135m-instruct"
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "zero2.json").write_text("{}")
    assert load_deepspeed_json("ds_configs/zero1.json") == load_deepspeed_json(CONFIGS[0])
    assert load_deepspeed_json("ds_configs/zero2.json") == {}
    with pytest.raises(ValueError, match=r"Cannot read the DeepSpeed config ds_configs/missing\.json: No such file"):
        load_deepspeed_json("ds_configs/missing.json")
    with pytest.raises(ValueError, match=r"Cannot read the recipe train/recipes/missing\.yaml: No such file"):
        parse_arguments(["--config", "train/recipes/missing.yaml"])
