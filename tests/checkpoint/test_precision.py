"""Whether half precision pays is measured on the processor, once in a process."""

import os
import socket

import pytest
import tiny
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlavaConfig

from normalign_llava.checkpoint import precision
from normalign_llava.checkpoint.precision import (
    compute_dtype,
    dtype_to_load,
    free_memory,
    half_precision_pays,
)


without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="a GPU runs a checkpoint's own precision, and is asked what it has",
)

ASK = """
import sys
from normalign_llava.checkpoint import precision
precision._seconds = lambda: {"float32": 1.0, "bfloat16": float(sys.argv[1])}
from normalign_llava import NormAlignConfig
from normalign_llava.train.settings import complete
given = NormAlignConfig(output_dir=sys.argv[2], use_cpu=True, learning_rate=1e-3)
print("bf16", complete(given)[0].bf16)
"""


@pytest.mark.parametrize(
    ("first_seconds", "second_seconds", "expected"),
    [
        (0.3, 5.0, "bf16 True"),
        (5.0, 0.3, "bf16 False"),
    ],
)
def test_of_several_processes_the_first_one_s_measurement_holds(
    prepared, tmp_path, first_seconds, second_seconds, expected
):
    with socket.create_server(("127.0.0.1", 0)) as free_server:
        port = str(free_server.getsockname()[1])

    def start(rank, seconds):
        return prepared.start(
            ["-c", ASK, seconds, tmp_path],
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )

    first_process = start("0", first_seconds)
    second_process = start("1", second_seconds)
    assert expected in first_process.wait().stdout
    assert expected in second_process.wait().stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("speedup", "pays"),
    [
        (1.6, True),
        (1.4, False),
        (0.2, False),
        (4.0, True),
    ],
)
def test_half_precision_pays_from_one_and_a_half_times_as_fast(processor, dtype, speedup, pays):
    seconds = {"bfloat16": 5.0, "float16": 5.0}
    dtype_name = str(dtype).removeprefix("torch.")
    seconds[dtype_name] = 1 / speedup
    processor(**seconds)
    assert half_precision_pays(dtype, "cpu") == pays


@pytest.fixture
def stored_in():
    """Makes the configuration of a checkpoint that is stored in a dtype."""

    def make_config(dtype):
        return LlavaConfig(text_config=LlamaConfig(), dtype=dtype)

    return make_config


FAST_BFLOAT16 = 0.3
SLOW_BFLOAT16 = 5.0


@without_gpu
@pytest.mark.parametrize(
    ("stored_dtype", "bfloat16_seconds", "memory_share", "expected", "loaded_name"),
    [
        (torch.float16, FAST_BFLOAT16, 0.2, "float32", "float32"),
        (torch.float16, FAST_BFLOAT16, 0.7, "bfloat16", "bfloat16"),
        (torch.float16, FAST_BFLOAT16, 1.2, "auto", "float16"),
        (torch.bfloat16, SLOW_BFLOAT16, 0.2, "float32", "float32"),
        (torch.bfloat16, SLOW_BFLOAT16, 0.7, "auto", "bfloat16"),
    ],
)
def test_the_fastest_precision_that_fits_is_run(
    processor,
    stored_in,
    caplog,
    stored_dtype,
    bfloat16_seconds,
    memory_share,
    expected,
    loaded_name,
):
    processor(bfloat16_seconds, float16=5.0)
    config = stored_in(stored_dtype)
    weight_bytes = int(memory_share * free_memory())
    assert dtype_to_load("auto", config, weight_bytes) == expected
    assert dtype_to_load("auto", config, weight_bytes) == expected
    (warning,) = caplog.messages
    assert f"Loading in {loaded_name}" in warning
    assert "only emulates" in warning


@without_gpu
@pytest.mark.parametrize(
    ("stored_dtype", "bfloat16_seconds", "memory_share"),
    [
        (torch.float16, FAST_BFLOAT16, 0.2),
        (torch.float16, FAST_BFLOAT16, 0.7),
        (torch.float16, FAST_BFLOAT16, 1.2),
        (torch.bfloat16, SLOW_BFLOAT16, 0.2),
        (torch.bfloat16, SLOW_BFLOAT16, 0.7),
    ],
)
def test_a_slow_precision_is_run_with_a_warning_if_it_is_asked_for(
    processor, stored_in, caplog, stored_dtype, bfloat16_seconds, memory_share
):
    processor(bfloat16_seconds, float16=5.0)
    config = stored_in(stored_dtype)
    weight_bytes = int(memory_share * free_memory())
    assert dtype_to_load(stored_dtype, config, weight_bytes) == stored_dtype
    (warning,) = caplog.messages
    assert "only emulates" in warning


@without_gpu
@pytest.mark.parametrize("stored_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_precision_that_is_fast_stays(processor, stored_in, caplog, stored_dtype):
    processor(0.3)
    assert dtype_to_load("auto", stored_in(stored_dtype), 0) == "auto"
    assert not caplog.messages


@without_gpu
@pytest.mark.parametrize(
    ("weight_bytes", "expected"),
    [
        (2**31, "float32"),
        (2**31 + 1, "bfloat16"),
        (2**32, "bfloat16"),
        (2**32 + 1, "auto"),
    ],
)
def test_a_gibibyte_is_left_to_run_in(processor, monkeypatch, weight_bytes, expected):
    processor(0.3, float16=5.0)
    monkeypatch.setattr(precision, "free_memory", lambda: 5 * 2**30)
    # Only the language model's configuration has a dtype.
    config = LlavaConfig(text_config=LlamaConfig(dtype=torch.float16))
    assert dtype_to_load("auto", config, weight_bytes) == expected


@without_gpu
@pytest.mark.parametrize(
    ("dtype", "weight_bytes"),
    [
        ("auto", 2**33),
        (torch.float16, 1),
    ],
)
def test_without_a_configuration_the_precision_is_the_one_that_is_asked_for(
    processor, monkeypatch, dtype, weight_bytes
):
    processor(0.3, float16=5.0)
    monkeypatch.setattr(precision, "free_memory", lambda: 5 * 2**30)
    assert dtype_to_load(dtype, None, weight_bytes) == dtype


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", torch.bfloat16, "float32", torch.float32, "auto", None],
)
def test_a_fast_precision_gives_no_warning(processor, caplog, dtype):
    processor(0.3, float16=5.0)
    precision.warn_if_slow(dtype, "cpu")
    assert not caplog.messages


@pytest.mark.parametrize("dtype", [torch.float16, "float16"])
def test_a_slow_precision_that_was_asked_for_gives_a_warning(processor, caplog, dtype):
    processor(0.3, float16=5.0)
    precision.warn_if_slow(dtype, "cpu")
    (warning,) = caplog.messages
    assert "only emulates float16" in warning


@pytest.mark.parametrize(
    ("bfloat16_seconds", "float16_seconds", "emulates"),
    [
        (0.3, 5.0, True),
        (0.3, 0.3, False),
        (5.0, 5.0, False),
    ],
)
def test_a_model_in_float16_where_only_bfloat16_is_fast(
    processor, bfloat16_seconds, float16_seconds, emulates
):
    processor(bfloat16_seconds, float16=float16_seconds)
    model = tiny.model()
    assert precision.emulates_float16(model.half()) == emulates
    assert not precision.emulates_float16(model.float())
    assert not precision.emulates_float16(model.bfloat16())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            None,
            "not quantized",
        ),
        (
            {},
            "not quantized",
        ),
        (
            {"load_in_8bit": True},
            "8-bit",
        ),
        (
            {"load_in_4bit": True},
            "4-bit FP4, products in float32",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"},
            "4-bit FP4, products in bfloat16",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "4-bit NF4, products in float32",
        ),
        (
            {
                "load_in_4bit": True,
                "bnb_4bit_compute_dtype": torch.float16,
                **precision.NF4,
            },
            "4-bit NF4, double quantization, products in float16",
        ),
    ],
)
def test_quantization_in_words(settings, expected):
    assert precision.quantization_name(settings) == expected
    without_products = expected.partition(", products")[0]
    assert precision.quantization_name(settings, products=False) == without_products


@without_gpu
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_four_bits_are_of_the_decoder_s_layers_and_their_products_in_what_is_fast(
    processor, dtype, expected
):
    processor(0.3)
    settings = precision.four_bits(tiny.model(), dtype)
    assert settings.bnb_4bit_compute_dtype == expected
    assert settings.bnb_4bit_quant_type == "nf4"
    assert settings.bnb_4bit_use_double_quant
    assert set(settings.llm_int8_skip_modules) == {
        "lm_head",
        "model.vision_tower",
        "model.multi_modal_projector",
    }


def test_four_bits_of_a_language_model_leave_out_its_head(processor):
    processor(0.3)
    language_model = AutoModelForCausalLM.from_config(tiny.text_config(tied=False))
    settings = precision.four_bits(language_model, "float16")
    assert settings.llm_int8_skip_modules == ["lm_head"]
    settings = precision.four_bits(language_model.model, "float16")
    assert settings.llm_int8_skip_modules is None


MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_what_is_free_is_at_most_what_the_machine_has_and_falls_with_what_is_taken():
    decreases = []
    # Others on this machine take and free memory at the same time.
    for _ in range(6):
        free_before = free_memory()
        taken = torch.ones(2**28)  # 1 GiB
        decreases.append(free_before - free_memory())
        assert free_before <= MACHINE
        assert taken[-1] == 1
        del taken
    assert max(decreases) > 2**29


@pytest.fixture
def containers(tmp_path, monkeypatch):
    """Stands for the files in which the kernel lists the control groups of this process.

    Takes the groups that the process is in, and the limits by file.
    """
    groups_path = tmp_path / "groups"
    monkeypatch.setattr(precision, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(precision, "GROUPS", groups_path)

    def write_groups(membership: str, limits: dict[str, str]):
        (tmp_path / "own").write_text(membership)
        for file_name, limit in limits.items():
            limit_path = groups_path / file_name
            limit_path.parent.mkdir(parents=True, exist_ok=True)
            limit_path.write_text(limit)
        return groups_path

    return write_groups


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        pytest.param(
            "0::/\n",
            {},
            MACHINE,
            id="no-file",
        ),
        pytest.param(
            "0::/\n",
            {"memory.max": f"{2**29}\n"},
            2**29,
            id="root",
        ),
        pytest.param(
            "0::/\n",
            {"memory.max": "max\n"},
            MACHINE,
            id="no-limit",
        ),
        pytest.param(
            "0::/slice/job\n",
            {
                "memory.max": "max",
                "slice/memory.max": str(2**28),
                "slice/job/memory.max": "max",
            },
            2**28,
            id="parent",
        ),
        pytest.param(
            "0::/slice/job\n",
            {
                "memory.max": "max",
                "slice/memory.max": "max",
                "slice/job/memory.max": str(2**27),
            },
            2**27,
            id="own",
        ),
        pytest.param(
            "0::/of/the/host\n",
            {"memory.max": str(2**29)},
            2**29,
            id="not-visible-inside",
        ),
        pytest.param(
            "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": str(2**27)},
            2**27,
            id="first-version",
        ),
        pytest.param(
            "4:memory:/docker/1\n0::/\n",
            {"memory/memory.limit_in_bytes": str(2**28)},
            2**28,
            id="first-version-not-visible-inside",
        ),
        pytest.param(
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
            MACHINE,
            id="first-version-no-limit",
        ),
    ],
)
def test_memory_is_the_least_limit_of_a_process_s_containers(
    containers, membership, limits, expected
):
    containers(membership, limits)
    assert precision.memory_limit() == expected


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        pytest.param(2**23, 2**24 - 2**23 + 1024, id="some"),
        pytest.param(2**25, 0, id="more-than-the-limit"),
    ],
)
def test_what_is_free_in_a_container_is_its_limit_without_what_is_taken(containers, used, expected):
    limits = {"slice/memory.max": str(2**24)}
    group_path = containers("0::/slice/job\n", limits) / "slice"
    (group_path / "memory.current").write_text(str(used))
    (group_path / "memory.stat").write_text("anon 5\nactive_file 1000\ninactive_file 24\n")
    assert free_memory() == expected


@pytest.mark.parametrize(
    ("limit", "counted"),
    [
        ("max", "active_file 1"),
        (str(2**24), "anon 5"),
    ],
)
def test_a_container_without_a_limit_or_without_counts_is_passed_over(containers, limit, counted):
    group_path = containers("0::/\n", {"memory.max": limit})
    (group_path / "memory.current").write_text(str(2**20))
    (group_path / "memory.stat").write_text(f"{counted}\n")
    assert free_memory() > 2**25


def test_without_files_of_containers_the_machine_s_memory_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "OWN_GROUPS", tmp_path / "none")
    monkeypatch.setattr(precision, "GROUPS", tmp_path / "groups")
    assert precision.memory_limit() == MACHINE
    assert free_memory() > 2**25


def test_what_is_free_in_a_container_of_the_first_version(containers):
    limits = {
        "memory/memory.limit_in_bytes": str(2**24),
        "memory/job/memory.limit_in_bytes": str(2**24),
    }
    group_path = containers("4:cpu,memory:/job\n", limits) / "memory" / "job"
    (group_path / "memory.usage_in_bytes").write_text(str(2**22))
    (group_path / "memory.stat").write_text("cache 7\nactive_file 100\ninactive_file 20\n")
    assert free_memory() == 2**24 - 2**22 + 120


@pytest.mark.parametrize(
    ("seconds", "pays"),
    [
        (1 / 1.4, False),
        (1 / 1.6, True),
    ],
)
def test_each_half_precision_is_measured_by_itself(processor, seconds, pays):
    processor(seconds)
    assert half_precision_pays(torch.bfloat16, "cpu") is pays
    processor(10.0, float16=seconds)
    assert half_precision_pays(torch.float16, "cpu") is pays
    assert not half_precision_pays(torch.bfloat16, "cpu")


@without_gpu
@pytest.mark.parametrize(
    ("bfloat16_seconds", "expected"),
    [
        (0.3, torch.bfloat16),
        (5.0, torch.float32),
    ],
)
def test_products_with_4_bit_weights_are_computed_in_what_is_fast(
    processor, bfloat16_seconds, expected
):
    processor(bfloat16_seconds, float16=0.3)
    assert compute_dtype() == expected


@pytest.fixture
def states():
    torch.manual_seed(0)
    return torch.randn(5, 8).half()


@pytest.fixture
def weight():
    torch.manual_seed(1)
    return torch.randn(6, 8).half()


@pytest.mark.parametrize(
    "multiply",
    [
        pytest.param(lambda states, weight: functional.linear(states, weight), id="linear"),
        pytest.param(lambda states, weight: states @ weight.T, id="operator"),
        pytest.param(lambda states, weight: torch.matmul(states, weight.T), id="matmul"),
    ],
)
def test_products_in_bfloat16_round_what_goes_in_and_give_float16(states, weight, multiply):
    with precision.ProductsInBfloat16():
        product = multiply(states, weight)
    assert product.dtype == torch.float16
    # What bfloat16 inputs multiply to.
    expected = states.bfloat16().double() @ weight.bfloat16().double().T
    torch.testing.assert_close(product.double(), expected, rtol=2**-8, atol=1e-3)
    assert not torch.equal(product, states @ weight.T)


def test_convolutions_in_bfloat16_round_what_goes_in_and_give_float16():
    torch.manual_seed(0)
    images = torch.randn(1, 2, 4, 4).half()
    kernels = torch.randn(3, 2, 2, 2).half()
    with precision.ProductsInBfloat16():
        convolved = functional.conv2d(images, weight=kernels)
    assert convolved.dtype == torch.float16
    expected = functional.conv2d(images.bfloat16(), kernels.bfloat16())
    assert torch.equal(convolved, expected.half())


def test_attention_in_bfloat16_rounds_what_goes_in_and_gives_float16(states):
    batch = states[None]
    mask = torch.zeros(5, 5).half()
    with precision.ProductsInBfloat16():
        attended = functional.scaled_dot_product_attention(batch, batch, batch, attn_mask=mask)
    assert attended.dtype == torch.float16
    rounded = batch.bfloat16()
    expected = functional.scaled_dot_product_attention(rounded, rounded, rounded)
    assert torch.equal(attended, expected.half())


def test_products_in_float32_and_sums_stay_as_they_are(states):
    torch.manual_seed(2)
    in_float32 = torch.randn(5, 8)
    expected = in_float32 @ in_float32.T
    with precision.ProductsInBfloat16():
        assert torch.equal(in_float32 @ in_float32.T, expected)
        assert (states + states).dtype == torch.float16


def test_measuring_the_machine_draws_no_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    precision._seconds.__wrapped__()
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
