# Copyright 2026 The NormAlign-LLaVA authors. Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
# From the Python package normalign-llava 0.1.0. To review it, begin at the head of configuration_normalign_llava.py.
"""NormAlign-LLaVA: LLaVA with a norm after the projector whose gain gives visual tokens the norm of text embeddings.

Method and equation numbers: "The Unseen Bias", https://huggingface.co/papers/2512.08374. Read it as a diff against
`transformers/models/llava/modeling_llava.py`: the norms, the measurement of N_text, and two subclasses.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.integrations import deepspeed_config, is_deepspeed_zero3_enabled
from transformers.models.llava import modeling_llava as llava
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import can_return_tuple, logging
from transformers.utils.quantization_config import BitsAndBytesConfig

from .configuration_normalign_llava import NormAlignLlavaConfig, embedding_scales


logger = logging.get_logger(__name__)


def gain_magnitude(gain: Tensor, gain_floor: float) -> Tensor:
    """s = max(mean |gain|, gain_floor), the divisor of Global Weight Compensation (eq. 12); 0-d."""
    return gain.detach().abs().mean(dtype=torch.promote_types(gain.dtype, torch.float32)).clamp(min=gain_floor)


class _CompensatedLayerNorm(torch.autograd.Function):
    # LayerNorm's backward is linear in the gradient at the normalised tokens: divided by s, it is that backward with
    # gain/s as gain. The gradients of gain and bias do not depend on the gain, so one fused kernel gives all three.
    # The caller casts what comes out: compiled by torch 2.11, a cast in here that changes nothing has gradients of 0.
    @staticmethod
    def forward(ctx, x, eps, gain_floor, gain, bias):
        dtype = torch.promote_types(x.dtype, gain.dtype)
        out, mean, rstd = torch.native_layer_norm(x.to(dtype), gain.shape, gain.to(dtype), bias.to(dtype), eps)
        ctx.save_for_backward(x, gain, bias, mean, rstd)
        ctx.gain_floor = gain_floor
        return out

    @staticmethod
    def backward(ctx, grad):
        x, gain, bias, mean, rstd = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, gain.dtype)
        scaled = (gain / gain_magnitude(gain, ctx.gain_floor)).to(dtype)
        grad_x, grad_gain, grad_bias = torch.ops.aten.native_layer_norm_backward.default(
            grad, x.to(dtype), gain.shape, mean, rstd, scaled, bias.to(dtype), [True, True, True]
        )
        return grad_x.to(x.dtype), None, None, grad_gain.to(gain.dtype), grad_bias.to(bias.dtype)


class _CompensatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps, gain_floor, gain):
        dtype = torch.promote_types(x.dtype, gain.dtype)
        ctx.save_for_backward(x, gain)
        ctx.eps, ctx.gain_floor = eps, gain_floor
        return F.rms_norm(x.to(dtype), gain.shape, gain.to(dtype), eps)

    @staticmethod
    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        dtype = torch.promote_types(torch.promote_types(x.dtype, gain.dtype), torch.float32)
        wide, grad = x.to(dtype), grad.to(dtype)
        rstd = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        x_hat = wide * rstd
        grad_x_hat = grad * (gain / gain_magnitude(gain, ctx.gain_floor)).to(dtype)
        grad_x = rstd * (grad_x_hat - x_hat * (grad_x_hat * x_hat).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), None, None, (grad * x_hat).sum_to_size(gain.shape).to(gain.dtype)


class _CompensatedNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-5, gain_floor: float = 1e-3, compensate: bool = True):
        super().__init__(hidden_size, eps=eps, dtype=torch.float32)
        self.gain_floor, self.compensate = gain_floor, compensate

    def train(self, mode: bool = True):
        # Weights are here as the optimizer has them; in a step FSDP2 may have copies. DeepSpeed keeps float32 copies.
        if mode and self.weight.requires_grad and self.weight.itemsize < 4 and deepspeed_config() is None:
            logger.warning_once(
                f"The gain is trained in {self.weight.dtype}, where small updates vanish. Before training, make it "
                f"float32: [m.float() for m in trainer.model.modules() if type(m).__name__ == {type(self).__name__!r}]"
            )
        return super().train(mode)


class GlobalWeightCompensatedLayerNorm(_CompensatedNorm, nn.LayerNorm):
    """LayerNorm whose backward pass does not shrink with its gain (Global Weight Compensation, eqs. 12, 24-26).

    Forward: `gain * (x - mean) / sqrt(var + eps) + bias`, [`torch.nn.functional.layer_norm`] bit for bit. Backward:
    the gradient at the normalised `x` is divided by `max(mean |gain|, gain_floor)`; those of gain and bias are
    LayerNorm's own. Gain and bias are float32, since a gain of 0.0134 in bfloat16 moves in steps of 6e-5; half
    precision is normalised in float32 and returned in its own dtype. Shape: `(..., d)`.

    Args:
        hidden_size (`int`): size d of the last dimension.
        eps (`float`): added to the variance.
        gain_floor (`float`): smallest mean |gain| to divide by.
        compensate (`bool`): `False` is a plain LayerNorm.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.compensate and x.requires_grad and torch.is_grad_enabled():
            return _CompensatedLayerNorm.apply(x, self.eps, self.gain_floor, self.weight, self.bias).to(x.dtype)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        gain, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), self.normalized_shape, gain, bias, self.eps).to(x.dtype)


class GlobalWeightCompensatedRMSNorm(_CompensatedNorm, nn.RMSNorm):
    """The same for `gain * x / sqrt(mean(x^2) + eps)` (eq. 3), without bias; a normalised token has norm sqrt(d)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.compensate and x.requires_grad and torch.is_grad_enabled():
            return _CompensatedRMSNorm.apply(x, self.eps, self.gain_floor, self.weight).to(x.dtype)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps).to(x.dtype)


@contextmanager
def _gathered(*parameters: Tensor) -> Iterator[tuple[Tensor, ...]]:
    if not is_deepspeed_zero3_enabled():
        yield tuple(p.full_tensor() if type(p).__name__ == "DTensor" else p for p in parameters)
        return
    # An `import` statement would make deepspeed a requirement of every checkpoint's remote code.
    with import_module("deepspeed").zero.GatheredParameters(list(parameters), modifier_rank=0):
        yield parameters


@torch.no_grad()
def embedding_row_norms(weight: Tensor) -> Tensor:
    """L2 norm of every row of an embedding matrix `(V, d)`: `(V,)`, float64, on the CPU.

    Rows are widened in chunks, without a float64 copy of the matrix. Sharded matrices (DTensor, DeepSpeed ZeRO-3) are
    gathered, so all ranks must call this. Raises ValueError on a meta or quantized matrix.
    """
    with _gathered(weight) as (whole,):
        if whole.is_meta or whole.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            state = "on meta (not loaded, or offloaded to disk)" if whole.is_meta else f"quantized ({whole.dtype})"
            raise ValueError(f"The embedding matrix is {state}. Load it in full precision to measure N_text.")
        return torch.cat([chunk.cpu().double().norm(dim=-1) for chunk in whole.detach().split(4096)])


def mean_embedding_norm(weight: Tensor, exclude_rows: Iterable[int] = ()) -> float:
    """N_text: mean L2 norm of the rows of an embedding matrix that are not all zero (eq. 11), in float64.

    `weight` is the matrix `(V, d)`, or the norms of its rows `(V,)`. `exclude_rows` do not count: image token, padding
    of the vocabulary. Raises ValueError if `weight` is on meta or quantized, if a row that counts is NaN or infinite,
    or if none counts.
    """
    norms = weight if weight.ndim == 1 else embedding_row_norms(weight)
    counts = norms != 0
    counts[list(exclude_rows)] = False
    if bad := (counts & ~norms.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"{len(bad)} embedding rows have NaN or infinite values, the first of them {bad[:10]}.")
    if not counts.any():
        raise ValueError(f"None of {len(norms)} embedding rows counts: each is zero or excluded. Are weights loaded?")
    return norms[counts].mean().item()


def initial_gain(config: NormAlignLlavaConfig, n_text: float) -> float:
    """The start of every element of the gain (eq. 11), given N_text as it enters the decoder."""
    _, scale_all = embedding_scales(config.text_config)
    return 1.0 if config.projector_gain_init == "one" else n_text / scale_all / config.text_config.hidden_size**0.5


class NormAlignLlavaMultiModalProjector(llava.LlavaMultiModalProjector):
    """LLaVA's two-layer projector, then the norm: visual features `(..., d_vision)` to visual tokens `(..., d)`."""

    def __init__(self, config: NormAlignLlavaConfig):
        super().__init__(config)
        self.norm = nn.Identity()
        if config.projector_norm != "none":
            norms = {"layer_norm": GlobalWeightCompensatedLayerNorm, "rms_norm": GlobalWeightCompensatedRMSNorm}
            size, compensate = config.text_config.hidden_size, config.gradient_compensation == "global"
            self.norm = norms[config.projector_norm](size, config.projector_norm_eps, config.gain_floor, compensate)

    def forward(self, image_features: Tensor) -> Tensor:
        return self.norm(super().forward(image_features))


class NormAlignLlavaPreTrainedModel(llava.LlavaPreTrainedModel):
    """What both model classes add to LLaVA's: gain alignment, and loading and saving without silent losses."""

    _keep_in_fp32_modules_strict = ["multi_modal_projector.norm"]

    @property
    def dtype(self) -> torch.dtype:
        """The language model's; training may have left other parts in another. It is the dtype to load a save in."""
        return self.base_model.language_model.dtype

    def measure_text_embedding_norm(self) -> float:
        """N_text, the mean norm with which text embeddings enter the decoder (eq. 11); also written into the config.

        The image token's row and padding that repeats it do not count. Errors are those of [`mean_embedding_norm`].
        """
        norms = embedding_row_norms(self.get_input_embeddings().weight)
        added = torch.isin(norms, norms[self.config.image_token_id : self.config.image_token_id + 1])
        scale_text, scale_all = embedding_scales(self.config.text_config)
        mean = mean_embedding_norm(norms, added.nonzero().flatten().tolist())
        self.config.text_embedding_norm = mean * scale_text * scale_all
        return self.config.text_embedding_norm

    def align_projector_norm(self) -> float:
        """Sets the gain to N_text / sqrt(d) and the bias to 0, writes N_text into the config and returns it (eq. 11).

        With `projector_gain_init="one"` the gain is set to 1. If the language model scales every input embedding
        (Granite), the gain is divided by that factor. Raises ValueError without a norm; other errors are those of
        [`mean_embedding_norm`].
        """
        norm = self.base_model.multi_modal_projector.norm
        if isinstance(norm, nn.Identity):
            raise ValueError('There is no norm to align: this model has projector_norm="none".')
        gain = initial_gain(self.config, self.measure_text_embedding_norm())
        with torch.no_grad(), _gathered(*norm.parameters()):
            for name, parameter in norm.named_parameters():
                parameter.fill_(gain if name == "weight" else 0.0)
        return self.config.text_embedding_norm

    def _init_weights(self, module: nn.Module):
        if not isinstance(module, GlobalWeightCompensatedLayerNorm | GlobalWeightCompensatedRMSNorm):
            super()._init_weights(module)
        elif not module.weight.is_meta:
            self.base_model.language_model._initialize_weights(self.get_input_embeddings())  # unless they are loaded
            gain = initial_gain(self.config, self.measure_text_embedding_norm())
            for name, parameter in module.named_parameters():
                # transformers guards this function: what was loaded keeps its values.
                nn.init.constant_(parameter, gain if name == "weight" else 0.0)

    def initialize_weights(self):
        # Of custom code, transformers skips modules without parameters of their own, such as CLIP's attention, which
        # sets its linear layers. The two parts are transformers' own.
        for part in (self.base_model.vision_tower, self.base_model.language_model):
            part.initialize_weights()
        super().initialize_weights()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """[`~transformers.PreTrainedModel.from_pretrained`]; a LLaVA checkpoint gets an aligned norm.

        bitsandbytes quantizes the decoder's layers alone, unless `llm_int8_skip_modules` is set. Raises ValueError if
        the checkpoint lacks tensors other than the norm's, unless `output_loading_info` asks for a report.
        """
        quantization = kwargs.get("quantization_config")
        if isinstance(quantization, dict):
            kwargs["quantization_config"] = quantization = AutoQuantizationConfig.from_dict(quantization)
        if isinstance(quantization, BitsAndBytesConfig) and quantization.llm_int8_skip_modules is None:
            kwargs["quantization_config"] = quantization = copy.copy(quantization)
            parts = ("vision_tower", "multi_modal_projector", "model.vision_tower", "model.multi_modal_projector")
            quantization.llm_int8_skip_modules = ["lm_head", *parts]
        kwargs.setdefault("key_mapping", cls._llava_names)
        with_report, path = kwargs.pop("output_loading_info", False), pretrained_model_name_or_path
        model, report = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        norm = {key for key in {*report["missing_keys"], *report["unexpected_keys"]} if "projector.norm." in key}
        if (missing := sorted(report["missing_keys"] - norm)) and path and not with_report:
            raise ValueError(
                f"The checkpoint lacks {len(missing)} tensors of {cls.__name__}, which would stay random: "
                f"{', '.join(missing)}. Load a complete checkpoint, or the class that it was saved from."
            )
        if norm:  # Trainers would load the reference model by this name, and PEFT the base, without this norm.
            model.name_or_path = model.config.name_or_path = ""
            if not with_report:
                logger.warning(
                    f"This model's norm is not that of {path}, so the name is dropped: a reference or an adapter's "
                    "base loaded by it would differ. Save this model with `save_pretrained`, and load it from there."
                )
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":  # On AVX512, the first forward in eval mode would repack the
                module.support_avx512bf16_for_cpu = False  # weight for good; later gradients would be wrong or None.
        return (model, report) if with_report else model

    def enable_input_require_grads(self):
        # transformers hooks the embeddings of both parts; a frozen tower would then compute gradients for nothing.
        tower, text = self.base_model.vision_tower, self.get_input_embeddings()

        def require_grads(module, args, output):
            if module is text or any(parameter.requires_grad for parameter in tower.parameters()):
                output.requires_grad_(True)

        parts = (text, tower.get_input_embeddings())
        self._require_grads_hooks = [part.register_forward_hook(require_grads) for part in parts]

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        """[`~transformers.PreTrainedModel.save_pretrained`] under the module's own names, gain and bias in float32.

        `save_original_format=True` writes the older names of a LLaVA folder that the model was loaded from.
        """
        state_dict = self.state_dict() if state_dict is None else dict(state_dict)
        state_dict |= {name: value.float() for name, value in state_dict.items() if "projector.norm." in name}
        self.config.text_config.dtype = self.config.vision_config.dtype = self.dtype  # as loading sets it
        if (head := self.get_output_embeddings()) is not None:
            tied = head.weight is self.get_input_embeddings().weight  # FSDP2 gathers both tensors
            self.config.tie_word_embeddings = self.config.text_config.tie_word_embeddings = tied
            state_dict = {name: value for name, value in state_dict.items() if not (tied and name == "lm_head.weight")}
        kwargs.setdefault("save_original_format", False)
        return super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)


class NormAlignLlavaModel(NormAlignLlavaPreTrainedModel, llava.LlavaModel):
    """[`LlavaModel`] whose projector ends in the norm: `multi_modal_projector.norm`."""

    config: NormAlignLlavaConfig
    _auto_class = "AutoModel"
    _llava_names = {"^language_model.model": "language_model"}

    def __init__(self, config: NormAlignLlavaConfig):
        super().__init__(config)
        self.multi_modal_projector = NormAlignLlavaMultiModalProjector(config)
        self.post_init()


class NormAlignLlavaForConditionalGeneration(NormAlignLlavaPreTrainedModel, llava.LlavaForConditionalGeneration):
    """[`LlavaForConditionalGeneration`] whose projector ends in the norm: `model.multi_modal_projector.norm`."""

    config: NormAlignLlavaConfig
    _auto_class = "AutoModelForImageTextToText"
    # The names in older LLaVA folders, those of llava-hf among them, to this class's.
    _llava_names = {
        "^language_model.lm_head": "lm_head",
        "^language_model.model": "model.language_model",
        "^vision_tower": "model.vision_tower",
        "^multi_modal_projector": "model.multi_modal_projector",
    }

    def __init__(self, config: NormAlignLlavaConfig):
        super(llava.LlavaForConditionalGeneration, self).__init__(config)  # LLaVA's own would build both parts twice
        self.model = NormAlignLlavaModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        # Not every language model calls its embeddings embed_tokens.
        name = next(name for name, module in self.named_modules() if module is self.get_input_embeddings())
        self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        self.post_init()

    @can_return_tuple
    @wraps(llava.LlavaForConditionalGeneration.forward)
    def forward(self, *args, labels=None, **kwargs):
        """LLaVA's forward, with logits scaled and capped as in the language model's own class."""
        outputs, text = super().forward(*args, return_dict=True, **kwargs), self.config.text_config
        scale = getattr(text, "logit_scale", None) or 1.0 / getattr(text, "logits_scaling", 1.0)  # Cohere, Granite
        scale = 1.0 / scale if text.model_type == "hyperclovax" else scale
        if scale != 1.0:
            outputs.logits = outputs.logits * scale
        if (cap := getattr(text, "final_logit_softcapping", None)) is not None:  # Gemma 2
            outputs.logits = torch.tanh(outputs.logits / cap) * cap
        loss = None if labels is None else self.loss_function(outputs.logits, labels, text.vocab_size, **kwargs)
        return type(outputs)(loss=loss, **outputs)


# A registered class takes precedence over remote code, so code from a checkpoint must not register itself.
if not __name__.startswith("transformers_modules."):
    AutoConfig.register("normalign_llava", NormAlignLlavaConfig)
    AutoModel.register(NormAlignLlavaConfig, NormAlignLlavaModel)
    for auto in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto.register(NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration)
