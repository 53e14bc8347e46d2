"""Code that both engines share."""
