"""A train step reads no number back from the device.

On the meta device such a read raises an error, except within an operator that has a shape rule there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.contracts.batch import Batch
from components.contracts.loss import Loss, TokenStats
from components.engines.fsdp2.context_parallel import ContextParallel
from components.engines.fsdp2.log_prob_model import LogProbModel
from components.engines.shared import process_group, varlen_attention
from components.engines.shared import token_log_probs as logps
from components.engines.shared.loss_accumulator import LossAccumulator
from components.engines.shared.mtp import add_mtp_losses
from components.losses import CPO, DPO, KTO, ORPO, NextToken, Reward
from components.models.mtp import MTPConfig
from tests.distributed.cases import LAYOUTS, sequences, spec

META = torch.device("meta")


def chat(**options: Any) -> NextToken:
    plain = {"kind": "chat", "normalize": "token", "label_smoothing": 0.0, "z_loss": 0.0}
    return NextToken(**plain | options)


LOSSES: dict[str, Loss] = {
    "token": chat(),
    "sequence": chat(normalize="sequence"),
    "every statistic": chat(label_smoothing=0.1, z_loss=1e-4),
    "dpo": DPO(beta=0.1, label_smoothing=0.0),
    "every term of dpo": DPO(beta=0.1, label_smoothing=0.0, loss="ipo", rpo_alpha=0.5, ld_alpha=0.5),
    "weighted list of dpo": DPO(beta=0.1, loss=("sigmoid", "bco_pair"), loss_weights=(0.8, 0.2), wpo=True),
    "orpo": ORPO(beta=0.1),
    "cpo": CPO(beta=0.1, loss="sigmoid", cpo_alpha=1.0),
    "simpo": CPO(beta=2.0, loss="simpo", cpo_alpha=0.0, simpo_gamma=0.8),
    "kto": KTO(beta=0.1, loss="kto", desirable_weight=1.0, undesirable_weight=1.0),
    "rm": Reward(center_rewards_coefficient=0.1),
}


class Refuse(TorchDispatchMode):
    """Raise an error for operators that have a shape rule, but on a GPU wait for the size of their result."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        assert device != META or "masked_scatter_backward" not in str(func), func
        return func(*args, **kwargs or {})


class TwoRanks:
    """The second of two context-parallel ranks, without communication."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all sequences in one attention call, as on a GPU; only shapes matter here."""

    def varlen(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return (query * key[..., :1, :1, :1] * value[..., :1, :1, :1]).transpose(1, 2)

    monkeypatch.setattr(varlen_attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(varlen_attention, "varlen_kernel", varlen)
    monkeypatch.setitem(logps.CHUNK_BYTES, "meta", 1 << 12)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    process_group.init_process_group("cpu")
    yield
    process_group.destroy_process_group()


def micro_batch(layout: str, *, share_prompt: bool = False) -> Batch:
    """Return a micro-batch of four pairs or eight answers, for any loss."""
    batch = LAYOUTS[layout](sequences())
    batch.pair_index = torch.arange(batch.num_sequences)
    batch.ref_logps = torch.zeros(batch.labels.shape)
    batch.sequence_labels, batch.constants = batch.pair_index % 2, {"kl": 0.1}
    batch.margins, batch.pad_id = torch.ones(batch.num_sequences, dtype=torch.float64), 0
    if share_prompt:
        batch.prefix_lengths = torch.tensor([0, 3] * 4, dtype=torch.int32)
        batch.num_keys = batch.labels.numel() + 12
    return batch


def forward_and_backward(here: Batch, loss: Loss, mtp_layers: int = 0, group: Any = None) -> None:
    scalar = "values" in loss.requires
    described = replace(spec("qwen3"), mtp=MTPConfig(mtp_layers), scalar_head=scalar)
    model, terms = (
        described.build(described.config(), attention=varlen_attention.ATTENTION),
        described.mtp,
    )
    scorer = LogProbModel(model, ContextParallel(group or dist.group.WORLD))
    sums, ahead = LossAccumulator(), terms.batches(here)
    given, *depths = (scorer.context.model_input(batch, META) for batch in (here, *ahead))
    with Refuse():
        weights = loss.weights(given.batch)
        found = scorer(given, loss.requires, weights, depths)
        number = len(fields(TokenStats))
        output, mtp = loss(TokenStats(*found[:number]), given.batch), found[number:]
        output, sums.counts = add_mtp_losses(output, loss.counts(here), terms, ahead, mtp)
        sums.scaled_loss(output).backward()
        sums.add(output, sums.counts)
    assert all(p.grad is not None and p.grad.device == META for p in scorer.parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_nothing_is_read_back(loss: Loss, layout: str) -> None:
    forward_and_backward(micro_batch(layout), loss)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nor_for_further_tokens(layout: str) -> None:
    forward_and_backward(micro_batch(layout), LOSSES["token"], mtp_layers=2)


def test_nor_for_shared_prompts() -> None:
    forward_and_backward(micro_batch("packed", share_prompt=True), LOSSES["dpo"])


@pytest.mark.parametrize("share_prompt", [False, True])
def test_nor_with_one_call_per_sequence(monkeypatch: pytest.MonkeyPatch, share_prompt: bool) -> None:
    """Attention in fp32 or with dropout has no kernel for packed rows."""
    monkeypatch.setattr(varlen_attention, "has_kernel", lambda *_: False)
    forward_and_backward(micro_batch("packed", share_prompt=share_prompt), LOSSES["dpo"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nor_with_a_share_of_every_row(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    for name in ("all_to_all_single", "all_gather"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    forward_and_backward(micro_batch(layout), LOSSES["token"], mtp_layers=1, group=TwoRanks())


def test_asking_would_fail() -> None:
    batch = micro_batch("packed").to(META)
    batch.label_index = None
    with pytest.raises(NotImplementedError, match="meta"):
        batch.labelled()


def test_a_size_that_depends_on_values_is_refused() -> None:
    values = torch.ones(2, 2, device=META, requires_grad=True)
    spread = torch.zeros(2, 2, device=META).masked_scatter(values > 0, values)
    with pytest.raises(AssertionError, match="masked_scatter_backward"), Refuse():
        spread.sum().backward()
