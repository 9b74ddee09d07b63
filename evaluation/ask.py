# SPDX-License-Identifier: Apache-2.0
"""`normalign ask`: a question, a file of questions and answers, or a conversation."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import PreTrainedModel, ProcessorMixin

from ..console import Console, escaped
from ..data.rows.images import decode_image
from ..errors import writing_to
from ..models import ModelOptions, require_processor, resolve_model
from .answering import (
    AnswerStream,
    Message,
    answers,
    check_texts,
    make_turn,
    model_inputs,
    require_answer_limit,
    user_turn,
)
from .questions import (
    Question,
    check_images,
    read_questions,
    read_questions_of_words,
    read_words,
    system_turns,
)


HOW_TO_TALK = (
    "Ask, and the model answers. /image FILE shows it another image, /new starts again, Ctrl-C "
    "stops an answer, Ctrl-D ends."
)


@dataclass(frozen=True)
class AskOptions(ModelOptions):
    """How `normalign ask` asks, beside the options of [`ModelOptions`].

    Attributes:
        system: The system turn. If None, it is left to the chat template.
        max_new_tokens: Longest answer, in tokens.
        batch_size: Questions that are answered together, where there are several.
        output: File that gets a JSON object for each answer. If None, answers are only printed.
        data: Data whose rows are asked, in any form that training reads.
        image_folder: Folder of the images of `data`, as in training.
        columns: Columns of `data`, as in training.
    """

    system: str | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    output: Path | None = None
    _: KW_ONLY
    data: str | None = None
    image_folder: str | None = None
    columns: str | None = None


def ask(model: str, words: Sequence[str], options: AskOptions) -> None:
    """Asks a model what the command line says, and prints its greedy answers.

    Args:
        model: Folder or Hub id of a vision-language model, or an adapter's folder.
        words: Image files, then the question about them. In place of files, a folder: the question
            is asked about each image in it. Without a question, lines of standard input are the
            user's turns of a conversation. Empty if the options name data.
        options: How to ask, where the answers go, and how the model is loaded.

    Raises:
        ValueError: Model, images or questions cannot be used. Weights are not loaded then.
        OSError: The model cannot be fetched, or `output` cannot be written.
        ImportError: The model needs a package that is not installed.
    """
    images, text = read_words(words)
    if options.data is None:
        questions = read_questions_of_words(images, text, options.system)
        if not questions and options.output is not None:
            raise ValueError("--output needs questions: give one, in quotes, or --data.")
    elif words:
        raise ValueError("--data has the images and questions. Leave the others out.")
    else:
        questions = read_questions(
            options.data,
            image_folder=options.image_folder,
            columns=options.columns,
            system=options.system,
        )
    check_images(questions)
    answered_count = 0
    if options.output is not None:
        answered_count = count_answered(options.output, questions, model)
    handle = resolve_model(model, options)
    processor = require_processor(handle)
    start = system_turns(options.system)
    decoded_images = []
    if questions:
        check_texts(processor, [question.turns for question in questions])
        conversation = questions[0].conversation()
    else:
        decoded_images = [decode_image({"path": str(image), "bytes": None}) for image in images]
        conversation = [*start, user_turn("", decoded_images)]
    token_count = model_inputs(processor, [conversation])["input_ids"].shape[1]
    try:
        require_answer_limit(handle.config, token_count, options.max_new_tokens)
    except ValueError as error:
        raise ValueError(f"{handle.name} cannot be asked this. {error}") from error
    loaded = handle.load()
    if not questions:
        converse(loaded, processor, start, decoded_images, options.max_new_tokens)
    elif len(questions) == 1 and options.output is None:
        Console(stderr=True).print(f"Reading {questions[0].name} ...")  # minutes, on some CPUs
        print_answer(loaded, processor, conversation, options.max_new_tokens)
    else:
        answer_all(loaded, processor, questions, options, model, answered_count)


def print_answer(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    conversation: Sequence[Message],
    max_new_tokens: int,
) -> str:
    """Prints the answer as it is generated, with control characters escaped, and returns it.

    Raises ValueError if the question cannot be asked, see [`model_inputs`].
    """
    inputs = model_inputs(processor, [conversation]).to(model.device, model.dtype)
    answer = ""
    for piece in AnswerStream(model, processor, inputs, max_new_tokens):
        answer += piece
        print(escaped(piece), end="", flush=True)
    print(flush=True)
    return answer.strip()


def answer_all(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    questions: Sequence[Question],
    options: AskOptions,
    model_name: str,
    answered: int,
) -> None:
    """Answers the questions after the first `answered`, and prints or writes each batch at once.

    Raises ValueError if a question cannot be asked, and OSError if answers cannot be written.
    """
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
                append_answers(options.output, model_name, question_batch, answer_texts)
            progress.advance(progress_task, len(question_batch))
    further = sum(question.further_turns > 0 for question in questions)
    if further:
        console.print(f"Of {further:,} rows with several questions, the first one was asked.")
    if options.output is not None:
        console.print(f"Written to {options.output}.", soft_wrap=True)


def append_answers(
    file: Path, model_name: str, questions: Sequence[Question], texts: Sequence[str]
) -> None:
    """Writes a line of JSON for each answer at the end of a file. They are on disk when it returns.

    Raises OSError if they cannot be written.
    """
    lines = []
    for question, text in zip(questions, texts, strict=True):
        row = _identity(model_name, question) | {"answer": text}
        if question.truth is not None:
            row["truth"] = question.truth
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="replace") as answers_file:
            answers_file.writelines(lines)


def count_answered(file: Path, questions: Sequence[Question], model_name: str) -> int:
    """Returns how many questions, from the first on, an earlier run has answered in a file.

    Removes a last line that was not written to its end.

    Raises ValueError if the file has anything else: these answers would be mixed with it.
    """
    if not file.exists():
        return 0
    stored_bytes = file.read_bytes()
    whole_lines = stored_bytes[: stored_bytes.rfind(b"\n") + 1]
    lines = whole_lines.splitlines()
    answered_count = 0
    for line, question in zip(lines, questions, strict=False):
        row = None
        with suppress(ValueError):
            row = json.loads(line)
        identity = _identity(model_name, question)
        if isinstance(row, dict) and "answer" in row and identity.items() <= row.items():
            answered_count += 1
    if answered_count < len(lines):
        raise ValueError(
            f"{file} exists and has answers of another model or to other questions. Give another "
            "--output."
        )
    if whole_lines != stored_bytes:
        file.write_bytes(whole_lines)
    return answered_count


def _identity(model_name: str, question: Question) -> dict:
    return {"model": model_name, "name": question.name, "question": question.text}


def converse(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    start: Sequence[Message],
    images: Sequence[Any],
    max_new_tokens: int,
) -> None:
    """Answers the lines of standard input, each with all that was said before it.

    See `HOW_TO_TALK` for the commands. A turn that cannot be answered is left out of the
    conversation, and the reason is printed to standard error.

    Args:
        model: Generates the answers.
        processor: The model's processor.
        start: The turns before the first one.
        images: Images of the first user's turn.
        max_new_tokens: Longest answer, in tokens.
    """
    console = Console(stderr=True)
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        console.print(HOW_TO_TALK, soft_wrap=True)
    turns = list(start)
    waiting_images = list(images)  # for the next turn
    while True:
        try:
            text = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return
        command, _, argument = text.partition(" ")
        try:
            if command == "/new":
                turns = list(start)
                waiting_images = list(images)
            elif command == "/image":
                path = Path(argument.strip()).expanduser()
                waiting_images.append(decode_image({"path": str(path), "bytes": None}))
            elif text:
                conversation = [*turns, user_turn(text, waiting_images)]
                answer = print_answer(model, processor, conversation, max_new_tokens)
                turns = [*conversation, make_turn("assistant", answer)]
                waiting_images = []
        except ValueError as error:
            console.print(f"Error: {error}", soft_wrap=True)
        except KeyboardInterrupt:
            print()
