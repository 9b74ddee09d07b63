# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The plan of an experiment, a YAML file: which models are trained, how, and on which seeds."""

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
        enters_at: Of arm `none`: visual tokens are multiplied by a fixed number, so that they enter at the start with
            this norm, in N_text. None leaves them as they are.
        gradient: Of the other arms: factor on the gradient at the normalised tokens, besides the arm's own.
        stage1, stage2: Options of `normalign train` that override the plan's; None removes one of the recipe's.
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
        """Its name among all, also that of its file."""
        return f"{self.group}-{self.name}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """An experiment.

    Attributes:
        name: Of the file.
        results: Folder of the results.
        stage1, stage2: Options of `normalign train`, with the `recipe` that they override.
        variant: What all variants have in common.
        groups: By name, in the order of the runs: a `question`, `seeds`, and `variants` by name.
        tasks: What the models are evaluated on.
        decisions: Differences of I that are tested together, by name: `GROUP/VARIANT`s, by turns plus and minus.
        differences: Others that are shown.
        bf16: Whether they multiply in bfloat16.
        vision, language: Folder of each part; None for the quickstart's.
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
    bf16: bool = False
    vision: str | None = None
    language: str | None = None
    diagnosed: int = 32
    feature_layer: int = -4

    def runs(self) -> list[Run]:
        """All runs, group by group, seed by seed."""
        return [
            Run(name, each, seed, Variant(**{**self.variant, **(given or {})}))
            for name, group in self.groups.items()
            for seed in group["seeds"]
            for each, given in group["variants"].items()
        ]

    def options(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of both stages: of the recipe, the plan and the variant, the last first."""
        both = []
        for base, own in ((self.stage1, run.variant.stage1), (self.stage2, run.variant.stage2)):
            changes = {name: value for name, value in base.items() if name != "recipe"}
            merged = stage(base["recipe"], **{**changes, "seed": run.seed, **own})
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
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is no plan of an experiment: {error}.") from error
    return plan
