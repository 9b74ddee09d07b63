"""Folders as published: the tiny models of `vlm_families` with the files of real processors."""

import json
from pathlib import Path
from typing import NamedTuple

import transformers
import vlm_families as families
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SQUARE_SIZE = {"height": 16, "width": 16}
SQUARE = {"size": SQUARE_SIZE}
CROPPED = {
    "size": {"shortest_edge": 16},
    "crop_size": SQUARE_SIZE,
}
PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
GRID = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
IDEFICS = {
    "size": {"longest_edge": 16},
    "max_image_size": {"longest_edge": 16},
    "do_image_splitting": False,
}
LLAVA = {
    "patch_size": 8,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
ONEVISION = {
    "num_image_tokens": 4,
    "vision_feature_select_strategy": "full",
}
FAST_VLM = {
    "patch_size": 8,
    "vision_feature_select_strategy": "full",
}
FOUR = {"image_seq_length": 4}
IDEFICS_FOUR = {"image_seq_len": 4}
# Names of the ids IMAGE, START, END and VIDEO of `vlm_families`.
QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
GLM = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>")
INTERN = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
FAKE = ("<image>", "<fake_token_around_image>", "<global-img>")
GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
ONEVISION_TOKENS = ("<image>", "<start>", "<end>", "<video>")
OVIS = ("<IMG_ATOM>", "<image>")
ONLY_IMAGE = ("<image>",)
LLAVA_NEXT_IMAGES = {**CROPPED, **PINPOINTS}
ONEVISION_IMAGES = {**SQUARE, **PINPOINTS}
PALIGEMMA_IMAGES = {**SQUARE, **FOUR}


class Parts(NamedTuple):
    """The parts of a processor: its class, its image processor, and the names of its tokens."""

    processor_class: str
    settings: dict
    image_class: str
    image_settings: dict
    tokens: tuple[str, ...]


FOLDERS = {
    "llava": Parts("LlavaProcessor", LLAVA, "CLIP", CROPPED, ONLY_IMAGE),
    "llava_next": Parts("LlavaNextProcessor", LLAVA, "LlavaNext", LLAVA_NEXT_IMAGES, ONLY_IMAGE),
    "llava_onevision": Parts(
        "LlavaOnevisionProcessor",
        ONEVISION,
        "LlavaOnevision",
        ONEVISION_IMAGES,
        ONEVISION_TOKENS,
    ),
    "qwen2_vl": Parts("Qwen2VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "qwen2_5_vl": Parts("Qwen2_5_VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "qwen3_vl": Parts("Qwen3VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "glm4v": Parts("Glm4vProcessor", {}, "Glm4v", GRID, GLM),
    "internvl": Parts("InternVLProcessor", FOUR, "GotOcr2", SQUARE, INTERN),
    "ovis2": Parts("Ovis2Processor", FOUR, "Ovis2", SQUARE, OVIS),
    "idefics3": Parts("Idefics3Processor", IDEFICS_FOUR, "Idefics3", IDEFICS, FAKE),
    "smolvlm": Parts("SmolVLMProcessor", IDEFICS_FOUR, "SmolVLM", IDEFICS, FAKE),
    "paligemma": Parts("PaliGemmaProcessor", {}, "Siglip", PALIGEMMA_IMAGES, ONLY_IMAGE),
    "gemma3": Parts("Gemma3Processor", FOUR, "Gemma3", SQUARE, GEMMA),
    "fast_vlm": Parts("LlavaProcessor", FAST_VLM, "CLIP", CROPPED, ONLY_IMAGE),
}

INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
NAMED = {
    "internvl": {
        "context_image_token": INTERN[0],
        "start_image_token": INTERN[1],
        "end_image_token": INTERN[2],
        "video_token": INTERN[3],
    },
    "gemma3": {
        "image_token": GEMMA[0],
        "boi_token": GEMMA[1],
        "eoi_token": GEMMA[2],
    },
}
"""Tokens that a tokenizer has under a name."""

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SHOWN = {
    "ovis2": "<image>",
    "gemma3": "<start_of_image>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "qwen2_vl": QWEN_IMAGE,
    "qwen2_5_vl": QWEN_IMAGE,
    "qwen3_vl": QWEN_IMAGE,
}
"""What a chat template prints for an image, if it is not the first token."""


def make_vocabulary(tokens) -> dict[str, int]:
    """The ids of `vlm_families`, whose words are letters here."""
    letters = [chr(code) for code in range(32, 32 + len(families.WORDS))]
    vocabulary = {
        "<pad>": families.PAD,
        "<s>": families.BOS,
        "</s>": families.EOS,
        "<unk>": 98,
    }
    vocabulary.update(zip(letters, families.WORDS, strict=True))
    vocabulary.update(zip(INDICATORS, families.INDICATORS, strict=True))
    token_ids = (families.IMAGE, families.START, families.END, families.VIDEO)
    vocabulary.update(zip(tokens, token_ids, strict=False))
    return vocabulary


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    tokens = FOLDERS[name].tokens
    backend = Tokenizer(models.BPE(vocab=make_vocabulary(tokens), merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=NAMED.get(name, {}),
    )
    tokenizer.add_tokens([*tokens, *INDICATORS], special_tokens=True)
    return tokenizer


def make_chat_template(name: str) -> str:
    image = SHOWN.get(name, FOLDERS[name].tokens[0])
    return (
        "{% for message in messages %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{image}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )


def save(name: str, folder: Path) -> str:
    """Writes a family's model and processor, which only their size tells from published ones."""
    model, _ = families.make(name)
    model.save_pretrained(folder)
    parts = FOLDERS[name]
    image_class = getattr(transformers, f"{parts.image_class}ImageProcessorPil")
    image_class(**parts.image_settings).save_pretrained(folder)
    make_tokenizer(name).save_pretrained(folder)

    settings = {"processor_class": parts.processor_class, **parts.settings}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(make_chat_template(name))
    return str(folder)
