# SPDX-License-Identifier: Apache-2.0
"""NormAlign-LLaVA for MLX-VLM: its own LLaVA, and the norm. docs/serving.md says how it is used."""

from dataclasses import dataclass

from mlx import nn
from mlx_vlm.models.llava import LanguageModel, VisionModel, config, llava  # noqa: F401
from mlx_vlm.prompt_utils import MODEL_CONFIG, MessageFormat


NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm, "none": nn.Identity}
ACTIVATIONS = {"gelu": "none", "gelu_pytorch_tanh": "precise", "quick_gelu": "fast"}
MODEL_CONFIG["normalign_llava"] = MessageFormat.LIST_WITH_IMAGE_FIRST  # as in training
NAMES = {"language_model": "language_model.model", "lm_head": "language_model.lm_head"}


@dataclass
class TextConfig(config.TextConfig):
    rope_parameters: dict | None = None

    def __post_init__(self):
        if self.rope_parameters["rope_type"] != "default":
            raise ValueError(f"MLX-VLM's LLaVA lacks these rotary angles: {self.rope_parameters}")
        self.rope_theta = self.rope_parameters["rope_theta"]
        super().__post_init__()


@dataclass
class VisionConfig(config.VisionConfig):
    hidden_act: str = "quick_gelu"


@dataclass
class ModelConfig(config.ModelConfig):
    projector_norm: str = "layer_norm"
    projector_norm_eps: float = 1e-5


class Projector(llava.LlavaMultiModalProjector):
    def __init__(self, config):
        super().__init__(config)
        width = config.text_config.hidden_size
        self.norm = NORMS[config.projector_norm](width, eps=config.projector_norm_eps)

    def __call__(self, features):
        return self.norm(super().__call__(features))


class Model(llava.Model):
    def __init__(self, config):
        super().__init__(config)
        self.vision_tower = self.vision_tower.vision_model  # tensors have its names
        self.multi_modal_projector = Projector(config)
        for layer in self.vision_tower.encoder.layers:
            layer.mlp.activation_fn = nn.GELU(approx=ACTIVATIONS[config.vision_config.hidden_act])

    def sanitize(self, weights):
        if not any(name.startswith("model.") for name in weights):
            return weights  # MLX-VLM has converted them
        names = [name.removeprefix("model.").partition(".") for name in weights]
        own_names = [f"{NAMES.get(part, part)}.{rest}" for part, _, rest in names]
        return dict(zip(own_names, weights.values(), strict=True))
