# SPDX-License-Identifier: Apache-2.0
"""Folders as they are published: the tiny models of `vlm_families` with the files of their real processors."""

import json
from pathlib import Path

import transformers
import vlm_batches as batches
import vlm_families
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SQUARE = {"height": 16, "width": 16}
CROPPED = {"size": {"shortest_edge": 16}, "crop_size": SQUARE}
PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
GRID = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
IDEFICS = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": False}
LLAVA = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
FULL = {"vision_feature_select_strategy": "full"}
# Names of the ids IMAGE, START, END and VIDEO of `vlm_batches`.
QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
FAKE = ("<image>", "<fake_token_around_image>", "<global-img>")
FOLDERS = {
    "llava": ("LlavaProcessor", LLAVA, "CLIP", CROPPED, ("<image>",)),
    "llava_next": ("LlavaNextProcessor", LLAVA, "LlavaNext", {**CROPPED, **PINPOINTS}, ("<image>",)),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        {"num_image_tokens": 4, **FULL},
        "LlavaOnevision",
        {"size": SQUARE, **PINPOINTS},
        ("<image>", "<start>", "<end>", "<video>"),
    ),
    "qwen2_vl": ("Qwen2VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "qwen3_vl": ("Qwen3VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "glm4v": (
        "Glm4vProcessor",
        {},
        "Glm4v",
        GRID,
        ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"),
    ),
    "internvl": (
        "InternVLProcessor",
        {"image_seq_length": 4},
        "GotOcr2",
        {"size": SQUARE},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    ),
    "ovis2": ("Ovis2Processor", {"image_seq_length": 4}, "Ovis2", {"size": SQUARE}, ("<IMG_ATOM>", "<image>")),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}, "Idefics3", IDEFICS, FAKE),
    "smolvlm": ("SmolVLMProcessor", {"image_seq_len": 4}, "SmolVLM", IDEFICS, FAKE),
    "paligemma": ("PaliGemmaProcessor", {}, "Siglip", {"size": SQUARE, "image_seq_length": 4}, ("<image>",)),
    "gemma3": (
        "Gemma3Processor",
        {"image_seq_length": 4},
        "Gemma3",
        {"size": SQUARE},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    ),
    "fast_vlm": ("LlavaProcessor", {"patch_size": 8, **FULL}, "CLIP", CROPPED, ("<image>",)),
}
"""The processor's class and settings, its image processor's, and the names of its tokens."""

INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
NAMED = {
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
}
SHOWN = {"ovis2": "<image>", "gemma3": "<start_of_image>", "glm4v": "<|begin_of_image|><|image|><|end_of_image|>"}
SHOWN |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>")


def save(name: str, folder: Path) -> str:
    """Writes model and processor of a family, which can be those of any published checkpoint but for their size."""
    model, _ = vlm_families.make(name)
    model.save_pretrained(folder)
    cls, settings, image_processor, image_settings, tokens = FOLDERS[name]
    getattr(transformers, f"{image_processor}ImageProcessorPil")(**image_settings).save_pretrained(folder)
    letters = [chr(code) for code in range(32, 32 + len(batches.WORDS))]
    ids = {"<pad>": batches.PAD, "<s>": batches.BOS, "</s>": batches.EOS, "<unk>": 98}
    ids |= dict(zip(letters, batches.WORDS, strict=True)) | dict(zip(INDICATORS, batches.INDICATORS, strict=True))
    ids |= zip(tokens, (batches.IMAGE, batches.START, batches.END, batches.VIDEO), strict=False)
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens=NAMED.get(name, {}),
    )  # fmt: skip
    made.add_tokens([*tokens, *INDICATORS], special_tokens=True)
    made.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": cls, **settings}))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{SHOWN.get(name, tokens[0])}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    return str(folder)
