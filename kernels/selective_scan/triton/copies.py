"""Words that are copied ahead from global to shared memory, for the kernels of `matrix.py`.

A load into a register has to end before the register is moved, so at the end of each iteration of a loop a warp would
wait for what the next one needs, however early it was loaded; and the compiler puts such loads late. A copy needs no
register until it is read. Each thread copies and reads words of its own, so that no barrier between threads is needed.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _slots_ptx(name, warps, slots, words):
    """PTX that gives a thread the address of its first word; those of a warp lie side by side."""
    size = slots * words * 128
    return (
        f"{{ .shared .align 16 .b8 {name}[{warps * size}]; .reg .b32 w; mov.u32 $0, {name}; shr.u32 w, $1, 5; "
        f"mad.lo.u32 $0, w, {size}, $0; and.b32 w, $1, 31; mad.lo.u32 $0, w, 4, $0; }}"
    )


@triton.jit
def shared_slots(o_e, WARPS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr):
    """The address of SLOTS slots of WORDS words for each thread; a slot takes 128 WORDS bytes."""
    asm: tl.constexpr = _slots_ptx("slots", WARPS, SLOTS, WORDS)
    return tl.inline_asm_elementwise(asm, "=&r,r", [o_e], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy_word(p_slot, i: tl.constexpr, p_word):
    """Starts to copy the word at p_word, in global memory, to place i of a slot."""
    tl.inline_asm_elementwise(
        "cp.async.ca.shared.global [$1], [$2], 4; mov.b32 $0, 0;",
        "=r,r,l",
        [p_slot + i * 128, p_word.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def end_copies(o_e):
    """Ends a group of copies, by which `wait_copies` counts."""
    tl.inline_asm_elementwise(
        "cp.async.commit_group; mov.b32 $0, 0;", "=r,r", [o_e], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _wait_ptx(groups):
    return f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.jit
def wait_copies(o_e, GROUPS: tl.constexpr):
    """Waits for all copies of this thread but those of the last GROUPS groups."""
    asm: tl.constexpr = _wait_ptx(GROUPS)
    tl.inline_asm_elementwise(asm, "=r,r", [o_e], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copied_words(p_slot, first: tl.constexpr, NUM: tl.constexpr):
    """The words at the places from `first` on."""
    words = ()
    for i in tl.static_range(NUM):
        words += (
            tl.inline_asm_elementwise(
                "ld.shared.f32 $0, [$1];", "=f,r", [p_slot + (first + i) * 128],
                dtype=tl.float32, is_pure=False, pack=1,
            ),
        )  # fmt: skip
    return words
