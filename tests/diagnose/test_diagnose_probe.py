# SPDX-License-Identifier: Apache-2.0
"""The probe against a plain reference that keeps all states of all batches, in all families."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import tiny
import torch
import vlm_families
from accelerate import cpu_offload
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import BitsAndBytesConfig, GraniteConfig, PreTrainedTokenizerFast
from transformers.models.mllama import MllamaConfig, MllamaForConditionalGeneration
from vlm_families import BOS, END, EOS, IMAGE, INDICATORS, START, WORDS

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.diagnose.measure.depth import QUANTITIES, quantities
from normalign_llava.diagnose.measure.families import (
    PROJECTORS,
    boundary_ids,
    find_parts,
    token_positions,
    tokenizer_ids,
)
from normalign_llava.diagnose.measure.probe import probe
from normalign_llava.diagnose.report import Moments


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", vlm_families.FAMILIES)
def test_every_number_equals_the_reference(family):
    model, batch = vlm_families.make(family)
    _, other = vlm_families.make(family, seed=1)
    report = probe(model, [batch, other], tokenizer=tokenizer())
    norms = report.interface
    depth = report.depth
    expected = reference(model, [batch, other])
    assert report.samples == len(batch["input_ids"]) + len(other["input_ids"])
    for kind, tokens in expected.items():
        assert report.tokens[kind] == len(tokens), kind
        assert close(depth.final_norm[kind], [token["final_norm"] for token in tokens]), kind
        assert close(getattr(norms, kind), [token["norm"][0] for token in tokens]), kind
    for name in tokens[0].keys() - {"final_norm"}:
        curves = getattr(depth, name)
        assert set(curves) == set(expected), name
        for kind, tokens in expected.items():
            layers = zip(*(token[name] for token in tokens), strict=True)
            pairs = [pytest.approx(moments(layer), rel=1e-6, abs=1e-7) for layer in layers]
            assert [*zip(curves[kind].mean, curves[kind].std, strict=True)] == pairs, (name, kind)
    visual, text = (sum(depth.rotation[kind].mean[:-1]) for kind in ("visual", "text"))
    assert depth.asymmetry == pytest.approx(visual / text, rel=1e-12)
    first, last = (probe(model, [one], tokenizer=tokenizer()).depth for one in (batch, other))
    error = abs(first.asymmetry - last.asymmetry) / 2
    assert depth.asymmetry_error == pytest.approx(error, rel=1e-6)
    assert first.asymmetry_error is None

    assert report.projector in dict(model.named_modules()) and norms.projector_output is not None
    encoded = []
    words = []
    for one in (batch, other):
        takes = {name: value for name, value in one.items() if name.startswith(("pixel", "image_"))}
        with torch.no_grad():
            rows = model.get_image_features(**takes, return_dict=True).last_hidden_state.double()
        encoded += rows.norm(dim=1 if family == "fast_vlm" else -1).flatten().tolist()
        words += [row for row in one["input_ids"].flatten().tolist() if row in WORDS]
    assert close(norms.encoder_output, encoded)
    weight = model.get_input_embeddings().weight.detach().double()
    assert close(norms.text_raw, weight[words].norm(dim=-1).tolist())
    stored = [row.norm().item() for id, row in enumerate(weight) if id != IMAGE and row.any()]
    assert close(norms.vocabulary_raw, stored)
    width = model.config.get_text_config().hidden_size
    scales = {"paligemma": width**0.5, "gemma3": width**0.5, "llava_next_granite": 3.0}
    scale = scales.get(family, 1.0)
    assert norms.scale == pytest.approx(scale, rel=1e-5)
    assert close(norms.vocabulary, [scale * norm for norm in stored], rel=1e-5)
    assert norms.ratio == pytest.approx(norms.visual.mean / (scale * moments(stored)[0]), rel=1e-5)
    assert norms.ratio_data == pytest.approx(norms.visual.mean / norms.text.mean)


def test_projector_is_measured_on_both_sides_and_the_norm_before_it():
    model, batch = vlm_families.make("normalign_llava")
    norms = probe(model, [batch]).interface
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        encoded = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True)
        hidden = encoded.hidden_states[-2][:, 1:]
        before = projector.linear_2(projector.act(projector.linear_1(hidden)))
        after = projector.norm(before)
    stages = {"projector_input": hidden, "norm_input": before, "projector_output": after}
    for stage, rows in stages.items():
        assert close(getattr(norms, stage), rows.double().norm(dim=-1).flatten().tolist())
    assert norms.ratio == pytest.approx(1.0, abs=0.02)

    model, batch = vlm_families.make("ovis2")  # whose projector is a visual vocabulary
    norms = probe(model, [batch]).interface
    rows = model.model.visual_embeddings_table.weight.detach().double().norm(dim=-1).tolist()
    assert norms.projector_input is None and norms.projector_output.count == norms.visual.count
    assert close(norms.visual_table, rows[: -len(INDICATORS)])
    assert close(norms.indicator_table, rows[-len(INDICATORS) :])


def test_the_model_is_left_as_it_was_found():
    model, batch = vlm_families.make("qwen2_5_vl")
    with torch.no_grad():
        before = model(**batch).logits
    decoder = model.train().get_decoder()
    decoder.layers[0].eval()
    modes = [module.training for module in model.modules()]
    during = []
    with decoder.norm.register_forward_hook(lambda *call: during.append(call[-1])):
        probe(model, [batch])
    assert during and not any(states.requires_grad for states in during)
    with pytest.raises(ZeroDivisionError), decoder.norm.register_forward_hook(lambda *call: 1 / 0):
        probe(model, [batch])
    assert [module.training for module in model.modules()] == modes
    assert "get_image_features" not in vars(model.model)
    for module in model.modules():  # transformers leaves some hooks
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        assert not any(hook.__module__.startswith("normalign_llava") for hook in hooks)
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, before)


def test_models_in_bfloat16_in_four_bits_offloaded_and_with_adapters(tmp_path):
    model, batch = vlm_families.make("normalign_llava")
    model.save_pretrained(tmp_path)
    plain = probe(model, [batch])
    options = dict(quantization_config=BitsAndBytesConfig(load_in_4bit=True), dtype=torch.float32)
    quantized = NormAlignLlavaForConditionalGeneration.from_pretrained(tmp_path, **options)
    lora = LoraConfig(target_modules=r".*language_model.*\.q_proj", init_lora_weights=False)
    adapted = get_peft_model(model, lora)
    half = vlm_families.make("llava")[0].to(torch.bfloat16)
    dtypes = {"4-bit FP4, products in float32": quantized, "float32": adapted, "bfloat16": half}
    for dtype, other in dtypes.items():
        report = probe(other, [batch])
        inner = other.get_base_model() if other is adapted else other
        tokens = reference(inner, [batch])["visual"]  # in float64, whatever the precision
        assert report.dtype == dtype and report.projector == "model.multi_modal_projector"
        rotation = moments([token["rotation"][1] for token in tokens])[0]
        assert report.depth.rotation["visual"].mean[1] == pytest.approx(rotation, rel=1e-6)
        assert report.depth.rotation["text"].mean != plain.depth.rotation["text"].mean
    model = vlm_families.make("normalign_llava")[0]
    cpu_offload(model)
    assert model.device.type == "meta" and asdict(probe(model, [batch])) == asdict(plain)


def test_sequences_without_text_or_without_an_image():
    model, batch = vlm_families.make("llava")
    ids = torch.tensor([[1, *[IMAGE] * 4]])
    words = {"input_ids": torch.tensor([[1, 5, 6, 7]])}
    alone = {"input_ids": ids, "pixel_values": batch["pixel_values"][:1]}
    report = probe(model, [alone])
    norms = report.interface
    assert report.tokens == {"visual": 4, "special": 1}
    assert norms.text is norms.ratio_data is report.depth.asymmetry is None
    assert norms.ratio == pytest.approx(norms.visual.mean / norms.vocabulary.mean)
    assert probe(model, [alone, words]).tokens == {"visual": 4, "text": 3, "special": 2}
    model, batch = vlm_families.make("llava_next")  # an image's rows end in newlines
    seen, both = (probe(model, batches).tokens for batches in ([batch], [batch, words]))
    assert both == seen | {"text": seen["text"] + 3, "special": seen["special"] + 1}


def test_special_tokens_of_zero_have_a_norm_and_no_direction():
    """A padding token's row may be all zero, and be used as another special token."""
    model, batch = vlm_families.make("llava")
    with torch.no_grad():
        model.get_input_embeddings().weight[[BOS, EOS]] = 0.0
    report = probe(model, [batch])
    assert report.interface.special.mean == 0.0 and report.interface.special.count == 4
    assert set(report.depth.norm) == set(report.depth.rotation) == {"visual", "text"}


@pytest.mark.parametrize(("zero", "other"), [(BOS, EOS), (EOS, BOS)])
def test_tokens_of_zero_among_others_of_their_kind_count_for_the_norm_alone(zero, other):
    """The first of a sequence stays zero, and the last does not."""
    model, batch = vlm_families.make("llava")
    with torch.no_grad():
        model.get_input_embeddings().weight[zero] = 0.0
    report = probe(model, [batch])
    assert report.interface.special.count == 4
    for quantity in ("norm", "log_norm", "cosine", "rotation", "update_angle"):
        curve = getattr(report.depth, quantity)["special"]
        assert all(map(math.isfinite, [*curve.mean, *curve.std])), quantity
    norm = model.get_input_embeddings().weight[other].detach().double().norm().item()
    assert report.depth.log_norm["special"].mean[0] == pytest.approx(math.log(norm))


def test_a_batch_without_an_image_does_not_count_in_the_error_of_the_asymmetry():
    model, batch = vlm_families.make("llava")
    _, other = vlm_families.make("llava", seed=1)
    words = {"input_ids": torch.tensor([[1, 5, 6, 7]])}
    alone = probe(model, [batch, other]).depth
    among = probe(model, [batch, words, other]).depth
    assert among.asymmetry_error == pytest.approx(alone.asymmetry_error) != 0
    assert among.asymmetry != alone.asymmetry


def test_without_text_the_scale_of_embeddings_is_the_configuration_s():
    text = tiny.text_config(cls=GraniteConfig, embedding_multiplier=12.0)
    alone = {"input_ids": torch.tensor([[1, *[IMAGE] * 4]])}
    alone["pixel_values"] = tiny.inputs()["pixel_values"][:1]
    norms = probe(tiny.llava(text=text), [alone]).interface
    assert norms.text is None and norms.scale == pytest.approx(12.0)
    assert norms.vocabulary.mean == pytest.approx(12.0 * norms.vocabulary_raw.mean)


def test_what_a_layer_does_to_a_state_by_hand():
    """An update across, along, against and beyond it; nothing, and a state that vanishes."""
    before = torch.tensor([[3.0, 0], [3, 0], [3, 0], [3, 0], [0, 2], [0, 0], [3, 4]]).double()
    after = torch.tensor([[3.0, 3], [5, 0], [1, 0], [-3, 0], [0, 2], [0, 1], [0, 0]]).double()
    values, exist = quantities(before, after)
    measured = dict(zip(QUANTITIES, zip(values.tolist(), exist.tolist(), strict=True), strict=True))
    turn = math.pi / 4
    expected = {
        "norm": [3, 3, 3, 3, 2, 0, 5],
        "rotation": [turn, 0, 0, math.pi, 0, None, None],
        "update_norm": [3, 2, 2, 6, 0, 1, 5],
        "update_angle": [math.pi / 2, 0, math.pi, math.pi, None, None, math.pi],
        "log_norm": [math.log(3)] * 4 + [math.log(2), None, math.log(5)],
        "log_update": [*map(math.log, (3, 2, 2, 6)), None, 0, math.log(5)],
    }
    for name, numbers in expected.items():
        found, there = measured[name]
        assert there == [number is not None for number in numbers], name
        pairs = [pair for pair in zip(found, numbers, strict=True) if pair[1] is not None]
        assert [pair[0] for pair in pairs] == pytest.approx([pair[1] for pair in pairs]), name
    along = torch.randn(200, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, _ = quantities(along, 1.7 * along)
    assert values.isfinite().all()  # though rounding makes the part across less than nothing


def test_special_tokens_of_a_tokenizer_are_those_that_it_calls_special():
    made = tokenizer()
    made.add_tokens(["plain"])
    special = tokenizer_ids(made)
    assert {START, END} <= special and made.convert_tokens_to_ids("plain") not in special
    assert tokenizer_ids(None) == set()
    alone = SimpleNamespace(added_tokens_decoder={}, all_special_ids=[3])
    assert tokenizer_ids(alone) == {3}


def test_a_decoder_of_one_layer_has_no_asymmetry():
    depth = probe(tiny.llava(text=tiny.text_config(num_hidden_layers=1)), [tiny.inputs()]).depth
    assert depth.asymmetry is depth.asymmetry_error is None
    assert len(depth.rotation["text"].mean) == 1 and len(depth.norm["text"].mean) == 2


def test_a_model_whose_projector_is_not_known_and_its_names(monkeypatch):
    monkeypatch.setitem(PROJECTORS, "llava", "elsewhere")
    model, batch = vlm_families.make("llava")
    report = probe(model, [batch], data="mine")
    assert (report.model, report.data) == ("llava", "mine")  # of no folder: its type
    assert report.projector is report.interface.projector_output is None
    assert report.interface.visual and "'llava'" in report.left_out[0]
    model.config.name_or_path = "somebody/tiny"
    assert probe(model, [batch]).model == "tiny"
    assert probe(model, [batch], name="given").model == "given"


def test_a_layer_that_changes_nothing():
    model, batch = vlm_families.make("llava")
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_decoder().layers[1].get_submodule(name).weight.zero_()
    depth = probe(model, [batch]).depth
    assert depth.rotation["text"].mean[1] == 0 and depth.cosine["text"].mean[1] == pytest.approx(1)
    angles = depth.update_angle["text"].mean
    assert math.isnan(angles[1]) and not math.isnan(angles[2])


def test_rows_that_are_more_than_scaled_have_no_n_text():
    model, batch = vlm_families.make("llava")
    lora = LoraConfig(target_modules=["embed_tokens"], r=4, lora_alpha=64, init_lora_weights=False)
    report = probe(get_peft_model(model, lora), [batch])
    norms = report.interface
    assert norms.scale is norms.vocabulary is norms.ratio is None and norms.vocabulary_raw
    assert norms.ratio_data == pytest.approx(norms.visual.mean / norms.text.mean)
    assert "N_text" in report.left_out[0]


def test_models_and_batches_that_cannot_be_measured_are_refused():
    model, batch = vlm_families.make("llava")
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    tuned = get_peft_model(tiny.llava(), prompt)
    # Llama 3.2 Vision sees images by cross-attention, so no token of the sequence stands for one.
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    text = dict(num_attention_heads=2, num_key_value_heads=1, cross_attention_layers=[1], **sizes)
    vision = dict(num_global_layers=1, attention_heads=2, **sizes)
    mllama = MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text))
    for refused, inputs, message in (
        (mllama, batch, "cannot be read. .* without cross-attention"),
        (model.get_decoder(), batch, "cannot be read. It must be a vision-language model"),
        (tuned, batch, "Prompt tuning"),
        (model, {**batch, "pixel_values_videos": batch["pixel_values"]}, "pixel_values_videos"),
        (model, {**batch, "input_features": batch["pixel_values"]}, "input_features"),
        (model, {"input_ids": torch.tensor([[1, 5, 6]])}, "visual token.*97"),
    ):
        with pytest.raises(ValueError, match=message):
            probe(refused, [inputs])
    pixels_first = {"pixel_values": batch["pixel_values"], **batch}
    for batches in (batch, pixels_first, [{"pixel_values": batch["pixel_values"]}]):
        with pytest.raises(ValueError, match="input_ids.*Give a list of batches"):
            probe(model, batches)
    last = model.model.multi_modal_projector.linear_2
    for bias, message in ((0.0, "visual tokens are zero"), (math.inf, "visual.*NaN.*in state 0")):
        with torch.no_grad():
            last.weight.zero_()
            last.bias.fill_(bias)
        with pytest.raises(ValueError, match=message):
            probe(model, [batch])


def test_text_of_zero_has_no_direction_and_layers_that_change_nothing_no_asymmetry():
    model, batch = vlm_families.make("llava")
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    assert probe(model, [batch]).depth.asymmetry is None
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    with pytest.raises(ValueError, match="All text tokens are zero in state 0"):
        probe(model, [batch])


def test_labels_and_the_cache_are_left_out_and_a_processor_names_its_tokenizer_s_tokens():
    model, batch = vlm_families.make("llava")
    more = {**batch, "labels": batch["input_ids"], "use_cache": True}
    plain = probe(model, [batch], tokenizer=tokenizer())
    assert asdict(probe(model, [more], tokenizer=tokenizer())) == asdict(plain)
    processor = SimpleNamespace(tokenizer=tokenizer())
    assert probe(model, [batch], tokenizer=processor).tokens == plain.tokens
    model.is_loaded_in_8bit = True
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    assert probe(model, [batch]).dtype.startswith("8-bit")


def test_ids_of_a_configuration_are_those_of_its_token_fields():
    config = tiny.config()
    known = boundary_ids(config)
    config.video_token_index = 71
    config.own_token_ids = [72, None, "x"]
    config.flag_token_id = "none"
    assert boundary_ids(config) - known == {71, 72} and IMAGE not in known


def test_parts_of_a_base_model_alone_and_of_a_family_that_cannot_be_told():
    model = tiny.llava()
    assert find_parts(model).projector_name == "model.multi_modal_projector"
    assert find_parts(model.model).projector_name == "multi_modal_projector"
    model.config.model_type = "hunyuan_vl"
    with pytest.raises(ValueError, match="learned rows cannot be distinguished"):
        find_parts(model)


def test_a_mask_of_pairs_of_tokens_pads_nothing():
    ids = torch.tensor([[5, IMAGE, 6]])
    pairs = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    kinds = token_positions(ids, pairs, IMAGE)
    assert kinds["visual"].tolist() == [[False, True, False]]
    assert kinds["text"].tolist() == [[True, False, True]]
    padded = token_positions(ids, torch.tensor([[0, 1, 1]]), IMAGE)
    assert padded["text"].tolist() == [[False, False, True]]


def tokenizer():
    """Knows the special tokens that not every family's configuration names."""
    vocabulary = {f"word{number}": number for number in range(tiny.VOCABULARY)}
    made = Tokenizer(WordLevel(vocabulary, unk_token="word0"))
    made.add_special_tokens([AddedToken(f"word{number}", special=True) for number in (START, END)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def moments(values):
    """Mean and population standard deviation by plain sums."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def close(measured: Moments, values, rel=1e-6):
    mean, std = moments(values)
    expected = [pytest.approx(mean, rel=rel), pytest.approx(std, rel=rel, abs=1e-7 * mean)]
    return [measured.mean, measured.std] == expected and measured.count == len(values)


def reference(model, batches):
    """Tokens by kind, as dicts of lists over layers, from all states and plain formulas."""
    tokens = {}
    inputs = []
    outputs = []
    finals = []
    newline = dict(model.base_model.named_parameters(recurse=False)).get("image_newline")
    if newline is not None:
        scale = getattr(model.config.text_config, "embedding_multiplier", 1)
        newline = newline.detach().double() * scale

    def keep(module, args, out):
        inputs.append(args[0].double())
        outputs.append((out[0] if isinstance(out, tuple) else out).double())

    decoder = model.get_decoder()
    for layer in decoder.layers:
        layer.register_forward_hook(keep)
    decoder.norm.register_forward_hook(lambda *call: finals.append(call[-1].double()))
    for batch in batches:
        for kept in (inputs, outputs, finals):
            kept.clear()
        with torch.no_grad():
            model(**batch)
        for row, column in (batch["attention_mask"] > 0).nonzero().tolist():
            before, after = ([state[row, column] for state in kept] for kept in (inputs, outputs))
            updates = [b - a for a, b in zip(before, after, strict=True)]
            states = [*before, after[-1]]
            token = {
                "norm": [state.norm().item() for state in states],
                "cosine": cosines(states[:-1], states[1:]),
                "rotation": list(map(math.acos, cosines(before, after))),
                "update_norm": [update.norm().item() for update in updates],
                "update_angle": list(map(math.acos, cosines(before, updates))),
                "final_norm": finals[-1][row, column].norm().item(),
            }
            token["log_norm"] = [math.log(norm) for norm in token["norm"]]
            token["log_update"] = [math.log(norm) for norm in token["update_norm"]]
            number = batch["input_ids"][row, column].item()
            kind = "text" if number in WORDS else "indicator" if number in INDICATORS else "special"
            if number == IMAGE:
                is_newline = newline is not None and torch.allclose(states[0], newline)
                kind = "newline" if is_newline else "visual"
            tokens.setdefault(kind, []).append(token)
    return tokens


def cosines(first, second):
    pairs = zip(first, second, strict=True)
    return [max(-1.0, min(1.0, (a @ b / (a.norm() * b.norm())).item())) for a, b in pairs]
