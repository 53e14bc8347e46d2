"""Data, from files to batches. Its ``Data`` classes are the targets of ``conf/data``."""

from components.data.config import StdlibData
from components.data.files import FilesData
from components.data.llamafactory import LlamaFactoryData
from components.data.loader import PreparedData

__all__ = ["FilesData", "LlamaFactoryData", "PreparedData", "StdlibData"]
