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
from itertools import islice

import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from test_shards import shard
from train_data import answers, assistant, image_bytes, images, llava, read, user, write_json

from normalign_llava.data.rows import checks
from normalign_llava.data.rows.checks import Checks
from normalign_llava.data.sources.mixtures import prepare_rows
from normalign_llava.evaluation.own_data import own_task
from normalign_llava.train.collator import ConversationCollator


RED = base64.b64encode(image_bytes("red", (40, 40))).decode()
TURNS = llava("Q", "A")["conversations"]


def chat(*turns: str) -> str:
    """A conversation as the template prints it, from its turns; "S:" begins a system turn."""
    roles = ("user", "assistant") * len(turns)
    if turns[0].startswith("S:"):
        turns = (turns[0][2:], *turns[1:])
        roles = ("system", *roles)
    return "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n".replace("]]<|im_end|>", "<|im_end|>]]")
        for role, text in zip(roles, turns, strict=False)
    )


def by_hand(processor, marked: str) -> tuple[list[int], list[int]]:
    """Ids and labels of a marked text: one token a letter, and one for each special token."""
    vocabulary = processor.tokenizer.get_vocab()
    ids = []
    labels = []
    learned = False
    for piece in re.findall(r"\[\[|\]\]|\{4\}|<\|im_\w+\|>|.", marked, re.S):
        if piece in ("[[", "]]"):
            learned = piece == "[["
            continue
        tokens = [vocabulary["<image>"]] * 4 if piece == "{4}" else [vocabulary[piece]]
        ids += tokens
        labels += tokens if learned else [-100] * len(tokens)
    return ids, labels


def check(processor, path, *marked, **options):
    """The first rows of the data are the marked texts."""
    data = read(path, processor, **options)
    for row, text in zip(islice(data.train, len(marked)), marked, strict=True):
        batch = ConversationCollator(processor)([row])
        ids, labels = (batch[name][0].tolist() for name in ("input_ids", "labels"))
        assert (ids, labels) == by_hand(processor, text)
    return data


KITE = {"image": "red.png"}
PAIR = {"user": "Q", "assistant": "A"}
TEXT = {"type": "text", "text": "Q"}
CAT_OR_DOG = {"question": "Which?", "choices": ["cat", "dog"]}
LISTED = "Which?\nA. cat\nB. dog"
OF_SEVERAL = "of several {}, the commonest is learned, or the first of equals"
EXAMPLES = {
    # 1: messages that their author excludes
    "weight, loss and train of OpenAI, ms-swift and axolotl": ({"messages": [
            user("Q"), assistant("A") | {"weight": 0}, user("R"), assistant("B") | {"loss": False},
            user("S") | {"train": False}, assistant("C") | {"train": False}, user("T"),
            assistant("D") | {"weight": 1, "loss_scale": 1.0, "training": True}]},
        chat("Q", "A", "R", "B", "S", "C", "T", "[[D]]")),
    # 5: columns beside the turns
    "LLaMA-Factory, system": (llava("Q", "A", system="Be."), chat("S:Be.", "Q", "[[A]]")),
    "tools and history": (llava("Q", "A", tools="[search]", history=[["q", "a"]], score=3),
        chat("Q", "[[A]]"), {"tools": 1, "history": 1, "id": 1, "score": 1}),
    "keys": (dict(messages=[user("Q"), assistant("A") | {"reasoning_content": "R", "name": "x"}]),
        chat("Q", "[[A]]"), {"messages.reasoning_content": 1, "messages.name": 1}),
    "alpaca, input": (dict(question="Q", input="R", answer="A"), chat("Q\nR", "[[A]]")),
    # 6 and 10: options, and answers by number
    "ai2d": (dict(question="Which?", options=["cat", "dog"], answer="1"), chat(LISTED, "[[B]]")),
    "ScienceQA": (CAT_OR_DOG | KITE | {"answer": 0, "hint": "See.", "lecture": "L"},
        chat("{4}See.\n" + LISTED, "[[A]]"), {"lecture": 1}),
    "A-OKVQA": ({**CAT_OR_DOG, "correct_choice_idx": 1, "direct_answers": "['a dog', 'b']"},
        chat(LISTED, "[[B]]"), {"direct_answers": 1}),
    "columns A to E": (dict(question="How many?", A=3, B=4, C=5.5, D="6", E=7, answer="E"),
        chat("How many?\nA. 3\nB. 4\nC. 5.5\nD. 6\nE. 7", "[[E]]")),
    "a mapping": (dict(question="Q", options={"A": 3, "B": 4}, answer="B"),
        chat("Q\nA. 3\nB. 4", "[[B]]")),
    "options that have their letters": (
        dict(question="Which?", options=["(A) cat", "(B) dog"], answer="B"), chat(LISTED, "[[B]]")),
    "SEED-Bench": (dict(question="Which?", choice_a="cat", choice_b="dog", answer="B", data_id=1),
        chat(LISTED, "[[B]]"), {"data_id": 1}),
    "an answer with its letter": ({**CAT_OR_DOG, "answer": "(B) dog"}, chat(LISTED, "[[(B) dog]]")),
    "already listed": ({**CAT_OR_DOG, "question": LISTED, "answer": "B"}, chat(LISTED, "[[B]]")),
    "ARC": (dict(question="Q", choices=dict(text=["x", "y", ""], label=["A", "B", ""]), answer=1.0),
        chat("Q\nA. x\nB. y", "[[B]]")),
    "a count that pandas made a fraction": (dict(question="Q", answer=3.0), chat("Q", "[[3]]")),
    "CLEVR": (dict(question="How many?", answer=3, **KITE), chat("{4}How many?", "[[3]]")),
    # 8: pairs
    "FineVision": (dict(images=["red.png"], texts=[PAIR, PAIR], relevance_ratings=[4, 5]),
        chat("{4}Q", "[[A]]", "Q", "[[A]]"), {"relevance_ratings": 1}),
    "a pair that is not learned": (
        dict(texts=[PAIR | {"weight": 0}, {"user": "R", "assistant": "B"}, PAIR | {"train": True}]),
        chat("Q", "A", "R", "[[B]]", "Q", "[[A]]")),
    "the Cauldron": (dict(images=["red.png", "blue.png"], texts=[PAIR | {"source": "vqa"}]),
        chat("{4}{4}Q", "[[A]]"), {"texts.source": 1}),
    # 9: several accepted answers
    "DocVQA": (dict(question="Q", answers=["one", "two", "two"], questionId=3, **KITE),
        chat("{4}Q", "[[two]]"), {"questionId": 1, OF_SEVERAL.format("answers"): 1}),
    "VQAv2": (dict(question="Q", answers=[{"answer": "yes", "answer_id": 1}, {"answer": "no"}]),
        chat("Q", "[[yes]]"), {OF_SEVERAL.format("answers"): 1}),
    "captions": (dict(caption=["A.", "B."], **KITE), chat("{4}Describe the image.", "[[A.]]"),
        {OF_SEVERAL.format("captions"): 1}),
    "Flickr30k's table": (dict(captions="['A.', 'B.']", **KITE),
        chat("{4}Describe the image.", "[[A.]]"), {OF_SEVERAL.format("captions"): 1}),
    "numpy's lists": (dict(question="Q", answers="['one' 'two'\n 'two']"), chat("Q", "[[two]]"),
        {OF_SEVERAL.format("answers"): 1}),
    "quoted words in Python's lists": (
        dict(conversations=str(llava("'x' 'y'?", "A 'b'")["conversations"])),
        chat("'x' 'y'?", "[[A 'b']]")),
    "an option that is nan": (dict(question="Q", choices=["nan", "inf"], answer="B"),
        chat("Q\nA. nan\nB. inf", "[[B]]")),
    # 11 to 14: turns
    "a leading answer": ({"conversations": [TURNS[1], *TURNS], **KITE},
        chat("{4}Q", "[[A]]"), {"a leading assistant turn is left out": 1}),
    "InternVL, no <image>": ({**llava("Q", "A"), **KITE}, chat("{4}Q", "[[A]]"), {"id": 1}),
    "OpenAI's guide, two user messages": ({"messages": [
            user("Q"), user([{"type": "image_url", "image_url": {"url": "red.png"}}]), user("R"),
            assistant("A")]},
        chat("Q{4}R", "[[A]]"), {"user turns in a row are one turn": 1}),
    "user texts in a row": ({"messages": [user("Q"), user("R"), assistant("A")]},
        chat("Q\nR", "[[A]]"), {"user turns in a row are one turn": 1}),
    "JSON as text": ({"conversations": json.dumps(TURNS)}, chat("Q", "[[A]]")),
    "Python's lists": (dict(conversations=str(TURNS), images="['red.png']"), chat("{4}Q", "[[A]]")),
    "lists by column": (
        {"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, chat("Q", "[[A]]")),
    "conversation": ({"conversation": TURNS}, chat("Q", "[[A]]")),
    "texts with turns": ({"texts": TURNS, **KITE}, chat("{4}Q", "[[A]]")),
    "llava-instruct-mix-vsft": ({"images": ["red.png", "blue.png"], "messages": [
            user([*({"index": number, "text": None, "type": "image"} for number in (0, 1)),
                  {"index": None, "text": "Q", "type": "text"}]),
            assistant([{"index": None, "text": "A", "type": "text"}])]},
        chat("{4}{4}Q", "[[A]]")),
    "images of a turn": ({"messages": [
            user("Q"), assistant("A"), user("R") | {"images": ["red.png"]}, assistant("B")]},
        chat("Q", "[[A]]", "{4}R", "[[B]]")),
    "text": (dict(messages=[user(json.dumps([{"type": "image"}, TEXT])), assistant("A")], **KITE),
        chat("{4}Q", "[[A]]")),
    "Anthropic's, OpenAI's newer parts": ({"messages": [user([
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}},
            {"type": "input_text", "text": "Q"}]), assistant("A")]},
        chat("{4}Q", "[[A]]")),
    "XTuner": ({"conversation": [PAIR | {"system": "S"}, {"input": "R", "output": "B"}]},
        chat("S:S", "Q", "[[A]]", "R", "[[B]]")),
    "roles of others": (
        {"messages": [{"role": role, "content": role} for role in ("developer", "Human", "GPT")]},
        chat("S:developer", "Human", "[[GPT]]")),
    "PixMo": ({"messages": ["Q", "A"]}, chat("Q", "[[A]]")),
    "BLINK, a prompt alone": (dict(prompt="P", question="Q", answer="A", conversations=[]),
        chat("Q", "[[A]]"), {"prompt": 1}),
    "no image": (llava("Q", "A", {"bytes": None, "path": None}), chat("Q", "[[A]]"), {"id": 1}),
    # 15: base64
    "VLMEvalKit, base64": (dict(image=RED, question="Q", answer="A"), chat("{4}Q", "[[A]]")),
    "a part": (dict(messages=[user([{"type": "image", "base64": RED}, TEXT]), assistant("A")]),
        chat("{4}Q", "[[A]]")),
    "an id that ends in .png": (llava("Q", "A", id="a.png"), chat("Q", "[[A]]"), {"id": 1}),
    "HTML": (llava("Is <video src=a> or the <video> tag used?", "<video></video>"),
             chat("Is <video src=a> or the <video> tag used?", "[[<video></video>]]"), {"id": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_form_is_read_in_memory_and_as_a_stream(name, processor, tmp_path):
    row, marked, expected = (*EXAMPLES[name], {})[:3]
    path = write_json(tmp_path, [row])
    (report,) = check(processor, path, marked).report.sources
    told = report.left_out | report.changed
    assert {key: told.pop(key) for key in expected} == expected
    assert told.keys() <= {"id", "messages.content.detail"}
    check(processor, path, marked, marked, streamed=True)


def test_parquet_has_the_same_forms(processor, tmp_path):
    """With Arrow's types: parts have all keys, and lists of mappings may be mappings of lists."""
    file = tmp_path / "rows.parquet"
    pairs = List({"user": Value("string"), "assistant": Value("string"), "source": Value("string")})
    cauldron = {"images": [[{"bytes": image_bytes(), "path": None}]], "texts": [[PAIR]]}
    features = Features({"images": List(Image()), "texts": pairs})
    Dataset.from_dict(cauldron, features=features).to_parquet(file)
    check(processor, file, chat("{4}Q", "[[A]]"))
    weighted = [user("Q") | {"weight": None}, assistant("A") | {"weight": 1.0}]
    Dataset.from_dict({"messages": [weighted]}).to_parquet(file)
    check(processor, file, chat("Q", "[[A]]"))
    Dataset.from_dict(dict(question=["Q"], A=[3], B=[4], answer=[float("nan")])).to_parquet(file)
    with pytest.raises(ValueError, match="row 0: it has no assistant turn"):
        read(file, processor)
    kind = ClassLabel(names=["cat", "dog"])
    labels = [(1, kind), ([1, 0, 1], List(kind)), ([{"answer": 1}], List({"answer": kind}))]
    labels += [(0, kind), ([0], List(kind))]
    for number, (label, feature) in enumerate(labels):
        learned = "[[dog]]" if number < 3 else "[[cat]]"
        classes = Features({"question": Value("string"), "label": feature})
        Dataset.from_dict({"question": ["Q"], "label": [label]}, features=classes).to_parquet(file)
        for streamed in (False, True):
            check(processor, file, chat("Q", learned), streamed=streamed, columns="answer=label")
    for bits in (16, 32, 64):  # the number that was written, not its neighbour of 64 bits
        kinds = Features({"question": Value("string"), "answer": Value(f"float{bits}")})
        Dataset.from_dict({"question": ["Q"], "answer": [0.1]}, features=kinds).to_parquet(file)
        check(processor, file, chat("Q", "[[0.1]]"))


@pytest.mark.parametrize("kind", ["numpy", "torch", None])
def test_columns_that_are_hidden_are_not_read(processor, kind):
    data = Dataset.from_list([{"question": "Q", "answer": 3, "hint": "H", "system": "S"}] * 2)
    shown = data.with_format(kind, columns=["question", "answer"])
    for rows, marked in ((data, chat("S:S", "Q", "[[3]]")), (shown, chat("Q", "[[3]]"))):
        (row, _) = prepare_rows(rows, Checks(processor))[0]
        batch = ConversationCollator(processor)([row])
        ids, labels = (batch[name][0].tolist() for name in ("input_ids", "labels"))
        assert (ids, labels) == by_hand(processor, marked)
    every = data.with_format(kind, columns=["question"], output_all_columns=True)
    assert prepare_rows(every, Checks(processor))[0][0]["messages"][0]["role"] == "system"
    stream = data.to_iterable_dataset().with_format(kind)
    (row,) = islice(prepare_rows(stream, Checks(processor))[0], 1)
    assert [turn["role"] for turn in row["messages"]] == ["system", "user", "assistant"]
    assert answers([row]) == ["3"]


PROPOSED = {
    "question=instruction,answer=output": {"instruction": "Q", "input": "", "output": "A"},
    "image=img_path,question=query,answer=label": dict(img_path="red.png", query="Q", label=["A"]),
    "answer=chosen": {"question": "Q", "chosen": "A", "rejected": "B"},
    "messages=chosen": {"rejected": [*TURNS[:1], TURNS[1]], "chosen": TURNS},
    "question=prompt,answer=chosen": dict(prompt=TURNS[:1], chosen=TURNS[1:], rejected=TURNS[1:]),
    "question=query,answer=response": dict(history=[PAIR], query="Q", response="A"),
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
    """LLaVA-Pretrain: two files of the same rows, one of them known, and images in a zip file."""
    (tmp_path / "blip.json").write_text(json.dumps([llava("<image>\nQ", "A", "00/1.png")]))
    (tmp_path / "blip_meta.json").write_text(json.dumps([{"image": "1.png", "blip_caption": "A"}]))
    archive = tmp_path / "images.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("00/1.png", image_bytes("red"))
    with pytest.raises(ValueError, match="blip_meta.json, row 0 .*form(.|\n)*one file, name it"):
        read(tmp_path, processor)
    with pytest.raises(ValueError, match="set image_folder to the folder or .zip file"):
        read(tmp_path / "blip.json", processor)
    check(processor, tmp_path / "blip.json", chat("{4}Q", "[[A]]"), image_folder=str(archive))


def test_files_of_other_shapes(processor, tmp_path):
    one, several, coco = (tmp_path / name for name in ("one.json", "lines.json", "coco"))
    one.write_text(json.dumps(llava("Q", "A")))
    check(processor, one, chat("Q", "[[A]]"))
    several.write_text("\n".join(map(json.dumps, [llava("Q", "A"), llava("R", "B")])))  # InternVL's
    check(processor, several, chat("Q", "[[A]]"), chat("R", "[[B]]"))
    write_json(coco, [llava("Q", "A")], "b.json")
    (coco / "a.json").write_text(json.dumps({"images": [], "annotations": []}))
    with pytest.raises(ValueError, match="a.json is not a JSON list of rows.* name another file"):
        read(coco, processor)


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


def test_captions_of_coco(processor, tmp_path, caplog):
    images(tmp_path, "red.png", "green.png", "sub/blue.png")
    file = tmp_path / "captions_val2014.json"
    file.write_text(json.dumps(COCO))
    marked = [chat("{4}Describe the image.", f"[[{text}]]") for text in ("Blue.", "Red.")]
    rows = check(processor, file, *marked, chat("{4}Describe the image.", "[[A blue one.]]")).train
    names = [row["images"][0]["path"] for row in rows]
    assert names == [str(tmp_path / name) for name in ("sub/blue.png", "red.png", "sub/blue.png")]
    assert "1 of 3 images have no annotation" in caplog.text
    streamed = file.with_name("streamed.json")
    streamed.write_text(json.dumps(COCO))
    check(processor, streamed, *marked, streamed=True)
    for told in (file, streamed):
        assert caplog.text.count(f"{told}: captions are trained as answers to") == 1
    lost = {"id": 4, "image_id": 7, "caption": "Lost."}
    file.write_text(json.dumps(COCO | {"annotations": [*COCO["annotations"], lost]}))
    with pytest.raises(ValueError, match=r"row 3: .*images has no id 7.*there is no such image"):
        read(file, processor)
    boxes = [{"id": 1, "image_id": 4, "category_id": 2, "bbox": [0, 0, 1, 1]}]
    file.write_text(json.dumps(COCO | {"annotations": boxes}))
    with pytest.raises(ValueError, match="its form is not known.*bbox, category_id"):
        read(file, processor)


ONE = llava("Q", "A")
OTHER = llava("R", "B")


def test_a_file_with_rows_inside_is_read_or_written_anew_as_its_error_says(processor, tmp_path):
    file = tmp_path / "my rows.json"
    for content in ({"data": [ONE, OTHER]}, {"version": 2, "rows": [ONE, OTHER], "names": []}):
        file.write_text(json.dumps(content))
        check(processor, file, chat("Q", "[[A]]"), chat("R", "[[B]]"))
    lines = "\n".join(json.dumps(row, indent=2) for row in (ONE, OTHER))
    for text in (json.dumps({"train": [ONE, OTHER], "test": [ONE]}),
                 json.dumps({"7": ONE, "8": OTHER}), lines):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match="my rows.json is not (valid|a) JSON") as error:
            read(file, processor)
        (command,) = re.findall("`(.*)`", str(error.value))
        if command.startswith("jq") and not shutil.which("jq"):
            continue
        command = command.replace("python -c", f"{shlex.quote(sys.executable)} -c", 1)
        subprocess.run(command, shell=True, check=True, cwd=tmp_path)
        check(processor, tmp_path / "rows.jsonl", chat("Q", "[[A]]"), chat("R", "[[B]]"))


def test_shards_have_other_files_and_tables_beside_them(processor, tmp_path, caplog):
    folder = tmp_path / "img2dataset"
    photo = image_bytes("red", form="JPEG")
    shard(folder / "00000.tar", {"1.jpg": photo, "1.txt": "A kite.", "1.json": {"url": "u"}})
    (folder / "00000_stats.json").write_text("{}")
    Dataset.from_list([{"url": "u", "caption": "A kite."}]).to_parquet(folder / "00000.parquet")
    for streamed in (False, True):
        check(processor, folder, chat("{4}Describe the image.", "[[A kite.]]"), streamed=streamed)
    assert "has files that are not read: 00000_stats.json, 00000.parquet" in caplog.text
    shard(tmp_path / "video.tar", {"1.mp4": b"x", "1.json": {"question": "Q", "answer": "A"}})
    with pytest.raises(ValueError, match="it has video, and only images are read"):
        read(tmp_path / "video.tar", processor)


def test_tables_that_pandas_wrote(processor, tmp_path):
    images(tmp_path, "red.png", "blue.png")
    table = tmp_path / "data.csv"
    table.write_text(
        """image, question,answers\n"['red.png','blue.png']",Q,"['two', 'one', 'two']"\n"""
        """red.png,R,"[0.1, 0.2]"\n"""
    )
    check(processor, table, chat("{4}{4}Q", "[[two]]"), chat("{4}R", "[[0.1]]"))
    assert own_task(str(table)).eval_docs["answers"][0] == ["two", "one", "two"]
    table.write_text(table.read_text().replace("answers", "answer"))  # a text, not a list
    data = read(table, processor)
    texts = [row["messages"][1]["content"][0]["text"] for row in data.train]
    assert texts == ["['two', 'one', 'two']", "[0.1, 0.2]"]
    ((told, count),) = data.report.sources[0].changed.items()
    assert count == 2 and "learned as this text; --columns answers=COLUMN" in told
    check(processor, table, chat("{4}{4}Q", "[[two]]"), columns="answers=answer")  # as it says
    for text, reason in {
        'question\tanswer\nQ\t"A\nR\tB\nS\tC"\n': "has tabs and line breaks, near line 4",
        'question\tanswer\nQ\t"Stop" sign\n': "'\t' expected after",
        "question\tanswer\tanswer\nQ\tA\tB\n": "has columns of one name",
    }.items():
        (tmp_path / "data.tsv").write_text(text)
        with pytest.raises(ValueError, match=reason):
            read(tmp_path / "data.tsv", processor)


def test_columns_that_are_not_used_are_told_and_loudly_if_they_look_used(
    processor, tmp_path, caplog
):
    def told(**columns) -> str:
        caplog.clear()
        row = {"question": "Q", "answer": "A", **columns}
        prepare_rows(Dataset.from_list([row]), Checks(processor), name="mine")
        (record,) = (record for record in caplog.records if "not used" in record.message)
        assert record.message.startswith("mine: columns not used: ")
        return record.levelname

    caplog.set_level("INFO")
    quiet = {"tools": "x", "similarity": 0.3, "id": "7", "question_id": 7, "prompt_model": "m"}
    assert told(**quiet) == "INFO"
    for name in ("response", "gpt", "caption", "direct_answers", "content"):
        assert told(**quiet, **{name: "x"}) == "WARNING"
        assert f"columns not used: {name}, like an answer (1 row), tools (1 row), " in caplog.text
    for name in ("prompt", "query", "history", "input_prompt"):
        assert told(**quiet, **{name: "x"}) == "WARNING" and ", like a question" in caplog.text
    image = {"bytes": image_bytes(), "path": None}
    assert told(image=image, photo_2="x") == "WARNING"
    assert "dropped" not in caplog.text
    assert "photo_2, like an image (1 row)" in caplog.text
    rows = [llava("Q", "A", tools="x"), llava("Q", "A", tools="y", history=["z"], similarity=0.3)]
    rows += [{"messages": [user("Q"), user("R"), assistant("A")]}]
    caplog.clear()
    list(islice(read(write_json(tmp_path, rows), processor, dataset_streaming=True).train, 9))
    assert caplog.text.count("data.json: user turns in a row are one turn.") == 1
    assert caplog.text.count("data.json: column not used: history, like a question.") == 1
    assert "similarity" not in caplog.text and "tools" not in caplog.text


@pytest.mark.parametrize(
    "rows, bad, share, stops",
    [
        (50, 2, None, r"row 48: the answer in turn 1 is empty \(2 rows\)\nFix them, or skip"),
        (50, 2, "0.04", None),
        (50, 2, 0.03, "These are 2 of 50 rows; a share of 0.03 may be bad"),
        (501, 5, None, None),
        (501, 5, "stop", r"\(5 rows\)"),
        (501, 6, None, "These are 6 of 501 rows; a share of 0.01 may be bad"),
        *((1, 0, wrong, "bad_rows must be") for wrong in ("some", "1", 0, 1.5, True)),
    ],
)
def test_a_share_of_bad_rows_is_skipped(rows, bad, share, stops, processor, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MANY_ROWS", 500)
    path = write_json(tmp_path, [llava(f"Q{n}", "A" * (n < rows - bad)) for n in range(rows)])
    if not stops:
        (report,) = read(path, processor, bad_rows=share).report.sources
        assert (report.bad, report.valid, report.skippable) == (bad, rows - bad, 0)
        return
    with pytest.raises(ValueError, match=stops):
        read(path, processor, bad_rows=share)
