"""Tiny pre-trained parts on disk: encoders with image processors, language models with tokenizers and templates."""

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    BitImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)


CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
)
ENCODERS = {
    "clip": lambda: CLIPVisionModel(tiny.vision_config("clip")),
    "clip_full": lambda: CLIPModel(
        CLIPConfig(
            vision_config=SIZES,
            text_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50),
        )
    ),
    "siglip": lambda: SiglipVisionModel(tiny.vision_config("siglip")),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZES)),
    "registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES, num_register_tokens=4)),
    "vit": lambda: ViTModel(ViTConfig(**SIZES), add_pooling_layer=False),
}
FEATURES = {**dict.fromkeys(ENCODERS, 4), "registers": 8}  # 2 x 2 patches, 4 registers


def image_processor(kind):
    square = {"height": 16, "width": 16}
    if kind == "siglip":
        return SiglipImageProcessor(size=square)
    if kind == "vit":
        return ViTImageProcessor(size=square)
    cls = CLIPImageProcessor if kind.startswith("clip") else BitImageProcessor
    return cls(size={"shortest_edge": 16}, crop_size=square)


def vision(folder, kind="clip"):
    torch.manual_seed(1)
    ENCODERS[kind]().save_pretrained(folder)
    image_processor(kind).save_pretrained(folder)
    return str(folder)


def tokenizer(chat_template=CHATML, extra=()):
    special = ["<unk>", "<|im_start|>", "<|im_end|>", *extra]
    letters = [chr(c) for c in range(32, 123)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|im_end|>", extra_special_tokens=special[1:2]
    )
    made.chat_template = chat_template
    return made


def llava(folder, model):
    """A LLaVA checkpoint with the weights of `model`, whose image token is set."""
    model.config.image_token_index = 3
    model.save_pretrained(folder)
    image_token = tokenizer(extra=("<image>",))
    image_token.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    LlavaProcessor(
        image_processor=image_processor("clip"),
        tokenizer=image_token,
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=CHATML,
    ).save_pretrained(folder)
    return str(folder)


def language(folder, tied=True, cls=LlamaConfig, rows=None, chat_template=CHATML, seed=2, **kwargs):
    made = tokenizer(chat_template)
    torch.manual_seed(seed)
    config = tiny.text_config(tied=tied, cls=cls, vocab_size=rows or len(made), **kwargs)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10.0)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)
