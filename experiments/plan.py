# SPDX-License-Identifier: Apache-2.0
"""The plan of an experiment, a YAML file: which models are trained, how, and on which seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from normalign_llava.quickstart.train import stage


@dataclass(frozen=True)
class Variant:
    """How one model is built and trained.

    Attributes:
        arm: One of the paper's arms.
        text, features: Factors on the hidden states of language model and encoder, see [`rescale`].
        enters_at: Of arm `none`: visual tokens are multiplied by a fixed number, so that they enter
            at the start with this norm, in N_text. None leaves them as they are.
        gradient: Of the other arms: factor on the gradient at the normalised tokens, besides the
            arm's own.
        stage1, stage2: Options of `normalign train` that override the plan's; None removes one of
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
    def cell(self) -> str:
        """Its place in the plan, as `--only` names it."""
        return f"{self.group}/{self.name}/{self.seed}"


@dataclass(frozen=True)
class Plan:
    """An experiment.

    Attributes:
        name: Of the file.
        results: Folder of the results.
        stage1, stage2: Options of `normalign train`, with the `recipe` that they override.
        variant: What all variants have in common.
        groups: By name, in the order of the runs: a `question`, `seeds`, and `variants` by name. A
            group may have a `language` and options for `stage1` and `stage2` of its own; `paper`,
            the name of its model in the paper's table 4; and `shape`, that of its parts in
            benchmarks/shapes.py, so that `cost` need not ask the Hub.
        tasks: What the models are evaluated on.
        commands: Whether a run is made by the package's commands, each a process of its own, on all
            GPUs; its report is of the scores. Otherwise visual information is measured while
            training, and reported.
        optional: Variants that are made if they are named alone.
        accelerate: Of a run by commands on several GPUs: `--accelerate_config` of `stage1` and
            `stage2`.
        evaluate, diagnose: Options of these two commands.
        rows: What `cost` must know of the data of `stage1` and `stage2`: how many `rows` in an
            epoch; `images` of each (1), and tokens of `text` beside theirs; those of the `longest`;
            and, on a CPU, how many are `scored`.
        downloads: Gigabytes of what is downloaded, by name.
        decisions: Differences of I that are tested together, by name: `GROUP/VARIANT`s, by turns
            plus and minus.
        differences: Others that are shown.
        bf16: Whether they multiply in bfloat16; None if the machine decides.
        vision, language: Folder of each part, or Hub id if runs are made by commands; None for the
            quickstart's.
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
        """The runs by group and seed: all, or those of some cells, groups or `GROUP/VARIANT`s.

        With `only` empty, optional ones are left out. Raises ValueError if a name is of no run.
        """
        runs = [
            Run(group, name, seed, Variant(**{**self.variant, **(own or {})}))
            for group, content in self.groups.items()
            for seed in content["seeds"]
            for name, own in content["variants"].items()
        ]
        for name in only or ():
            if not any(f"{run.cell}/".startswith(f"{name}/") for run in runs):
                raise ValueError(f"{self.name} has no {name!r}, but, for example, {runs[0].cell}.")
        if only is None:
            return runs
        if not only:
            return [run for run in runs if run.name not in self.optional]
        return [run for run in runs if any(f"{run.cell}/".startswith(f"{name}/") for name in only)]

    def options(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of both stages: the variant's before the group's, the plan's and the recipe's."""
        both = []
        for name in ("stage1", "stage2"):
            base = getattr(self, name) | self.groups[run.group].get(name, {})
            changes = {name: value for name, value in base.items() if name != "recipe"}
            changes |= {"seed": run.seed, **getattr(run.variant, name)}
            merged = stage(base["recipe"], **changes)
            both.append({name: value for name, value in merged.items() if value is not None})
        return both[0], both[1]


def read_plan(file: Path, results: Path | None = None) -> Plan:
    """Reads a plan, whose results are in `results/NAME` in its folder, or in another folder.

    Raises ValueError if the file does not exist, is not YAML, or has something that no plan has.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        results = results or file.resolve().parent / "results" / file.stem
        plan = Plan(**content, name=file.stem, results=results)
        known = {f"{run.group}/{run.name}" for run in plan.runs()}
        for name, terms in (plan.decisions | plan.differences).items():
            if not terms or len(terms) % 2 or not set(terms) <= known:
                raise ValueError(f"{name} must name runs, by turns plus and minus, and has {terms}")
        for run in plan.runs():
            variant = run.variant
            by_command = Variant(variant.arm, stage1=variant.stage1, stage2=variant.stage2)
            if plan.commands and variant != by_command:
                more = "changes more than arm, stage1 and stage2, which no command can"
                raise ValueError(f"{run.cell} {more}")
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no plan of an experiment: {error}.") from error
    return plan
