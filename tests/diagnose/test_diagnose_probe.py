# SPDX-License-Identifier: Apache-2.0
"""The streaming probe against a plain reference that stores every state of every batch, in all families."""

import math
from dataclasses import asdict

import pytest
import tiny
import torch
import vlm_families
from accelerate import cpu_offload
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from vlm_families import END, IMAGE, INDICATORS, START, WORDS

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.diagnose.measure.probe import probe
from normalign_llava.diagnose.report import Moments


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", vlm_families.FAMILIES)
def test_every_number_equals_the_reference(family):
    model, batch = vlm_families.make(family)
    _, other = vlm_families.make(family, seed=1)
    report = probe(model, [batch, other], tokenizer=tokenizer())
    norms, depth, expected = report.interface, report.depth, reference(model, [batch, other])
    for kind, tokens in expected.items():
        assert report.tokens[kind] == len(tokens), kind
        assert close(depth.final_norm[kind], [token["final_norm"] for token in tokens]), kind
        assert close(getattr(norms, kind), [token["norm"][0] for token in tokens]), kind
    for name in tokens[0].keys() - {"final_norm"}:
        curves = getattr(depth, name)
        assert set(curves) == set(expected), name
        for kind, tokens in expected.items():
            values = [moments(layer) for layer in zip(*(token[name] for token in tokens), strict=True)]
            measured = list(zip(curves[kind].mean, curves[kind].std, strict=True))
            assert measured == [pytest.approx(pair, rel=1e-6, abs=1e-7) for pair in values], (name, kind)
    visual, text = (sum(depth.rotation[kind].mean[:-1]) for kind in ("visual", "text"))
    assert depth.asymmetry == pytest.approx(visual / text, rel=1e-12)
    alone = [probe(model, [one], tokenizer=tokenizer()).depth for one in (batch, other)]
    assert depth.asymmetry_error == pytest.approx(abs(alone[0].asymmetry - alone[1].asymmetry) / 2, rel=1e-6)
    assert alone[0].asymmetry_error is None

    assert report.projector in dict(model.named_modules()) and norms.projector_output is not None
    encoded, words = [], []
    for one in (batch, other):
        takes = {name: value for name, value in one.items() if name.startswith(("pixel", "image_"))}
        with torch.no_grad():
            rows = model.get_image_features(**takes, return_dict=True).last_hidden_state.double()
        rows = rows.permute(0, 2, 3, 1) if family == "fast_vlm" else rows  # of a convolutional encoder
        encoded += rows.norm(dim=-1).flatten().tolist()
        words += [row for row in one["input_ids"].flatten().tolist() if row in WORDS]
    assert close(norms.encoder_output, encoded)
    weight, image = model.get_input_embeddings().weight.detach().double(), model.config.image_token_id
    assert close(norms.text_raw, weight[words].norm(dim=-1).tolist())
    stored = [weight[row].norm().item() for row in range(len(weight)) if row != image and weight[row].any()]
    assert close(norms.vocabulary_raw, stored)
    width = model.config.get_text_config().hidden_size
    scale = {"paligemma": width**0.5, "gemma3": width**0.5, "llava_next_granite": 3.0}.get(family, 1.0)
    assert norms.scale == pytest.approx(scale, rel=1e-5)
    assert close(norms.vocabulary, [scale * norm for norm in stored], rel=1e-5)
    assert norms.ratio == pytest.approx(norms.visual.mean / (scale * moments(stored)[0]), rel=1e-5)
    assert norms.ratio_data == pytest.approx(norms.visual.mean / norms.text.mean)


def test_projector_is_measured_on_both_sides_and_the_norm_before_it():
    model, batch = vlm_families.make("normalign_llava")
    norms = probe(model, [batch]).interface
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        hidden = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        before = projector.linear_2(projector.act(projector.linear_1(hidden)))
        after = projector.norm(before)
    for moment, rows in ((norms.projector_input, hidden), (norms.norm_input, before), (norms.projector_output, after)):
        assert close(moment, rows.double().norm(dim=-1).flatten().tolist())
    assert norms.ratio == pytest.approx(1.0, abs=0.02)

    model, batch = vlm_families.make("ovis2")  # a visual vocabulary takes the place of the projector's input
    interface = probe(model, [batch]).interface
    norms = model.model.visual_embeddings_table.weight.detach().double().norm(dim=-1).tolist()
    assert interface.projector_input is None and interface.projector_output.count == interface.visual.count
    assert close(interface.visual_table, norms[: -len(INDICATORS)])
    assert close(interface.indicator_table, norms[-len(INDICATORS) :])


def test_the_model_is_left_as_it_was_found():
    model, batch = vlm_families.make("qwen2_5_vl")
    with torch.no_grad():
        before = model(**batch).logits
    model.train()
    model.model.get_decoder().layers[0].eval()
    modes = [module.training for module in model.modules()]
    probe(model, [batch])
    with pytest.raises(ZeroDivisionError), model.model.get_decoder().norm.register_forward_hook(lambda *call: 1 / 0):
        probe(model, [batch])
    assert [module.training for module in model.modules()] == modes
    assert "get_image_features" not in vars(model.model)
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not [hook for hook in hooks if hook.__module__.startswith("normalign_llava")]  # transformers leaves some
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, before)


def test_models_in_bfloat16_in_four_bits_offloaded_and_with_adapters(tmp_path):
    model, batch = vlm_families.make("normalign_llava")
    model.save_pretrained(tmp_path)
    plain = probe(model, [batch])
    quantized = NormAlignLlavaForConditionalGeneration.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), dtype=torch.float32
    )
    adapted = get_peft_model(model, LoraConfig(target_modules=r".*language_model.*\.q_proj", init_lora_weights=False))
    half = vlm_families.make("llava")[0].to(torch.bfloat16)
    dtypes = {"4-bit FP4, products in float32": quantized, "float32": adapted, "bfloat16": half}
    for dtype, other in dtypes.items():
        report = probe(other, [batch])
        inner = other.get_base_model() if other is adapted else other
        tokens = reference(inner, [batch])["visual"]  # measured in float64, whatever the model's precision
        assert report.dtype == dtype and report.projector == "model.multi_modal_projector"
        rotation = moments([token["rotation"][1] for token in tokens])[0]
        assert report.depth.rotation["visual"].mean[1] == pytest.approx(rotation, rel=1e-6)
        assert report.depth.rotation["text"].mean != plain.depth.rotation["text"].mean
    model = vlm_families.make("normalign_llava")[0]
    cpu_offload(model)
    assert model.device.type == "meta" and asdict(probe(model, [batch])) == asdict(plain)


def test_sequences_without_text_or_without_an_image():
    model, batch = vlm_families.make("llava")
    alone = {"input_ids": torch.tensor([[1, *[IMAGE] * 4]]), "pixel_values": batch["pixel_values"][:1]}
    report = probe(model, [alone])
    assert report.tokens == {"visual": 4, "special": 1}
    assert report.interface.text is None and report.interface.ratio_data is None and report.depth.asymmetry is None
    assert report.interface.ratio == pytest.approx(report.interface.visual.mean / report.interface.vocabulary.mean)
    words = {"input_ids": torch.tensor([[1, 5, 6, 7]])}
    assert probe(model, [alone, words]).tokens == {"visual": 4, "text": 3, "special": 2}


def test_a_layer_that_changes_nothing():
    model, batch = vlm_families.make("llava")
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_decoder().layers[1].get_submodule(name).weight.zero_()
    depth = probe(model, [batch]).depth
    assert depth.rotation["text"].mean[1] == 0 and depth.cosine["text"].mean[1] == pytest.approx(1)
    assert math.isnan(depth.update_angle["text"].mean[1]) and not math.isnan(depth.update_angle["text"].mean[2])


def test_rows_that_are_more_than_scaled_have_no_n_text():
    model, batch = vlm_families.make("llava")
    adapter = LoraConfig(target_modules=["embed_tokens"], r=4, lora_alpha=64, init_lora_weights=False)
    report = probe(get_peft_model(model, adapter), [batch])
    norms = report.interface
    assert norms.scale is norms.vocabulary is norms.ratio is None and norms.vocabulary_raw is not None
    assert norms.ratio_data == pytest.approx(norms.visual.mean / norms.text.mean)
    assert "N_text" in report.left_out[0]


def test_models_and_batches_that_cannot_be_measured_are_refused():
    model, batch = vlm_families.make("llava")
    tuned = get_peft_model(tiny.llava(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    # Llama 3.2 Vision sees images by cross-attention, so no token of the sequence stands for one.
    sizes = dict(num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, vocab_size=tiny.VOCABULARY)
    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, cross_attention_layers=[1], **sizes)
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_global_layers=1, attention_heads=2)
    mllama = MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text))
    for refused, inputs, message in (
        (mllama, batch, "cannot be read: .*none with cross-attention"),
        (LlamaForCausalLM(tiny.text_config()), batch, "cannot be read: no language model alone"),
        (tuned, batch, "Prompt tuning"),
        (model, {**batch, "pixel_values_videos": batch["pixel_values"]}, "pixel_values_videos"),
        (model, {"input_ids": torch.tensor([[1, 5, 6]])}, "visual token.*97"),
    ):
        with pytest.raises(ValueError, match=message):
            probe(refused, [inputs])
    last = model.model.multi_modal_projector.linear_2
    for bias, message in ((0.0, "visual tokens are zero"), (math.inf, "visual.*NaN or infinite in state 0")):
        with torch.no_grad():
            last.weight.zero_()
            last.bias.fill_(bias)
        with pytest.raises(ValueError, match=message):
            probe(model, [batch])


def tokenizer():
    """Knows the special tokens that not every family's configuration names."""
    made = Tokenizer(WordLevel({f"word{number}": number for number in range(tiny.VOCABULARY)}, unk_token="word0"))
    made.add_special_tokens([AddedToken(f"word{number}", special=True) for number in (START, END)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def moments(values):
    """Mean and population standard deviation by plain sums."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def close(measured: Moments, values, rel=1e-6):
    mean, std = moments(values)
    return (
        measured.count == len(values)
        and measured.mean == pytest.approx(mean, rel=rel)
        and measured.std == pytest.approx(std, rel=rel, abs=1e-7 * mean)
    )


def reference(model, batches):
    """For each kind the tokens, each a dict of lists over layers, from all states kept and plain formulas on each."""
    tokens, inputs, outputs, finals = {}, [], [], []
    newline = dict(model.base_model.named_parameters(recurse=False)).get("image_newline")
    if newline is not None:
        newline = newline.detach().double() * getattr(model.config.text_config, "embedding_multiplier", 1)

    def keep(module, args, out):
        inputs.append(args[0].double())
        outputs.append((out[0] if isinstance(out, tuple) else out).double())

    handles = [layer.register_forward_hook(keep) for layer in model.get_decoder().layers]
    norm = model.get_decoder().norm
    handles.append(norm.register_forward_hook(lambda module, args, out: finals.append(out.double())))
    for batch in batches:
        for kept in (inputs, outputs, finals):
            kept.clear()
        with torch.no_grad():
            model(**batch)
        for row, column in (batch["attention_mask"] > 0).nonzero().tolist():
            before = [state[row, column] for state in inputs]
            after = [state[row, column] for state in outputs]
            states, updates = [*before, after[-1]], [b - a for a, b in zip(before, after, strict=True)]
            token = {
                "norm": [state.norm().item() for state in states],
                "cosine": [cosine(a, b) for a, b in zip(states, states[1:], strict=False)],
                "rotation": [math.acos(cosine(a, b)) for a, b in zip(before, after, strict=True)],
                "update_norm": [update.norm().item() for update in updates],
                "update_angle": [math.acos(cosine(a, u)) for a, u in zip(before, updates, strict=True)],
                "final_norm": finals[-1][row, column].norm().item(),
            }
            token["log_norm"] = [math.log(norm) for norm in token["norm"]]
            token["log_update"] = [math.log(norm) for norm in token["update_norm"]]
            number = batch["input_ids"][row, column].item()
            kind = "text" if number in WORDS else "indicator" if number in INDICATORS else "special"
            if number == IMAGE:
                kind = "newline" if newline is not None and torch.allclose(states[0], newline) else "visual"
            tokens.setdefault(kind, []).append(token)
    for handle in handles:
        handle.remove()
    return tokens


def cosine(a, b):
    return max(-1.0, min(1.0, (a @ b / (a.norm() * b.norm())).item()))
