# SPDX-License-Identifier: Apache-2.0
"""`normalign ask`: a question, a file of questions and answers, or a conversation."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import PreTrainedModel, ProcessorMixin

from ..data.rows.images import decode_image
from ..diagnose.load import ModelHandle, resolve_model
from ..errors import Console, escaped, writing_to
from .answering import (
    AnswerStream,
    Message,
    answers,
    assistant_turn,
    check_texts,
    free_positions,
    model_inputs,
    system_turn,
    user_turn,
)
from .questions import (
    Question,
    check_images,
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
    trust_remote_code: bool = False,
    base: str | None = None,
    base_quantization: str | None = None,
    **loading: Any,
) -> None:
    """Asks a model what the command line says, and prints its greedy answers.

    Args:
        model: Folder or Hub id of a vision-language model, or an adapter's folder.
        words: Image files, then the question about them. In place of files, a folder: the question
            is asked about each image in it. Without a question, lines of standard input are the
            user's turns of a conversation.
        data: Data whose rows are asked, in place of `words`, in any form that training reads;
            `image_folder` and `columns` as in training.
        base, base_quantization: Of an adapter; see [`resolve_model`].
        loading: How the model is loaded, see [`ModelHandle.load`].

    Raises ValueError, before weights are loaded, if model, images or questions cannot be used.
    """
    images, text = read_words(words)
    questions: list[Question] = []
    if data is not None:
        if words:
            raise ValueError("--data has the images and questions. Leave the others out.")
        places = {"image_folder": image_folder, "columns": columns}
        questions = questions_of_data(data, system=options.system, **places)
    elif images and images[0].is_dir():
        questions = questions_about_each(images[0], images[1:], text, options.system)
    elif text is not None:
        questions = [question_about(images, text, options.system)]
    elif options.output is not None:
        raise ValueError("--output needs questions: give one, in quotes, or --data.")
    check_images(questions)
    answered = 0
    if options.output is not None:
        answered = count_answered(options.output, questions, model)
    handle = resolve_model(
        model,
        trust_remote_code=trust_remote_code,
        base=base,
        base_quantization=base_quantization,
    )
    if handle.processor is None:
        raise ValueError(
            f"{model} is a language model without vision. Name a vision-language model."
        )
    if not questions:
        start = first_turns(options.system)
        shown = [decode_image({"path": str(image), "bytes": None}) for image in images]
        check_length(handle, [*start, user_turn("", shown)])
        converse(handle.load(**loading), handle.processor, start, shown, options.max_new_tokens)
        return
    check_texts(handle.processor, [question.turns for question in questions])
    check_length(handle, questions[0].conversation())
    loaded = handle.load(**loading)
    if len(questions) == 1 and options.output is None:
        Console(stderr=True).print(f"Reading {questions[0].name} ...")  # minutes, on some CPUs
        print_answer(loaded, handle.processor, questions[0].conversation(), options.max_new_tokens)
        return
    answer_all(loaded, handle.processor, questions, options, model, answered)


def first_turns(system: str | None) -> list[Message]:
    """The turns that a conversation starts with."""
    return [system_turn(system)] if system else []


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
    """Answers the questions but the first `answered`, each printed or written when it is there."""
    console = Console(stderr=True)
    with Progress(console=console, disable=options.output is None) as progress:
        task = progress.add_task("questions", total=len(questions), completed=answered)
        for start in range(answered, len(questions), options.batch_size):
            batch = questions[start : start + options.batch_size]
            conversations = [question.conversation() for question in batch]
            texts = answers(model, processor, conversations, options.max_new_tokens)
            if options.output is None:
                for question, text in zip(batch, texts, strict=True):
                    print(escaped(f"{question.name}: {text}"), flush=True)
            else:
                rows = answer_rows(model_name, batch, texts)
                append_rows(options.output, rows)
            progress.advance(task, len(batch))
    further = sum(question.further_turns > 0 for question in questions)
    if further:
        console.print(f"Of {further:,} rows with several questions, the first one was asked.")
    if options.output is not None:
        console.print(f"Written to {options.output}.", soft_wrap=True)


def answer_rows(
    model_name: str, questions: Iterable[Question], texts: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """What the file of answers says of each question."""
    for question, text in zip(questions, texts, strict=True):
        row = {**_identity(model_name, question), "answer": text}
        if question.truth is not None:
            row["truth"] = question.truth
        yield row


def append_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Appends a line of JSON for each row, complete on disk when this returns."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="replace") as opened:
            opened.writelines(lines)


def count_answered(file: Path, questions: Sequence[Question], model_name: str) -> int:
    """How many of the questions, from the first on, a file of answers has from an earlier run.

    Removes a last line that was not written to its end. Raises ValueError if the file has anything
    else, which would be mixed with these answers.
    """
    if not file.exists():
        return 0
    stored = file.read_bytes()
    whole = stored[: stored.rfind(b"\n") + 1]
    lines = whole.splitlines()
    fits = len(lines) <= len(questions)
    for line, question in zip(lines, questions, strict=False):
        fits = fits and _answers(line, question, model_name)
    if not fits:
        raise ValueError(
            f"{file} exists and has answers of another model or to other questions. Give another "
            "--output."
        )
    if whole != stored:
        file.write_bytes(whole)
    return len(lines)


def _answers(line: bytes, question: Question, model_name: str) -> bool:
    """Whether a line is the answer of this model to the question."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    wanted = _identity(model_name, question)
    return isinstance(row, dict) and "answer" in row and wanted.items() <= row.items()


def _identity(model_name: str, question: Question) -> dict[str, Any]:
    return {"model": model_name, "name": question.name, "question": question.text}


def converse(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    start: Sequence[Message],
    images: Sequence[Any],
    max_new_tokens: int,
) -> None:
    """Answers the lines of standard input, each with all that was said before it.

    The first user's turn has the images. See `HOW_TO_TALK` for the commands. A turn that cannot be
    answered is left out of the conversation, with the reason on standard error.
    """
    console = Console(stderr=True)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        console.print(HOW_TO_TALK, soft_wrap=True)
    turns, waiting = list(start), list(images)  # images wait for the next turn
    while (line := _read_line("> " if is_terminal else "")) is not None:
        command, _, argument = line.strip().partition(" ")
        if command == "/new":
            turns, waiting = list(start), list(images)
        elif command == "/image":
            try:
                path = str(Path(argument.strip()).expanduser())
                waiting.append(decode_image({"path": path, "bytes": None}))
            except ValueError as error:
                console.print(f"Error: {error}", soft_wrap=True)
        elif line.strip():
            asked = [*turns, user_turn(line.strip(), waiting)]
            try:
                text = print_answer(model, processor, asked, max_new_tokens)
            except ValueError as error:
                console.print(f"Error: {error}", soft_wrap=True)
            except KeyboardInterrupt:
                print()
            else:
                turns, waiting = [*asked, assistant_turn(text)], []


def _read_line(prompt: str) -> str | None:
    """The next line; None at the end of the input, or at Ctrl-C."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None
