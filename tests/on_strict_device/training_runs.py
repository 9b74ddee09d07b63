"""Training with all callbacks, resuming and merging: the same numbers as on the CPU."""

import json
import shutil

import pytest
import torch
import training
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.state import AcceleratorState
from strict_device import STRICT, close, on_device, same
from transformers import AutoProcessor

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.assembly.merge import merge_adapter
from normalign_llava.train.collator import ConversationCollator
from normalign_llava.train.modules.forward import wrap_forward
from normalign_llava.train.modules.model import base_model


@pytest.fixture
def trainer(checkpoint, tmp_path, monkeypatch):
    """Makes a trainer on a device, which writes into a folder of the device's name."""

    def make(device, **options):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu" if device == "cpu" else str(STRICT))
        AcceleratorState._reset_state(reset_partial_state=True)
        rows = training.rows(12, images=lambda number: number // 2 % 3)
        options |= {"use_cpu": device == "cpu", "dataloader_pin_memory": False}
        made = training.trainer(tmp_path / device, checkpoint, rows, **options)
        assert made.args.device.type == device
        assert {parameter.device for parameter in made.model.parameters()} == {made.args.device}
        return made

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def written(trainer):
    """What a run logged, and wrote of its probe."""
    timed = ("runtime", "per_second")
    logged = [
        {name: log[name] for name in sorted(log) if not name.endswith(timed)}
        for log in trainer.state.log_history
    ]
    file = training.Path(trainer.args.output_dir, "dynamics.jsonl")
    probed = [json.loads(line) for line in file.read_text().splitlines()]
    assert (len(logged), len(probed)) == (4, 2)
    return [logged, [[row["visual"], row["text"]] for row in probed]]


NIGHTLY = pytest.mark.nightly
PADDING_FREE = {"padding_free": True}
ADAPTERS = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.0, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("options", "only_answers"),
    [
        pytest.param(PADDING_FREE | {"gradient_accumulation_steps": 2}, False, marks=NIGHTLY),
        pytest.param(PADDING_FREE | ADAPTERS, False, marks=NIGHTLY),
        ({"train_sampling_strategy": "sequential", "arm": "none"}, True),  # first without images
    ],
)
def test_training_steps_with_all_callbacks(trainer, options, only_answers):
    options = {"optim": "sgd", "learning_rate": 0.1, "probe_steps": [0, 2], **options}
    options |= {"held_out": training.rows(2), "eval_strategy": "steps", "eval_steps": 2}
    options |= {"sample_count": 1, "sample_max_new_tokens": 4}
    runs = []
    for device in ("cpu", "strict"):
        run = trainer(device, **options)
        model = base_model(run.model)
        assert model.only_answers == (device == "cpu")
        model.only_answers = only_answers
        run.train()
        runs.append(run)
    on_cpu, on_strict = runs
    same(written(on_strict), written(on_cpu))
    expected = training.weights(on_cpu.model)
    for name, parameter in on_strict.model.named_parameters():
        close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)


def test_a_run_resumes_from_its_checkpoint(trainer):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "data_seed": 0}
    whole = trainer("strict", **options)
    whole.train()
    expected = training.weights(whole.model)
    resumed = trainer("strict", **options)
    shutil.rmtree(f"{resumed.args.output_dir}/checkpoint-3")
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert resumed.state.global_step == 3
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_an_adapter_trained_there_is_merged(trainer, checkpoint, tmp_path):
    run = trainer("strict", use_peft=True, lora_r=2, learning_rate=1e-2)
    run.train()
    run.save_model(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    merged = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path / "merged").to(STRICT)
    collate = ConversationCollator(AutoProcessor.from_pretrained(checkpoint))
    batch = on_device(collate(list(training.rows(2))))
    run.model.eval()
    with torch.no_grad():
        expected = run.model(**batch).logits.cpu()
        close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-4)
        run.model.merge_and_unload()
        close(run.model.get_base_model()(**batch).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_without_images_where_tower_and_decoder_are_on_two_devices(checkpoint):
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "use_cache": False}
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint)
    expected = model(inputs["input_ids"]).logits
    for part in (model.model.vision_tower, model.model.multi_modal_projector):  # as by accelerate
        add_hook_to_module(part.to(STRICT), AlignDevicesHook(STRICT))
    wrap_forward(model, torch.zeros(1, 3, 16, 16))
    assert torch.equal(model(**inputs).logits, expected)
