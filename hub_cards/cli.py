# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The commands that show a checkpoint to others: `normalign card`, `publish`, `demo` and `serve`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from ..errors import Console, errors_for_people


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = "float32, bfloat16 or float16"

app = typer.Typer()


@app.command()
def card(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    repo_id: Annotated[str | None, typer.Option(help="Repository that the card's code loads from: user/name.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite a README.md that this command did not write.")
    ] = False,
) -> None:
    """Write the model card, README.md, from the checkpoint's records; text between its marks is kept."""
    with errors_for_people():
        from ..checkpoint import check_folder, check_repo_id

        check_folder(checkpoint)
        if repo_id is not None:
            check_repo_id(repo_id)

        from .card import write_card

        written = write_card(checkpoint, repo_id=repo_id, replace=replace)
    console = Console()
    for warning in written.warnings:
        console.print(f"Warning: {warning}", soft_wrap=True)
    console.print(f"Card: {checkpoint / 'README.md'}", soft_wrap=True)


@app.command()
def publish(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint, or of an adapter.")],
    repo_id: Annotated[str, typer.Option(help="Repository: user/name or organisation/name.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository.", show_default="your account's")
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch; made if it does not exist.")] = "main",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    space: Annotated[bool, typer.Option("--space", help="Publish a demo as well: the Space REPO_ID-demo.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Publish an adapter as it is, without merging it.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="The adapter's base, where it has moved: folder or Hub id.")] = None,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Overwrite a card that `normalign card` did not write.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not load the model, which may be too large for this machine.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the folder, and show what would be sent. Asks the Hub nothing.")
    ] = False,
) -> None:
    """Check a checkpoint, send it to the Hub in one commit, and load it from there in a clean process."""
    console = Console()
    with errors_for_people():
        from ..checkpoint import check_folder, check_repo_id

        check_repo_id(repo_id)
        check_folder(checkpoint)

        from huggingface_hub.utils import disable_progress_bars

        from .publish import publish as send

        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            done = send(
                checkpoint, repo_id, private=private, revision=revision, create_pr=create_pr, space=space,
                as_adapter=adapter, base=base, replace_card=replace_card, dry_run=dry_run,
                check_loading=not no_verify, say=lambda text: console.print(text, soft_wrap=True),
            )  # fmt: skip
        except KeyboardInterrupt:
            Console(stderr=True).print(
                "Stopped. The branch is as it was, or holds all of it. Run it again: it sends the rest, and checks."
            )
            raise typer.Exit(130) from None
    if dry_run:
        files = Table(title=f"Would be sent to {repo_id}", title_justify="left")
        files.add_column("file")
        files.add_column("bytes", justify="right")
        for path, size in done.files.items():
            files.add_row(path, f"{size:,}")
        files.add_section()
        files.add_row(f"{len(done.files)} files", f"{sum(done.files.values()):,}")
        left = Table(title="Stays here", title_justify="left")
        left.add_column("file")
        left.add_column("why")
        for path, reason in done.left.items():
            left.add_row(path, reason)
        console.print(files, *([left] if done.left else []), sep="\n")
        return
    what = (
        f"{len(done.sent_files)} of {len(done.files)} files, {done.sent_bytes / 1e6:.1f} MB"
        if done.changed
        else "nothing"
    )
    lines = [f"Sent to {repo_id}: {what}; removed: {', '.join(done.deleted) or 'nothing'}.", f"Commit: {done.commit}"]
    page = done.url if done.branch == "main" else f"{done.url}/tree/{done.branch}"
    lines += [f"Pull request: {done.pull_request}"] if done.pull_request else [f"Repository: {page}"]
    lines += [f"Space: {done.space}"] if done.space else []
    for line in [*lines, "Load exactly this:", "", done.snippet]:
        console.print(line, soft_wrap=True)


@app.command()
def demo(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Port.", show_default="the first that is free from 7860")] = None,
) -> None:
    """Ask a checkpoint about images in the browser, and see where it looks."""
    with errors_for_people(extra="demo"):
        from .demo import run_demo

        run_demo(checkpoint, host=host, port=port)


@app.command()
def serve(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port.")] = 8000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[Dtype, typer.Option(metavar="DTYPE", help=f"auto (the checkpoint's), {DTYPES}.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    quantization: Annotated[
        Literal["bnb-4bit", "bnb-8bit"] | None,
        typer.Option(metavar="KIND", help="bnb-4bit or bnb-8bit, with bitsandbytes."),
    ] = None,
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Fetch images from http addresses that requests name.")
    ] = False,
) -> None:
    """Answer OpenAI's chat completions from a checkpoint, images included."""
    with errors_for_people(extra="serve"):
        from ..checkpoint import find_checkpoint

        find_checkpoint(checkpoint, revision, remedy="Check the path. A revision is given with --revision.")

        from ..serve import serve as run

        run(
            checkpoint, host=host, port=port, revision=revision, dtype=dtype, device=device, quantization=quantization,
            allow_urls=allow_urls,
        )  # fmt: skip
