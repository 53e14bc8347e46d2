"""Tiled RMS norms give the results and gradients of transformers' norms."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from components.engines.fsdp2 import tiled_norm
from components.engines.fsdp2.tiled_norm import apply_tiled_norms, has_replaceable_norms

SHAPES = [(5, 8), (2, 7, 8), (1, 3, 4, 8), (0, 8)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute two rows at a time, so that the last tile is not full."""
    monkeypatch.setattr(tiled_norm, "TILE", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def norm(dtype: torch.dtype = torch.float32) -> LlamaRMSNorm:
    torch.manual_seed(0)
    made = LlamaRMSNorm(8, eps=1e-3)
    nn.init.normal_(made.weight)
    return made.to(dtype)


def tiled(made: nn.Module) -> nn.Module:
    apply_tiled_norms(made)  # type: ignore[arg-type]
    return made


def passes(made: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the result for ``x``, the gradient of ``x`` and that of the weight, for an uneven gradient."""
    leaf = x.clone().requires_grad_()
    result = made(leaf)
    result.backward(torch.arange(result.numel()).remainder(5).sub(1).to(x.dtype).view(result.shape))
    return [result.detach(), leaf.grad, made.get_parameter("weight").grad]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_transformers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for ours, theirs in zip(passes(tiled(norm()), x), passes(norm(), x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_input_and_a_gradient_that_are_not_contiguous() -> None:
    x = torch.randn(3, 20)
    results = []
    for made in (tiled(norm()), norm()):
        leaf = x.clone().requires_grad_()
        made(leaf[:, 4:12]).t().square().cumsum(1).sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_results_are_rounded_once(dtype: torch.dtype) -> None:
    made, x = norm(dtype), torch.randn(6, 8).to(dtype)
    leaf, weight = x.double().requires_grad_(), made.weight.detach().double()
    exact = leaf * (leaf.square().mean(-1, keepdim=True) + made.variance_epsilon).rsqrt() * weight
    exact.backward(torch.arange(48).remainder(5).sub(1).view(6, 8))
    result, of_x, _ = passes(tiled(made), x)
    assert result is not None
    assert of_x is not None
    assert leaf.grad is not None
    assert result.dtype == dtype
    assert torch.equal(result, exact.detach().to(dtype))
    torch.testing.assert_close(of_x.double(), leaf.grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_the_result_is_not_a_view_on_which_fsdp_would_lose_its_hooks() -> None:
    assert tiled(norm())(torch.randn(2, 3, 8).requires_grad_())._base is None


def test_only_the_input_and_a_number_per_row_are_saved() -> None:
    saved: list[Tensor] = []
    x, made = torch.randn(6, 8).requires_grad_(), tiled(norm())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        made(x)
    assert [list(t.shape) for t in saved] == [[6, 8], [8], [6, 1]]
    assert saved[0].data_ptr() == x.data_ptr()


def test_a_frozen_weight_has_no_gradient() -> None:
    x = torch.randn(4, 8)
    *found, of_weight = passes(tiled(norm()).requires_grad_(False), x)
    assert of_weight is None
    torch.testing.assert_close(found, passes(norm(), x)[:2])


def test_norms_with_another_formula_stay() -> None:
    class Own(LlamaRMSNorm):
        """From a module of the user's own, which may do anything."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.other, self.own = Qwen3RMSNorm(8), Gemma2RMSNorm(8), Own(8)
            self.centred, self.gated = CohereLayerNorm(8), FalconH1RMSNormGated(8)
            self.layer = nn.LayerNorm(8)

    model = Model()
    apply_tiled_norms(model)  # type: ignore[arg-type]
    changed = {name for name, module in model.named_children() if "forward" in vars(module)}
    assert changed == {"plain"}
    assert not has_replaceable_norms(nn.ModuleList([model.other, model.own]))  # type: ignore[arg-type]
