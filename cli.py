# SPDX-License-Identifier: Apache-2.0
"""The command line, `normalign`. Commands import when they run, so that `--help` is quick."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, BadParameter, Context, Exit, Option, Typer, echo

from . import __version__
from .console import Console, hide_notices
from .errors import exit_on_error


FEWER = "Use a smaller --batch-size, or --load-in-4bit."
AGAIN = "Run the same command again: it resumes where it stopped."
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Option(help="Dtype of the weights. auto keeps the checkpoint's. The norm is float32."),
]
In4BitOption = Annotated[bool, Option("--load-in-4bit", help="Quantize the language model.")]
ImageFolderOption = Annotated[str | None, Option(help="Folder or .zip where image paths start.")]
ColumnsOption = Annotated[str | None, Option(help="Columns, such as image=path,answer=caption.")]
TrustOption = Annotated[bool, Option("--trust-remote-code", help="Run a checkpoint's own code.")]
NewFolderOption = Annotated[Path, Option(help="Folder to create.")]
ModelArgument = Annotated[str, Argument(help="A model's folder or Hub id, or an adapter's folder.")]
BaseOption = Annotated[str | None, Option(help="Base of an adapter, if it was moved.")]
BaseQuantizationOption = Annotated[
    Literal["none", "nf4", "nf4-double", "int8"] | None,
    Option(help="How an adapter's base was quantized.", show_default="as in training.json"),
]
QuestionsOption = Annotated[str | None, Option(help="Your questions: file, folder or Hub id.")]
if not sys.stderr.isatty():  # in a file, a bar is a line a minute; tqdm reads this at import
    for name in ("TQDM_MININTERVAL", "TQDM_MAXINTERVAL"):
        os.environ.setdefault(name, "60")


def _number(help_text: str, least: int = 1) -> Any:
    """Returns the option of a whole number."""
    return Option(metavar="N", min=least, help=help_text)


BatchOption = Annotated[int, _number("Samples per batch.")]
app = Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, Option("--version", help="Show the version.")] = False) -> None:
    """Build, train, diagnose and publish LLaVA models whose visual tokens have the norm of text."""
    hide_notices()
    if version:
        echo(f"normalign-llava {__version__}")
        raise Exit()


def _say(*lines: object) -> None:
    """Prints lines as they are: a terminal does not wrap paths and commands that are long."""
    Console().print(*lines, sep="\n", soft_wrap=True)


def _parse_layers(text: str) -> int | list[int]:
    """Returns the numbers of some layers, or one number if there is only one.

    Raises:
        ValueError: The text is not a list of whole numbers, separated by commas.
    """
    layers = [int(part) for part in text.split(",")]
    return layers[0] if len(layers) == 1 else layers


def _split_names(options: list[str] | None) -> list[str]:
    """Returns the names in options that may be repeated, and may name several by commas."""
    return list(filter(None, ",".join(options or ()).split(",")))


@app.command()
def build(
    *,
    vision: Annotated[str | None, Option(help="Vision encoder: folder or Hub id.")] = None,
    language: Annotated[str | None, Option(help="Causal language model: folder or Hub id.")] = None,
    from_llava: Annotated[str | None, Option(help="LLaVA checkpoint to add the norm to.")] = None,
    output: NewFolderOption,
    arm: Annotated[
        Literal["none", "unit", "aligned", "gwc"],
        Option(help="none: no norm. unit: gain 1. aligned: gain of text. gwc: compensated too."),
    ] = "gwc",
    norm: Annotated[Literal["layer_norm", "rms_norm"], Option(help="Kind of norm.")] = "layer_norm",
    feature_layer: Annotated[
        Any,
        Option(
            parser=_parse_layers,
            metavar="N,...",
            show_default="-2",
            help="Hidden states of the encoder to read. Write several with commas: -2,-5.",
        ),
    ] = None,
    select_strategy: Annotated[
        Literal["default", "full"] | None,
        Option(help="default leaves out class token and registers. full does not."),
    ] = None,
    chat_template: Annotated[
        Path | None, Option(help="Jinja file of the chat template.", exists=True)
    ] = None,
    dtype: DtypeOption = "auto",
    seed: Annotated[int | None, Option(help="Seed of the projector's random weights.")] = None,
) -> None:
    """Join a vision encoder and a language model, or add the norm to a LLaVA checkpoint."""
    joined = (vision, language, feature_layer, select_strategy, chat_template, seed)
    if from_llava and any(option is not None for option in joined):
        raise BadParameter(
            "--from-llava takes all parts from that checkpoint; leave out --vision, --language, "
            "--feature-layer, --select-strategy, --chat-template, --seed."
        )
    if not from_llava and not (vision and language):
        raise BadParameter("Give --vision and --language, or --from-llava.")
    with exit_on_error():
        from .assembly.build import build_checkpoint, retrofit_checkpoint
        from .train.command import next_command

        if from_llava:
            report = retrofit_checkpoint(from_llava, output, arm=arm, norm=norm, dtype=dtype)
        else:
            layer = -2 if feature_layer is None else feature_layer
            report = build_checkpoint(
                str(vision),
                str(language),
                output,
                arm=arm,
                norm=norm,
                dtype=dtype,
                seed=seed,
                feature_layer=layer,
                select_strategy=select_strategy,
                chat_template=chat_template,
            )
    Console().print(report)
    if report.generation_marks:
        _say(f"Next: {next_command(output, 'build', adapters=False)}")


@app.command()
def gain(
    model: Annotated[str, Argument(help="Folder or Hub id.")],
    top: Annotated[int, _number("Tokens of largest norm to list.", least=0)] = 10,
    revision: Annotated[str | None, Option(help="Branch, tag or commit on the Hub.")] = None,
    critical: Annotated[
        bool, Option("--critical", help="Run the model, and predict the norm where rotation drops.")
    ] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure N_text and the gain of a model. Without --critical, it fetches only embeddings."""
    with exit_on_error():
        from .assembly.gain import embedding_statistics
        from .checkpoint.files import require_model

        _, revision = require_model(model, revision)
        tables = embedding_statistics(model, top=top, revision=revision).tables()
        if critical:
            from .diagnose.critical import measure_model_updates

            updates = measure_model_updates(model, revision, trust_remote_code=trust_remote_code)
            tables = [*tables, updates.table(model)]
    Console().print(*tables, sep="\n")


@app.command(
    context_settings=dict(allow_extra_args=True, ignore_unknown_options=True, help_option_names=[]),
    add_help_option=False,
)
def train(
    context: Context,
    accelerate_config: Annotated[str | None, Option("--accelerate_config")] = None,
    num_processes: Annotated[int | None, Option("--num_processes", min=1)] = None,
) -> None:
    """Train a checkpoint: `normalign train RECIPE.yaml [--any_option value]`.

    RECIPE is a file or the name of one in the package. `--help` lists the options that most runs
    need. With --accelerate_config (ddp, fsdp2, zero2, zero3 or a file) `accelerate launch` starts
    the run, in --num_processes processes or as many as the file says.
    """
    from .train.command import check_command, launch, read_command, show_help

    if not context.args or {"-h", "--help"} & set(context.args):
        return show_help()
    full = "The same command with --dry_run says what fits."
    with exit_on_error(stopped="" if accelerate_config else "Nothing was trained.", full=full):
        if "--help-all" in context.args:
            from .train.options import option_parser

            return option_parser().print_help()
        words, recipe = read_command(context.args)
        check_command(words, recipe)
        if (num_processes or 1) > 1 and not accelerate_config:
            raise ValueError("--num_processes needs --accelerate_config, such as ddp or a file.")
        if accelerate_config:
            launch(accelerate_config, num_processes, context.args)
        else:
            from .train.run import main

            main(words, recipe)


@app.command()
def data(
    source: Annotated[str, Argument(metavar="DATA", help="File, folder or Hub id (DATA:SPLIT).")],
    image_folder: ImageFolderOption = None,
    columns: ColumnsOption = None,
    model: Annotated[str | None, Option(help="Checkpoint, to count and show tokens.")] = None,
    check_images: Annotated[
        bool, Option("--check-images", help="Decode every image, not a sample.")
    ] = False,
    filters: Annotated[
        str | None, Option(help="Rows to read, such as relevance_min>=4,language=en.")
    ] = None,
    examples: Annotated[int | None, _number("Show N rows. What is learned is marked.")] = None,
    row: Annotated[
        list[int] | None, _number("Show row N of a file, counted from 0.", least=0)
    ] = None,
) -> None:
    """Check data before training: count rows by form, images and tokens, and name every fault."""
    with exit_on_error():
        from .data.sources.arguments import DataSource
        from .train.data_check import check_data

        named = DataSource.named(
            source, image_folder=image_folder, columns=columns, filters=filters
        )
        check = check_data(named, model, check_images, examples=examples, rows=row or ())
    console = Console()
    console.print(check.table(source))
    if check.examples:
        seen = "as the model sees them" if model else "by their turns"
        console.print(f"\nRows {seen}; what is learned is marked:\n")
        console.print(check.rendered(console.is_terminal), soft_wrap=True)
    if check.faults:
        Console(stderr=True).print("", *check.faults, sep="\n", soft_wrap=True)
        raise Exit(int(check.would_stop))


@app.command()
def merge(
    adapter: Annotated[str, Argument(help="Folder of an adapter that `normalign train` wrote.")],
    output: NewFolderOption,
    base: BaseOption = None,
    base_quantization: BaseQuantizationOption = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Merge a LoRA adapter into its base. The new checkpoint needs no PEFT."""
    with exit_on_error(extra="qlora"):
        from .assembly.merge import merge_adapter
        from .hub_cards.card.write import refresh_card
        from .train.command import next_command

        report = merge_adapter(
            adapter, output, base=base, base_quantization=base_quantization, dtype=dtype
        )
        refresh_card(output)
    Console().print(report)
    _say(f"Next: {next_command(output, None, adapters=False)}")


@app.command()
def export(
    model: ModelArgument,
    output: NewFolderOption,
    name: Annotated[
        str | None, Option(help="Name of the files.", show_default="the model's name")
    ] = None,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], Option(help="Dtype of the vision encoder.")
    ] = "float16",
    llama_cpp: Annotated[
        Path | None, Option(help="llama.cpp's sources, to write the language model too.")
    ] = None,
    text_type: Annotated[
        Literal["f16", "bf16", "f32", "q8_0"], Option(help="Dtype of the language model.")
    ] = "f16",
    base: BaseOption = None,
    base_quantization: BaseQuantizationOption = None,
) -> None:
    """Write GGUF files for llama.cpp, Ollama and LM Studio. An adapter is merged first."""
    with exit_on_error(extra="export"):
        from .export.run import export_gguf

        report = export_gguf(
            model,
            output,
            name=name,
            dtype=dtype,
            llama_cpp=llama_cpp,
            text_type=text_type,
            base=base,
            base_quantization=base_quantization,
        )
    Console().print(report)
    Console().print("Next:", *report.next_commands, sep="\n  ", soft_wrap=True)


@app.command()
def evaluate(
    model: ModelArgument,
    suite: Annotated[
        list[str] | None, Option(help="paper, vision, text, offline, or several, with commas.")
    ] = None,
    tasks: Annotated[list[str] | None, Option(help="Tasks of the harness, with commas.")] = None,
    include_path: Annotated[Path | None, Option(help="Folder of task files.", exists=True)] = None,
    data: QuestionsOption = None,
    image_folder: ImageFolderOption = None,
    columns: ColumnsOption = None,
    limit: Annotated[int | None, _number("Use the first N rows.")] = None,
    output: Annotated[
        Path | None, Option(help="Folder of results.", show_default="MODEL or evaluations/HUB_ID")
    ] = None,
    batch_size: BatchOption = 1,
    dtype: DtypeOption = "auto",
    load_in_4bit: In4BitOption = False,
    trust_remote_code: TrustOption = False,
    base: BaseOption = None,
    base_quantization: BaseQuantizationOption = None,
) -> None:
    """Evaluate a model with lm-evaluation-harness. Finished tasks are skipped the next time."""
    with exit_on_error(extra="evaluate", stopped=AGAIN, full=FEWER):
        from .evaluation.run import evaluate as run

        evaluated = run(
            model,
            suites=_split_names(suite),
            tasks=_split_names(tasks),
            include_path=include_path,
            data=data,
            output=output,
            image_folder=image_folder,
            columns=columns,
            limit=limit,
            batch_size=batch_size,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
            trust_remote_code=trust_remote_code,
            base=base,
            base_quantization=base_quantization,
        )
    Console().print(evaluated)
    _say(f"Results: {evaluated.file if evaluated.results else 'none'}.")
    raise Exit(int(bool(evaluated.failed)))


@app.command()
def ask(
    model: ModelArgument,
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[IMAGE]... [QUESTION]",
            help="Image files, or a folder of them, then the question in quotes.",
        ),
    ] = None,
    system: Annotated[str | None, Option(help="System turn of the conversation.")] = None,
    data: QuestionsOption = None,
    image_folder: ImageFolderOption = None,
    columns: ColumnsOption = None,
    output: Annotated[
        Path | None, Option(help="File of answers, as lines of JSON. A second run continues it.")
    ] = None,
    max_new_tokens: Annotated[int, _number("Tokens in an answer.")] = 128,
    batch_size: BatchOption = 1,
    dtype: DtypeOption = "auto",
    load_in_4bit: In4BitOption = False,
    trust_remote_code: TrustOption = False,
    base: BaseOption = None,
    base_quantization: BaseQuantizationOption = None,
) -> None:
    """Ask a model about images. Without a question, a conversation starts."""
    stopped = AGAIN if output else ""
    with exit_on_error(extra="qlora", stopped=stopped, full=FEWER):
        from .evaluation.ask import AskOptions, ask as run

        options = AskOptions(
            system,
            max_new_tokens,
            batch_size,
            output,
            data=data,
            image_folder=image_folder,
            columns=columns,
            trust_remote_code=trust_remote_code,
            base=base,
            base_quantization=base_quantization,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
        )
        run(model, words or [], options)


@app.command()
def compare(
    models: Annotated[list[str], Argument(help="FOLDER, or NAME=FOLDER,... for several seeds.")],
    output: Annotated[Path, Option(help="Folder for comparison.json.")] = Path("comparison"),
) -> None:
    """Compare evaluated models with the first one, on the same questions, with intervals."""
    with exit_on_error(extra="evaluate"):
        from .checkpoint.files import write_json
        from .evaluation.compare import compare_models, read_scores

        comparison = compare_models([read_scores(model) for model in models])
        write_json(output / "comparison.json", [asdict(row) for row in comparison.differences])
    Console().print(comparison)
    _say(*comparison.left_out(), f"Written to {output}.")


@app.command()
def diagnose(
    model: ModelArgument,
    against: Annotated[str | None, Option(help="Baseline model, on the same images.")] = None,
    data: Annotated[
        str | None, Option(help="Images and questions.", show_default="held-out rows of quickstart")
    ] = None,
    image_folder: ImageFolderOption = None,
    columns: ColumnsOption = None,
    samples: Annotated[int, _number("Number of questions.")] = 64,
    output: Annotated[
        Path | None,
        Option(help="Report folder.", show_default="MODEL/diagnostics or diagnostics/HUB_ID"),
    ] = None,
    batch_size: BatchOption = 8,
    seed: Annotated[int, Option(help="Seed that the questions are drawn with.")] = 0,
    dtype: DtypeOption = "auto",
    load_in_4bit: In4BitOption = False,
    trust_remote_code: TrustOption = False,
    base: BaseOption = None,
    base_quantization: BaseQuantizationOption = None,
) -> None:
    """Report norms, rotation and attention of any vision-language model, as the paper does."""
    with exit_on_error(extra="qlora", stopped="Nothing was written.", full=FEWER):
        from .diagnose.run import diagnose as measure

        diagnosis = measure(
            model,
            against=against,
            data=data,
            image_folder=image_folder,
            columns=columns,
            samples=samples,
            output=output,
            batch_size=batch_size,
            seed=seed,
            dtype=dtype,
            load_in_4bit=load_in_4bit,
            trust_remote_code=trust_remote_code,
            base=base,
            base_quantization=base_quantization,
        )
    _say(*diagnosis.summary())


@app.command()
def quickstart(
    output: Annotated[Path, Option(help="Folder for everything.")] = Path("outputs/quickstart"),
    full_baseline: Annotated[
        bool, Option("--full-baseline", help="Also train a baseline without the norm.")
    ] = False,
    seed: Annotated[int, Option(help="Seed of data, initial weights and training.")] = 0,
) -> None:
    """Fetch parts and data, then build, train and measure a small model: minutes on a CPU."""
    with exit_on_error(extra="quickstart", stopped=AGAIN):
        from .quickstart.run import Settings, run_quickstart

        run_quickstart(output, Settings.seeded(seed), full_baseline=full_baseline)


@app.command()
def card(
    checkpoint: Annotated[Path, Argument(help="Checkpoint folder.")],
    repo_id: Annotated[str | None, Option(help="Repository in the card's code: user/name.")] = None,
    replace: Annotated[bool, Option("--replace", help="Overwrite your own README.md.")] = False,
) -> None:
    """Write the model card, README.md, from the checkpoint's records. It keeps text by hand."""
    with exit_on_error():
        from .hub_cards.card.write import write_card

        written = write_card(checkpoint, repo_id=repo_id, replace=replace)
    warnings = [f"Warning: {warning}" for warning in written.warnings]
    _say(*warnings, f"Card: {checkpoint / 'README.md'}")


@app.command()
def publish(
    checkpoint: Annotated[Path, Argument(help="Folder of a checkpoint, or of an adapter.")],
    repo_id: Annotated[str, Option(help="Repository: user/name or organisation/name.")],
    private: Annotated[
        bool | None, Option("--private/--public", help="Visibility of a new repository.")
    ] = None,
    revision: Annotated[str, Option(help="Branch. It is made if it does not exist.")] = "main",
    create_pr: Annotated[bool, Option("--create-pr", help="Open a pull request.")] = False,
    space: Annotated[bool, Option("--space", help="Add a demo, the Space REPO_ID-demo.")] = False,
    adapter: Annotated[bool, Option("--adapter", help="Publish an adapter unmerged.")] = False,
    gguf: Annotated[bool, Option("--gguf", help="Send the folder's GGUF files too.")] = False,
    base: BaseOption = None,
    base_quantization: BaseQuantizationOption = None,
    replace_card: Annotated[bool, Option("--replace-card", help="Overwrite your card.")] = False,
    replace_files: Annotated[
        bool, Option("--replace-files", help="Overwrite or remove files of others on the Hub.")
    ] = False,
    no_verify: Annotated[
        bool, Option("--no-verify", help="Do not load the model before and after.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only check, and show what would be sent.")
    ] = False,
) -> None:
    """Check a checkpoint, send it to the Hub in one commit, and load it in a clean process."""
    stopped = "The branch is unchanged or complete. Run it again: it sends the rest, and verifies."
    with exit_on_error(stopped=stopped):
        from .hub_cards.push.publish import publish as send, summary

        publication = send(
            checkpoint,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            space=space,
            as_adapter=adapter,
            gguf=gguf,
            base=base,
            base_quantization=base_quantization,
            replace_card=replace_card,
            dry_run=dry_run,
            check_loading=not no_verify,
            replace_files=replace_files,
            notify=_say,
        )
    _say(summary(publication))


@app.command()
def demo(
    checkpoint: Annotated[str, Argument(help="Folder or Hub id.")],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, Option(help="Port.", show_default="first free from 7860")] = None,
) -> None:
    """Ask a checkpoint about images in the browser, and see where it looks."""
    with exit_on_error(extra="demo"):
        from .hub_cards.demo import run_demo

        run_demo(checkpoint, host=host, port=port)
