import shutil

import card_folder
import pytest


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A checkpoint with nothing but what `build` writes."""
    return card_folder.bare(tmp_path_factory.mktemp("card"))


@pytest.fixture
def folder(tmp_path, built):
    """A copy of it."""
    return shutil.copytree(built, tmp_path / built.name)


@pytest.fixture
def full(folder):
    """The same with all that a card can show."""
    return card_folder.full(folder)


@pytest.fixture
def start(hub, prepared):
    """Starts `normalign publish` of a folder as ann/m, by Ann unless a token is given."""

    def start_command(folder, *options, token=None, **environment):
        command = ["-m", "normalign_llava", "publish", folder, "--repo-id", "ann/m", *options]
        environment["HF_TOKEN"] = token or hub.token("ann")
        environment["COLUMNS"] = "60"
        return prepared.start(command, **environment)

    return start_command


@pytest.fixture
def publish(start, hub):
    """Returns the status of `normalign publish`, and its output on one line, without a token."""

    def run_command(folder, *options, **environment):
        ended = start(folder, *options, **environment).wait()
        shown = " ".join((ended.stdout + ended.stderr).split())
        for token in hub.accounts:
            assert token not in shown
        return ended.returncode, shown

    return run_command
