# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The plan of an experiment: which models are trained, how, and on which seeds."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..assembly.build import ARMS
from ..data.arguments import DataArguments
from ..quickstart.train import stage
from ..train.arguments import ModelArguments, NormAlignConfig


OPTIONS = {each.name for cls in (NormAlignConfig, ModelArguments, DataArguments) for each in fields(cls)}
"""Names of the options of `normalign train`."""

TUNING, UNTUNED = "tuning", "-untuned"
"""The group of the runs that find learning rates, and what is added to the name of a group that does without them."""


@dataclass(frozen=True)
class Variant:
    """How one model is built and trained; options of the stages override the plan's.

    Attributes:
        arm: One of the paper's arms.
        norm: `"layer_norm"` or `"rms_norm"`.
        enters_at: Norm of the visual tokens on entry at the start, in N_text: by the gain, or, without a norm, by the
            projector's last layer. None leaves the arm's own.
        stage1, stage2: Options of `normalign train`.
        gain_storage: `"bfloat16"` rounds gain and bias after every step, as a norm kept in bfloat16 is.
        compensation_power: With arm `"aligned"`, the gradient at the normalised tokens is multiplied by the start of
            the gain to the power of minus this number: 1 is GWC with its factor fixed, 0 none.
        scaled: Factors on the visual tokens with which the trained model is measured again, not trained.
    """

    arm: str = "gwc"
    norm: str = "layer_norm"
    enters_at: float | None = None
    stage1: dict[str, Any] = field(default_factory=dict)
    stage2: dict[str, Any] = field(default_factory=dict)
    gain_storage: str = "float32"
    compensation_power: float | None = None
    scaled: list[float] = field(default_factory=list)

    def __post_init__(self):
        check(self.arm in ARMS, f"arm {self.arm!r} is none of {', '.join(ARMS)}")
        check(self.norm in ("layer_norm", "rms_norm"), f"norm {self.norm!r} is none of layer_norm, rms_norm")
        check(self.gain_storage in ("float32", "bfloat16"), f"gain_storage {self.gain_storage!r} is no such precision")
        check(self.enters_at is None or self.enters_at > 0, f"enters_at is {self.enters_at}; it must be positive")
        check(
            self.compensation_power is None or self.arm == "aligned",
            f"compensation_power is for arm aligned, not {self.arm}, which has a compensation of its own or no gain",
        )
        check(
            self.compensation_power is None or self.enters_at is None,
            "compensation_power is of the gain that N_text gives: leave enters_at out",
        )


@dataclass(frozen=True)
class Group:
    """Variants that answer one question.

    Attributes:
        question: What is asked.
        variants: By name.
        against: The variant that the others are compared with, or for each that is compared its own, one or several.
        seeds: Seeds, if they are not the plan's.
        tuned: Whether each arm's learning rates are those that were best for it on the seed of tuning.
    """

    question: str
    variants: dict[str, Variant]
    against: str | dict[str, str | list[str]]
    seeds: list[int] | None = None
    tuned: bool = False

    def __post_init__(self):
        compared = [self.against] if isinstance(self.against, str) else list(self.against)
        for name in (*compared, *(name for each in compared for name in self.references(each))):
            check(name in self.variants, f"against names {name!r}, which is no variant")

    def references(self, variant: str) -> list[str]:
        """What a variant is compared with."""
        if isinstance(self.against, str):
            return [] if variant == self.against else [self.against]
        named = self.against.get(variant, [])
        return [named] if isinstance(named, str) else named


@dataclass(frozen=True)
class Tuning:
    """Learning rates that are tried with every arm: each of stage 1 with each of stage 2."""

    seed: int
    arms: list[str]
    stage1: list[float]
    stage2: list[float]


@dataclass(frozen=True)
class Run:
    """One model to train.

    Attributes:
        group: Name of its group, or `TUNING`.
        name: Name of the variant.
        seed: Seed of data, initial weights and training.
        variant: The variant, without learning rates that are still to be found.
        tuned: See [`Group`].
    """

    group: str
    name: str
    seed: int
    variant: Variant
    tuned: bool = False

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
        seeds: Seeds of every group that has none of its own.
        stage1, stage2: Options of `normalign train` with a `recipe` that they override.
        tasks: What the models are evaluated on.
        vision, language: Folder or Hub id of each part; None for the quickstart's.
        diagnosed: Held-out images of the diagnosis.
        groups: By name.
        tuning: None if no group is tuned.
        quick: Groups of the reduced grid, which is of the first seed alone, by recipe.
    """

    name: str
    results: Path
    seeds: list[int]
    stage1: dict[str, Any]
    stage2: dict[str, Any]
    tasks: list[str]
    groups: dict[str, Group]
    vision: str | None = None
    language: str | None = None
    diagnosed: int = 32
    image_size: int = 56
    feature_layer: int = -4
    emoji_count: int = 40
    emoji_share: float = 0.08
    tuning: Tuning | None = None
    quick: list[str] = field(default_factory=list)

    def __post_init__(self):
        check(_are_numbers(self.seeds), "seeds must be a list of whole numbers")
        for name in ("stage1", "stage2"):
            check("recipe" in getattr(self, name), f"{name} names no recipe")
        for name, group in self.groups.items():
            check(group.seeds is None or _are_numbers(group.seeds), f"seeds of {name} must be a list of whole numbers")
            for each, variant in group.variants.items():
                unknown = {option for options in self.options(variant, 0) for option in options} - OPTIONS
                check(not unknown, f"{name}.{each}: `normalign train` has no option {', '.join(sorted(unknown))}")
            check(name != TUNING, f"a group is called {TUNING}, which are the runs that find learning rates")
            arms = {variant.arm for variant in group.variants.values()} if group.tuned else set()
            tried = set(self.tuning.arms) if self.tuning else set()
            check(arms <= tried, f"group {name} is tuned, and tuning has no {', '.join(sorted(arms - tried))}")
        for name in self.quick:
            check(name in self.groups, f"quick names {name!r}, which is no group")

    def runs(self, quick: bool = False) -> list[Run]:
        """All runs in the order in which they are made, one group after another; tuning before the first tuned one.

        Args:
            quick: The groups of `quick` with their first seed, without tuning.
        """
        found: list[Run] = []
        for name, group in self.groups.items():
            seeds = group.seeds or self.seeds
            if quick and name not in self.quick:
                continue
            if group.tuned and not quick and self.tuning and not any(each.group == TUNING for each in found):
                found += self._tuning_runs(self.tuning)
            label = f"{name}{UNTUNED}" if group.tuned and quick else name
            for seed in seeds[:1] if quick else seeds:
                found += [
                    Run(label, each, seed, variant, tuned=group.tuned and not quick)
                    for each, variant in group.variants.items()
                ]
        return found

    def result_file(self, run: Run) -> Path:
        """Where the result of a run is kept."""
        return self.results / f"{run.key}.json"

    def options(self, variant: Variant, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of both stages for a variant: of the recipe, the plan and the variant, the last first."""
        both = []
        for base, own in ((self.stage1, variant.stage1), (self.stage2, variant.stage2)):
            changes = {name: value for name, value in base.items() if name != "recipe"}
            both.append(stage(base["recipe"], **{**changes, "seed": seed, **own}))
        return both[0], both[1]

    def _tuning_runs(self, tuning: Tuning) -> list[Run]:
        return [
            Run(
                TUNING,
                f"{arm}-{first:g}-{second:g}",
                tuning.seed,
                Variant(arm, stage1={"learning_rate": first}, stage2={"learning_rate": second}),
            )
            for arm in tuning.arms
            for first in tuning.stage1
            for second in tuning.stage2
        ]


def _are_numbers(seeds: Any) -> bool:
    return isinstance(seeds, list) and bool(seeds) and all(type(seed) is int for seed in seeds)


def check(right: bool, message: str) -> None:
    """Raises ValueError with a message if it is not right."""
    if not right:
        raise ValueError(message)
