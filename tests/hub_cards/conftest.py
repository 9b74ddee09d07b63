import shutil

import card_folder as made
import pytest
from publish_worker import Worker


@pytest.fixture(scope="module")
def worker(prepared):
    """Processes that publish."""
    return Worker(prepared)


@pytest.fixture(scope="module")
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
