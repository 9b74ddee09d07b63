"""Public data sets in their own form: small files, whose ids and labels are written by hand.

`[[...]]` in an expected text is what is learned, and `{4}` the four tokens of an image.
"""

import base64
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from itertools import cycle, islice

import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from test_shards import write_shard
from train_data import answers, assistant, image_bytes, images, llava, read, user, write_json

from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.evaluation.own_data import own_task
from normalign_llava.train.collator import ConversationCollator


RED = base64.b64encode(image_bytes("red", (40, 40))).decode()
TURNS = llava("Q", "A")["conversations"]


def chat(*turns: str) -> str:
    """Returns a conversation as the template prints it; "S:" begins a system turn."""
    turn_roles = cycle(["user", "assistant"])
    printed = ""
    for turn_text in turns:
        if turn_text.startswith("S:"):
            turn_role = "system"
            turn_text = turn_text.removeprefix("S:")
        else:
            turn_role = next(turn_roles)
        printed += f"<|im_start|>{turn_role}\n{turn_text}<|im_end|>\n"
    return printed.replace("]]<|im_end|>", "<|im_end|>]]")


def ids_and_labels(processor, marked: str) -> tuple[list[int], list[int]]:
    """Reads a marked text: one token a letter, and one for each special token."""
    vocabulary = processor.tokenizer.get_vocab()
    image_tokens = [vocabulary["<image>"]] * 4
    token_ids = []
    labels = []
    learned = False
    for piece in re.findall(r"\[\[|\]\]|\{4\}|<\|im_\w+\|>|.", marked, re.S):
        if piece == "[[":
            learned = True
        elif piece == "]]":
            learned = False
        elif piece == "{4}":
            assert not learned
            token_ids += image_tokens
            labels += [-100] * 4
        elif learned:
            token_ids.append(vocabulary[piece])
            labels.append(vocabulary[piece])
        else:
            token_ids.append(vocabulary[piece])
            labels.append(-100)
    return token_ids, labels


def assert_is_collated(processor, row, marked: str):
    """The row's batch has the ids and labels of the marked text."""
    batch = ConversationCollator(processor)([row])
    expected_ids, expected_labels = ids_and_labels(processor, marked)
    assert batch["input_ids"][0].tolist() == expected_ids
    assert batch["labels"][0].tolist() == expected_labels


def assert_is_read(processor, data_path, *marked_texts, **options):
    """The first rows of the data are the marked texts. Returns the data."""
    training_data = read(data_path, processor, **options)
    parsed_rows = islice(training_data.train, len(marked_texts))
    for parsed_row, marked in zip(parsed_rows, marked_texts, strict=True):
        assert_is_collated(processor, parsed_row, marked)
    return training_data


KITE = {"image": "red.png"}
PAIR = {"user": "Q", "assistant": "A"}
TEXT = {"type": "text", "text": "Q"}
CAT_OR_DOG = {"question": "Which?", "choices": ["cat", "dog"]}
LISTED = "Which?\nA. cat\nB. dog"
DESCRIBED = chat("{4}Describe the image.", "[[A.]]")
OF_SEVERAL = "of several {}, the commonest is learned, or the first of equals"
OF_SEVERAL_ANSWERS = OF_SEVERAL.format("answers")
OF_SEVERAL_CAPTIONS = OF_SEVERAL.format("captions")
ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": RED},
}

# A case without `reported` reports no columns and no changes.
EXAMPLES = {
    # Messages that their author excludes
    "weight, loss and train of OpenAI, ms-swift and axolotl": {
        "row": {
            "messages": [
                user("Q"),
                assistant("A") | {"weight": 0},
                user("R"),
                assistant("B") | {"loss": False},
                user("S") | {"train": False},
                assistant("C") | {"train": False},
                user("T"),
                assistant("D") | {"weight": 1, "loss_scale": 1.0, "training": True},
            ]
        },
        "text": chat("Q", "A", "R", "B", "S", "C", "T", "[[D]]"),
    },
    # Columns beside the turns
    "LLaMA-Factory, system": {
        "row": llava("Q", "A", system="Be."),
        "text": chat("S:Be.", "Q", "[[A]]"),
    },
    "tools and history": {
        "row": llava("Q", "A", tools="[search]", history=[["q", "a"]], score=3),
        "text": chat("Q", "[[A]]"),
        "reported": {"tools": 1, "history": 1, "id": 1, "score": 1},
    },
    "keys": {
        "row": {"messages": [user("Q"), assistant("A") | {"reasoning_content": "R", "name": "x"}]},
        "text": chat("Q", "[[A]]"),
        "reported": {"messages.reasoning_content": 1, "messages.name": 1},
    },
    "alpaca, input": {
        "row": {"question": "Q", "input": "R", "answer": "A"},
        "text": chat("Q\nR", "[[A]]"),
    },
    # Options, and answers by number
    "ai2d": {
        "row": {"question": "Which?", "options": ["cat", "dog"], "answer": "1"},
        "text": chat(LISTED, "[[B]]"),
    },
    "ScienceQA": {
        "row": CAT_OR_DOG | KITE | {"answer": 0, "hint": "See.", "lecture": "L"},
        "text": chat("{4}See.\n" + LISTED, "[[A]]"),
        "reported": {"lecture": 1},
    },
    "A-OKVQA": {
        "row": {**CAT_OR_DOG, "correct_choice_idx": 1, "direct_answers": "['a dog', 'b']"},
        "text": chat(LISTED, "[[B]]"),
        "reported": {"direct_answers": 1},
    },
    "columns A to E": {
        "row": {"question": "How many?", "A": 3, "B": 4, "C": 5.5, "D": "6", "E": 7, "answer": "E"},
        "text": chat("How many?\nA. 3\nB. 4\nC. 5.5\nD. 6\nE. 7", "[[E]]"),
    },
    "a mapping": {
        "row": {"question": "Q", "options": {"A": 3, "B": 4}, "answer": "B"},
        "text": chat("Q\nA. 3\nB. 4", "[[B]]"),
    },
    "options that have their letters": {
        "row": {"question": "Which?", "options": ["(A) cat", "(B) dog"], "answer": "B"},
        "text": chat(LISTED, "[[B]]"),
    },
    "SEED-Bench": {
        "row": {
            "question": "Which?",
            "choice_a": "cat",
            "choice_b": "dog",
            "answer": "B",
            "data_id": 1,
        },
        "text": chat(LISTED, "[[B]]"),
        "reported": {"data_id": 1},
    },
    "an answer with its letter": {
        "row": {**CAT_OR_DOG, "answer": "(B) dog"},
        "text": chat(LISTED, "[[(B) dog]]"),
    },
    "already listed": {
        "row": {**CAT_OR_DOG, "question": LISTED, "answer": "B"},
        "text": chat(LISTED, "[[B]]"),
    },
    "ARC": {
        "row": {
            "question": "Q",
            "choices": {"text": ["x", "y", ""], "label": ["A", "B", ""]},
            "answer": 1.0,
        },
        "text": chat("Q\nA. x\nB. y", "[[B]]"),
    },
    "a count that pandas made a fraction": {
        "row": {"question": "Q", "answer": 3.0},
        "text": chat("Q", "[[3]]"),
    },
    "CLEVR": {
        "row": {"question": "How many?", "answer": 3, **KITE},
        "text": chat("{4}How many?", "[[3]]"),
    },
    # Pairs
    "FineVision": {
        "row": {"images": ["red.png"], "texts": [PAIR, PAIR], "relevance_ratings": [4, 5]},
        "text": chat("{4}Q", "[[A]]", "Q", "[[A]]"),
        "reported": {"relevance_ratings": 1},
    },
    "a pair that is not learned": {
        "row": {
            "texts": [PAIR | {"weight": 0}, {"user": "R", "assistant": "B"}, PAIR | {"train": True}]
        },
        "text": chat("Q", "A", "R", "[[B]]", "Q", "[[A]]"),
    },
    "the Cauldron": {
        "row": {"images": ["red.png", "blue.png"], "texts": [PAIR | {"source": "vqa"}]},
        "text": chat("{4}{4}Q", "[[A]]"),
        "reported": {"texts.source": 1},
    },
    # Several accepted answers
    "DocVQA": {
        "row": {"question": "Q", "answers": ["one", "two", "two"], "questionId": 3, **KITE},
        "text": chat("{4}Q", "[[two]]"),
        "reported": {"questionId": 1, OF_SEVERAL_ANSWERS: 1},
    },
    "VQAv2": {
        "row": {"question": "Q", "answers": [{"answer": "yes", "answer_id": 1}, {"answer": "no"}]},
        "text": chat("Q", "[[yes]]"),
        "reported": {OF_SEVERAL_ANSWERS: 1},
    },
    "captions": {
        "row": {"caption": ["A.", "B."], **KITE},
        "text": DESCRIBED,
        "reported": {OF_SEVERAL_CAPTIONS: 1},
    },
    "Flickr30k's table": {
        "row": {"captions": "['A.', 'B.']", **KITE},
        "text": DESCRIBED,
        "reported": {OF_SEVERAL_CAPTIONS: 1},
    },
    "numpy's lists": {
        "row": {"question": "Q", "answers": "['one' 'two'\n 'two']"},
        "text": chat("Q", "[[two]]"),
        "reported": {OF_SEVERAL_ANSWERS: 1},
    },
    "quoted words in Python's lists": {
        "row": {"conversations": str(llava("'x' 'y'?", "A 'b'")["conversations"])},
        "text": chat("'x' 'y'?", "[[A 'b']]"),
    },
    "an option that is nan": {
        "row": {"question": "Q", "choices": ["nan", "inf"], "answer": "B"},
        "text": chat("Q\nA. nan\nB. inf", "[[B]]"),
    },
    # Turns
    "a leading answer": {
        "row": {"conversations": [TURNS[1], *TURNS], **KITE},
        "text": chat("{4}Q", "[[A]]"),
        "reported": {"a leading assistant turn is left out": 1},
    },
    "InternVL, no <image>": {
        "row": {**llava("Q", "A"), **KITE},
        "text": chat("{4}Q", "[[A]]"),
        "reported": {"id": 1},
    },
    "OpenAI's guide, two user messages": {
        "row": {
            "messages": [
                user("Q"),
                user([{"type": "image_url", "image_url": {"url": "red.png"}}]),
                user("R"),
                assistant("A"),
            ]
        },
        "text": chat("Q{4}R", "[[A]]"),
        "reported": {"user turns in a row are one turn": 1},
    },
    "user texts in a row": {
        "row": {"messages": [user("Q"), user("R"), assistant("A")]},
        "text": chat("Q\nR", "[[A]]"),
        "reported": {"user turns in a row are one turn": 1},
    },
    "JSON as text": {
        "row": {"conversations": json.dumps(TURNS)},
        "text": chat("Q", "[[A]]"),
    },
    "Python's lists": {
        "row": {"conversations": str(TURNS), "images": "['red.png']"},
        "text": chat("{4}Q", "[[A]]"),
    },
    "lists by column": {
        "row": {"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}},
        "text": chat("Q", "[[A]]"),
    },
    "conversation": {
        "row": {"conversation": TURNS},
        "text": chat("Q", "[[A]]"),
    },
    "texts with turns": {
        "row": {"texts": TURNS, **KITE},
        "text": chat("{4}Q", "[[A]]"),
    },
    "llava-instruct-mix-vsft": {
        "row": {
            "images": ["red.png", "blue.png"],
            "messages": [
                user(
                    [
                        {"index": 0, "text": None, "type": "image"},
                        {"index": 1, "text": None, "type": "image"},
                        {"index": None, "text": "Q", "type": "text"},
                    ]
                ),
                assistant([{"index": None, "text": "A", "type": "text"}]),
            ],
        },
        "text": chat("{4}{4}Q", "[[A]]"),
    },
    "images of a turn": {
        "row": {
            "messages": [
                user("Q"),
                assistant("A"),
                user("R") | {"images": ["red.png"]},
                assistant("B"),
            ]
        },
        "text": chat("Q", "[[A]]", "{4}R", "[[B]]"),
    },
    "text": {
        "row": {"messages": [user(json.dumps([{"type": "image"}, TEXT])), assistant("A")], **KITE},
        "text": chat("{4}Q", "[[A]]"),
    },
    "Anthropic's, OpenAI's newer parts": {
        "row": {
            "messages": [
                user([ANTHROPIC_IMAGE, {"type": "input_text", "text": "Q"}]),
                assistant("A"),
            ]
        },
        "text": chat("{4}Q", "[[A]]"),
    },
    "XTuner": {
        "row": {"conversation": [PAIR | {"system": "S"}, {"input": "R", "output": "B"}]},
        "text": chat("S:S", "Q", "[[A]]", "R", "[[B]]"),
    },
    "roles of others": {
        "row": {
            "messages": [
                {"role": "developer", "content": "developer"},
                {"role": "Human", "content": "Human"},
                {"role": "GPT", "content": "GPT"},
            ]
        },
        "text": chat("S:developer", "Human", "[[GPT]]"),
    },
    "PixMo": {
        "row": {"messages": ["Q", "A"]},
        "text": chat("Q", "[[A]]"),
    },
    "BLINK, a prompt that is not used": {
        "row": {"prompt": "P", "question": "Q", "answer": "A", "conversations": []},
        "text": chat("Q", "[[A]]"),
        "reported": {"prompt": 1},
    },
    "no image": {
        "row": llava("Q", "A", {"bytes": None, "path": None}),
        "text": chat("Q", "[[A]]"),
        "reported": {"id": 1},
    },
    # Base64
    "VLMEvalKit, base64": {
        "row": {"image": RED, "question": "Q", "answer": "A"},
        "text": chat("{4}Q", "[[A]]"),
    },
    "a part": {
        "row": {"messages": [user([{"type": "image", "base64": RED}, TEXT]), assistant("A")]},
        "text": chat("{4}Q", "[[A]]"),
    },
    "an id that ends in .png": {
        "row": llava("Q", "A", id="a.png"),
        "text": chat("Q", "[[A]]"),
        "reported": {"id": 1},
    },
    "HTML": {
        "row": llava("Is <video src=a> or the <video> tag used?", "<video></video>"),
        "text": chat("Is <video src=a> or the <video> tag used?", "[[<video></video>]]"),
        "reported": {"id": 1},
    },
}


@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES)
def test_a_form_is_read_in_memory(case, processor, tmp_path):
    data_path = write_json(tmp_path, [case["row"]])
    training_data = assert_is_read(processor, data_path, case["text"])
    (report,) = training_data.report.sources
    reported = report.left_out | report.changed
    for name, count in case.get("reported", {}).items():
        assert reported.pop(name) == count
    assert reported.keys() <= {"id", "messages.content.detail"}


@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES)
def test_a_form_is_read_as_a_stream(case, processor, tmp_path):
    data_path = write_json(tmp_path, [case["row"]])
    assert_is_read(processor, data_path, case["text"], case["text"], streamed=True)


def test_the_mappings_of_parquet_have_all_keys(processor, tmp_path):
    pair_features = {
        "user": Value("string"),
        "assistant": Value("string"),
        "source": Value("string"),
    }
    features = Features({"images": List(Image()), "texts": List(pair_features)})
    columns = {
        "images": [[{"bytes": image_bytes(), "path": None}]],
        "texts": [[PAIR]],
    }
    data_path = tmp_path / "rows.parquet"
    Dataset.from_dict(columns, features=features).to_parquet(data_path)
    assert_is_read(processor, data_path, chat("{4}Q", "[[A]]"))


def test_a_key_of_parquet_may_be_empty_in_some_turns(processor, tmp_path):
    messages = [user("Q") | {"weight": None}, assistant("A") | {"weight": 1.0}]
    data_path = tmp_path / "rows.parquet"
    Dataset.from_dict({"messages": [messages]}).to_parquet(data_path)
    assert_is_read(processor, data_path, chat("Q", "[[A]]"))


def test_an_answer_that_is_nan_is_none(processor, tmp_path):
    sample_row = {
        "question": "Q",
        "A": 3,
        "B": 4,
        "answer": float("nan"),
    }
    data_path = tmp_path / "rows.parquet"
    Dataset.from_list([sample_row]).to_parquet(data_path)
    with pytest.raises(ValueError, match="row 0: it has no assistant turn"):
        read(data_path, processor)


CAT_OR_DOG_LABEL = ClassLabel(names=["cat", "dog"])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("label", "feature", "learned"),
    [
        pytest.param(1, CAT_OR_DOG_LABEL, "dog", id="second"),
        pytest.param([1, 0, 1], List(CAT_OR_DOG_LABEL), "dog", id="commonest"),
        pytest.param([{"answer": 1}], List({"answer": CAT_OR_DOG_LABEL}), "dog", id="mapping"),
        pytest.param(0, CAT_OR_DOG_LABEL, "cat", id="first"),
        pytest.param([0], List(CAT_OR_DOG_LABEL), "cat", id="list"),
    ],
)
def test_the_name_of_a_class_is_learned(processor, tmp_path, label, feature, learned, streamed):
    features = Features({"question": Value("string"), "label": feature})
    columns = {"question": ["Q"], "label": [label]}
    data_path = tmp_path / "rows.parquet"
    Dataset.from_dict(columns, features=features).to_parquet(data_path)
    marked = chat("Q", f"[[{learned}]]")
    assert_is_read(
        processor,
        data_path,
        marked,
        streamed=streamed,
        columns="answer=label",
    )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_the_number_that_was_written_is_learned(processor, tmp_path, bits):
    """And not its neighbour of 64 bits."""
    features = Features({"question": Value("string"), "answer": Value(f"float{bits}")})
    columns = {"question": ["Q"], "answer": [0.1]}
    data_path = tmp_path / "rows.parquet"
    Dataset.from_dict(columns, features=features).to_parquet(data_path)
    assert_is_read(processor, data_path, chat("Q", "[[0.1]]"))


FOUR_COLUMNS = {
    "question": "Q",
    "answer": 3,
    "hint": "H",
    "system": "S",
}


def prepare(data, processor):
    prepared_rows, _ = prepare_rows(data, Checks(processor))
    return prepared_rows


def test_columns_of_an_open_data_set_are_read(processor):
    dataset = Dataset.from_list([FOUR_COLUMNS] * 2)
    first_row, _ = prepare(dataset, processor)
    assert_is_collated(processor, first_row, chat("S:S", "Q", "[[3]]"))


@pytest.mark.parametrize("data_format", ["numpy", "torch", None])
def test_columns_that_are_hidden_are_not_read(processor, data_format):
    dataset = Dataset.from_list([FOUR_COLUMNS] * 2)
    shown_dataset = dataset.with_format(data_format, columns=["question", "answer"])
    first_row, _ = prepare(shown_dataset, processor)
    assert_is_collated(processor, first_row, chat("Q", "[[3]]"))


@pytest.mark.parametrize("data_format", ["numpy", "torch", None])
def test_columns_that_are_shown_without_a_format_are_read(processor, data_format):
    dataset = Dataset.from_list([FOUR_COLUMNS] * 2)
    shown_dataset = dataset.with_format(data_format, columns=["question"], output_all_columns=True)
    first_row, _ = prepare(shown_dataset, processor)
    assert first_row["messages"][0]["role"] == "system"


@pytest.mark.parametrize("data_format", ["numpy", "torch", None])
def test_a_stream_with_a_format_is_read(processor, data_format):
    dataset = Dataset.from_list([FOUR_COLUMNS] * 2)
    stream = dataset.to_iterable_dataset().with_format(data_format)
    first_row = next(iter(prepare(stream, processor)))
    turn_roles = [turn["role"] for turn in first_row["messages"]]
    assert turn_roles == ["system", "user", "assistant"]
    assert answers([first_row]) == ["3"]


PROPOSED = {
    "question=instruction,answer=output": {
        "row": {"instruction": "Q", "input": "", "output": "A"},
        "text": chat("Q", "[[A]]"),
    },
    "image=img_path,question=query,answer=label": {
        "row": {"img_path": "red.png", "query": "Q", "label": ["A"]},
        "text": chat("{4}Q", "[[A]]"),
    },
    "answer=chosen": {
        "row": {"question": "Q", "chosen": "A", "rejected": "B"},
        "text": chat("Q", "[[A]]"),
    },
    "messages=chosen": {
        "row": {"rejected": TURNS, "chosen": TURNS},
        "text": chat("Q", "[[A]]"),
    },
    "question=prompt,answer=chosen": {
        "row": {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
        "text": chat("Q", "[[A]]"),
    },
    "question=query,answer=response": {
        "row": {"history": [PAIR], "query": "Q", "response": "A"},
        "text": chat("Q", "[[A]]"),
    },
    "question=problem": {
        "row": {"problem": "Q", "answer": "A"},
        "text": chat("Q", "[[A]]"),
    },
    "image=img_name,caption=captions": {
        "row": {"img_name": "red.png", "captions": ["A", "b"]},
        "text": chat("{4}Describe the image.", "[[A]]"),
    },
    "question=Question,answer=Answer": {
        "row": {"Question": "Q", "Answer": "A"},
        "text": chat("Q", "[[A]]"),
    },
    "messages=qa_pairs": {
        "row": {"qa_pairs": [{"question": "Q", "answer": "A"}]},
        "text": chat("Q", "[[A]]"),
    },
    "messages=dialog": {
        "row": {"dialog": json.dumps(TURNS)},
        "text": chat("Q", "[[A]]"),
    },
}


@pytest.mark.parametrize("columns", PROPOSED)
def test_columns_are_proposed_that_read_the_row(columns, processor, tmp_path):
    case = PROPOSED[columns]
    data_path = write_json(tmp_path, [case["row"]])
    with pytest.raises(ValueError) as error:
        read(data_path, processor)
    message = str(error.value)
    assert re.search(r"--columns (\S+?)[.\n;]", message)[1] == columns
    names_dpo = "DPO" in message
    assert names_dpo == ("chosen" in columns)

    assert_is_read(processor, data_path, case["text"], columns=columns)


def test_a_cloned_repository_is_read_as_its_error_says(processor, tmp_path):
    """LLaVA-Pretrain: two files of the same rows, one of them known, and images in a zip file."""
    data_path = tmp_path / "blip.json"
    data_path.write_text(json.dumps([llava("<image>\nQ", "A", "00/1.png")]))
    captions_path = tmp_path / "blip_meta.json"
    captions_path.write_text(json.dumps([{"image": "1.png", "blip_caption": "A"}]))
    archive_path = tmp_path / "images.zip"
    with zipfile.ZipFile(archive_path, "w") as archive:
        archive.writestr("00/1.png", image_bytes("red"))

    with pytest.raises(ValueError, match="blip_meta.json, row 0 .*form(.|\n)*one file, name it"):
        read(tmp_path, processor)
    with pytest.raises(ValueError, match="set image_folder to the folder or .zip file"):
        read(data_path, processor)
    assert_is_read(processor, data_path, chat("{4}Q", "[[A]]"), image_folder=str(archive_path))


TWO_ROWS = [llava("Q", "A"), llava("R", "B")]
TWO_TEXTS = [chat("Q", "[[A]]"), chat("R", "[[B]]")]


def test_a_json_file_may_be_one_row(processor, tmp_path):
    data_path = tmp_path / "one.json"
    data_path.write_text(json.dumps(llava("Q", "A")))
    assert_is_read(processor, data_path, chat("Q", "[[A]]"))


def test_a_json_file_may_have_a_row_a_line(processor, tmp_path):
    """InternVL's are such."""
    data_path = tmp_path / "lines.json"
    lines = [json.dumps(raw_row) for raw_row in TWO_ROWS]
    data_path.write_text("\n".join(lines))
    assert_is_read(processor, data_path, *TWO_TEXTS)


def test_a_json_file_without_rows_is_named(processor, tmp_path):
    folder = tmp_path / "coco"
    write_json(folder, [llava("Q", "A")], "b.json")
    (folder / "a.json").write_text(json.dumps({"images": [], "annotations": []}))
    with pytest.raises(ValueError, match="a.json is not a JSON list of rows.* name another file"):
        read(folder, processor)


COCO = {
    "info": {"year": 2014},
    "licenses": [{"id": 1, "url": "u"}],
    "images": [
        {"id": 9, "file_name": "red.png", "height": 20},
        {"id": 4, "file_name": "sub/blue.png", "height": 20},
        {"id": 5, "file_name": "green.png", "height": 20},
    ],
    "annotations": [
        {"id": 1, "image_id": 4, "caption": "Blue."},
        {"id": 2, "image_id": 9, "caption": "Red."},
        {"id": 3, "image_id": 4, "caption": "A blue one."},
    ],
}
COCO_TEXTS = [
    chat("{4}Describe the image.", "[[Blue.]]"),
    chat("{4}Describe the image.", "[[Red.]]"),
    chat("{4}Describe the image.", "[[A blue one.]]"),
]


@pytest.fixture
def write_coco(tmp_path):
    images(tmp_path, "red.png", "green.png", "sub/blue.png")

    def write(annotations):
        data_path = tmp_path / "captions_val2014.json"
        data_path.write_text(json.dumps(COCO | {"annotations": annotations}))
        return data_path

    return write


def test_captions_of_coco(processor, tmp_path, caplog, write_coco):
    data_path = write_coco(COCO["annotations"])
    parsed_rows = assert_is_read(processor, data_path, *COCO_TEXTS).train
    image_paths = [parsed_row["images"][0]["path"] for parsed_row in parsed_rows]
    assert image_paths == [
        str(tmp_path / "sub/blue.png"),
        str(tmp_path / "red.png"),
        str(tmp_path / "sub/blue.png"),
    ]
    assert "1 of 3 images have no annotation" in caplog.text
    assert caplog.text.count(f"{data_path}: captions are trained as answers to") == 1


def test_captions_of_coco_are_streamed(processor, caplog, write_coco):
    data_path = write_coco(COCO["annotations"])
    assert_is_read(processor, data_path, *COCO_TEXTS[:2], streamed=True)
    assert caplog.text.count(f"{data_path}: captions are trained as answers to") == 1


def test_a_caption_of_coco_without_its_image_is_a_bad_row(processor, write_coco):
    lost = {"id": 4, "image_id": 7, "caption": "Lost."}
    data_path = write_coco([*COCO["annotations"], lost])
    with pytest.raises(ValueError, match=r"row 3: .*images has no id 7.*there is no such image"):
        read(data_path, processor)


def test_boxes_of_coco_are_not_a_known_form(processor, write_coco):
    box_annotation = {"id": 1, "image_id": 4, "category_id": 2, "bbox": [0, 0, 1, 1]}
    data_path = write_coco([box_annotation])
    with pytest.raises(ValueError, match="its form is not known.*bbox, category_id"):
        read(data_path, processor)


@pytest.mark.parametrize(
    "content",
    [
        {"data": TWO_ROWS},
        {"version": 2, "rows": TWO_ROWS, "names": []},
    ],
)
def test_a_file_may_have_its_rows_in_a_mapping(processor, tmp_path, content):
    data_path = tmp_path / "my rows.json"
    data_path.write_text(json.dumps(content))
    assert_is_read(processor, data_path, *TWO_TEXTS)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps({"train": TWO_ROWS, "test": TWO_ROWS[:1]}), id="splits"),
        pytest.param(json.dumps({"7": TWO_ROWS[0], "8": TWO_ROWS[1]}), id="rows-by-number"),
        pytest.param(
            "\n".join(json.dumps(raw_row, indent=2) for raw_row in TWO_ROWS),
            id="indented-rows",
        ),
    ],
)
def test_a_file_with_rows_inside_is_written_anew_as_its_error_says(processor, tmp_path, text):
    data_path = tmp_path / "my rows.json"
    data_path.write_text(text)
    with pytest.raises(ValueError, match="my rows.json is not (valid|a) JSON") as error:
        read(data_path, processor)

    (command,) = re.findall("`(.*)`", str(error.value))
    if command.startswith("jq") and not shutil.which("jq"):
        return
    command = command.replace("python -c", f"{shlex.quote(sys.executable)} -c", 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert_is_read(processor, tmp_path / "rows.jsonl", *TWO_TEXTS)


@pytest.mark.parametrize("streamed", [False, True])
def test_shards_may_have_other_files_and_tables_beside_them(processor, tmp_path, caplog, streamed):
    folder = tmp_path / "img2dataset"
    shard_files = {
        "1.jpg": image_bytes("red", form="JPEG"),
        "1.txt": "A kite.",
        "1.json": {"url": "u"},
    }
    write_shard(folder / "00000.tar", shard_files)
    (folder / "00000_stats.json").write_text("{}")
    table = Dataset.from_list([{"url": "u", "caption": "A kite."}])
    table.to_parquet(folder / "00000.parquet")

    marked = chat("{4}Describe the image.", "[[A kite.]]")
    assert_is_read(processor, folder, marked, streamed=streamed)
    assert "has files that are not read: 00000_stats.json, 00000.parquet" in caplog.text


def test_a_film_in_a_shard_is_not_read(processor, tmp_path):
    shard_files = {"1.mp4": b"x", "1.json": {"question": "Q", "answer": "A"}}
    shard_path = write_shard(tmp_path / "video.tar", shard_files)
    with pytest.raises(ValueError, match="it has video, and only images are read"):
        read(shard_path, processor)


@pytest.fixture
def write_csv(tmp_path):
    """Writes a table as pandas does, with lists in two columns. Answers may be of another name."""
    images(tmp_path, "red.png", "blue.png")

    def write(answer_column):
        data_path = tmp_path / "data.csv"
        data_path.write_text(
            f"image, question,{answer_column}\n"
            """"['red.png','blue.png']",Q,"['two', 'one', 'two']"\n"""
            """red.png,R,"[0.1, 0.2]"\n"""
        )
        return data_path

    return write


def test_lists_of_tables_that_pandas_wrote(processor, write_csv):
    data_path = write_csv("answers")
    assert_is_read(processor, data_path, chat("{4}{4}Q", "[[two]]"), chat("{4}R", "[[0.1]]"))
    assert own_task(str(data_path)).eval_docs["answers"][0] == ["two", "one", "two"]


def test_a_list_in_the_column_of_one_answer_is_a_text(processor, write_csv):
    data_path = write_csv("answer")
    training_data = read(data_path, processor)
    assert answers(training_data.train) == ["['two', 'one', 'two']", "[0.1, 0.2]"]
    ((change, count),) = training_data.report.sources[0].changed.items()
    assert count == 2
    assert "learned as this text; --columns answers=COLUMN" in change

    # As the message says:
    assert_is_read(processor, data_path, chat("{4}{4}Q", "[[two]]"), columns="answers=answer")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(
            'question\tanswer\nQ\t"A\nR\tB\nS\tC"\n',
            "has tabs and line breaks, near line 4",
            id="open-quote",
        ),
        pytest.param(
            'question\tanswer\nQ\t"Stop" sign\n',
            "'\t' expected after",
            id="quoted-word",
        ),
        pytest.param(
            "question\tanswer\tanswer\nQ\tA\tB\n",
            "has columns of one name",
            id="two-columns-of-one-name",
        ),
    ],
)
def test_a_table_that_cannot_be_read_has_a_reason(processor, tmp_path, text, reason):
    data_path = tmp_path / "data.tsv"
    data_path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read(data_path, processor)


UNUSED = {
    "tools": "x",
    "similarity": 0.3,
    "id": "7",
    "question_id": 7,
    "prompt_model": "m",
}


@pytest.fixture
def report_unused(processor, caplog):
    """Returns the record about columns that are not used beside question and answer."""
    caplog.set_level("INFO")

    def report(**columns):
        sample_row = {"question": "Q", "answer": "A", **columns}
        prepare_rows(Dataset.from_list([sample_row]), Checks(processor), name="mine")
        (log_record,) = [record for record in caplog.records if "not used" in record.message]
        assert log_record.message.startswith("mine: columns not used: ")
        return log_record

    return report


def test_columns_that_are_not_used_are_reported(report_unused):
    assert report_unused(**UNUSED).levelname == "INFO"


@pytest.mark.parametrize("name", ["response", "gpt", "caption", "direct_answers", "content"])
def test_an_unused_column_that_looks_like_an_answer_is_a_warning(report_unused, name):
    log_record = report_unused(**UNUSED, **{name: "x"})
    assert log_record.levelname == "WARNING"
    columns = f"columns not used: {name}, like an answer (1 row), tools (1 row), "
    assert columns in log_record.message


@pytest.mark.parametrize("name", ["prompt", "query", "history", "input_prompt"])
def test_an_unused_column_that_looks_like_a_question_is_a_warning(report_unused, name):
    log_record = report_unused(**UNUSED, **{name: "x"})
    assert log_record.levelname == "WARNING"
    assert ", like a question" in log_record.message


def test_an_unused_column_that_looks_like_an_image_is_a_warning(report_unused, caplog):
    image = {"bytes": image_bytes(), "path": None}
    log_record = report_unused(image=image, photo_2="x")
    assert log_record.levelname == "WARNING"
    assert "photo_2, like an image (1 row)" in log_record.message
    assert "dropped" not in caplog.text


def test_what_is_unused_in_a_stream_is_reported_once(processor, tmp_path, caplog):
    caplog.set_level("INFO")
    raw_rows = [
        llava("Q", "A", tools="x"),
        llava("Q", "A", tools="y", history=["z"], similarity=0.3),
        {"messages": [user("Q"), user("R"), assistant("A")]},
    ]
    stream = read(write_json(tmp_path, raw_rows), processor, dataset_streaming=True).train
    list(islice(stream, 9))
    assert caplog.text.count("data.json: user turns in a row are one turn.") == 1
    assert caplog.text.count("data.json: column not used: history, like a question.") == 1
    assert "similarity" not in caplog.text
    assert "tools" not in caplog.text


@pytest.fixture
def write_bad_rows(tmp_path, monkeypatch):
    """Writes rows, of which the last ones have no answer. Above 500, rows are many."""
    monkeypatch.setattr(checks, "MANY_ROWS", 500)

    def write(row_count, bad_count):
        good_rows = [llava(f"Q{number}", "A") for number in range(row_count - bad_count)]
        bad_rows = [llava(f"Q{number}", "") for number in range(row_count - bad_count, row_count)]
        return write_json(tmp_path, good_rows + bad_rows)

    return write


@pytest.mark.parametrize(
    ("row_count", "bad_count", "share"),
    [
        (50, 2, "0.04"),
        (501, 5, None),
    ],
)
def test_a_share_of_bad_rows_is_skipped(processor, write_bad_rows, row_count, bad_count, share):
    data_path = write_bad_rows(row_count, bad_count)
    (report,) = read(data_path, processor, bad_rows=share).report.sources
    assert report.bad == bad_count
    assert report.valid == row_count - bad_count
    assert report.skippable == 0


@pytest.mark.parametrize(
    ("row_count", "bad_count", "share", "reason"),
    [
        (50, 2, None, r"row 48: the answer in turn 1 is empty \(2 rows\)\nFix them, or skip"),
        (50, 2, 0.03, "These are 2 of 50 rows; a share of 0.03 may be bad"),
        (501, 5, "stop", r"\(5 rows\)"),
        (501, 6, None, "These are 6 of 501 rows; a share of 0.01 may be bad"),
    ],
)
def test_more_bad_rows_than_the_share_stop_a_run(
    processor, write_bad_rows, row_count, bad_count, share, reason
):
    data_path = write_bad_rows(row_count, bad_count)
    with pytest.raises(ValueError, match=reason):
        read(data_path, processor, bad_rows=share)


@pytest.mark.parametrize("wrong", ["some", "1", 0, 1.5, True])
def test_the_share_of_bad_rows_is_a_word_or_a_number_below_1(processor, write_bad_rows, wrong):
    data_path = write_bad_rows(row_count=1, bad_count=0)
    with pytest.raises(ValueError, match="bad_rows must be"):
        read(data_path, processor, bad_rows=wrong)
