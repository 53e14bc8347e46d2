"""Low-rank adapters: what is trained of a frozen model, and the folder (peft's) it is kept in."""

from components.adapters.export import export_adapter
from components.adapters.settings import lora, none
from components.adapters.spec import LoRA

__all__ = ["LoRA", "export_adapter", "lora", "none"]
