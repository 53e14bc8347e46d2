"""Data, from files to batches. The files of ``conf/data`` name these ``Data`` classes as ``_target_``."""

from components.data.config import StdlibData as StdlibData
from components.data.files import FilesData as FilesData
from components.data.llamafactory import LlamaFactoryData as LlamaFactoryData
from components.data.loader import PreparedData as PreparedData
