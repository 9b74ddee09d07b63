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
    if name in ("normalign_llava", "llava"):
        maker = tiny.model if name == "normalign_llava" else tiny.llava
        model = maker(seed, text=_text())
        batch = _square(seed)
    else:
        make_batch, settings = _FAMILIES[name]
        config = CONFIG_MAPPING[name.removesuffix("_granite")](**copy.deepcopy(settings))
        model = transformers.AutoModelForImageTextToText.from_config(config)
        batch = make_batch(seed)
    # Gains and biases leave their defaults too: a reference that forgot one would not show it else.
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
    """Ids and mask of two sequences with these images, of different words, padded on the right."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for image, before, after in ((first, 4, 7), (second, 2, 3)):
        words = torch.randint(WORDS.start, WORDS.stop, (before + after,), generator=random).tolist()
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
    """One square image of 4 tokens per sequence; `types` are zeros, but for Gemma 3's images."""
    image = _bounded(4) if bounded else [IMAGE] * 4
    batch = _sequences(image, image, seed)
    shown = {types: (batch["input_ids"] == IMAGE).long() * bounded} if types else {}
    return {**batch, **shown, "pixel_values": _pixels(2, 3, PIXELS, PIXELS, seed=seed)}


def _tiled(seed: int) -> Batch:
    """Any-resolution images of LLaVA-NeXT and LLaVA-OneVision, 4 tokens to a tile.

    The first is one tile high and two wide: the small view's 4 tokens, and 2 rows of 4 and a
    newline. The second is two by two tiles: 4 tokens, and 4 rows of 4 and a newline. Missing tiles
    are zeros, as the image processor pads them.
    """
    batch = _sequences([IMAGE] * (4 + 2 * 5), [IMAGE] * (4 + 4 * 5), seed)
    views = _pixels(2, 5, 3, PIXELS, PIXELS, seed=seed)
    views[0, 3:] = 0.0
    return {**batch, "pixel_values": views, "image_sizes": torch.tensor([[16, 32], [32, 32]])}


def _grids(seed: int, patch_shape: tuple[int, ...] = (3 * 2 * 4 * 4,), typed: bool = True) -> Batch:
    """Images of 4 x 4 and 4 x 6 patches (channels, frames, height, width), a token for 2 x 2."""
    batch = _sequences(_bounded(4), _bounded(6), seed)
    if typed:
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 6]])
    return {**batch, "pixel_values": _pixels(16 + 24, *patch_shape, seed=seed)}


def _ovis(seed: int) -> Batch:
    """An image in one tile, and one in a small view and two tiles side by side; 4 tokens a tile."""
    start, end, prefix, column, _ = INDICATORS
    tile = [IMAGE] * 4
    tiles = [start, *tile, prefix, *tile, column, *tile, end]
    batch = _sequences([start, *tile, prefix, end], tiles, seed)
    return {**batch, "pixel_values": _pixels(4, 3, PIXELS, PIXELS, seed=seed)}


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
    return {**batch, "pixel_values": images, "pixel_attention_mask": mask}


def _text(cls=transformers.LlamaConfig, **kwargs):
    return tiny.text_config(cls=cls, num_hidden_layers=LAYERS, **kwargs)


def _rope(*sections: int, **kwargs) -> dict:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return {**_SIZES, **heads, "rope_parameters": rope, **kwargs}


_INNER = dict(hidden_size=16, intermediate_size=24)
_TOWER = dict(**_INNER, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
_GRID = dict(depth=2, num_heads=2, patch_size=4)
_GRID_TOWER = dict(**_INNER, **_GRID, out_hidden_size=tiny.WIDTH)
_QWEN2_TOWER = dict(**_GRID, embed_dim=16, hidden_size=tiny.WIDTH, mlp_ratio=2)
_QWEN2_5_TOWER = dict(**_GRID_TOWER, window_size=16, fullatt_block_indexes=[1])
_QWEN3_TOWER = dict(**_GRID_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
_OVIS_TOWER = _TOWER | dict(patch_size=8, vocab_size=40, num_visual_indicator_tokens=5)
_KIMI_TOWER = dict(**_TOWER, pos_emb_height=4, pos_emb_width=4)
_GEMMA_TOWER = transformers.SiglipVisionConfig(**_TOWER, vision_use_head=False)
_STAGES = dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
_CONVOLUTIONS = transformers.ConvNextConfig(**_STAGES, image_size=16, hidden_size=16)
_CLIP = tiny.vision_config("clip")
_SIGLIP = tiny.vision_config("siglip")

_SIZES = dict(vocab_size=tiny.VOCABULARY, hidden_size=tiny.WIDTH, num_hidden_layers=LAYERS)
_SIZES |= dict(intermediate_size=48, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
_LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8)
_LATENT |= dict(v_head_dim=16, num_attention_heads=2, num_key_value_heads=2)
_EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
_EXPERTS |= dict(n_group=1, topk_group=1, first_k_dense_replace=1, num_mtp_layers=0)
_DEEPSEEK = transformers.DeepseekV3Config(**_SIZES, **_LATENT, **_EXPERTS)
_GRANITE = _text(transformers.GraniteConfig, embedding_multiplier=3.0, residual_multiplier=0.8)
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA3 = _text(transformers.Gemma3TextConfig, sliding_window=8, layer_types=_LAYER_TYPES)
_QWEN2 = _text(transformers.Qwen2Config)

_PINPOINTS = dict(image_token_index=IMAGE, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]])
_NEXT = dict(**_PINPOINTS, tie_word_embeddings=True)
_IMAGE_AND_VIDEO = dict(image_token_id=IMAGE, video_token_id=VIDEO)
_BOUNDARIES = dict(**_IMAGE_AND_VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_GLM = dict(**_IMAGE_AND_VIDEO, image_start_token_id=START, image_end_token_id=END)
_GLM |= dict(video_start_token_id=START, video_end_token_id=END)
_KIMI = dict(**_BOUNDARIES, projection_hidden_size=16)
_GEMMA = dict(image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END)
_PALIGEMMA = dict(image_token_index=IMAGE, projection_dim=tiny.WIDTH, hidden_size=tiny.WIDTH)
_OVIS = dict(image_token_id=IMAGE, visual_indicator_token_ids=[*INDICATORS], hidden_size=tiny.WIDTH)


def _family(make_batch, vision, text, **others) -> tuple:
    return make_batch, dict(vision_config=vision, text_config=text, **others)


_bounded_square = partial(_square, bounded=True)
_untyped_grids = partial(_grids, patch_shape=(3, 4, 4), typed=False)
_typed_square = partial(_square, types="token_type_ids")
_gemma3_square = partial(_typed_square, bounded=True)
_FAMILIES = {
    "llava_next": _family(_tiled, _CLIP, _text(), **_NEXT),
    "llava_next_granite": _family(_tiled, _CLIP, _GRANITE, **_NEXT),
    "llava_onevision": _family(_tiled, _SIGLIP, _QWEN2, **_PINPOINTS, video_token_index=VIDEO),
    "qwen2_vl": _family(_grids, _QWEN2_TOWER, _rope(2, 3, 3), **_BOUNDARIES),
    "qwen2_5_vl": _family(_grids, _QWEN2_5_TOWER, _rope(2, 3, 3), **_BOUNDARIES),
    "qwen3_vl": _family(_grids, _QWEN3_TOWER, _rope(4, 2, 2, head_dim=16), **_BOUNDARIES),
    "glm4v": _family(_grids, dict(**_GRID_TOWER, image_size=16), _rope(2, 3, 3), **_GLM),
    "internvl": _family(_bounded_square, _TOWER, _QWEN2, image_token_id=IMAGE),
    "ovis2": _family(_ovis, _OVIS_TOWER, _QWEN2, **_OVIS, vocab_size=tiny.VOCABULARY),
    "idefics3": _family(_listed, _TOWER, _text(), image_token_id=IMAGE),
    "smolvlm": _family(_listed, _TOWER, _text(), image_token_id=IMAGE),
    "paligemma": _family(_typed_square, _SIGLIP, _text(transformers.GemmaConfig), **_PALIGEMMA),
    "gemma3": _family(_gemma3_square, _GEMMA_TOWER, _GEMMA3, **_GEMMA, mm_tokens_per_image=4),
    "kimi_k25": _family(_untyped_grids, _KIMI_TOWER, _DEEPSEEK, **_KIMI),
    "fast_vlm": _family(_square, _CONVOLUTIONS, _QWEN2, image_token_index=IMAGE),
}
FAMILIES = ("normalign_llava", "llava", *_FAMILIES)
"""Names for `make`: model types, and LLaVA-NeXT with Granite, whose decoder scales its input."""
