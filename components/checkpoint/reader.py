"""Reading parts of a checkpoint's tensors one at a time, without collective operations."""

from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from components.checkpoint.dcp import EVALUATED
from components.checkpoint.safe_reader import CheckpointReader
from components.contracts.errors import ConfigError


class StoredTensors:
    """The tensors of the complete checkpoint ``folder``, whatever layout wrote them."""

    def __init__(self, folder: Path) -> None:
        """Open the checkpoint; raise ConfigError if it cannot be read."""
        self.folder, self._reader = folder, CheckpointReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except (OSError, UnpicklingError) as error:
            raise ConfigError(f"{folder}: cannot be read ({error}); take another checkpoint.") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        found = metadata.state_dict_metadata.items()
        self._stored = {key: meta for key, meta in found if isinstance(meta, TensorStorageMetadata)}

    @property
    def kind_to_evaluate(self) -> str:
        """The kind of the weights to evaluate: ``EVALUATED`` if the checkpoint has it, or else ``model``."""
        return EVALUATED if self.shapes(EVALUATED) else "model"

    def shapes(self, kind: str) -> dict[str, torch.Size]:
        """Return the full (unsharded) shapes of the tensors ``<kind>/<name>``, by name."""
        prefix = f"{kind}/"
        names = (key.removeprefix(prefix) for key in self._stored if key.startswith(prefix))
        return {name: self._stored[prefix + name].size for name in names}

    def read(self, key: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read the part ``index`` (slices without a step; () is the whole) to the CPU, in its stored dtype.

        The peak memory is that of the part and of the largest stored chunk that overlaps it.
        """
        stored = self._stored[key]
        every = [part.indices(size)[:2] for part, size in zip(index, stored.size, strict=False)]
        every += [(0, size) for size in stored.size[len(every) :]]
        offsets = torch.Size(start for start, _ in every)
        part = torch.empty([stop - start for start, stop in every], dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(key, stored, [ChunkStorageMetadata(offsets, part.shape)])
        self._reader.read_data(dcp.LoadPlan(items), Into(part)).wait()
        return part


class Into(dcp.DefaultLoadPlanner):
    """A planner that reads everything into one tensor, at the offsets given by the read items."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self.part = part

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:  # noqa: ARG002
        return self.part
