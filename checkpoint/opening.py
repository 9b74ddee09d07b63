# SPDX-License-Identifier: Apache-2.0
"""Finds, checks and loads checkpoints, with all files at one commit. Reads cards and records."""

import copy
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
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
from ..errors import check_installed
from ..modeling_normalign_llava import (
    NormAlignLlavaForConditionalGeneration,
    remedy_for_renamed_tensors,
)
from .files import CARD, json_or_none, require_checkpoint
from .prompts import fix_date, stop_as_trained
from .untrusted import AGAIN, check_files, fetch_checked_weights, fetch_files, refuse_unreadable


logger = logging.get_logger(__name__)

_SAVE = "Save in its folder the one of the model that it was made from"
# Not needed: LLaVA reads hidden states, not a ViT's pooling layer. A LLaVA has no norm yet.
_MAY_BE_ABSENT = ("pooler.", "model.multi_modal_projector.norm.")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder or Hub id, whose files were checked.

    Attributes:
        name: The folder or Hub id.
        revision: The commit to read its files at. None for a folder.
        stored: The content of its `config.json`.
        trust_remote_code: Whether code that comes with it may run.
    """

    name: str
    revision: str | None
    stored: dict[str, Any]
    trust_remote_code: bool = False

    @property
    def model_type(self) -> str | None:
        return self.stored.get("model_type")

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration, in the class that transformers has for it. Raises as `read_config`."""
        return self.read_config(AutoConfig)

    def read_config(self, cls: Any) -> Any:
        """Reads the configuration as the class `cls`. Raises ValueError if it cannot be read."""
        with refuse_unreadable(f"The configuration of {self.name}"):
            return cls.from_pretrained(self.name, **self._read_at)

    @property
    def _read_at(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @cached_property
    def processor(self) -> LlavaProcessor:
        """The processor of a LLaVA or a NormAlign-LLaVA, checked and with a fixed date.

        Raises ValueError if it does not fit the model, and as [`preprocessor`] does.
        """
        processor = self.preprocessor(AutoProcessor)
        with refuse_unreadable(f"The processor of {self.name}"):
            if self.stored:
                self.check_image_token(processor)
            check_processor(processor)
            fix_date(processor)
        return processor

    def check_image_token(self, processor: LlavaProcessor) -> None:
        """Raises ValueError if a processor has another image token than the configuration."""
        config_token = self.config.image_token_id
        tokenizer_token = processor.image_token_id
        if tokenizer_token != config_token:
            both_tokens = f"{config_token} in config.json and {tokenizer_token} in its tokenizer"
            raise ValueError(f"The image token of {self.name} is {both_tokens}. {_SAVE}.")

    def preprocessor(self, cls: Any) -> Any:
        """Loads a tokenizer, an image processor or a processor, as the class `cls` says.

        Raises:
            ValueError: It is damaged, or the checkpoint has only a tokenizer.
            OSError: It does not exist, or cannot be fetched.
            ImportError: It needs a package that is not installed.
        """
        kinds_by_class = {"AutoTokenizer": "tokenizer", "AutoImageProcessor": "image processor"}
        kind = kinds_by_class.get(cls.__name__, "processor")
        remedy = f"{_SAVE}: `{cls.__name__}.from_pretrained(ORIGINAL).save_pretrained(FOLDER)`."
        try:
            with refuse_unreadable(f"The {kind} of {self.name}", remedy=remedy):
                preprocessor = cls.from_pretrained(self.name, **self._read_at)
        except (OSError, ImportError, ValueError) as error:
            if kind == "image processor" and isinstance(error, OSError):
                folder = Path(self.name)
                file_names = ("preprocessor_config.json", "processor_config.json")
                if folder.is_dir() and not any((folder / name).exists() for name in file_names):
                    raise FileNotFoundError(
                        f"{folder} has no image processor: preprocessor_config.json is missing. "
                        f"{remedy}"
                    ) from error
            for package in ("torchvision", "num2words"):
                if package in str(error).lower():  # in several wordings
                    check_installed(package, "vision", f"The {kind} of {self.name}")
            raise
        if kind == "processor" and not isinstance(preprocessor, ProcessorMixin):
            raise ValueError(f"{self.name} has a tokenizer but no processor for images. {remedy}")
        return preprocessor

    @cached_property
    def fetched_weight_bytes(self) -> int:
        """The bytes of its files of weights. They are fetched and checked once.

        Raises ValueError and OSError as [`fetch_checked_weights`] does.
        """
        files = fetch_checked_weights(self.name, self.revision)
        return sum(file.stat().st_size for file in files)

    def load(
        self,
        cls: Any = NormAlignLlavaForConditionalGeneration,
        dtype: torch.dtype | str = "auto",
        *,
        config: PreTrainedConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads the model, after its files of weights were fetched and checked.

        Args:
            cls: The class whose `from_pretrained` is called.
            dtype: The dtype of the weights. "auto" keeps the dtype in the files.
            config: The configuration of a part, in place of the checkpoint's own.
            kwargs: Further arguments of `from_pretrained`.

        Raises:
            ValueError: The files are damaged, or tensors are missing or of other shapes.
            OSError: The Hub cannot be reached.
        """
        stored_bytes = self.fetched_weight_bytes  # it fetches and checks the files
        # Under ZeRO-3 nothing is compared, since it would shard the model on meta.
        if not self.trust_remote_code and not is_deepspeed_zero3_enabled():
            parameters = self.without_weights(cls, config).num_parameters()
            if parameters > 4 * stored_bytes + 2**24:  # 2 bits a weight, and room for a norm
                sizes = f"has {parameters:,} parameters, its weights {stored_bytes:,} bytes"
                raise ValueError(f"config.json of {self.name} {sizes}. {AGAIN}")
        kwargs |= {
            "config": config,
            "dtype": dtype,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,  # its error names no tensor: checked below
            **self._read_at,
        }
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # its report lists tensors that may be absent
        try:
            with refuse_unreadable(f"The model {self.name}"):
                model, loading_info = cls.from_pretrained(self.name, **kwargs)
        finally:
            logging.set_verbosity(verbosity)
        self._check_tensors(model, loading_info, is_part=config is not None)
        if self.model_type == NormAlignLlavaConfig.model_type and model.can_generate():
            # The generation_config.json of older checkpoints has only the language model's own stop
            # tokens. Without a processor here, whoever loads the model has one.
            with suppress(OSError, ValueError):
                stop_as_trained(model, self.processor)
        return model

    def _check_tensors(self, model: PreTrainedModel, loading_info: dict, is_part: bool) -> None:
        """Raises ValueError if tensors are missing, or have other shapes than the model's.

        Warns of tensors that are not read, unless the model is only a part of the checkpoint.
        """
        class_name = type(model).__name__
        unexpected_names = _unless_optional(loading_info["unexpected_keys"])
        if unexpected_names and not is_part:
            logger.warning(
                f"{self.name} has {len(unexpected_names)} tensors that are not of {class_name}: "
                f"{', '.join(unexpected_names[:10])}."
            )
        missing_names = _unless_optional(loading_info["missing_keys"])
        if missing_names:
            remedy = ""
            if unexpected_names:
                remedy = remedy_for_renamed_tensors(model.config)
            raise ValueError(
                f"{self.name} lacks {len(missing_names)} tensors of {class_name}: "
                f"{', '.join(missing_names[:10])}. {remedy}".rstrip()
            )
        misfits = []
        for tensor_name, stored_shape, model_shape in sorted(loading_info["mismatched_keys"]):
            misfits.append(f"{tensor_name} {list(stored_shape)}, not {list(model_shape)}")
        if misfits:
            raise ValueError(
                f"{self.name} has {len(misfits)} tensors of other shapes than its configuration "
                f"says: {'; '.join(misfits[:10])}. {AGAIN}"
            )

    def without_weights(self, cls: Any, config: PreTrainedConfig | None) -> PreTrainedModel:
        """Returns the model that [`load`] makes, on meta. Raises ValueError if that fails."""
        options = {"trust_remote_code": True} if self.trust_remote_code else {}
        with refuse_unreadable(f"The configuration of {self.name}"), torch.device("meta"):
            model_config = copy.deepcopy(config or self.config)
            if type(model_config) is getattr(cls, "config_class", None):
                return cls._from_config(model_config, **options)
            from_config = getattr(cls, "from_config", AutoModelForImageTextToText.from_config)
            return from_config(model_config, **options)


def _unless_optional(names: Iterable[str]) -> list[str]:
    """Returns the names of tensors, sorted, without those that may be absent."""
    return sorted(name for name in names if not name.startswith(_MAY_BE_ABSENT))


def open_checkpoint(
    name: str | os.PathLike, revision: str | None = None, *, remedy: str = "Check the path."
) -> Checkpoint:
    """Finds a checkpoint and checks its files but the weights. Loads nothing and runs no code.

    Raises ValueError and OSError as [`require_checkpoint`] and [`check_files`] do.
    """
    source, commit = require_checkpoint(name, revision, remedy=remedy)
    return Checkpoint(source, commit, check_files(source, commit))


def check_processor(processor: LlavaProcessor, model: PreTrainedModel | None = None) -> int:
    """Checks that prompt, processor and model agree on the image tokens for an image.

    Args:
        processor: The processor.
        model: A model whose image features are counted too.

    Returns:
        The number of image tokens.

    Raises:
        ValueError: The numbers differ.
    """
    image = Image.new("RGB", (97, 61), "white")
    inputs = processor(images=image, text=processor.image_token, return_tensors="pt")
    prompt_count = int((inputs["input_ids"] == processor.image_token_id).sum())
    processor_count = processor._get_num_multimodal_tokens([(61, 97)])["num_image_tokens"][0]
    counts = [processor_count]
    if model is not None:
        pixels = inputs["pixel_values"].to(model.device, model.dtype)
        with torch.no_grad():
            features = model.get_image_features(pixels).pooler_output
        counts.append(sum(len(image_features) for image_features in features))
    if set(counts) != {prompt_count}:
        raise ValueError(
            f"An image has {prompt_count} image tokens in the prompt, and "
            f"{' and '.join(map(str, counts))} by processor and model. "
            "The image processor must give all images one size, a multiple of the patch."
        )
    return prompt_count


FAILURES = (OSError, ValueError, HTTPError, yaml.YAMLError)  # of the Hub client and of cards


def fetch_licence(name: str, revision: str | None = None) -> dict[str, str | None] | None:
    """Reads the licence in a model's card. Returns None if it names no licence.

    The keys are `license`, `license_name` and `license_link`, as in its metadata. Several licences
    become "other", with all of them in `license_name`. A relative link becomes absolute, or None.
    """
    card, _ = _read_card(name, revision, "model")
    licence = card.get("license")
    licence_name = card.get("license_name")
    if isinstance(licence, list) and len(licence) > 1:
        licence_name = ", ".join(map(str, licence))
        licence = "other"
    elif isinstance(licence, list) and licence:
        licence = licence[0]
    if not licence:
        return None
    link = card.get("license_link")
    if link and "://" not in str(link):
        if os.path.isdir(name):
            link = None
        else:
            link = f"{constants.ENDPOINT}/{name}/blob/{revision or 'main'}/{link}"
    return {
        "license": str(licence),
        "license_name": str(licence_name) if licence_name else None,
        "license_link": str(link) if link else None,
    }


def hub_dataset(name: str) -> dict[str, Any]:
    """Fetches what the Hub has of a data set now.

    The keys are `id`, `revision` (the commit), and the `license` and `language` of its card.
    """
    card, commit = _read_card(name, None, "dataset")
    if commit is None:
        with suppress(*FAILURES):
            commit = HfApi().dataset_info(name).sha
    licence = card.get("license")
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    language = card.get("language")
    if isinstance(language, str):
        language = [language]
    return {"id": name, "revision": commit, "license": licence, "language": language}


def read_record(checkpoint: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Reads the JSON object in a file of a checkpoint. Returns None if there is not one."""
    with suppress(*FAILURES):
        for file in fetch_files(checkpoint, [name], revision):
            content = json_or_none(file)
            if isinstance(content, dict):
                return content
    return None


def _read_card(name: str, revision: str | None, kind: str) -> tuple[dict[str, Any], str | None]:
    """Returns the metadata of a card, and its commit if it is on the Hub. It may be empty."""
    commit = None
    try:
        if kind == "model" and os.path.isdir(name):
            file = Path(name, CARD)
        else:
            file = Path(hf_hub_download(name, CARD, revision=revision, repo_type=kind))
            commit = file.parent.name
        return metadata_load(file) or {}, commit
    except FAILURES:
        return {}, None
