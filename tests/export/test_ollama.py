import pytest
import tiny_parts
import transformers

from normalign_llava.export.ollama import modelfile, read_turn_texts


NUMBERED = (
    "{% for message in messages %}{{ loop.index }} {{ message['content'][0]['text'] }}\n"
    "{% endfor %}"
)
WITH_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    '<|im_start|>system\nBe "kind".<|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'][0]['text'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def processor(template):
    tokenizer = tiny_parts.tokenizer(template)
    image_processor = tiny_parts.image_processor("clip")
    return transformers.LlavaProcessor(
        image_processor, tokenizer, patch_size=8, chat_template=template
    )


def test_a_template_becomes_texts_between_turns():
    turn_texts = read_turn_texts(processor(WITH_DEFAULT_SYSTEM))
    assert turn_texts.before_system == "<|im_start|>system\n"
    assert turn_texts.before_first_question == (
        '<|im_start|>system\nBe "kind".<|im_end|>\n<|im_start|>user\n'
    )
    assert turn_texts.system_to_question == "<|im_end|>\n<|im_start|>user\n"
    assert turn_texts.question_to_answer == "<|im_end|>\n<|im_start|>assistant\n"
    assert turn_texts.answer_to_question == "<|im_end|>\n<|im_start|>user\n"
    assert turn_texts.before_answer == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_modelfile_has_both_files_the_template_and_the_stop_token():
    lines = modelfile(processor(WITH_DEFAULT_SYSTEM), "kite.gguf", "mmproj-kite.gguf").splitlines()
    assert lines[:2] == ["FROM ./kite.gguf", "FROM ./mmproj-kite.gguf"]
    assert lines[2] == (
        'TEMPLATE """{{- $previous := "" }}{{- range .Messages }}'
        '{{- if eq .Role "system" }}{{ "<|im_start|>system\\n" }}'
        '{{- else if eq .Role "assistant" }}{{ "<|im_end|>\\n<|im_start|>assistant\\n" }}'
        '{{- else if eq $previous "" }}'
        '{{ "<|im_start|>system\\nBe \\"kind\\".<|im_end|>\\n<|im_start|>user\\n" }}'
        '{{- else if eq $previous "system" }}{{ "<|im_end|>\\n<|im_start|>user\\n" }}'
        '{{- else }}{{ "<|im_end|>\\n<|im_start|>user\\n" }}{{- end }}'
        "{{ .Content }}{{- $previous = .Role }}{{- end }}"
        '{{ "<|im_end|>\\n<|im_start|>assistant\\n" }}"""'
    )
    assert lines[3:] == ['PARAMETER stop "<|im_end|>"']


@pytest.mark.parametrize("template", [NUMBERED, "no content"])
def test_a_template_that_is_not_text_between_turns_is_left_to_the_person(template):
    assert read_turn_texts(processor(template)) is None
    assert "write TEMPLATE yourself" in modelfile(processor(template), "a.gguf", "b.gguf")
