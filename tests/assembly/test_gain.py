"""`normalign gain`: N_text from the embedding tensor alone, against numpy, wherever it lies."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import tiny
import tiny_parts
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from normalign_llava.assembly.gain import embedding_statistics, statistics_of


pytestmark = pytest.mark.slow

NAME = "model.embed_tokens.weight"


def table(rows=5000, width=24, seed=0) -> torch.Tensor:
    """An embedding matrix with rows of very different norms, two of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator)
    weight *= torch.rand(rows, 1, generator=generator) * 3
    weight[[3, rows - 1]] = 0
    return weight


def store(folder, **tensors):
    """A folder with these tensors, of a model that transformers does not know."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "not_known_yet"}')
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def assert_measures(statistics, weight, *, scale=1.0, exclude=()):
    """The norms of the rows that count, by numpy in float64."""
    all_norms = np.sqrt((weight.double().numpy() ** 2).sum(1))
    places = np.array([i for i in range(len(all_norms)) if all_norms[i] > 0 and i not in exclude])
    norms = all_norms[places]
    order = np.argsort(-norms)[: len(statistics.top)]
    assert statistics.mean == pytest.approx(norms.mean(), rel=1e-12)
    assert statistics.n_text == pytest.approx(norms.mean() * scale, rel=1e-12)
    assert statistics.std == pytest.approx(norms.std(), rel=1e-12)
    assert statistics.scale == pytest.approx(scale)
    assert statistics.hidden_size == weight.shape[1]
    assert statistics.rows == len(norms)
    assert statistics.zero_rows == weight.shape[0] - len(norms) - len(exclude)
    assert statistics.excluded_rows == len(exclude)
    assert [token.id for token in statistics.top] == places[order].tolist()
    np.testing.assert_allclose([token.norm for token in statistics.top], norms[order], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_language_model_s_table_in_every_dtype(tmp_path, dtype):
    weight = table().to(dtype)
    name = "model.language_model.embed_tokens.weight"
    tensors = {name: weight, "model.vision.word_embeddings.weight": table(seed=1)}
    tensors["model.layers.61.embed_tokens.weight"] = table(seed=2)
    statistics = embedding_statistics(store(tmp_path, **tensors), top=7)
    assert_measures(statistics, weight)
    assert statistics.tensor == name and len(statistics.top) == 7
    assert statistics.model_type is None
    assert statistics.gain == pytest.approx(statistics.n_text / 24**0.5, rel=1e-12)


@pytest.mark.parametrize(
    "kind, name", [("llama", "embed_tokens"), ("gpt2", "wte"), ("gpt_neox", "embed_in")]
)
def test_language_models_as_transformers_saves_them(tmp_path, kind, name):
    config = tiny.text_config(cls=CONFIG_MAPPING[kind], n_embd=32, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    statistics = embedding_statistics(str(tmp_path))
    assert statistics.tensor.endswith(f".{name}.weight") and statistics.model_type == kind
    assert_measures(statistics, model.get_input_embeddings().weight.detach())


@pytest.mark.parametrize("make, legacy", [(tiny.model, False), (tiny.llava, True)])
def test_vision_language_checkpoints_leave_out_the_image_token(tmp_path, make, legacy):
    model = make()
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[tiny.IMAGE] *= 9  # the largest
        weight[tiny.IMAGE + 1] = weight[tiny.IMAGE]  # vocabulary padding, as the build makes it
        weight[:5] = 0
    model.save_pretrained(tmp_path, save_original_format=legacy)
    excluded = (tiny.IMAGE, tiny.IMAGE + 1)
    assert_measures(embedding_statistics(str(tmp_path)), weight.detach(), exclude=excluded)


@pytest.mark.parametrize(
    "text, scale",
    [
        (tiny.text_config(), 1.0),
        (tiny.text_config(cls=CONFIG_MAPPING["gemma2"]), tiny.WIDTH**0.5),
        (tiny.text_config(cls=CONFIG_MAPPING["granite"], embedding_multiplier=12.0), 12.0),
    ],
)
def test_what_is_printed_is_what_the_model_aligns_its_norm_to(tmp_path, text, scale):
    model = tiny.model(text=text)
    n_text = model.align_projector_norm()
    model.save_pretrained(tmp_path)
    statistics = embedding_statistics(str(tmp_path))
    weight = model.get_input_embeddings().weight.detach()
    assert_measures(statistics, weight, scale=scale, exclude=(tiny.IMAGE,))
    assert statistics.n_text == pytest.approx(n_text, rel=1e-12)
    gain = model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain[0].item(), statistics.gain)


def test_tokens_of_largest_norm_are_named_if_the_tokenizer_has_them(tmp_path):
    language = tiny_parts.language(tmp_path / "language", rows=128)
    tokenizer = AutoTokenizer.from_pretrained(language)
    model = AutoModelForCausalLM.from_pretrained(language)
    with torch.no_grad():
        model.get_input_embeddings().weight[[70, 120, 4]] *= torch.tensor([[9.0], [8.0], [7.0]])
    model.save_pretrained(language)
    statistics = embedding_statistics(language, top=3)
    named = [(token.id, token.text) for token in statistics.top]
    assert named == [(70, tokenizer.decode([70])), (120, None), (4, tokenizer.decode([4]))]
    assert len(tokenizer) < 120 and named[0][1] == "c"
    numbers, largest = statistics.tables()
    assert [*largest.columns[0].cells] == ["70", "120", "4"]
    assert [*largest.columns[1].cells] == ["'c'", "", repr(named[2][1])]
    norms = model.get_input_embeddings().weight.norm(dim=1)
    assert [*largest.columns[2].cells] == [f"{norms[row]:.3f}" for row in (70, 120, 4)]
    assert len(embedding_statistics(language, top=0).tables()) == 1
    everything = embedding_statistics(language, top=1000)
    assert len(everything.top) == everything.rows == 128 - everything.zero_rows


def test_what_cannot_be_measured_is_refused(tmp_path):
    two = {f"{part}.embed_tokens.weight": table() for part in ("encoder", "decoder")}
    for tensors, message in (
        (two, "2 tensors.*Name a language"),
        ({"vision_model.patch_embedding.weight": table()}, "0 tensors .*none called.*Name a lang"),
        ({NAME: torch.ones(8, 8, dtype=torch.uint8)}, "quantized .*uint8.*Load it in full prec"),
    ):
        with pytest.raises(ValueError, match=message):
            embedding_statistics(store(tmp_path, **tensors))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="model.safetensors cannot be loaded.*Save or fetch"):
        embedding_statistics(str(tmp_path))
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights in safetensors.*save it again"):
        embedding_statistics(str(tmp_path))


CLIENT = """
import json, sys
from dataclasses import asdict
from normalign_llava.assembly.gain import embedding_statistics
print(json.dumps(asdict(embedding_statistics(sys.argv[1], top=3))))
"""


def test_of_the_hub_s_weights_the_file_with_the_embeddings_is_fetched(hub, prepared, tmp_path):
    sizes = dict(vocab_size=997, hidden_size=64, intermediate_size=4096, num_hidden_layers=3)
    model = AutoModelForCausalLM.from_config(tiny.text_config(**sizes))
    model.save_pretrained(tmp_path / "model", max_shard_size="1MB")
    repository = hub.serve("acme/model.v1", tmp_path / "model")
    client = prepared.run(["-c", CLIENT, "acme/model.v1"])
    assert client.returncode == 0, client.stderr
    local = json.loads(json.dumps(asdict(embedding_statistics(str(tmp_path / "model"), top=3))))
    assert json.loads(client.stdout) == {**local, "model": "acme/model.v1"}
    weights = {path for path in repository.files() if path.endswith(".safetensors")}
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    sent = {path.removeprefix("acme/model.v1/") for path in hub.sent}
    assert sent & weights == {index["weight_map"][NAME]} < weights


def test_norms_without_a_configuration_are_taken_as_they_are():
    norms = torch.linspace(1, 3, 21, dtype=torch.float64)
    statistics = statistics_of("model", "table", norms, 16, None, None)
    assert (statistics.scale, statistics.model_type, statistics.rows) == (1.0, None, 21)
    assert statistics.mean == statistics.n_text == pytest.approx(2.0, rel=1e-12)
    assert statistics.gain == pytest.approx(0.5, rel=1e-12)
    largest = [*range(20, 10, -1)]
    assert [(token.id, token.text) for token in statistics.top] == [(row, None) for row in largest]


def test_of_a_repository_the_commit_that_is_named_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--lm"
    for folder in ("snapshots", "refs"):
        (repository / folder).mkdir(parents=True)
    earlier = "a" * 40
    latest = "b" * 40
    tables = {earlier: table(rows=30), latest: table(rows=40, seed=1)}
    for commit, weight in tables.items():
        store(repository / "snapshots" / commit, **{NAME: weight})
    (repository / "refs" / "main").write_text(latest)
    assert_measures(embedding_statistics("acme/lm", revision=earlier), tables[earlier])
    statistics = embedding_statistics("acme/lm")
    assert_measures(statistics, tables[latest])
    assert len(statistics.top) == 10


@pytest.mark.parametrize(
    "name", ["embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in"]
)
def test_every_usual_name_of_an_embedding_table_is_known(tmp_path, name):
    weight = table(rows=20, width=4)
    other = table(rows=20, width=4, seed=1)
    tensors = {f"model.{name}.weight": weight, f"model.pre_{name}.weight": other}
    tensors[f"model.layers.61.{name}.weight"] = other + 1  # of a layer that predicts further tokens
    assert_measures(embedding_statistics(store(tmp_path, **tensors)), weight)
