"""lmms-eval finds the model by the package's entry point; its answers are transformers'."""

import importlib.util
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import scripted_tasks
import tiny
import training
from asking import generate
from datasets import load_dataset
from PIL import Image

from normalign_llava import NormAlignLlavaForConditionalGeneration


INSTALLED = importlib.util.find_spec("lmms_eval") is not None


class Base:
    """What lmms-eval's own base class gives a model."""

    rank = 0

    def __init__(self):
        self.task_dict = {}


class Messages:
    """A conversation that lmms-eval reads, here in the form of transformers already."""

    def __init__(self, messages):
        self.messages = messages

    def to_hf_messages(self):
        return self.messages


@pytest.fixture(scope="module")
def model_class():
    """The class, on these two in place of lmms-eval's."""
    classes = {"api.instance": "Instance", "api.model": "lmms", "protocol": "ChatMessages"}
    given = {"Instance": SimpleNamespace, "lmms": Base, "ChatMessages": Messages}
    ours = "normalign_llava.evaluation.lmms"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, ours, raising=False)
        for place, name in classes.items():
            module = ModuleType(f"lmms_eval.{place}")
            setattr(module, name, given[name])
            patch.setitem(sys.modules, module.__name__, module)
        for package in ("lmms_eval", "lmms_eval.api"):
            patch.setitem(sys.modules, package, ModuleType(package))
        yield import_module(ours).NormAlignLlava
        sys.modules.pop(ours)


@pytest.fixture
def saying(model_class, checkpoint):
    """A model that says nothing but a token, and what each of its batches was."""

    def saying(token, **options):
        lm = model_class(str(checkpoint), **options)
        tokenizer, size = lm.processor.tokenizer, lm.model.config.text_config.vocab_size
        others = {*range(size)} - {tokenizer.convert_tokens_to_ids(token)}
        lm.model.generation_config.suppress_tokens = sorted(others)
        generate, batches = lm.model.generate, []

        def kept(**inputs):
            batches.append(inputs)
            return generate(**inputs | {"max_new_tokens": min(inputs["max_new_tokens"], 4)})

        lm.model.generate = kept
        return lm, batches

    return saying


def asked(lm, *questions):
    """Requests, each of a text and options, as lmms-eval makes them of documents."""
    image = {"type": "image", "image": Image.radial_gradient("L").convert("RGB")}
    documents = [[image, {"type": "text", "text": text}] for text, _ in questions]
    lm.task_dict["tiny"] = {"test": documents}
    requests = []
    for number, (_, options) in enumerate(questions):
        arguments = ("", told, options, number, "tiny", "test")
        requests.append(SimpleNamespace(args=arguments))
    return requests


def told(content):
    return [{"role": "user", "content": content}]


def test_requests_are_answered_in_their_order_in_batches_of_the_same_options(saying):
    lm, batches = saying("A", batch_size="2")
    one, two = {"max_new_tokens": 1}, {"max_new_tokens": 2}
    requests = asked(lm, ("what is it?", two), ("a?", two), ("b?", two), ("c?", one), ("d?", two))
    assert lm.generate_until(requests) == ["AA", "AA", "AA", "A", "AA"]
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1, 1, 1]
    decode = lm.processor.tokenizer.decode
    for batch, texts in zip(batches, (["what is it?", "a?"], ["b?"], ["c?"], ["d?"]), strict=True):
        for ids, text in zip(batch["input_ids"], texts, strict=True):
            assert decode(ids).endswith(f"{text}<|im_end|>\n<|im_start|>assistant\n")
    alone, _ = saying("A")
    assert alone.batch_size == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"max_new_tokens": 1024, "num_beams": 1, "do_sample": False}),
        ({"max_new_tokens": 3, "num_beams": 2}, {"max_new_tokens": 3, "num_beams": 2}),
        ({"temperature": 0, "top_p": 0.5, "do_sample": True}, {"do_sample": False}),
        (
            {"temperature": 0.5, "top_p": 0.9},
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9},
        ),
        ({"temperature": 0.5}, {"do_sample": True, "temperature": 0.5}),
        ({"temperature": 0.5, "top_p": None}, {"do_sample": True, "temperature": 0.5}),
    ],
    ids=str,
)
def test_options_of_a_task_are_those_of_generate(saying, options, expected):
    lm, batches = saying("A")
    lm.generate_until(asked(lm, ("what?", options)))
    (batch,) = batches
    assert batch.items() >= expected.items()
    drawn = {name for name in ("temperature", "top_p") if name in batch}
    assert drawn == {"temperature", "top_p"} & expected.keys()


@pytest.mark.parametrize(
    ("until", "answer"),
    [("A", ""), (["x", "A"], ""), (["AAA"], ""), ([], "AAAA"), ("x", "AAAA"), (["ab"], "AAAA")],
)
def test_an_answer_ends_where_a_task_says(saying, until, answer):
    lm, _ = saying("A")
    assert lm.generate_until(asked(lm, ("what?", {"until": until}))) == [answer]


def test_special_tokens_are_no_part_of_an_answer_for_lmms_eval(saying):
    lm, _ = saying("<|im_start|>")
    assert lm.generate_until(asked(lm, ("what?", {}))) == [""]


def test_a_model_is_loaded_in_the_precision_and_on_the_device_that_are_named(saying):
    for dtype in ("bfloat16", "float32"):
        lm, batches = saying("A", dtype=dtype)
        assert str(lm.model.dtype) == f"torch.{dtype}" and not lm.model.training
        lm.generate_until(asked(lm, ("what?", {})))
        assert batches[0]["pixel_values"].dtype == lm.model.dtype
    lm, _ = saying("A", device="meta")
    assert lm.model.device.type == "meta"


def test_a_language_model_and_likelihoods_are_refused(model_class, checkpoint, saying):
    with pytest.raises(ValueError, match="language is a language model"):
        model_class(str(checkpoint.parent / "language"))
    lm, _ = saying("A")
    for ask in (lm.loglikelihood, lm.generate_until_multi_round):
        with pytest.raises(NotImplementedError, match="only generates text"):
            ask([])
    assert lm.is_simple is False


@pytest.fixture(scope="module")
def heeding(tmp_path_factory):
    folder = training.checkpoint(tmp_path_factory.mktemp("checkpoint"), tied=False)
    model = NormAlignLlavaForConditionalGeneration.from_pretrained(folder)
    tiny.heeding(model).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs lmms-eval")
def test_a_task_of_lmms_eval_gets_the_answers_of_transformers(heeding, tmp_path):
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    questions = ("Is there a cat?", "a dog?", "Is it red?")
    rows = [{"question": question, "answer": "yes"} for question in questions]
    (tmp_path / "data").mkdir()
    scripted_tasks.write_task(tmp_path / "data", "ai2d", rows)
    data = str(tmp_path / "data" / "rows.parquet")
    (tmp_path / "tiny.py").write_text(
        "def text(doc, lmms_eval_specific_kwargs=None):\n    return doc['question']\n"
        "def images(doc):\n    return [doc['image'].convert('RGB')]\n"
        "def results(doc, answers):\n    return {'said': answers[0]}\n"
        "def count(answers):\n    return len(answers)\n"
    )
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny\ndataset_path: parquet\ntest_split: test\noutput_type: generate_until\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\ndoc_to_target: answer\n"
        "doc_to_visual: !function tiny.images\ndoc_to_text: !function tiny.text\n"
        "generation_kwargs: {max_new_tokens: 8, temperature: 0, do_sample: false}\n"
        "process_results: !function tiny.results\nmetric_list:\n"
        "- {metric: said, aggregation: !function tiny.count, higher_is_better: true}\n"
    )
    output = simple_evaluate(
        "normalign_llava",
        model_args=f"pretrained={heeding},dtype=float32",
        batch_size=2,
        device="cpu",
        tasks=["tiny"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    said = {sample["doc_id"]: sample["resps"][0][0] for sample in output["samples"]["tiny"]}
    asked = load_dataset("parquet", data_files=data, split="train", cache_dir=str(tmp_path))
    for number, row in enumerate(asked):
        expected = generate(heeding, row["question"], row["image"].convert("RGB"), tokens=8)
        assert said[number] == expected[0]
    assert len(set(said.values())) > 1
