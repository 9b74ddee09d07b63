# SPDX-License-Identifier: Apache-2.0
"""Vision encoders and their image processors. Which fit is checked by running them on pictures.

A class that transformers' AutoModel knows must take `pixel_values` of one size and give hidden
states `(B, prefix + patches, d)`. The prefix is what does not come from pixels, such as a class
token and registers. The patches follow it row by row. Its image processor must make images of one
size, and `pixel_values` only.
"""

import inspect
import itertools
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from transformers import (
    MODEL_MAPPING,
    AutoImageProcessor,
    BaseImageProcessor,
    BatchFeature,
    CLIPVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..checkpoint.files import write_json
from ..checkpoint.opening import Checkpoint
from ..checkpoint.untrusted import fetch_checked_weights


_SHARED_SETTINGS = (
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "image_mean",
    "image_std",
    "resample",
    "rescale_factor",
    "size",
)
"""Settings of image processors that only resize and normalize."""

_PART_PREFIX = r"^(model\.)?(vision_model|vision_tower)\.(vision_model\.)?"
"""What names of an encoder's tensors begin with in a model of several parts."""


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of an encoder's hidden states.

    Attributes:
        prefix: Number of tokens before the patches.
        patches: Number of patches.
        patch_size: Height and width of a patch in pixels.
        encoder: The encoder's `model_type`.
    """

    prefix: int
    patches: int
    patch_size: int
    encoder: str


def require_vision_config(vision: Checkpoint) -> PreTrainedConfig:
    """Reads the vision encoder's configuration.

    Raises ValueError if it shows that the encoder does not fit. [`token_layout`] checks the rest.
    """
    stored = vision.stored.get("vision_config")
    if not isinstance(stored, dict):
        stored = vision.stored
    is_wrapper = stored.get("model_type") == "timm_wrapper"
    if is_wrapper or "pretrained_cfg" in stored:  # as transformers knows timm's own files
        # transformers would ask for timm instead.
        raise ValueError(
            f"{vision.name} cannot be the vision encoder: it is a model of timm "
            f"({stored.get('architecture')}), and transformers' wrapper of such models gives maps "
            "(B, d, height, width) without the tokens before the patches. Many models of timm have "
            "a class of transformers: use a checkpoint in that form. docs/train.md lists encoders "
            "that fit."
        )
    config = getattr(vision.config, "vision_config", vision.config)
    if config.model_type == "metaclip_2_vision_model":  # a CLIP that AutoModel does not know
        settings = config.to_dict()
        del settings["model_type"]
        config = CLIPVisionConfig(**settings)
    for setting in ("vision_use_head", "use_head"):  # a pooling head is not read
        if hasattr(config, setting):
            setattr(config, setting, False)
    fault = _fault_of_config(config)
    if fault:
        raise ValueError(
            f"{vision.name} cannot be the vision encoder: it is a {config.model_type!r} model, and "
            f"{fault}. docs/train.md lists encoders that fit."
        )
    return config


def _fault_of_config(config: PreTrainedConfig) -> str | None:
    """Returns why the class of an encoder or its settings do not fit, or None."""
    if type(config) not in MODEL_MAPPING:
        return "transformers' AutoModel has no class for it"
    model_class = MODEL_MAPPING[type(config)]
    if model_class.main_input_name != "pixel_values":
        return f"it reads {model_class.main_input_name}, not pixel_values"
    needed = []
    for name, parameter in inspect.signature(model_class.forward).parameters.items():
        is_positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        is_needed = is_positional and parameter.default is parameter.empty
        if is_needed and name not in ("self", "pixel_values"):
            needed.append(name)
    if needed:
        return f"it needs {', '.join(needed)} besides pixel_values: its images have no fixed grid"
    for setting in ("hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, setting, None), int):
            return (
                f"its configuration has no {setting}: LLaVA needs layers whose hidden states have "
                "one shape (B, prefix + patches, d)"
            )
    patch_size = getattr(config, "patch_size", None)
    if _side(patch_size) is None:
        return f"its patch_size is {patch_size!r}, not one whole number: its patches are not square"
    return None


def _side(size: int | list[int] | tuple[int, ...] | None) -> int | None:
    """Returns the side of a square that a configuration has as a number or twice, or None."""
    if isinstance(size, list | tuple) and len(size) == 2 and size[0] == size[1]:
        return size[0]
    return size if isinstance(size, int) else None


def load_encoder(vision: Checkpoint, config: PreTrainedConfig) -> PreTrainedModel:
    """Loads the vision encoder in the dtype of its files, also out of a model of several parts.

    Raises ValueError as [`Checkpoint.load`] and [`check_finite`] do.
    """
    encoder_class = MODEL_MAPPING[type(config)]
    if config is vision.config:
        tower = vision.load(encoder_class, config=config)
    else:
        tower = vision.without_weights(encoder_class, config)
        names = set[str]()
        for file in fetch_checked_weights(vision.name, vision.revision):
            with safe_open(file, "pt") as tensors:
                names.update(re.sub(_PART_PREFIX, "", name) for name in tensors.keys())  # noqa: SIM118
        loaded_class = encoder_class
        if names.issuperset(name for name, _ in tower.named_parameters()):
            # transformers renames tensors of older files. Among new names, such as DINOv3's and
            # TIPSv2's in a checkpoint of this package, it would rename some again. It renames none
            # of a class that is not its own (`get_model_conversion_mapping`): a subclass.
            loaded_class = type(encoder_class.__name__, (encoder_class,), {"__module__": __name__})
        tower = vision.load(loaded_class, config=config, key_mapping={_PART_PREFIX: ""})
        tower.__class__ = encoder_class
    check_finite(tower, vision.name)
    return tower


def check_finite(tower: PreTrainedModel, name: str) -> None:
    """Raises ValueError if a tensor of an encoder has NaN or infinite values, read or not.

    Training checks all weights, also those behind the feature layer.

    Args:
        tower: The encoder.
        name: The encoder's name in errors.
    """
    for tensor_name, tensor in itertools.chain(tower.named_parameters(), tower.named_buffers()):
        # `isfinite` would make a copy.
        is_checked = tensor.is_floating_point() and tensor.numel()
        if is_checked and not torch.linalg.vector_norm(tensor.detach(), torch.inf).isfinite():
            raise ValueError(
                f"{name} cannot be the vision encoder: its tensor {tensor_name} has NaN or "
                "infinite values, so its weights are damaged. Download it again, or use another."
            )


def plain_image_processor(image_processor: BaseImageProcessor) -> BaseImageProcessor:
    """Returns an image processor that makes the same pixels, and nothing but `pixel_values`.

    InternVL's also counts the parts of a picture. [`LlavaProcessor`] would pass the count on to the
    model, and the model does not take it.

    Raises:
        ValueError: If no plain image processor makes the same pixels.
    """
    if [*_process_picture(image_processor, 97, 61)] == ["pixel_values"]:
        return image_processor
    plain_settings = {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
    for setting, value in image_processor.to_dict().items():
        if setting in _SHARED_SETTINGS and value is not None:
            plain_settings[setting] = value
    with TemporaryDirectory() as folder:
        write_json(Path(folder, "preprocessor_config.json"), plain_settings)
        plain = AutoImageProcessor.from_pretrained(folder)
    for width, height in ((97, 61), (610, 970)):
        pixels = _process_picture(image_processor, width, height)["pixel_values"]
        with suppress(ValueError):  # of a size that a plain image processor does not take
            plain_pixels = _process_picture(plain, width, height)["pixel_values"]
            is_as_large = pixels.shape == plain_pixels.shape
            if is_as_large and torch.allclose(pixels, plain_pixels, atol=1e-4):
                continue
        remedy = (
            "Save in the encoder's folder the image processor of an encoder of the same family "
            "that makes one image of one size of every picture, such as SiglipImageProcessor for "
            "SigLIP."
        )
        if getattr(image_processor, "crop_to_patches", False):
            remedy = 'Set "crop_to_patches": false in preprocessor_config.json.'
        raise ValueError(
            f"The image processor ({type(image_processor).__name__}) does more than resize and "
            f"normalize a picture. {remedy}"
        )
    return plain


def make_size_constant(image_processor: BaseImageProcessor) -> tuple[int, int]:
    """Returns height and width of all images that an image processor makes.

    They become its `crop_size` unless it crops, since serving engines compute the number of image
    tokens by that.

    Raises:
        ValueError: If the images of two pictures differ in size, or have no usable pixels.
    """
    sizes = set()
    for width, height in ((97, 61), (61, 97)):
        pixels = _process_picture(image_processor, width, height)["pixel_values"][0]
        fault = None
        if not pixels.isfinite().all():
            fault = "NaN or infinite"
        elif (pixels == pixels[:, :1, :1]).all():  # though the picture has many colours
            fault = "the same everywhere"
        if fault:
            settings = image_processor.to_dict()
            pixel_settings = ("image_mean", "image_std", "rescale_factor")
            values = [f"{name} {settings.get(name)}" for name in pixel_settings]
            raise ValueError(
                f"The pixels of a picture become {fault} in the image processor "
                f"({', '.join(values)}). Set these in preprocessor_config.json as the encoder was "
                "trained with."
            )
        sizes.add(tuple(pixels.shape[-2:]))
    if len(sizes) > 1:
        listed = " and ".join(f"{height} x {width}" for height, width in sorted(sizes))
        raise ValueError(
            f"The image processor's size {dict(image_processor.size)} has no height and width for "
            f"every picture: two pictures became {listed}. Set both in preprocessor_config.json."
        )
    [(height, width)] = sizes
    if not (image_processor.crop_size and getattr(image_processor, "do_center_crop", False)):
        image_processor.crop_size = {"height": height, "width": width}
    return height, width


def _process_picture(image_processor: BaseImageProcessor, width: int, height: int) -> BatchFeature:
    """Processes a picture of colours that vary in both directions."""
    ramp = Image.linear_gradient("L").resize((width, height))
    picture = Image.merge("RGB", (ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp))
    return image_processor(picture, return_tensors="pt")


def token_layout(
    tower: PreTrainedModel, pixel_size: tuple[int, int], feature_layer: int | list[int], name: str
) -> TokenLayout:
    """Runs an encoder on two pictures, and returns which of its tokens are patches.

    All pixels of the second picture differ from the first one's, and most of all in one patch. In
    the embeddings, the last tokens must differ likewise, and the tokens before them, the prefix,
    must not. Where features are selected, all patches must differ and be finite.

    Args:
        tower: The encoder.
        pixel_size: Height and width of the images that its image processor makes.
        feature_layer: The hidden states that are projected.
        name: The encoder's name in errors.

    Raises:
        ValueError: If the encoder does not run on such images, or its hidden states are not a
            prefix and then a patch for each cell of a grid.
    """
    height, width = pixel_size
    patch_size = _side(tower.config.patch_size)
    assert patch_size is not None
    rows = height // patch_size
    columns = width // patch_size
    grid = f"Images of {height} x {width} pixels have {rows} x {columns} patches of {patch_size}"
    patches = rows * columns
    fault: str | None = "its images are smaller than a patch"
    if patches:
        marked_patch = patches // 2
        states = _require_hidden_states(tower, pixel_size, patch_size, marked_patch, name)
        fault = _fault_of_shapes(states, tower.config, patches)
        fault = fault or _fault_of_patches(states, feature_layer, patches, marked_patch)
    if fault:
        raise ValueError(
            f"{name} cannot be the vision encoder ({tower.config.model_type}): {fault}. {grid}, "
            "and LLaVA needs hidden states (B, prefix + patches, d). docs/train.md lists encoders "
            "that fit."
        )
    prefix = states[0].shape[1] - patches
    return TokenLayout(prefix, patches, patch_size, tower.config.model_type)


@torch.no_grad()
def _require_hidden_states(
    tower: PreTrainedModel,
    pixel_size: tuple[int, int],
    patch_size: int,
    marked_patch: int,
    name: str,
) -> tuple[Tensor, ...]:
    """Returns an encoder's hidden states of two pictures. Raises ValueError if it has none.

    They are noise, and the same with other pixels, most of all in one patch.
    """
    height, width = pixel_size
    generator = torch.Generator().manual_seed(0)
    noise, change = torch.randn(2, 3, height, width, generator=generator)
    row, column = divmod(marked_patch, width // patch_size)
    top = row * patch_size
    left = column * patch_size
    strength = torch.full((height, width), 0.1)
    strength[top : top + patch_size, left : left + patch_size] = 3.0
    pixels = torch.stack([noise, noise + strength * change]).to(tower.device, tower.dtype)
    states = None
    reason = "It gives no hidden states"
    try:
        outputs = tower(pixels, output_hidden_states=True, return_dict=True)
        states = getattr(outputs, "hidden_states", None)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    except (TypeError, ValueError) as error:
        reason = str(error)
    if states:
        return tuple(states)
    remedy = "docs/train.md lists encoders that fit."
    image_size: Any = getattr(tower.config, "image_size", None)
    if isinstance(image_size, int):
        image_size = (image_size, image_size)
    is_known = isinstance(image_size, list | tuple) and len(image_size) == 2
    if is_known and tuple(image_size) != pixel_size:
        remedy = (
            f"Its config.json has images of {image_size[0]} x {image_size[1]} pixels: set this "
            "size in its preprocessor_config.json."
        )
    raise ValueError(
        f"{name} cannot be the vision encoder ({tower.config.model_type}): its image processor "
        f"makes images of {height} x {width} pixels, and the encoder does not run on them: "
        f"{reason.rstrip('.')}. {remedy}"
    )


def _fault_of_shapes(
    states: tuple[Tensor, ...], config: PreTrainedConfig, patches: int
) -> str | None:
    """Returns why the shapes of hidden states of two pictures do not fit, or None."""
    shapes = sorted({tuple(state.shape) for state in states})
    [shape, *others] = shapes
    if others:
        return f"its hidden states have several shapes, {shapes}: tokens are merged on the way"
    if len(states) != config.num_hidden_layers + 1:
        return f"it gives {len(states)} hidden states with {config.num_hidden_layers} layers"
    if len(shape) != 3:
        return f"its hidden states are maps {shape}, of windows or convolutions"
    if shape[0] != 2:
        return f"its hidden states {shape} join the images of a batch"
    if shape[2] != config.hidden_size:
        return f"its hidden states {shape} do not have hidden_size {config.hidden_size}"
    if shape[1] < patches:
        return f"it gives {shape[1]} tokens for an image"
    return None


def _fault_of_patches(
    states: tuple[Tensor, ...], feature_layer: int | list[int], patches: int, marked_patch: int
) -> str | None:
    """Returns why hidden states `(2, tokens, d)` are not a prefix and patches in order, or None.

    The embeddings show the order. The selected hidden states must follow the pixels too.
    """
    first, second = states[0].float()
    prefix = len(first) - patches
    distances = (first - second).norm(dim=-1)
    has_moved = (distances > 0).tolist()
    if has_moved != [False] * prefix + [True] * patches:
        return (
            f"{sum(has_moved)} of its {len(first)} tokens follow the pixels, and these are not the "
            "last ones, one for each patch"
        )
    patch_distances = distances[prefix:]
    if patch_distances[marked_patch] < 2 * patch_distances.median() and patches > 1:
        return (
            f"other pixels in patch {marked_patch} do not change the token that should be this "
            "patch more than others: its tokens are not in the order of a grid"
        )
    layers = [feature_layer] if isinstance(feature_layer, int) else feature_layer
    for layer in layers:
        first, second = states[layer][:, -patches:].float()
        if not (first.isfinite().all() and second.isfinite().all()):
            return f"hidden state {layer} is NaN or infinite, so weights are damaged"
        if not (first != second).any(dim=-1).all():
            return f"patches of hidden state {layer} stay the same when their pixels change"
    return None
