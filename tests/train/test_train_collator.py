"""Batches: labels on exactly the answers, images in their places, bad images without effect."""

import io
from itertools import groupby

import pytest
import tiny_parts
import torch
import train_data
from chat_families import END_OF_TURN, TEMPLATES, byte_tokenizer
from PIL import Image
from train_data import assistant, image_bytes, inside, llava, user
from training import assert_equal
from transformers import AutoProcessor
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from normalign_llava import NormAlignLlavaForConditionalGeneration
from normalign_llava.data.rows.checks import token_lengths
from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.rows.parse import DroppedRows, parse_row
from normalign_llava.train.collator import (
    ConversationCollator,
    _messages,
    blank_image,
    count_rows_with_labels,
)


FAMILIES = [*sorted(set(END_OF_TURN) - {"llama2"}), "lfm2", "qwen2_5_vl", "cohere"]
LINE_BREAK_AFTER_END = ("lfm2", "qwen2_5_vl")  # which their marks include
TRUNCATED = image_bytes("red", (64, 64))[:60]
TWO_TURNS = {
    "images": [inside("red"), inside("blue")],
    "messages": [
        user("<image>\nWhat is this?"),
        assistant("A red kite."),
        user("And <image>, is it blue?"),
        assistant("Yes, blue."),
    ],
}


def parsed(raw_row, number=0) -> dict:
    """A row as the reader of data gives it to the collator."""
    return {
        **parse_row(raw_row),
        "source": "data.json",
        "row": number,
        "length": 0,
    }


def truncated(path=None) -> dict:
    """An image that is cut off."""
    return {"path": path, "bytes": TRUNCATED}


def labelled(processor, labels) -> list[str]:
    """The text of each unbroken stretch of labels."""
    texts = []
    for is_label, token_ids in groupby(labels.tolist(), lambda label: label != -100):
        if is_label:
            texts.append(processor.tokenizer.decode(list(token_ids)))
    return texts


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture(params=FAMILIES)
def family_processor(request):
    """A processor with the template of a family of models, one token a byte."""
    return train_data.processor(byte_tokenizer(), TEMPLATES[request.param])


def test_labels_of_two_turns_and_two_images(processor):
    assert processor.tokenizer.pad_token == processor.tokenizer.eos_token
    batch = ConversationCollator(processor)([parsed(TWO_TURNS)])
    token_ids = batch["input_ids"][0]
    labels = batch["labels"][0]
    assert labelled(processor, labels) == ["A red kite.<|im_end|>", "Yes, blue.<|im_end|>"]
    is_label = labels != -100
    assert (labels[is_label] == token_ids[is_label]).all()
    assert (labels[token_ids == processor.image_token_id] == -100).all()
    text = processor.tokenizer.decode(token_ids)
    assert text.replace("<image>" * 4, "{4}") == (
        "<|im_start|>user\n{4}What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA red kite.<|im_end|>\n"
        "<|im_start|>user\nAnd {4}, is it blue?<|im_end|>\n"
        "<|im_start|>assistant\nYes, blue.<|im_end|>\n"
    )
    assert len(batch["pixel_values"]) == 2


FORMS = [
    TWO_TURNS,
    llava("Say hello.", "Hello!"),
    llava("Which colour?\n<image>", " green ", inside("green")),
    {
        "images": [inside("red"), inside("blue")],
        "messages": [user("Same?"), assistant("No.")],
    },
    {
        "image": inside("red"),
        "prompt": "Which colour?",
        "completion": "red",
    },
    {
        "image": inside("blue"),
        "question": "Which colour?",
        "answer": "blue",
    },
    {
        "image": inside("white"),
        "caption": "A white square.",
    },
]
ANSWER_COUNT = 1 + len(FORMS)  # the first row has two


def batch_of_trl(processor, parsed_rows, pad_to_multiple_of):
    """TRL's collator repeats image tokens in the text, and finds the answers afterwards."""
    decoded_rows = []
    for parsed_row in parsed_rows:
        images = [decode_image(image) for image in parsed_row["images"]]
        decoded_rows.append({"messages": _messages(parsed_row), "images": images})
    collator = DataCollatorForVisionLanguageModeling(
        processor,
        assistant_only_loss=True,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    return collator(decoded_rows)


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_the_same_as_from_trl_s_collator(family, multiple):
    processor = train_data.processor(byte_tokenizer(), TEMPLATES[family])
    parsed_rows = [parsed(raw_row, number) for number, raw_row in enumerate(FORMS)]
    expected = batch_of_trl(processor, parsed_rows, multiple)
    batch = ConversationCollator(processor, pad_to_multiple_of=multiple)(parsed_rows)
    labels = batch.pop("labels")
    expected_labels = expected.pop("labels")
    assert_equal(dict(batch), dict(expected))

    # TRL's also has the white space after the end of a turn.
    differ = labels != expected_labels
    assert (labels[differ] == -100).all()
    line_breaks = [processor.tokenizer.decode(token) for token in expected_labels[differ]]
    expected_breaks = []
    if family in LINE_BREAK_AFTER_END:
        expected_breaks = ["\n"] * ANSWER_COUNT
    assert line_breaks == expected_breaks


def test_lengths_before_training_are_the_same_as_in_the_batch(family_processor):
    """They are counted without the preamble of the template."""
    parsed_rows = [
        parsed(TWO_TURNS),
        parsed(llava("Say hello.", "Hello!")),
        parsed(llava("\n<image>\nA", " b ", inside("red"))),
        parsed({"image": inside("red"), "caption": "A\n red square."}),
    ]
    batch = ConversationCollator(family_processor)(parsed_rows)
    expected = batch["attention_mask"].sum(1).tolist()
    assert token_lengths(family_processor, parsed_rows) == expected


def test_the_length_of_a_row_with_a_system_turn_is_the_same_as_in_its_batch(family_processor):
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Q"),
        assistant("A"),
        user("Q"),
        assistant("A"),
    ]
    parsed_row = parsed({"messages": messages})
    (length,) = token_lengths(family_processor, [parsed_row])
    if isinstance(length, str):  # a template may refuse system turns
        assert length.startswith("the chat template refuses it")
    else:
        batch = ConversationCollator(family_processor)([parsed_row])
        assert length == batch["input_ids"].shape[1]


@pytest.fixture
def raw_rows():
    """Rows of three forms, two with a decoded image."""
    picture = Image.open(io.BytesIO(inside("red")["bytes"]))
    return [
        {
            "image": picture,
            "prompt": "Which colour?",
            "completion": "red",
        },
        {
            "images": [picture],
            "messages": [user("Which?"), assistant("red")],
        },
        llava("Say hello.", "Hello!"),
    ]


def test_rows_of_any_form_are_collated_as_when_they_are_parsed(processor, raw_rows):
    collator = ConversationCollator(processor)
    batch = collator(raw_rows)
    expected = collator([parsed(raw_row) for raw_row in raw_rows])
    assert_equal(dict(batch), dict(expected))
    assert "bytes" not in str(raw_rows[0])  # the rows are not changed


def test_a_row_of_any_form_that_cannot_be_trained_on_is_named_in_its_batch(processor, raw_rows):
    with pytest.raises(ValueError, match="row 1 of its batch: the answer in turn 1 is empty"):
        ConversationCollator(processor)([raw_rows[0], llava("Q", " ")])


def test_a_bad_image_of_a_row_of_any_form_is_named_by_its_place_in_the_batch(processor, raw_rows):
    broken = llava("<image>Q", "A", truncated("bad.png"))
    with pytest.raises(ValueError, match="given to the collator, row 2: .*truncated"):
        ConversationCollator(processor)([*raw_rows[:2], broken])


def test_templates_see_no_text_in_an_image(processor):
    arrow_content = [
        {"type": "image", "text": None},
        {"type": "text", "text": "Q"},
    ]
    content = [
        {"type": "image"},
        {"type": "text", "text": "Q"},
    ]
    parsed_row = {"messages": [user(arrow_content)], "images": []}
    assert _messages(parsed_row) == [user(content)]


def test_answers_of_the_prompt_are_not_learned(processor):
    raw_row = {
        "prompt": [
            user("Q"),
            assistant("given"),
            user("Q2"),
            assistant("given too"),
            user("Q3"),
        ],
        "completion": [
            assistant("learned"),
            user("Q4"),
            assistant("learned too"),
        ],
    }
    batch = ConversationCollator(processor)([parsed(raw_row), parsed(llava("Q", "A"))])
    completion_labels = batch["labels"][0]
    expected = ["learned<|im_end|>", "learned too<|im_end|>"]
    assert labelled(processor, completion_labels) == expected
    assert labelled(processor, batch["labels"][1]) == ["A<|im_end|>"]


MARKS_THE_LAST_ANSWER = (
    "{% for message in messages %}{% set a = message['content'][-1]['text'] %}"
    "{% if message['role'] == 'assistant' %}"
    "{% if loop.last %}{% generation %}{{ a }}{% endgeneration %}{% else %}{{ a }}{% endif %}"
    "{% else %}{{ a }}{% endif %}"
    "{% endfor %}"
)


def test_learned_answers_cannot_be_chosen_if_the_template_marks_only_the_last():
    processor = train_data.processor()
    assert "generation" in processor.chat_template
    processor.chat_template = MARKS_THE_LAST_ANSWER
    collator = ConversationCollator(processor)
    messages = [
        user("Q"),
        assistant("first"),
        user("Q2"),
        assistant("second"),
    ]
    parsed_row = parsed({"messages": messages}, number=5)
    labels = collator([parsed_row])["labels"][0]
    assert labelled(processor, labels) == ["second"]
    with pytest.raises(ValueError, match=r"data.json, row 5: .* marks 1 of 2 answers"):
        collator([{**parsed_row, "learned": [False, True]}])


def test_special_tokens_in_a_row_of_any_form_are_refused(processor):
    with pytest.raises(ValueError, match="row 0 of its batch: .*<|im_end|>"):
        ConversationCollator(processor)([llava("Q", "A<|im_end|>")])


def skipping_collator(processor, dropped_rows) -> ConversationCollator:
    return ConversationCollator(processor, bad_rows="skip", dropped_rows=dropped_rows)


@pytest.fixture
def dropped_rows(tmp_path):
    return DroppedRows(tmp_path / "dropped_rows.jsonl")


def test_what_a_row_with_two_bad_images_is_recorded_with_is_the_first(processor, dropped_rows):
    bad_images = [truncated("one.png"), truncated("two.png")]
    bad_row = {**parsed(TWO_TURNS, number=2), "images": bad_images}
    batch = skipping_collator(processor, dropped_rows)([bad_row])
    (dropped,) = dropped_rows.read()
    assert dropped.row == 2
    assert dropped.file == "one.png"
    first, second = batch["pixel_values"]
    assert torch.equal(first, second)


def test_images_that_are_not_there_are_blank_in_the_tower_s_shape(processor):
    blank = blank_image(processor)
    batch = ConversationCollator(processor)([parsed(llava("<image>Q", "A", inside("red")))])
    assert blank.shape == batch["pixel_values"].shape
    assert blank.dtype == batch["pixel_values"].dtype
    assert not blank.any()


def counts(batch) -> list[int]:
    """Of rows with labels, and of rows without."""
    return [int(count) for count in count_rows_with_labels(batch)]


@pytest.mark.parametrize("padding_free", [False, True])
def test_rows_with_labels_are_counted_with_padding_and_without(processor, padding_free):
    collator = ConversationCollator(processor, padding_free=padding_free)
    parsed_rows = []
    for length in (1, 4, 2):
        parsed_rows.append(parsed(llava("Q" * length, "A" * length)))
    parsed_rows[1]["learned"] = [False]
    assert counts(collator(parsed_rows)) == [2, 1]
    assert counts(collator([parsed_rows[1]])) == [0, 1]


# Two rows of two tokens; one token has a label.
LABELS = torch.tensor([[-100, 3], [-100, -100]])
POSITIONS = torch.tensor([[0, 1], [0, 1]])


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(
            {
                "labels": LABELS.view(1, 4),
                "position_ids": POSITIONS.view(1, 4),
            },
            id="in one sequence",
        ),
        pytest.param(
            {
                "labels": LABELS,
                "position_ids": POSITIONS,
                "attention_mask": torch.ones_like(LABELS),
            },
            id="with positions and a mask",
        ),
        pytest.param(
            {"labels": LABELS},
            id="only labels",
        ),
    ],
)
def test_rows_with_labels_are_counted_whatever_tells_rows_apart(batch):
    assert counts(batch) == [1, 1]


def test_a_template_without_marks_is_refused():
    processor = train_data.processor()
    content = "message['content']"
    processor.chat_template = tiny_parts.CHATML.replace(content, f"{content}[0]['text']")
    with pytest.raises(ValueError, match="marks no answer with {% generation %}.*--chat-template"):
        ConversationCollator(processor)


def test_a_template_that_fails_is_refused():
    processor = train_data.processor()
    processor.chat_template = "{{ messages[0].thoughts.text }}"
    with pytest.raises(ValueError, match="The chat template cannot be loaded: .*thoughts"):
        ConversationCollator(processor)


def test_a_tokenizer_that_drops_letters_is_refused():
    # Marks of answers are places in the text, and "\n" after an answer may be one of the letters.
    tokenizer = tiny_parts.tokenizer()
    tokenizer.backend_tokenizer.model.unk_token = None
    assert tokenizer.encode("a\u03a9b") == tokenizer.encode("ab")
    with pytest.raises(ValueError, match="drops letters that it does not know.* Give it an unk_"):
        ConversationCollator(train_data.processor(tokenizer))


def test_stop_names_row_file_and_reason(processor, tmp_path):
    image_path = tmp_path / "bad.png"
    image_path.write_bytes(TRUNCATED)
    good_row = parsed(llava("Q", "A"))
    bad_row = parsed(llava("<image>Q", "A", str(image_path)), number=41)
    with pytest.raises(ValueError, match="data.json, row 41: .*bad.png: .*truncated.*_rows skip"):
        ConversationCollator(processor)([good_row, bad_row])


def test_a_share_of_a_long_stream_grows_with_its_rows(processor):
    collator = ConversationCollator(processor, bad_rows=0.1, skippable=1, share=0.1)
    good_row = parsed(llava("<image>Q", "A", inside("red")))
    bad_row = {**good_row, "images": [truncated("bad.png")]}

    def read_fifty_rows():
        """The first of every ten rows is bad."""
        for start in (0, 10, 20, 30, 40):
            batch = [{**bad_row, "row": start}]
            for number in range(start + 1, start + 10):
                batch.append({**good_row, "row": number})
            collator(batch)

    read_fifty_rows()
    read_fifty_rows()  # a stream begins again: different rows are counted, read and bad
    with pytest.raises(ValueError, match="row 51: .*truncated.* 6 bad row.* Fix it, or use"):
        collator([{**bad_row, "row": 51}])


@pytest.fixture
def good_row():
    return parsed(llava("<image>Q", "A", inside("red")), number=1)


@pytest.fixture
def half_bad_row():
    """A row whose second image is cut off."""
    return parsed({**TWO_TURNS, "images": [inside("red"), truncated()]}, number=2)


def test_a_skipped_row_has_white_images_and_no_labels(
    processor, dropped_rows, good_row, half_bad_row
):
    collator = skipping_collator(processor, dropped_rows)
    batch = collator([good_row, half_bad_row])
    white_row = parsed(llava("<image>Q", "A", inside("white")))
    (white,) = collator([white_row])["pixel_values"]
    assert batch["pixel_values"].shape[0] == 3
    assert torch.equal(batch["pixel_values"][2], white)
    assert labelled(processor, batch["labels"][0]) == ["A<|im_end|>"]
    assert (batch["labels"][1] == -100).all()


def test_a_skipped_row_is_recorded_once(processor, dropped_rows, good_row, half_bad_row):
    collator = skipping_collator(processor, dropped_rows)
    collator([good_row, half_bad_row])
    (dropped,) = dropped_rows.read()
    assert dropped.source == "data.json"
    assert dropped.row == 2
    batch = collator([half_bad_row])
    assert (batch["labels"] == -100).all()
    assert len(dropped_rows.read()) == 1


def gradient(model, batch) -> torch.Tensor:
    """The gradient of all parameters."""
    model.zero_grad()
    pixel_values = batch["pixel_values"].double()
    model(**{**batch, "pixel_values": pixel_values}).loss.backward()
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad.flatten())
    return torch.cat(gradients)


def test_a_skipped_row_stays_without_effect(
    processor, checkpoint, dropped_rows, good_row, half_bad_row
):
    collator = skipping_collator(processor, dropped_rows)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).double()
    actual = gradient(model, collator([good_row, half_bad_row]))
    expected = gradient(model, collator([good_row]))
    assert expected.abs().max() > 0
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
