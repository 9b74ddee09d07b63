"""Generation marks: exactly what the model has to generate, in every family."""

import pytest
from chat_families import (
    END_OF_TURN,
    LLAVA_15,
    SHIPPED,
    SMOLLM2,
    TEMPLATES,
    TOOL_CALL,
    TRIMS,
    WEATHER,
    chat,
    marked,
    parts,
    render,
)

from normalign_llava.assembly.chat_template import multimodal_chat_template


@pytest.mark.parametrize("name", END_OF_TURN)
def test_marks_hold_each_answer_and_its_end_of_turn_and_nothing_else(name):
    new, has_marks = multimodal_chat_template(TEMPLATES[name])
    assert has_marks
    end = END_OF_TURN[name]
    answers = ["A kite.", "  Two\nlines "] if name not in TRIMS else ["A kite.", "Two\nlines"]
    expected = [answer + end for answer in answers]
    if name == "llama2":  # sets its answers apart with spaces, and ends its generation prompt before the first
        expected = [" A kite. </s>", " Two\nlines </s>"]
    if name == "qwen3":  # its template opens the last answer with an empty thought, which the model has to generate
        expected[1] = "<think>\n\n</think>\n\n" + expected[1]
    messages = chat("What?", "A kite.", "And?", "  Two\nlines ")
    for conversation in (messages, parts(messages, {"type": "image"})):
        assert marked(new, conversation) == expected
    assert marked(new, messages[:1], add_generation_prompt=True) == []


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "llama3_2"])
def test_marks_hold_tool_calls_but_not_what_tools_say(name):
    new, _ = multimodal_chat_template(TEMPLATES[name])
    call = '<tool_call>\n{"name": "tide", "arguments": {"port": "Brest"}}\n</tool_call><|im_end|>'
    if name.startswith("llama"):
        call = '{"name": "tide", "parameters": {"port": "Brest"}}<|eot_id|>'
    answer = "<think>\n\n</think>\n\nLow tide." if name == "qwen3" else "Low tide."
    assert marked(new, TOOL_CALL, tools=[WEATHER]) == [call, answer + END_OF_TURN[name]]
    if name == "qwen2_5":  # text before the call is marked too
        messages = [TOOL_CALL[0], {**TOOL_CALL[1], "content": "Let me look."}, *TOOL_CALL[2:]]
        assert marked(new, messages)[0] == "Let me look.\n" + call


@pytest.mark.parametrize("name", ["cohere", "cohere2", "lfm2", "lfm2_v2", "qwen2_5_vl", "qwen3_vl"])
def test_marks_from_trl_are_used_where_we_have_no_edit(name):
    new, has_marks = multimodal_chat_template(SHIPPED[name])
    assert has_marks
    first, second = marked(new, parts(chat("What?", "A kite.", "And?", "Two."), {"type": "image"}))
    assert "A kite." in first and first.rstrip().endswith(">") and "What?" not in first
    assert "Two." in second and "And?" not in second


@pytest.mark.parametrize("name", ["qwen3_5_think", "deepseek_r1_distill", "deepseekv3", "gptoss"])
def test_marks_that_would_change_the_text_are_not_used(name):
    new, has_marks = multimodal_chat_template(SHIPPED[name])
    assert not has_marks and "generation %}" not in new


ANSWER = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"


@pytest.mark.parametrize(
    "old, new",
    [
        (ANSWER, "{{ message['content'] }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"),
        (ANSWER, "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"),
        ("{%- else %}{{ message['content'] + '<|im_end|>' }}", "{%- else %}" + ANSWER),
    ],
    ids=["answer left out", "end of turn left out", "questions marked"],
)
def test_wrong_marks_of_a_template_itself_are_not_claimed(old, new):
    right = multimodal_chat_template(SMOLLM2)[0]
    assert right.count(old) == 1 and multimodal_chat_template(right)[1]
    assert not multimodal_chat_template(right.replace(old, new))[1]


def test_marks_need_an_end_of_turn():
    assert not multimodal_chat_template(LLAVA_15)[1]
    assert not multimodal_chat_template(None, special_tokens={"bos_token": "<s>"})[1]


def test_vicuna_written_out():
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. "
    )
    messages = chat("What?", "A kite.", "And?")
    new, has_marks = multimodal_chat_template(None)
    assert has_marks
    assert render(new, parts(messages, {"type": "image"}), add_generation_prompt=True) == (
        f"<s>{system}USER: <image>What? ASSISTANT: A kite.</s>USER: And? ASSISTANT:"
    )
    assert render(new, chat(("system", "Be kind."), "What?")) == "<s>Be kind. USER: What? "
    assert render(new, chat(("system", ""), "What?")) == "<s>USER: What? "
    assert marked(new, chat("What?", "A kite.", "And?", "Two.")) == [" A kite.</s>", " Two.</s>"]
    with pytest.raises(Exception, match="'tool'"):
        render(new, TOOL_CALL)
