"""Autotuned kernels of other projects: all forms are compiled before the first is timed."""

import pytest

from tests.processes import in_a_process

pytest.importorskip("triton", minversion="3.6")

# one of three forms cannot be compiled, which its own launch says and nothing before; the process is one in which
# kernels are compiled, as in none that has changed Triton's interpreter
FORMS = """
import torch
from kernel_with_forms import kernel
from triton import CompilationError, Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from subquad.suite.bench import tuning
from subquad.suite.bench.compile import AbsentGPU

gpu = AbsentGPU("sm_90")
if reason := gpu.reason():
    raise SystemExit(f"skip: {reason}")
kernel = JITFunction(kernel)
driver.set_active(gpu)
# in one of many runs of all tests a form failed in one of two threads, for a reason that was not found; such a form is
# compiled where it is timed, as without threads
tuning.cores = lambda: 1
forms = [Config({"BLOCK": 8}), Config({"BLOCK": 16}), Config({"BLOCK": 16}, num_warps=1)]
tuner = Autotuner(kernel, kernel.arg_names, forms, ["N"], None, None)
tuner.nargs = {"x": torch.empty(64, device="meta"), "N": 64}
prune = Autotuner.prune_configs
with tuning.forms_compiled_together():
    assert tuner.prune_configs({"grid": (1,), "warmup": False}) == forms
try:
    # Triton 3.6 returns what it has not compiled, and raises at the launch
    kernel.run(**tuner.nargs, grid=(1,), warmup=True, **forms[0].all_kwargs()).result()
except CompilationError as error:
    assert "BLOCK > 8" in str(error)
else:
    raise AssertionError("compiled a form that cannot be")

def compile_again(*args, **kwargs):
    raise AssertionError("compiled again")

kernel._do_compile = compile_again
for form in forms[1:]:
    assert kernel.run(**tuner.nargs, grid=(1,), warmup=True, **form.all_kwargs()) is not None
assert Autotuner.prune_configs is prune
"""
KERNEL = """
import triton.language as tl

def kernel(x, N, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 8)
    o = tl.arange(0, BLOCK)
    tl.store(x + o, 2 * tl.load(x + o, mask=o < N), mask=o < N)
"""


@pytest.mark.slow
def test_forms_are_compiled_before_one_is_timed(tmp_path):
    (tmp_path / "kernel_with_forms.py").write_text(KERNEL)
    code = f"import sys\nsys.path.append({str(tmp_path)!r})\n{FORMS}"
    # an empty cache, or a form that an earlier test compiled would be found there
    ended = in_a_process(code, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    if ended.stderr.startswith("skip: "):
        pytest.skip(ended.stderr[6:])
    assert ended.returncode == 0, ended.stderr
