"""Parts that both engines are made of."""
