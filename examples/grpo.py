# SPDX-License-Identifier: Apache-2.0
"""GRPO on questions about images. The model samples answers, and right and short ones are rewarded.

    accelerate launch examples/grpo.py --model_name_or_path MODEL --dataset_name DATA
                      --output_dir OUTPUT

DATA has the columns `image`, `question` and `answer`. The script trains LoRA on the language model,
and projector and norm in full. It takes all options of TRL's GRPOConfig and ModelConfig.
"""

from datasets import load_dataset
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from normalign_llava import half_precision_pays


def as_prompt(row):
    """TRL adds the row's image to the first user turn."""
    return {"prompt": [{"role": "user", "content": row["question"]}]}


def correct(completions, answer, **kwargs):
    """1 for the answer in the data. Case and a full stop do not matter."""
    pairs = zip(completions, answer, strict=True)
    return [float(_text(said).lower().rstrip(".") == right.lower()) for said, right in pairs]


def short(completions, **kwargs):
    """0.01 less for each character, so that the shorter one of two right answers wins."""
    return [-0.01 * len(_text(said)) for said in completions]


def _text(completion):
    return completion[0]["content"].strip()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    parser.set_defaults(
        trust_remote_code=True,
        use_peft=True,
        lora_target_modules=r".*\.language_model\..*_proj",
        lora_modules_to_save=["multi_modal_projector"],
        max_completion_length=32,
        max_grad_norm=10.0,
    )
    if not half_precision_pays():  # TRL's default is true
        parser.set_defaults(bf16=False)
    script, args, model = parser.parse_args_and_config()
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
    }
    data = load_dataset(
        script.dataset_name, name=script.dataset_config, split=script.dataset_train_split
    )
    trainer = GRPOTrainer(
        model.model_name_or_path,
        reward_funcs=[correct, short],
        args=args,
        train_dataset=data.map(as_prompt),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()
