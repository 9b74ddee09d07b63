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
CLIP_TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
}
CLIP = transformers.CLIPConfig(vision_config=tiny.ENCODER, text_config=CLIP_TEXT)
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
FEATURES = {
    "clip": 4,
    "clip_full": 4,
    "siglip": 4,
    "dinov2": 4,
    "registers": 4,
    "vit": 4,
}
"""Features of an image: 2 x 2 patches, and 4 registers."""


def image_processor(kind):
    square = {"height": 16, "width": 16}
    if kind == "siglip":
        return transformers.SiglipImageProcessor(size=square)
    if kind == "vit":
        return transformers.ViTImageProcessor(size=square)
    cropping_class = transformers.BitImageProcessor
    if kind.startswith("clip"):
        cropping_class = transformers.CLIPImageProcessor
    return cropping_class(size={"shortest_edge": 16}, crop_size=square)


def vision(folder, kind="clip"):
    torch.manual_seed(1)
    encoder = ENCODERS[kind]()
    encoder.save_pretrained(folder)
    image_processor(kind).save_pretrained(folder)
    return str(folder)


def tokenizer(chat_template=CHATML, extra=()):
    """A tokenizer with one token for each letter."""
    special_tokens = ["<unk>", "<|im_start|>", "<|im_end|>", *extra]
    letters = [chr(code) for code in range(32, 123)]
    vocabulary = {}
    for token in [*special_tokens, *letters, "\n"]:
        vocabulary[token] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    letter_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    letter_tokenizer.chat_template = chat_template
    return letter_tokenizer


def llava(folder, model):
    """A LLaVA checkpoint with the weights of `model`, whose image token is set."""
    model.config.image_token_index = 3
    model.save_pretrained(folder)
    llava_tokenizer = tokenizer(extra=("<image>",))
    image_token = AddedToken("<image>", special=True, normalized=False)
    llava_tokenizer.add_tokens(image_token, special_tokens=True)
    processor = transformers.LlavaProcessor(
        image_processor("clip"),
        llava_tokenizer,
        patch_size=8,
        chat_template=CHATML,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    processor.save_pretrained(folder)
    return str(folder)


def language(folder, tied=True, cls=LlamaConfig, rows=None, chat_template=CHATML, seed=2, **kwargs):
    """A language model; `rows` is the size of its vocabulary, by default the tokenizer's."""
    text_tokenizer = tokenizer(chat_template)
    if rows is None:
        rows = len(text_tokenizer)
    torch.manual_seed(seed)
    config = tiny.text_config(
        tied=tied,
        cls=cls,
        vocab_size=rows,
        **kwargs,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10.0)
    model.save_pretrained(folder)
    text_tokenizer.save_pretrained(folder)
    return str(folder)


def scale_matrices(model, factor):
    """Multiplies the matrices of a model that is not trained, so that its inputs matter more."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)


def siglip(folder, side, **sizes):
    """Saves a SigLIP for which pictures differ, though it is not trained."""
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(
        num_attention_heads=4, image_size=side, patch_size=14, vision_use_head=False, **sizes
    )
    encoder = transformers.SiglipVisionModel(config)
    scale_matrices(encoder, 3.0)
    encoder.save_pretrained(folder)
    size = {"height": side, "width": side}
    transformers.SiglipImageProcessor(size=size).save_pretrained(folder)
    return str(folder)
