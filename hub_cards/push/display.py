# Copyright 2026 The NormAlign-LLaVA authors
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What `normalign publish` prints at its end."""

from rich.table import Table

from .publish import Publication


SNIPPET = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

commit = "{commit}"
processor = AutoProcessor.from_pretrained("{repo_id}", revision=commit, code_revision=commit, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(
    "{repo_id}", revision=commit, code_revision=commit, dtype="auto", trust_remote_code=True
)
"""


def unsent_tables(done: Publication, repo_id: str) -> list[Table]:
    """Of a dry run: the files that would be sent, and those that would not, with the reason."""
    files = Table("file", title=f"Would be sent to {repo_id}", title_justify="left")
    files.add_column("bytes", justify="right")
    for path, content in done.source.files.items():
        files.add_row(path, f"{len(content) if isinstance(content, bytes) else content.stat().st_size:,}")
    excluded = Table("file", "why", title="Stays here", title_justify="left")
    for path, reason in done.source.excluded.items():
        excluded.add_row(path, reason)
    return [files, *([excluded] if done.source.excluded else [])]


def summary(done: Publication) -> str:
    """What was sent and where to, and how to load exactly that."""
    pushed = done.pushed
    assert pushed is not None
    repository, commit = pushed.repository, pushed.commit
    sent = f"{len(done.source.files)} files in one commit" if pushed.changed else "nothing changed"
    lines = [f"Sent to {repository.repo_id}: {sent}; removed: {', '.join(pushed.deleted) or 'nothing'}."]
    page = repository.url if repository.branch == "main" else f"{repository.url}/tree/{repository.branch}"
    lines += [f"Commit: {commit}"]
    lines += [f"Pull request: {pushed.pull_request}"] if pushed.pull_request else [f"Repository: {page}"]
    lines += [f"Space: {done.space}"] if done.space else []
    if done.is_adapter:
        return "\n".join([*lines, f'Load exactly this as its card says, with revision = "{commit}".'])
    return "\n".join([*lines, "Load exactly this:", "", SNIPPET.format(repo_id=repository.repo_id, commit=commit)])
