# SPDX-License-Identifier: Apache-2.0
"""Options of `normalign ask` and `normalign evaluate`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened and loaded.

    Attributes:
        dtype: Type of the weights, see [`ModelHandle.load`]. An adapter does not use it.
        load_in_4bit: Quantizes the model, see [`ModelHandle.load`]. An adapter does not use it.
        trust_remote_code: Lets code from the checkpoint run, see [`resolve_model`].
        base: Base model of an adapter, see [`resolve_model`].
        base_quantization: Quantization of an adapter's base, see [`resolve_model`].
    """

    dtype: str = "auto"
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    base: str | None = None
    base_quantization: str | None = None


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """How `normalign evaluate` loads the model and reads the user's own data.

    Attributes:
        image_folder: Folder of the images of own data, see [`own_task`].
        columns: Columns of own data, see [`own_task`].
        batch_size: Questions that are answered together.
    """

    image_folder: str | None = None
    columns: str | None = None
    batch_size: int = 1
