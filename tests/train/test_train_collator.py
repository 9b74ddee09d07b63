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


def row(raw, number=0) -> dict:
    return {**parse_row(raw), "source": "data.json", "row": number, "length": 0}


def labelled(processor, labels) -> list[str]:
    """The text of each unbroken stretch of labels."""
    stretches = groupby(labels.tolist(), lambda token: token != -100)
    return [processor.tokenizer.decode(list(tokens)) for is_label, tokens in stretches if is_label]


TURNS = [user("<image>\nWhat is this?"), assistant("A red kite.")]
TURNS += [user("And <image>, is it blue?"), assistant("Yes, blue.")]
TWO_TURNS = {"messages": TURNS, "images": [inside("red"), inside("blue")]}
SYSTEM = [{"role": "system", "content": "Be brief."}, *[user("Q"), assistant("A")] * 2]
FAMILIES = [*sorted(set(END_OF_TURN) - {"llama2"}), "lfm2", "qwen2_5_vl", "cohere"]
LINE_BREAK_AFTER_END = ("lfm2", "qwen2_5_vl")  # which their marks include
TRUNCATED = image_bytes("red", (64, 64))[:60]


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


def test_labels_of_two_turns_and_two_images(processor):
    assert processor.tokenizer.pad_token == processor.tokenizer.eos_token
    batch = ConversationCollator(processor)([row(TWO_TURNS)])
    ids = batch["input_ids"][0]
    labels = batch["labels"][0]
    assert labelled(processor, labels) == ["A red kite.<|im_end|>", "Yes, blue.<|im_end|>"]
    assert (labels[labels != -100] == ids[labels != -100]).all()
    assert (labels[ids == processor.image_token_id] == -100).all()
    text = processor.tokenizer.decode(ids).replace("<image>" * 4, "{4}")
    assert text == (
        "<|im_start|>user\n{4}What is this?<|im_end|>\n"
        "<|im_start|>assistant\nA red kite.<|im_end|>\n"
        "<|im_start|>user\nAnd {4}, is it blue?<|im_end|>\n"
        "<|im_start|>assistant\nYes, blue.<|im_end|>\n"
    )
    assert len(batch["pixel_values"]) == 2


@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_that_of_trl_s_collator(family, multiple):
    """The reference repeats image tokens in the text, and finds the answers afterwards."""
    processor = train_data.processor(byte_tokenizer(), TEMPLATES[family])
    raw = [
        TWO_TURNS,
        llava("Say hello.", "Hello!"),
        llava("Which colour?\n<image>", " green ", inside("green")),
        {"images": [inside("red"), inside("blue")], "messages": [user("Same?"), assistant("No.")]},
        {"image": inside("red"), "prompt": "Which colour?", "completion": "red"},
        {"image": inside("blue"), "question": "Which colour?", "answer": "blue"},
        {"image": inside("white"), "caption": "A white square."},
    ]
    rows = [row(one, number) for number, one in enumerate(raw)]
    decoded = []
    for one in rows:
        images = [decode_image(image) for image in one["images"]]
        decoded.append({"messages": _messages(one), "images": images})
    options = dict(assistant_only_loss=True, pad_to_multiple_of=multiple)
    reference = DataCollatorForVisionLanguageModeling(processor, **options)(decoded)
    batch = ConversationCollator(processor, pad_to_multiple_of=multiple)(rows)
    labels = batch.pop("labels")
    theirs = reference.pop("labels")
    assert_equal(dict(batch), dict(reference))
    differ = labels != theirs
    assert (labels[differ] == -100).all()  # TRL's also has the white space after the end of a turn
    line_breaks = [processor.tokenizer.decode(token) for token in theirs[differ]]
    answers = 1 + len(raw)  # the first row has two
    assert line_breaks == ["\n"] * answers * (family in LINE_BREAK_AFTER_END)


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_before_training_are_those_of_the_batch(family):
    """They are counted without the preamble of the template."""
    processor = train_data.processor(byte_tokenizer(), TEMPLATES[family])
    rows = [
        row(TWO_TURNS),
        row(llava("Say hello.", "Hello!")),
        row(llava("\n<image>\nA", " b ", inside("red"))),
    ]
    rows.append(row({"image": inside("red"), "caption": "A\n red square."}))
    batch = ConversationCollator(processor)(rows)
    assert token_lengths(processor, rows) == batch["attention_mask"].sum(1).tolist()
    (length,) = token_lengths(processor, [row({"messages": SYSTEM})])
    if isinstance(length, str):  # a template may refuse system turns
        assert length.startswith("the chat template refuses it")
    else:
        batch = ConversationCollator(processor)([row({"messages": SYSTEM})])
        assert length == batch["input_ids"].shape[1]


def test_rows_of_any_form_are_collated_as_when_they_are_parsed(processor):
    picture = Image.open(io.BytesIO(inside("red")["bytes"]))
    given = [
        {"image": picture, "prompt": "Which colour?", "completion": "red"},
        {"images": [picture], "messages": [user("Which?"), assistant("red")]},
        llava("Say hello.", "Hello!"),
    ]
    collate = ConversationCollator(processor)
    assert_equal(dict(collate(given)), dict(collate([row(one) for one in given])))
    assert "bytes" not in str(given[0])  # the rows are not changed
    with pytest.raises(ValueError, match="row 1 of its batch: the answer in turn 1 is empty"):
        collate([given[0], llava("Q", " ")])
    broken = {**llava("<image>Q", "A"), "image": {"path": "bad.png", "bytes": TRUNCATED}}
    with pytest.raises(ValueError, match="given to the collator, row 2: .*truncated"):
        collate([*given[:2], broken])


def test_templates_see_no_text_in_an_image(processor):
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "Q"}]  # as Arrow has them
    content = [{"type": "image"}, {"type": "text", "text": "Q"}]
    row = {"messages": [{"role": "user", "content": parts}], "images": []}
    assert _messages(row) == [{"role": "user", "content": content}]


def test_answers_of_the_prompt_are_not_learned(processor):
    prompt = [user("Q"), assistant("given"), user("Q2"), assistant("given too"), user("Q3")]
    completion = [assistant("learned"), user("Q4"), assistant("learned too")]
    rows = [row({"prompt": prompt, "completion": completion}), row(llava("Q", "A"))]
    batch = ConversationCollator(processor)(rows)
    assert labelled(processor, batch["labels"][0]) == ["learned<|im_end|>", "learned too<|im_end|>"]
    assert labelled(processor, batch["labels"][1]) == ["A<|im_end|>"]


def test_answers_that_a_template_marks_in_part_cannot_be_told_apart():
    """A template that marks the last answer alone."""
    template = train_data.processor().chat_template
    last = (
        "{% if loop.last %}{% generation %}{{ a }}{% endgeneration %}{% else %}{{ a }}{% endif %}"
    )
    marked = "{% for message in messages %}{% set a = message['content'][-1]['text'] %}"
    marked += "{% if message['role'] == 'assistant' %}" + last + "{% else %}{{ a }}{% endif %}"
    marked += "{% endfor %}"
    assert "generation" in template
    processor = train_data.processor()
    processor.chat_template = marked
    collate = ConversationCollator(processor)
    turns = [user("Q"), assistant("first"), user("Q2"), assistant("second")]
    whole = row({"messages": turns}, 5)
    assert labelled(processor, collate([whole])["labels"][0]) == ["second"]
    with pytest.raises(ValueError, match=r"data.json, row 5: .* marks 1 of 2 answers"):
        collate([{**whole, "learned": [False, True]}])


def test_special_tokens_in_a_row_of_any_form_are_refused(processor):
    with pytest.raises(ValueError, match="row 0 of its batch: .*<|im_end|>"):
        ConversationCollator(processor)([llava("Q", "A<|im_end|>")])


def test_what_a_row_with_two_bad_images_is_recorded_with_is_the_first(processor, tmp_path):
    dropped = DroppedRows(tmp_path / "dropped_rows.jsonl")
    collate = ConversationCollator(processor, bad_rows="skip", dropped_rows=dropped)
    bad = [{"path": name, "bytes": TRUNCATED} for name in ("one.png", "two.png")]
    batch = collate([{**row(TWO_TURNS, 2), "images": bad}])
    assert [(r.row, r.file) for r in dropped.read()] == [(2, "one.png")]
    assert torch.equal(batch["pixel_values"][0], batch["pixel_values"][1])


def test_images_that_are_not_there_are_blank_in_the_tower_s_shape(processor):
    blank = blank_image(processor)
    shown = ConversationCollator(processor)([row(llava("<image>Q", "A", inside("red")))])
    assert blank.shape == shown["pixel_values"].shape and not blank.any()
    assert blank.dtype == shown["pixel_values"].dtype


def test_rows_with_labels_are_counted_with_padding_and_without(processor):
    rows = [row(llava("Q" * n, "A" * n)) for n in (1, 4, 2)]
    rows[1]["learned"] = [False]
    for free in (False, True):
        batch = ConversationCollator(processor, padding_free=free)(rows)
        assert [int(count) for count in count_rows_with_labels(batch)] == [2, 1]
        none = ConversationCollator(processor, padding_free=free)([rows[1]])
        assert [int(count) for count in count_rows_with_labels(none)] == [0, 1]


def test_rows_with_labels_are_counted_whatever_tells_rows_apart():
    """Two rows of two tokens, of which one has one label."""
    labels = torch.tensor([[-100, 3], [-100, -100]])
    places = torch.tensor([[0, 1], [0, 1]])
    in_one = {"labels": labels.view(1, 4), "position_ids": places.view(1, 4)}
    given = {"labels": labels, "position_ids": places, "attention_mask": torch.ones_like(labels)}
    for batch in (in_one, given, {"labels": labels}):
        assert [int(count) for count in count_rows_with_labels(batch)] == [1, 1]


def test_a_template_without_marks_and_a_tokenizer_that_drops_letters_are_refused():
    bare = train_data.processor()
    tokenizer = tiny_parts.tokenizer()
    content = "message['content']"
    bare.chat_template = tiny_parts.CHATML.replace(content, f"{content}[0]['text']")
    with pytest.raises(ValueError, match="marks no answer with {% generation %}.*--chat-template"):
        ConversationCollator(bare)
    bare.chat_template = "{{ messages[0].thoughts.text }}"  # which fails
    with pytest.raises(ValueError, match="The chat template cannot be loaded: .*thoughts"):
        ConversationCollator(bare)
    # Marks of answers are places in the text, and "\n" after an answer may be one of the letters.
    tokenizer.backend_tokenizer.model.unk_token = None
    assert tokenizer.encode("a\u03a9b") == tokenizer.encode("ab")
    with pytest.raises(ValueError, match="drops letters that it does not know.* Give it an unk_"):
        ConversationCollator(train_data.processor(tokenizer))


def test_stop_names_row_file_and_reason(processor, tmp_path):
    (tmp_path / "bad.png").write_bytes(TRUNCATED)
    bad = row(llava("<image>Q", "A", str(tmp_path / "bad.png")), number=41)
    with pytest.raises(ValueError, match="data.json, row 41: .*bad.png: .*truncated.*_rows skip"):
        ConversationCollator(processor)([row(llava("Q", "A")), bad])


def test_a_share_of_a_long_stream_grows_with_its_rows(processor):
    good = row({**llava("<image>Q", "A"), "image": inside("red")})
    bad = {**good, "images": [{"path": "bad.png", "bytes": TRUNCATED}]}
    collate = ConversationCollator(processor, bad_rows=0.1, skippable=1, share=0.1)

    def read(tens):
        for ten in tens:  # one of ten is bad
            others = [{**good, "row": 10 * ten + number} for number in range(1, 10)]
            collate([{**bad, "row": 10 * ten}, *others])

    read(range(5))
    read(range(5))  # a stream begins again: different rows are counted, read and bad
    with pytest.raises(ValueError, match="row 51: .*truncated.* 6 bad row.* Fix it, or use"):
        collate([{**bad, "row": 51}])


def test_a_skipped_row_stays_without_effect(processor, checkpoint, tmp_path):
    dropped = DroppedRows(tmp_path / "dropped_rows.jsonl")
    collate = ConversationCollator(processor, bad_rows="skip", dropped_rows=dropped)
    good, white = (row(llava("<image>Q", "A", inside(colour)), 1) for colour in ("red", "white"))
    two = row({**TWO_TURNS, "images": [inside("red"), {"path": None, "bytes": TRUNCATED}]}, 2)
    batch = collate([good, two])
    assert batch["pixel_values"].shape[0] == 3
    assert torch.equal(batch["pixel_values"][2], collate([white])["pixel_values"][0])
    assert (batch["labels"][1] == -100).all()
    assert labelled(processor, batch["labels"][0]) == ["A<|im_end|>"]
    assert [(r.source, r.row) for r in dropped.read()] == [("data.json", 2)]
    assert (collate([two])["labels"] == -100).all() and len(dropped.read()) == 1

    model = NormAlignLlavaForConditionalGeneration.from_pretrained(checkpoint).double()
    gradients = []
    for rows in ([good, two], [good]):
        model.zero_grad()
        inputs = collate(rows)
        model(**{**inputs, "pixel_values": inputs["pixel_values"].double()}).loss.backward()
        found = [value.grad.flatten() for value in model.parameters() if value.grad is not None]
        gradients.append(torch.cat(found))
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
