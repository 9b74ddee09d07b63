"""Public data sets in their own form: a small file for each, with its ids and labels written by hand.

`[[...]]` in an expected text is what is learned, and `{4}` the four tokens of an image.
"""

import base64
import json
import re
import zipfile
from itertools import islice

import datasets
import pytest
from datasets import Dataset, List, Value
from test_shards import shard
from train_data import assistant, image_bytes, images, llava, read, user, write_json
from typer.testing import CliRunner

from normalign_llava.cli import app
from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.rows.images import decode_image
from normalign_llava.data.sources.arguments import DataSource
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.data.sources.source import open_source
from normalign_llava.evaluate.own_data import own_task
from normalign_llava.train.collator import ConversationCollator


RED = base64.b64encode(image_bytes("red", (40, 40))).decode()
TURNS = llava("Q", "A")["conversations"]


def chat(*turns: str) -> str:
    """A conversation as the template prints it, from its turns, the user's first; "S:" begins a system turn."""
    system = [f"<|im_start|>system\n{turns[0][2:]}<|im_end|>\n"] if turns[0].startswith("S:") else []
    roles = ("user", "assistant") * len(turns)
    rest = [
        f"<|im_start|>{role}\n{text}<|im_end|>\n".replace("]]<|im_end|>", "<|im_end|>]]")
        for role, text in zip(roles, turns[len(system) :], strict=False)
    ]
    return "".join(system + rest)


def by_hand(processor, marked: str) -> tuple[list[int], list[int]]:
    """Ids and labels of a marked text: one token a letter, and one for each special token."""
    vocabulary, ids, labels, learned = processor.tokenizer.get_vocab(), [], [], False
    for piece in re.findall(r"\[\[|\]\]|\{4\}|<\|im_\w+\|>|.", marked, re.S):
        if piece in ("[[", "]]"):
            learned = piece == "[["
            continue
        tokens = [vocabulary["<image>"]] * 4 if piece == "{4}" else [vocabulary[piece]]
        ids += tokens
        labels += tokens if learned else [-100] * len(tokens)
    return ids, labels


def batches(data, processor, count):
    collate = ConversationCollator(processor)
    made = [collate([row]) for row in islice(data, count)]
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in made]


def check(processor, path, *marked, **options):
    """The first rows of the data are the marked texts."""
    data = read(path, processor, **options)
    assert batches(data.train, processor, len(marked)) == [by_hand(processor, text) for text in marked]
    return data


KITE = {"image": "red.png"}
CAT_OR_DOG, LISTED = {"question": "Which?", "choices": ["cat", "dog"]}, "Which?\nA. cat\nB. dog"
EXAMPLES = {
    # 1: messages that their author excludes
    "OpenAI, weight 0": ({"messages": [user("Q"), {"role": "assistant", "content": "no", "weight": 0}, user("R"),
                      {"role": "assistant", "content": "yes", "weight": 1}]},
        chat("Q", "no", "R", "[[yes]]")),
    "axolotl, train and training": (
        {"conversations": [{**TURNS[0], "train": False}, {**TURNS[1], "train": False}, TURNS[0],
                           {**TURNS[1], "training": True}]},
        chat("Q", "A", "Q", "[[A]]")),
    "ms-swift, loss": ({"messages": [user("Q"), {"role": "assistant", "content": "no", "loss": False}, user("R"),
                      {"role": "assistant", "content": "yes", "loss_scale": 1.0}]},
        chat("Q", "no", "R", "[[yes]]")),
    # 5: columns beside the turns
    "LLaMA-Factory, system": ({**llava("Q", "A"), "system": "Be brief."}, chat("S:Be brief.", "Q", "[[A]]")),
    "tools and history": ({**llava("Q", "A"), "tools": "[search]", "history": [["q", "a"]], "score": 3},
        chat("Q", "[[A]]"), {"tools": 1, "history": 1, "id": 1, "score": 1}),
    "keys of turns": (
        {"messages": [user("Q"), {"role": "assistant", "content": "A", "reasoning_content": "so", "name": "x"}]},
        chat("Q", "[[A]]"), {"messages.reasoning_content": 1, "messages.name": 1}),
    "alpaca, input": (
        {"question": "Translate.", "input": "rouge", "answer": "red"}, chat("Translate.\nrouge", "[[red]]")),
    # 6 and 10: options, and answers by number
    "ai2d": ({"question": "Which?", "options": ["a cat", "a dog"], "answer": "1", **KITE},
        chat("{4}Which?\nA. a cat\nB. a dog", "[[B]]")),
    "ScienceQA": (
        {"question": "Which?", "choices": ["a cat", "a dog"], "answer": 0, "hint": "See.", "lecture": "L", **KITE},
        chat("{4}See.\nWhich?\nA. a cat\nB. a dog", "[[A]]"), {"lecture": 1}),
    "A-OKVQA": ({**CAT_OR_DOG, "correct_choice_idx": 1, "direct_answers": "['a dog', 'b']"},
        chat(LISTED, "[[B]]"), {"direct_answers": 1}),
    "a letter": ({**CAT_OR_DOG, "answer": "B"},
        chat(LISTED, "[[B]]")),
    "columns A to E, numbers": ({"question": "How many?", "A": 3, "B": 4, "C": 5.5, "D": "6", "E": 7, "answer": "E"},
        chat("How many?\nA. 3\nB. 4\nC. 5.5\nD. 6\nE. 7", "[[E]]")),
    "options as a mapping": ({"question": "How many?", "options": {"A": 3, "B": 4}, "answer": "B"},
        chat("How many?\nA. 3\nB. 4", "[[B]]")),
    "options that have their letters": ({"question": "Which?", "options": ["(A) cat", "(B) dog"], "answer": "B"},
        chat(LISTED, "[[B]]")),
    "SEED-Bench": ({"question": "Which?", "choice_a": "cat", "choice_b": "dog", "answer": "B", "question_type_id": 1},
        chat(LISTED, "[[B]]"), {"question_type_id": 1}),
    "an answer with its letter": ({**CAT_OR_DOG, "answer": "(B) dog"},
        chat(LISTED, "[[(B) dog]]")),
    "options that are in the question": (
        {"question": "Which?\nA. cat\nB. dog", "choices": ["cat", "dog"], "answer": "B"},
        chat(LISTED, "[[B]]")),
    "ARC, filled up": (
        {"question": "Which?", "choices": {"text": ["cat", "dog", ""], "label": ["A", "B", ""]}, "answer": 1.0},
        chat(LISTED, "[[B]]")),
    "a count that pandas made a fraction": ({"question": "Q", "answer": 3.0}, chat("Q", "[[3]]")),
    "CLEVR": ({"question": "How many?", "answer": 3, **KITE}, chat("{4}How many?", "[[3]]")),
    # 8: pairs
    "FineVision": ({"images": ["red.png"], "texts": [{"user": "Q", "assistant": "A"}, {"user": "R", "assistant": "B"}],
         "source": "x", "relevance_ratings": [4, 5]},
        chat("{4}Q", "[[A]]", "R", "[[B]]"), {"source": 1, "relevance_ratings": 1}),
    "the Cauldron": ({"images": ["red.png", "blue.png"], "texts": [{"user": "Q", "assistant": "A", "source": "vqa"}]},
        chat("{4}{4}Q", "[[A]]"), {"texts.source": 1}),
    # 9: several accepted answers
    "DocVQA": ({"question": "Q", "answers": ["one", "two", "two"], "questionId": 3, **KITE},
        chat("{4}Q", "[[two]]"), {"questionId": 1}),
    "VQAv2": (
        {"question": "Q", "answers": [{"answer": "yes", "answer_id": 1}, {"answer": "no", "answer_id": 2}], **KITE},
        chat("{4}Q", "[[yes]]")),
    "several captions": ({"caption": ["A kite.", "Red."], **KITE}, chat("{4}Describe the image.", "[[A kite.]]")),
    "numpy's lists as text": ({"question": "Q", "answers": "['one' 'two'\n 'two']"}, chat("Q", "[[two]]")),
    # 11 to 14: turns
    "a leading answer": ({"conversations": [TURNS[1], {"from": "human", "value": "<image>\nR"}, TURNS[1]], **KITE},
        chat("{4}R", "[[A]]"), {"a leading assistant turn is left out": 1}),
    "InternVL, no <image>": ({**llava("Q", "A"), **KITE}, chat("{4}Q", "[[A]]"), {"id": 1}),
    "OpenAI's guide, two user messages": (
        {"messages": [user("What is this?"), user([{"type": "image_url", "image_url": {"url": "red.png"}}]),
                      user("R"), assistant("A")]},
        chat("What is this?{4}R", "[[A]]"), {"user turns in a row are one turn": 1}),
    "user texts in a row": ({"messages": [user("Q"), user("R"), assistant("A")]},
        chat("Q\nR", "[[A]]"), {"user turns in a row are one turn": 1}),
    "JSON as text": ({"conversations": json.dumps(TURNS)}, chat("Q", "[[A]]")),
    "Python's lists as text": ({"conversations": str(TURNS), "images": "['red.png']"}, chat("{4}Q", "[[A]]")),
    "lists by column": ({"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, chat("Q", "[[A]]")),
    "conversation": ({"conversation": TURNS}, chat("Q", "[[A]]")),
    "texts with turns": ({"texts": TURNS, **KITE}, chat("{4}Q", "[[A]]")),
    "llava-instruct-mix-vsft": ({"images": ["red.png", "blue.png"], "messages": [
            user([{"index": 0, "text": None, "type": "image"}, {"index": 1, "text": None, "type": "image"},
                  {"index": None, "text": "Q", "type": "text"}]),
            assistant([{"index": None, "text": "A", "type": "text"}])]},
        chat("{4}{4}Q", "[[A]]")),
    "images of a turn": (
        {"messages": [user("Q"), assistant("A"), {**user("R"), "images": ["red.png"]}, assistant("B")]},
        chat("Q", "[[A]]", "{4}R", "[[B]]")),
    "parts as text": (
        {"messages": [user(json.dumps([{"type": "image"}, {"type": "text", "text": "Q"}])), assistant("A")], **KITE},
        chat("{4}Q", "[[A]]")),
    "Anthropic's, OpenAI's newer parts": (
        {"messages": [user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}},
                            {"type": "input_text", "text": "Q"}]), assistant("A")]},
        chat("{4}Q", "[[A]]")),
    "XTuner": ({"conversation": [{"system": "S", "input": "Q", "output": "A"}, {"input": "R", "output": "B"}]},
        chat("S:S", "Q", "[[A]]", "R", "[[B]]")),
    "roles of others": ({"messages": [{"role": "developer", "content": "S"}, {"role": "Human", "content": "Q"},
                      {"role": "GPT", "content": "A"}]},
        chat("S:S", "Q", "[[A]]")),
    "PixMo": ({"messages": ["Q", "A"]}, chat("Q", "[[A]]")),
    "BLINK, a prompt without completion": (
        {"prompt": "long", "question": "Q", "answer": "A", "conversations": []}, chat("Q", "[[A]]"), {"prompt": 1}),
    "an image of nothing": (
        {**llava("Q", "A"), "image": {"bytes": None, "path": None}}, chat("Q", "[[A]]"), {"id": 1}),
    # 15: base64
    "VLMEvalKit, base64": ({"image": RED, "question": "Q", "answer": "A"}, chat("{4}Q", "[[A]]")),
    "a part in base64": (
        {"messages": [user([{"type": "image", "base64": RED}, {"type": "text", "text": "Q"}]), assistant("A")]},
        chat("{4}Q", "[[A]]")),
    "an id that ends in .png": ({**llava("Q", "A"), "id": "a.png"}, chat("Q", "[[A]]"), {"id": 1}),
    "HTML": (llava("Is <video src=a> or the <video> tag used?", "<video></video>"),
             chat("Is <video src=a> or the <video> tag used?", "[[<video></video>]]"), {"id": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_form_is_read_in_memory_as_a_stream_and_in_a_mixture(name, processor, tmp_path):
    row, marked, *others = EXAMPLES[name]
    path = write_json(tmp_path, [row])
    (report,) = check(processor, path, marked).report.sources
    told = report.left_out | report.changed
    assert {key: told.pop(key) for key in (others[0] if others else ())} == (others[0] if others else {})
    assert told.keys() <= {"id", "messages.content.detail"}
    check(processor, path, marked, marked, streamed=True)
    sources = [{"path": str(file)} for file in (path, write_json(tmp_path / "b", [llava("Q", "A")]))]
    check(processor, None, marked, chat("Q", "[[A]]"), datasets=sources)


def test_parquet_has_the_same_forms(processor, tmp_path):
    """With types that only Arrow has: every part has all keys, and a list of mappings may be a mapping of lists."""
    file = tmp_path / "rows.parquet"
    pairs = List({"user": Value("string"), "assistant": Value("string"), "source": Value("string")})
    cauldron = {"images": [[{"bytes": image_bytes(), "path": None}]], "texts": [[{"user": "Q", "assistant": "A"}]]}
    features = datasets.Features({"images": List(datasets.Image()), "texts": pairs})
    Dataset.from_dict(cauldron, features=features).to_parquet(file)
    check(processor, file, chat("{4}Q", "[[A]]"))
    Dataset.from_dict({"messages": [[{**user("Q"), "weight": None}, {**assistant("A"), "weight": 1.0}]]}).to_parquet(
        file
    )
    check(processor, file, chat("Q", "[[A]]"))
    Dataset.from_dict({"question": ["Q"], "A": [3], "B": [4], "answer": [float("nan")]}).to_parquet(file)
    with pytest.raises(ValueError, match="row 0: it has no assistant turn"):
        read(file, processor)
    kind = datasets.ClassLabel(names=["cat", "dog"])
    for label, feature in ((1, kind), ([1, 0, 1], List(kind)), ([{"answer": 1}], List({"answer": kind}))):
        classes = datasets.Features({"question": Value("string"), "label": feature})
        Dataset.from_dict({"question": ["Q"], "label": [label]}, features=classes).to_parquet(file)
        for streamed in (False, True):
            check(processor, file, chat("Q", "[[dog]]"), streamed=streamed, columns="answer=label")


BAD = {
    "VQA's own JSON": ({"question": "Q", "answer": "A", "image_id": 458752}, "column image_id .1 row.. No other"),
    "an image's number in another spelling": ({**llava("Q", "A"), "imageId": 7}, "column imageId .1 row.. No other"),
    "videos": ({**llava("<video>Q", "A"), "videos": ["a.mp4"]}, "it has videos, and only images are read"),
    "LLaVA-Video": ({**llava("Q", "A"), "video": "a.mp4"}, "it has video, and only images are read"),
    "a mark without its video": (llava("<video>\nQ", "A"), "it has <video> in a text"),
    "ms-swift, objects": ({"messages": [user("Find <ref-object>"), assistant("<bbox>")], "objects": {"ref": ["a"]}},
        "it has <ref-object> in a text, and such marks of objects are not filled in"),
    "weights between": (
        {"messages": [user("Q"), {"role": "assistant", "content": "A", "weight": 0.5}]}, "turn 1 has weight 0.5"),
    "nothing is learned": (
        {"messages": [user("Q"), {"role": "assistant", "content": "A", "weight": 0}]}, "no assistant turn is learned"),
    "two systems": ({"messages": [{"role": "system", "content": "S"}, user("Q"), assistant("A")], "system": "T"},
        "it has a system turn, and another text in the column system"),
    "a number that is an option's text too": ({"question": "Q", "options": ["3", "4", "2", "1"], "answer": "3"},
        "'3' is the text of an option and .* number of another; .* --columns answer_index=answer"),
    "no such option": ({"question": "Q", "choices": ["a b", "c d"], "answer": 2}, "answer '2' is not just one of"),
    "a gap": ({"question": "Q", "A": "x", "C": "y", "answer": "A"}, "its options are called A, C, not A, B"),
    "NaN as an option": ({"question": "Q", "choices": ["x", float("nan")], "answer": "A"}, "choices must be a list"),
    "options that are alike": ({"question": "Q", "choices": ["a", "A."], "answer": "a"}, "two of its options are"),
    "options that are images": ({"question": "Q", "choices": ["a.png", "b.png"], "answer": 0}, "its options are imag"),
    "several right options": ({"question": "Q", "choices": ["a", "b"], "answer": ["A", "B"]}, "options and several"),
    "POPE": ({**KITE, "text": "Is it?", "label": "yes"}, "--columns question=text,answer=label, or, .* caption=text"),
    "LLaVA-Bench": ({**KITE, "question_id": 0, "category": "conv", "text": "What is it?"},
        "question_id beside it, its text would be a question, .* --columns question=text, or, .* caption=text"),
    "no question": ({**KITE, "question": " ", "answer": "A"}, "its question is empty.*--columns caption=answer"),
    "RLHF-V": ({**KITE, "text": json.dumps({"question": "Q", "chosen": "A"})}, "no caption but JSON with question"),
    "KTO": ({"prompt": "Q", "completion": "A", "label": False}, "marked as unwanted .label false., as KTO learns it"),
    "another image's number": (
        {"images": ["red.png"], "messages": [user([{"type": "image", "index": 1}]), assistant("A")]},
        "place for image 1"),
    "<Image>": (llava("<Image>\nWhat?", "A"), "text <Image> .1 row.. No other image"),
    "[IMG]": (llava("[IMG] What?", "A"), "text .IMG. .1 row.. No other image"),
    "true": ({"question": "Q", "answer": True}, "answer must be text or a list of turns, got True"),
    "null for an image": ({**llava("<image>Q", "A"), "images": [None, "red.png"]}, "images has nothing in place of"),
    "another kind of image part": ({"messages": [user([{"type": "image", "file_id": "x"}]), assistant("A")]},
        "turn 0 has an image part with file_id; an image is in one of image, image_url"),
    "base64 of no image": ({**llava("<image>Q", "A"), "image": "Q" * 6000}, "base64 that does not begin as an"),
    "file://": ({**llava("<image>Q", "A"), "image": "file:///a.png"}, "write its path, without file://"),
    "one object": ({"images": [], "annotations": [1]}, "its form is not known. It has the columns: annotations"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_would_be_learned_wrongly_is_bad(name, processor, tmp_path):
    row, reason = BAD[name]
    path = write_json(tmp_path, [row])
    for streaming in (False, True):
        with pytest.raises(ValueError, match=reason):
            list(islice(read(path, processor, dataset_streaming=streaming).train, 1))


QUERY = {"query": "Q", "response": "A"}
PROPOSED = {
    "question=instruction,answer=output": {"instruction": "Q", "input": "", "output": "A"},
    "image=img_path,question=query,answer=label": {"img_path": "red.png", "query": "Q", "label": ["A", "b"]},
    "answer=chosen": {"question": "Q", "chosen": "A", "rejected": "B"},
    "messages=chosen": {"rejected": [*TURNS[:1], TURNS[1]], "chosen": TURNS},
    "question=prompt,answer=chosen": {"prompt": [TURNS[0]], "chosen": [TURNS[1]], "rejected": [TURNS[1]]},
    "question=query,answer=response": {"history": [{"user": "x", "assistant": "y"}], "query": "Q", "response": "A"},
    "question=problem": {"problem": "Q", "answer": "A"},
    "image=img_name,caption=captions": {"img_name": "red.png", "captions": ["A", "b"]},
    "question=Question,answer=Answer": {"Question": "Q", "Answer": "A"},
    "messages=qa_pairs": {"qa_pairs": [{"question": "Q", "answer": "A"}]},
    "messages=dialog": {"dialog": json.dumps(TURNS)},
}


@pytest.mark.parametrize("columns", PROPOSED)
def test_columns_are_proposed_that_read_the_row(columns, processor, tmp_path):
    path = write_json(tmp_path, [PROPOSED[columns]])
    with pytest.raises(ValueError) as error:
        read(path, processor)
    assert re.search(r"--columns (\S+?)[.\n;]", str(error.value))[1] == columns
    assert ("DPO" in str(error.value)) == ("chosen" in columns)
    asked = "Describe the image." if "caption" in columns else "Q"
    check(processor, path, chat("{4}" * ("img" in columns) + asked, "[[A]]"), columns=columns)


def test_a_cloned_repository_is_read_as_its_error_says(processor, tmp_path):
    """LLaVA-Pretrain: two files of the same rows, of which one is known, and a zip file of images."""
    folder = tmp_path / "LLaVA-Pretrain"
    folder.mkdir()
    (folder / "blip.json").write_text(json.dumps([llava("<image>\nQ", "A", "00/1.png")]))
    (folder / "blip_meta.json").write_text(json.dumps([{"id": "1", "image": "00/1.png", "blip_caption": "A"}]))
    with zipfile.ZipFile(folder / "images.zip", "w") as file:
        file.writestr("00/1.png", image_bytes("red"))
    with pytest.raises(ValueError) as error:
        read(folder, processor)
    path, image_folder = re.search(r"try --dataset_name (\S+) --image_folder (\S+)\.\n", str(error.value)).groups()
    check(processor, path, chat("{4}Q", "[[A]]"), image_folder=image_folder)
    with pytest.raises(ValueError, match=rf"Rows that cannot be evaluated(.|\n)*try --data {path} --image-folder"):
        own_task(str(folder))


def test_files_of_other_shapes(processor, tmp_path):
    one, several, coco = (tmp_path / name for name in ("one.json", "lines.json", "coco"))
    one.write_text(json.dumps(llava("Q", "A")))
    check(processor, one, chat("Q", "[[A]]"))
    several.write_text("\n".join(map(json.dumps, [llava("Q", "A"), llava("R", "B")])))  # InternVL's
    check(processor, several, chat("Q", "[[A]]"), chat("R", "[[B]]"))
    write_json(coco, [llava("Q", "A")], "b.json")
    (coco / "a.json").write_text(json.dumps({"images": [], "annotations": []}))
    with pytest.raises(ValueError, match="one object with images, annotations. .* name it: .*b.json"):
        read(coco, processor)
    with pytest.raises(TypeError, match="train_dataset is a list. Give a Dataset, as Dataset.from_list makes"):
        prepare_rows([llava("Q", "A")], Checks(processor))
    with pytest.raises(ValueError, match="a split has a key of its own: path: vqav2, split: validation"):
        open_source(DataSource("vqav2:validation"), streaming=False)


def test_shards_have_other_files_and_tables_beside_them(processor, tmp_path, caplog):
    folder, photo = tmp_path / "img2dataset", image_bytes("red", form="JPEG")
    shard(folder / "00000.tar", {"1.jpg": photo, "1.txt": "A kite.", "1.json": {"url": "u"}})
    (folder / "00000_stats.json").write_text("{}")
    Dataset.from_list([{"url": "u", "caption": "A kite."}]).to_parquet(folder / "00000.parquet")
    for streamed in (False, True):
        check(processor, folder, chat("{4}Describe the image.", "[[A kite.]]"), streamed=streamed)
    assert "has files that are not read: 00000_stats.json, 00000.parquet" in caplog.text
    sound = shard(tmp_path / "sound.tar", {"1.jpg": photo, "1.txt": "A kite.", "1.wav": b"x", "1.cls": "3"})
    assert read(sound, processor).report.sources[0].left_out == {"audio": 1, "cls": 1}
    shard(tmp_path / "video.tar", {"1.mp4": b"x", "1.json": {"question": "Q", "answer": "A"}})
    with pytest.raises(ValueError, match="it has video, and only images are read"):
        read(tmp_path / "video.tar", processor)


def test_tables_that_pandas_wrote(processor, tmp_path):
    images(tmp_path, "red.png", "blue.png")
    table = tmp_path / "data.csv"
    table.write_text(
        """image, question,answer\n"['red.png','blue.png']",Q,"['two', 'one', 'two']"\nred.png,R,"[0.1, 0.2]"\n"""
    )
    data = check(processor, table, chat("{4}{4}Q", "[[two]]")).train
    assert data[1]["messages"][1]["content"][0]["text"] == "[0.1, 0.2]"
    assert own_task(str(table)).eval_docs["answers"][0] == ["two", "one", "two"]
    for text, reason in {
        'question\tanswer\nQ\t"A\nR\tB\nS\tC"\n': "has a cell with tabs and line breaks, near line 4",
        'question\tanswer\nQ\t"Stop" sign\n': "is not valid CSV: '\t' expected after",
        "question\tanswer\tanswer\nQ\tA\tB\n": "has several columns called 'answer'",
    }.items():
        (tmp_path / "data.tsv").write_text(text)
        with pytest.raises(ValueError, match=reason):
            read(tmp_path / "data.tsv", processor)


def test_shards_of_texts_under_other_names(processor, tmp_path):
    red, blue = image_bytes("red", form="JPEG"), image_bytes("blue", form="JPEG")
    files = {"1.jpg": red, "1.question": "Q", "1.answer.txt": "\ufeffA", "1.tags": "x"}
    files |= {f"2.{number}.jpg": blue if number == 2 else red for number in (1, 10, 2)}
    files |= {"2.txt": "new", "2.json": "\ufeff" + json.dumps({"caption": "old"})}
    path = shard(tmp_path / "data.tar", files)
    data = check(processor, path, chat("{4}Q", "[[A]]"), chat("{4}{4}{4}Describe the image.", "[[new]]"))
    assert data.report.sources[0].left_out == {"tags": 1, "caption of the .json file": 1}
    assert decode_image(data.train[1]["images"][1], 10**6).getpixel((3, 3))[2] > 200


def test_what_is_not_read_is_told_by_the_command_and_in_python(processor, tmp_path, caplog):
    rows = [{**llava("Q", "A"), "tools": "x"}, {**llava("Q", "A"), "tools": "y", "history": ["z"], "similarity": 0.3}]
    shown = CliRunner().invoke(app, ["data", str(write_json(tmp_path, rows))], env={"COLUMNS": "200"})
    told = re.sub(r"\s+", " ", shown.output)
    assert shown.exit_code == 0 and "left out │ tools (2 rows), history (1 row)" in told
    assert "also not read │ id, similarity" in told
    prepare_rows(Dataset.from_list(rows[:1]), Checks(processor), name="mine")
    assert "mine: left out: tools (1 row)" in caplog.text and "id (1 row)" not in caplog.text
    list(islice(read(tmp_path / "data.json", processor, dataset_streaming=True).train, 2))
    assert "data.json: left out: history." in caplog.text


def write_many(folder, rows, bad):
    folder.mkdir()
    images(folder, "red.png")
    lines = [llava(f"Q{number}", "A" * (number < rows - bad)) for number in range(rows)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "data.jsonl"


def test_a_share_of_bad_rows_is_skipped_and_more_stop_before_the_first_step(processor, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MANY_ROWS", 500)
    few = write_many(tmp_path / "few", 50, 2)
    with pytest.raises(ValueError, match=r"row 48: the answer in turn 1 is empty.*\(2 rows\)\nFix them, or skip"):
        read(few, processor)  # stop is the default of small data
    assert len(read(few, processor, bad_rows="0.04").train) == 48
    with pytest.raises(ValueError, match=r"\(2 rows\)\nThese are 2 rows, and a share of 0.03 is skipped at most"):
        read(few, processor, bad_rows=0.03)
    many = write_many(tmp_path / "many", 501, 5)
    (report,) = read(many, processor).report.sources
    assert (report.bad, report.valid, report.skippable) == (5, 496, 0)
    with pytest.raises(ValueError, match=r"\(5 rows\)"):
        read(many, processor, bad_rows="stop")
    with pytest.raises(ValueError, match="These are 6 rows, and a share of 0.01 is skipped at most"):
        read(write_many(tmp_path / "more", 501, 6), processor)
    for wrong in ("some", "1", 0, 1.5, True):
        with pytest.raises(ValueError, match="bad_rows must be 'stop', 'skip' or a share between 0 and 1"):
            read(few, processor, bad_rows=wrong)
