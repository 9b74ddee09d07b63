import os


# Tests reach no model hub; huggingface_hub reads this when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models are faster on one thread than on two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
