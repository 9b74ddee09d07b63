import pytest
import train_data


@pytest.fixture(autouse=True)
def _own_cache(cache):
    """Each test here has its own."""


@pytest.fixture(scope="session")
def processor():
    return train_data.processor()
