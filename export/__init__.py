# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint as GGUF files, for llama.cpp, Ollama and LM Studio."""
