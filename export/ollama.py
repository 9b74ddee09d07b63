# SPDX-License-Identifier: Apache-2.0
"""Writes the chat template of a checkpoint for Ollama, whose templates are Go's."""

from dataclasses import dataclass

from transformers import LlavaProcessor

from ..checkpoint.prompts import end_texts
from ..evaluation.answering import make_turn


_SYSTEM = "\u2983system\u2984"
_QUESTION = "\u2983question\u2984"
_ANSWER = "\u2983answer\u2984"
_LAST_QUESTION = "\u2983last question\u2984"


@dataclass(frozen=True)
class TurnTexts:
    """What a chat template prints between the texts of turns.

    Attributes:
        before_system: Before a system turn, at the start.
        before_first_question: Before the user's first turn, if no system turn is before it.
        system_to_question: Between a system turn and the user's.
        question_to_answer: Between a user's turn and the assistant's.
        answer_to_question: Between the assistant's turn and the user's.
        before_answer: After the user's last turn, for the model to answer.
    """

    before_system: str
    before_first_question: str
    system_to_question: str
    question_to_answer: str
    answer_to_question: str
    before_answer: str

    def join(self, turns: list[tuple[str, str]]) -> str:
        """Returns the prompt of turns, each a role and a text, as the Go template prints it."""
        prompt = ""
        previous_role = ""
        for role, text in turns:
            if role == "system":
                prompt += self.before_system
            elif role == "assistant":
                prompt += self.question_to_answer
            elif previous_role == "":
                prompt += self.before_first_question
            elif previous_role == "system":
                prompt += self.system_to_question
            else:
                prompt += self.answer_to_question
            prompt += text
            previous_role = role
        return prompt + self.before_answer


def modelfile(processor: LlavaProcessor, text_file: str, vision_file: str) -> str:
    """Returns Ollama's Modelfile for two GGUF files beside it."""
    lines = [f"FROM ./{text_file}", f"FROM ./{vision_file}"]
    turn_texts = read_turn_texts(processor)
    if turn_texts is None:
        lines.append("# The chat template is not one text between turns: write TEMPLATE yourself.")
    else:
        # It prints a prompt as `TurnTexts.join` does.
        lines.append(
            'TEMPLATE """{{- $previous := "" }}{{- range .Messages }}'
            f'{{{{- if eq .Role "system" }}}}{_go_literal(turn_texts.before_system)}'
            f'{{{{- else if eq .Role "assistant" }}}}{_go_literal(turn_texts.question_to_answer)}'
            f'{{{{- else if eq $previous "" }}}}{_go_literal(turn_texts.before_first_question)}'
            f'{{{{- else if eq $previous "system" }}}}{_go_literal(turn_texts.system_to_question)}'
            f"{{{{- else }}}}{_go_literal(turn_texts.answer_to_question)}"
            "{{- end }}{{ .Content }}{{- $previous = .Role }}{{- end }}"
            f'{_go_literal(turn_texts.before_answer)}"""'
        )
    for end_text in end_texts(processor.tokenizer, processor.chat_template):
        lines.append(f"PARAMETER stop {_quoted(end_text)}")
    return "\n".join(lines) + "\n"


def read_turn_texts(processor: LlavaProcessor) -> TurnTexts | None:
    """Returns what the chat template prints between turns.

    None if it prints something else in a longer conversation, such as the number of a turn.
    """
    question = ("user", _QUESTION)
    turns = [question, ("assistant", _ANSWER), ("user", _LAST_QUESTION)]
    conversation = _render(processor, turns)
    with_system = _render(processor, [("system", _SYSTEM), question])
    try:
        before_first_question, rest = conversation.split(_QUESTION)
        question_to_answer, rest = rest.split(_ANSWER)
        answer_to_question, before_answer = rest.split(_LAST_QUESTION)
        before_system, rest = with_system.split(_SYSTEM)
        system_to_question = rest.split(_QUESTION)[0]
    except ValueError:  # a text is missing, or printed twice
        return None
    turn_texts = TurnTexts(
        before_system,
        before_first_question,
        system_to_question,
        question_to_answer,
        answer_to_question,
        before_answer,
    )
    # Joined texts must be what the template prints of other conversations, too.
    exchange = [("user", "What is this?"), ("assistant", "A red kite.")]
    last = [("user", "Where?")]
    system = [("system", "Be brief.")]
    for turns in (last, exchange + last, exchange * 2 + last, system + exchange * 2 + last):
        if _render(processor, turns) != turn_texts.join(turns):
            return None
    return turn_texts


def _render(processor: LlavaProcessor, turns: list[tuple[str, str]]) -> str:
    messages = [make_turn(role, text) for role, text in turns]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _go_literal(text: str) -> str:
    """Returns an action that prints a text, whatever is in it."""
    return "{{ " + _quoted(text) + " }}" if text else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
