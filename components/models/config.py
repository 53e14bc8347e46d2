"""The ``model`` group: one description from which every process builds the same model."""

import copy
import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.tokenizer import PATH as EMBEDDED_TOKENIZER
from components.models.checkpoint_weights import INIT_FROM, checkpoint_content, checkpoint_weights
from components.models.checks import check_config, check_model, check_moe_losses
from components.models.experts import unfuse_experts
from components.models.freeze import freeze
from components.models.generate import add_tokenizer, generate
from components.models.hf_config import INVALID, check_same, make_config, read_hf_config
from components.models.hub import model_folder, one_line, read_json
from components.models.initialize import random_weights
from components.models.moe_config import MoELossConfig
from components.models.mtp import FIELD, MTPConfig, append_mtp_layers
from components.models.pretrained import content_hash, pretrained_weights
from components.models.weights import WeightSource, named_shapes, shape_hash


@dataclass(frozen=True)
class ModelSpec:
    """``init=pretrained`` takes shape, weights and tokenizer from ``path``.

    ``init=random`` takes the shape from ``architecture`` (no file or network is touched), or from ``path``
    where there is none.
    """

    path: str | None = None
    """A folder, or an id of the Hugging Face hub."""
    architecture: Json | None = None
    """``model_type`` and fields of its transformers configuration."""
    init: Literal["random", "pretrained"] = "random"
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    tokenizer: str | None = None
    """A folder or hub id; None: that of ``path`` where the shape comes from it, else the embedded one."""
    freeze: tuple[str, ...] = ()
    """Shell patterns of the names of parameters that are not trained."""
    moe: MoELossConfig = field(default_factory=MoELossConfig)
    """Losses of the routers, for models with experts."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Layers for multi-token prediction, in training only."""
    initial_checkpoint: Path | None = None
    """A whole checkpoint, whose weights are the initial ones. None means what ``init`` says. It is set from
    ``checkpoint.init_from``."""

    def __post_init__(self) -> None:
        if self.path is None:
            if self.init == "pretrained":
                raise ConfigError(
                    "model.path: is null, and model.init=pretrained reads weights from it; set it."
                )
            if self.architecture is None:
                raise ConfigError("model.path: is null and so is model.architecture; give one of them.")
        if self.path is not None and not self._reads_path and Path(self.path).expanduser().is_dir():
            raise ConfigError(
                f"model.path={self.path}: is not read, as model.architecture gives the shape and "
                "model.init=random the weights; use model=hf or model.init=pretrained."
            )
        if self.revision is not None and not self._reads_path:
            raise ConfigError("model.revision: is not read with model.init=random and model.architecture.")

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether the model adds terms to the loss of a stage: of routers, of further tokens."""
        return bool(self.moe.coefficients or self.mtp.loss_names)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Of these terms, in one micro-batch."""
        return self.moe.counts(batch) | self.mtp.counts(batch)

    @property
    def _reads_path(self) -> bool:
        return self.init == "pretrained" or self.architecture is None

    def folder(self, *, weights: bool = False) -> Path:
        """Where the files of ``path`` are on this machine (downloaded if need be)."""
        assert self.path is not None
        return model_folder("model.path", self.path, self.revision, weights=weights)

    def config(self) -> PreTrainedConfig:
        """A fresh configuration for training (``use_cache`` off).

        Raises:
            ConfigError: it cannot be read or made, or describes a model that our engines do not compute.
        """
        if self._reads_path:
            config = read_hf_config(self.folder(), trust_remote_code=self.trust_remote_code)
            if self.architecture is not None:
                check_same(self.architecture, config, str(self.path))
        else:
            assert self.architecture is not None
            config = make_config(self.architecture)
        check_config(config)
        # A cache makes transformers ignore where packed sequences begin.
        config.use_cache = False
        if self.mtp.num_layers or hasattr(config, FIELD):
            setattr(config, FIELD, self.mtp.num_layers)
        return config

    @functools.cached_property
    def meta_model(self) -> PreTrainedModel:
        """The model of ``build(config())``, made once. It is only read: who changes it builds its own."""
        return self.build(self.config())

    def __getstate__(self) -> Json:
        """The description, without what was made of it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def build(self, config: PreTrainedConfig, *, attention: str = "eager") -> PreTrainedModel:
        """The model on the meta device, float32, tied weights tied; ``attention`` as transformers knows it.

        Parameters that ``freeze`` names want no gradient.

        Raises:
            ConfigError: transformers cannot build it, our engines cannot train it (``check_model``), or
                ``freeze`` names nothing or everything.
        """
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config),
                    dtype=torch.float32,
                    attn_implementation=attention,
                    trust_remote_code=self.trust_remote_code,
                )
        except (*INVALID, AssertionError, ImportError, RuntimeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"model: transformers cannot build this {config.model_type}: {one_line(error)}"
            ) from error
        append_mtp_layers(model)
        unfuse_experts(model)
        check_model(model)
        check_moe_losses(model, self.moe, self.freeze)
        freeze(model, self.freeze)
        return model

    @property
    def is_random_init(self) -> bool:
        """Whether the initial weights are random ones, and so a function of the seed."""
        return self.initial_checkpoint is None and self.init == "random"

    @property
    def is_pretrained(self) -> bool:
        """Whether the initial weights are those that ``from_pretrained`` reads at ``path``."""
        return self.initial_checkpoint is None and self.init == "pretrained"

    @property
    def describe_init(self) -> str:
        """Where the initial weights come from, in words."""
        if self.initial_checkpoint is not None:
            return f"{INIT_FROM}={self.initial_checkpoint}"
        at = f" of {self.path} {self.revision or ''}".rstrip() if self._reads_path else ""
        return f"model.init={self.init}{at}"

    def content_hash(self) -> str:
        """A hash of what the initial weights are made of, beside the seed: the files of ``path``, or the
        configuration of random ones, or a checkpoint."""
        if self.initial_checkpoint is not None:
            return checkpoint_content(self.initial_checkpoint)
        if self.init == "pretrained":
            return content_hash(self.folder(weights=True))
        fields = self.config().to_dict() | {"transformers_version": None}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()

    def shape_hash(self, model: PreTrainedModel) -> str:
        """Two models with one signature can read each other's checkpoints."""
        return shape_hash(model)

    def trained_shape_hash(self, model: PreTrainedModel) -> str:
        """As ``signature``, of the parameters that are trained."""
        return shape_hash(model, trained=True)

    def weights(self, seed: int) -> WeightSource:
        """Initial weights by Hugging Face parameter name; ``seed`` is for ``init=random``.

        Raises:
            ConfigError: the files or the checkpoint hold other tensors than those of this model.
        """
        model = self.build(self.config())
        if self.initial_checkpoint is not None:
            shapes = named_shapes(model)
            return checkpoint_weights(self.initial_checkpoint, shapes, INIT_FROM, without_further=model)
        if self.init == "random":
            return random_weights(model, seed)
        folder = self.folder(weights=True)
        drawn = random_weights(model, seed) if self.mtp.num_layers else None
        return pretrained_weights(folder, model, drawn=drawn, trust_remote_code=self.trust_remote_code)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """
        Raises:
            ConfigError: there is none where it should be, or it cannot be read.
        """
        option, folder = self._tokenizer_folder()
        if (folder / "tokenizer.json").is_file():
            read_json(folder / "tokenizer.json")
        elif not any(
            (folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")
        ):
            raise ConfigError(
                f"{option}: {folder} has no tokenizer; point model.tokenizer at a folder that has one."
            )
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
        except (*INVALID, ImportError, OSError) as error:
            raise ConfigError(
                f"{option}: cannot load the tokenizer in {folder}: {one_line(error)}"
            ) from error

    def _tokenizer_folder(self) -> tuple[str, Path]:
        if self.tokenizer is not None:
            return "model.tokenizer", model_folder("model.tokenizer", self.tokenizer)
        if self._reads_path:
            return "model.path", self.folder()
        return "model.tokenizer", Path(EMBEDDED_TOKENIZER)

    def add_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """Completes an exported folder, and returns the tokenizer."""
        tokenizer = self.load_tokenizer()
        add_tokenizer(folder, tokenizer)
        return tokenizer

    def generate(self, folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of ``prompt`` by the model exported to ``folder``."""
        return generate(folder, prompt, max_new_tokens, trust_remote_code=self.trust_remote_code)
