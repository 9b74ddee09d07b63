# SPDX-License-Identifier: Apache-2.0
"""What the hub of the tests stores: repositories, whose commits are snapshots of paths and blobs."""

import hashlib
from dataclasses import dataclass


LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".parquet", ".arrow", ".zip")
LFS_SIZE = 10 * 2**20


class Refusal(Exception):
    """What the hub does not do: an HTTP status, the Hub's error code, a message, and further headers."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}


@dataclass(frozen=True)
class Commit:
    """A snapshot of the whole repository.

    Attributes:
        oid: 40 hexadecimal digits.
        parent: The commit before it; None for the first.
        files: Path -> blob id, as the Hub has it: git's SHA-1 for a regular file, the SHA-256 of the content in LFS.
    """

    oid: str
    parent: str | None
    files: dict[str, str]


class Repository:
    """A repository of any kind.

    Attributes:
        address: Its page below the Hub's own: `user/name`, `datasets/user/name`, `spaces/user/name`.
        private: Whether only its owner sees it.
        branches: Name -> commit, pull requests among them as `refs/pr/1`.
        blobs: Blob id -> content, uploaded content that is in no commit among them.
    """

    def __init__(self, address: str, private: bool = False):
        self.address, self.private = address, private
        self.branches: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self._commits: dict[str, Commit] = {}

    @property
    def commit(self) -> str:
        """Id of the newest commit of `main`."""
        return self.branches["main"]

    def files(self) -> dict[str, int]:
        """Path -> size in bytes, on `main`."""
        return {path: len(self.blobs[blob_id]) for path, blob_id in self.head().files.items()}

    def commits(self, branch: str = "main") -> list[Commit]:
        """The commits that lead to a revision, newest first."""
        listed = [self.resolve(branch)]
        while (parent := listed[-1].parent) is not None:
            listed.append(self._commits[parent])
        return listed

    def head(self, branch: str = "main") -> Commit:
        """The newest commit of a branch."""
        return self._commits[self.branches[branch]]

    def read(self, path: str, revision: str = "main") -> bytes:
        """A file's content; KeyError if the revision has no such file."""
        return self.blobs[self.resolve(revision).files[path]]

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch or an id names."""
        oid = self.branches.get(revision, revision)
        if oid not in self._commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self._commits[oid]

    def advance(self, branch: str, files: dict[str, str], *, parent: str | None) -> Commit:
        """Makes the snapshot `files` the newest commit of a branch."""
        text = repr((self.address, len(self._commits), parent, sorted(files.items())))
        oid = hashlib.sha1(text.encode()).hexdigest()
        self._commits[oid] = Commit(oid, parent, dict(sorted(files.items())))
        self.branches[branch] = oid
        return self._commits[oid]

    def change(self, contents: dict[str, bytes]) -> Commit:
        """A commit on `main` that adds or replaces files; in LFS are those that the Hub would put there."""
        before = self.head() if self.branches else Commit("", None, {})
        stored = {}
        for path, content in contents.items():
            large = stored_in_lfs(path, len(content), content[:512])
            stored[path] = hashlib.sha256(content).hexdigest() if large else git_blob_id(content)
            self.blobs[stored[path]] = content
        return self.advance("main", before.files | stored, parent=before.oid or None)

    def entry(self, path: str, commit: Commit) -> dict:
        """A file or a folder as `tree` and `paths-info` list it."""
        if path not in commit.files:
            return {"type": "directory", "path": path, "size": 0, "oid": git_blob_id(path.encode())}
        blob_id = commit.files[path]
        size = len(self.blobs[blob_id])
        entry = {"type": "file", "path": path, "size": size, "oid": blob_id}
        if in_lfs(blob_id):
            entry |= {"oid": git_blob_id(blob_id.encode()), "lfs": {"oid": blob_id, "size": size, "pointerSize": 134}}
        return entry


def git_blob_id(content: bytes) -> str:
    """The id git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def in_lfs(blob_id: str) -> bool:
    """Whether a blob lies in LFS: its id is a SHA-256."""
    return len(blob_id) == 64


def stored_in_lfs(path: str, size: int, sample: bytes) -> bool:
    """Whether the Hub wants a file in LFS: by its suffix, or because it is large, or binary by its first bytes."""
    return path.endswith(LFS_SUFFIXES) or size >= LFS_SIZE or b"\0" in sample
