"""Operators at sizes of real use, on inputs of the benchmark: results and gradients are those of the equations."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from subquad.run_suite import REPOSITORY
from subquad.suite.bench.contracts import Shape
from subquad.suite.laws import operators as laws
from subquad.suite.laws.calls import Operator
from tests.gpu.real_sizes import assert_an_operator_equals_plain_pytorch
from tests.laws.test_operators import broken

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GIVEN = {"state": "given"}


def shapes(letters: str, *sizes: Sequence[int], **more: int | str) -> list[Shape]:
    return [dict(zip(letters, size, strict=True)) | more for size in sizes]


STEPS = {
    "h3_inner_step": shapes("BDMN", *((rows, 300, 64, 32) for rows in (1, 3, 64))),
    "mamba_inner_step": shapes(
        "BDNR",
        *((rows, *size) for rows in (1, 4, 16, 33, 80) for size in ((4096, 16, 128), (1536, 16, 48), (200, 5, 7))),
    ),
    "lti_ssm_step": [
        {"B": rows, "D": width, "N": states, "rule": rule}
        for rows, (width, states), rule in product(
            (1, 3, 33, 64),
            ((2048, 32), (300, 64), (77, 5), (9, 512), (8, 1)),
            ("zoh", "bilinear", "dss-exp", "dss-exp-no-scale"),
        )
    ],
}
"""Steps of decoding, which networks call in bfloat16."""
BY_A_LOOP = {
    "slstm": [
        shape | state
        for shape in shapes("BTHK", (100, 39, 4, 32), (3, 300, 2, 64), (17, 20, 3, 21), (1, 5, 1, 5))
        for state in ({}, GIVEN)
    ],
    "rwkv6_inputs": shapes(
        "BTHK", (2, 300, 32, 64), (3, 77, 5, 37), (2, 2, 8, 64), (1, 129, 2, 256), (2, 70, 3, 8), (700, 2, 3, 64)
    ),
    "rwkv7_inputs": shapes("BTHK", (2, 300, 32, 64), (3, 77, 5, 37), (1, 1, 1, 64), (1, 129, 2, 256), (2, 70, 3, 8)),
    "rotated_keys": shapes(
        "BTHNR", (2, 300, 16, 128, 32), (3, 70, 5, 64, 16), (1, 130, 3, 37, 9), (70, 1, 2, 16, 8), (1, 5, 70, 16, 4)
    ),
    "ssd": [
        shape | {"rule": rule} | state
        for shape in shapes(
            "BTHGKV",
            (2, 300, 32, 1, 128, 64),
            (1, 200, 32, 32, 128, 64),
            (3, 130, 32, 4, 40, 72),
            (1, 1, 32, 1, 16, 16),
        )
        for rule, state in (("euler", {}), ("trapezoid", GIVEN))
    ],
    "ssd_steps": [
        shape | {"rule": rule}
        for shape in shapes("BTH", (8, 2048, 24), (3, 301, 5), (1, 1, 64), (1, 20000, 130))
        for rule in ("euler", "trapezoid")
    ],
    "token_shift": [
        shape | options
        for shape in shapes("BTDU", (2, 300, 2048, 5), (3, 77, 185, 6), (1, 1, 64, 1), (40, 1, 520, 2), (2, 70, 8, 3))
        for options in ({"delta": "yes"} | GIVEN, {"delta": "no"})
    ],
}
"""Judged by the reference in float64 on the CPU, as the small shapes are."""
BY_PYTORCH = {
    "rotary": shapes("BTHK", (2, 2048, 16, 128), (1, 700, 4, 256)) + shapes("BTHK", (130, 9, 3, 6), starts=99),
    "rwkv6_inputs": shapes("BTHK", (8, 2048, 32, 64)),
    "rwkv7_inputs": shapes("BTHK", (8, 2048, 32, 64)),
    "ssd": [
        shape | {"rule": rule}
        for shape in shapes("BTHGKV", (2, 2048, 24, 1, 128, 64), (1, 2048, 24, 24, 128, 64), (1, 9001, 24, 3, 64, 128))
        for rule in ("euler", "trapezoid")
    ],
    "swiglu": shapes("RF", (16384, 2736), (4099, 77), (1, 8192), (70000, 3))
    + shapes("RF", (16384, 1536), (4099, 77), halves="apart"),
    "token_shift": [
        {"B": 8, "T": 2048, "D": 1024, "U": uses, "delta": delta} for uses, delta in ((5, "yes"), (6, "no"), (1, "no"))
    ],
    "wkv": shapes("BTD", (4, 1000, 768), (1, 9001, 77), (2, 64, 33), (8, 500, 1), **GIVEN),
}
"""Judged by plain PyTorch in float64 on the GPU, since a loop would take minutes."""


def every(table: dict[str, list[Shape]]) -> list[tuple[str, Shape]]:
    return [(name, shape) for name, found in table.items() for shape in found]


@pytest.mark.parametrize(("name", "shape"), every(STEPS | BY_A_LOOP))
def test_real_sizes_equal_the_reference_in_double_precision(name, shape):
    dtypes = (torch.bfloat16,) if name in STEPS else DTYPES
    operator = Operator(REPOSITORY.operators.load(name), dtypes, "cuda", shapes=(shape,))
    lines = broken(operator, laws.ACCURACY)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "shape"), every(BY_PYTORCH))
def test_real_sizes_equal_plain_pytorch_in_double_precision(name, shape, dtype):
    operator = Operator(REPOSITORY.operators.load(name), device="cuda")
    assert_an_operator_equals_plain_pytorch(operator, shape, dtype)
