# SPDX-License-Identifier: Apache-2.0
"""Batches of parsed rows, with labels on exactly the answers; the order of rows, and packing."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from math import ceil
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from PIL import Image
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler
from transformers import LlavaProcessor, TrainerCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from trl.trainer.utils import pad

from ..assembly.processing import settle
from ..checkpoint.untrusted import loading
from ..data.rows.checks import tokens_per_image
from ..data.rows.images import decode_image
from ..data.rows.parse import BadRow, DroppedRow, DroppedRows, control_tokens, parse_row
from .keeping.skipped import SkippedRows
from .modules.model import evaluating
from .settings import RunConfig


_PROBE = [
    {"role": "user", "content": [{"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A red kite."}]},
]
_IGNORED = -100
_PARSED = {"images", "messages", "learned", "source", "row"}  # columns that tell a parsed row


@dataclass
class ConversationCollator:
    """Opens the images of parsed rows, and labels the answers with their end-of-turn tokens.

    White space after the end-of-turn token is not labelled, nor are answers that are not `learned`.
    A batch without images has no `pixel_values`. A row with a bad image that is skipped stays in
    the batch, on whose shape other processes rely, with a white image and without labels.

    Otherwise the tensors are those of TRL's `DataCollatorForVisionLanguageModeling`. Image tokens
    are repeated after the answers are labelled: in the text, hundreds would be tokenized.

    Args:
        processor: Its chat template must have generation marks. It is settled, see [`settle`].
        pad_to_multiple_of, padding_free: As in `SFTConfig`; for the latter see [`without_padding`].
        bad_rows: `"stop"` raises ValueError at a bad image, `"skip"` records the row in
            `dropped_rows`, a share or None skips `skippable` rows, see [`prepare_rows`].
        skippable: Different rows that all epochs, processes and their workers together may skip.
        share: Of a stream, the share of the rows read so far that may be skipped, if that is more.
        skipped_rows: Where these rows are counted. By default, copies of this collator share them.
    """

    processor: LlavaProcessor
    pad_to_multiple_of: int | None = None
    bad_rows: str | float | None = None
    dropped_rows: DroppedRows | None = None
    padding_free: bool = False
    skippable: int = 0
    share: float = 0.0
    skipped_rows: SkippedRows = field(default_factory=SkippedRows)

    def __post_init__(self):
        self._last_rows: dict[str, int] = {}  # the highest number of a row read of each source
        settle(self.processor)
        self._tokens_per_image = tokens_per_image(self.processor)
        with loading("The chat template"):
            ((_, labels),) = self._encoded([{"messages": _PROBE}])
        if (labels == _IGNORED).all():
            raise ValueError(
                "The chat template marks no answer with {% generation %}, so nothing is learned. "
                "Build the checkpoint with `normalign build --chat-template FILE`."
            )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Ids, mask and labels `(rows, tokens)`, padded on the right, and `pixel_values`.

        Rows may have any form of docs/data.md, also with PIL images; those that the trainer gives
        are parsed. Raises ValueError for a row that cannot be trained on.
        """
        examples = [self._parsed(example, number) for number, example in enumerate(examples)]
        if self.share:
            self._count_rows(examples)
        opened = [self._images(example) for example in examples]
        encoded, rows = self._encoded(examples), []
        for (ids, labels), example, (_, bad) in zip(encoded, examples, opened, strict=True):
            self._remove_labels(labels, example, bad)
            # Threads of torch's repeat_interleave would spin while the next images are decoded.
            is_image = ids.numpy() == self.processor.image_token_id
            counts = np.where(is_image, self._tokens_per_image, 1)
            rows.append([torch.from_numpy(np.repeat(row.numpy(), counts)) for row in (ids, labels)])
        all_ids, all_labels = zip(*rows, strict=True)
        padded = partial(pad, pad_to_multiple_of=self.pad_to_multiple_of)
        batch = {
            "input_ids": padded(all_ids, self.processor.tokenizer.pad_token_id),
            "attention_mask": padded([torch.ones_like(ids) for ids in all_ids], 0),
            "labels": padded(all_labels, _IGNORED),
        }
        if images := [image for images, _ in opened for image in images]:
            batch |= self.processor.image_processor(images, return_tensors="pt")
        return without_padding(batch) if self.padding_free else batch

    def _parsed(self, example: dict[str, Any], number: int) -> dict[str, Any]:
        """A row in parsed form; `number` is its place in the batch, for errors."""
        if example.keys() >= _PARSED:
            return example
        name = "a row given to the collator"
        image_token = self.processor.image_token
        control = control_tokens(self.processor.tokenizer)
        try:
            row = parse_row(example, image_token=image_token, control_tokens=control)
        except ValueError as error:
            raise BadRow(f"{name}, row {number} of its batch: {error}") from error
        return {**row, "source": name, "row": number}

    def _encoded(self, examples: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Token ids and labels of each row, `(T,)`, with one image token for each image."""
        encoded = self.processor.tokenizer.apply_chat_template(
            [_messages(example) for example in examples],
            chat_template=self.processor.chat_template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        columns = (map(torch.tensor, encoded[name]) for name in ("input_ids", "assistant_masks"))
        rows = zip(*columns, strict=True)
        return [(ids, torch.where(mask == 1, ids, _IGNORED)) for ids, mask in rows]

    def _images(self, example: dict[str, Any]) -> tuple[list[Image.Image], bool]:
        """The row's images, white in place of bad ones, and whether there was a bad one."""
        images, bad = [], False
        for image in example["images"]:
            try:
                images.append(decode_image(image))
            except ValueError as error:
                dropped = DroppedRow(example["source"], example["row"], image["path"], str(error))
                if too_many := self._too_many(dropped):
                    raise BadRow(f"{dropped}. {too_many}") from error
                if self.dropped_rows and not bad:
                    self.dropped_rows.add(dropped)
                images.append(Image.new("RGB", (64, 64), "white"))
                bad = True
        return images, bad

    def _count_rows(self, examples: list[dict[str, Any]]) -> None:
        """Takes note of how far a stream was read.

        Rows are numbered, and every process reads the stream in the same order and takes its part,
        so the highest number tells how many different rows all of them read, in any epoch.
        """
        for example in examples:
            source = example["source"]
            self._last_rows[source] = max(example["row"], self._last_rows.get(source, 0))

    def _too_many(self, dropped: DroppedRow) -> str | None:
        """Counts a row with a bad image; what to do if more are bad than allowed, or None."""
        if self.bad_rows == "skip":
            return None
        rows_read = sum(last + 1 for last in self._last_rows.values())
        allowed = max(self.skippable, self.share * rows_read)
        count = self.skipped_rows.add(dropped.source, dropped.row, allowed)
        if count is None:
            return None
        met = f"Training met {count:,} bad row(s), and {int(allowed):,} may be skipped."
        return f"{met} Fix it, or use `normalign train --bad_rows skip`."

    def _remove_labels(self, labels: Tensor, example: dict[str, Any], bad: bool) -> None:
        """Removes labels that are not to be learned from one row `(T,)`, in place."""
        is_label = torch.nn.functional.pad(labels != _IGNORED, (1, 1)).int()
        edges = is_label.diff().nonzero().flatten().tolist()
        spans, learned = list(zip(edges[::2], edges[1::2], strict=True)), example["learned"]
        if all(learned):
            learned = [True] * len(spans)  # however many a template marks
        elif len(spans) != len(learned):
            raise ValueError(
                f"{example['source']}, row {example['row']}: the chat template marks {len(spans)} "
                f"of {len(learned)} answers, so those that are not to be learned are unknown. Give "
                "rows whose answers are all learned."
            )
        for (start, stop), is_learned in zip(spans, learned, strict=True):
            keep = stop - start if is_learned and not bad else 0
            while keep and not self.processor.tokenizer.decode(labels[start + keep - 1]).strip():
                keep -= 1
            labels[start + keep : stop] = _IGNORED


def blank_image(processor: LlavaProcessor) -> Tensor:
    """Zeros in the shape that the vision tower reads, `(1, channels, height, width)`."""
    image = processor.image_processor(Image.new("RGB", (32, 32)), return_tensors="pt")
    return torch.zeros_like(image["pixel_values"])


def _messages(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, without the empty texts that Arrow gives image parts."""
    messages = []
    for message in example["messages"]:
        parts = message["content"]
        parts = [{"type": "image"} if part["type"] == "image" else part for part in parts]
        messages.append({"role": message["role"], "content": parts})
    return messages


def train_sampler(args: RunConfig, rows: Dataset) -> Sampler | None:
    """The order of rows with `group_by_length` or `packing`; else None: the Trainer's own."""
    grouped = args.train_sampling_strategy == "group_by_length"
    if not (grouped or args.packing) or "length" not in (rows.column_names or []):
        return None
    lengths = rows.with_format(None)["length"][:]  # without building rows, as the Trainer would
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler: Sampler
    if grouped:
        sampler = SeededLengthGroups(lengths, rows_in_step(args), seed)
    elif args.train_sampling_strategy == "sequential":
        sampler = SequentialSampler(rows)
    else:  # the order that accelerate gives a run without packing
        sampler = SeedableRandomSampler(rows, data_seed=seed)
    return BalancedSampler(sampler, lengths, args) if args.packing else sampler


def rows_in_step(args: RunConfig) -> int:
    """Rows of an optimizer step, over all processes."""
    passes = args.gradient_accumulation_steps * args.world_size
    return args.global_batch_size or args.train_batch_size * passes


def passes_in_step(args: RunConfig, rows: Dataset) -> int:
    """The fewest forward passes of a process, in every step of a packed run, that hold its rows.

    A pass holds `max_length` tokens for each of the `per_device_train_batch_size` rows that it has
    without packing, and thus never more than a batch of padded rows might. Raises ValueError if a
    row is longer than that.
    """
    sampler = train_sampler(args, rows)
    assert isinstance(sampler, BalancedSampler) and args.max_length is not None
    most = args.max_length * args.train_batch_size
    longest = max(sampler.lengths)
    if longest > most:
        raise ValueError(
            f"A row has {longest:,} tokens, and a packed pass holds {most:,}, by max_length. Set "
            f"--max_length {longest}, or leave packing out."
        )
    epochs = ceil(args.num_train_epochs)
    if args.max_steps > 0:
        epochs = ceil(args.max_steps / sampler.steps_of_epoch)
    passes = 1
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step in sampler.steps():
            lengths = [sampler.lengths[row] for row in step]
            while _largest_pass(lengths, passes, args.world_size) > most:
                passes += 1
    return passes


def _largest_pass(lengths: Sequence[int], passes: int, processes: int) -> int:
    """Tokens of the largest pass of a step of rows with these lengths."""
    dealt = balanced(lengths, passes_of_rows(len(lengths), passes, processes), processes)
    return max(sum(lengths[position] for position in positions) for positions in dealt)


def passes_of_rows(rows: int, passes: int, processes: int) -> int:
    """Passes of all processes in a step of so many rows: the last one of an epoch may have few."""
    return min(passes, rows // processes) * processes


class SeededLengthGroups(LengthGroupedSampler):
    """The Trainer's sampler, whose order depends on seed and epoch, not on random states."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def balanced(lengths: Sequence[int], passes: int, processes: int = 1) -> list[list[int]]:
    """The positions of each pass's rows: the longest first go to the pass with the fewest tokens.

    First comes a pass of every process, then the next of every process, largest first. The order of
    processes alternates, so that the sums of tokens over a process's passes are close too.
    """
    open_passes: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(passes)]
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        tokens, number, rows = open_passes[0]
        rows.append(position)
        heapq.heapreplace(open_passes, (tokens + lengths[position], number, rows))
    open_passes.sort(key=lambda entry: (-entry[0], entry[1]))
    largest_first = [rows for _, _, rows in open_passes]
    dealt = []
    for start in range(0, passes, processes):
        dealt += largest_first[start : start + processes][:: -1 if start // processes % 2 else 1]
    return dealt


class BalancedSampler(BatchRebalanceSampler):
    """The rows of a process's forward passes, of nearly equal tokens; steps are as without packing.

    It extends transformers' sampler, whose batches the Trainer takes as those of one process. The
    order is that of `sampler`. The last step of an epoch has a multiple of `train_batch_size` rows
    for each process, as in accelerate: the epoch's first rows fill it, or its rest is dropped. A
    step has `gradient_accumulation_steps` passes in each process, or one for each of its rows.
    """

    def __init__(self, sampler: Sampler[int], lengths: list[int], args: RunConfig):
        passes = args.gradient_accumulation_steps
        super().__init__(lengths, rows_in_step(args), args.world_size, passes)
        self.sampler = sampler
        self.rank = args.process_index
        self.drop_last = args.dataloader_drop_last
        together = args.train_batch_size * args.world_size
        self.rows_of_epoch = len(lengths)
        if self.drop_last:
            self.rows_of_epoch -= len(lengths) % together
        elif self.dp_size > 1:
            self.rows_of_epoch += -len(lengths) % together
        self.steps_of_epoch = ceil(self.rows_of_epoch / self.effective_batch_size)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def steps(self) -> Iterator[list[int]]:
        """The rows of each optimizer step, over all processes."""
        order = list(islice(cycle(self.sampler), self.rows_of_epoch))
        for start in range(0, self.rows_of_epoch, self.effective_batch_size):
            yield order[start : start + self.effective_batch_size]

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            passes = passes_of_rows(len(rows), self.grad_accum, self.dp_size)
            dealt = balanced([self.lengths[row] for row in rows], passes, self.dp_size)
            for positions in dealt[self.rank :: self.dp_size]:
                yield [rows[position] for position in positions]

    def __len__(self) -> int:
        whole, rest = divmod(self.rows_of_epoch, self.effective_batch_size)
        in_last = passes_of_rows(rest, self.grad_accum, self.dp_size)
        return whole * self.grad_accum + in_last // self.dp_size


def without_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """A padded batch of B rows as one sequence of their N tokens, kept apart by their position ids.

    transformers builds the mask of such a sequence, for every implementation of attention, from
    position ids that start again, without an attention mask and a cache. `input_ids`, `labels` and
    `position_ids` are `(1, N)`. A row's first label is masked: the token before is another row's.
    """
    real = batch.pop("attention_mask").bool()
    batch["labels"][torch.arange(len(real)), real.int().argmax(1)] = _IGNORED
    sequence = {name: batch.pop(name)[real][None] for name in ("input_ids", "labels")}
    positions = (real.long().cumsum(1) - 1)[real][None]
    return {**sequence, "position_ids": positions, **batch}


def count_rows_with_labels(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Numbers of rows with labels, and of rows without, in a batch with or without padding."""
    is_label = batch["labels"] != _IGNORED
    if "attention_mask" not in batch and "position_ids" in batch:
        starts = batch["position_ids"][0] == 0
        row_of_token = starts.cumsum(0) - 1
        labels_of_row = torch.zeros_like(starts, dtype=torch.long)
        labels_of_row.index_add_(0, row_of_token, is_label[0].long())
        with_labels, rows = (labels_of_row > 0).sum(), starts.sum()
    else:
        with_labels = is_label.any(1).sum()
        rows = torch.full_like(with_labels, len(is_label))
    return with_labels, rows - with_labels


class PackedAttentionCheck(TrainerCallback):
    """Checks before the first step that a language model keeps the rows of one sequence apart.

    Layers with recurrence do not, nor do positions that ignore `position_ids`.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compares a short row alone with the same row behind two others."""
        rows = [[5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], [9, 5, 11, 7, 12, 8]]
        first, second, last = torch.tensor(rows, device=args.device)
        positions = torch.arange(len(last), device=args.device)

        def states(*chosen: Tensor) -> Tensor:
            ids, places = torch.cat(chosen)[None], positions.repeat(len(chosen))[None]
            logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
            return logits[0, -len(last) :].float()

        with evaluating(model, args):
            alone, behind, behind_another = states(last), states(first, last), states(second, last)
        # Rounding depends on shapes of products, which other rows change in a mixture of experts.
        by_place = (behind - alone).norm() / alone.norm()
        by_others = (behind - behind_another).norm() / alone.norm()
        half = args.bf16 or args.fp16
        if by_place > (0.05 if half else 1e-3) or by_others > (0.01 if half else 1e-5):
            kind = model.config.get_text_config().model_type
            raise ValueError(f"padding_free would mix rows in a {kind}. Leave it out.")
