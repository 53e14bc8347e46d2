"""Low-rank adapters of a frozen model, and the folders in peft's format that hold them."""

from components.adapters.export import export_adapter
from components.adapters.from_config import lora, none
from components.adapters.lora_config import LoRA

__all__ = ["LoRA", "export_adapter", "lora", "none"]
