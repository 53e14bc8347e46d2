"""The ``model`` group: one description from which every process builds the same model."""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import shutil
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from components.contracts.batch import Batch
from components.contracts.configs import WeightSource
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.tokenizer import PATH as EMBEDDED_TOKENIZER
from components.json_text import one_line, read_json
from components.models.added_tokens import add_tokens, grow_vocabulary, with_added_rows
from components.models.chat_template import TEMPLATE_TOKENS, with_chat_template
from components.models.checkpoint_weights import INIT_FROM, checkpoint_content, checkpoint_weights
from components.models.checks import check_causal, check_config, check_model, check_moe_losses
from components.models.config_values import UNBUILDABLE, check_values, wrong_field
from components.models.experts import unfuse_experts
from components.models.freeze import freeze
from components.models.generate import add_tokenizer, generate, read_generation_config
from components.models.hf_config import check_same, make_config, read_hf_config
from components.models.hub import model_folder
from components.models.initialize import random_weights
from components.models.moe_loss_config import MoELossConfig
from components.models.mtp import FIELD, MTPConfig, append_mtp_layers
from components.models.pretrained import content_hash, pretrained_weights
from components.models.scalar_head import auto_class, check_scalar_head, names_classifier, set_scalar_head
from components.models.weights import named_shapes, shape_hash

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files of a tokenizer that hold a JSON object."""


@dataclass(frozen=True)
class ModelSpec:
    """The model of a run. ``init=pretrained`` takes shape, weights and tokenizer from ``path``.

    ``init=random`` takes the shape from ``architecture``, without file or network access, or from ``path`` if
    ``architecture`` is None.
    """

    path: str | None = None
    """A folder, or an id of the Hugging Face hub."""
    architecture: Json | None = None
    """``model_type`` and fields of the transformers configuration of that type."""
    init: Literal["random", "pretrained"] = "random"
    revision: str | None = None
    """Branch, tag or commit of ``path`` on the hub. It does not apply to ``tokenizer``."""
    trust_remote_code: bool = False
    tokenizer: str | None = None
    """A folder or hub id. None means ``path`` if the shape comes from there, else the embedded tokenizer."""
    chat_template: str | None = None
    """A Jinja file, or the name of a built-in template. None means the tokenizer's own template."""
    add_tokens: bool | tuple[str, ...] = False
    """Special tokens for the tokenizer, with rows in the embedding and the head: those in the list, or with
    True those that ``chat_template`` writes."""
    freeze: tuple[str, ...] = ()
    """Shell patterns of the names of parameters that are not trained."""
    train_only: tuple[str, ...] = ()
    """Shell patterns of the names of the only parameters that are trained; an alternative to ``freeze``."""
    neftune_alpha: float = 0.0
    """Strength of the noise on the embeddings of train steps (NEFTune)."""
    moe: MoELossConfig = field(default_factory=MoELossConfig)
    """Router losses and bias updates, for MoE models."""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """Layers for multi-token prediction, used only in training."""
    initial_checkpoint: Path | None = None
    """Checkpoint of a whole model with the initial weights, from ``checkpoint.init_from``. None means that
    ``init`` decides."""
    scalar_head: bool = False
    """Whether the head gives one number for each position instead of logits, as the loss requires."""

    def __post_init__(self) -> None:
        if self.path is None:
            if self.init == "pretrained":
                raise ConfigError(
                    "model.path: is null, and model.init=pretrained reads weights from it; set it."
                )
            if self.architecture is None:
                raise ConfigError("model.path: is null and so is model.architecture; give one of them.")
        if self.path is not None and not self.reads_path and Path(self.path).expanduser().is_dir():
            raise ConfigError(
                f"model.path={self.path}: is not read, as model.architecture gives the shape and "
                "model.init=random the weights; use model=hf or model.init=pretrained."
            )
        if self.revision is not None and not self.reads_path:
            raise ConfigError(
                "model.revision: is not read with model.init=random and model.architecture; leave it out."
            )
        if self.trust_remote_code and not self.reads_path and self.tokenizer is None:
            raise ConfigError(
                "model.trust_remote_code: no code is read with model.init=random, model.architecture and the "
                "embedded tokenizer; leave it out."
            )

        if not 0 <= self.neftune_alpha < math.inf:
            raise ConfigError(f"model.neftune_alpha: must be at least 0, got {self.neftune_alpha}.")
        if self.freeze and self.train_only:
            raise ConfigError(
                "model.train_only: model.freeze is given too, and each decides what is trained; drop one."
            )
        if self.add_tokens is True and self.chat_template not in TEMPLATE_TOKENS:
            raise ConfigError(
                "model.add_tokens: is true, which adds the tokens of a model.chat_template that the program "
                f"brings ({', '.join(TEMPLATE_TOKENS)}); name one of them, or give a list of tokens."
            )

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether the model adds terms to the loss of a stage: router losses or multi-token prediction."""
        return bool(self.moe.coefficients or self.mtp.loss_names)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return, for each loss term that the model adds, the number of items over which it is a mean."""
        return self.moe.counts(batch) | self.mtp.counts(batch)

    @property
    def reads_path(self) -> bool:
        """Whether files of ``path`` are read; otherwise ``architecture`` is the shape of a random model."""
        return self.init == "pretrained" or self.architecture is None

    @property
    def _fields(self) -> str:
        """Prefix of the names of configuration fields in messages."""
        return f"model.path={self.path}: config.json: " if self.reads_path else "model.architecture."

    def folder(self, *, weights: bool = False) -> Path:
        """Return the local folder with the files of ``path``, downloading them if needed.

        Raises:
            ConfigError: if ``path`` is neither a folder nor a model that the hub can give.
        """
        assert self.path is not None
        return model_folder("model.path", self.path, self.revision, weights=weights)

    def config(self) -> PreTrainedConfig:
        """Return a new configuration for training, without a cache and without outputs that are not used.

        Raises:
            ConfigError: if it cannot be read or made, or describes a model that the engines do not support.
        """
        if self.reads_path:
            config = read_hf_config(self.folder(), trust_remote_code=self.trust_remote_code)
            read_generation_config(self.folder())  # checked here, because an export contains it
            if self.architecture is not None:
                check_same(self.architecture, config, str(self.path))
        else:
            assert self.architecture is not None
            config = make_config(self.architecture)
        check_causal(config)
        if not self.scalar_head and names_classifier(config.architectures):
            raise ConfigError(
                f"model.path: {self.path} is a classifier, without logits over its vocabulary; "
                "use stage=rm, or name a language model."
            )
        if self.add_tokens:
            grow_vocabulary(config, self.load_tokenizer())
        check_values(config.get_text_config(), self._fields)
        check_config(config)
        # With a cache, transformers ignores the boundaries of packed sequences.
        config.use_cache = False
        config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
        if self.mtp.num_layers or hasattr(config, FIELD):
            setattr(config, FIELD, self.mtp.num_layers)
        if self.scalar_head:
            set_scalar_head(config)
        return config

    @functools.cached_property
    def meta_model(self) -> PreTrainedModel:
        """The model of ``build(config())``, built at the first use and shared by all callers.

        Callers must not change this object. One function does: while ``random_weights`` draws the values of a
        parameter, a tensor on the CPU replaces the parameter, which is then put back.
        """
        return self.build(self.config())

    def __getstate__(self) -> Json:
        """Return only the fields, without cached properties."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def build(self, config: PreTrainedConfig, *, attention: str = "eager") -> PreTrainedModel:
        """Return the model on the meta device in float32, with tied weights.

        ``attention`` is an ``attn_implementation`` of transformers. Parameters that are frozen require no
        gradient.

        Raises:
            ConfigError: if transformers cannot build the model, our engines cannot train it
                (``check_model``), a pattern matches no parameter, or all parameters are frozen.
        """

        def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
            with torch.device("meta"):
                return auto_class(scalar=self.scalar_head).from_config(
                    copy.deepcopy(config),
                    dtype=torch.float32,
                    attn_implementation=attention,
                    trust_remote_code=self.trust_remote_code,
                )

        try:
            model = on_meta(config)
        except UNBUILDABLE as error:
            name = wrong_field(config, on_meta)
            field = "model" if name is None else f"{self._fields}{name}: is {getattr(config, name)}"
            reason = one_line(error).rstrip(".")
            raise ConfigError(
                f"{field}: transformers cannot build this {config.model_type}: {reason}; correct it."
            ) from error
        append_mtp_layers(model)
        unfuse_experts(model)
        check_model(model)
        check_moe_losses(model, self.moe, freeze(model, self.freeze, self.train_only))
        if self.scalar_head:
            check_scalar_head(model)
        return model

    @property
    def is_random_init(self) -> bool:
        """Whether the initial weights are random, and therefore depend on the seed."""
        return self.initial_checkpoint is None and self.init == "random"

    @property
    def is_pretrained(self) -> bool:
        """Whether the initial weights are those that ``from_pretrained`` reads from ``path``.

        With ``add_tokens``, they have rows that are not in its files.
        """
        return self.initial_checkpoint is None and self.init == "pretrained" and not self.add_tokens

    @property
    def describe_init(self) -> str:
        """Origin of the initial weights, as text."""
        if self.initial_checkpoint is not None:
            return f"{INIT_FROM}={self.initial_checkpoint}"
        at = f" of {self.path} {self.revision or ''}".rstrip() if self.reads_path else ""
        return f"model.init={self.init}{at}"

    def content_hash(self) -> str:
        """Return a hash of everything besides the seed that determines the initial weights.

        The hash is that of the checkpoint, of the weight files of ``path`` or, for random weights, of the
        configuration.
        """
        if self.initial_checkpoint is not None:
            return checkpoint_content(self.initial_checkpoint)
        if self.init == "pretrained":
            return content_hash(self.folder(weights=True))
        fields = self.config().to_dict() | {"transformers_version": None, "_name_or_path": ""}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()

    def shape_hash(self, model: PreTrainedModel) -> str:
        """Return a hash that is equal for models that can read each other's checkpoints."""
        return shape_hash(model)

    def trained_shape_hash(self, model: PreTrainedModel) -> str:
        """Return the ``shape_hash`` of only the trained parameters."""
        return shape_hash(model, trained=True)

    def weights(self, seed: int) -> WeightSource:
        """Return the initial weights by Hugging Face parameter name.

        ``seed`` determines the random ones: all with ``init=random``, and those of a scalar head and of
        layers for multi-token prediction that the files of ``path`` lack.

        Raises:
            ConfigError: if the tensors of the files or of the checkpoint are not those of this model.
        """
        model = self.meta_model
        if self.initial_checkpoint is not None:
            shapes = named_shapes(model)
            return checkpoint_weights(self.initial_checkpoint, shapes, INIT_FROM, without_mtp=model)
        if self.init == "random":
            return random_weights(model, seed)
        folder = self.folder(weights=True)
        drawn = random_weights(model, seed) if self.mtp.num_layers or self.scalar_head else None
        stored = dataclasses.replace(self, add_tokens=False).meta_model if self.add_tokens else model
        weights = pretrained_weights(folder, stored, drawn=drawn, trust_remote_code=self.trust_remote_code)
        return with_added_rows(weights, named_shapes(stored), named_shapes(model))

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of this model, with ``add_tokens`` and ``chat_template`` applied.

        It is loaded once. Callers must not change this object.

        Raises:
            ConfigError: if the tokenizer or the chat template is missing or unreadable, or if the tokenizer
                lacks a token of the template.
        """
        return self._loaded_tokenizer

    @functools.cached_property
    def _loaded_tokenizer(self) -> PreTrainedTokenizerBase:
        option, folder = self._tokenizer_folder()
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                read_json(folder / name)
        if not has_tokenizer(folder):
            raise ConfigError(
                f"{option}: {folder} has no tokenizer; point model.tokenizer at a folder that has one."
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # the class of the library's errors for files that it does not know
            raise ConfigError(
                f"{option}: cannot load the tokenizer in {folder}: {one_line(error)}"
            ) from error
        if not self.trust_remote_code:
            tokenizer.init_kwargs.pop("auto_map", None)  # it names files of code, which an export has not
        if self.add_tokens:
            needed = TEMPLATE_TOKENS.get(self.chat_template or "", ())
            add_tokens(tokenizer, needed if isinstance(self.add_tokens, bool) else self.add_tokens)
        if self.scalar_head and tokenizer.pad_token is None:  # a classifier needs one to find the last token
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer if self.chat_template is None else with_chat_template(tokenizer, self.chat_template)

    def with_any_tokenizer(self) -> Self:
        """Return this model, with the embedded tokenizer if its folder has none, for a forecast."""
        if self.tokenizer is not None or not self.reads_path or has_tokenizer(self.folder()):
            return self
        return dataclasses.replace(self, tokenizer=str(EMBEDDED_TOKENIZER))

    def _tokenizer_folder(self) -> tuple[str, Path]:
        if self.tokenizer is not None:
            return "model.tokenizer", model_folder("model.tokenizer", self.tokenizer)
        if self.reads_path:
            return "model.path", self.folder()
        return "model.tokenizer", Path(EMBEDDED_TOKENIZER)

    def add_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """Write the tokenizer to the exported model ``folder``, and return the tokenizer.

        The code that the model or its tokenizer brings with it is copied, too.
        """
        tokenizer = self.load_tokenizer()
        add_tokenizer(folder, tokenizer, self._foreign_ids)
        if self.trust_remote_code:
            sources = [self._tokenizer_folder()[1], *([self.folder()] if self.reads_path else [])]
            for file in (file for source in sources for file in source.glob("*.py")):
                shutil.copyfile(file, folder / file.name)
        return tokenizer

    @functools.cached_property
    def _foreign_ids(self) -> Set[int]:
        """The ids of tokens in the vocabulary of ``path`` that ``tokenizer`` lacks or has elsewhere.

        There are none if ``path`` has no tokenizer that can be loaded: its stop tokens may be those of
        ``tokenizer``.
        """
        if self.tokenizer is None or not self.reads_path or not has_tokenizer(self.folder()):
            return set()
        own = dataclasses.replace(self, tokenizer=None, add_tokens=False, chat_template=None)
        try:
            vocabulary = own.load_tokenizer().get_vocab()
        except ConfigError:
            return set()
        used = self.load_tokenizer().get_vocab()
        return {number for token, number in vocabulary.items() if used.get(token) != number}

    def generate(self, folder: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Return the greedy continuation of ``prompt`` by the model exported to ``folder``."""
        tokenizer, trusts = self.load_tokenizer(), self.trust_remote_code
        return generate(folder, tokenizer, prompt, max_new_tokens, trust_remote_code=trusts)


def has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    return any((folder / name).is_file() for name in names)
