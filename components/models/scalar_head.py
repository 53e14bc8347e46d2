"""The head of a model: over the vocabulary, or scalar as in transformers' sequence classifiers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from components.contracts.errors import ConfigError
from components.json_text import read_json

SCORE = "score"
"""Name of the module of a scalar head, a linear layer ``[1, hidden]`` without bias."""


def has_scalar_head(model: PreTrainedModel) -> bool:
    return hasattr(model, SCORE)


def output_head(model: PreTrainedModel) -> Any:
    """Return the linear layer after the last norm, over the vocabulary or scalar."""
    return getattr(model, SCORE) if has_scalar_head(model) else model.get_output_embeddings()


def ties_embedding(model: PreTrainedModel) -> bool:
    """Return whether embedding and head are one matrix."""
    return bool(model.config.tie_word_embeddings) and not has_scalar_head(model)


def is_classifier(folder: Path) -> bool:
    """Return whether the model or the adapter in ``folder`` has the head of a classifier."""
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        return read_json(folder / ADAPTER_CONFIG_NAME).get("task_type") == "SEQ_CLS"
    return names_classifier(read_json(folder / CONFIG_NAME).get("architectures"))


def names_classifier(architectures: Iterable[object] | None) -> bool:
    return any(str(name).endswith("ForSequenceClassification") for name in architectures or ())


def auto_class(*, scalar: bool) -> Any:
    """Return the class of transformers that makes a model with this kind of head."""
    return AutoModelForSequenceClassification if scalar else AutoModelForCausalLM


def set_scalar_head(config: PreTrainedConfig) -> None:
    """Change ``config`` to that of a model with a scalar head.

    Raises:
        ConfigError: if transformers has no classifier of this family, or ``config`` is that of a classifier
            with several labels.
    """
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(
            f"model: transformers has no sequence classifier of {config.model_type}, which stage=rm trains; "
            "choose another family, such as qwen3 or llama."
        )
    if config.num_labels != 1 and names_classifier(config.architectures):
        raise ConfigError(
            f"model: is a classifier with {config.num_labels} labels, and stage=rm trains one score; "
            "choose a language model, or a reward model."
        )
    config.num_labels = 1


def check_scalar_head(model: PreTrainedModel) -> None:
    """Raise ConfigError if the head of a classifier is not ``SCORE``, or is frozen."""
    head = getattr(model, SCORE, None)
    base = f"{model.base_model_prefix}."
    names = [name for name, _ in model.named_parameters() if not name.startswith(base)]
    if names != [f"{SCORE}.weight"] or head is None or head.weight.shape[0] != 1:
        raise ConfigError(
            f"model: the head of {type(model).__name__} is not one linear layer without bias, as the engines "
            "compute it; choose another family, such as qwen3 or llama."
        )
    if not head.weight.requires_grad:
        raise ConfigError(
            f"model.freeze, model.train_only: the patterns freeze {SCORE}.weight, the head that stage=rm "
            "trains; correct them."
        )
