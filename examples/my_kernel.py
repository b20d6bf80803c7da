"""A Triton kernel of one's own with its workload: logits capped softly, y = cap tanh(x / cap), as in Gemma 2.

python run_suite.py check operator soft_cap --plugin examples/my_kernel.py   # accuracy, views, batch of 0; on a GPU
python run_suite.py bench --plugin examples/my_kernel.py                     # time and floor, on a GPU
python run_suite.py bench --plugin examples/my_kernel.py --compare main      # exit code 1 if it has become slower
python run_suite.py bench --plugin examples/my_kernel.py --update-budgets    # writes budgets.json beside it, no GPU
python run_suite.py bench --plugin examples/my_kernel.py --check-budgets     # exit code 1 if it exceeds them, no GPU
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.workload import Cost, Implementation, Inputs, Shape, Workload, normal, traffic


@triton.jit
def _soft_cap_kernel(x, y, cap, N, BLOCK: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o_n, mask=o_n < N).to(tl.float32)
    # tanh by the sigmoid, which Triton has for every GPU
    b_y = cap * (2.0 * tl.sigmoid(2.0 * b_x / cap) - 1.0)
    tl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=o_n < N)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap) for x of any shape. It reads no data, so it can be called on meta tensors."""
    # the kernel reads memory, which has the opposite signs where x is torch.conj(z).imag
    x = x.resolve_neg().contiguous()
    y = torch.empty_like(x)
    _soft_cap_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, cap, x.numel(), BLOCK=1024)
    return y


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return {"x": normal(generator, dtype, int(shape["N"])), "cap": 3.0}


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    num_bytes = int(shape["N"]) * dtype.itemsize
    return Cost(traffic(num_bytes, num_bytes, backward), 6 * int(shape["N"]), num_exponentials=int(shape["N"]))


WORKLOAD = Workload(
    op="soft_cap",
    reference=soft_cap_reference,
    make_inputs=make_inputs,
    cost=cost,
    short=lambda shape: {"N": min(int(shape["N"]), 5000)},
    implementations=(
        Implementation("triton", "ours", lambda: soft_cap, cold_start=True),
        Implementation("torch", "torch", lambda: soft_cap_reference),
    ),
    shapes={"quick": ({"N": 2**24},)},
    backward=False,
)
OPERATORS = {"soft_cap": WORKLOAD}
