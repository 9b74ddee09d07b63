# SPDX-License-Identifier: Apache-2.0
"""Finds, checks and loads checkpoints, all their files at one commit; reads cards and records."""

import copy
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import HTTPError
from huggingface_hub.repocard import metadata_load
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..errors import install
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .files import CARD, find_checkpoint, json_or_none
from .prompts import fix_date, stop_as_trained
from .untrusted import AGAIN, check_files, check_weights, files_of, loading


logger = logging.get_logger(__name__)

_SAVE = "Save in its folder the one of the model that it was made from"
# Not needed: LLaVA reads hidden states, not a ViT's pooling layer. A LLaVA has no norm yet.
_MAY_BE_ABSENT = ("pooler.", "model.multi_modal_projector.norm.")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder or Hub id, whose files were checked; `stored` is its `config.json`."""

    name: str
    revision: str | None
    stored: dict[str, Any]
    trust_remote_code: bool = False

    @property
    def model_type(self) -> str | None:
        return self.stored.get("model_type")

    @cached_property
    def config(self) -> PreTrainedConfig:
        return self.read_config(AutoConfig)

    def read_config(self, cls: Any) -> Any:
        with loading(f"The configuration of {self.name}"):
            return cls.from_pretrained(self.name, **self._read_at)

    @property
    def _read_at(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @cached_property
    def processor(self) -> LlavaProcessor:
        """The processor of a LLaVA or a NormAlign-LLaVA."""
        processor = self.preprocessor(AutoProcessor)
        with loading(f"The processor of {self.name}"):
            if self.stored:
                self.check_image_token(processor)
            check_processor(processor)
            fix_date(processor)
        return processor

    def check_image_token(self, processor: LlavaProcessor) -> None:
        """Raises ValueError if a processor has another image token than the configuration."""
        stored, in_tokenizer = self.config.image_token_id, processor.image_token_id
        if in_tokenizer != stored:
            tokens = f"{stored} in config.json and {in_tokenizer} in its tokenizer"
            raise ValueError(f"The image token of {self.name} is {tokens}. {_SAVE}.")

    def preprocessor(self, cls: Any) -> Any:
        """A tokenizer, an image processor or a processor."""
        kinds = {"AutoTokenizer": "tokenizer", "AutoImageProcessor": "image processor"}
        kind = kinds.get(cls.__name__, "processor")
        remedy = f"{_SAVE}: `{cls.__name__}.from_pretrained(ORIGINAL).save_pretrained(FOLDER)`."
        try:
            with loading(f"The {kind} of {self.name}", remedy=remedy):
                loaded = cls.from_pretrained(self.name, **self._read_at)
        except (OSError, ImportError, ValueError) as error:
            text = str(error).lower()  # in several wordings
            for package in ("torchvision", "num2words"):
                if package in text and find_spec(package) is None:
                    problem = f"The {kind} of {self.name} needs {package}, which is not installed"
                    raise ImportError(f"{problem}. {install('vision')}.") from error
            raise
        if kind == "processor" and not isinstance(loaded, ProcessorMixin):
            raise ValueError(f"{self.name} has a tokenizer but no processor for images. {remedy}")
        return loaded

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of its files of weights, which are fetched and checked once."""
        return sum(file.stat().st_size for file in check_weights(self.name, self.revision))

    def load(
        self,
        cls: Any = NormAlignLlavaForConditionalGeneration,
        dtype: torch.dtype | str = "auto",
        *,
        config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Its model, by `cls.from_pretrained`; a `config` of a part is used in place of its own."""
        size = self.weight_bytes
        # ZeRO-3 would shard the model on meta.
        if not self.trust_remote_code and not is_deepspeed_zero3_enabled():
            parameters = self.without_weights(cls, config).num_parameters()
            if parameters > 4 * size + 2**24:  # those of 2 bits, and those of the norm
                has = f"has {parameters:,} parameters, its weights {size:,} bytes"
                raise ValueError(f"config.json of {self.name} {has}. {AGAIN}")
        kwargs |= {"config": config, "dtype": dtype, "output_loading_info": True, **self._read_at}
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # a report would list what may be absent, or is not read
        try:
            with loading(f"The model {self.name}"):
                model, info = cls.from_pretrained(self.name, **kwargs)
        finally:
            logging.set_verbosity(verbosity)
        for kind in ("unexpected_keys", "missing_keys"):
            names = sorted(key for key in info[kind] if not key.startswith(_MAY_BE_ABSENT))
            listed = f"{cls.__name__}: {', '.join(names[:10])}"
            if names and kind == "missing_keys":
                raise ValueError(f"{self.name} lacks {len(names)} tensors of {listed}.")
            if names and config is None:
                logger.warning(f"{self.name} has {len(names)} tensors that are not of {listed}.")
        if self.model_type == NormAlignLlavaConfig.model_type and model.can_generate():
            # Checkpoints that were made before know the language model's ends alone.
            with suppress(OSError, ValueError):  # it has no processor, and whoever loads it has one
                stop_as_trained(model, self.processor)
        return model

    def without_weights(self, cls: Any, config: PreTrainedConfig | None = None) -> PreTrainedModel:
        """The model that [`load`] makes, on meta."""
        remote = {"trust_remote_code": True} if self.trust_remote_code else {}
        with loading(f"The configuration of {self.name}"), torch.device("meta"):
            expected = copy.deepcopy(config or self.config)
            if type(expected) is getattr(cls, "config_class", None):
                return cls._from_config(expected, **remote)
            make = getattr(cls, "from_config", AutoModelForImageTextToText.from_config)  # a LLaVA's
            return make(expected, **remote)


def open_checkpoint(
    name: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> Checkpoint:
    """Finds a checkpoint and checks its files but the weights; loads nothing, runs no code."""
    source, commit = find_checkpoint(name, revision, remedy=remedy)
    return Checkpoint(source, commit, check_files(source, commit))


def check_processor(processor: LlavaProcessor, model: PreTrainedModel | None = None) -> int:
    """The number of image tokens per image, compared with the features that `model` computes."""
    image = Image.new("RGB", (97, 61), "white")
    inputs = processor(images=image, text=processor.image_token, return_tensors="pt")
    tokens = int((inputs["input_ids"] == processor.image_token_id).sum())
    counts = [tokens, processor._get_num_multimodal_tokens([(61, 97)])["num_image_tokens"][0]]
    if model is not None:
        with torch.no_grad():
            pixels = inputs["pixel_values"].to(model.device, model.dtype)
            counts.append(sum(map(len, model.get_image_features(pixels).pooler_output)))
    if len(set(counts)) > 1:
        raise ValueError(
            f"An image has {tokens} image tokens in the prompt, and "
            f"{' and '.join(map(str, counts[1:]))} by processor and model. "
            "The image processor must give all images one size, a multiple of the patch."
        )
    return tokens


FAILURES = (OSError, ValueError, HTTPError, yaml.YAMLError)  # of the Hub client and of cards


def licence_of(name: str, revision: str | None = None) -> dict[str, str | None] | None:
    """The licence in a model's card: `license`, `license_name` and `license_link` of its metadata.

    Several become "other", with all in `license_name`. A relative link becomes absolute, or None.
    """
    card, _ = _card(name, revision, "model")
    licence, called, link = (card.get(key) for key in ("license", "license_name", "license_link"))
    if isinstance(licence, list) and licence:
        names = ", ".join(map(str, licence))
        licence, called = (licence[0], called) if len(licence) == 1 else ("other", names)
    if link and "://" not in str(link):
        blob = f"{constants.ENDPOINT}/{name}/blob/{revision or 'main'}/{link}"
        link = None if os.path.isdir(name) else blob
    terms = {"license": licence, "license_name": called, "license_link": link}
    return {key: str(value) if value else None for key, value in terms.items()} if licence else None


def hub_dataset(name: str) -> dict[str, Any]:
    """A Hub data set now: `id`, `revision` (the commit), `license` and `language` of its card."""
    card, commit = _card(name, None, "dataset")
    if commit is None:
        with suppress(*FAILURES):
            commit = HfApi().dataset_info(name).sha
    licence, language = card.get("license"), card.get("language")
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    if isinstance(language, str):
        language = [language]
    return {"id": name, "revision": commit, "license": licence, "language": language}


def read_record(checkpoint: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """The JSON object in the file `name` of a checkpoint folder or Hub repository, or None."""
    with suppress(*FAILURES):
        for file in files_of(checkpoint, [name], revision):
            content = json_or_none(file)
            return content if isinstance(content, dict) else None
    return None


def _card(name: str, revision: str | None, kind: str) -> tuple[dict[str, Any], str | None]:
    """The metadata of a card, and its commit if it is on the Hub."""
    try:
        if kind == "model" and os.path.isdir(name):
            return metadata_load(Path(name, CARD)) or {}, None
        file = Path(hf_hub_download(name, CARD, revision=revision, repo_type=kind))
        return metadata_load(file) or {}, file.parent.name
    except FAILURES:
        return {}, None
