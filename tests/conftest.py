import gc
import os
import shutil
import signal

import pytest


# Tests reach no model hub; huggingface_hub reads this when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models are faster on one thread than on two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = [
    "quickstart_run",
    "train_push",
    "train_distributed",
    "publish",
    "train_checkpoints",
    "docs",
    "train_run",
    "device",
    "train_adapters",
    "evaluate_run",
    "diagnose_run",
]


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that workers with a file each end together."""

    def place_of(item) -> int:
        test_name = item.path.stem.removeprefix("test_")
        if test_name in LONGEST:
            return LONGEST.index(test_name)
        return len(LONGEST)

    items.sort(key=place_of)


def pytest_collection_finish():
    """What is imported by now is never garbage: collections need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Nor is what earlier files left: every training run collects garbage twice."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """`datasets` replaces `os.environ` when it starts processes, and rich keeps the old one."""
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of `datasets`, in a folder of the test."""
    import datasets

    cache_folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache_folder))
    return cache_folder


@pytest.fixture(scope="session")
def archives():
    """The real archives, in the cache. Offline, their tests are skipped, but never in CI."""
    from normalign_llava.fetched.fetch import ARCHIVES, SPEECHES, FetchError, fetch

    try:
        for part in (*ARCHIVES, SPEECHES):
            fetch(part)
    except FetchError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real parts cannot be fetched: {error}")


@pytest.fixture(scope="session")
def server():
    """The hub that `prepared` processes know."""
    from hub_server import HubServer

    with HubServer() as hub:
        yield hub


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The tiny checkpoint of `training`, made once for all workers. Nothing writes to it."""
    import training
    from filelock import FileLock

    shared_folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared_folder = shared_folder.parent
    folder = shared_folder / "tiny"
    with FileLock(f"{folder}.lock"):
        if (folder / "model" / "build.json").exists():
            return folder / "model"
        return training.checkpoint(folder)


@pytest.fixture(scope="session")
def prepared(server, tmp_path_factory):
    """Starts processes of Python that have imported the package and have no token."""
    from prepared import Prepared

    home = tmp_path_factory.mktemp("prepared") / "home"
    prepared_process = Prepared(server.environment(home))
    yield prepared_process
    prepared_process.stop()


@pytest.fixture
def hub(server, prepared):
    """The same hub with nothing in it, and nothing of it in its clients' cache."""
    server.clear()
    shutil.rmtree(prepared.environment["HF_HOME"], ignore_errors=True)
    return server


@pytest.fixture
def processor(monkeypatch):
    """Sets the time of half precision, in that of float32; float16's is by default bfloat16's."""
    from normalign_llava.checkpoint import precision

    def measured(bfloat16: float, float16: float | None = None) -> None:
        precision.logger.warning_once.cache_clear()
        seconds = {"float32": 1.0, "bfloat16": bfloat16, "float16": float16 or bfloat16}
        monkeypatch.setattr(precision, "_seconds", lambda: seconds)

    return measured
