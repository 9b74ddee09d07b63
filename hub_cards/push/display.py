# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What `normalign publish` prints at its end."""

from rich.table import Table

from .publish import Publication


def unsent_tables(done: Publication, repo_id: str) -> list[Table]:
    """Of a dry run: the files that would be sent, and those that would not, with the reason."""
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
    return [files, *([left] if done.left else [])]


def summary(done: Publication, repo_id: str) -> str:
    """What was sent and where to, and how to load exactly that."""
    what = f"{len(done.sent_files)} of {len(done.files)} files, {done.sent_bytes / 1e6:.1f} MB"
    sent = what if done.changed else "nothing"
    lines = [f"Sent to {repo_id}: {sent}; removed: {', '.join(done.deleted) or 'nothing'}.", f"Commit: {done.commit}"]
    page = done.url if done.branch == "main" else f"{done.url}/tree/{done.branch}"
    lines += [f"Pull request: {done.pull_request}"] if done.pull_request else [f"Repository: {page}"]
    lines += [f"Space: {done.space}"] if done.space else []
    return "\n".join([*lines, "Load exactly this:", "", done.snippet])
