"""Number and sizes of attention heads, from configuration fields that differ between model families."""

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class AttentionShape:
    """Attention heads of one layer."""

    number: int
    """Number of query heads."""
    shared: int
    """Number of key-value heads (GQA)."""
    key: int
    """Number of channels of a query and of a key, per head."""
    value: int
    """Number of channels of a value and of the attention output, per head."""
    latent: int = 0
    """Sum of the ranks of the query and key-value latents (MLA). 0 means projections of the hidden state."""


def attention_shape(config: PreTrainedConfig) -> AttentionShape:
    text = config.get_text_config()
    number = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or number
    if (latent := getattr(text, "kv_lora_rank", None)) is not None:
        return AttentionShape(
            number, number, text.qk_head_dim, text.v_head_dim, latent + (text.q_lora_rank or 0)
        )
    width = getattr(text, "head_dim", None) or text.hidden_size // number
    return AttentionShape(number, shared, width, width)
