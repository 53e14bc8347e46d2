"""The contracts of the configuration groups ``model``, ``data``, ``adapter`` and ``optimizer``.

An object of each is made from the composed configuration in every process. It describes; engines build.
"""

from dataclasses import Field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from components.contracts.data import DataLoader, SampleKind
from components.contracts.json_types import Json

Foreign = Any
"""An object of transformers (configuration, model on the meta device, tokenizer): not imported here."""


class WeightSource(Protocol):
    """Weights by their Hugging Face parameter name."""

    def __call__(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The part ``index`` of the tensor (slices without a step; () is the whole) on CPU.

        In float32 or as stored, and not to be written to.
        """


class MoEConfig(Protocol):
    """``model.moe``: the losses of routers."""

    @property
    def bias_update_rate(self) -> float:
        """By how much the biases of routers follow the load after an update."""


class MTPConfig(Protocol):
    """``model.mtp``: multi-token prediction."""

    @property
    def num_layers(self) -> int: ...


class ModelConfig(Protocol):
    """The ``model`` group, a frozen dataclass: a causal language model, its weights and its tokenizer."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def path(self) -> str | None:
        """A folder, or an id of the Hugging Face hub."""

    @property
    def trust_remote_code(self) -> bool: ...

    @property
    def freeze(self) -> tuple[str, ...]:
        """Shell patterns of the names of parameters that are not trained."""

    @property
    def moe(self) -> "MoEConfig": ...

    @property
    def mtp(self) -> "MTPConfig": ...

    @property
    def initial_checkpoint(self) -> Path | None:
        """A whole checkpoint whose weights are the initial ones."""

    @property
    def is_random_init(self) -> bool:
        """Whether the initial weights are random."""

    @property
    def describe_init(self) -> str:
        """Where the initial weights come from, in words."""

    @property
    def meta_model(self) -> Foreign:
        """The model on the meta device, made once. It is only read; an engine builds its own."""

    def config(self) -> Foreign:
        """A configuration of its own for every call."""

    def weights(self, seed: int) -> WeightSource:
        """The initial weights."""

    def content_hash(self) -> str:
        """A hash of what the initial weights are made of, besides the seed."""

    def shape_hash(self, model: nn.Module) -> str:
        """Two models with one signature can read each other's checkpoints."""

    def trained_shape_hash(self, model: nn.Module) -> str:
        """The signature of the trained parameters."""

    def load_tokenizer(self) -> Foreign: ...

    def add_tokenizer(self, folder: Path) -> Foreign:
        """Completes an exported folder, and returns the tokenizer."""

    def generate(self, folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of ``prompt`` by the model exported to ``folder``."""


class AdapterConfig(Protocol):
    """The ``adapter`` group; None in its place means that the model itself is trained."""

    def __hash__(self) -> int: ...

    @property
    def path(self) -> str | None:
        """The folder of an adapter that is continued."""

    @property
    def modules_to_save(self) -> tuple[str, ...]:
        """Modules that are trained whole next to the adapter."""

    def check(self, model: Foreign) -> None:
        """Raises ConfigError if ``model`` (on any device) cannot be adapted so."""

    def shape_hash(self, model: Foreign) -> str:
        """Two adapters with one signature compute the same function of the same parameters."""

    def finish_export(self, model: Any, export: Path, base: Path, seed: int, dtype: torch.dtype) -> Foreign:
        """Completes an exported folder, and returns the tokenizer."""


class OptimizerConfig(Protocol):
    """The ``optimizer`` group."""

    @property
    def lr(self) -> float:
        """The peak; the scheduler says how much of it a step gets."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What is kept per parameter, under torch's names, each of the parameter's shape."""


class DataAudit(Protocol):
    """What a user should know of prepared data."""

    def to_json(self) -> str: ...

    def render(self) -> object:
        """What rich prints."""


class Prepared(Protocol):
    """What the parent prepared and every rank opens; it travels as JSON."""

    def __hash__(self) -> int: ...

    @property
    def eval(self) -> object | None:
        """None means that there is nothing to evaluate on."""

    @property
    def packing(self) -> str: ...

    @property
    def global_batch_size(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes with the data and all that shapes global batches, except their size."""

    @property
    def audit(self) -> DataAudit: ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""

    def train_loader(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        reference: Path | None = None,
    ) -> DataLoader:
        """``reference``: the folder of a reference model, for batches that carry its log-probabilities."""

    def eval_loader(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        reference: Path | None = None,
    ) -> DataLoader | None: ...

    def missing_reference_logps(self, folder: Path) -> bool:
        """Whether ``folder`` lacks log-probabilities of the reference model."""

    def prompt(self) -> list[int]:
        """Token ids of a sample to complete."""

    def to_json(self) -> Json: ...


class DataConfig(Protocol):
    """The ``data`` group."""

    @property
    def max_length(self) -> int:
        """Tokens of a row, or of a sample."""

    @property
    def share_prompt(self) -> bool:
        """Whether the two sides of a pair share their prompt's tokens."""

    def resolve_packing(self, kind: SampleKind) -> str:
        """How samples of ``kind`` are packed."""

    def cache(self) -> Path:
        """The folder that outlives runs."""

    def prepare(
        self,
        kind: SampleKind,
        tokenizer: Foreign,
        *,
        seed: int,
        global_batch_size: int,
        max_steps: int | None,
        epochs: int | None,
    ) -> Prepared:
        """Tokenises and plans what is not in the cache, in the parent."""

    def restore(self, prepared: Json) -> Prepared:
        """What ``prepare`` returned, from its ``to_json``."""
