"""Training with all callbacks, resuming and merging: the same numbers as on the CPU."""

import json
import shutil

import pytest
import torch
import training
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from strict_device import STRICT, assert_close_on_device, assert_same_report, on_device
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.modules.forward import wrap_forward
from normalign_llava.train.modules.model import base_model


@pytest.fixture
def make_trainer(checkpoint, tmp_path, monkeypatch):
    """Makes a trainer on a device, which writes into a folder of the device's name."""

    def make(device, **options):
        is_cpu = device == "cpu"
        if is_cpu:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        else:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(STRICT))
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = training.trainer(
            tmp_path / device,
            checkpoint,
            training.rows(12, images=lambda number: number // 2 % 3),
            use_cpu=is_cpu,
            dataloader_pin_memory=False,
            **options,
        )
        assert trainer.args.device.type == device
        devices = {parameter.device for parameter in trainer.model.parameters()}
        assert devices == {trainer.args.device}
        return trainer

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def logged_values(trainer) -> list[dict]:
    """What a run logged, without times."""
    logs = []
    for log in trainer.state.log_history:
        values = {}
        for value_name in sorted(log):
            if not value_name.endswith(("runtime", "per_second")):
                values[value_name] = log[value_name]
        logs.append(values)
    assert len(logs) == 4
    return logs


def probed_values(trainer) -> list[list]:
    """What a run wrote of its probe."""
    probe_path = training.Path(trainer.args.output_dir, "dynamics.jsonl")
    probed = []
    for line in probe_path.read_text().splitlines():
        measured = json.loads(line)
        probed.append([measured["visual"], measured["text"]])
    assert len(probed) == 2
    return probed


PADDING_FREE_ACCUMULATED = {
    "padding_free": True,
    "gradient_accumulation_steps": 2,
}
PADDING_FREE_ADAPTERS = {
    "padding_free": True,
    "use_peft": True,
    "lora_r": 2,
    "lora_dropout": 0.0,
    "gradient_checkpointing": True,
}
FIRST_WITHOUT_IMAGES = {
    "train_sampling_strategy": "sequential",
    "arm": "none",
}


@pytest.mark.parametrize(
    ("options", "only_answers"),
    [
        pytest.param(PADDING_FREE_ACCUMULATED, False, marks=pytest.mark.nightly),
        pytest.param(PADDING_FREE_ADAPTERS, False, marks=pytest.mark.nightly),
        (FIRST_WITHOUT_IMAGES, True),
    ],
)
def test_training_steps_with_all_callbacks(make_trainer, options, only_answers):
    trainers = {}
    for device in ("cpu", "strict"):
        trainer = make_trainer(
            device,
            optim="sgd",
            learning_rate=0.1,
            probe_steps=[0, 2],
            held_out=training.rows(2),
            eval_strategy="steps",
            eval_steps=2,
            sample_count=1,
            sample_max_new_tokens=4,
            **options,
        )
        model = base_model(trainer.model)
        assert model.only_answers == (device == "cpu")
        model.only_answers = only_answers
        trainer.train()
        trainers[device] = trainer

    assert_same_report(logged_values(trainers["strict"]), logged_values(trainers["cpu"]))
    assert_same_report(probed_values(trainers["strict"]), probed_values(trainers["cpu"]))
    expected_weights = training.weights(trainers["cpu"].model)
    for parameter_name, parameter in trainers["strict"].model.named_parameters():
        expected = expected_weights[parameter_name]
        assert_close_on_device(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


def test_a_run_resumes_from_its_checkpoint(make_trainer):
    options = {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "data_seed": 0,
    }
    uninterrupted = make_trainer("strict", **options)
    uninterrupted.train()
    expected_weights = training.weights(uninterrupted.model)

    resumed = make_trainer("strict", **options)
    output_folder = resumed.args.output_dir
    shutil.rmtree(f"{output_folder}/checkpoint-3")
    resumed.train(resume_from_checkpoint=f"{output_folder}/checkpoint-2")
    assert resumed.state.global_step == 3
    for parameter_name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected_weights[parameter_name]), parameter_name


def test_an_adapter_trained_there_is_merged(make_trainer, checkpoint, tmp_path):
    trainer = make_trainer(
        "strict",
        use_peft=True,
        lora_r=2,
        learning_rate=1e-2,
    )
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged_model = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "merged")
    merged_model.to(STRICT)

    collator = ConversationCollator(AutoProcessor.from_pretrained(checkpoint))
    batch = on_device(collator(list(training.rows(2))))
    adapted_model = trainer.model.eval()
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    with torch.no_grad():
        expected = adapted_model(**batch).logits.cpu()
        assert_close_on_device(merged_model(**batch).logits, expected, **tolerance)
        adapted_model.merge_and_unload()
        base_logits = adapted_model.get_base_model()(**batch).logits
        assert_close_on_device(base_logits, expected, **tolerance)


def test_a_batch_without_images_where_tower_and_decoder_are_on_two_devices(checkpoint):
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    input_ids = torch.tensor([[5, 6, 7]])
    expected = model(input_ids).logits

    # As accelerate spreads a model.
    for module in (model.model.vision_tower, model.model.multi_modal_projector):
        add_hook_to_module(module.to(STRICT), AlignDevicesHook(STRICT))
    wrap_forward(model, torch.zeros(1, 3, 16, 16))
    assert torch.equal(model(input_ids=input_ids, use_cache=False).logits, expected)
