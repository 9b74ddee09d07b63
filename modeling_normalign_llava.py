# Copyright 2026 The NormAlign-LLaVA authors. SPDX-License-Identifier: Apache-2.0
# From the package normalign-llava 0.1.0. To review it, begin at configuration_normalign_llava.py.
"""NormAlign-LLaVA: LLaVA, and a norm whose gain gives visual tokens the norm of text embeddings.

Equations: https://huggingface.co/papers/2512.08374. Compare with transformers' modeling_llava.py.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    __version__,
)
from transformers.integrations import deepspeed_config, is_deepspeed_zero3_enabled
from transformers.models.auto import AutoModelForMultimodalLM
from transformers.models.llava import modeling_llava as llava
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import can_return_tuple, logging
from transformers.utils.quantization_config import BitsAndBytesConfig

from .configuration_normalign_llava import NormAlignLlavaConfig, embedding_scales


logger = logging.get_logger(__name__)


def gain_magnitude(gain: Tensor, gain_floor: float) -> Tensor:
    """Returns s = max(mean |gain|, gain_floor), 0-d: compensation divides by it (eq. 12)."""
    dtype = torch.promote_types(gain.dtype, torch.float32)
    mean = gain.detach().abs().mean(dtype=dtype)
    return mean.clamp(min=gain_floor)


class _CompensatedLayerNorm(torch.autograd.Function):
    # The gradient at x is linear in the gain, so with gain / s it comes out divided by s. The
    # gradients at gain and bias do not depend on the gain. So one fused kernel gives all three.
    # The caller casts the outputs. Here, torch 2.11 would compile a cast that changes nothing to
    # gradients of 0.
    @staticmethod
    def forward(ctx, x, eps, gain_floor, gain, bias):
        dtype = torch.promote_types(x.dtype, gain.dtype)
        outputs, mean, rstd = torch.native_layer_norm(
            x.to(dtype), gain.shape, gain.to(dtype), bias.to(dtype), eps
        )
        ctx.save_for_backward(x, gain, bias, mean, rstd)
        ctx.gain_floor = gain_floor
        return outputs

    @staticmethod
    def backward(ctx, grad_outputs):
        x, gain, bias, mean, rstd = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, gain.dtype)
        divided_gain = gain / gain_magnitude(gain, ctx.gain_floor)
        grad_x, grad_gain, grad_bias = torch.ops.aten.native_layer_norm_backward.default(
            grad_outputs,
            x.to(dtype),
            gain.shape,
            mean,
            rstd,
            divided_gain.to(dtype),
            bias.to(dtype),
            [True, True, True],
        )
        return grad_x.to(x.dtype), None, None, grad_gain.to(gain.dtype), grad_bias.to(bias.dtype)


class _CompensatedRMSNorm(torch.autograd.Function):
    # The forward is torch's. Only the backward is compensated, and only its gradient at x.
    # The gradient at the gain does not depend on the gain.
    @staticmethod
    def forward(ctx, x, eps, gain_floor, gain):
        dtype = torch.promote_types(x.dtype, gain.dtype)
        ctx.save_for_backward(x, gain)
        ctx.eps = eps
        ctx.gain_floor = gain_floor
        return F.rms_norm(x.to(dtype), gain.shape, gain.to(dtype), eps)

    @staticmethod
    def backward(ctx, grad_outputs):
        x, gain = ctx.saved_tensors
        stored_dtype = torch.promote_types(x.dtype, gain.dtype)
        dtype = torch.promote_types(stored_dtype, torch.float32)
        wide = x.to(dtype)
        grad_outputs = grad_outputs.to(dtype)
        mean_square = wide.square().mean(-1, keepdim=True)
        rstd = (mean_square + ctx.eps).rsqrt()
        x_hat = wide * rstd
        divided_gain = gain / gain_magnitude(gain, ctx.gain_floor)
        grad_x_hat = grad_outputs * divided_gain.to(dtype)
        projection = (grad_x_hat * x_hat).mean(-1, keepdim=True)
        grad_x = rstd * (grad_x_hat - x_hat * projection)
        grad_gain = (grad_outputs * x_hat).sum_to_size(gain.shape)
        return grad_x.to(x.dtype), None, None, grad_gain.to(gain.dtype)


class _CompensatedNorm(nn.Module):
    # Trainers put frozen modules into evaluation mode. If this norm is frozen, and modules below it
    # are trained, NormAlignLlavaModel sets this before the norm is computed.
    model_trains = False

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, gain_floor: float = 1e-3, compensate: bool = True
    ):
        super().__init__(hidden_size, eps=eps, dtype=torch.float32)
        self.gain_floor = gain_floor
        self.compensate = compensate

    def compensates_gradient(self, x: Tensor) -> bool:
        """Whether backward will divide the gradient at `x`: there is one, and this is training."""
        is_training = self.training or self.model_trains
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        return self.compensate and is_training and has_gradient

    def train(self, mode: bool = True):
        self.model_trains = False
        gain = self.weight  # the optimizer's: in a step FSDP2 has a copy. DeepSpeed's is float32
        is_rounded = gain.itemsize < 4 and deepspeed_config() is None
        if mode and gain.requires_grad and is_rounded:
            logger.warning_once(
                f"The gain is trained in {gain.dtype}: small updates vanish. Make it float32: "
                "[m.float() for m in trainer.model.modules() if hasattr(m, 'gain_floor')]"
            )
        return super().train(mode)


class GlobalWeightCompensatedLayerNorm(_CompensatedNorm, nn.LayerNorm):
    """LayerNorm whose backward does not shrink with its gain (Global Weight Compensation).

    Forward of `x` `(..., d)`: `gain * (x - mean) / sqrt(var + eps) + bias`, bit for bit torch's.
    Backward (eqs. 12, 24-26): only the gradient at the normalised `x` is divided, by
    `max(mean |gain|, gain_floor)`, unless `compensate=False`. In evaluation mode gradients are
    true, for saliency and attribution. A model trains if it is in training mode, or if a module of
    its vision tower or projector is. Gain and bias are float32, since a gain of 0.0134 in bfloat16
    moves in steps of 6e-5. The result has the dtype of `x`.
    """

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight
        bias = self.bias
        if self.compensates_gradient(x):
            outputs = _CompensatedLayerNorm.apply(x, self.eps, self.gain_floor, gain, bias)
        else:
            dtype = torch.promote_types(x.dtype, gain.dtype)
            outputs = F.layer_norm(
                x.to(dtype), self.normalized_shape, gain.to(dtype), bias.to(dtype), self.eps
            )
        return outputs.to(x.dtype)


class GlobalWeightCompensatedRMSNorm(_CompensatedNorm, nn.RMSNorm):
    """The same for `gain * x / sqrt(mean(x^2) + eps)` (eq. 3): norm sqrt(d) before the gain."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight
        if self.compensates_gradient(x):
            outputs = _CompensatedRMSNorm.apply(x, self.eps, self.gain_floor, gain)
        else:
            dtype = torch.promote_types(x.dtype, gain.dtype)
            outputs = F.rms_norm(x.to(dtype), self.normalized_shape, gain.to(dtype), self.eps)
        return outputs.to(x.dtype)


@contextmanager
def gathered(*parameters: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields whole tensors in place of shards (DTensor, ZeRO-3). All ranks must call this."""
    if is_deepspeed_zero3_enabled():
        # An `import` statement would make deepspeed a requirement of every checkpoint's code.
        deepspeed = import_module("deepspeed")
        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0):
            yield parameters
        return
    tensors = []
    for parameter in parameters:
        is_sharded = type(parameter).__name__ == "DTensor"
        tensors.append(parameter.full_tensor() if is_sharded else parameter)
    yield tuple(tensors)


@torch.no_grad()
def embedding_row_norms(weight: Tensor) -> Tensor:
    """Returns the L2 norm of every row of an embedding matrix `(V, d)`: `(V,)`, float64, on CPU.

    Rows are widened in chunks. A sharded matrix (DTensor, DeepSpeed ZeRO-3) is gathered, so all
    ranks must call this. Raises ValueError on a meta or quantized matrix.
    """
    with gathered(weight) as (matrix,):
        if matrix.is_meta or not matrix.is_floating_point() or matrix.itemsize < 2:
            state = "on meta or on disk" if matrix.is_meta else f"quantized ({matrix.dtype})"
            raise ValueError(f"The embedding matrix is {state}. Load it in full precision.")
        norms = []
        for rows in matrix.detach().split(4096):
            norms.append(rows.cpu().double().norm(dim=-1))
        return torch.cat(norms)


def mean_embedding_norm(weight_or_norms: Tensor, exclude_rows: Iterable[int] = ()) -> float:
    """Returns N_text: the mean L2 norm of the embeddings' rows that are not all zero (eq. 11).

    Args:
        weight_or_norms: The matrix `(V, d)`, or its rows' norms `(V,)`. The mean is float64.
        exclude_rows: Rows that do not count: image token, padding of the vocabulary.

    Raises:
        ValueError: If the matrix is on meta or quantized, if a row that counts is NaN or infinite,
            or if none counts.
    """
    norms = weight_or_norms
    if norms.ndim == 2:
        norms = embedding_row_norms(weight_or_norms)
    is_counted = norms != 0
    is_counted[list(exclude_rows)] = False
    is_bad = is_counted & ~norms.isfinite()
    if is_bad.any():
        bad = is_bad.nonzero().flatten().tolist()
        raise ValueError(f"{len(bad)} embedding rows are NaN or infinite, among them {bad[:10]}.")
    if not is_counted.any():
        raise ValueError(f"All {len(norms)} embedding rows are zero or excluded. Load the weights.")
    return norms[is_counted].mean().item()


def rows_of_token(norms: Tensor, token_id: int) -> list[int]:
    """Returns the rows that have the norm of a token's row, by the norms `(V,)` of all rows.

    Padding of the vocabulary repeats the image token's row up to a sign, and so has its norm.
    """
    if not 0 <= token_id < len(norms):
        return []
    return (norms == norms[token_id]).nonzero().flatten().tolist()


def initial_gain(config: NormAlignLlavaConfig, n_text: float) -> float:
    """Returns the start of each element of the gain (eq. 11), given N_text in the decoder."""
    if config.projector_gain_init == "one":
        return 1.0
    _, scale_all = embedding_scales(config.text_config)
    return n_text / scale_all / config.text_config.hidden_size**0.5


class NormAlignLlavaMultiModalProjector(llava.LlavaMultiModalProjector):
    """LLaVA's projector, then the norm: visual features `(..., d_vision)` to tokens `(..., d)`.

    The first `skipped_tokens` features of each image are left out: registers.
    """

    skipped_tokens = 0  # NormAlignLlavaModel sets this before each pass

    def __init__(self, config: NormAlignLlavaConfig):
        super().__init__(config)
        norms = {
            "layer_norm": GlobalWeightCompensatedLayerNorm,
            "rms_norm": GlobalWeightCompensatedRMSNorm,
        }
        if config.projector_norm == "none":
            self.norm = nn.Identity()
        else:
            self.norm = norms[config.projector_norm](
                config.text_config.hidden_size,
                eps=config.projector_norm_eps,
                gain_floor=config.gain_floor,
                compensate=config.gradient_compensation == "global",
            )

    def forward(self, image_features: Tensor) -> Tensor:
        if self.skipped_tokens:
            image_features = image_features[:, self.skipped_tokens :]
        return self.norm(super().forward(image_features))


class NormAlignLlavaPreTrainedModel(llava.LlavaPreTrainedModel):
    """The base of both models: aligning the gain, loading and saving without losses."""

    config: NormAlignLlavaConfig
    _keep_in_fp32_modules_strict = ["multi_modal_projector.norm"]

    @property
    def dtype(self) -> torch.dtype:
        """The language model's, to load a save in: training may leave other parts in another."""
        return self.base_model.language_model.dtype

    def measure_text_embedding_norm(self) -> float:
        """Returns N_text, the mean norm of text entering the decoder (eq. 11).

        Raises ValueError as [`mean_embedding_norm`] does.
        """
        norms = embedding_row_norms(self.get_input_embeddings().weight)
        mean = mean_embedding_norm(norms, rows_of_token(norms, self.config.image_token_id))
        scale_text, scale_all = embedding_scales(self.config.text_config)
        return mean * scale_text * scale_all

    def align_projector_norm(self) -> float:
        """Sets the gain to N_text / sqrt(d) (eq. 11) and the bias to 0. Returns N_text.

        The configuration's `text_embedding_norm` is set to N_text. With `projector_gain_init="one"`
        the gain is 1. A factor on all input embeddings (Granite) divides the gain.

        Raises:
            ValueError: If the model has no norm, or as [`mean_embedding_norm`] does.
        """
        norm = self.base_model.multi_modal_projector.norm
        if isinstance(norm, nn.Identity):
            raise ValueError('This model has projector_norm="none": it has no norm to align.')
        n_text = self.measure_text_embedding_norm()
        with gathered(*norm.parameters()):
            _fill_norm(norm, initial_gain(self.config, n_text))
        self.config.text_embedding_norm = n_text
        return n_text

    def _init_weights(self, module: nn.Module):
        """Initializes a module. The norm gets its gain from the text embeddings, and bias 0.

        Raises ValueError if the embeddings' norm cannot be measured.
        """
        if not isinstance(module, _CompensatedNorm):
            super()._init_weights(module)
        elif not module.weight.is_meta:
            # Embeddings and norm that were loaded keep their values: transformers marks them, and
            # its functions of initialization do not change marked tensors.
            self.base_model.language_model._initialize_weights(self.get_input_embeddings())
            n_text = self.measure_text_embedding_norm()
            self.config.text_embedding_norm = n_text
            _fill_norm(module, initial_gain(self.config, n_text))

    def initialize_weights(self):
        # In custom code, transformers skips modules without parameters of their own. One is CLIP's
        # attention, and it initializes its linear layers. The two parts are transformers' own
        # classes, so nothing is skipped if each is initialized by itself.
        for part in (self.base_model.vision_tower, self.base_model.language_model):
            part.initialize_weights()
        super().initialize_weights()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Loads a checkpoint as transformers does. A LLaVA gets an aligned norm.

        bitsandbytes quantizes only the decoder's layers, unless `llm_int8_skip_modules` is set.

        Raises:
            ValueError: If other tensors than the norm's are missing and `output_loading_info` is
                not set.
        """
        path = pretrained_model_name_or_path
        if "quantization_config" in kwargs:
            kwargs["quantization_config"] = decoder_quantization(kwargs["quantization_config"])
        kwargs.setdefault("key_mapping", cls._llava_names)
        returns_report = kwargs.pop("output_loading_info", False)
        model, report = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        if path and not returns_report:
            cls._check_complete(path, report, model.config)
        if any(_is_of_norm(key) for key in (*report["missing_keys"], *report["unexpected_keys"])):
            # Trainers would load the reference by this name, and PEFT the base.
            model.name_or_path = ""
            model.config.name_or_path = ""
            if not returns_report:
                logger.warning(
                    f"The norm was not loaded from {path}, so name_or_path was cleared: a "
                    "reference or an adapter's base loaded by it would differ. Save this model, "
                    "and load that."
                )
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":  # AVX512 would repack the weight for good
                module.support_avx512bf16_for_cpu = False  # in eval mode: gradients would be wrong
        return (model, report) if returns_report else model

    @classmethod
    def _check_complete(cls, path, report: Mapping, config: PreTrainedConfig) -> None:
        """Raises ValueError if tensors are missing, other than the norm's."""
        missing = sorted(key for key in report["missing_keys"] if not _is_of_norm(key))
        if not missing:
            return
        remedy = ""
        unexpected = [key for key in report["unexpected_keys"] if not _is_of_norm(key)]
        if unexpected:  # the missing ones may have these names now
            remedy = remedy_for_renamed_tensors(config)
        remedy = remedy or "Load a complete checkpoint, or the class that was saved."
        raise ValueError(
            f"{path} lacks {len(missing)} tensors of {cls.__name__}. {remedy} "
            f"The tensors: {', '.join(missing)}."
        )

    def enable_input_require_grads(self):
        # transformers hooks both parts' embeddings; a frozen tower would compute useless gradients.
        tower = self.base_model.vision_tower
        text_embeddings = self.get_input_embeddings()

        def require_grads(module, args, output):
            is_text = module is text_embeddings
            if is_text or any(parameter.requires_grad for parameter in tower.parameters()):
                embedded = output[0] if isinstance(output, tuple) else output  # data2vec's
                embedded.requires_grad_(True)

        self._require_grads_hooks = []
        for embeddings in self.embeddings_of_parts():
            self._require_grads_hooks.append(embeddings.register_forward_hook(require_grads))

    def embeddings_of_parts(self) -> list[nn.Module]:
        """Returns the text's embeddings, and the encoder's if its class names them."""
        embeddings = [self.get_input_embeddings()]
        with suppress(NotImplementedError):  # RADIO's does not
            embeddings.append(self.base_model.vision_tower.get_input_embeddings())
        return embeddings

    def save_pretrained(
        self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs
    ):
        """[`~transformers.PreTrainedModel.save_pretrained`] under own names, norm in float32."""
        tensors = stored_tensors(self, state_dict)
        text_config = self.config.text_config
        text_config.dtype = self.dtype  # both parts are loaded in it
        self.config.vision_config.dtype = self.dtype
        head = self.get_output_embeddings()
        if head is not None:
            is_tied = head.weight is self.get_input_embeddings().weight
            self.config.tie_word_embeddings = is_tied
            text_config.tie_word_embeddings = is_tied
        kwargs.setdefault("save_original_format", False)  # True: the older names of a loaded LLaVA
        return super().save_pretrained(save_directory, is_main_process, tensors, *args, **kwargs)


def remedy_for_renamed_tensors(config: PreTrainedConfig) -> str:
    """Returns what to do if another version of transformers saved a model, else an empty text.

    Versions of transformers have different names for the same tensors, such as DINOv2's.
    """
    saved_version = config.transformers_version
    if saved_version in (None, __version__):
        return ""
    return (
        f"transformers {saved_version} saved it and may name tensors differently than "
        f"{__version__}, the installed version: run `pip install transformers=={saved_version}`."
    )


def stored_tensors(
    model: NormAlignLlavaPreTrainedModel, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns the tensors that `save_pretrained` stores: the norm in float32, tied weights once."""
    tensors = dict(model.state_dict() if state_dict is None else state_dict)
    for name in tensors:
        if _is_of_norm(name):
            tensors[name] = tensors[name].float()
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:
        tensors.pop("lm_head.weight", None)  # FSDP2 gathers both tensors
    return tensors


def _fill_norm(norm: nn.Module, gain: float) -> None:
    for name, parameter in norm.named_parameters():
        nn.init.constant_(parameter, gain if name == "weight" else 0.0)


def _is_of_norm(name: str) -> bool:
    return "projector.norm." in name


def decoder_quantization(settings):
    """Returns settings of a quantization. bitsandbytes' are limited to the decoder's layers."""
    if isinstance(settings, dict):
        settings = AutoQuantizationConfig.from_dict(settings)
    if isinstance(settings, BitsAndBytesConfig) and settings.llm_int8_skip_modules is None:
        settings = copy.copy(settings)
        settings.llm_int8_skip_modules = [
            "lm_head",
            "vision_tower",
            "multi_modal_projector",
            "model.vision_tower",
            "model.multi_modal_projector",
        ]
    return settings


class NormAlignLlavaModel(NormAlignLlavaPreTrainedModel, llava.LlavaModel):
    """[`LlavaModel`] whose projector ends in the norm: `multi_modal_projector.norm`."""

    _auto_class = "AutoModel"
    _llava_names = {"^language_model.model": "language_model"}

    def __init__(self, config: NormAlignLlavaConfig):
        super().__init__(config)
        self.multi_modal_projector = NormAlignLlavaMultiModalProjector(config)
        self.post_init()

    @wraps(llava.LlavaModel.get_image_features)  # generate reads its signature
    def get_image_features(self, *args, **kwargs):
        modules = [*self.vision_tower.modules(), *self.multi_modal_projector.modules()]
        is_training = self.training or any(module.training for module in modules)
        skipped_tokens = self._tokens_after_the_first(*args, **kwargs)
        for module in modules:
            if isinstance(module, _CompensatedNorm):
                module.model_trains = is_training
            if isinstance(module, NormAlignLlavaMultiModalProjector):
                module.skipped_tokens = skipped_tokens
        return super().get_image_features(*args, **kwargs)

    def _tokens_after_the_first(
        self,
        pixel_values: Tensor,
        vision_feature_layer=None,
        vision_feature_select_strategy: str | None = None,
        *args,
        **kwargs,
    ) -> int:
        """Returns how many tokens "default" leaves out besides the first, as LLaVA does not."""
        strategy = vision_feature_select_strategy or self.config.vision_feature_select_strategy
        if strategy != "default":
            return 0
        return self.config.vision_prefix_tokens - 1


# Arguments of `generate`. The cache may hold an image of an earlier turn.
_SOURCES_OF_IMAGES = [
    "pixel_values",
    "mm_encoder_outputs",
    "inputs_embeds",
    "cache",
    "past_key_values",
]
_ARGUMENTS = [*signature(llava.LlavaForConditionalGeneration.forward).parameters][1:]  # not self


class NormAlignLlavaForConditionalGeneration(
    NormAlignLlavaPreTrainedModel, llava.LlavaForConditionalGeneration
):
    """[`LlavaForConditionalGeneration`] with the norm in `model.multi_modal_projector.norm`."""

    _auto_class = "AutoModelForImageTextToText"
    # Names in older LLaVA folders, such as llava-hf's, and this class's names for them.
    _llava_names = {
        "^language_model.lm_head": "lm_head",
        "^language_model.model": "model.language_model",
        "^vision_tower": "model.vision_tower",
        "^multi_modal_projector": "model.multi_modal_projector",
    }

    def __init__(self, config: NormAlignLlavaConfig):
        super(llava.LlavaForConditionalGeneration, self).__init__(config)  # builds no part twice
        text_config = config.text_config
        self.model = NormAlignLlavaModel(config)
        self.lm_head = nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False)
        # Not every language model calls its embeddings embed_tokens.
        embeddings = self.get_input_embeddings()
        name = next(name for name, module in self.named_modules() if module is embeddings)
        self._tied_weights_keys = {"lm_head.weight": f"{name}.weight"}
        self.post_init()

    @can_return_tuple
    @wraps(llava.LlavaForConditionalGeneration.forward)
    def forward(self, *args, **kwargs):
        kwargs |= zip(_ARGUMENTS, args, strict=False)
        labels = kwargs.pop("labels", None)  # LLaVA's loss would be of logits that are not scaled
        outputs = super().forward(return_dict=True, **kwargs)
        text_config = self.config.text_config
        outputs.logits = _scaled_logits(outputs.logits, text_config)
        if labels is None:
            return outputs
        loss = self.loss_function(outputs.logits, labels, text_config.vocab_size, **kwargs)
        return type(outputs)(loss=loss, **outputs)

    @wraps(llava.LlavaForConditionalGeneration.generate)
    def generate(self, inputs: Tensor | None = None, *args, **kwargs):
        input_ids = kwargs.get("input_ids", inputs)
        has_placeholder = input_ids is not None and self.config.image_token_id in input_ids
        has_images = any(kwargs.get(name) is not None for name in _SOURCES_OF_IMAGES)
        if has_placeholder and not has_images:
            logger.warning_once(
                "The prompt has the image token, but no image was given: the answer is about no "
                'image. Pass pixel_values, or use pipeline("image-text-to-text").'
            )
        return super().generate(inputs, *args, **kwargs)


def _scaled_logits(logits: Tensor, text_config: PreTrainedConfig) -> Tensor:
    """Returns logits `(..., V)` as the language model's own class scales them.

    Cohere multiplies them, Granite divides them, and Gemma 2 and RecurrentGemma cap them.
    """
    scale = getattr(text_config, "logit_scale", None)
    if not scale:
        scale = 1.0 / getattr(text_config, "logits_scaling", 1.0)
    if text_config.model_type == "hyperclovax":
        scale = 1.0 / scale
    if scale != 1.0:
        logits = logits * scale
    softcap = getattr(text_config, "final_logit_softcapping", None)
    if softcap is None:
        softcap = getattr(text_config, "logits_soft_cap", None)  # RecurrentGemma's name of it
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


# Registered classes take precedence over remote code, so a checkpoint's code does not register.
if not __name__.startswith("transformers_modules."):
    AutoConfig.register("normalign_llava", NormAlignLlavaConfig)
    AutoModel.register(NormAlignLlavaConfig, NormAlignLlavaModel)
    for auto in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        auto.register(NormAlignLlavaConfig, NormAlignLlavaForConditionalGeneration)
