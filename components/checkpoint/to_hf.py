"""Export of a checkpoint as a Hugging Face or peft folder, without an engine."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from components.adapters import LoRA, export_adapter
from components.adapters.merge import merged_weights
from components.adapters.peft_folder import name_base
from components.checkpoint import resolve_checkpoint
from components.models import ModelSpec, WeightSource, checkpoint_weights, named_shapes, nf4, stream_folder
from components.models.experts import router_biases
from components.models.export.hf_folder import write_configs
from components.models.export.safetensors_writer import stored_tensors
from components.models.generate import load_with_weights
from components.models.mtp import MTPConfig

OPTION = "checkpoint"


@dataclass(frozen=True)
class CheckpointModel:
    """The model or adapter that a run trained, and its checkpoint."""

    model: ModelSpec
    adapter: LoRA | None
    checkpoint: Path
    """A complete, undamaged checkpoint."""
    run: Path
    """The run's folder."""
    seed: int
    init_from: str | None
    kind: str = "model"
    """Prefix of the weights' keys in the checkpoint, such as ``hook/ema``."""

    def export_model(self, target: Path, dtype: torch.dtype, *, mtp: bool = True) -> Path:
        """Write the trained model to ``target``; an adapter is merged into its base model.

        Without ``mtp``, layers for multi-token prediction are left out.

        Raises:
            ConfigError: if the base model is quantised, and what reads it is not installed.
        """
        (shapes, source), spec = self._weights(), self.model
        if not mtp:  # patterns of trained parameters may name these layers
            spec = replace(spec, mtp=MTPConfig(), freeze=(), train_only=())
            shapes = named_shapes(spec.meta_model)
        stream_folder(spec, shapes, source, target, dtype)
        self.model.add_tokenizer(target)
        return target

    def load_model(self, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return what transformers loads from the export, without writing the weights.

        Raises:
            ConfigError: as ``export_model``.
        """
        shapes, source = self._weights()
        with tempfile.TemporaryDirectory() as folder:  # of configurations and the tokenizer
            write_configs(self.model, Path(folder), dtype)
            tokenizer = self.model.add_tokenizer(Path(folder))
            weights = stored_tensors(self.model, shapes, source, dtype)
            return load_with_weights(Path(folder), self.model.trust_remote_code, weights), tokenizer

    def _weights(self) -> tuple[Mapping[str, torch.Size], WeightSource]:
        """Return the shapes and the source of the trained weights, with an adapter merged into them."""
        meta = self.model.meta_model
        shapes = named_shapes(meta)
        if self.adapter is not None:
            if self.adapter.quantize is not None:
                nf4.check_installed()
            return shapes, merged_weights(self.adapter, meta, self._initial(), self._adapter_weights())
        moving = router_biases(meta)  # no gradient, but training updates them, and checkpoints contain them
        named = meta.named_parameters()
        wanted = {name: shapes[name] for name, p in named if p.requires_grad or name in moving}
        trained = checkpoint_weights(self.checkpoint, wanted, OPTION, kind=self.kind)
        frozen = self._initial() if len(wanted) < len(shapes) else trained

        def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            return (trained if name in wanted else frozen)(name, index)

        return shapes, read

    def export_adapter(self, target: Path, dtype: torch.dtype, *, writes: bool = True) -> Path:
        """Write the adapter to its own folder ``target``.

        In a process group every rank calls this method, and ``writes`` is True on one rank.

        adapter_config.json names the base model in the run's folder if it was exported there. Otherwise a
        base model that is not pretrained is written to ``target/base`` in ``dtype`` (fp32 if quantised).
        """
        assert self.adapter is not None
        own = self._adapter_weights()
        names = self._adapter_shapes()
        spec = self._started()
        export_adapter(self.adapter, spec, ((name, own(name)) for name in names if writes), target)
        if not writes:
            return target
        base = self.run / "base"
        if (base / CONFIG_NAME).is_file():
            spec.load_tokenizer().save_pretrained(target)
            name_base(target, base)
        else:
            self.adapter.finish_export(spec, target, target / "base", self.seed, dtype)
        return target

    def _adapter_weights(self) -> WeightSource:
        return checkpoint_weights(self.checkpoint, self._adapter_shapes(), OPTION, kind=self.kind)

    def _adapter_shapes(self) -> dict[str, torch.Size]:
        assert self.adapter is not None
        meta = self.model.meta_model
        return self.adapter.shapes(meta) | self.adapter.initial_shapes(meta)

    def _started(self) -> ModelSpec:
        if self.init_from is None:
            return self.model
        point = resolve_checkpoint("checkpoint.init_from", self.init_from)
        return replace(self.model, initial_checkpoint=point)

    def _initial(self) -> WeightSource:
        """Return the initial weights of the run.

        The frozen weights of the run still have these values.
        """
        return self._started().weights(self.seed)
