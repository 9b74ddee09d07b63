# SPDX-License-Identifier: Apache-2.0
"""The plan of an experiment, a YAML file: which models are trained, how, and on what seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from normalign_llava import recipe_options


STAGES = ("stage1", "stage2")


def row_count(options: dict[str, Any]) -> int:
    """Returns how many rows a stage is trained on."""
    return options["max_steps"] * options["global_batch_size"]


@dataclass(frozen=True)
class Variant:
    """How one model is built and trained.

    Attributes:
        arm: One of the paper's arms.
        text, features: Factors on the hidden states of language model and encoder, see [`rescale`].
        enters_at: For arm `none` only. Visual tokens are multiplied by a fixed number, so that they
            enter at the start with this norm, in N_text. None leaves them as they are.
        gradient: For the other arms only. The factor on the gradient at the normalised tokens,
            besides the arm's own.
        stage1, stage2: Options of `normalign train` that override the plan's. None removes one of
            the recipe's.
    """

    arm: str = "gwc"
    text: float = 1.0
    features: float = 1.0
    enters_at: float | None = None
    gradient: float = 1.0
    stage1: dict[str, Any] = field(default_factory=dict)
    stage2: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One model to train: the variant `name` of `group`, on `seed`."""

    group: str
    name: str
    seed: int
    variant: Variant

    @property
    def key(self) -> str:
        """The name of its files."""
        return f"{self.group}-{self.name}-seed{self.seed}"

    @property
    def name_in_plan(self) -> str:
        """Its group and variant, as decisions name it."""
        return f"{self.group}/{self.name}"

    @property
    def cell(self) -> str:
        """Its place in the plan, as `--only` names it."""
        return f"{self.name_in_plan}/{self.seed}"

    def is_in(self, selection: Sequence[str]) -> bool:
        """Returns whether it is one of some cells, groups or `GROUP/VARIANT`s."""
        prefixes = tuple(f"{name}/" for name in selection)
        return f"{self.cell}/".startswith(prefixes)


@dataclass(frozen=True)
class Plan:
    """An experiment.

    Attributes:
        name: The name of the file.
        results: Folder of the results.
        stage1, stage2: Options of `normalign train`, with the `recipe` that they override.
        variant: What all variants have in common.
        groups: By name, in the order of the runs: a `question`, `seeds`, and `variants` by name. A
            group may have a `language` and options for `stage1` and `stage2` of its own; `paper`,
            the name of its model in the paper's table 4, and `shape`, the name of its parts' shape
            in benchmarks/shapes.py, so that `cost` need not ask the Hub.
        tasks: What the models are evaluated on.
        commands: Whether a run is made by the package's commands, each a process of its own, on all
            GPUs. Its report has the scores. Otherwise visual information is measured while
            training, and reported.
        optional: Variants that are made only if they are named.
        accelerate: `--accelerate_config` of `stage1` and `stage2`, for a run by commands on several
            GPUs.
        evaluate, diagnose: Options of these two commands.
        rows: What `cost` must know of the data of `stage1` and `stage2`: how many `rows` an epoch
            has, `images` in each (1), tokens of `text` beside theirs, the tokens of the `longest`
            row, and, on a CPU, how many tokens are `scored`.
        downloads: Gigabytes of what is downloaded, by name.
        decisions: Differences of I that are tested together, by name: `GROUP/VARIANT`s, by turns
            plus and minus.
        differences: Other differences that are shown.
        bf16: Whether they multiply in bfloat16; None if the machine decides.
        vision, language: Folder of each part, or Hub id if runs are made by commands. None stands
            for the quickstart's.
        diagnosed: Held-out images of the diagnosis.
        feature_layer: The encoder's hidden state that the projector reads.
    """

    name: str
    results: Path
    stage1: dict[str, Any]
    stage2: dict[str, Any]
    groups: dict[str, dict[str, Any]]
    tasks: list[str]
    decisions: dict[str, list[str]] = field(default_factory=dict)
    differences: dict[str, list[str]] = field(default_factory=dict)
    variant: dict[str, Any] = field(default_factory=dict)
    bf16: bool | None = False
    vision: str | None = None
    language: str | None = None
    diagnosed: int = 32
    feature_layer: int = -4
    commands: bool = False
    optional: list[str] = field(default_factory=list)
    accelerate: dict[str, str] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    diagnose: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    downloads: dict[str, float] = field(default_factory=dict)

    def runs(self, only: Sequence[str] | None = None) -> list[Run]:
        """Returns the runs by group and seed.

        Args:
            only: Cells, groups or `GROUP/VARIANT`s to return. If it is empty, optional variants
                are left out. By default all runs are returned.

        Raises:
            ValueError: A name in `only` belongs to no run.
        """
        runs = []
        for group_name, group in self.groups.items():
            for seed in group["seeds"]:
                for name, changes in group["variants"].items():
                    variant = Variant(**{**self.variant, **(changes or {})})
                    runs.append(Run(group_name, name, seed, variant))
        if only is None:
            return runs
        if not only:
            return [run for run in runs if run.name not in self.optional]
        for name in only:
            if not any(run.is_in([name]) for run in runs):
                raise ValueError(f"{self.name} has no {name!r}, but, for example, {runs[0].cell}.")
        return [run for run in runs if run.is_in(only)]

    def options(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the options of both stages.

        The variant's take precedence over the group's, these over the plan's, and these over the
        recipe's.
        """
        return self._stage_options(run, "stage1"), self._stage_options(run, "stage2")

    def _stage_options(self, run: Run, stage: str) -> dict[str, Any]:
        changes = getattr(self, stage) | self.groups[run.group].get(stage, {})
        recipe = changes.pop("recipe")
        changes["seed"] = run.seed
        changes |= getattr(run.variant, stage)
        merged = recipe_options(recipe, **changes)
        return {name: value for name, value in merged.items() if value is not None}


def read_plan(file: Path, results: Path | None = None) -> Plan:
    """Reads a plan, whose results are in `results/NAME` in its folder, or in another folder.

    Raises:
        ValueError: The file does not exist, is not YAML, or has something that no plan has.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        results = results or file.resolve().parent / "results" / file.stem
        plan = Plan(**content, name=file.stem, results=results)
        _check_terms(plan)
        if plan.commands:
            _check_variants(plan)
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is not a plan of an experiment: {error}.") from error
    return plan


def _check_terms(plan: Plan) -> None:
    """Raises ValueError if a difference is not of pairs of planned runs."""
    known_names = {run.name_in_plan for run in plan.runs()}
    for name, terms in (plan.decisions | plan.differences).items():
        if not terms or len(terms) % 2 or not set(terms) <= known_names:
            raise ValueError(f"{name} must name runs, by turns plus and minus, and has {terms}")


def _check_variants(plan: Plan) -> None:
    """Raises ValueError if a variant needs more than the options of commands."""
    for run in plan.runs():
        variant = run.variant
        by_command = Variant(variant.arm, stage1=variant.stage1, stage2=variant.stage2)
        if variant != by_command:
            raise ValueError(
                f"{run.cell} changes more than arm, stage1 and stage2; no command can do that"
            )
