"""Budgets name what a kernel loses, on a machine without a GPU, and an unchanged kernel is not compiled again."""

import json
from dataclasses import replace

import pytest

from subquad.suite.bench import budgets
from subquad.suite.bench.budgets import Collection, check, collect, digests, update
from subquad.suite.bench.disassembly import Figures, misdescribed, of_sass, unwritten

triton = pytest.importorskip("triton")
# the fixture `compiled` starts processes that import torch, of which each takes half a minute on a busy machine
pytestmark = pytest.mark.timeout(1500)

OPERATOR = """
from functools import partial

import torch
import triton
import triton.language as tl

from subquad.kernels.workload import Implementation, Workload, normal


@triton.jit
def _product_kernel(a, b, y, K, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        b_a = tl.load(a + i[:, None] * K + k + i[None, :])
        b_b = tl.load(b + (k + i[:, None]) * BLOCK + i[None, :])
        acc += tl.dot(b_a, b_b)
    tl.store(y + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def _softmax_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, 1)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_x = tl.load(x + i).to(tl.float32)
    b_x = tl.exp(b_x - tl.max(b_x, 1, keep_dims=True))
    tl.store(y + i, b_x / tl.sum(b_x, 1, keep_dims=True))


@triton.autotune([triton.Config({"BLOCK": 1024}), triton.Config({"BLOCK": 2048})], key=["T"])
@triton.jit
def _double_kernel(x, y, T, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < T), mask=i < T)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        _double_kernel[(1,)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx, dy):
        _softmax_kernel[(1,)](dy, torch.empty_like(dy), 256, num_warps=1)
        return dy


def product(x):
    y = torch.empty(64, 64, dtype=torch.float32, device=x.device)
    _product_kernel[(1,)](x, x, y, x.numel() // 64, 64)
    return y


def deep(x):
    y = torch.empty(128, 128, dtype=torch.float32, device=x.device)
    _product_kernel[(1,)](x, x, y, x.numel() // 128, 128, num_stages=6)
    return y


def workload(op, function, backward, *lengths):
    return Workload(
        op=op,
        reference=None,
        make_inputs=lambda shape, dtype, generator: {"x": normal(generator, dtype, shape["T"])},
        cost=None,
        short=lambda shape: shape,
        implementations=(Implementation("triton", "ours", lambda: function, cold_start=True),),
        shapes={"quick": tuple({"T": length} for length in lengths)},
        backward=backward,
    )


PRODUCT = workload("product", product, False, 64 * 256)
DOUBLE = workload("double", Double.apply, True, 4096, 4097)
DEEP = workload("deep", deep, False, 64 * 256)
BLIND = workload("blind", lambda x: 2 * x, False, 64)
READER = workload("reader", lambda x: x * x.sum().item(), False, 64)
"""
EDITS = {
    # the same product in float32, for which there is no exact matrix instruction
    "tl.dot(b_a, b_b)": 'tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee")',
    # more values alive at once than registers
    "tl.arange(0, 1)[:, None]": "tl.arange(0, 32)[:, None]",
    # the compiler cannot know any more that neighbouring threads load neighbouring elements
    "tl.load(x + i, mask=i < T)": "tl.load(x + i * (1 + T // 1000000000), mask=i < T)",
}


TARGET = "sm_90"
"""The target of the quick tests."""


def collect_from(folder, text, workloads, **options):
    """Collects from the module `operator_under_test` with that text."""
    folder.mkdir(exist_ok=True)
    (folder / "operator_under_test.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        # the compiling processes must not inherit the interpreter from other tests
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONPATH", str(folder))
        return collect({op: f"operator_under_test:{op.upper()}" for op in workloads}, **options)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiled operators, as they are and after the edits."""
    folder, edited = tmp_path_factory.mktemp("compiled"), OPERATOR
    for old, new in EDITS.items():
        assert edited.count(old) == 1
        edited = edited.replace(old, new)
    # every process imports torch and lists all kernels, which takes longer than to compile these
    clean = collect_from(folder / "clean", OPERATOR, ["product", "double"], jobs=1)
    more = ["product", "double", "deep", "blind", "reader", "missing"]
    return clean, collect_from(folder / "edited", edited, more, jobs=1)


@pytest.fixture
def file(compiled, tmp_path):
    path = tmp_path / "budgets.json"
    update(compiled[0], path)
    return path


@pytest.mark.slow
def test_every_kernel_of_both_passes_is_compiled_for_every_target(compiled):
    clean, _ = compiled
    assert not clean.failures
    assert {"sm_80", "sm_90"} <= set(clean.found)
    for target, found in clean.found.items():
        kernels = sorted(name.split("#")[0] for name in found)
        # the kernel of the forward pass in both configurations, each with T a multiple of 16 and not; then the others
        doubles = [f"double/_double_kernel[bf16 BLOCK={b} num_warps=4 num_ctas=1 num_stages=3]" for b in (1024, 2048)]
        assert [name for name in kernels if "_double" in name] == sorted(2 * doubles), target
        assert "double/_softmax_kernel[bf16 BLOCK=256 num_warps=1]" in kernels
        assert "product/_product_kernel[bf16+fp32 BLOCK=64]" in kernels
        assert all(isinstance(figures, Figures) for figures in found.values()), found


@pytest.mark.slow
def test_what_is_unchanged_passes(compiled, file):
    assert check(compiled[0], file) == []
    assert update(compiled[0], file) == "no change"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kind"), [("sm_80", "HMMA.F32.BF16"), ("sm_90", "HGMMA.F32.BF16"), ("gfx942", "mfma_f32_bf16")]
)
def test_a_lost_matrix_instruction_a_spill_and_a_narrowed_load_are_named(compiled, file, target, kind):
    clean, edited = compiled
    if target in clean.unavailable:
        pytest.skip(clean.unavailable[target])
    lines = [str(line) for line in check(edited, file)]

    def named(kernel, problem):
        return [line for line in lines if line.startswith(kernel) and f" {target}: {problem}" in line]

    assert named("product/_product_kernel[bf16+fp32 BLOCK=64]#", f"{kind} instructions 0 < budget ")
    narrowed = named("double/_double_kernel[bf16 BLOCK=2048", "narrowest load 2 bytes < budget 16")
    # with T = 4097 the load was as narrow before the edit
    assert len(narrowed) == 1
    # gfx942 has twice as many lanes and registers, enough for all values
    spilled = named("double/_softmax_kernel[bf16 BLOCK=256 num_warps=1]#", "spills ")
    assert len(spilled) == (0 if target == "gfx942" else 1)
    assert all(line.endswith(" > budget 0") for line in spilled)


@pytest.mark.slow
def test_a_kernel_too_large_for_a_target_has_a_reason_in_place_of_figures(compiled):
    _, edited = compiled
    (reason,) = [found for name, found in edited.found["sm_90"].items() if name.startswith("deep/")]
    assert "bytes of shared memory, of which the GPU has 232448" in reason


@pytest.mark.slow
def test_the_update_says_what_changed(compiled, file):
    clean, edited = compiled
    changes = update(replace(edited, ops=clean.ops, failures=()), file).splitlines()
    name = next(name for name in clean.signatures if name.startswith("product/"))
    before, after = (collection.found["sm_90"][name].registers for collection in compiled)
    (line,) = [change for change in changes if change.startswith(f"{name} sm_90: ")]
    assert f"registers {before} -> {after}" in line
    assert "matrix {'HGMMA.F32.BF16': 4} -> {}" in line


@pytest.mark.slow
def test_a_launcher_that_cannot_be_followed_is_named(compiled, tmp_path):
    _, edited = compiled
    blind, reader, missing = edited.failures
    assert blind == "blind triton T64 bfloat16 forward: launches no Triton kernel on meta tensors"
    assert reader.startswith("reader triton T64 bfloat16 forward: cannot be run on meta tensors: RuntimeError")
    assert missing.startswith("missing: AttributeError")
    with pytest.raises(ValueError, match="no budgets written: blind"):
        update(edited, tmp_path / "budgets.json")


@pytest.mark.slow
def test_only_a_kernel_that_changed_is_compiled_and_one_over_budget_is_named(compiled, file, tmp_path):
    def of_double(found):
        return {name: digest for name, digest in found.items() if name.startswith("double/")}

    (edit,) = [(old, new) for old, new in EDITS.items() if "mask=i < T" in old]
    # the other kernel has moved down and has a comment, but its code is the same
    edited = OPERATOR.replace(*edit).replace("b_x = tl.load", "# why\n    b_x = tl.load")
    options = {"targets": [TARGET], "jobs": 1, "unchanged": digests(file)}
    found = collect_from(tmp_path / "edited", edited, ["double"], **options)
    assert found.signatures.keys() == of_double(compiled[0].signatures).keys()
    assert {name.split("[")[0] for name in found.found[TARGET]} == {"double/_double_kernel"}
    lines = [str(line) for line in check(found, file)]
    assert len([line for line in lines if "narrowest load 2 bytes < budget 16" in line]) == 2
    assert all(line.startswith("double/_double_kernel[") for line in lines)
    # only what was compiled is written anew
    assert all("double/_double_kernel" in line for line in update(found, file).splitlines())
    assert check(found, file) == []
    assert of_double(digests(file)[TARGET]) == found.digests[TARGET]


FIGURES = Figures(registers=64, spills=0, stack=0, shared=1024, instructions=1000, waits=4, loads={"16": 8, "2": 2})


def collection(figures, name="op/kernel[W=4]#0000", version="1.0", ops=("op",)):
    signatures, digests = {name: "x:*bf16/16"}, {TARGET: {name: "0123456789abcdef"}}
    return Collection(version, ops, signatures, digests, {TARGET: {name: figures}}, {}, ())


def several(figures):
    """A collection of several variants."""
    signatures, digests = dict.fromkeys(figures, "x:*bf16/16"), {TARGET: dict.fromkeys(figures, "0123456789abcdef")}
    return Collection("1.0", ("op",), signatures, digests, {TARGET: figures}, {}, ())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"registers": 72}, "registers 72 > budget 64"),
        ({"stack": 16}, "stack 16 > budget 0"),
        ({"shared": 2048}, "shared 2048 > budget 1024"),
        ({"waits": 8}, "waits 8 > budget 4"),
        ({"waits": None}, None),
        ({"instructions": 1051}, "instructions 1051 > budget 1000 and 5 %"),
        ({"loads": {"16": 6, "2": 4}}, "mean load 10.4 bytes < budget 13.2"),
        ({"registers": 56, "instructions": 1050, "loads": {"16": 8}}, None),
    ],
)
def test_a_figure_over_budget_is_one_line(tmp_path, change, problem):
    path = tmp_path / "budgets.json"
    update(collection(FIGURES), path)
    lines = [str(line) for line in check(collection(replace(FIGURES, **change)), path)]
    assert lines == ([f"op/kernel[W=4]#0000 sm_90: {problem}"] if problem else [])


def test_a_budget_that_is_older_than_a_figure_does_not_limit_it(tmp_path):
    path = tmp_path / "budgets.json"
    update(collection(replace(FIGURES, waits=None)), path)
    assert check(collection(FIGURES), path) == []


def test_kernels_and_budgets_must_match(tmp_path):
    path = tmp_path / "budgets.json"
    update(collection(FIGURES), path)
    new, gone = map(str, check(collection(FIGURES, "op/other[W=3]#0000"), path))
    assert new == f"op/other[W=3]#0000 sm_90: no budget; {budgets.UPDATE}"
    assert gone == f"op/kernel[W=4]#0000 sm_90: a budget that no kernel has; {budgets.UPDATE}"
    (lost,) = map(str, check(collection("no such instruction"), path))
    assert lost == "op/kernel[W=4]#0000 sm_90: cannot be compiled any more: no such instruction"


def test_another_tile_shows_old_and_new_figures_of_the_variant_that_is_most_alike(tmp_path):
    path = tmp_path / "budgets.json"
    names = ("op/kernel[bf16 BLOCK=64 num_warps=4]#0000", "op/kernel[bf16 BLOCK=32 num_warps=8]#1111")
    renamed = ("op/kernel[bf16 BLOCK=128 num_warps=8]#2222", "op/kernel[bf16 BLOCK=128 num_warps=4]#3333")
    wider = replace(FIGURES, registers=80)
    update(several(dict.fromkeys(names, FIGURES)), path)
    changed = several({renamed[0]: FIGURES, renamed[1]: wider})
    figures = "spills 0, stack 0, shared 1024, instructions 1000, matrix {}, waits 4, loads {'16': 8, '2': 2}"
    lines = [
        f"{renamed[1]} sm_90: replaces [bf16 BLOCK=64 num_warps=4]#0000, registers 64 -> 80, {figures}",
        f"{renamed[0]} sm_90: replaces [bf16 BLOCK=32 num_warps=8]#1111, registers 64, {figures}",
    ]
    assert sorted(map(str, check(changed, path))) == [f"{line}; {budgets.UPDATE}" for line in lines]
    assert sorted(update(changed, path).splitlines()) == lines
    assert check(changed, path) == []


def test_budgets_of_other_versions_and_operators_are_left_alone(tmp_path):
    path = tmp_path / "budgets.json"
    update(collection(FIGURES, version="0.9"), path)
    update(collection(FIGURES, "other/kernel#0000", ops=("other",)), path)
    before = json.loads(path.read_text())
    update(collection(replace(FIGURES, registers=8)), path)
    after = json.loads(path.read_text())
    assert after["budgets"]["0.9"] == before["budgets"]["0.9"]
    assert set(after["budgets"]["1.0"]["sm_90"]) == {"op/kernel[W=4]#0000", "other/kernel#0000"}
    assert check(collection(FIGURES, "other/kernel#0000", ops=("other",)), path) == []


def test_budgets_that_are_no_json_are_named(tmp_path):
    path = tmp_path / "budgets.json"
    path.write_text("<<<<<<< ours\n{}")
    with pytest.raises(ValueError, match=f"^{path}: no JSON"):
        budgets.reason(path)


def test_another_version_of_triton_is_a_reason(tmp_path):
    path = tmp_path / "budgets.json"
    assert f"no budgets for Triton {triton.__version__}; python" in budgets.reason(path)
    update(collection(FIGURES, version="0.9"), path)
    assert f"no budgets for Triton {triton.__version__}, only for 0.9" in budgets.reason(path)
    with pytest.raises(ValueError, match=r"no budgets for Triton 1\.0"):
        check(collection(FIGURES), path)


def test_the_width_of_a_load_is_not_that_of_its_cache_hint():
    text = """
  REG:40 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:592
        /*0000*/              ULDC.64 UR4, c[0x0][0x208] ;  /* 0x0 */
        /*0000*/              LDG.E.LTC128B.64 R2, desc[UR4][R2.64] ;  /* 0x0 */
        /*0010*/         @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R9], [R2.64] ;  /* 0x0 */
        /*0020*/              LDG.E.U16.CONSTANT R2, [R2.64] ;  /* 0x0 */
        /*0030*/              UMOV UR6, UR4 ;  /* 0x0 */
        /*0030*/        @!UP1 UTMALDG.2D [UR4], [UR6] ;  /* 0x0 */
        /*0030*/              UMOV UR11, 0x40000040 ;  /* 0x0 */
        /*0040*/              UIADD3 UR10, UR4, UR4, URZ ;  /* 0x0 */
        /*0040*/              HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;  /* 0x0 */
        /*0040*/              WARPGROUP.DEPBAR.LE gsb0, 0x0 ;  /* 0x0 */
        /*0050*/          @P1 STL [R1], R2 ;  /* 0x0 */
        /*0060*/              LDG.E R2, [R2.64] ;  /* 0x0 */
        /*0070*/              NOP ;  /* 0x0 */
"""
    assert of_sass(text, 512) == Figures(
        registers=40,
        spills=1,
        stack=24,
        shared=512,
        instructions=12,
        matrix={"HGMMA.F32.BF16": 1},
        waits=1,
        loads={"16": 2, "2": 1, "4": 1, "8": 1},
    )


# part of a kernel that ptxas 12.8 compiled wrong: nothing writes UR6, where later versions of ptxas read UR24
WRONG = """
        /*0ea0*/                   R2UR UR24, R8 ;                                         /* 0x0 */
        /*0eb0*/                   UIADD3 UR4, UP0, UR6, 0x40, URZ ;                       /* 0x0 */
        /*0ec0*/                   UIADD3.X UR5, UR24, -0x7fffffe0, URZ, UP0, !UPT ;       /* 0x0 */
"""


def test_code_that_reads_what_nothing_wrote_is_found(tmp_path):
    assert unwritten(WRONG) == ["UIADD3 UR4, UP0, UR6, 0x40, URZ"]
    assert unwritten(WRONG.replace("UR6", "UR24")) == []
    # UPRMT writes half of a register and keeps the other half
    assert unwritten("/*0570*/ REDUX.MAX.S32 UR6, R0 ; /* 0x0 */\n/*05b0*/ IMAD.U32 R0, RZ, RZ, UR6 ; /* 0x0 */") == []
    assert unwritten("/*0100*/ UMOV UR5, URZ ; /* 0x0 */\n/*0110*/ UPRMT UR7, UR5, 0x7632, UR7 ; /* 0x0 */") == []
    # with the first operand in registers, only the descriptor of the second is read
    both = "/*0f00*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0 */"
    second = both.replace("gdesc", "R4, gdesc")
    half = "/*0e00*/ ULDC.64 UR6, c[0x0][0x210] ; /* 0x0 */\n"
    assert unwritten(half + second) == []
    assert len(unwritten(half + both)) == 1
    path = tmp_path / "budgets.json"
    assert "the compiler made wrong code" in update(collection(replace(FIGURES, wrong=2)), path)
    (violation,) = check(collection(replace(FIGURES, wrong=2)), path)
    assert "wrong code (2 instructions" in str(violation)


# parts of a kernel that ptxas 12.8 compiled wrong: UR36 holds half of an address where zero was meant
MISDESCRIBED = """
        /*0a60*/                   ULEA UR61, UP0, UR48, UR50, 0x4 ;                       /* 0x0 */
        /*1c80*/                   ULDC.64 UR4, c[0x0][0x260] ;                            /* 0x0 */
        /*22e0*/                   UIADD3 UR37, UP1, UR15, UR4, URZ ;                      /* 0x0 */
        /*2320*/                   UIADD3.X UR36, UR61, UR5, URZ, UP1, !UPT ;              /* 0x0 */
        /*52d0*/                   UIADD3 UR54, UP1, UR36, 0x40, URZ ;                     /* 0x0 */
        /*5300*/                   UIADD3.X UR55, UR36, -0x7fffffe0, URZ, UP1, !UPT ;      /* 0x0 */
        /*ce20*/                   HGMMA.64x32x16.F32.BF16 R24, R48, gdesc[UR52].tnspB, R24 ; /* 0x0 */
"""


def test_a_product_whose_descriptor_is_computed_is_found():
    assert misdescribed(MISDESCRIBED) == ["HGMMA.64x32x16.F32.BF16 R24, R48, gdesc[UR52].tnspB, R24"]
    copied, swapped = "MOV R3, RZ ; /* 0x0 */\n/*51b0*/ R2UR UR36, R3", "ULOP3.LUT UR36, UR36, UR37, URZ, 0x3c, !UPT"
    joined = "ULOP3.LUT UR36, URZ, 0x40000040, URZ, 0xfc, !UPT"
    for right in ("UMOV UR36, URZ", copied, swapped, joined):
        assert misdescribed(MISDESCRIBED.replace("/*52d0*/", f"/*51a0*/ {right} ; /* 0x0 */\n/*52d0*/")) == []
    both = MISDESCRIBED.replace("R48, gdesc[UR52]", "gdesc[UR54]")
    # the next tile of an operand is one sum of 64 bits away
    step = "/*ce00*/ UIADD3.64 UR10, UR54, 0x40, URZ ; /* 0x0 */\n        /*ce20*/"
    assert len(misdescribed(both)) == 1
    assert len(misdescribed(MISDESCRIBED.replace("/*ce20*/", step).replace("UR52", "UR8"))) == 1
