"""A tiny random model and a batch of two sequences with images, of many vision-language families.

Batches are as a family's processor would make them, with the tokens of an image written out.
"""

import copy
from functools import partial

import tiny
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


Batch = dict[str, Tensor]
LAYERS = 3
PAD = 0
BOS = 1
EOS = 2
WORDS = range(3, 89)  # ids of ordinary text
INDICATORS = (89, 90, 91, 92, 93)  # Ovis' visual indicators
VIDEO = 94
START = 95
END = 96
IMAGE = tiny.IMAGE
PIXELS = 16  # of `tiny.vision_config`: two by two patches


def make(name: str, seed: int = 0) -> tuple[transformers.PreTrainedModel, Batch]:
    """The family's model, in eval mode and float32, and a batch that its forward takes as it is.

    Weights have a scale at which layers turn states by ten or twenty degrees; fresh models this
    narrow turn them by hundredths of a degree. Sequences differ in words and images; one is padded.
    """
    torch.manual_seed(seed)
    if name == "normalign_llava":
        model = tiny.model(seed, text=_text())
        batch = _square(seed)
    elif name == "llava":
        model = tiny.llava(seed, text=_text())
        batch = _square(seed)
    else:
        make_batch, settings = _FAMILIES[name]
        config_class = CONFIG_MAPPING[name.removesuffix("_granite")]
        config = config_class(**copy.deepcopy(settings))
        model = transformers.AutoModelForImageTextToText.from_config(config)
        batch = make_batch(seed)
    _scale_weights(model)
    if name == "normalign_llava":
        model.align_projector_norm()
    return model.eval(), batch


@torch.no_grad()
def _scale_weights(model):
    # Gains and biases leave their defaults too: a reference that forgot one would not show it else.
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn_like(parameter)
        elif "visual_embeddings_table" in parameter_name:
            parameter.normal_()  # an image's token is a mean of many of these rows
        elif "embed_tokens" in parameter_name:
            parameter.normal_(0.0, 0.3)
            parameter.mul_(1.0 + 0.5 * torch.rand(len(parameter), 1))
        else:
            fan_in = parameter.shape[-1]
            if parameter.dim() > 3:
                fan_in = parameter[0].numel()
            parameter.normal_(0.0, fan_in**-0.5)
    for parameter in model.get_decoder().layers.parameters():
        if parameter.dim() > 1:
            parameter *= 0.5


def _sequences(first: list[int], second: list[int], seed: int) -> Batch:
    """Ids and mask of two sequences with these images, of different words, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    first_sequence = _sequence(first, 4, 7, generator)
    second_sequence = _sequence(second, 2, 3, generator)
    longest = max(len(first_sequence), len(second_sequence))
    padded_ids = []
    masks = []
    for sequence in (first_sequence, second_sequence):
        padding = longest - len(sequence)
        padded_ids.append(sequence + [PAD] * padding)
        masks.append([1] * len(sequence) + [0] * padding)
    return {
        "input_ids": torch.tensor(padded_ids),
        "attention_mask": torch.tensor(masks),
    }


def _sequence(image: list[int], before: int, after: int, generator) -> list[int]:
    """The ids of an image between so many words."""
    shape = (before + after,)
    words = torch.randint(WORDS.start, WORDS.stop, shape, generator=generator).tolist()
    return [BOS, *words[:before], *image, *words[before:], EOS]


def _bounded(tokens: int) -> list[int]:
    """Placeholders of an image between START and END."""
    return [START, *[IMAGE] * tokens, END]


def _pixels(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    return torch.randn(*shape, generator=generator)


def _is_image(batch: Batch) -> Tensor:
    """1 for tokens of images, 0 for others."""
    return (batch["input_ids"] == IMAGE).long()


def _square(seed: int, bounded: bool = False, types: str | None = None) -> Batch:
    """One square image of 4 tokens per sequence; `types` are zeros, but for Gemma 3's images."""
    image = [IMAGE] * 4
    if bounded:
        image = _bounded(4)
    batch = _sequences(image, image, seed)
    if types:
        batch[types] = _is_image(batch) * bounded
    batch["pixel_values"] = _pixels(2, 3, PIXELS, PIXELS, seed=seed)
    return batch


def _tiled(seed: int) -> Batch:
    """Any-resolution images of LLaVA-NeXT and LLaVA-OneVision, 4 tokens to a tile.

    The first is one tile high and two wide: the small view's 4 tokens, and 2 rows of 4 and a
    newline. The second is two by two tiles: 4 tokens, and 4 rows of 4 and a newline. Missing tiles
    are zeros, as the image processor pads them.
    """
    small_view = 4
    low_image = [IMAGE] * (small_view + 2 * 5)
    high_image = [IMAGE] * (small_view + 4 * 5)
    batch = _sequences(low_image, high_image, seed)
    views = _pixels(2, 5, 3, PIXELS, PIXELS, seed=seed)
    views[0, 3:] = 0.0
    batch["pixel_values"] = views
    batch["image_sizes"] = torch.tensor([[16, 32], [32, 32]])
    return batch


def _grids(seed: int, patch_shape: tuple[int, ...] = (3 * 2 * 4 * 4,), typed: bool = True) -> Batch:
    """Images of 4 x 4 and 4 x 6 patches (channels, frames, height, width), a token for 2 x 2."""
    batch = _sequences(_bounded(4), _bounded(6), seed)
    if typed:
        batch["mm_token_type_ids"] = _is_image(batch)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 6]])
    patch_count = 4 * 4 + 4 * 6
    batch["pixel_values"] = _pixels(patch_count, *patch_shape, seed=seed)
    return batch


def _ovis(seed: int) -> Batch:
    """An image in one tile, and one in a small view and two tiles side by side; 4 tokens a tile."""
    start, end, prefix, column, _ = INDICATORS
    tile = [IMAGE] * 4
    one_tile = [start, *tile, prefix, end]
    two_tiles = [start, *tile, prefix, *tile, column, *tile, end]
    batch = _sequences(one_tile, two_tiles, seed)
    batch["pixel_values"] = _pixels(4, 3, PIXELS, PIXELS, seed=seed)
    return batch


def _listed(seed: int) -> Batch:
    """Two images in the first sequence and one in the second, 4 tokens each (Idefics3, SmolVLM).

    The image that the second lacks is zeros; the mask leaves out the right half of its own.
    """
    batch = _sequences(_bounded(4) * 2, _bounded(4), seed)
    images = _pixels(2, 2, 3, PIXELS, PIXELS, seed=seed)
    mask = torch.ones(2, 2, PIXELS, PIXELS, dtype=torch.long)
    images[1, 1] = 0.0
    mask[1, 1] = 0
    mask[1, 0, :, PIXELS // 2 :] = 0
    batch["pixel_values"] = images
    batch["pixel_attention_mask"] = mask
    return batch


def _text(cls=transformers.LlamaConfig, **kwargs):
    return tiny.text_config(cls=cls, num_hidden_layers=LAYERS, **kwargs)


_SIZES = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": tiny.WIDTH,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def _rope(*sections: int, **kwargs) -> dict:
    """A language model with rotary positions in three dimensions."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": list(sections),
    }
    return {
        **_SIZES,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": rope,
        **kwargs,
    }


_INNER = {
    "hidden_size": 16,
    "intermediate_size": 24,
}
_TOWER = {
    **_INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_GRID = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
}
_GRID_TOWER = {
    **_INNER,
    **_GRID,
    "out_hidden_size": tiny.WIDTH,
}
_QWEN2_TOWER = {
    **_GRID,
    "embed_dim": 16,
    "hidden_size": tiny.WIDTH,
    "mlp_ratio": 2,
}
_QWEN2_5_TOWER = {
    **_GRID_TOWER,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_QWEN3_TOWER = {
    **_GRID_TOWER,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_GLM_TOWER = {
    **_GRID_TOWER,
    "image_size": 16,
}
_OVIS_TOWER = {
    **_TOWER,
    "patch_size": 8,
    "vocab_size": 40,
    "num_visual_indicator_tokens": 5,
}
_KIMI_TOWER = {
    **_TOWER,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_GEMMA_TOWER = transformers.SiglipVisionConfig(**_TOWER, vision_use_head=False)
_CONVOLUTIONS = transformers.ConvNextConfig(
    hidden_sizes=[8, 16],
    depths=[1, 1],
    num_stages=2,
    image_size=16,
    hidden_size=16,
)
_CLIP = tiny.vision_config("clip")
_SIGLIP = tiny.vision_config("siglip")

_DEEPSEEK = transformers.DeepseekV3Config(
    **_SIZES,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    num_mtp_layers=0,
)
_GRANITE = _text(
    transformers.GraniteConfig,
    embedding_multiplier=3.0,
    residual_multiplier=0.8,
)
_GEMMA3 = _text(
    transformers.Gemma3TextConfig,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
_GEMMA1 = _text(transformers.GemmaConfig)
_QWEN2 = _text(transformers.Qwen2Config)

_IMAGE_INDEX = {"image_token_index": IMAGE}
_IMAGE_ID = {"image_token_id": IMAGE}
_PINPOINTS = {
    **_IMAGE_INDEX,
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
}
_NEXT = {
    **_PINPOINTS,
    "tie_word_embeddings": True,
}
_ONEVISION = {
    **_PINPOINTS,
    "video_token_index": VIDEO,
}
_BOUNDARIES = {
    **_IMAGE_ID,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_GLM = {
    **_IMAGE_ID,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": START,
    "video_end_token_id": END,
}
_KIMI = {
    **_BOUNDARIES,
    "projection_hidden_size": 16,
}
_GEMMA = {
    **_IMAGE_INDEX,
    "boi_token_index": START,
    "eoi_token_index": END,
    "mm_tokens_per_image": 4,
}
_PALIGEMMA = {
    **_IMAGE_INDEX,
    "projection_dim": tiny.WIDTH,
    "hidden_size": tiny.WIDTH,
}
_OVIS = {
    **_IMAGE_ID,
    "visual_indicator_token_ids": [*INDICATORS],
    "hidden_size": tiny.WIDTH,
    "vocab_size": tiny.VOCABULARY,
}


def _family(make_batch, vision, text, **others) -> tuple:
    settings = {
        "vision_config": vision,
        "text_config": text,
        **others,
    }
    return make_batch, settings


_bounded_square = partial(_square, bounded=True)
_untyped_grids = partial(_grids, patch_shape=(3, 4, 4), typed=False)
_typed_square = partial(_square, types="token_type_ids")
_gemma3_square = partial(_typed_square, bounded=True)
_FAMILIES = {
    "llava_next": _family(_tiled, _CLIP, _text(), **_NEXT),
    "llava_next_granite": _family(_tiled, _CLIP, _GRANITE, **_NEXT),
    "llava_onevision": _family(_tiled, _SIGLIP, _QWEN2, **_ONEVISION),
    "qwen2_vl": _family(_grids, _QWEN2_TOWER, _rope(2, 3, 3), **_BOUNDARIES),
    "qwen2_5_vl": _family(_grids, _QWEN2_5_TOWER, _rope(2, 3, 3), **_BOUNDARIES),
    "qwen3_vl": _family(_grids, _QWEN3_TOWER, _rope(4, 2, 2, head_dim=16), **_BOUNDARIES),
    "glm4v": _family(_grids, _GLM_TOWER, _rope(2, 3, 3), **_GLM),
    "internvl": _family(_bounded_square, _TOWER, _QWEN2, **_IMAGE_ID),
    "ovis2": _family(_ovis, _OVIS_TOWER, _QWEN2, **_OVIS),
    "idefics3": _family(_listed, _TOWER, _text(), **_IMAGE_ID),
    "smolvlm": _family(_listed, _TOWER, _text(), **_IMAGE_ID),
    "paligemma": _family(_typed_square, _SIGLIP, _GEMMA1, **_PALIGEMMA),
    "gemma3": _family(_gemma3_square, _GEMMA_TOWER, _GEMMA3, **_GEMMA),
    "kimi_k25": _family(_untyped_grids, _KIMI_TOWER, _DEEPSEEK, **_KIMI),
    "fast_vlm": _family(_square, _CONVOLUTIONS, _QWEN2, **_IMAGE_INDEX),
}
"""What makes a family's batch, and its configuration."""

FAMILIES = ("normalign_llava", "llava", *_FAMILIES)
"""Names for `make`: model types, and LLaVA-NeXT with Granite, whose decoder scales its input."""
