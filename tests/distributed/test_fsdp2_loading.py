"""Building a model takes little more memory than this rank's shard of it."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.models import ModelSpec
from tests.distributed.loading_cases import build, warm_up
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of 108M weights in bf16, the usual dtype of published models."""
    path = tmp_path_factory.mktemp("model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ModelSpec(architecture=MODEL).config())
    model.to(torch.bfloat16).to_empty(device="cpu").save_pretrained(path)
    return path


def test_two_ranks_take_little_more_than_their_shards(folder: Path) -> None:
    two = Ranks(2)
    two.run(warm_up, 2)
    for peak, shards in two.run(build, folder, 2):
        assert shards > 150e6
        assert peak < 1.15 * shards, f"{peak / shards:.2f} x the shard"
