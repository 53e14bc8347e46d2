"""Reading a checkpoint's ``.metadata``, which is a pickle, without running code that it names."""

import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as stored

FILE = ".metadata"
CLASSES: dict[str, set[str]] = {
    stored.__name__: {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""Module -> names that may occur in the pickle. ``BytesStorageMetadata`` is left out, because torch unpickles
the data that it describes."""


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that accepts only descriptions of tensors."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class of ``CLASSES``; raise UnpicklingError for any other."""
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of tensors needs")
        return super().find_class(module, name)


def read_metadata(checkpoint: Path) -> stored.Metadata:
    """Read the description of the tensors in the folder ``checkpoint``.

    Raises:
        OSError: if the file cannot be read.
        UnpicklingError: if it is damaged, or holds anything other than descriptions of tensors.
    """
    with (checkpoint / FILE).open("rb") as file:
        try:
            found = MetadataUnpickler(file).load()
        except (OSError, pickle.UnpicklingError):
            raise
        except Exception as error:
            raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error
    if not (isinstance(found, stored.Metadata) and isinstance(found.state_dict_metadata, dict)):
        raise pickle.UnpicklingError("it is not the description of a checkpoint")
    entries = found.state_dict_metadata.values()
    if not all(isinstance(entry, stored.TensorStorageMetadata) for entry in entries):
        raise pickle.UnpicklingError("it describes something that is not a tensor")
    return found


class CheckpointReader(dcp.FileSystemReader):
    """torch's ``FileSystemReader``, but ``.metadata`` is read by ``read_metadata`` of this module."""

    def read_metadata(self, *_: object, **__: object) -> stored.Metadata:
        found = read_metadata(Path(self.path))
        found.storage_meta = found.storage_meta or stored.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
