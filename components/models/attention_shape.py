"""How wide the heads of a model's attention are, whatever its configuration calls that."""

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer."""

    number: int
    """Of queries."""
    shared: int
    """Of keys and values, each of which serves as many queries."""
    key: int
    """Channels of a query and of a key."""
    value: int
    """Channels of a value and of what a head attends to."""
    latent: int = 0
    """Channels that queries, keys and values are made of (latent attention); 0: the hidden state's."""


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
