"""Whether half precision pays is measured on the processor, once in a process."""

import os
import socket

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlavaConfig

from normalign_llava.checkpoint import precision
from normalign_llava.checkpoint.precision import (
    compute_dtype,
    dtype_to_load,
    free_memory,
    half_precision_pays,
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


@pytest.mark.parametrize("seconds", [(0.3, 5.0), (5.0, 0.3)])
def test_of_several_processes_the_first_one_s_measurement_holds(prepared, tmp_path, seconds):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        prepared.start(["-c", ASK, pace, tmp_path], RANK=rank, LOCAL_RANK=rank, **together)
        for rank, pace in zip("01", seconds, strict=True)
    ]
    for process in started:
        assert f"bf16 {seconds[0] < 1}" in process.wait().stdout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pays_from_one_and_a_half_times_as_fast(processor, dtype):
    for faster, pays in ((1.6, True), (1.4, False), (0.2, False), (4.0, True)):
        name = str(dtype).removeprefix("torch.")
        other = {"bfloat16": 5.0, "float16": 5.0} | {name: 1 / faster}
        processor(**other)
        assert half_precision_pays(dtype, "cpu") == pays


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs a checkpoint's own precision")
@pytest.mark.parametrize(
    "stored, fast, share, expected",
    [
        (torch.float16, True, 0.2, "float32"),
        (torch.float16, True, 0.7, "bfloat16"),
        (torch.float16, True, 1.2, "auto"),
        (torch.bfloat16, False, 0.2, "float32"),
        (torch.bfloat16, False, 0.7, "auto"),
    ],
)
def test_the_fastest_precision_that_fits_is_run(processor, caplog, stored, fast, share, expected):
    processor(0.3 if fast else 5.0, float16=5.0)
    config = LlavaConfig(text_config=LlamaConfig(), dtype=stored)
    size = int(share * free_memory())
    name = str(stored).removeprefix("torch.") if expected == "auto" else expected
    assert dtype_to_load("auto", config, size) == dtype_to_load("auto", config, size) == expected
    (line,) = caplog.messages
    assert f"Loading in {name}" in line and "only emulates" in line
    assert dtype_to_load(stored, config, size) == stored and "only emulates" in caplog.messages[1]
    processor(0.3)  # in which both are fast
    for kept in (stored, torch.float32):
        config.dtype = kept
        assert dtype_to_load("auto", config, 0) == "auto"
    assert len(caplog.messages) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs a checkpoint's own precision")
def test_a_gibibyte_is_left_to_run_in(processor, monkeypatch):
    processor(0.3, float16=5.0)
    monkeypatch.setattr(precision, "free_memory", lambda: 5 * 2**30)
    config = LlavaConfig(text_config=LlamaConfig(dtype=torch.float16))  # which alone has a dtype
    for size, dtype in ((2**31, "float32"), (2**31 + 1, "bfloat16"), (2**32, "bfloat16")):
        assert dtype_to_load("auto", config, size) == dtype
    assert dtype_to_load("auto", config, 2**32 + 1) == "auto"
    assert dtype_to_load("auto", None, 2**33) == "auto"
    assert dtype_to_load(torch.float16, None, 1) == torch.float16


def test_a_slow_precision_that_was_asked_for_is_told_of(processor, caplog):
    processor(0.3, float16=5.0)
    for dtype in ("bfloat16", torch.bfloat16, "float32", torch.float32, "auto", None):
        precision.warn_if_slow(dtype, "cpu")
    assert not caplog.messages
    precision.warn_if_slow(torch.float16, "cpu")
    assert "only emulates float16" in caplog.messages[0]
    precision.logger.warning_once.cache_clear()
    precision.warn_if_slow("float16", "cpu")
    assert len(caplog.messages) == 2


def test_a_model_in_float16_where_bfloat16_alone_is_fast(processor):
    half = tiny.model().half()
    for bfloat16, float16, emulates in ((0.3, 5.0, True), (0.3, 0.3, False), (5.0, 5.0, False)):
        processor(bfloat16, float16=float16)
        assert precision.emulates_float16(half) == emulates
        assert not precision.emulates_float16(half.float())
        assert not precision.emulates_float16(half.bfloat16())
        half.half()


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "settings, name",
    [
        (None, "not quantized"),
        ({}, "not quantized"),
        ({"load_in_8bit": True}, "8-bit"),
        ({"load_in_4bit": True}, "4-bit FP4, products in float32"),
        (FOUR_BITS, "4-bit FP4, products in bfloat16"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "4-bit NF4, products in float32"),
        (
            {**FOUR_BITS, "bnb_4bit_compute_dtype": torch.float16, **precision.NF4},
            "4-bit NF4, double quantization, products in float16",
        ),
    ],
)
def test_quantization_in_words(settings, name):
    assert precision.quantization_name(settings) == name
    shorter = name.partition(", products")[0]
    assert precision.quantization_name(settings, products=False) == shorter


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU has is asked, not measured")
def test_four_bits_are_of_the_decoder_s_layers_and_their_products_in_what_is_fast(processor):
    processor(0.3)
    for dtype, expected in (("auto", torch.bfloat16), ("float16", torch.float16)):
        settings = precision.four_bits(tiny.model(), dtype)
        assert settings.bnb_4bit_compute_dtype == expected
        assert settings.bnb_4bit_quant_type == "nf4" and settings.bnb_4bit_use_double_quant
        beside = {"lm_head", "model.vision_tower", "model.multi_modal_projector"}
        assert {*settings.llm_int8_skip_modules} == beside


def test_four_bits_of_a_language_model_leave_its_head_alone(processor):
    processor(0.3)
    alone = AutoModelForCausalLM.from_config(tiny.text_config(tied=False))
    assert precision.four_bits(alone, "float16").llm_int8_skip_modules == ["lm_head"]
    assert precision.four_bits(alone.model, "float16").llm_int8_skip_modules is None


def test_what_is_free_is_at_most_what_the_machine_has_and_falls_with_what_is_taken():
    fallen = []
    for _ in range(6):  # others on this machine take and free memory at the same time
        before = free_memory()
        taken = torch.ones(2**28)  # 1 GiB
        fallen.append(before - free_memory())
        assert before <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert taken[-1] == 1
        del taken
    assert max(fallen) > 2**29


def containers(folder, monkeypatch, membership: str, **limits: str) -> None:
    """Stands for the files in which the kernel tells the control groups of this process."""
    (folder / "own").write_text(membership)
    monkeypatch.setattr(precision, "OWN_GROUPS", folder / "own")
    monkeypatch.setattr(precision, "GROUPS", folder / "groups")
    for place, limit in limits.items():
        file = folder / "groups" / place.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        name = "memory.limit_in_bytes" if place.startswith("memory") else "memory.max"
        (file.parent / name).write_text(limit)


MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"x": f"{2**29}\n"}, 2**29),
        ("0::/\n", {"x": "max\n"}, MACHINE),
        ("0::/slice/job\n", {"x": "max", "slice__x": str(2**28), "slice__job__x": "max"}, 2**28),
        ("0::/slice/job\n", {"x": "max", "slice__x": "max", "slice__job__x": str(2**27)}, 2**27),
        ("0::/of/the/host\n", {"x": str(2**29)}, 2**29),  # which is not to be seen inside
        ("5:cpu,cpuacct:/\n4:memory:/job\n0::/\n", {"memory__job__x": str(2**27)}, 2**27),
        ("4:memory:/docker/1\n0::/\n", {"memory__x": str(2**28)}, 2**28),
        ("4:memory:/\n", {"memory__x": "9223372036854771712\n"}, MACHINE),
    ],
)
def test_memory_is_the_least_limit_of_a_process_s_containers(
    tmp_path, monkeypatch, membership, limits, expected
):
    containers(tmp_path, monkeypatch, membership, **limits)
    assert precision.memory_limit() == expected


def test_what_is_free_in_a_container_is_its_limit_without_what_is_taken(tmp_path, monkeypatch):
    containers(tmp_path, monkeypatch, "0::/slice/job\n", slice__x=str(2**24))
    group = tmp_path / "groups" / "slice"
    (group / "memory.current").write_text(str(2**23))
    (group / "memory.stat").write_text("anon 5\nactive_file 1000\ninactive_file 24\n")
    assert free_memory() == 2**24 - 2**23 + 1024
    (group / "memory.current").write_text(str(2**25))
    assert free_memory() == 0


@pytest.mark.parametrize(("limit", "counted"), [("max", "active_file 1"), (str(2**24), "anon 5")])
def test_a_container_without_a_limit_or_without_counts_is_passed_over(
    tmp_path, monkeypatch, limit, counted
):
    containers(tmp_path, monkeypatch, "0::/\n", x=limit)
    (tmp_path / "groups" / "memory.current").write_text(str(2**20))
    (tmp_path / "groups" / "memory.stat").write_text(f"{counted}\n")
    assert free_memory() > 2**25


def test_where_nothing_tells_of_containers_the_machine_s_memory_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "OWN_GROUPS", tmp_path / "none")
    monkeypatch.setattr(precision, "GROUPS", tmp_path / "groups")
    assert precision.memory_limit() == MACHINE and free_memory() > 2**25


def test_what_is_free_in_a_container_of_the_first_version(tmp_path, monkeypatch):
    containers(tmp_path, monkeypatch, "4:cpu,memory:/job\n", memory__job=str(2**24))
    group = tmp_path / "groups" / "memory" / "job"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(2**24))
    (group / "memory.usage_in_bytes").write_text(str(2**22))
    (group / "memory.stat").write_text("cache 7\nactive_file 100\ninactive_file 20\n")
    assert free_memory() == 2**24 - 2**22 + 120


@pytest.mark.parametrize(("share", "pays"), [(1 / 1.4, False), (1 / 1.6, True)])
def test_half_precision_pays_if_it_is_one_and_a_half_times_as_fast(processor, share, pays):
    processor(share)
    assert half_precision_pays(torch.bfloat16, "cpu") is pays
    processor(10.0, float16=share)
    assert half_precision_pays(torch.float16, "cpu") is pays
    assert not half_precision_pays(torch.bfloat16, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU has is asked, not measured")
def test_products_with_4_bit_weights_are_computed_in_what_is_fast(processor):
    for fast, expected in ((0.3, torch.bfloat16), (5.0, torch.float32)):
        processor(fast, float16=0.3)
        assert compute_dtype() == expected


def test_products_in_bfloat16_round_what_goes_in_and_give_float16():
    torch.manual_seed(0)
    x = torch.randn(5, 8).half()
    weight = torch.randn(6, 8).half()
    images = torch.randn(1, 2, 4, 4).half()
    kernels = torch.randn(3, 2, 2, 2).half()
    wide = torch.randn(5, 8)
    in_float32 = wide @ wide.T
    with precision.ProductsInBfloat16():
        assert torch.equal(wide @ wide.T, in_float32)
        of_kernels = torch.nn.functional.conv2d(images, weight=kernels)
        mask = torch.zeros(5, 5).half()
        attended = torch.nn.functional.scaled_dot_product_attention(*[x[None]] * 3, attn_mask=mask)
        products = torch.nn.functional.linear(x, weight), x @ weight.T, torch.matmul(x, weight.T)
        assert (x + x).dtype == torch.float16
    exact = x.bfloat16().double() @ weight.bfloat16().double().T  # what bfloat16 inputs multiply to
    assert of_kernels.dtype == attended.dtype == torch.float16
    expected = torch.nn.functional.conv2d(images.bfloat16(), kernels.bfloat16())
    assert torch.equal(of_kernels, expected.half())
    rounded = x.bfloat16()[None]
    expected = torch.nn.functional.scaled_dot_product_attention(*[rounded] * 3)
    assert torch.equal(attended, expected.half())
    for product in products:
        assert product.dtype == torch.float16
        torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-3)
    assert not torch.equal(products[0], x @ weight.T)
