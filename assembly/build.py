# SPDX-License-Identifier: Apache-2.0
"""Builds a checkpoint from a vision encoder and a language model, or from a LLaVA checkpoint."""

import logging
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ..checkpoint.files import BUILD_RECORD, check_not_in_run, finished_folder, write_json
from ..checkpoint.notices import fetch_part_notices, place_of, write_notices
from ..checkpoint.opening import Checkpoint, check_processor, fetch_licence, open_checkpoint
from ..checkpoint.precision import torch_dtype
from ..checkpoint.prompts import (
    PROMPT_DATE,
    fixes_the_date,
    has_generation_marks,
    stop_as_trained,
    unrecognized_ends,
)
from ..checkpoint.untrusted import refuse_unreadable
from ..checkpoint.weights import save_model
from ..configuration_normalign_llava import NormAlignLlavaConfig
from ..console import Printed
from ..keywords import takes_fields
from ..modeling_normalign_llava import NormAlignLlavaForConditionalGeneration
from .arms import ARMS, arm_of
from .encoder import (
    TokenLayout,
    check_finite,
    load_encoder,
    make_size_constant,
    plain_image_processor,
    require_vision_config,
    token_layout,
)
from .parts import (
    add_image_token,
    assemble,
    check_language_model,
    flags_of,
    generation_for_checkpoint,
    in_words,
    load_language_model,
    logits_of_fixed_text,
    make_ends_special,
    set_chat_template,
)
from .processing import check_feature_layer, normalize_tokenization, read_feature_layer


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildReport(Printed):
    """The report that `normalign build` prints, and writes into `build.json`.

    Attributes:
        vision_parameters, projector_parameters, language_parameters: Numbers of parameters. Each
            parameter is counted once. The language model's include its head.
        n_text: The mean norm of text embeddings as they enter the decoder.
        gain: Start of the norm's gain. None without a norm.
        prefix_tokens: Number of the encoder's tokens before its patches: class token, registers.
        generation_marks: Whether the chat template marks the assistant's turns for training.
        vision_revision, language_revision: Commits of parts from the Hub. None for folders.
        licenses: Licences of `"vision"` and `"language"`, see [`fetch_licence`].
        from_llava: Whether the norm was added to a LLaVA checkpoint, so that both parts are it.
        prompt_date: The date in prompts if the chat template asks for today's, and None otherwise.
        generation: What `generation_config.json` says, see [`generation_for_checkpoint`].
        generation_left_out: Flags of the language model's that are not copied.
        notices: Paths of the parts' licence texts and notices in the checkpoint.
    """

    labels = {
        "n_text": "N_text, mean norm of text embeddings",
        "gain": "gain of the norm at the start",
        "prefix_tokens": "tokens of the encoder before its patches",
        "generation_marks": "chat template marks answers for training",
        "from_llava": "made from a LLaVA checkpoint",
    }

    output: str
    vision: str
    language: str
    arm: str
    vision_parameters: int
    projector_parameters: int
    language_parameters: int
    n_text: float
    gain: float | None
    tokens_per_image: int
    prefix_tokens: int
    generation_marks: bool
    vision_revision: str | None
    language_revision: str | None
    licenses: dict[str, dict[str, str | None] | None]
    from_llava: bool
    prompt_date: str | None
    generation: dict[str, Any]
    generation_left_out: dict[str, Any]
    notices: list[str]

    def renderable(self) -> RenderableType:
        """Returns the table of its numbers and words, and of what was copied."""
        table = super().renderable()
        assert isinstance(table, Table)
        for field_name in ("generation", "generation_left_out"):
            flags = getattr(self, field_name)
            if flags:
                table.add_row(field_name, in_words(flags))
        if self.notices:
            table.add_row("notices", ", ".join(self.notices))
        return table


@dataclass(frozen=True)
class BuildOptions:
    """The arguments of [`build_checkpoint`]. Its docstring explains them."""

    vision: str
    language: str
    output: str | os.PathLike
    _: KW_ONLY
    arm: str = "gwc"
    norm: str = "layer_norm"
    feature_layer: int | Sequence[int] = -2
    select_strategy: str | None = None
    chat_template: str | os.PathLike | None = None
    dtype: str | torch.dtype = "auto"
    seed: int | None = None


@takes_fields(BuildOptions)
def build_checkpoint(options: BuildOptions) -> BuildReport:
    """Joins a vision encoder and a language model into an untrained NormAlign-LLaVA checkpoint.

    Args:
        vision: Folder or Hub id of a vision encoder, or of a model with one, such as CLIP. Its
            hidden states are `(B, prefix + patches, d)`, see [`token_layout`].
        language: Folder or Hub id of a causal language model of transformers.
        output: Folder to create. Its `build.json` has the report.
        arm: One of the paper's arms, see `ARMS`. `"gwc"` by default.
        norm: `"layer_norm"` (the default) or `"rms_norm"`.
        feature_layer: Hidden state(s) of the encoder to project. -1 is the last layer's output,
            and -2 the default.
        select_strategy: `"default"` leaves out the tokens before the patches, that is class token
            and registers. `"full"` keeps every token. None means `"full"` for an encoder without
            such tokens, as SigLIP, and `"default"` for others.
        chat_template: File with a Jinja template to use in place of the language model's own.
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `"auto"` (the default), the language
            model's. The norm is always float32.
        seed: Seed of the projector's random weights. None uses torch's generator as it is.

    Raises:
        TypeError: If an option does not exist.
        ValueError: If a part or an option does not fit. Nothing is written then.
        OSError: If a part cannot be fetched, or the checkpoint cannot be written.
    """
    norm_settings = _check_arm(options.arm, options.norm)
    dtype = torch_dtype(options.dtype)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    feature_layer = read_feature_layer(options.feature_layer)
    if options.select_strategy not in (None, "default", "full"):
        raise ValueError(
            "select_strategy is 'default', 'full' or None for the one that fits the encoder, got "
            f"{options.select_strategy!r}."
        )
    output = Path(os.path.expanduser(options.output))
    check_not_in_run(output)
    with finished_folder(output) as folder:
        vision_part = open_checkpoint(options.vision)
        language_part = open_checkpoint(options.language)
        encoder = require_vision_config(vision_part)
        check_language_model(language_part)
        check_feature_layer(feature_layer, encoder)
        tokenizer = language_part.preprocessor(AutoTokenizer)
        has_marks = set_chat_template(tokenizer, options.chat_template)
        image_processor = vision_part.preprocessor(AutoImageProcessor)
        with refuse_unreadable(f"The image processor of {vision_part.name}"):
            image_processor = plain_image_processor(image_processor)
            pixel_size = make_size_constant(image_processor)
        tower = load_encoder(vision_part, encoder)
        layout = token_layout(tower, pixel_size, feature_layer, options.vision)
        tokens_left_out = max(1, layout.prefix)
        processor = make_processor(
            image_processor, tokenizer, layout, options.select_strategy, tokens_left_out
        )
        tokens_per_image = check_processor(processor)
        language_model = load_language_model(language_part, dtype)
        tower.to(language_model.dtype)
        add_image_token(language_model, tokenizer)
        logits = logits_of_fixed_text(language_model)
        config = NormAlignLlavaConfig(
            vision_config=tower.config,
            text_config=language_model.config,
            image_token_index=processor.image_token_id,
            image_seq_length=tokens_per_image,
            vision_feature_layer=feature_layer,
            vision_feature_select_strategy=processor.vision_feature_select_strategy,
            vision_prefix_tokens=tokens_left_out,
            tie_word_embeddings=language_model.config.tie_word_embeddings,
            **norm_settings,
        )
        model = assemble(config, tower, language_model, logits)
        parts = {"vision": vision_part, "language": language_part}
        return _align_norm_and_save(model, processor, layout, parts, has_marks, folder, output)


def retrofit_checkpoint(
    llava: str,
    output: str | os.PathLike,
    *,
    arm: str = "gwc",
    norm: str = "layer_norm",
    dtype: str = "auto",
) -> BuildReport:
    """Adds the aligned norm to a LLaVA. Its tensors stay the same.

    Args:
        llava: Folder or Hub id of a LLaVA checkpoint of transformers.
        output, arm, norm, dtype: As in [`build_checkpoint`].

    Raises:
        ValueError: If the LLaVA or an option does not fit. Nothing is written then.
        OSError: If the LLaVA cannot be fetched, or the checkpoint cannot be written.
    """
    norm_settings = _check_arm(arm, norm)
    loaded_dtype = torch_dtype(dtype)
    output = Path(os.path.expanduser(output))
    check_not_in_run(output)
    with finished_folder(output) as folder:
        opened = open_checkpoint(llava)
        if opened.model_type != "llava":
            raise ValueError(
                f"{llava} is a {opened.model_type!r} model. --from-llava takes a LLaVA ('llava')."
            )
        require_vision_config(opened)
        stock = opened.preprocessor(AutoProcessor)
        stock.tokenizer.chat_template = stock.chat_template
        make_ends_special(stock.tokenizer)
        opened.check_image_token(stock)
        with refuse_unreadable(f"The image processor of {llava}"):
            pixel_size = make_size_constant(stock.image_processor)
        model = opened.load(dtype=loaded_dtype, **norm_settings)
        tower = model.model.vision_tower
        check_finite(tower, llava)
        layout = token_layout(tower, pixel_size, model.config.vision_feature_layer, llava)
        processor = make_processor(
            stock.image_processor,
            stock.tokenizer,
            layout,
            model.config.vision_feature_select_strategy,
            tokens_left_out=1,
        )
        for setting in norm_settings:  # transformers has put them into this configuration too
            vars(model.generation_config).pop(setting, None)
        has_marks = has_generation_marks(stock.chat_template or "")
        parts = {"vision": opened, "language": opened}
        return _align_norm_and_save(model, processor, layout, parts, has_marks, folder, output)


def _check_arm(arm: str, norm: str) -> dict[str, str]:
    """Returns the configuration of an arm. Raises ValueError if arm or norm is unknown."""
    if arm not in ARMS or norm not in ("layer_norm", "rms_norm"):
        raise ValueError(
            f"arm is one of {', '.join(ARMS)}, and norm layer_norm or rms_norm, got {arm!r}, "
            f"{norm!r}."
        )
    return {"projector_norm": norm, **ARMS[arm]}


def make_processor(
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    layout: TokenLayout,
    select_strategy: str | None,
    tokens_left_out: int,
) -> LlavaProcessor:
    """Makes a [`LlavaProcessor`] with a pad token and by [`normalize_tokenization`].

    Args:
        image_processor: The encoder's.
        tokenizer: The language model's, with an image token and a chat template.
        layout: The tokens of the encoder's hidden states.
        select_strategy: `"default"` or `"full"`. None means the one that fits the encoder.
        tokens_left_out: Number of tokens that `"default"` leaves out. LLaVA leaves out one.

    Raises:
        ValueError: If the strategy would drop a patch, or the tokenization cannot be normalized.
    """
    if select_strategy == "default" and not layout.prefix:
        raise ValueError(
            f"select_strategy 'default' drops the first token, but {layout.encoder} has no class "
            "token: a patch of the image would be lost. Use 'full'."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        # Other classes make their tokenizer anew when loaded, from settings that are not all saved:
        # Zephyr's `legacy` space before a text would be lost.
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    additional_tokens = layout.prefix
    select_strategy = select_strategy or ("default" if layout.prefix else "full")
    if select_strategy == "default":
        additional_tokens -= tokens_left_out - 1  # the processor itself subtracts one
    processor = LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=layout.patch_size,
        vision_feature_select_strategy=select_strategy,
        num_additional_image_tokens=additional_tokens,
        chat_template=tokenizer.chat_template,
    )
    normalize_tokenization(processor)
    return processor


def _align_norm_and_save(
    model: NormAlignLlavaForConditionalGeneration,
    processor: LlavaProcessor,
    layout: TokenLayout,
    parts: dict[str, Checkpoint],
    has_marks: bool,
    folder: Path,
    output: Path,
) -> BuildReport:
    """Aligns the norm, sets how answers are generated, and writes the checkpoint into a folder.

    The parts are `"vision"` and `"language"`. If a LLaVA got the norm, both are this LLaVA.
    """
    if not has_marks:
        logger.warning(
            "The chat template has no {% generation %} marks. Training on assistant turns needs "
            "them: to train this checkpoint, build it with --chat-template."
        )
    for end in unrecognized_ends(processor.tokenizer, processor.chat_template):
        logger.warning(
            f"The chat template ends an answer with {end!r}. This tokenizer has no such token, so "
            "answers would not stop there. With --chat-template, give a template that ends answers "
            f"with {processor.tokenizer.eos_token!r}."
        )
    projector = model.model.multi_modal_projector
    if model.config.projector_norm == "none":
        gain = None
        n_text = model.measure_text_embedding_norm()
        model.config.text_embedding_norm = n_text
    else:
        n_text = model.align_projector_norm()
        gain = projector.norm.weight[0].item()
    vision = parts["vision"]
    language = parts["language"]
    left_out = _set_generation(model, processor, language.name)
    licenses = {}
    notices = {}
    for part_name, part in parts.items():
        licenses[part_name] = fetch_licence(part.name, part.revision)
        for file_name, content in fetch_part_notices(part.name, part.revision).items():
            notices[place_of(part_name, file_name)] = content
    vision_parameters = model.model.vision_tower.num_parameters()
    projector_parameters = sum(parameter.numel() for parameter in projector.parameters())
    is_date_fixed = fixes_the_date(processor.chat_template)
    report = BuildReport(
        output=str(output),
        vision=_public_name(vision.name),
        language=_public_name(language.name),
        arm=arm_of(model.config),
        vision_parameters=vision_parameters,
        projector_parameters=projector_parameters,
        # A head that is the embeddings is counted once.
        language_parameters=model.num_parameters() - vision_parameters - projector_parameters,
        n_text=n_text,
        gain=gain,
        tokens_per_image=check_processor(processor, model),
        prefix_tokens=layout.prefix,
        generation_marks=has_marks,
        vision_revision=vision.revision,
        language_revision=language.revision,
        licenses=licenses,
        from_llava=vision is language,
        prompt_date=PROMPT_DATE.isoformat() if is_date_fixed else None,
        generation=flags_of(model.generation_config),
        generation_left_out=left_out,
        notices=sorted(notices),
    )
    for config in (model.config.text_config, model.config.vision_config):
        config._name_or_path = _public_name(config._name_or_path)
    save_model(model, folder)
    processor.save_pretrained(folder)
    write_notices(folder, notices)
    record = asdict(report)
    del record["output"]
    write_json(folder / BUILD_RECORD, record)
    return report


def _set_generation(
    model: NormAlignLlavaForConditionalGeneration, processor: LlavaProcessor, language: str
) -> dict[str, Any]:
    """Sets a model's generation configuration. Returns flags of `language` that are left out."""
    model.generation_config, left_out = generation_for_checkpoint(model.generation_config)
    stop_as_trained(model, processor)
    # Prompt lookup would repeat the prompt's image token without features for it.
    suppressed = model.generation_config.suppress_tokens or []
    model.generation_config.suppress_tokens = sorted({*suppressed, model.config.image_token_id})
    if left_out:
        logger.warning(
            f"Not copied from the generation_config.json of {language}: {in_words(left_out)}."
        )
    return left_out


def _public_name(name: str) -> str:
    """Returns the name of a part. A local path is cut, since a checkpoint does not show it."""
    path = Path(name)
    return path.name if path.exists() else name
