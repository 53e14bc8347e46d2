"""Router losses equal the independent implementations of transformers and Megatron."""

from collections.abc import Mapping, Sequence
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError
from components.engines.shared.moe_losses import (
    MoELosses,
    RoutedTokens,
    RouterOutput,
    bias_change,
    expert_load_metrics,
)
from components.models.moe_loss_config import AUX, MoELossConfig, Z

EXPERTS, TOP_K, LAYERS = 6, 2, 3


def routers(terms: MoELossConfig) -> MoELosses:
    options = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "device": torch.device("cpu")}
    return MoELosses(terms, **options, sharing=None, data=None, counted=True)


def padded(lengths: Sequence[int], width: int) -> Batch:
    shape = (len(lengths), width)
    ids = torch.zeros(shape, dtype=torch.int64)
    return Batch(ids, ids, ids, torch.tensor(lengths, dtype=torch.int32))


def packed(lengths: Sequence[int], padding: int = 0) -> Batch:
    """Return sequences packed into one row, with padding after the last one in its span."""
    ids = torch.zeros((1, sum(lengths) + padding), dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ends[-1] += padding
    return Batch(ids, ids, ids, torch.tensor(lengths, dtype=torch.int32), cu_seqlens=ends)


def all_tokens(batch: Batch) -> RoutedTokens:
    return RoutedTokens(batch.real_sequence_ids().reshape(-1), batch.seqlens)


def route(logits: Tensor) -> RouterOutput:
    scores = logits.softmax(-1)
    return RouterOutput(logits, scores, scores.topk(TOP_K, -1).indices)


def totals(terms: MoELossConfig, batches: Sequence[tuple[Batch, Sequence[Tensor]]]) -> Mapping[str, Tensor]:
    """Return each term divided by its count and summed over layers, and the gradients of all logits."""
    kept, counts = routers(terms), [terms.counts(batch) for batch, _ in batches]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    kept.begin(total, n_main=1)
    gradients = []
    for batch, layers in batches:
        leaves = [logits.clone().requires_grad_() for logits in layers]
        for layer, logits in enumerate(leaves):
            weights, _ = kept.attach(logits.sum(-1), layer, route(logits), all_tokens(batch))
            (weights * 0).sum().backward()
        gradients += [torch.cat([leaf.grad for leaf in leaves], -1)]  # type: ignore[misc]
    sums = kept.table.sum(0)
    means = {name: sums[place] / total[name] for name, place in ((AUX, -2), (Z, -1)) if name in total}
    return means | {"gradients": torch.cat(gradients)}


def logits_of(tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(tokens, EXPERTS, generator=generator) for _ in range(LAYERS)]


def test_switch_is_that_of_transformers_layer_by_layer() -> None:
    lengths, width = [5, 9, 2], 9
    layers = logits_of(len(lengths) * width)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    leaves = [logits.clone().requires_grad_() for logits in layers]
    expected = [load_balancing_loss_func((leaf,), EXPERTS, TOP_K, mask) for leaf in leaves]
    # At an even load the loss of transformers is K; ours, like that of Fedus et al., is 1.
    (0.5 * torch.stack(expected).sum() / TOP_K).backward()
    found = totals(MoELossConfig("switch", 0.5), [(padded(lengths, width), layers)])
    torch.testing.assert_close(found[AUX].float(), torch.stack(expected).sum().detach() / TOP_K)
    torch.testing.assert_close(found["gradients"], torch.cat([leaf.grad for leaf in leaves], -1))  # type: ignore[misc]


def test_an_even_load_gives_one() -> None:
    even = torch.eye(EXPERTS).roll(1, 1) + torch.eye(EXPERTS)
    chosen = even.topk(TOP_K).indices
    kept = routers(MoELossConfig("switch", 1.0))
    kept.begin({AUX: EXPERTS}, 1)
    scores = torch.full((EXPERTS, EXPERTS), 1 / EXPERTS)
    kept.attach(scores, 0, RouterOutput(scores, scores, chosen), all_tokens(packed([EXPERTS])))
    assert kept.table[0, -2] / EXPERTS == pytest.approx(1)


@pytest.mark.parametrize("kind", ["sequence", "switch"])
def test_megatron_says_the_same(kind: str) -> None:
    from components.engines.megatron.compat import cpu

    cpu.install()
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    lengths = [5, 9] if kind == "sequence" else [14]
    layers, expected = logits_of(14), []
    for logits in layers:
        for part in logits.split(lengths):
            routed = route(part)
            counts = torch.bincount(routed.chosen.reshape(-1), minlength=EXPERTS).float()
            loss = switch_load_balancing_loss_func(routed.scores, counts, len(part), TOP_K, EXPERTS, 1.0)
            expected.append(loss / len(lengths))
    found = totals(MoELossConfig(kind, 0.1), [(packed(lengths), layers)])  # type: ignore[arg-type]
    torch.testing.assert_close(found[AUX].float(), torch.stack(expected).sum())


def test_z_loss_is_the_mean_square_of_logsumexp() -> None:
    layers = logits_of(9)
    expected = sum(logits[:7].logsumexp(-1).square().mean() for logits in layers)
    found = totals(MoELossConfig(z_loss_coef=0.1), [(packed([3, 4], padding=2), layers)])
    torch.testing.assert_close(found[Z].float(), expected)


@pytest.mark.parametrize(
    "terms", [MoELossConfig("sequence", 0.3, z_loss_coef=0.2), MoELossConfig(z_loss_coef=0.2)]
)
def test_rows_packing_and_micro_batches_change_nothing(terms: MoELossConfig) -> None:
    """Sequence-level and z-loss are the same for eight sequences in batches of any size, padded or packed."""
    lengths = [3, 1, 4, 1, 5, 2, 6, 2]
    layers = [logits.split(lengths) for logits in logits_of(sum(lengths))]

    def tokens(indices: Sequence[int], width: int = 0) -> list[Tensor]:
        """Return the logits of some sequences, padded with logits that must not contribute."""
        rows = [[layer[i] for i in indices] for layer in layers]
        fill = [[torch.full((max(width - len(x), 0), EXPERTS), 7.0) for x in row] for row in rows]
        pairs = (zip(row, pad, strict=True) for row, pad in zip(rows, fill, strict=True))
        return [torch.cat([part for both in pair for part in both]) for pair in pairs]

    def real(batch: Batch, found: Tensor) -> Tensor:
        return found[all_tokens(batch).sequences >= 0]

    whole = totals(terms, [(packed(lengths), tokens(range(8)))])
    for size in (1, 2, 4, 8):
        groups = [range(i, i + size) for i in range(0, 8, size)]
        for width in (0, 6):
            batches = [[lengths[i] for i in group] for group in groups]
            made = [padded(b, 6) if width else packed(b) for b in batches]
            inputs = [tokens(group, width) for group in groups]
            found = totals(terms, list(zip(made, inputs, strict=True)))
            for name in terms.coefficients:
                torch.testing.assert_close(found[name], whole[name])
            parts = found["gradients"].split([len(i[0]) for i in inputs])
            kept = [real(batch, part) for batch, part in zip(made, parts, strict=True)]
            torch.testing.assert_close(torch.cat(kept), whole["gradients"])
            assert sum(part.abs().sum() for part in parts) == pytest.approx(
                float(whole["gradients"].abs().sum()), rel=1e-5
            )


def test_the_global_batch_counts_what_came_before() -> None:
    first, second = logits_of(8, seed=1), logits_of(4, seed=2)
    batches = [(packed([8]), first), (packed([4]), second)]
    found = totals(MoELossConfig("global_batch", 1.0), batches)
    expected = torch.zeros(())
    for one, two in zip(first, second, strict=True):
        counts = [torch.bincount(route(x).chosen.reshape(-1), minlength=EXPERTS) for x in (one, two)]
        loads = [counts[0] * EXPERTS / 16, (counts[0] + counts[1]) * EXPERTS / 24]
        for logits, load in zip((one, two), loads, strict=True):
            expected += (logits.softmax(-1).sum(0) * load).sum() / 12
    torch.testing.assert_close(found[AUX].float(), expected)


def test_a_layer_that_is_computed_again_counts_once() -> None:
    kept, (logits, *_) = routers(MoELossConfig("global_batch", 1.0)), logits_of(5)
    kept.begin({AUX: 5}, 1)
    tokens = all_tokens(packed([5]))
    _, load = kept.attach(logits, 0, route(logits), tokens)
    before = kept.table.clone()
    again, other = kept.attach(logits.clone().requires_grad_(), 0, route(logits), tokens, recomputed=load)
    assert torch.equal(kept.table, before)
    assert other is load
    assert again.requires_grad


def test_biases_move_towards_an_even_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of biases equal Megatron's on one rank."""
    from components.engines.megatron.compat import cpu

    cpu.install()
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(moe_utils, "parallel_state", MagicMock())
    load, bias = torch.tensor([[4.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), torch.zeros(2, 3)
    assert torch.equal(bias_change(load, 0.5), moe_utils.get_updated_expert_bias(load, bias, 0.5))
    assert bias_change(load, 0.5).tolist() == [[-0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_metrics_say_how_uneven_layers_are() -> None:
    loads = torch.tensor([[2.0, 4.0, 6.0, 3.0], [4.0, 4.0, 4.0, 0.0]])
    found = expert_load_metrics(loads, drops=True)
    assert found["moe/max_violation"] == pytest.approx(0.5)
    assert (found["moe/load_max/0"], found["moe/load_min/0"]) == (1.5, 0.5)
    assert found["moe/load_max/1"] == found["moe/load_min/1"] == 1
    assert found["moe/dropped"] == pytest.approx(3 / 24)


@pytest.mark.parametrize("key", ["aux_loss_coef", "z_loss_coef", "bias_update_rate"])
def test_strengths_are_numbers(key: str) -> None:
    for value in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=f"model.moe.{key}: must be a number of at least 0"):
            MoELossConfig(**{key: value})  # type: ignore[arg-type]
