"""Where a reference's log-probabilities come from: ``stage.reference`` and ``stage.reference_path``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from components.contracts.configs import AdapterConfig, ModelConfig
from components.contracts.engine import Reference
from components.contracts.errors import ConfigError
from components.contracts.loss import Loss
from components.data.store.token_store import digest
from components.models import ModelSpec, named_shapes

OPTION = "stage.reference_path"


@dataclass(frozen=True)
class ReferenceSource:
    """What the two options come to in one experiment."""

    choice: Literal["none", "frozen", "adapter_off", "precomputed"]
    model: ModelConfig
    """What the log-probabilities are of, without an adapter."""
    is_separate_model: bool
    """Whether this is another model than the one that is trained."""

    @property
    def engine_mode(self) -> Reference:
        """What the engine that trains keeps for reference passes."""
        return "none" if self.choice == "precomputed" else self.choice

    @property
    def forward_only_passes(self) -> int:
        """Of a train step."""
        return 0 if self.engine_mode == "none" else 1

    @property
    def describe_init(self) -> str | None:
        """Where its weights come from, in words; None: there is no reference."""
        if self.choice == "none":
            return None
        return f"{OPTION}={self.model.path}" if self.is_separate_model else self.model.describe_init

    def frozen_spec(self) -> ModelConfig:
        """For an engine that never trains it: frozen, without gradients, moments or master weights.

        But for its vectors, because an engine trains something; nothing is frozen of a model without any.
        """
        model = replace(self.model, freeze=())
        shapes = named_shapes(model.meta_model)
        matrices = tuple(name for name, shape in shapes.items() if len(shape) > 1)
        return replace(model, freeze=matrices if len(matrices) < len(shapes) else ())

    def folder(self, cache: Path, seed: int, dtype: str) -> Path:
        """Where ``cache`` keeps what this model says: under all that its log-probabilities depend on.

        Neither on the layout nor on the engine, which they depend on by their rounding alone.
        """
        config = self.model.config().to_dict() | {"_name_or_path": None}
        weights = [self.model.content_hash(), seed if self.model.is_random_init else None]
        return cache / "reference" / digest([repr(config), weights, dtype, version("transformers")])

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Whether the other model scores the tokens of the trained one, with ``config`` and ``tokenizer``.

        Raises:
            ConfigError: it cannot be read, or has other tokens.
        """
        assert self.is_separate_model
        with about_reference():
            theirs, words = self.model.config(), self.model.load_tokenizer().get_vocab()
            self.model.weights(0)  # opened only: what is missing shows before a rank starts
        if theirs.vocab_size != config.vocab_size:
            raise ConfigError(
                f"{OPTION}={self.model.path}: has a vocabulary of {theirs.vocab_size}, the trained model one "
                f"of {config.vocab_size}; choose a reference with the same."
            )
        wrong = sorted(word for word, token in tokenizer.get_vocab().items() if words.get(word) != token)
        if wrong:
            raise ConfigError(
                f"{OPTION}={self.model.path}: its tokenizer numbers tokens otherwise ({len(wrong)} of them, "
                f"like {wrong[0]!r}); choose a reference with the tokenizer of the trained model."
            )


def resolve_reference(
    stage: Loss, model: ModelConfig, adapter: AdapterConfig | None = None
) -> ReferenceSource:
    """
    Args:
        adapter: None, or the adapter that is trained.

    Raises:
        ConfigError: the options contradict each other, or the rest of the experiment.
    """
    path = getattr(stage, "reference_path", None)
    saved = getattr(adapter, "modules_to_save", None)
    choice = stage.reference
    if choice == "auto" and path is None and getattr(adapter, "path", None) is not None:
        raise ConfigError(
            "stage.reference: is auto, but adapter.path continues an adapter; use adapter_off where the "
            "reference is the model without it, or merge it (python -m runner.export) and set "
            "stage.reference_path."
        )
    if choice == "auto":
        choice = "frozen" if adapter is None or saved or path is not None else "adapter_off"
    if choice == "adapter_off" and adapter is None:
        raise ConfigError(
            "stage.reference: is adapter_off, but adapter=none: the trained model is no reference; "
            "use stage.reference=frozen, or train an adapter (adapter=lora)."
        )
    if choice == "adapter_off" and saved:
        raise ConfigError(
            "stage.reference: is adapter_off, but adapter.modules_to_save trains whole modules, which cannot "
            "be switched off; use stage.reference=frozen or precomputed."
        )
    if path is not None and choice in ("adapter_off", "none"):
        raise ConfigError(
            f"{OPTION}: is not read with stage.reference={choice}; use stage.reference=frozen or "
            "precomputed, or leave it out."
        )
    if choice == "precomputed" and stage.kind == "text":
        raise ConfigError(
            "stage.reference: is precomputed, which is kept by sample, and documents are cut across rows; "
            "use stage.reference=frozen."
        )
    if path is None:
        return ReferenceSource(choice, model, is_separate_model=False)
    with about_reference():
        other = ModelSpec(path=path, init="pretrained", trust_remote_code=model.trust_remote_code)
    return ReferenceSource(choice, other, is_separate_model=True)


@contextmanager
def about_reference() -> Iterator[None]:
    """Errors of a ``ModelSpec`` name ``model.path``; those of the reference are about another option."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("model.path", OPTION)
        raise ConfigError(text if text.startswith(OPTION) else f"{OPTION}: {text}") from error
