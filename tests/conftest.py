import os

import pytest


# Tests reach no model hub; huggingface_hub reads this when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models are faster on one thread than on two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def archives():
    """The real archives, in the cache. Without a connection their tests are skipped, but never in CI."""
    from normalign_llava.data.archives import PARTS, SUITE
    from normalign_llava.data.fetch import FetchError, fetch

    try:
        for part in {*PARTS, *SUITE}:
            fetch(part)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real parts cannot be fetched: {error}")
