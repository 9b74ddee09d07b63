"""Tiny parts on disk: encoders with image processors, language models with tokenizers."""

import tiny
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, AutoModel, LlamaConfig


CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
CLIP = transformers.CLIPConfig(vision_config=tiny.ENCODER, text_config=TEXT)
REGISTERS = transformers.Dinov2WithRegistersConfig(**tiny.ENCODER, num_register_tokens=4)
VIT = transformers.ViTConfig(**tiny.ENCODER)
ENCODERS = {
    "clip": lambda: AutoModel.from_config(tiny.vision_config("clip")),
    "clip_full": lambda: AutoModel.from_config(CLIP),
    "siglip": lambda: AutoModel.from_config(tiny.vision_config("siglip")),
    "dinov2": lambda: AutoModel.from_config(transformers.Dinov2Config(**tiny.ENCODER)),
    "registers": lambda: AutoModel.from_config(REGISTERS),
    "vit": lambda: transformers.ViTModel(VIT, add_pooling_layer=False),
}
FEATURES = dict.fromkeys(ENCODERS, 4)  # 2 x 2 patches


def image_processor(kind):
    square = {"height": 16, "width": 16}
    if kind == "siglip":
        return transformers.SiglipImageProcessor(size=square)
    if kind == "vit":
        return transformers.ViTImageProcessor(size=square)
    name = "CLIPImageProcessor" if kind.startswith("clip") else "BitImageProcessor"
    return getattr(transformers, name)(size={"shortest_edge": 16}, crop_size=square)


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
    tokens = dict(unk_token="<unk>", eos_token="<|im_end|>", extra_special_tokens=special[1:2])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    made.chat_template = chat_template
    return made


def llava(folder, model):
    """A LLaVA checkpoint with the weights of `model`, whose image token is set."""
    model.config.image_token_index = 3
    model.save_pretrained(folder)
    made = tokenizer(extra=("<image>",))
    made.add_tokens(AddedToken("<image>", special=True, normalized=False), special_tokens=True)
    features = dict(num_additional_image_tokens=1, vision_feature_select_strategy="default")
    options = dict(patch_size=8, chat_template=CHATML, **features)
    processor = transformers.LlavaProcessor(image_processor("clip"), made, **options)
    processor.save_pretrained(folder)
    return str(folder)


def language(folder, tied=True, cls=LlamaConfig, rows=None, chat_template=CHATML, seed=2, **kwargs):
    made = tokenizer(chat_template)
    torch.manual_seed(seed)
    config = tiny.text_config(tied=tied, cls=cls, vocab_size=rows or len(made), **kwargs)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10.0)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)
