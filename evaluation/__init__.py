# SPDX-License-Identifier: Apache-2.0
"""Evaluation on benchmarks, by lm-evaluation-harness."""


def lmms_model():
    """Returns where lmms-eval finds [`~normalign_llava.evaluation.lmms.NormAlignLlava`]."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("normalign_llava", chat_class_path=f"{__name__}.lmms.NormAlignLlava")
