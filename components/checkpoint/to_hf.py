"""From a checkpoint to the folder that its run would have exported, in one process, tensor by tensor."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import CONFIG_NAME

from components.adapters import LoRA, export_adapter
from components.adapters.export import finish_export, name_base
from components.adapters.merge import merged_weights
from components.checkpoint import resolve_checkpoint
from components.models import ModelSpec, WeightSource, checkpoint_weights, named_shapes, stream_folder
from components.models.experts import router_biases

OPTION = "checkpoint"


@dataclass(frozen=True)
class CheckpointModel:
    """What a run trained, and where it left it."""

    model: ModelSpec
    adapter: LoRA | None
    checkpoint: Path
    """A whole one."""
    run: Path
    """The run's folder."""
    seed: int
    init_from: str | None

    def export_model(self, target: Path, dtype: torch.dtype) -> Path:
        """Writes a model that was trained, or a part of it, to ``target``."""
        assert self.adapter is None
        meta = self.model.build(self.model.config())
        shapes = named_shapes(meta)
        moving = router_biases(meta)  # no gradient, but training changes them, and a checkpoint has them
        named = meta.named_parameters()
        wanted = {name: shapes[name] for name, p in named if p.requires_grad or name in moving}
        trained = checkpoint_weights(self.checkpoint, wanted, OPTION)
        frozen = self._initial() if len(wanted) < len(shapes) else trained

        def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            return (trained if name in wanted else frozen)(name, index)

        return self._stream(shapes, read, target, dtype)

    def export_merged(self, target: Path, dtype: torch.dtype) -> Path:
        """Writes the model that an adapter was trained of, with the adapter added to it."""
        assert self.adapter is not None
        meta = self.model.build(self.model.config())
        merged = merged_weights(self.adapter, meta, self._initial(), self._adapter_weights())
        return self._stream(named_shapes(meta), merged, target, dtype)

    def export_adapter(self, target: Path, dtype: torch.dtype) -> Path:
        """Writes the adapter's own folder. It names the model in the run's folder, where that is one that
        ``from_pretrained`` reads; else this is written beside it, in ``dtype``."""
        assert self.adapter is not None
        own = self._adapter_weights()
        names = self.adapter.shapes(self.model.build(self.model.config()))
        spec = self._started()
        export_adapter(self.adapter, spec, ((name, own(name)) for name in names), target)
        base = self.run / "base"
        if (base / CONFIG_NAME).is_file():
            spec.load_tokenizer().save_pretrained(target)
            name_base(target, base)
        else:
            finish_export(spec, target, target / "base", self.seed, dtype)
        return target

    def _stream(
        self, shapes: dict[str, torch.Size], source: WeightSource, target: Path, dtype: torch.dtype
    ) -> Path:
        stream_folder(self.model, shapes, source, target, dtype)
        self.model.add_tokenizer(target)
        return target

    def _adapter_weights(self) -> WeightSource:
        assert self.adapter is not None
        shapes = self.adapter.shapes(self.model.build(self.model.config()))
        return checkpoint_weights(self.checkpoint, shapes, OPTION)

    def _started(self) -> ModelSpec:
        if self.init_from is None:
            return self.model
        point = resolve_checkpoint("checkpoint.init_from", self.init_from)
        return replace(self.model, initial_checkpoint=point)

    def _initial(self) -> WeightSource:
        """The weights that the run began with, and left as they were where they were frozen."""
        return self._started().weights(self.seed)
