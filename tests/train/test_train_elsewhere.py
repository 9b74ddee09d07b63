# SPDX-License-Identifier: Apache-2.0
"""Names of options in other tools: each is answered with what does the same here."""

import pytest
from run_options import DATA, REFUSALS, option_names, read

from normalign_llava.train.command import check_command, check_names, read_command
from normalign_llava.train.elsewhere import ELSEWHERE


def answer_for(name: str) -> str:
    with pytest.raises(ValueError) as error:
        check_names([f"--{name}"], {})
    return str(error.value)


def test_names_of_other_tools_are_not_options_and_lead_to_some():
    names = option_names()
    assert not ELSEWHERE.keys() & names
    for name, (options_here, remark) in ELSEWHERE.items():
        assert set(options_here) <= names, name
        assert options_here or remark, name
        assert not set(options_here) & REFUSALS.keys(), name


THEIRS = {
    "adam_beta1": [
        "beta1",
    ],
    "adam_beta2": [
        "beta2",
    ],
    "attn_implementation": [
        "flash_attn",  # LLaMA-Factory
        "sdp_attention",  # axolotl
        "attn_impl",
        "xformers_attention",
        "eager_attention",
        "flash_attention",
        "use_flash_attn",
    ],
    "bnb_4bit_quant_type": [
        "quantization_type",  # LLaMA-Factory
        "bnb_quant_type",
        "quant_type",
    ],
    "dataloader_num_workers": [
        "num_workers",
    ],
    "dataset_name": [
        "data_path",  # LLaVA
        "dataset_dir",  # LLaMA-Factory
        "dataset",
        "train_file",
        "dataset_path",
        "train_data",
    ],
    "dataset_num_proc": [
        "preprocessing_num_workers",
        "dataset_processes",
        "preprocess_workers",
    ],
    "dataset_streaming": [
        "streaming",
    ],
    "datasets": [
        "mix_strategy",  # LLaMA-Factory
        "interleave_probs",  # LLaMA-Factory
    ],
    "dtype": [
        "torch_dtype",
        "compute_dtype",
        "weight_dtype",
    ],
    "early_stopping_patience": [
        "early_stop_interval",
        "early_stopping_steps",
    ],
    "eval_dataset_name": [
        "eval_dataset",
        "val_dataset",
        "validation_file",
        "test_datasets",
    ],
    "eval_steps": [
        "evals_per_epoch",  # axolotl
        "eval_interval",
        "val_check_interval",
        "eval_every",
    ],
    "global_batch_size": [
        "effective_batch_size",
        "total_batch_size",
    ],
    "gradient_accumulation_steps": [
        "grad_accum_steps",
        "accumulation_steps",
    ],
    "gradient_checkpointing": [
        "use_gradient_checkpointing",
        "vit_gradient_checkpointing",
    ],
    "hub_model_id": [
        "hub_repo_id",
        "hub_model_name",
    ],
    "image_folder": [
        "media_dir",  # LLaMA-Factory
        "image_dir",
        "images_dir",
        "image_path",
    ],
    "language_learning_rate": [
        "freeze_language_model",  # LLaMA-Factory
        "freeze_llm",  # ms-swift
        "finetune_language_layers",  # unsloth
        "freeze_backbone",
    ],
    "learning_rate": [
        "lr",
        "base_lr",
        "lr_rate",
    ],
    "load_in_4bit": [
        "load_in_4_bit",
    ],
    "load_in_8bit": [
        "load_in_8_bit",
    ],
    "logging_steps": [
        "log_interval",
        "log_every",
    ],
    "lora_modules_to_save": [
        "additional_target",  # LLaMA-Factory
        "modules_to_save",
    ],
    "lora_r": [
        "lora_rank",  # LLaMA-Factory
        "lora_dim",
    ],
    "lora_target_modules": [
        "lora_target",  # LLaMA-Factory
        "lora_target_linear",  # axolotl
        "target_modules",
        "target_all_linear",
    ],
    "lr_scheduler_type": [
        "lr_scheduler",  # axolotl
        "scheduler",
        "scheduler_type",
        "lr_schedule",
    ],
    "max_grad_norm": [
        "gradient_clipping",  # axolotl
        "clip_grad",
        "grad_clip",
        "gradient_clip_val",
    ],
    "max_length": [
        "cutoff_len",  # LLaMA-Factory
        "sequence_len",  # axolotl
        "max_seq_length",  # unsloth
        "model_max_length",  # LLaVA
        "truncation_strategy",  # ms-swift
        "max_seq_len",
        "seq_len",
    ],
    "max_steps": [
        "max_train_steps",
        "train_iters",
        "total_steps",
    ],
    "model_name_or_path": [
        "base_model",
        "model",
        "model_path",
        "model_id",
        "model_id_or_path",
        "model_name",
    ],
    "neftune_noise_alpha": [
        "neftune_alpha",
        "neft_alpha",
    ],
    "num_train_epochs": [
        "num_epochs",
        "epochs",
        "max_epochs",
        "n_epochs",
    ],
    "optim": [
        "optimizer",
        "optimizer_name",
    ],
    "output_dir": [
        "overwrite_output_dir",  # LLaMA-Factory
        "output_path",
        "save_dir",
        "work_dir",
        "output",
        "save_path",
    ],
    "packing": [
        "neat_packing",  # LLaMA-Factory
        "sample_packing",
    ],
    "per_device_eval_batch_size": [
        "eval_batch_size",
    ],
    "per_device_train_batch_size": [
        "micro_batch_size",  # axolotl
        "train_batch_size",
        "mbs",
    ],
    "projector_learning_rate": [
        "aligner_lr",  # ms-swift
        "mm_projector_lr",  # LLaVA
        "projector_lr",
        "merger_lr",
    ],
    "report_to": [
        "use_wandb",  # axolotl
        "wandb_project",  # axolotl
        "use_swanlab",
        "use_tensorboard",
        "swanlab_project",
    ],
    "resume_from_checkpoint": [
        "resume",
        "auto_resume_from_checkpoints",
        "resume_from",
    ],
    "save_steps": [
        "saves_per_epoch",  # axolotl
        "save_interval",
        "save_every",
    ],
    "seed": [
        "random_seed",
        "random_state",
    ],
    "shuffle_buffer_size": [
        "buffer_size",
        "shuffle_buffer",
        "streaming_shuffle_buffer_size",
    ],
    "test_split_size": [
        "val_size",  # LLaMA-Factory
        "split_dataset_ratio",  # ms-swift
        "val_set_size",
        "validation_split_percentage",
    ],
    "use_bnb_nested_quant": [
        "double_quantization",
        "bnb_4bit_use_double_quant",
        "double_quant",
    ],
    "use_dora": [
        "peft_use_dora",
        "use_dora_adapter",
    ],
    "use_peft": [
        "finetuning_type",  # LLaMA-Factory
        "train_type",  # ms-swift
        "lora_enable",  # LLaVA
        "adapter",
        "tuner_type",
        "sft_type",
    ],
    "use_rslora": [
        "peft_use_rslora",
    ],
    "vision_learning_rate": [
        "freeze_vision_tower",  # LLaMA-Factory
        "vit_lr",  # ms-swift
        "freeze_vit",  # ms-swift
        "finetune_vision_layers",  # unsloth
        "mm_vision_tower_lr",  # LLaVA
        "vision_tower_lr",
        "freeze_vision_model",
        "unfreeze_mm_vision_tower",
        "vision_lr",
        "unfreeze_vision",
    ],
    "warmup_steps": [
        "warmup_ratio",  # LLaVA
        "warmup",
        "num_warmup_steps",
        "lr_warmup_fraction",
        "warmup_iters",
    ],
}
"""Options of this package, and the names that other tools document for the same."""


def cases_of_theirs() -> list[tuple[str, str]]:
    cases = []
    for option_name, names in THEIRS.items():
        cases += [(name, option_name) for name in names]
    return cases


@pytest.mark.parametrize("theirs, ours", cases_of_theirs())
def test_a_name_of_another_tool_stands_for_what_it_does_there(theirs, ours):
    options_here, _ = ELSEWHERE[theirs]
    assert options_here == (ours,)
    assert f"`{theirs}` is called `{ours}` here" in answer_for(theirs)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("freeze_aligner", ("projector_learning_rate", "norm_learning_rate")),
        ("freeze_multi_modal_projector", ("projector_learning_rate", "norm_learning_rate")),
        ("tune_mm_mlp_adapter", ("projector_learning_rate", "norm_learning_rate")),
        ("quantization_bit", ("load_in_4bit", "load_in_8bit")),
        ("quant_bits", ("load_in_4bit", "load_in_8bit")),
        ("bits", ("load_in_4bit", "load_in_8bit")),
    ],
)
def test_a_name_may_stand_for_two_options(name, expected):
    options_here, _ = ELSEWHERE[name]
    assert options_here == expected


def test_a_name_that_stands_for_two_options_is_answered_with_both():
    answer = answer_for("freeze_aligner")
    expected = "are called `projector_learning_rate` and `norm_learning_rate` here: 0 freezes"
    assert expected in answer


@pytest.mark.parametrize(
    "name",
    [
        "plot_loss",
        "model_type",
        "overwrite_cache",
        "image_max_pixels",
        "image_resolution",
        "image_min_pixels",
        "max_pixels",
        "min_pixels",
        "image_size",
        "image_aspect_ratio",
        "image_resize_algorithm",
        "chat_template",
        "conversation",
        "prompt_template",
        "num_samples",
        "template",
        "max_samples",
    ],
)
def test_a_name_may_stand_for_no_option(name):
    options_here, _ = ELSEWHERE[name]
    assert options_here == ()
    assert answer_for(name).startswith(f"`{name}` does not exist here: ")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_tool_is_answered_with_ours(tmp_path, name):
    options_here, remark = ELSEWHERE[name]
    name_with_dashes = name.replace("_", "-")
    for text, words in (
        (f"{DATA}{name}: 5\n", []),
        (DATA, [f"--{name}", "5"]),
        (DATA, [f"--{name_with_dashes}=5"]),
    ):
        with pytest.raises(ValueError) as error:
            read(tmp_path, text, *words)
        message = str(error.value)
        for option_name in options_here:
            assert f"`{option_name}`" in message
        assert remark in message


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_tool_is_answered_before_a_checkpoint_is_asked_for(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        check_command([f"--{name}", "5"], {})


def test_a_command_says_what_a_name_is_called_here_without_importing_trl(tmp_path):
    recipe_path = tmp_path / "recipe.yaml"
    recipe_path.write_text("base_model: x\nmicro_batch_size: 2\n")
    words, recipe = read_command([str(recipe_path), "--cutoff-len", "512"])
    with pytest.raises(ValueError, match=r"`max_length`.*`model_name_or_path`.*`per_device_train"):
        check_command(words, recipe)


NAME_ELSEWHERE = next(iter(ELSEWHERE))


def test_a_name_of_another_tool_is_told_once():
    with pytest.raises(ValueError) as error:
        check_names([f"--{NAME_ELSEWHERE}=3", "--seed", "1"], {NAME_ELSEWHERE: 3})
    assert str(error.value).count(f"`{NAME_ELSEWHERE}`") == 1


@pytest.mark.parametrize(
    "words, recipe",
    [
        pytest.param([f"--{NAME_ELSEWHERE}", "3"], {}, id="words"),
        pytest.param([], {NAME_ELSEWHERE: 3}, id="recipe"),
    ],
)
def test_a_name_of_another_tool_is_found_in_the_words_and_in_the_recipe(words, recipe):
    with pytest.raises(ValueError, match=f"`{NAME_ELSEWHERE}`"):
        check_names(words, recipe)


def test_a_value_is_not_a_name_of_another_tool():
    check_names(["--seed", NAME_ELSEWHERE], {"seed": NAME_ELSEWHERE})
