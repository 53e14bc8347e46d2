"""Writing Hugging Face model folders."""
