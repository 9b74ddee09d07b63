"""`normalign gain`: N_text from the embedding tensor alone, against numpy, wherever the tensor lies."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPTNeoXConfig, GraniteConfig, LlamaForCausalLM

from normalign_llava.assembly import embedding_table
from normalign_llava.assembly.gain import embedding_statistics


pytestmark = pytest.mark.slow


NAME = "model.embed_tokens.weight"


def table(rows=50, width=24, seed=0) -> torch.Tensor:
    """An embedding matrix with rows of very different norms, two of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator) * 3
    weight[[3, rows - 1]] = 0
    return weight


def reference(weight, exclude=()):
    """Norms of the rows that count, and their places, by numpy in float64."""
    wide = weight.double().numpy() if isinstance(weight, torch.Tensor) else weight.astype(np.float64)
    norms = np.sqrt((wide**2).sum(1))
    places = np.array([i for i in range(len(norms)) if norms[i] > 0 and i not in exclude])
    return norms[places], places


def assert_measures(statistics, weight, *, scale=1.0, exclude=()):
    norms, places = reference(weight, exclude)
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


@pytest.fixture
def small_chunks(monkeypatch):
    """Seven rows of 24 float32 a chunk, so that tables of 50 rows take several and the last one is short."""
    monkeypatch.setattr(embedding_table, "_CHUNK_BYTES", 7 * 24 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_dtype(tmp_path, dtype, small_chunks):
    weight = table().to(dtype)
    save_file({"a.first": torch.ones(5), NAME: weight, "z.last": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    statistics = embedding_statistics(str(tmp_path), top=7)
    assert_measures(statistics, weight)
    assert statistics.tensor == NAME
    assert statistics.gain == pytest.approx(statistics.n_text / 24**0.5, rel=1e-12)
    assert len(statistics.top) == 7


def test_one_file_by_its_own_path(tmp_path):
    weight = table()
    save_file({NAME: weight}, tmp_path / "weights.safetensors")
    assert_measures(embedding_statistics(str(tmp_path / "weights.safetensors")), weight)
    assert_measures(embedding_statistics(str(tmp_path)), weight)
    save_file({NAME: weight}, tmp_path / "copy.safetensors")
    with pytest.raises(ValueError, match=r"2 \.safetensors files.*copy\.safetensors, weights\.safetensors"):
        embedding_statistics(str(tmp_path))


@pytest.mark.parametrize(
    "config, name",
    [
        (tiny.text_config(), "model.embed_tokens.weight"),
        (GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2), "transformer.wte.weight"),
        (tiny.text_config(cls=GPTNeoXConfig), "gpt_neox.embed_in.weight"),
    ],
)
def test_language_models_as_transformers_saves_them(tmp_path, config, name):
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    statistics = embedding_statistics(str(tmp_path))
    assert statistics.tensor == name
    assert statistics.model_type == config.model_type
    assert_measures(statistics, model.get_input_embeddings().weight.detach())


@pytest.mark.parametrize("make, legacy", [(tiny.model, False), (tiny.llava, True)])
def test_vision_language_checkpoints_leave_out_the_image_token(tmp_path, make, legacy):
    model = make()
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[tiny.IMAGE + 1] = weight[tiny.IMAGE]  # vocabulary padding, as the build makes it
        weight[:5] = 0
    model.save_pretrained(tmp_path, save_original_format=legacy)
    statistics = embedding_statistics(str(tmp_path))
    assert_measures(statistics, weight.detach(), exclude=(tiny.IMAGE, tiny.IMAGE + 1))
    assert statistics.tensor.endswith("embed_tokens.weight")


@pytest.mark.parametrize(
    "text, scale",
    [
        (tiny.text_config(), 1.0),
        (tiny.text_config(cls=Gemma2Config), tiny.WIDTH**0.5),
        (tiny.text_config(cls=GraniteConfig, embedding_multiplier=12.0), 12.0),
    ],
)
def test_what_is_printed_is_what_the_model_aligns_its_norm_to(tmp_path, text, scale):
    model = tiny.model(text=text)
    n_text = model.align_projector_norm()
    model.save_pretrained(tmp_path)
    statistics = embedding_statistics(str(tmp_path))
    assert_measures(statistics, model.get_input_embeddings().weight.detach(), scale=scale, exclude=(tiny.IMAGE,))
    assert statistics.n_text == pytest.approx(n_text, rel=1e-12)
    assert statistics.model_type == text.model_type
    torch.testing.assert_close(model.model.multi_modal_projector.norm.weight[0].item(), statistics.gain)


@pytest.mark.parametrize("other", ["model.vision.word_embeddings.weight", "model.layers.61.embed_tokens.weight"])
def test_the_language_models_table_is_preferred(tmp_path, other):
    weight = table()
    name = "model.language_model.embed_tokens.weight"
    save_file({other: table(seed=1), name: weight}, tmp_path / "model.safetensors")
    assert_measures(embedding_statistics(str(tmp_path)), weight)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no weights.*no files"):
        embedding_statistics(str(tmp_path))
    for tensors, message in (
        ({f"{part}.embed_tokens.weight": table() for part in ("encoder", "decoder")}, "2 tensors.*Name a language"),
        ({"vision_model.embeddings.patch_embedding.weight": table()}, "0 tensors called.*Name a language model"),
        ({NAME: torch.ones(8, 8, dtype=torch.uint8)}, f"{NAME}.*U8.*quantized.*Measure the checkpoint"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            embedding_statistics(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    torch.save({NAME: table()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights.*pytorch_model.bin.*save it again"):
        embedding_statistics(str(tmp_path))
    save_file({NAME: table()}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="model.safetensors of .* is damaged"):
        embedding_statistics(str(tmp_path))


CLIENT = """
import json, sys
from dataclasses import asdict
from normalign_llava.assembly.gain import embedding_statistics
print(json.dumps(asdict(embedding_statistics(sys.argv[1], top=3))))
"""


@pytest.mark.parametrize("dtype, shard", [(torch.float32, "5GB"), (torch.bfloat16, "1MB")])
def test_hub_sends_only_the_header_and_the_tensor(hub, prepared, tmp_path, dtype, shard):
    sizes = dict(vocab_size=997, hidden_size=64, intermediate_size=4096, num_hidden_layers=3)
    LlamaForCausalLM(tiny.text_config(**sizes)).to(dtype).save_pretrained(tmp_path / "model", max_shard_size=shard)
    repository = hub.serve("acme/model.v1", tmp_path / "model")
    client = prepared.run(["-c", CLIENT, "acme/model.v1"])
    assert client.returncode == 0, client.stderr
    local = json.loads(json.dumps(asdict(embedding_statistics(str(tmp_path / "model"), top=3))))
    assert json.loads(client.stdout) == {**local, "model": "acme/model.v1"}

    weights = {path: size for path, size in repository.files().items() if path.endswith(".safetensors")}
    assert (len(weights) > 1) == (shard == "1MB")
    sent = {path.removeprefix("acme/model.v1/"): count for path, count in hub.sent.items()}
    (holder,) = [path for path in sent if path in weights]
    header = int.from_bytes((tmp_path / "model" / holder).read_bytes()[:8], "little")
    assert sent[holder] == 8 + header + 997 * 64 * dtype.itemsize < 0.2 * sum(weights.values())
