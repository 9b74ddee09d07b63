"""Folders as published: the tiny models of `vlm_families` with the files of real processors."""

import json
from pathlib import Path

import transformers
import vlm_families as families
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


SQUARE = {"size": {"height": 16, "width": 16}}
CROPPED = {"size": {"shortest_edge": 16}, "crop_size": SQUARE["size"]}
PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
EDGES = {"shortest_edge": 64, "longest_edge": 1024}
GRID = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": EDGES}
EDGE = {"longest_edge": 16}
IDEFICS = {"size": EDGE, "max_image_size": EDGE, "do_image_splitting": False}
LLAVA = {"patch_size": 8, "num_additional_image_tokens": 1}
LLAVA |= {"vision_feature_select_strategy": "default"}
FULL = {"vision_feature_select_strategy": "full"}
FOUR = {"image_seq_length": 4}
# Names of the ids IMAGE, START, END and VIDEO of `vlm_families`.
QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
GLM = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>")
INTERN = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
FAKE = ("<image>", "<fake_token_around_image>", "<global-img>")
GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
ONEVISION = {"num_image_tokens": 4, **FULL}
FOLDERS = {
    "llava": ("LlavaProcessor", LLAVA, "CLIP", CROPPED, ("<image>",)),
    "llava_next": ("LlavaNextProcessor", LLAVA, "LlavaNext", CROPPED | PINPOINTS, ("<image>",)),
    "llava_onevision": (
        "LlavaOnevisionProcessor", ONEVISION, "LlavaOnevision", SQUARE | PINPOINTS,
        ("<image>", "<start>", "<end>", "<video>"),
    ),
    "qwen2_vl": ("Qwen2VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "qwen3_vl": ("Qwen3VLProcessor", {}, "Qwen2VL", GRID, QWEN),
    "glm4v": ("Glm4vProcessor", {}, "Glm4v", GRID, GLM),
    "internvl": ("InternVLProcessor", FOUR, "GotOcr2", SQUARE, INTERN),
    "ovis2": ("Ovis2Processor", FOUR, "Ovis2", SQUARE, ("<IMG_ATOM>", "<image>")),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}, "Idefics3", IDEFICS, FAKE),
    "smolvlm": ("SmolVLMProcessor", {"image_seq_len": 4}, "SmolVLM", IDEFICS, FAKE),
    "paligemma": ("PaliGemmaProcessor", {}, "Siglip", {**SQUARE, **FOUR}, ("<image>",)),
    "gemma3": ("Gemma3Processor", FOUR, "Gemma3", SQUARE, GEMMA),
    "fast_vlm": ("LlavaProcessor", {"patch_size": 8, **FULL}, "CLIP", CROPPED, ("<image>",)),
}  # fmt: skip
"""The processor's class and settings, its image processor's, and the names of its tokens."""

INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
INTERN_NAMES = ("context_image_token", "start_image_token", "end_image_token", "video_token")
NAMED = {
    "internvl": dict(zip(INTERN_NAMES, INTERN, strict=True)),
    "gemma3": dict(image_token=GEMMA[0], boi_token=GEMMA[1], eoi_token=GEMMA[2]),
}
SHOWN = {"ovis2": "<image>", "gemma3": "<start_of_image>"}
SHOWN["glm4v"] = "<|begin_of_image|><|image|><|end_of_image|>"
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SHOWN |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), QWEN_IMAGE)


def save(name: str, folder: Path) -> str:
    """Writes a family's model and processor, which only their size tells from published ones."""
    model, _ = families.make(name)
    model.save_pretrained(folder)
    cls, settings, kind, image_settings, tokens = FOLDERS[name]
    image_processor = getattr(transformers, f"{kind}ImageProcessorPil")(**image_settings)
    image_processor.save_pretrained(folder)
    letters = [chr(code) for code in range(32, 32 + len(families.WORDS))]
    ids = {"<pad>": families.PAD, "<s>": families.BOS, "</s>": families.EOS, "<unk>": 98}
    ids |= zip(letters, families.WORDS, strict=True)
    ids |= zip(INDICATORS, families.INDICATORS, strict=True)
    ids |= zip(tokens, (families.IMAGE, families.START, families.END, families.VIDEO), strict=False)
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    special["extra_special_tokens"] = NAMED.get(name, {})
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.add_tokens([*tokens, *INDICATORS], special_tokens=True)
    made.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": cls, **settings}))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{SHOWN.get(name, tokens[0])}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    return str(folder)
