"""Low-rank adapters of a frozen model, and the folders in peft's format that hold them."""

from components.adapters.from_config import lora, none
from components.adapters.lora_config import LoRA
from components.adapters.peft_export import export_adapter

__all__ = ["LoRA", "export_adapter", "lora", "none"]
