import shutil

import card_folder as made
import pytest


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A checkpoint with nothing but what `build` writes."""
    return made.bare(tmp_path_factory.mktemp("card"))


@pytest.fixture
def folder(tmp_path, built):
    """A copy of it."""
    return shutil.copytree(built, tmp_path / built.name)


@pytest.fixture
def full(folder):
    """The same with all that a card can show."""
    return made.full(folder)


@pytest.fixture
def start(hub, prepared):
    """Starts `normalign publish` of a folder as ann/m, by Ann if nothing else is said."""

    def start(folder, *options, token=None, **environment):
        words = ["-m", "normalign_llava", "publish", folder, "--repo-id", "ann/m", *options]
        environment |= {"HF_TOKEN": token or hub.token("ann"), "COLUMNS": "60"}
        return prepared.start(words, **environment)

    return start


@pytest.fixture
def publish(start, hub):
    """What became of `normalign publish`: status, and its output on one line. No token is in it."""

    def publish(folder, *options, **named):
        process = start(folder, *options, **named).wait()
        shown = " ".join((process.stdout + process.stderr).split())
        for token in hub.accounts:
            assert token not in shown
        return process.returncode, shown

    return publish
