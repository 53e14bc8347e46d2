"""The products that LoRA adds in place to the output of a fused layer of Megatron."""

import pytest
import torch
from torch import Tensor

from components.engines.megatron.runtime.hf_weights import HFTensorSlice
from components.engines.megatron.runtime.lora import AddProducts

GROUPS, WIDTH, RANK = 2, 7, 3
MEMBERS = [  # rows 0 to 3 and 4 to 5 of each of two groups of seven; no member has rows 3 and 6
    HFTensorSlice(name, torch.Size([GROUPS * (stop - start), 5]), (), None, GROUPS, start, stop, primary=True)
    for name, start, stop in (("q", 0, 3), ("k", 4, 6))
]


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    ups = [torch.randn(GROUPS * (member.stop - member.start), RANK, dtype=dtype) for member in MEMBERS]
    return torch.randn(4, 1, GROUPS * WIDTH, dtype=dtype), torch.randn(4, 1, 2 * RANK, dtype=dtype), ups


@pytest.mark.parametrize("has_initial", [False, True])
def test_gradients(has_initial: bool) -> None:
    out, narrow, ups = drawn(torch.float64)
    initial = [torch.randn_like(b) for b in ups] if has_initial else []
    narrow = torch.cat([narrow, torch.randn_like(narrow)], -1) if has_initial else narrow
    inputs = [tensor.requires_grad_() for tensor in (out, narrow, *ups)]

    def total(out: Tensor, narrow: Tensor, *trained: Tensor) -> Tensor:
        # A clone, because the function overwrites its argument, from which gradcheck computes differences.
        return AddProducts.apply(out.clone(), narrow, MEMBERS, *trained, *initial)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(total, inputs)


def test_the_initial_factors_leave_a_bf16_output_as_it_is() -> None:
    """If the products were added and subtracted one after the other, rounding would change the output."""
    out, narrow, ups = drawn(torch.bfloat16)
    total = AddProducts.apply(out.clone(), torch.cat([narrow, narrow], -1), MEMBERS, *ups, *ups)
    assert torch.equal(total, out)
