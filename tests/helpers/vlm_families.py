"""A tiny random model and a batch of two sequences with images, for each family of vision-language models.

The batches are as the families' processors would make them, with the tokens of an image written out.
"""

import copy
from functools import partial

import tiny
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    ConvNextConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


Batch = dict[str, Tensor]
LAYERS = 3
PAD, BOS, EOS = 0, 1, 2
WORDS = range(3, 89)  # ids of ordinary text
INDICATORS = (89, 90, 91, 92, 93)  # Ovis' visual indicators
VIDEO, START, END, IMAGE = 94, 95, 96, tiny.IMAGE
PIXELS = 16  # of `tiny.vision_config`: two by two patches


def make(name: str, seed: int = 0) -> tuple[PreTrainedModel, Batch]:
    """The family's model, in eval mode and float32, and a batch that its forward takes as it is.

    Weights have a scale at which layers turn states by ten or twenty degrees; fresh models this narrow turn them by
    hundredths of a degree. The sequences differ in words and images, and one is padded.
    """
    torch.manual_seed(seed)
    if name in ("normalign_llava", "llava"):
        maker = tiny.model if name == "normalign_llava" else tiny.llava
        model, batch = maker(seed, text=_text()), _square(seed)
    else:
        make_batch, settings = _FAMILIES[name]
        config = CONFIG_MAPPING[name.removesuffix("_granite")](**copy.deepcopy(settings))
        model, batch = AutoModelForImageTextToText.from_config(config), make_batch(seed)
    # Norms' gains and biases leave their defaults too: a reference that forgot one of them would not show it else.
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            elif "visual_embeddings_table" in path:
                parameter.normal_()  # an image's token is a mean of many of these rows
            elif "embed_tokens" in path:
                parameter.normal_(0.0, 0.3).mul_(1.0 + 0.5 * torch.rand(len(parameter), 1))
            else:
                fan_in = parameter[0].numel() if parameter.dim() > 3 else parameter.shape[-1]
                parameter.normal_(0.0, fan_in**-0.5)
        for parameter in model.get_decoder().layers.parameters():
            if parameter.dim() > 1:
                parameter *= 0.5
    if name == "normalign_llava":
        model.align_projector_norm()
    return model.eval(), batch


def _sequences(first: list[int], second: list[int], seed: int) -> Batch:
    """Ids and mask of two sequences that show images so, of different words; the shorter is padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for image, before, after in ((first, 4, 7), (second, 2, 3)):
        words = torch.randint(WORDS.start, WORDS.stop, (before + after,), generator=generator).tolist()
        rows.append([BOS, *words[:before], *image, *words[before:], EOS])
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _bounded(tokens: int) -> list[int]:
    """Placeholders of an image between START and END."""
    return [START, *[IMAGE] * tokens, END]


def _pixels(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 100))


def _square(seed: int, bounded: bool = False, types: str | None = None) -> Batch:
    """One square image of 4 tokens per sequence; `types` is a tensor of zeros, but for Gemma 3's images."""
    image = _bounded(4) if bounded else [IMAGE] * 4
    batch = _sequences(image, image, seed)
    shown = (batch["input_ids"] == IMAGE).long() * bounded
    return {**batch, "pixel_values": _pixels(2, 3, PIXELS, PIXELS, seed=seed), **({types: shown} if types else {})}


def _tiled(seed: int) -> Batch:
    """Any-resolution images of LLaVA-NeXT and LLaVA-OneVision, 4 tokens to a tile.

    The first is one tile high and two wide: the small view's 4 tokens and 2 rows of 4 and a newline. The second is two
    by two tiles: 4 tokens and 4 rows of 4 and a newline. Missing tiles are zeros, as the image processor pads them.
    """
    batch = _sequences([IMAGE] * (4 + 2 * 5), [IMAGE] * (4 + 4 * 5), seed)
    views = _pixels(2, 5, 3, PIXELS, PIXELS, seed=seed)
    views[0, 3:] = 0.0
    return {**batch, "pixel_values": views, "image_sizes": torch.tensor([[16, 32], [32, 32]])}


def _grids(seed: int, patch_shape: tuple[int, ...] = (3 * 2 * 4 * 4,), typed: bool = True) -> Batch:
    """Images of 4 x 4 and 4 x 6 patches (channels, frames, height, width), of which two by two become one token."""
    batch, pixels = _sequences(_bounded(4), _bounded(6), seed), _pixels(16 + 24, *patch_shape, seed=seed)
    types = {"mm_token_type_ids": (batch["input_ids"] == IMAGE).long()} if typed else {}
    return {**batch, **types, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]])}


def _ovis(seed: int) -> Batch:
    """An image in one tile, and one in a small view and two tiles beside each other, each tile of 4 tokens."""
    start, end, prefix, column, _ = INDICATORS
    tile = [IMAGE] * 4
    tiles = [start, *tile, prefix, *tile, column, *tile, end]
    batch = _sequences([start, *tile, prefix, end], tiles, seed)
    return {**batch, "pixel_values": _pixels(4, 3, PIXELS, PIXELS, seed=seed)}


def _listed(seed: int) -> Batch:
    """Two images in the first sequence and one in the second, 4 tokens each, as Idefics3 and SmolVLM take them.

    The image that the second lacks is zeros; the mask leaves out the right half of the one that it has.
    """
    batch, images = _sequences(_bounded(4) * 2, _bounded(4), seed), _pixels(2, 2, 3, PIXELS, PIXELS, seed=seed)
    mask = torch.ones(2, 2, PIXELS, PIXELS, dtype=torch.long)
    images[1, 1], mask[1, 1] = 0.0, 0
    mask[1, 0, :, PIXELS // 2 :] = 0
    return {**batch, "pixel_values": images, "pixel_attention_mask": mask}


def _text(cls: type[PreTrainedConfig] = LlamaConfig, **kwargs) -> PreTrainedConfig:
    return tiny.text_config(cls=cls, num_hidden_layers=LAYERS, **kwargs)


def _rope(*sections: int, **kwargs) -> dict:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {**_SIZES, **_HEADS, **_SPECIAL, "rope_parameters": rope, **kwargs}


_INNER = dict(hidden_size=16, intermediate_size=24)
_TOWER = dict(**_INNER, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
_GRID_TOWER = dict(**_INNER, depth=2, num_heads=2, patch_size=4, out_hidden_size=tiny.WIDTH)
_QWEN2_TOWER = dict(depth=2, embed_dim=16, hidden_size=tiny.WIDTH, mlp_ratio=2, num_heads=2, patch_size=4)
_QWEN3_TOWER = dict(**_GRID_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
_OVIS_TOWER = {**_TOWER, "patch_size": 8, "vocab_size": 40, "num_visual_indicator_tokens": len(INDICATORS)}
_CONVOLUTIONS = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16, hidden_size=16)
_CLIP, _SIGLIP = tiny.vision_config("clip"), tiny.vision_config("siglip")

_SIZES = dict(vocab_size=tiny.VOCABULARY, hidden_size=tiny.WIDTH, intermediate_size=48, num_hidden_layers=LAYERS)
_HEADS = dict(num_attention_heads=2, num_key_value_heads=1)
_SPECIAL = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
_LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
_EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
_DENSE = dict(num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=1, num_mtp_layers=0)
_DEEPSEEK = DeepseekV3Config(**_SIZES, **_SPECIAL, **_LATENT, **_EXPERTS, **_DENSE)
_GRANITE = _text(GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.8)
_WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"])

_PINPOINTS = dict(image_token_index=IMAGE, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]])
_NEXT = dict(**_PINPOINTS, tie_word_embeddings=True)
_IMAGE_AND_VIDEO = dict(image_token_id=IMAGE, video_token_id=VIDEO)
_BOUNDARIES = dict(**_IMAGE_AND_VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_GLM = {f"{kind}_{end}_token_id": id for kind in ("image", "video") for end, id in (("start", START), ("end", END))}
_KIMI = dict(**_BOUNDARIES, projection_hidden_size=16)
_GEMMA = dict(image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END, mm_tokens_per_image=4)
_PALIGEMMA = dict(image_token_index=IMAGE, projection_dim=tiny.WIDTH, hidden_size=tiny.WIDTH)
_OVIS = dict(image_token_id=IMAGE, visual_indicator_token_ids=list(INDICATORS), vocab_size=tiny.VOCABULARY)


def _family(make_batch, vision, text, **others) -> tuple:
    return make_batch, dict(vision_config=vision, text_config=text, **others)


_FAMILIES = {
    "llava_next": _family(_tiled, _CLIP, _text(), **_NEXT),
    "llava_next_granite": _family(_tiled, _CLIP, _GRANITE, **_NEXT),
    "llava_onevision": _family(_tiled, _SIGLIP, _text(Qwen2Config), **_PINPOINTS, video_token_index=VIDEO),
    "qwen2_vl": _family(_grids, _QWEN2_TOWER, _rope(2, 3, 3), **_BOUNDARIES),
    "qwen2_5_vl": _family(
        _grids, dict(**_GRID_TOWER, window_size=16, fullatt_block_indexes=[1]), _rope(2, 3, 3), **_BOUNDARIES
    ),
    "qwen3_vl": _family(_grids, _QWEN3_TOWER, _rope(4, 2, 2, head_dim=16), **_BOUNDARIES),
    "glm4v": _family(_grids, dict(**_GRID_TOWER, image_size=16), _rope(2, 3, 3), **_IMAGE_AND_VIDEO, **_GLM),
    "internvl": _family(partial(_square, bounded=True), _TOWER, _text(Qwen2Config), image_token_id=IMAGE),
    "ovis2": _family(_ovis, _OVIS_TOWER, _text(Qwen2Config), **_OVIS, hidden_size=tiny.WIDTH),
    "idefics3": _family(_listed, _TOWER, _text(), image_token_id=IMAGE),
    "smolvlm": _family(_listed, _TOWER, _text(), image_token_id=IMAGE),
    "paligemma": _family(partial(_square, types="token_type_ids"), _SIGLIP, _text(GemmaConfig), **_PALIGEMMA),
    "gemma3": _family(
        partial(_square, bounded=True, types="token_type_ids"),
        SiglipVisionConfig(**_TOWER, vision_use_head=False),
        _text(Gemma3TextConfig, **_WINDOWS),
        **_GEMMA,
    ),
    "kimi_k25": _family(
        partial(_grids, patch_shape=(3, 4, 4), typed=False),
        dict(**_TOWER, pos_emb_height=4, pos_emb_width=4),
        _DEEPSEEK,
        **_KIMI,
    ),
    "fast_vlm": _family(_square, _CONVOLUTIONS, _text(Qwen2Config), image_token_index=IMAGE),
}
FAMILIES = ("normalign_llava", "llava", *_FAMILIES)
"""Names that `make` takes: each a `model_type`, and LLaVA-NeXT with Granite, which scales what enters its decoder."""
