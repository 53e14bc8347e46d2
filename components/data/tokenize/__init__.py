"""From samples to tokens and masks."""
