"""Reinforcement learning with an engine driven by hand: `python examples/reinforce.py`, also under torchrun.

The policy chooses one of eight answers to a prompt, and even ones are rewarded. The engine scores all of
them, some are drawn from its distribution, and each is trained on with its advantage as the weight.
"""

from dataclasses import dataclass

import torch

from components.contracts.batch import IGNORE, Batch
from components.contracts.engine import Engine, EngineOptions
from components.contracts.loss import LossOutput, TokenStats
from components.engines.fsdp2 import FSDP2
from components.losses import NextToken
from components.models import ModelSpec
from components.optimizers import AdamW

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL = ModelSpec(architecture={"model_type": "qwen3", "vocab_size": 64, "num_key_value_heads": 2, **SIZES})
PROMPT, ANSWERS = [10, 11, 12], torch.arange(8)


@dataclass(frozen=True)
class Reinforce(NextToken):
    advantage: float

    def weights(self, batch: Batch) -> torch.Tensor:
        return self.advantage * (batch.labels != IGNORE).float()

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        return LossOutput({"loss": -(self.weights(batch) * stats.logps).sum()})


def rows(answers: torch.Tensor) -> Batch:
    ids = torch.cat([torch.tensor(PROMPT).repeat(len(answers), 1), answers[:, None]], 1)
    labels = torch.full_like(ids, IGNORE)
    labels[:, -2] = answers
    lengths = torch.full((len(ids),), ids.shape[1], dtype=torch.int32)
    return Batch(ids, labels, torch.arange(ids.shape[1]).repeat(len(ids), 1), lengths)


def train(engine: Engine, steps: int = 30) -> list[float]:
    draw, rates = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        found = engine.logps([rows(ANSWERS)])
        assert found is not None, "a pipeline has them on its last stage only"
        policy = found[0][:, -2].softmax(0).cpu()
        rates.append(policy[::2].sum().item())
        drawn = ANSWERS[policy.multinomial(8, replacement=True, generator=draw)]
        rewards = (drawn % 2 == 0).float()
        engine.begin_train_step()
        for number in range(engine.dp_rank, len(drawn), engine.dp_size):  # this rank's share
            loss = Reinforce(advantage=(rewards[number] - rewards.mean()).item())
            engine.train_microbatches([rows(drawn[number : number + 1])], loss)
        engine.finish_train_step(lr=3e-3)
    return rates


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = FSDP2().build(MODEL, AdamW(weight_decay=0.0), EngineOptions(torch.float32, device))
    print("probability of an even answer:", *(f"{rate:.3f}" for rate in train(engine)[::5]))
    engine.close()
