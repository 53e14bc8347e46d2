"""Data, from files to batches. The files of ``conf/data`` name these ``Data`` classes as ``_target_``."""

from components.data.config import StdlibData
from components.data.files import FilesData
from components.data.llamafactory import LlamaFactoryData
from components.data.loader import PreparedData

__all__ = ["FilesData", "LlamaFactoryData", "PreparedData", "StdlibData"]
