# SPDX-License-Identifier: Apache-2.0
"""Names that options have in other tools, and what they are called here."""

FREEZES = "0 freezes it, and other values train it"
SHARE = "below 1 it is a share of all steps"

THEIRS = {
    "cutoff_len sequence_len max_seq_length max_seq_len model_max_length seq_len": "max_length",
    "lora_rank lora_dim": "lora_r",
    "lora_target target_modules": "lora_target_modules",
    "additional_target modules_to_save": "lora_modules_to_save",
    "peft_use_dora use_dora_adapter": "use_dora",
    "peft_use_rslora": "use_rslora",
    "load_in_4_bit": "load_in_4bit",
    "load_in_8_bit": "load_in_8bit",
    "quantization_type bnb_quant_type quant_type": "bnb_4bit_quant_type",
    "double_quantization double_quant bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "base_model model model_name model_path model_id model_id_or_path": "model_name_or_path",
    "dataset data_path dataset_path train_file train_data": "dataset_name",
    "streaming": "dataset_streaming",
    "preprocessing_num_workers dataset_processes preprocess_workers": "dataset_num_proc",
    "eval_dataset val_dataset validation_file test_datasets": "eval_dataset_name",
    "val_size val_set_size split_dataset_ratio validation_split_percentage": "test_split_size",
    "buffer_size shuffle_buffer streaming_shuffle_buffer_size": "shuffle_buffer_size",
    "media_dir image_dir images_dir image_path": "image_folder",
    "micro_batch_size train_batch_size mbs": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "effective_batch_size total_batch_size": "global_batch_size",
    "accumulation_steps grad_accum_steps": "gradient_accumulation_steps",
    "num_epochs epochs n_epochs max_epochs": "num_train_epochs",
    "lr lr_rate base_lr": "learning_rate",
    "mm_projector_lr aligner_lr projector_lr merger_lr": "projector_learning_rate",
    "vit_lr vision_lr mm_vision_tower_lr vision_tower_lr": "vision_learning_rate",
    "lr_scheduler scheduler scheduler_type lr_schedule": "lr_scheduler_type",
    "warmup warmup_iters num_warmup_steps lr_warmup_fraction": "warmup_steps",
    "gradient_clipping clip_grad grad_clip gradient_clip_val": "max_grad_norm",
    "optimizer optimizer_name": "optim",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "neftune_alpha neft_alpha": "neftune_noise_alpha",
    "use_gradient_checkpointing vit_gradient_checkpointing": "gradient_checkpointing",
    "flash_attn attn_impl flash_attention use_flash_attn": "attn_implementation",
    "sample_packing neat_packing": "packing",
    "torch_dtype compute_dtype weight_dtype": "dtype",
    "num_workers": "dataloader_num_workers",
    "output_path save_dir work_dir output save_path": "output_dir",
    "save_interval save_every": "save_steps",
    "eval_interval eval_every val_check_interval": "eval_steps",
    "log_interval log_every": "logging_steps",
    "resume resume_from auto_resume_from_checkpoints": "resume_from_checkpoint",
    "early_stop_interval early_stopping_steps": "early_stopping_patience",
    "random_seed random_state": "seed",
    "hub_repo_id hub_model_name": "hub_model_id",
    "max_train_steps train_iters total_steps": "max_steps",
    "freeze_vision_tower freeze_vit freeze_vision_model unfreeze_vision "
    "finetune_vision_layers unfreeze_mm_vision_tower": f"vision_learning_rate: {FREEZES}",
    "freeze_multi_modal_projector freeze_aligner tune_mm_mlp_adapter": (
        f"projector_learning_rate norm_learning_rate: {FREEZES}"
    ),
    "freeze_language_model freeze_llm freeze_backbone finetune_language_layers": (
        f"language_learning_rate: {FREEZES}"
    ),
    "finetuning_type adapter train_type tuner_type sft_type lora_enable": (
        "use_peft: true trains LoRA adapters"
    ),
    "lora_target_linear target_all_linear": (
        "lora_target_modules: all-linear is the default, on the language model"
    ),
    "quantization_bit quant_bits bits": "load_in_4bit load_in_8bit: set one of them to true",
    "use_wandb use_swanlab use_tensorboard": "report_to: it takes names of trackers",
    "wandb_project swanlab_project": (
        "report_to: it takes wandb, and the project is an environment variable"
    ),
    "evals_per_epoch": f"eval_steps: {SHARE}",
    "saves_per_epoch": f"save_steps: {SHARE}",
    "warmup_ratio": f"warmup_steps: {SHARE}",
    "truncation_strategy": "max_length: longer rows are dropped, never cut",
    "dataset_dir": "dataset_name: it takes a path",
    "sdp_attention xformers_attention eager_attention": (
        "attn_implementation: sdpa, eager or flash_attention_2"
    ),
    "overwrite_output_dir": (
        "output_dir: a run writes to a new folder, or goes on with resume_from_checkpoint"
    ),
    "mix_strategy interleave_probs": "datasets: each data set of the mixture has its fraction",
    "plot_loss": ": a run draws `loss.png` in its output_dir, from three logged steps on",
    "model_type": ": a checkpoint says what it is",
    "overwrite_cache": ": what is kept of data is found by its content",
    "image_max_pixels image_min_pixels max_pixels min_pixels image_resolution image_size "
    "image_aspect_ratio image_resize_algorithm": (
        ": the checkpoint's processor gives every image the size that the vision encoder takes"
    ),
    "template chat_template conversation prompt_template": (
        ": a checkpoint has its own, set by `normalign build --chat-template`"
    ),
    "max_samples num_samples": (
        ": `max_steps` ends a run early, and `datasets` with `fraction` takes less"
    ),
}
"""Names of options in LLaMA-Factory, axolotl, ms-swift, unsloth and LLaVA: the options here.

After a colon comes a remark. Without an option here, it says what replaces it.
"""

ELSEWHERE = {}
"""Each name in another tool, the options here, and the remark."""

for names, answer in THEIRS.items():
    options, _, remark = answer.partition(": ")
    for name in names.split():
        ELSEWHERE[name] = (tuple(options.split()), remark)
