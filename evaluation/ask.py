# SPDX-License-Identifier: Apache-2.0
"""`normalign ask`: a question, a file of questions and answers, or a conversation."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from rich.progress import Progress
from transformers import PreTrainedModel, ProcessorMixin

from ..console import Console, escaped
from ..data.rows.images import decode_image
from ..diagnose.load import ModelHandle, resolve_model
from ..errors import writing_to
from .answering import (
    AnswerStream,
    Message,
    answers,
    assistant_turn,
    check_texts,
    free_positions,
    model_inputs,
    user_turn,
)
from .options import ModelKeywords, ModelOptions
from .questions import (
    Question,
    check_images,
    first_turns,
    question_about,
    questions_about_each,
    questions_of_data,
    read_words,
)


HOW_TO_TALK = (
    "Ask, and the model answers. /image FILE shows it another image, /new starts again, Ctrl-C "
    "stops an answer, Ctrl-D ends."
)


@dataclass(frozen=True)
class AskOptions:
    """How `normalign ask` asks.

    Attributes:
        system: The system turn; None leaves it to the chat template.
        max_new_tokens: Longest answer, in tokens.
        batch_size: Questions that are answered together, where there are several.
        output: File that gets a JSON object for each answer; None prints answers only.
    """

    system: str | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    output: Path | None = None


def ask(
    model: str,
    words: Sequence[str],
    options: AskOptions,
    *,
    data: str | None = None,
    image_folder: str | None = None,
    columns: str | None = None,
    **keywords: Unpack[ModelKeywords],
) -> None:
    """Asks a model what the command line says, and prints its greedy answers.

    Args:
        model: Folder or Hub id of a vision-language model, or an adapter's folder.
        words: Image files, then the question about them. In place of files, a folder: the question
            is asked about each image in it. Without a question, lines of standard input are the
            user's turns of a conversation.
        options: How to ask, and where the answers go.
        data: Data whose rows are asked, in place of `words`, in any form that training reads.
        image_folder: Folder of the images of `data`, as in training.
        columns: Columns of `data`, as in training.
        keywords: See [`ModelOptions`].

    Raises:
        ValueError: Model, images or questions cannot be used. Weights are not loaded then.
    """
    model_options = ModelOptions(**keywords)
    images, text = read_words(words)
    if data is None:
        questions = _questions_of_words(images, text, options)
    elif words:
        raise ValueError("--data has the images and questions. Leave the others out.")
    else:
        questions = questions_of_data(
            data, image_folder=image_folder, columns=columns, system=options.system
        )
    check_images(questions)
    answered = 0
    if options.output is not None:
        answered = count_answered(options.output, questions, model)
    handle = resolve_model(
        model,
        trust_remote_code=model_options.trust_remote_code,
        base=model_options.base,
        base_quantization=model_options.base_quantization,
    )
    if handle.processor is None:
        raise ValueError(
            f"{model} is a language model without vision. Name a vision-language model."
        )
    start = first_turns(options.system)
    decoded_images = []
    if questions:
        check_texts(handle.processor, [question.turns for question in questions])
        check_length(handle, questions[0].conversation())
    else:
        decoded_images = [decode_image({"path": str(image), "bytes": None}) for image in images]
        check_length(handle, [*start, user_turn("", decoded_images)])
    loaded = handle.load(dtype=model_options.dtype, load_in_4bit=model_options.load_in_4bit)
    if not questions:
        converse(loaded, handle.processor, start, decoded_images, options.max_new_tokens)
    elif len(questions) == 1 and options.output is None:
        Console(stderr=True).print(f"Reading {questions[0].name} ...")  # minutes, on some CPUs
        print_answer(loaded, handle.processor, questions[0].conversation(), options.max_new_tokens)
    else:
        answer_all(loaded, handle.processor, questions, options, model, answered)


def _questions_of_words(
    images: Sequence[Path], text: str | None, options: AskOptions
) -> list[Question]:
    """Returns the questions of a command line without data; none starts a conversation."""
    if images and images[0].is_dir():
        return questions_about_each(images[0], images[1:], text, options.system)
    if text is not None:
        return [question_about(images, text, options.system)]
    if options.output is not None:
        raise ValueError("--output needs questions: give one, in quotes, or --data.")
    return []


def check_length(handle: ModelHandle, conversation: Sequence[Message]) -> None:
    """Raises ValueError if the model has too few positions for the conversation and an answer."""
    inputs = model_inputs(handle.processor, [conversation])
    try:
        free_positions(handle.config, inputs["input_ids"].shape[1])
    except ValueError as error:
        raise ValueError(f"{handle.name} cannot be asked this. {error}") from error


def print_answer(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    conversation: Sequence[Message],
    max_new_tokens: int,
) -> str:
    """Prints the answer as it is generated, and returns it. It cannot control the terminal."""
    inputs = model_inputs(processor, [conversation]).to(model.device, model.dtype)
    pieces = []
    for piece in AnswerStream(model, processor, inputs, max_new_tokens):
        pieces.append(piece)
        print(escaped(piece), end="", flush=True)
    print(flush=True)
    return "".join(pieces).strip()


def answer_all(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    questions: Sequence[Question],
    options: AskOptions,
    model_name: str,
    answered: int,
) -> None:
    """Answers the questions after the first `answered`; prints or writes each batch at once."""
    console = Console(stderr=True)
    with Progress(console=console, disable=options.output is None) as progress:
        progress_task = progress.add_task("questions", total=len(questions), completed=answered)
        for start in range(answered, len(questions), options.batch_size):
            question_batch = questions[start : start + options.batch_size]
            conversations = [question.conversation() for question in question_batch]
            answer_texts = answers(model, processor, conversations, options.max_new_tokens)
            if options.output is None:
                for question, answer_text in zip(question_batch, answer_texts, strict=True):
                    print(escaped(f"{question.name}: {answer_text}"), flush=True)
            else:
                rows = answer_rows(model_name, question_batch, answer_texts)
                append_rows(options.output, rows)
            progress.advance(progress_task, len(question_batch))
    further = sum(question.further_turns > 0 for question in questions)
    if further:
        console.print(f"Of {further:,} rows with several questions, the first one was asked.")
    if options.output is not None:
        console.print(f"Written to {options.output}.", soft_wrap=True)


def answer_rows(
    model_name: str, questions: Iterable[Question], texts: Iterable[str]
) -> Iterator[dict]:
    """Yields what the file of answers says of each question."""
    for question, answer_text in zip(questions, texts, strict=True):
        row = _identity(model_name, question)
        row["answer"] = answer_text
        if question.truth is not None:
            row["truth"] = question.truth
        yield row


def append_rows(file: Path, rows: Iterable[dict]) -> None:
    """Appends a line of JSON for each row, complete on disk when this returns."""
    lines = []
    for row in rows:
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="replace") as answers_file:
            answers_file.writelines(lines)


def count_answered(file: Path, questions: Sequence[Question], model_name: str) -> int:
    """Returns how many questions, from the first on, an earlier run has answered in a file.

    Removes a last line that was not written to its end. Raises ValueError if the file has anything
    else, because these answers would be mixed with it.
    """
    if not file.exists():
        return 0
    stored_bytes = file.read_bytes()
    end_of_whole_lines = stored_bytes.rfind(b"\n") + 1
    whole_lines = stored_bytes[:end_of_whole_lines]
    lines = whole_lines.splitlines()
    is_continued = len(lines) <= len(questions)
    for line, question in zip(lines, questions, strict=False):
        is_continued = is_continued and _is_answer(line, question, model_name)
    if not is_continued:
        raise ValueError(
            f"{file} exists and has answers of another model or to other questions. Give another "
            "--output."
        )
    if whole_lines != stored_bytes:
        file.write_bytes(whole_lines)
    return len(lines)


def _is_answer(line: bytes, question: Question, model_name: str) -> bool:
    """Returns whether a line of a file has this model's answer to the question."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    identity = _identity(model_name, question)
    return isinstance(row, dict) and "answer" in row and identity.items() <= row.items()


def _identity(model_name: str, question: Question) -> dict:
    return {
        "model": model_name,
        "name": question.name,
        "question": question.text,
    }


def converse(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    start: Sequence[Message],
    images: Sequence[Any],
    max_new_tokens: int,
) -> None:
    """Answers the lines of standard input, each with all that was said before it.

    The first user's turn has the images. See `HOW_TO_TALK` for the commands. A turn that cannot be
    answered is left out of the conversation, and the reason is printed to standard error.
    """
    console = Console(stderr=True)
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        console.print(HOW_TO_TALK, soft_wrap=True)
    turns = list(start)
    waiting_images = list(images)  # for the next turn
    for text in _typed_lines(prompt):
        command, _, argument = text.partition(" ")
        if command == "/new":
            turns = list(start)
            waiting_images = list(images)
        elif command == "/image":
            try:
                path = Path(argument.strip()).expanduser()
                waiting_images.append(decode_image({"path": str(path), "bytes": None}))
            except ValueError as error:
                console.print(f"Error: {error}", soft_wrap=True)
        elif text:
            conversation = [*turns, user_turn(text, waiting_images)]
            try:
                answer = print_answer(model, processor, conversation, max_new_tokens)
            except ValueError as error:
                console.print(f"Error: {error}", soft_wrap=True)
            except KeyboardInterrupt:
                print()
            else:
                turns = [*conversation, assistant_turn(answer)]
                waiting_images = []


def _typed_lines(prompt: str) -> Iterator[str]:
    """Yields lines without spaces at their ends, until the end of the input or Ctrl-C."""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            return
        yield line.strip()
