"""The embedded tokenizer: ``AutoTokenizer.from_pretrained(PATH)`` loads this folder; ``train.py`` made it."""

from pathlib import Path

PATH = str(Path(__file__).parent)
