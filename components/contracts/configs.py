"""The interfaces of the configuration groups ``model``, ``data``, ``adapter`` and ``optimizer``.

Every process makes one object of each from the configuration. Engines build the model from these objects.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from components.contracts.data import BatchShard, DataLoader, SampleKind
from components.contracts.json_types import Json

Foreign = Any
"""A configuration, model or tokenizer of transformers, which is not imported here."""


class WeightSource(Protocol):
    """A function from Hugging Face parameter names to weights."""

    def __call__(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return the part ``index`` of the tensor ``name``, on the CPU.

        ``index`` holds slices without a step; () means the whole tensor. The dtype of the result is float32
        or that of the stored tensor. The caller must not write to the result.
        """


class MoESettings(Protocol):
    """``model.moe``: router losses and bias updates."""

    @property
    def bias_update_rate(self) -> float:
        """Amount by which a router bias changes per optimizer step, towards an even load of the experts."""

    @property
    def depends_on_microbatches(self) -> bool:
        """Whether the value of a router loss depends on the number of rows in a micro-batch."""


class MTPSettings(Protocol):
    """``model.mtp``: multi-token prediction."""

    @property
    def num_layers(self) -> int: ...


class ModelConfig(Protocol):
    """The ``model`` group, a frozen dataclass: a causal language model, its weights and its tokenizer."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def path(self) -> str | None:
        """A folder, or an id on the Hugging Face hub."""

    @property
    def trust_remote_code(self) -> bool: ...

    @property
    def add_tokens(self) -> bool | tuple[str, ...]:
        """Special tokens to add to the tokenizer and the model. True means those of the chat template."""

    @property
    def freeze(self) -> tuple[str, ...]:
        """Shell patterns for the names of parameters that are not trained."""

    @property
    def train_only(self) -> tuple[str, ...]:
        """Shell patterns for the names of the parameters to train. Empty means that ``freeze`` applies."""

    @property
    def neftune_alpha(self) -> float:
        """Strength of the noise on the embeddings of train steps (NEFTune). 0 means no noise."""

    @property
    def moe(self) -> "MoESettings": ...

    @property
    def mtp(self) -> "MTPSettings": ...

    @property
    def initial_checkpoint(self) -> Path | None:
        """A complete checkpoint with the initial weights. None means that they are from another source."""

    @property
    def scalar_head(self) -> bool:
        """Whether the head gives one number for each position instead of logits, as the loss requires."""

    @property
    def is_random_init(self) -> bool:
        """Whether the initial weights are random."""

    @property
    def describe_init(self) -> str:
        """Description of the source of the initial weights, for messages."""

    @property
    def meta_model(self) -> Foreign:
        """The model on the meta device, made once.

        Callers must not change this object. An engine builds a model of its own.
        """

    def config(self) -> Foreign:
        """Return the transformers configuration, as a new object on every call."""

    def weights(self, seed: int) -> WeightSource:
        """Return the initial weights; ``seed`` determines those that are random."""

    def content_hash(self) -> str:
        """Return a hash of everything that determines the initial weights, except the seed."""

    def shape_hash(self, model: nn.Module) -> str:
        """Return a hash that is equal for models that can read each other's checkpoints."""

    def trained_shape_hash(self, model: nn.Module) -> str:
        """Return the ``shape_hash`` of only the trained parameters."""

    def load_tokenizer(self) -> Foreign:
        """Return the tokenizer, loaded once. Callers must not change this object."""

    def with_any_tokenizer(self) -> Self:
        """Return this model, with a substitute tokenizer if it has none, for a forecast."""

    def add_tokenizer(self, folder: Path) -> Foreign:
        """Write the tokenizer to the exported model ``folder``, and return the tokenizer."""

    def generate(self, folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Return the greedy continuation of ``prompt`` by the model exported to ``folder``."""


class AdapterConfig(Protocol):
    """The ``adapter`` group. None in place of an adapter means that the model itself is trained."""

    def __hash__(self) -> int: ...

    @property
    def path(self) -> str | None:
        """The folder of an adapter whose training continues. None means that a new adapter is trained."""

    @property
    def modules_to_save(self) -> tuple[str, ...]:
        """Modules that are trained in full next to the adapter."""

    def check(self, model: Foreign) -> None:
        """Raise ConfigError if the adapter does not fit ``model`` (on any device)."""

    def shape_hash(self, model: Foreign) -> str:
        """Return a hash that is equal for adapters that compute the same function of the same parameters."""

    def finish_export(self, model: Any, export: Path, base: Path, seed: int, dtype: torch.dtype) -> Foreign:
        """Write the tokenizer to the exported adapter folder ``export``, and return the tokenizer.

        If the weights of the base model are not those of a pretrained model, they are written to the folder
        ``base``, in ``dtype``; ``seed`` determines random ones. Only one process calls this method.
        """


NoAdapter = Annotated[None, "adapter=none"]
"""Return type of the function that ``adapter=none`` names. It means that the model itself is trained."""


class OptimizerConfig(Protocol):
    """The ``optimizer`` group."""

    @property
    def lr(self) -> float:
        """Peak learning rate. The scheduler computes the rate of each step from it."""

    @property
    def kind(self) -> str:
        """Kind of optimizer, as after ``optimizer=`` on the command line.

        A resumed run must use the same kind.
        """

    @property
    def moments(self) -> tuple[str, ...]:
        """Keys, in torch's optimizer state, of the tensors that have the shape of their parameter."""


class DataAudit(Protocol):
    """A report on prepared data for the user."""

    def to_json(self) -> str: ...

    def render(self, *, evaluates: bool = False) -> object:
        """Return a renderable of the library rich; with ``evaluates``, only of the evaluation data."""


class Prepared(Protocol):
    """A description of the data that the parent process has prepared, passed as JSON to every rank."""

    def __hash__(self) -> int: ...

    @property
    def eval(self) -> Mapping[str, object]:
        """The evaluation sets by the prefix of their metrics: ``eval``, or ``eval/NAME`` for a named set."""

    @property
    def packing(self) -> str: ...

    @property
    def streamed(self) -> bool:
        """Whether training data is a stream, which ``DataConfig.open_stream`` opens."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def identity(self) -> str:
        """A hash of the data and of everything that determines global batches, except their size."""

    @property
    def audit(self) -> DataAudit: ...

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the run."""

    def train_loader(self, shard: BatchShard, reference: Path | None = None) -> DataLoader:
        """Return the loader of the training data.

        ``reference`` is the folder of the reference log-probabilities to attach to batches. None means that
        batches have no ``ref_logps``.
        """

    def eval_loaders(self, shard: BatchShard, reference: Path | None = None) -> Mapping[str, DataLoader]: ...

    def missing_reference_logps(self, folder: Path) -> bool:
        """Return whether ``folder`` lacks log-probabilities of the reference model."""

    def prompt(self) -> list[int]:
        """Return the token ids of a prompt from the data, for a sample of generated text."""

    def write_bad_records(self, folder: Path) -> None:
        """Write ``folder``/bad_records.jsonl if records were left out because they cannot be read."""

    def write_samples(self, folder: Path, tokenizer: Foreign) -> None:
        """Write ``folder``/samples.json: some training samples, and which of their tokens are trained on."""

    def to_json(self) -> Json: ...


class DataConfig(Protocol):
    """The ``data`` group."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a row, or of a sample."""

    @property
    def share_prompt(self) -> bool:
        """Whether the prompt of a pair is computed once, for both of its answers."""

    def resolve_packing(self, kind: SampleKind) -> str:
        """Return how samples of ``kind`` are packed."""

    def cache(self) -> Path:
        """Return the cache folder, which is shared by runs."""

    def prepare(
        self,
        kind: SampleKind,
        tokenizer: Foreign,
        *,
        seed: int,
        global_batch_size: int,
        max_steps: int | None,
        epochs: float | None,
    ) -> Prepared:
        """Tokenize and plan, in the parent process, everything that is not in the cache."""

    def restore(self, prepared: Json) -> Prepared:
        """Return the result of ``prepare``, restored from the output of its ``to_json``."""

    def open_stream(
        self,
        prepared: Json,
        shard: BatchShard,
        kind: SampleKind,
        tokenizer: Foreign,
        folder: Path,
        *,
        step: int,
        position: Sequence[int],
        main: bool,
        beat: Callable[[], object],
    ) -> DataLoader:
        """Return a loader of a stream whose first global batch is that of ``step``.

        Every rank calls this method; ``main`` is True only on rank 0. ``folder`` is for chunks of the stream
        and is the same on every rank. ``position`` is the result of ``DataLoader.advance`` for ``step``, or
        empty at the start of the stream. ``beat`` is called whenever more of the records before ``position``
        have been skipped.
        """
