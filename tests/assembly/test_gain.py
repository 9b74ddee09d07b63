"""`normalign gain`: N_text from only the embedding tensor, against numpy, wherever it lies."""

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


def embedding_matrix(row_count=5000, width=24, seed=0) -> torch.Tensor:
    """An embedding matrix with rows of very different norms, two of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(row_count, width, generator=generator)
    weight *= torch.rand(row_count, 1, generator=generator) * 3
    weight[[3, row_count - 1]] = 0
    return weight


def write_model(folder, tensors: dict) -> str:
    """A folder with these tensors, of a model that transformers does not know."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "not_known_yet"}')
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def norms_by_numpy(weight, excluded_rows):
    """The rows that count and their norms, in float64."""
    squares = weight.double().numpy() ** 2
    all_norms = np.sqrt(squares.sum(axis=1))
    is_counted = all_norms > 0
    is_counted[list(excluded_rows)] = False
    counted_rows = np.flatnonzero(is_counted)
    return counted_rows, all_norms[counted_rows]


def assert_measures(statistics, weight, *, scale=1.0, excluded_rows=()):
    """Compares the norms of the rows that count with numpy's."""
    counted_rows, norms = norms_by_numpy(weight, excluded_rows)
    expected_mean = norms.mean()
    assert statistics.mean == pytest.approx(expected_mean, rel=1e-12)
    assert statistics.n_text == pytest.approx(expected_mean * scale, rel=1e-12)
    assert statistics.std == pytest.approx(norms.std(), rel=1e-12)
    assert statistics.scale == pytest.approx(scale)

    row_count, width = weight.shape
    counted = len(counted_rows)
    excluded = len(excluded_rows)
    assert statistics.hidden_size == width
    assert statistics.rows == counted
    assert statistics.excluded_rows == excluded
    assert statistics.zero_rows == row_count - counted - excluded

    largest_first = np.argsort(-norms)
    largest = largest_first[: len(statistics.top)]
    top_ids = [token.id for token in statistics.top]
    assert top_ids == counted_rows[largest].tolist()
    top_norms = [token.norm for token in statistics.top]
    np.testing.assert_allclose(top_norms, norms[largest], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_language_model_s_table_in_every_dtype(tmp_path, dtype):
    weight = embedding_matrix().to(dtype)
    expected_name = "model.language_model.embed_tokens.weight"
    tensors = {
        expected_name: weight,
        "model.vision.word_embeddings.weight": embedding_matrix(seed=1),
        "model.layers.61.embed_tokens.weight": embedding_matrix(seed=2),
    }
    statistics = embedding_statistics(write_model(tmp_path, tensors), top=7)
    assert_measures(statistics, weight)
    assert statistics.tensor == expected_name
    assert len(statistics.top) == 7
    assert statistics.model_type is None
    expected_gain = statistics.n_text / 24**0.5
    assert statistics.gain == pytest.approx(expected_gain, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "module_name"),
    [
        ("llama", "embed_tokens"),
        ("gpt2", "wte"),
        ("gpt_neox", "embed_in"),
    ],
)
def test_language_models_as_transformers_saves_them(tmp_path, kind, module_name):
    config = tiny.text_config(
        cls=CONFIG_MAPPING[kind],
        n_embd=32,
        n_layer=1,
        n_head=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    statistics = embedding_statistics(str(tmp_path))
    assert statistics.tensor.endswith(f".{module_name}.weight")
    assert statistics.model_type == kind
    embeddings = model.get_input_embeddings().weight.detach()
    assert_measures(statistics, embeddings)


@pytest.mark.parametrize(
    ("make_model", "legacy"),
    [
        pytest.param(tiny.model, False, id="normalign-llava"),
        pytest.param(tiny.llava, True, id="llava"),
    ],
)
def test_vision_language_checkpoints_leave_out_the_image_token(tmp_path, make_model, legacy):
    model = make_model()
    image_row = tiny.IMAGE
    padding_row = tiny.IMAGE + 1
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[image_row] *= 9  # the largest
        # Vocabulary padding, as the build makes it.
        weight[padding_row] = weight[image_row]
        weight[:5] = 0
    model.save_pretrained(tmp_path, save_original_format=legacy)
    statistics = embedding_statistics(str(tmp_path))
    assert_measures(statistics, weight.detach(), excluded_rows=(image_row, padding_row))


@pytest.mark.parametrize(
    ("text_config", "scale"),
    [
        pytest.param(
            tiny.text_config(),
            1.0,
            id="llama",
        ),
        pytest.param(
            tiny.text_config(cls=CONFIG_MAPPING["gemma2"]),
            tiny.WIDTH**0.5,
            id="gemma2",
        ),
        pytest.param(
            tiny.text_config(cls=CONFIG_MAPPING["granite"], embedding_multiplier=12.0),
            12.0,
            id="granite",
        ),
    ],
)
def test_what_is_printed_is_what_the_model_aligns_its_norm_to(tmp_path, text_config, scale):
    model = tiny.model(text=text_config)
    n_text = model.align_projector_norm()
    model.save_pretrained(tmp_path)
    statistics = embedding_statistics(str(tmp_path))
    weight = model.get_input_embeddings().weight.detach()
    assert_measures(statistics, weight, scale=scale, excluded_rows=(tiny.IMAGE,))
    assert statistics.n_text == pytest.approx(n_text, rel=1e-12)
    gain = model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain[0].item(), statistics.gain)


LARGEST_ROWS = [70, 120, 4]


@pytest.fixture
def language(tmp_path):
    """A language model with `LARGEST_ROWS`; its tokenizer has no token 120."""
    language = tiny_parts.language(tmp_path / "language", rows=128)
    model = AutoModelForCausalLM.from_pretrained(language)
    with torch.no_grad():
        factors = torch.tensor([[9.0], [8.0], [7.0]])
        model.get_input_embeddings().weight[LARGEST_ROWS] *= factors
    model.save_pretrained(language)
    return language


def test_tokens_of_largest_norm_are_named_if_the_tokenizer_has_them(language):
    tokenizer = AutoTokenizer.from_pretrained(language)
    assert len(tokenizer) < 120
    assert tokenizer.decode([70]) == "c"
    statistics = embedding_statistics(language, top=3)
    top_ids = [token.id for token in statistics.top]
    assert top_ids == LARGEST_ROWS
    top_texts = [token.text for token in statistics.top]
    assert top_texts == ["c", None, tokenizer.decode([4])]


def test_tokens_of_largest_norm_are_printed(language):
    _, largest_table = embedding_statistics(language, top=3).tables()
    id_column, text_column, norm_column = largest_table.columns
    assert list(id_column.cells) == ["70", "120", "4"]

    tokenizer = AutoTokenizer.from_pretrained(language)
    last_text = tokenizer.decode([4])
    assert list(text_column.cells) == ["'c'", "", repr(last_text)]

    model = AutoModelForCausalLM.from_pretrained(language)
    embeddings = model.get_input_embeddings().weight
    norms = embeddings.norm(dim=1)
    expected_norms = [f"{norms[row]:.3f}" for row in LARGEST_ROWS]
    assert list(norm_column.cells) == expected_norms


def test_no_token_or_every_token_may_be_listed(language):
    without_tokens = embedding_statistics(language, top=0)
    assert len(without_tokens.tables()) == 1

    statistics = embedding_statistics(language, top=1000)
    assert len(statistics.top) == statistics.rows
    assert statistics.rows == 128 - statistics.zero_rows


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        pytest.param(
            {
                "encoder.embed_tokens.weight": embedding_matrix(),
                "decoder.embed_tokens.weight": embedding_matrix(),
            },
            "2 tensors.*Name a language",
            id="two",
        ),
        pytest.param(
            {"vision_model.patch_embedding.weight": embedding_matrix()},
            "0 tensors .*none called.*Name a lang",
            id="none",
        ),
        pytest.param(
            {NAME: torch.ones(8, 8, dtype=torch.uint8)},
            "quantized .*uint8.*Load it in full prec",
            id="quantized",
        ),
    ],
)
def test_tensors_that_cannot_be_measured_are_refused(tmp_path, tensors, message):
    model_path = write_model(tmp_path, tensors)
    with pytest.raises(ValueError, match=message):
        embedding_statistics(model_path)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    write_model(tmp_path, {NAME: torch.ones(8, 8)})
    weights_path = tmp_path / "model.safetensors"
    content = weights_path.read_bytes()
    weights_path.write_bytes(content[:-10])
    with pytest.raises(ValueError, match="model.safetensors cannot be loaded.*Save or fetch"):
        embedding_statistics(str(tmp_path))


def test_weights_that_are_not_in_safetensors_are_refused(tmp_path):
    write_model(tmp_path, {NAME: torch.ones(8, 8)})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no weights in safetensors.*save it again"):
        embedding_statistics(str(tmp_path))


CLIENT = """
import json, sys
from dataclasses import asdict
from normalign_llava.assembly.gain import embedding_statistics
print(json.dumps(asdict(embedding_statistics(sys.argv[1], top=3))))
"""


def test_of_the_hub_s_weights_the_file_with_the_embeddings_is_fetched(hub, prepared, tmp_path):
    model_path = tmp_path / "model"
    config = tiny.text_config(
        vocab_size=997,
        hidden_size=64,
        intermediate_size=4096,
        num_hidden_layers=3,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(model_path, max_shard_size="1MB")
    repository = hub.serve("acme/model.v1", model_path)
    client = prepared.run(["-c", CLIENT, "acme/model.v1"])
    assert client.returncode == 0, client.stderr

    local_statistics = asdict(embedding_statistics(str(model_path), top=3))
    expected = json.loads(json.dumps(local_statistics)) | {"model": "acme/model.v1"}
    assert json.loads(client.stdout) == expected

    weight_files = {path for path in repository.files() if path.endswith(".safetensors")}
    sent_files = {path.removeprefix("acme/model.v1/") for path in hub.sent}
    index = json.loads((model_path / "model.safetensors.index.json").read_text())
    file_with_embeddings = index["weight_map"][NAME]
    assert sent_files & weight_files == {file_with_embeddings}
    assert len(weight_files) > 1


def test_norms_without_a_configuration_are_taken_as_they_are():
    norms = torch.linspace(1, 3, 21, dtype=torch.float64)
    statistics = statistics_of("model", "table", norms, 16, None, None)
    assert statistics.scale == 1.0
    assert statistics.model_type is None
    assert statistics.rows == 21
    assert statistics.mean == pytest.approx(2.0, rel=1e-12)
    assert statistics.n_text == statistics.mean
    assert statistics.gain == pytest.approx(0.5, rel=1e-12)

    top_ids = [token.id for token in statistics.top]
    assert top_ids == list(range(20, 10, -1))
    top_texts = [token.text for token in statistics.top]
    assert top_texts == [None] * 10


def test_of_a_repository_the_commit_that_is_named_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--lm"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    earlier_commit = "a" * 40
    latest_commit = "b" * 40
    earlier_weight = embedding_matrix(row_count=30)
    latest_weight = embedding_matrix(row_count=40, seed=1)
    write_model(repository / "snapshots" / earlier_commit, {NAME: earlier_weight})
    write_model(repository / "snapshots" / latest_commit, {NAME: latest_weight})
    (repository / "refs" / "main").write_text(latest_commit)

    earlier_statistics = embedding_statistics("acme/lm", revision=earlier_commit)
    assert_measures(earlier_statistics, earlier_weight)
    latest_statistics = embedding_statistics("acme/lm")
    assert_measures(latest_statistics, latest_weight)
    assert len(latest_statistics.top) == 10


@pytest.mark.parametrize(
    "module_name",
    ["embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in"],
)
def test_every_usual_name_of_an_embedding_table_is_known(tmp_path, module_name):
    weight = embedding_matrix(row_count=20, width=4)
    other_weight = embedding_matrix(row_count=20, width=4, seed=1)
    tensors = {
        f"model.{module_name}.weight": weight,
        f"model.pre_{module_name}.weight": other_weight,
        # Of a layer that predicts further tokens.
        f"model.layers.61.{module_name}.weight": other_weight + 1,
    }
    assert_measures(embedding_statistics(write_model(tmp_path, tensors)), weight)
