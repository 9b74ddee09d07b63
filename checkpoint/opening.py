# SPDX-License-Identifier: Apache-2.0
"""Opens checkpoints: found, checked, then loaded, and of a Hub id all at one commit."""

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import is_torchvision_available

from ..errors import install
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .find import find_checkpoint
from .loading import AGAIN, loading
from .untrusted import bytes_of_weights, check_files


_PER_BYTE, _NEW = 4, 2**24
"""Most parameters per byte of weights, those of 2 bits, and most new parameters, those of the norm."""

_KINDS = {AutoTokenizer: "tokenizer", AutoImageProcessor: "image processor"}
_SAVE = "Save in its folder the one of the model that it was made from"
# Not needed: LLaVA reads hidden states, not a ViT's pooling layer. A LLaVA has no norm yet.
_MAY_BE_ABSENT = ("pooler.", "model.multi_modal_projector.norm.")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder or Hub id, whose files were checked; see [`open_checkpoint`].

    Attributes:
        name: Folder or Hub id.
        revision: The commit of a Hub id, at which all its files are read.
        stored: The content of `config.json`.
        trust_remote_code: Whether code that comes with it may run.
    """

    name: str
    revision: str | None
    stored: dict[str, Any]
    trust_remote_code: bool = False

    @property
    def model_type(self) -> str | None:
        """The model type that `config.json` names."""
        return self.stored.get("model_type")

    @cached_property
    def config(self) -> PreTrainedConfig:
        """Its configuration. Raises ValueError if it cannot be read."""
        return self.read_config(AutoConfig)

    def read_config(self, cls: Any) -> Any:
        """Its configuration, as one of the class `cls`. Raises ValueError if it cannot be read."""
        with loading(f"The configuration of {self.name}"):
            return cls.from_pretrained(self.name, revision=self.revision, trust_remote_code=self.trust_remote_code)

    @cached_property
    def processor(self) -> LlavaProcessor:
        """The processor of a LLaVA or a NormAlign-LLaVA."""
        processor = self.preprocessor(AutoProcessor)
        with loading(f"The processor of {self.name}"):
            if self.stored and processor.image_token_id != self.config.image_token_id:
                raise ValueError(
                    f"The image token of {self.name} is {self.config.image_token_id} in config.json and "
                    f"{processor.image_token_id} in its tokenizer. {_SAVE}."
                )
            check_processor(processor)
        return processor

    def preprocessor(self, cls: Any) -> Any:
        """A tokenizer, an image processor or a processor, with errors that name the folder and what it lacks."""
        kind = _KINDS.get(cls, "processor")
        remedy = f"{_SAVE}: `{cls.__name__}.from_pretrained(ORIGINAL).save_pretrained(FOLDER)`."
        try:
            with loading(f"The {kind} of {self.name}", remedy=remedy):
                loaded = cls.from_pretrained(
                    self.name, revision=self.revision, trust_remote_code=self.trust_remote_code
                )
                if kind == "processor" and not isinstance(loaded, ProcessorMixin):
                    raise ValueError(f"{self.name} has a tokenizer but no processor for images. {remedy}")
        except (OSError, ImportError, ValueError) as error:
            if "torchvision" not in str(error).lower() or is_torchvision_available():  # in several wordings
                raise
            raise ImportError(
                f"The {kind} of {self.name} needs torchvision, which is not installed. {install('vision')}"
            ) from error
        return loaded

    def load(
        self,
        cls: Any = NormAlignLlavaForConditionalGeneration,
        dtype: torch.dtype | str = "auto",
        *,
        config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Its model, by `cls.from_pretrained`, of which `kwargs` are; a `config` is used in place of its own."""
        size = bytes_of_weights(self.name, self.revision)
        if not self.trust_remote_code and not is_deepspeed_zero3_enabled():  # which would shard the meta model
            parameters = self.without_weights(cls, config).num_parameters()
            if parameters > _PER_BYTE * size + _NEW:
                raise ValueError(
                    f"config.json of {self.name} has {parameters:,} parameters, but its weights have {size:,} bytes. "
                    f"{AGAIN}"
                )
        kwargs |= {"config": config, "revision": self.revision, "trust_remote_code": self.trust_remote_code}
        with loading(f"The model {self.name}"), _reports_of_faults(is_part=config is not None):
            model, info = cls.from_pretrained(self.name, dtype=dtype, output_loading_info=True, **kwargs)
        if missing := sorted(key for key in info["missing_keys"] if not key.startswith(_MAY_BE_ABSENT)):
            raise ValueError(f"{self.name} lacks {len(missing)} tensors of {cls.__name__}: {', '.join(missing[:10])}.")
        return model

    def without_weights(self, cls: Any, config: PreTrainedConfig | None = None) -> PreTrainedModel:
        """The model that [`load`] makes, on meta."""
        remote = {"trust_remote_code": True} if self.trust_remote_code else {}
        with loading(f"The configuration of {self.name}"), torch.device("meta"):
            expected = copy.deepcopy(config or self.config)
            make = getattr(cls, "from_config", AutoModelForImageTextToText.from_config)  # of a LLaVA
            make = cls._from_config if type(expected) is getattr(cls, "config_class", None) else make
            return make(expected, **remote)


@contextmanager
def _reports_of_faults(is_part: bool) -> Iterator[None]:
    """Hides transformers' report of a load if only tensors that may be absent are, or, of a part, others are there."""

    def is_no_report_or_has_faults(record: logging.LogRecord) -> bool:
        rows = [line for line in record.getMessage().splitlines() if "| " in line][1:]  # without the header
        expected = (row.startswith(_MAY_BE_ABSENT) or (is_part and "UNEXPECTED" in row) for row in rows)
        return "LOAD REPORT" not in record.getMessage() or not all(expected)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_no_report_or_has_faults)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report_or_has_faults)


def open_checkpoint(
    name: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> Checkpoint:
    """Finds a checkpoint and checks all its files but the weights; loads nothing, and never runs its code.

    Raises:
        ValueError: It does not exist (then `remedy` is told), is an adapter, or [`check_files`] refuses a file.
    """
    source, commit = find_checkpoint(name, revision, remedy=remedy)
    return Checkpoint(source, commit, check_files(source, commit))


def check_processor(processor: LlavaProcessor, model: PreTrainedModel | None = None) -> int:
    """The number of image tokens per image, compared with the features that `model` computes for an image."""
    image = Image.new("RGB", (97, 61), "white")
    inputs = processor(images=image, text=processor.image_token, return_tensors="pt")
    counts = {
        "the prompt": int((inputs["input_ids"] == processor.image_token_id).sum()),
        "_get_num_multimodal_tokens": processor._get_num_multimodal_tokens([(61, 97)])["num_image_tokens"][0],
    }
    if model is not None:
        with torch.no_grad():
            pixels = inputs["pixel_values"].to(model.device, model.dtype)
            counts["the model"] = sum(map(len, model.get_image_features(pixels).pooler_output))
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {where}" for where, count in counts.items())
        raise ValueError(
            f"The number of image tokens differs: {listed}. The image processor must give all images one size, a "
            "multiple of the patch."
        )
    return counts["the prompt"]
