# SPDX-License-Identifier: Apache-2.0
"""A page that asks a model about an image, streams the answer and shows where its words look.

A Hugging Face Space gets this file as its `app.py`, and `answering.py` beside it, so it imports
nothing else of the package.
"""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import gradio as gr
import torch
from gradio.utils import get_upload_folder
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from ..evaluation.answering import AnswerStream, greedy_config, model_inputs, user_turn


ATTENTION = {"text_config": "eager"}  # the only implementation that gives attention maps
MAPS = (
    "Below the answer you see where the model looked. The brighter a patch of the image, the more "
    "attention the words after the image pay to it. The first map is the mean over layers, the "
    "others are of one layer each. The percentage is the share of all attention that falls on the "
    "image."
)
SPACE_MEMORY = 12 * 2**30  # bytes of weights that fit a free Space of 16 GB
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF")  # EPS starts Ghostscript
DISPLAYED_SIDE = 336  # pixels, of the longer side of heat maps, or some more
MAX_RATIO = 200  # of the longer side: image processors that resize the shorter one take memory


def build_app(
    model: Any, processor: Any, *, title: str, source: str, max_new_tokens: int = 256
) -> gr.Blocks:
    """Returns the page of a model.

    Args:
        model: The model, loaded with [`ATTENTION`].
        processor: Its processor.
        title: Title of the page.
        source: Markdown that names the model.
        max_new_tokens: Limit of an answer.
    """
    # It is set once for all questions, since several people may ask at the same time.
    model.generation_config = greedy_config(model.generation_config, processor.tokenizer)
    example_image = Image.new("RGB", (256, 256), "#E8E4DA")
    ImageDraw.Draw(example_image).ellipse((64, 64, 192, 192), fill="red")
    image_input = gr.Image(
        type="filepath",  # the file as it was sent, since Gradio would open it in any format
        image_mode=None,
        sources=["upload", "clipboard"],
        label="Image",
        height=320,
    )
    question_input = gr.Textbox(label="Question", placeholder="What is in the image?")
    heatmap_output = gr.Gallery(label="Where the words look", format="png", object_fit="contain")

    def ask(file: str | None, question: str) -> Iterator[tuple]:
        uploads = Path(get_upload_folder()).resolve()
        # Gradio reads any path of this machine from a request that leaves out `meta`.
        if file and not Path(file).resolve().is_relative_to(uploads):
            fault = "The image is not among those uploaded here: choose it again."
            raise gr.Error(fault, print_exception=False)
        yield from answer(model, processor, file, question, max_new_tokens)

    return gr.Interface(
        ask,
        [image_input, question_input],
        [gr.Textbox(label="Answer"), heatmap_output],
        examples=[[example_image, "What is in the image?"]],
        cache_examples=False,
        title=title,
        description=f"{source} {MAPS}",
        clear_btn=None,  # a phone would put it above the button that asks
        flagging_mode="never",
        api_name="ask",
        analytics_enabled=False,
        delete_cache=(3600, 3600),
    )


def launch(app: gr.Blocks, **options: Any) -> None:
    """Serves the page without anything from elsewhere: no tunnel, no fonts."""
    app.launch(
        share=False,
        ssr_mode=False,
        show_error=True,
        max_file_size="20mb",
        theme=gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ),
        **options,
    )


def answer(
    model: Any, processor: Any, file: str | None, question: str, max_new_tokens: int
) -> Iterator[tuple]:
    """Yields the greedy answer as it grows, and at last with its heat maps.

    A thread generates it. It stops at the next token once the iterator is closed.

    Args:
        model: The model.
        processor: Its processor.
        file: The image.
        question: The question.
        max_new_tokens: The greatest number of tokens of the answer.

    Yields:
        The answer so far, and None or the [`heatmaps`].

    Raises:
        gr.Error: The image or the question is missing, or the image cannot be read.
    """
    question = (question or "").strip()
    if not file or not question:
        raise gr.Error("Give an image and a question.", print_exception=False)
    conversation = [user_turn(question, [open_image(file)])]
    try:
        inputs = model_inputs(processor, [conversation]).to(model.device, model.dtype)
        stream = AnswerStream(model, processor, inputs, max_new_tokens)
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error
    answer_text = ""
    for piece in stream:
        answer_text += piece
        yield answer_text, None
    maps = attention(model, processor, inputs, stream.token_ids)
    pictures = heatmaps(maps, inputs["pixel_values"][0], processor)
    yield answer_text.strip() or "(The answer is empty.)", pictures


def open_image(file: str) -> Image.Image:
    """Reads an image as upright RGB, on white where it is transparent.

    Raises:
        gr.Error: It cannot be read.
    """
    explanation = "The image cannot be read. Save it as PNG or JPEG with 8 bits."
    try:
        opened_image = Image.open(file, formats=FORMATS)
        if max(opened_image.size) > MAX_RATIO * min(opened_image.size):
            explanation = f"The image is too narrow: its sides may be as 1 to {MAX_RATIO} at most."
            raise ValueError(explanation)
        upright = ImageOps.exif_transpose(opened_image)
        if upright.mode[0] in "IF":
            raise ValueError("its pixels have more than 8 bits")
        upright = upright.convert("RGBA")
        background = Image.new("RGBA", upright.size, "white")
        return Image.alpha_composite(background, upright).convert("RGB")
    except Exception as error:  # decoders raise errors of any kind on broken files
        raise gr.Error(explanation, print_exception=False) from error


@torch.no_grad()
def attention(model: Any, processor: Any, inputs: Any, token_ids: Tensor) -> dict[int, Tensor]:
    """Measures how much attention the words after the image pay to its patches.

    Special tokens do not count as words. Layers with linear attention have no map.

    Args:
        model: The model, loaded with [`ATTENTION`].
        processor: Its processor.
        inputs: The inputs of the prompt.
        token_ids: The tokens of prompt and answer, of shape `(1, tokens)`.

    Returns:
        By number of the layer, from 1, the attention to each patch, of shape `(patches,)`, averaged
        over heads and words.
    """
    image_height, image_width = inputs["pixel_values"].shape[-2:]
    patch_size = processor.patch_size
    patch_count = (image_height // patch_size) * (image_width // patch_size)
    sequence = token_ids[0]
    positions = torch.arange(len(sequence), device=sequence.device)
    # Class token and registers, where they are kept, come before the patches.
    patch_positions = positions[sequence == model.config.image_token_id][-patch_count:]
    added_tokens = processor.tokenizer.added_tokens_decoder.items()
    special_ids = [token_id for token_id, token in added_tokens if token.special]
    is_special = torch.isin(sequence, sequence.new_tensor(special_ids))
    is_after_image = positions > patch_positions[-1]
    word_positions = positions[is_after_image & ~is_special]
    maps: dict[int, Tensor] = {}
    this_thread = get_ident()

    def keep(layer_number: int, self_attention: Any, args: tuple, output: tuple) -> None:
        if get_ident() != this_thread:
            return  # an answer that was stopped runs to its next token in another thread
        layer_attention = output[1][0]  # of shape (heads, tokens, tokens)
        to_image = layer_attention[:, word_positions][..., patch_positions]
        maps[layer_number] = to_image.float().mean((0, 1)).cpu()

    with ExitStack() as hooks:
        for layer_number, decoder_layer in enumerate(model.get_decoder().layers, start=1):
            self_attention = getattr(decoder_layer, "self_attn", None)
            if self_attention is not None:
                hook = self_attention.register_forward_hook(partial(keep, layer_number))
                hooks.enter_context(hook)
        model.base_model(input_ids=token_ids, pixel_values=inputs["pixel_values"], use_cache=False)
    return maps


def heatmaps(
    maps: dict[int, Tensor], pixels: Tensor, processor: Any
) -> list[tuple[Image.Image, str]]:
    """Draws the image, as the encoder gets it, under the attention to it.

    Args:
        maps: The attention by layer, from [`attention`].
        pixels: The image as the encoder gets it, of shape `(3, height, width)`.
        processor: The processor of the model.

    Returns:
        An image and its caption for the mean of layers, then for each layer.
    """
    image_processor = processor.image_processor
    colors = pixels.float().cpu().permute(1, 2, 0)
    if image_processor.do_normalize:
        mean = torch.tensor(image_processor.image_mean)
        std = torch.tensor(image_processor.image_std)
        colors = colors * std + mean
    levels = (255 * colors).round().clamp(0, 255).byte()
    image = Image.fromarray(levels.numpy())
    scale = math.ceil(DISPLAYED_SIDE / max(image.size))
    image = ImageOps.scale(image, scale, Image.Resampling.NEAREST)
    grey = image.convert("L").convert("RGB")
    row_count = pixels.shape[1] // processor.patch_size
    titled_maps = {"Mean": torch.stack(list(maps.values())).mean(0)}
    titled_maps |= {f"Layer {number}": layer_map for number, layer_map in maps.items()}
    pictures = []
    for title, patch_attention in titled_maps.items():
        brightness = patch_attention / patch_attention.max().clamp_min(1e-30)
        levels = (255 * brightness).round().byte().view(row_count, -1)
        heat = Image.fromarray(levels.numpy())
        heat = ImageOps.colorize(heat, black="#000004", mid="#B73779", white="#FCFDBF")
        heat = heat.resize(image.size, Image.Resampling.NEAREST)
        caption = f"{title}: {patch_attention.sum():.1%}"
        pictures.append((Image.blend(grey, heat, 0.6), caption))
    return pictures


def cpu_dtype(config: Any, **code: Any) -> torch.dtype | str:
    """Returns float32 if it fits a free Space, since it is fast on every CPU. Otherwise "auto".

    Args:
        config: The model's configuration.
        code: Where the model's code is, as arguments of `from_config`.
    """
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, **code)
    float32_bytes = 4 * model.num_parameters()
    return torch.float32 if float32_bytes <= SPACE_MEMORY else "auto"


def main(folder: Path) -> None:
    """Serves the model that `space.json` names, with the code that comes with it."""
    settings = json.loads((folder / "space.json").read_bytes())
    model_id = settings["model"]
    revision = settings["revision"]
    code: dict[str, Any] = {"code_revision": revision, "trust_remote_code": True}
    config = AutoConfig.from_pretrained(model_id, revision=revision, **code)
    device = "cuda"
    dtype: torch.dtype | str = "auto"
    if not torch.cuda.is_available():
        device = "cpu"
        dtype = cpu_dtype(config, **code)
    loaded_model = AutoModelForImageTextToText.from_pretrained(
        model_id, revision=revision, dtype=dtype, attn_implementation=ATTENTION, **code
    )
    loaded_model = loaded_model.to(device).eval()
    processor = AutoProcessor.from_pretrained(model_id, revision=revision, **code)
    app = build_app(
        loaded_model,
        processor,
        title=model_id.rpartition("/")[2],
        source=f"Ask [{model_id}](https://huggingface.co/{model_id}) about an image.",
    )
    launch(app)


if __name__ == "__main__":
    main(Path(__file__).parent)
