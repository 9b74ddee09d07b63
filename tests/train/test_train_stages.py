import pytest
import torch
import yaml
from transformers import get_scheduler
from trl import SFTConfig

from normalign_llava.train.command import RECIPES, recipe_file
from normalign_llava.train.options.arguments import WITHOUT_WARMUP, NormAlignConfig, parse
from normalign_llava.train.prepare import accumulation_steps


BASE = ["--model_name_or_path", "model", "--dataset_name", "data", "--bf16", "false"]


def options(tmp_path, *words, **recipe):
    """What a run with this recipe file and these words on the command line is told."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), **recipe}))
    return parse([str(file), *BASE, *words])


def test_stage_1_is_the_papers(tmp_path):
    _, args, _ = options(tmp_path, stage="align")
    assert args.learning_rates(use_peft=False) == {"vision": 0.0, "projector": 1e-3, "norm": 1e-3, "language": 0.0}
    assert (args.global_batch_size, args.per_device_train_batch_size) == (256, 2)
    assert (args.lr_scheduler_type, args.warmup_steps, args.weight_decay) == ("cosine", 0.03, 0.0)
    assert (args.seed, args.num_train_epochs, args.max_length) == (42, 1.0, 2048)


def test_stage_2_is_the_papers(tmp_path):
    _, args, _ = options(tmp_path, stage="tune")
    assert args.learning_rates(use_peft=False) == {"vision": 2e-6, "projector": 1e-5, "norm": 1e-5, "language": 1e-5}
    assert (args.global_batch_size, args.per_device_train_batch_size) == (128, 1)


@pytest.mark.parametrize("words", [[], ["--stage", "align"]])
def test_a_recipe_overrides_the_stage_and_the_command_line_the_recipe(tmp_path, words):
    _, args, _ = options(
        tmp_path, "--seed", "7", *words, stage="tune", seed=3, vision_learning_rate="3e-6", max_steps=5
    )
    assert args.seed == 7
    assert args.vision_learning_rate == 3e-6
    assert args.max_steps == 5
    assert args.learning_rate == (1e-3 if words else 1e-5)


def test_under_tune_adapters_have_learning_rates_of_their_own(tmp_path):
    _, args, _ = options(tmp_path, stage="tune", use_peft=True)
    assert args.learning_rates(use_peft=True) == {"vision": 0.0, "projector": 2e-5, "norm": 2e-5, "language": 2e-4}
    _, args, _ = options(tmp_path, stage="tune", use_peft=True, learning_rate=1e-3, norm_learning_rate=1e-4)
    assert args.learning_rates(use_peft=True) == {"vision": 0.0, "projector": 1e-3, "norm": 1e-4, "language": 1e-3}
    _, args, _ = options(tmp_path, use_peft=True)
    assert args.learning_rates(use_peft=True)["language"] == 2e-5  # TRL's


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (dict(stage="pretrain"), "stage must be one of 'align', 'tune', got 'pretrain'"),
        (dict(bad_rows="STOP"), "bad_rows must be 'stop', 'skip' or a share between 0 and 1, such as 0.01; got"),
        (dict(arm="foo"), "arm must be one of 'none', 'unit', 'aligned', 'gwc', got 'foo'"),
        (dict(stage="align", learning_rate=0), "nothing would be trained"),
        (dict(global_batch_size=-4), "global_batch_size must be at least 1, got -4"),
        (dict(norm_learning_rate=-1), "norm_learning_rate must be at least 0, got -1"),
        (dict(learning_rate=float("nan")), "learning_rate must be a finite number, got nan"),
        (dict(vision_learning_rate=float("inf")), "vision_learning_rate must be a finite number, got inf"),
        (dict(num_train_epochs=0), "num_train_epochs must be above 0, got 0"),
        (dict(save_steps=0), "save_steps must be above 0, got 0. For no checkpoints, save_strategy: no"),
        (dict(seed=-1), "seed must be at least 0, got -1"),
        (dict(dataset_num_proc=0), "dataset_num_proc must be at least 1, got 0"),
        (dict(push_to_hub=True, hub_model_id="a/b/c"), "hub_model_id 'a/b/c' cannot be a name on the Hub"),
        (dict(max_steps=-5), "max_steps is -5, which would train for all epochs"),
        (dict(max_steps=0), "max_steps is 0, which would train for all epochs. Give 1 or more, or leave it out"),
        (dict(test_split_size=2), "between 0 and 1, got 2"),
        (dict(test_split_size=0.1), "test_split_size needs eval_strategy steps or epoch. Set that, or leave"),
        (dict(lora_r=4), "lora_r: adapters are trained with use_peft alone"),
        (dict(auto_find_batch_size=True), "auto_find_batch_size cannot be used here: .*global batch"),
        (dict(dataset_name=None, datasets=["a.json"]), "is a mapping with path"),
        (dict(dataset_name=None, datasets=[{"path": "a", "folder": "b"}]), "is a mapping with path"),
    ],
)
def test_bad_values_in_a_recipe_are_named(tmp_path, recipe, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": "model", "dataset_name": "data", "bf16": False, **recipe}))
    with pytest.raises(ValueError, match=message):
        parse([str(file)])


def test_a_stage_decides_in_python_as_well(tmp_path):
    args = NormAlignConfig(output_dir=str(tmp_path), stage="align", bf16=False, use_cpu=True)
    assert (args.global_batch_size, args.warmup_steps, args.lr_scheduler_type) == (256, 0.03, "cosine")
    assert args.learning_rates(use_peft=False)["language"] == 0
    plain = NormAlignConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    stock = SFTConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    for name in ("learning_rate", "per_device_train_batch_size", "warmup_steps", "seed", "lr_scheduler_type"):
        assert getattr(plain, name) == getattr(stock, name)


def test_an_unknown_key_and_an_unknown_recipe_are_named(tmp_path):
    with pytest.raises(ValueError, match="no option --learing_rate 1. Did you mean --learning_rate?"):
        options(tmp_path, learing_rate=1)
    with pytest.raises(ValueError, match="no option --learing_rate 2. Did you mean --learning_rate?"):
        options(tmp_path, "--learing_rate", "2")
    with pytest.raises(ValueError, match="no option --lora_rank 2. Did you mean --lora_r[?]"):
        options(tmp_path, "--lora_rank", "2")
    with pytest.raises(ValueError, match="no file nowhere.yaml.*qlora"):
        parse(["nowhere.yaml"])


@pytest.mark.parametrize("name", sorted(entry.name for entry in RECIPES.iterdir()))
def test_recipes_are_read_and_say_nothing_that_is_the_default(name):
    file = recipe_file(name.removesuffix(".yaml"))
    recipe = yaml.safe_load(file.read_text())
    complete = [] if "model_name_or_path" in recipe else BASE[:4]
    parsed = parse([str(file), *complete, "--bf16", "false"])
    stage = parse(["--stage", recipe["stage"], *BASE, *(["--use_peft"] if recipe.get("use_peft") else [])])
    for key, value in recipe.items():
        given = next(getattr(part, key) for part in parsed if key in vars(part))
        default = next(getattr(part, key) for part in stage if key in vars(part))
        assert given == pytest.approx(value) if isinstance(value, float) else given == value, key
        assert given != default or key in ("stage", "use_peft"), f"{key} is the default"


@pytest.mark.parametrize(
    ("total", "each", "world", "accumulation", "expected"),
    [(256, 2, 64, 1, 2), (128, 1, 32, 1, 4), (256, 2, 1, 1, 128), (16, 8, 1, 2, 2), (None, 8, 2, 3, 3)],
)
def test_accumulation_keeps_the_global_batch(tmp_path, total, each, world, accumulation, expected):
    _, args, _ = options(tmp_path, per_device_train_batch_size=each, gradient_accumulation_steps=accumulation)
    args.global_batch_size = total
    assert args.world_size == 1
    assert accumulation_steps(args, world_size=world) == expected


def test_a_global_batch_that_does_not_divide_is_refused(tmp_path):
    _, args, _ = options(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, global_batch_size=16)
    with pytest.raises(ValueError, match=r"16 is not a multiple of .* 2 x 3 process\(es\) = 6"):
        accumulation_steps(args, world_size=3)
    with pytest.raises(ValueError, match="Leave gradient_accumulation_steps out: it is derived, and would be 8"):
        accumulation_steps(args)


@pytest.mark.parametrize(("ratio", "pays"), [(0.3, True), (5.0, False)])
def test_precision_follows_the_machine_unless_it_is_given(tmp_path, monkeypatch, processor, ratio, pays):
    processor(ratio)
    words = [*BASE[:4], "--output_dir", str(tmp_path), "--use_cpu"]
    _, args, _ = parse(words)
    assert (args.bf16, args.fp16, args.mixed_precision) == (pays, False, "bf16" if pays else "no")
    assert NormAlignConfig(str(tmp_path), use_cpu=True).bf16 is pays
    for given in (True, False):
        assert (
            parse([*words, "--bf16", str(given)])[1].bf16 is NormAlignConfig(str(tmp_path), bf16=given).bf16 is given
        )
    assert not NormAlignConfig(str(tmp_path), fp16=True).bf16
    for name in ("bf16", "fp16"):  # in a configuration of accelerate
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", name)
        _, args, _ = parse(words)
        assert (args.bf16, args.fp16, args.mixed_precision) == (name == "bf16", name == "fp16", name)


@pytest.mark.parametrize("schedule", WITHOUT_WARMUP)
def test_a_schedule_without_warm_up_has_none(tmp_path, schedule):
    more = {"eval_strategy": "steps", "eval_steps": 5}  # for those that follow the loss on held-out rows
    _, args, _ = options(tmp_path, stage="tune", lr_scheduler_type=schedule, **more)
    assert args.get_warmup_steps(120) == 0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    get_scheduler(schedule, optimizer, num_warmup_steps=4, num_training_steps=120)
    assert optimizer.param_groups[0]["lr"] == 1.0
    with pytest.raises(ValueError, match=f"warmup_steps is 4, but lr_scheduler_type {schedule} has no warm-up"):
        options(tmp_path, stage="tune", lr_scheduler_type=schedule, warmup_steps=4, **more)
    _, args, _ = options(tmp_path, stage="tune", lr_scheduler_type="constant_with_warmup")
    assert args.get_warmup_steps(120) == 4
