"""Data, from files to batches. ``StdlibData`` and ``FilesData`` are the targets of ``conf/data``."""

from components.data.config import FilesData, StdlibData
from components.data.loader import PreparedData

__all__ = ["FilesData", "PreparedData", "StdlibData"]
