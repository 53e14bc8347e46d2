"""The source of reference log-probabilities: ``stage.reference`` and ``stage.reference_path``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.contracts.configs import AdapterConfig, ModelConfig
from components.contracts.engine import Reference
from components.contracts.errors import ConfigError
from components.contracts.loss import Loss
from components.data.store.digests import digest
from components.models import ModelSpec, named_shapes

OPTION, SYNC = "stage.reference_path", "stage.sync_reference_every"


@dataclass(frozen=True)
class ReferenceSource:
    """The reference model that ``stage.reference`` and ``stage.reference_path`` select in one experiment."""

    choice: Literal["none", "frozen", "adapter_off", "precomputed"]
    model: ModelConfig
    """The reference model, without an adapter."""
    is_separate_model: bool
    """Whether the reference is that of ``stage.reference_path``, and not the trained model at its start."""
    sync_every: int = 0
    """Number of steps after which the trained model is mixed into the reference again. 0 means never."""
    sync_mixup: float = 0.6
    """Share of the trained model in the mixture."""

    @property
    def engine_mode(self) -> Reference:
        """Kind of reference that the training engine holds: "none" with precomputed log-probabilities."""
        return "none" if self.choice == "precomputed" else self.choice

    @property
    def describe_init(self) -> str | None:
        """Origin of the reference weights, as text. None means that there is no reference."""
        if self.choice == "none":
            return None
        init = f"{OPTION}={self.model.path}" if self.is_separate_model else self.model.describe_init
        if not self.sync_every:
            return init
        return f"{init}, with {SYNC}={self.sync_every} and stage.sync_reference_mixup={self.sync_mixup}"

    def frozen_spec(self) -> ModelConfig:
        """Return the reference model for an engine that only evaluates it, with its matrices frozen.

        Frozen parameters have no optimizer state. Engines require a trainable parameter, so 1-D parameters
        stay trainable. If the model has none, nothing is frozen.
        """
        model = replace(self.model, freeze=(), train_only=())
        shapes = named_shapes(model.meta_model)
        matrices = tuple(name for name, shape in shapes.items() if len(shape) > 1)
        return replace(model, freeze=matrices if len(matrices) < len(shapes) else ())

    def folder(self, cache: Path, seed: int, dtype: str) -> Path:
        """Return the folder in ``cache`` for everything that affects the log-probabilities of this reference.

        Layout and engine do not change the folder, because they affect only the rounding.
        """
        config = self.model.config().to_dict() | {"_name_or_path": None}
        return (
            cache / "reference" / digest([repr(config), self._weights(seed), dtype, version("transformers")])
        )

    def content_hash(self, seed: int) -> str | None:
        """Return a hash of what determines the weights in every step. None means that there is no reference.

        Unlike ``describe_init``, it does not depend on the path of the weights, only on their values.
        """
        mixed = [self.sync_every, self.sync_mixup] if self.sync_every else None
        return None if self.choice == "none" else digest([self._weights(seed), mixed])

    def _weights(self, seed: int) -> list[str | int | None]:
        return [self.model.content_hash(), seed if self.model.is_random_init else None]

    def check(self, trained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError if the reference model cannot be read, has other tokens, or cannot be mixed.

        ``trained`` (on the meta device) and ``tokenizer`` are those of the trained model.
        """
        assert self.is_separate_model
        config = trained.config
        with about_reference():
            theirs, words = self.model.config(), self.model.load_tokenizer().get_vocab()
            self.model.weights(0)  # only opens the files, so that errors come before any rank starts
        if self.sync_every and named_shapes(self.model.meta_model) != named_shapes(trained):
            raise ConfigError(
                f"{SYNC}: needs a reference with the parameters of the trained model, but those of "
                f"{OPTION}={self.model.path} have other names or shapes; choose another reference, or leave "
                f"{SYNC} out."
            )
        if theirs.vocab_size != config.vocab_size:
            raise ConfigError(
                f"{OPTION}={self.model.path}: has a vocabulary of {theirs.vocab_size}, the trained model one "
                f"of {config.vocab_size}; choose a reference with the same."
            )
        wrong = sorted(word for word, token in tokenizer.get_vocab().items() if words.get(word) != token)
        if wrong:
            raise ConfigError(
                f"{OPTION}={self.model.path}: its tokenizer gives tokens other ids ({len(wrong)} of them, "
                f"like {wrong[0]!r}); choose a reference with the tokenizer of the trained model."
            )


def resolve_reference(
    stage: Loss, model: ModelConfig, adapter: AdapterConfig | None = None
) -> ReferenceSource:
    """Return the reference of an experiment; ``adapter`` is the adapter that is trained, if any.

    Raises:
        ConfigError: if the options contradict each other or the rest of the experiment.
    """
    path = getattr(stage, "reference_path", None)
    saved = getattr(adapter, "modules_to_save", None)
    choice = stage.reference
    if choice == "auto" and path is None and getattr(adapter, "path", None) is not None:
        raise ConfigError(
            "stage.reference: is auto, but adapter.path continues an adapter; use adapter_off if the "
            "reference is the model without it, or merge it (python -m runner.export) and set "
            "stage.reference_path."
        )
    if choice == "auto":
        choice = "frozen" if adapter is None or saved or path is not None else "adapter_off"
    if choice == "adapter_off":
        check_adapter_off(adapter)
    if path is None and choice in ("frozen", "precomputed") and getattr(adapter, "quantize", None):
        raise ConfigError(
            f"stage.reference: is {choice}, the model in full precision, but adapter.quantize trains it in 4 "
            "bits; use stage.reference=adapter_off without adapter.modules_to_save, or set "
            "stage.reference_path."
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
    every, mixup = getattr(stage, "sync_reference_every", 0), getattr(stage, "sync_reference_mixup", None)
    if every:
        check_sync(choice, model, adapter)
    found = ReferenceSource(choice, model, is_separate_model=False, sync_every=every)
    if mixup is not None:
        found = replace(found, sync_mixup=mixup)
    if path is None:
        return found
    with about_reference():
        other = ModelSpec(path=path, init="pretrained", trust_remote_code=model.trust_remote_code)
    return replace(found, model=other, is_separate_model=True)


def check_adapter_off(adapter: AdapterConfig | None) -> None:
    """Raise ConfigError unless the trained model without ``adapter`` can be the reference."""
    if adapter is None:
        raise ConfigError(
            "stage.reference: is adapter_off, but adapter=none: the trained model cannot be its own "
            "reference; use stage.reference=frozen, or train an adapter (adapter=lora)."
        )
    if getattr(adapter, "modules_to_save", None):
        continues = getattr(adapter, "path", None) is not None
        merge = (
            "merge the adapter (python -m runner.export) and set stage.reference_path, or "
            if continues
            else ""
        )
        raise ConfigError(
            "stage.reference: is adapter_off, but adapter.modules_to_save trains whole modules, which cannot "
            f"be switched off; {merge}use stage.reference=frozen or precomputed, which is the model without "
            "any adapter."
        )


def check_sync(choice: str, model: ModelConfig, adapter: AdapterConfig | None) -> None:
    """Raise ConfigError unless the reference can be mixed with the trained model.

    The reference must be a second, frozen model with the same parameters. Adapters are therefore refused:
    they add parameters to only the trained model. Router biases that are updated without a gradient are
    refused, too, because engines keep them as buffers.
    """
    if choice != "frozen":
        raise ConfigError(
            f"{SYNC}: changes a second model in memory, but stage.reference is {choice}; use "
            "stage.reference=frozen, or leave it out."
        )
    if adapter is not None:
        raise ConfigError(
            f"{SYNC}: the frozen reference has no adapter to mix; use adapter=none, or leave it out."
        )
    if model.moe.bias_update_rate:
        raise ConfigError(
            f"{SYNC}: the biases of routers are not mixed, and model.moe.bias_update_rate changes them; "
            "leave one out."
        )


@contextmanager
def about_reference() -> Iterator[None]:
    """Replace ``model.path`` by ``stage.reference_path`` in the ConfigErrors of a ``ModelSpec``."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("model.path", OPTION)
        raise ConfigError(text if text.startswith(OPTION) else f"{OPTION}: {text}") from error
