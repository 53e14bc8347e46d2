"""From files to batches. ``StdlibData`` and ``FilesData`` are the targets of ``conf/data``."""

from components.data.loader import PreparedData
from components.data.spec import FilesData, StdlibData

__all__ = ["FilesData", "PreparedData", "StdlibData"]
