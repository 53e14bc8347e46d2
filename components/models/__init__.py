"""Causal language models of transformers: configuration, initial weights and export."""

from components.contracts.configs import WeightSource
from components.models.checkpoint_weights import checkpoint_weights
from components.models.config import ModelSpec
from components.models.export.hf_folder import export_folder
from components.models.export.safetensors_writer import stream_folder
from components.models.initialize import materialize_buffers
from components.models.weights import named_shapes, shape_hash

__all__ = [
    "ModelSpec",
    "WeightSource",
    "checkpoint_weights",
    "export_folder",
    "materialize_buffers",
    "named_shapes",
    "shape_hash",
    "stream_folder",
]
