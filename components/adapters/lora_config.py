"""The ``adapter`` group: one description from which every engine builds the same adapter."""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.adapters.peft_folder import check_tensors, name_base, stored_weights
from components.adapters.pissa import principal_factors
from components.adapters.target_modules import (
    Targets,
    check_expert_targets,
    linear_names,
    linear_targets,
    saved_modules,
)
from components.contracts.errors import ConfigError, check_at_least_one
from components.models import ModelSpec, WeightSource, named_shapes, nf4, stream_folder
from components.models.experts import EXPERT_PARAM, is_fully_trained, moe_blocks
from components.models.export.hf_file_names import file_names
from components.models.initialize import seeded
from components.models.mtp import mtp_layers
from components.models.scalar_head import SCORE, has_scalar_head, is_classifier

Init = Literal["kaiming", "gaussian", "pissa"]

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""Suffixes of the names of an adapter's parameters, after the name of the adapted module."""
INITIAL = "initial"
"""Part of the names of PiSSA's frozen initial A and B, before ``weight``."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation (Hu et al., 2021): ``W x + scaling * B A x``, where ``W`` is frozen.

    With ``dora``, the rows of ``W + scaling * B A`` are scaled to learned norms (Liu et al., 2024, equation
    5). With pissa a layer computes ``W x + scaling * (B A - B0 A0) x``, in which A and B begin as the frozen
    A0 and B0. This equals an adapter of the frozen ``W - scaling * B0 A0``, but leaves ``W`` unchanged.

    Parameters are named ``<module>.lora_A.weight`` ``[r, in]``, ``<module>.lora_B.weight`` ``[out, r]`` and
    ``<module>.lora_magnitude_vector`` ``[out]``.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: Targets = "all-linear"
    """``all-linear`` (except the head), ``attention``, ``mlp``, or suffixes of module names."""
    dropout: float = 0.0
    """Dropout probability of the input of ``A``, in training passes only."""
    rslora: bool = False
    """Whether ``scaling`` is alpha / sqrt(r) instead of alpha / r (Kalajdzievski, 2023)."""
    init_lora_weights: Init | None = "kaiming"
    """Initial ``A``: uniform as in ``torch.nn.Linear``, or normal with standard deviation 1 / r. ``B`` is 0.
    With pissa, both are those of ``principal_factors``. None means that the values are read from ``path``."""
    pissa_niter: int | None = None
    """Power iterations of pissa's randomised decomposition. None means the exact decomposition."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained in full in addition to the adapter, named like ``target_modules``."""
    dora: bool = False
    quantize: Literal["nf4"] | None = None
    """Format of the frozen matrices of linear layers, see ``quantized_weights``. None means ``run.dtype``."""
    path: str | None = None
    """Folder of an adapter that gives the initial values and has the same settings. None means that the
    adapter starts from ``init_lora_weights``."""

    def __post_init__(self) -> None:
        check_at_least_one("adapter", self, "r")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"adapter.alpha: must be above 0, got {self.alpha}.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"adapter.dropout: must be at least 0 and below 1, got {self.dropout}.")
        if self.pissa_niter is not None and (self.pissa_niter < 0 or not self.is_pissa):
            raise ConfigError(
                f"adapter.pissa_niter: is {self.pissa_niter}, but must be null, or at least 0 with "
                "adapter.init_lora_weights=pissa."
            )
        if self.is_pissa and (self.dora or self.quantize):
            what = "adapter.dora" if self.dora else "adapter.quantize"
            raise ConfigError(
                f"adapter.init_lora_weights: pissa is not supported with {what}; use kaiming or gaussian."
            )

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def is_pissa(self) -> bool:
        return self.init_lora_weights == "pissa"

    @property
    def exported(self) -> "LoRA":
        """The adapter that an export contains.

        For pissa, this is an ordinary adapter of twice the rank with the same ``scaling``.
        """
        if not self.is_pissa:
            return self
        alpha = self.alpha * (math.sqrt(2) if self.rslora else 2)
        return replace(self, r=2 * self.r, alpha=alpha, init_lora_weights="kaiming", pissa_niter=None)

    def check(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if ``model`` (on any device) cannot be trained with this adapter.

        Reasons are, for example, that the model lacks the modules, that ``r`` exceeds one of their sizes,
        that the model has frozen parameters or MTP layers, or that the folder ``path`` has an adapter of
        another model, of a reward model or of other modules.
        """
        if self.quantize is not None:
            self._check_quantized(model)
        if not is_fully_trained(model):
            raise ConfigError(
                "model.freeze, model.train_only: an adapter freezes the whole model; leave them out, or use "
                "adapter=none."
            )
        if mtp_layers(model):
            raise ConfigError(
                "model.mtp.num_layers: MTP layers are only trained with the whole model; use 0 with "
                "an adapter, or adapter=none."
            )
        if self.path and not has_scalar_head(model) and is_classifier(Path(self.path).expanduser()):
            raise ConfigError(
                f"adapter.path: {self.path} is an adapter of a reward model, which has a scalar head; use "
                "stage=rm."
            )
        shapes = self.shapes(model)
        others = {"dropout": self.dropout, "dora": self.dora, "init_lora_weights": self.is_pissa and "pissa"}
        check_expert_targets(model, self.expert_targets(model), others)
        if self.path is not None:
            check_tensors(self.path, shapes, file_names(model.config.model_type))

    def _check_quantized(self, model: PreTrainedModel) -> None:
        nf4.check_installed()
        if self.dora or moe_blocks(model):
            what = "adapter.dora" if self.dora else "a model with experts"
            raise ConfigError(f"adapter.quantize: is not supported with {what}; use adapter.quantize=null.")

    def quantized_weights(self, model: PreTrainedModel) -> set[str]:
        """Return the names of the matrices in 4 bits.

        If ``quantize`` is set, these are the matrices of all linear layers except the head and ``saved``.
        """
        if self.quantize is None:
            return set()
        saved = self.saved(model)
        return {f"{name}.weight" for name in linear_names(model) if name not in saved}

    def targets(self, model: PreTrainedModel) -> list[str]:
        """Return the names of the linear layers that are adapted, in the model's order.

        Raises:
            ConfigError: if a name of ``target_modules`` matches nothing, or a module that is not linear.
        """
        return linear_targets(model, self.target_modules)

    def expert_targets(self, model: PreTrainedModel) -> list[str]:
        """Return those of ``targets`` that belong to routed experts, of which each token uses only some."""
        return [name for name in self.targets(model) if EXPERT_PARAM.match(name)]

    def saved(self, model: PreTrainedModel) -> list[str]:
        """Return the names of the modules that are trained in full, in the model's order.

        These are the modules that match ``modules_to_save`` and, as in peft, a scalar head.

        Raises:
            ConfigError: if a name matches no module, or matches a module that is tied, adapted, part of a
                router or an expert, or not a single module with parameters.
        """
        head = (SCORE,) if has_scalar_head(model) else ()
        return saved_modules(model, (*self.modules_to_save, *head), self.targets(model))

    def shapes(self, model: PreTrainedModel) -> dict[str, torch.Size]:
        """Return the shape of each trainable parameter in the model's order, ``modules_to_save`` last.

        Raises:
            ConfigError: if ``targets`` or ``saved`` raises it, or the exported rank of a new adapter is
                larger than the smaller side of a matrix.
        """
        found: dict[str, torch.Size] = {}
        for name in self.targets(model):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            size = min(linear.in_features, linear.out_features)
            if self.path is None and self.exported.r > size:  # an adapter of peft may have any rank
                half = "half of " if self.is_pissa else ""
                raise ConfigError(
                    f"adapter.r: {self.r} is larger than {half}the smaller side of {name} "
                    f"({linear.out_features} x {linear.in_features}); use at most "
                    f"{size * self.r // self.exported.r}."
                )
            found[name + A] = torch.Size((self.r, linear.in_features))
            found[name + B] = torch.Size((linear.out_features, self.r))
            if self.dora:
                found[name + MAGNITUDE] = torch.Size((linear.out_features,))
        for name in self.saved(model):
            own = model.get_submodule(name).named_parameters()
            found |= {f"{name}.{leaf}": parameter.shape for leaf, parameter in own}
        return found

    def largest_rank(self, model: PreTrainedModel) -> int:
        """Return the largest ``r`` that a new adapter of ``model`` may have."""
        sides = (min(model.get_parameter(f"{name}.weight").shape) for name in self.targets(model))
        return min(sides) * self.r // self.exported.r

    def initial_shapes(self, model: PreTrainedModel) -> dict[str, torch.Size]:
        """Return the shapes of PiSSA's frozen initial factors, by name; empty for another initialisation.

        Checkpoints contain these factors in addition to the parameters of ``shapes``.
        """
        own = self.shapes(model) if self.is_pissa else {}
        return {initial_name(name): shape for name, shape in own.items() if name.endswith((A, B))}

    def weights(
        self, model: PreTrainedModel, seed: int, base: WeightSource, *, restores: bool = False
    ) -> WeightSource:
        """Return the initial values by name, read from ``path`` or else a function of ``seed`` and the name.

        Drawn values are in float32. ``base`` is the source of the weights of ``model``, from which the
        magnitudes of DoRA (row norms), ``modules_to_save`` and pissa's factors are initialised. The returned
        source caches pissa's factors, because their parts are read one by one. With ``restores``, they are
        zero: the checkpoint that will be loaded contains them, and a decomposition takes long.
        """
        shapes = self.shapes(model)
        if self.path is not None:
            return stored_weights(self.path, file_names(model.config.model_type))

        @cache
        def principal(module: str) -> tuple[Tensor, Tensor]:
            if restores:
                return torch.zeros(shapes[module + A]), torch.zeros(shapes[module + B])
            weight = base(f"{module}.weight")
            return principal_factors(weight, self.r, self.scaling, self.pissa_niter, seed, module)

        def draw(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            module, added, leaf = name.rpartition(".lora_")
            if added and self.is_pissa:
                return principal(module)[leaf.startswith("B")][index]
            if name.endswith(A):
                return self._draw_a(name, shapes[name], seed)[index]
            if name.endswith(B):
                return torch.zeros(shapes[name])[index]
            if name.endswith(MAGNITUDE):
                whole = base(name.removesuffix(MAGNITUDE) + ".weight")
                return torch.linalg.vector_norm(whole.float(), dim=1)[index]
            return base(name, index)

        return draw

    def _draw_a(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        # As in peft: the initial values of nn.Linear, whose bound depends on the shape of the whole matrix.
        values = torch.empty(shape)
        with seeded(seed, name):
            if self.init_lora_weights == "gaussian":
                return nn.init.normal_(values, std=1 / self.r)
            return nn.init.kaiming_uniform_(values, a=math.sqrt(5))

    def finish_export(
        self, model: ModelSpec, export: Path, base: Path, seed: int, dtype: torch.dtype
    ) -> PreTrainedTokenizerBase:
        """Write the tokenizer to the exported adapter folder ``export``, and return the tokenizer.

        Only one process calls this, after every rank has exported. If the weights of the base model are
        random, from a checkpoint, or have rows of added tokens, they are written to the folder ``base``,
        which adapter_config.json then names. They are in ``dtype``, or in fp32 if they are quantised in
        training, so that quantising them again gives the same values.
        """
        tokenizer = model.load_tokenizer()
        tokenizer.save_pretrained(export)
        if model.is_pretrained:
            return tokenizer
        stored = dtype if self.quantize is None else torch.float32
        stream_folder(model, named_shapes(model.meta_model), model.weights(seed), base, stored)
        model.add_tokenizer(base)
        name_base(export, base)
        return tokenizer

    def shape_hash(self, model: PreTrainedModel) -> str:
        """Return a hash that is equal for adapters that compute the same function of the same parameters."""
        shapes = sorted((name, list(shape)) for name, shape in self.shapes(model).items())
        frozen = [kind for kind in (self.quantize, "pissa" if self.is_pissa else None) if kind is not None]
        return hashlib.sha256(json.dumps([shapes, self.scaling, *frozen]).encode()).hexdigest()


def initial_name(name: str) -> str:
    """Return the name of the frozen initial value of ``name``, which ends with ``A`` or ``B``."""
    return f"{name.removesuffix('weight')}{INITIAL}.weight"
