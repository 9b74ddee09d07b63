# SPDX-License-Identifier: Apache-2.0
"""A page that asks a model about an image, streams the answer and shows where its words look.

A Hugging Face Space gets this file as its `app.py`, and `answering.py` beside it, so it imports
nothing else of the package.
"""

import json
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
SPACE_MEMORY = 12 * 2**30  # bytes of weights for which a free Space, of 16 GB, has room
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF")  # EPS starts Ghostscript
MAX_RATIO = 200  # of the longer side: image processors that resize the shorter one take memory


def build_app(
    model: Any, processor: Any, *, title: str, source: str, max_new_tokens: int = 256
) -> gr.Blocks:
    """The page of a model, loaded with [`ATTENTION`]; `source` is Markdown that names it."""
    # Once for all, since several people may ask at the same time.
    model.generation_config = greedy_config(model.generation_config, processor.tokenizer)
    example = Image.new("RGB", (256, 256), "#E8E4DA")
    ImageDraw.Draw(example).ellipse((64, 64, 192, 192), fill="red")
    sources: list = ["upload", "clipboard"]
    maps = gr.Gallery(label="Where the words look", format="png", object_fit="contain")

    def ask(file: str | None, question: str) -> Iterator[tuple]:
        # Gradio reads any path of this machine from a request that leaves out `meta`.
        if file and not Path(file).resolve().is_relative_to(Path(get_upload_folder()).resolve()):
            fault = "The image is not among those uploaded here: choose it again."
            raise gr.Error(fault, print_exception=False)
        yield from answer(model, processor, file, question, max_new_tokens)

    return gr.Interface(
        ask,
        [
            # The file as it was sent, since Gradio would open it in any format.
            gr.Image(type="filepath", image_mode=None, sources=sources, label="Image", height=320),
            gr.Textbox(label="Question", placeholder="What is in the image?"),
        ],
        [gr.Textbox(label="Answer"), maps],
        examples=[[example, "What is in the image?"]],
        cache_examples=False,
        title=title,
        description=f"{source} {MAPS}",
        clear_btn=None,  # which a phone would put above the button that asks
        flagging_mode="never",
        api_name="ask",
        analytics_enabled=False,
        delete_cache=(3600, 3600),
    )


def launch(app: gr.Blocks, **options: Any) -> None:
    """Serves the page, with nothing from elsewhere: no tunnel, no fonts."""
    mono = ["ui-monospace", "monospace"]
    options["theme"] = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=mono)
    app.launch(share=False, ssr_mode=False, show_error=True, max_file_size="20mb", **options)


def answer(
    model: Any, processor: Any, file: str | None, question: str, limit: int
) -> Iterator[tuple]:
    """The greedy answer of up to `limit` tokens as it grows, then with heat maps; raises gr.Error.

    A thread generates it, which stops at the next token once the iterator is closed.
    """
    question = (question or "").strip()
    if not file or not question:
        raise gr.Error("Give an image and a question.", print_exception=False)
    conversation = [user_turn(question, [open_image(file)])]
    try:
        inputs = model_inputs(processor, [conversation]).to(model.device, model.dtype)
        stream = AnswerStream(model, processor, inputs, limit)
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error
    text = ""
    for piece in stream:
        text += piece
        yield text, None
    maps = heatmaps(model, processor, inputs, stream.ids)
    yield text.strip() or "(The answer is empty.)", maps


def open_image(file: str) -> Image.Image:
    """The image as upright RGB, on white where transparent, or gr.Error if it cannot be read."""
    fault = "The image cannot be read. Save it as PNG or JPEG with 8 bits."
    try:
        opened = Image.open(file, formats=FORMATS)
        if max(opened.size) > MAX_RATIO * min(opened.size):
            fault = f"The image is too narrow: its sides may be as 1 to {MAX_RATIO} at most."
            raise ValueError(fault)
        image = ImageOps.exif_transpose(opened)
        if image.mode[0] in "IF":
            raise ValueError("its pixels have more than 8 bits")
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    except Exception as error:  # decoders raise errors of any kind on broken files
        raise gr.Error(fault, print_exception=False) from error


@torch.no_grad()
def attention(model: Any, processor: Any, inputs: Any, ids: Tensor) -> dict[int, Tensor]:
    """Attention of words after the image to its patches, averaged over heads and words, by layer.

    Special tokens are no words; linear attention has no map. `ids` are those of prompt and answer.
    """
    added = processor.tokenizer.added_tokens_decoder.items()
    special = [number for number, token in added if token.special]
    height, width = (side // processor.patch_size for side in inputs["pixel_values"].shape[-2:])
    places = torch.arange(ids.shape[1], device=ids.device)
    # Class token and registers, where they are kept, come before the patches.
    visual = places[ids[0] == model.config.image_token_id][-height * width :]
    words = places[(places > visual[-1]) & ~torch.isin(ids[0], ids.new_tensor(special))]
    maps, thread = dict[int, Tensor](), get_ident()

    def keep(number: int, module: Any, args: tuple, output: tuple) -> None:
        if get_ident() == thread:  # an answer that was stopped may run to its next token in another
            maps[number] = output[1][0][:, words][..., visual].float().mean((0, 1)).cpu()

    with ExitStack() as hooks:
        for number, layer in enumerate(model.get_decoder().layers, 1):
            if (module := dict(layer.named_children()).get("self_attn")) is not None:
                hooks.enter_context(module.register_forward_hook(partial(keep, number)))
        model.base_model(input_ids=ids, pixel_values=inputs["pixel_values"], use_cache=False)
    return maps


def heatmaps(model: Any, processor: Any, inputs: Any, ids: Tensor) -> list[tuple[Image.Image, str]]:
    """The image as the encoder gets it under the attention to it: the mean of layers, then each."""
    maps, pixels = attention(model, processor, inputs, ids), inputs["pixel_values"]
    colors, images = pixels[0].float().cpu(), processor.image_processor
    if images.do_normalize:
        mean, std = torch.tensor([images.image_mean, images.image_std]).view(2, 3, 1, 1)
        colors = colors * std + mean
    image = Image.fromarray((colors * 255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy())
    size = [side * -(-336 // max(image.size)) for side in image.size]
    image = image.resize(size, Image.Resampling.NEAREST)
    grid = [side // processor.patch_size for side in pixels.shape[-2:]]
    drawn = []
    for layer, row in {"Mean": torch.stack([*maps.values()]).mean(0), **maps}.items():
        cells = (255 * row / row.max().clamp_min(1e-30)).round().byte().view(grid).numpy()
        heat = ImageOps.colorize(Image.fromarray(cells), "#000004", "#FCFDBF", mid="#B73779")
        heat = heat.resize(size, Image.Resampling.NEAREST)
        caption = f"{layer if layer == 'Mean' else f'Layer {layer}'}: {row.sum():.1%}"
        drawn.append((Image.blend(image.convert("L").convert("RGB"), heat, 0.6), caption))
    return drawn


def cpu_dtype(config: Any, **code: Any) -> torch.dtype | str:
    """float32, in which every CPU is fast, if that fits into a free Space; else the model's own."""
    with torch.device("meta"):
        size = 4 * AutoModelForImageTextToText.from_config(config, **code).num_parameters()
    return torch.float32 if size <= SPACE_MEMORY else "auto"


def main(folder: Path) -> None:
    """Serves the model that `space.json` names, with the code that comes with it."""
    settings = json.loads((folder / "space.json").read_text(encoding="utf-8"))
    name, commit = settings["model"], settings["revision"]
    code: dict[str, Any] = {"code_revision": commit, "trust_remote_code": True}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(name, revision=commit, **code)
    dtype = "auto" if device == "cuda" else cpu_dtype(config, **code)
    options = {"revision": commit, "dtype": dtype, "attn_implementation": ATTENTION, **code}
    model = AutoModelForImageTextToText.from_pretrained(name, **options).to(device).eval()
    processor = AutoProcessor.from_pretrained(name, revision=commit, **code)
    source = f"Ask [{name}](https://huggingface.co/{name}) about an image."
    launch(build_app(model, processor, title=name.rpartition("/")[2], source=source))


if __name__ == "__main__":
    main(Path(__file__).parent)
