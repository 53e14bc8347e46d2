"""Low-rank adapters: what is trained of a frozen model, and the folder (peft's) it is kept in."""

from components.adapters.export import export_adapter
from components.adapters.from_config import lora, none
from components.adapters.lora_config import LoRA

__all__ = ["LoRA", "export_adapter", "lora", "none"]
