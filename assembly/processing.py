# SPDX-License-Identifier: Apache-2.0
"""The paper's arms; a stock LlavaProcessor with as many image tokens as the encoder has features.

Its tokenizer adds no tokens: `processor(text)` would have them, and training, TRL, vLLM and
`tokenizer.apply_chat_template` would not. What it put first the chat template prints, as those of
Llama 2 and 3, Gemma and Mistral do; those of TinyLlama, Zephyr and LLaVA 1.5 get it. What it put
last is left out, since it would end a prompt.
"""

import copy
import logging
import os
from tempfile import TemporaryDirectory

from tokenizers.processors import TemplateProcessing
from transformers import (
    BaseImageProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..checkpoint.prompts import fix_date
from ..configuration_normalign_llava import NormAlignLlavaConfig
from .chat_template import check_texts, printing_first


logger = logging.getLogger(__name__)

VISION_ENCODERS = dict.fromkeys(("clip_vision_model", "dinov2", "dinov2_with_registers", "vit"), 1)
VISION_ENCODERS["siglip_vision_model"] = 0
"""Vision encoders by `model_type`, with the number of class tokens before the patches."""

ARMS = {
    "none": {"projector_norm": "none"},
    "unit": {"projector_gain_init": "one", "gradient_compensation": "none"},
    "aligned": {"gradient_compensation": "none"},
    "gwc": {},
}
"""Arms as configuration: no norm; gain 1; aligned without compensation; with it (the default)."""

ARM_FIELDS = ("projector_norm", "projector_gain_init", "gradient_compensation")
"""The fields of the configuration that an arm sets."""


def arm_of(config: NormAlignLlavaConfig) -> str:
    """The paper's arm that a configuration is."""
    if config.projector_norm == "none":
        return "none"
    if config.projector_gain_init == "one" and config.gradient_compensation == "none":
        return "unit"
    return "gwc" if config.gradient_compensation == "global" else "aligned"


def check_feature_layer(feature_layer: int | list[int], config: PreTrainedConfig) -> None:
    """Raises ValueError if the encoder has no such hidden state; -1 is the last layer's output."""
    states = config.num_hidden_layers + 1
    if feature_layer == 0:
        raise ValueError(f"LLaVA reads feature_layer 0 as no layer. The embeddings are {-states}.")
    for layer in [feature_layer] if isinstance(feature_layer, int) else feature_layer:
        if not -states <= layer < states:
            known = f"0 to {states - 1}, or {-states} to -1"
            raise ValueError(f"feature_layer {layer} does not exist. Hidden states are {known}.")


def pad_left(tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the padding side to left, which generating from a batch needs, also for saving."""
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # saved by the latter


def settle(processor: LlavaProcessor) -> None:
    """Makes the tokenizer pad left and add no tokens; the chat template prints what it put first.

    Prompts then tell the same date on any day: see [`fix_date`]. Without a chat template it only
    pads left; a processor that is settled does not change. What was
    put first is kept as `text_start` in `tokenizer_config.json`, for [`text_tokenizer`]. Raises
    ValueError if a conversation's tokens would differ from those before, or if the tokenizer drops
    letters without a token.
    """
    tokenizer = processor.tokenizer
    pad_left(tokenizer)
    fix_date(processor)
    if tokenizer(["a\ua66eb"]).char_to_token(0, 1) is None:  # a letter of one manuscript
        raise ValueError("The tokenizer drops letters that it does not know. Give it an unk_token.")
    start, end = _added(processor)
    template, added = processor.chat_template, "".join(start)
    if not template or not start + end:
        return
    texts = check_texts(template, tokenizer.special_tokens_map)
    printed = {text.lstrip().startswith(added) for text in texts}
    if start and printed != {True}:
        expected = [ids[: len(ids) - len(end)] for ids in map(tokenizer.encode, texts)]
        tokens = {  # tokenizers with a space before a text have none after a special token
            first: [tokenizer.encode(first + text, add_special_tokens=False) for text in texts]
            for first in (added, f"{added} ")
        }
        first = next((first for first in tokens if tokens[first] == expected), None)
        if first is None or True in printed:
            raise ValueError(
                f"The tokenizer puts {added!r} before a text, and the chat template prints it "
                "before some only, or the text would then have other tokens. Build the checkpoint "
                "with `normalign build --chat-template FILE`, a template that prints it before all."
            )
        template = printing_first(template, first, processor.image_token)
        processor.chat_template = tokenizer.chat_template = template
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                f"The chat template now prints {added!r}, which the tokenizer put before a text. "
                "If this checkpoint is trained already, it was trained without it."
            )
    tokenizer.add_bos_token = tokenizer.add_eos_token = False
    tokenizer.init_kwargs["text_start"] = start
    if any(_added(processor)):
        raise ValueError(f"The tokenizer adds {start + end} to texts whatever is set. Use another.")


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer for text without a chat template, which starts as the language model had it."""
    if start := tokenizer.init_kwargs.get("text_start"):
        tokenizer = copy.deepcopy(tokenizer)
        tokens = [*zip(start, tokenizer.convert_tokens_to_ids(start), strict=True)]
        processor = TemplateProcessing([*start, "$A"], special_tokens=tokens)
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def _added(processor: LlavaProcessor) -> tuple[list[str], list[str]]:
    """The tokens that the tokenizer puts before and after a text."""
    tokenizer, token = processor.tokenizer, processor.image_token
    text, ids = tokenizer.encode(token, add_special_tokens=False), tokenizer.encode(token)
    at = next(index for index in range(len(ids)) if ids[index : index + len(text)] == text)
    start, end = ids[:at], ids[at + len(text) :]
    return tokenizer.convert_ids_to_tokens(start), tokenizer.convert_ids_to_tokens(end)


def make_processor(
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    vision_config: PreTrainedConfig,
    select_strategy: str | None = None,
) -> LlavaProcessor:
    """A [`LlavaProcessor`] for this encoder and tokenizer, [settled][`settle`], with a pad token.

    An image processor without `crop_size` gets one, from which serving engines compute the number
    of image tokens. `select_strategy` is `"default"`, `"full"`, or None for what fits the encoder.
    """
    class_tokens = VISION_ENCODERS[vision_config.model_type]
    strategy = select_strategy or ("default" if class_tokens else "full")
    if strategy == "default" and not class_tokens:
        kind = vision_config.model_type
        fault = f"select_strategy 'default' drops the first token, but {kind} has no class token"
        raise ValueError(f"{fault}: a patch of the image would be lost. Use 'full'.")
    if not image_processor.crop_size:
        size = image_processor.size
        if not size.get("height") or not size.get("width"):
            raise ValueError(f"The image processor's size {dict(size)} has no height and width.")
        image_processor.crop_size = {"height": size["height"], "width": size["width"]}
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # Other classes make their tokenizer anew when loaded, and not all that this takes is saved:
        # Zephyr's `legacy` space before a text would be lost.
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=vision_config.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=class_tokens + getattr(vision_config, "num_register_tokens", 0),
        chat_template=tokenizer.chat_template,
    )
    settle(processor)
    return processor
