"""Changes of Triton's interpreter for tests without a GPU: it rounds as a GPU does and spares work that it repeats."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import numpy as np
import pytest
import torch


def change_the_interpreter() -> None:
    """Make all changes below; an ImportError means that Triton is not installed."""
    round_in_the_interpreter()
    multiply_in_the_interpreter()
    combine_slices_in_the_interpreter()
    patch_the_language_once_a_launch()
    find_members_once()
    keep_shapes_and_dtypes()
    keep_types_of_operations()
    spare_unused_checks_in_the_interpreter()


def round_in_the_interpreter() -> None:
    """Let Triton's interpreter round float32 to the nearest bfloat16, as a GPU does; it truncates (3.6 and 3.9)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, source, target):
        types = source.dtype.scalar, target.scalar
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(_narrowed(source.data), target.scalar)
        if types == (tl.bfloat16, tl.float32):
            # exact, like the interpreter's own cast of any two formats, which takes twenty operations
            return TensorHandle(_widened(source.data), target.scalar)
        return cast(self, source, target)

    InterpreterBuilder.cast_impl = rounded


def multiply_in_the_interpreter() -> None:
    """Let Triton's interpreter multiply bfloat16 matrices in float32; 3.9 multiplies their bits as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def wide(x):
        return TensorHandle(_widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """The bits of the bfloat16 nearest to these float32 values."""
    nearest = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    return nearest.view(torch.int16).numpy().view(np.uint16)


def _widened(bits: np.ndarray) -> np.ndarray:
    """The float32 values of these bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def combine_slices_in_the_interpreter() -> None:
    """Let Triton's interpreter scan and reduce slice by slice; 3.9 calls a function of a kernel for each element.

    The function sees the same values in the same order, so the results keep their bits.
    """
    from triton.runtime.interpreter import ReduceOps, ScanOps

    def wrapped(operation, values, tensors):
        return tuple(operation.to_tensor(y, x.dtype) for y, x in zip(values, tensors, strict=True))

    def running(operation, tensors, axis):
        """The results of combining the first 1, 2, ... slices along the axis, each as arrays of length 1 there."""
        total = None
        for i in range(tensors[0].handle.data.shape[axis]):
            values = [x.handle.data.take([i], axis) for x in tensors]
            if total is not None:
                combined = operation.combine_fn.fn(*total, *wrapped(operation, values, tensors))
                combined = combined if isinstance(combined, tuple) else (combined,)
                values = [x.handle.data for x in combined]
            total = wrapped(operation, values, tensors)
            yield [x.handle.data for x in total]

    def scan(self, tensors):
        columns = zip(*running(self, tensors, self.axis), strict=True)
        return list(wrapped(self, [np.concatenate(column, self.axis) for column in columns], tensors))

    reduce_all = ReduceOps.generic_reduce

    def reduce(self, tensors):
        if self.axis is None:
            return reduce_all(self, tensors)
        *_, last = running(self, tensors, self.axis)
        if not self.keep_dims:
            last = [x.squeeze(self.axis) for x in last]
        return list(wrapped(self, last, tensors))

    ScanOps.generic_scan = scan
    ReduceOps.generic_reduce = reduce


def patch_the_language_once_a_launch() -> None:
    """Let Triton's interpreter patch `triton.language` once a launch; 3.9 repeats it at each call of a device function.

    It walks all members of the language for that, which takes half of the time of a kernel made of small functions.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(fn):
        # functions of one module see the same names of the language
        if fn.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(fn.__module__)
        scope = patch(fn)
        restore = scope.restore

        def restore_and_forget():
            # only a launch restores; what device functions have patched is then patched anew in the next launch
            patched.clear()
            restore()
            for members, before in scope.modules:
                members.update(before)

        scope.restore = restore_and_forget
        return scope

    # older versions of Triton keep no record of what they patch
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once


def find_members_once() -> None:
    """Let Triton's interpreter find the functions that it patches once a process; 3.9 searches for them every launch.

    A patched function calls the member itself, without the check that kernels are compiled, which it would pass.
    """
    from triton.language.core import is_builtin, tensor
    from triton.runtime import interpreter

    @functools.cache
    def replacements(package):
        semantic = interpreter.interpreter_semantic

        def replaced(name, member):
            inner = getattr(member, "__wrapped__", member)

            def call(*args, **kwargs):
                kwargs["_semantic"] = semantic
                return inner(*args, **kwargs)

            return at_once(call, name in REFLECTED) if package is tensor and name in OPERATORS | REFLECTED else call

        members = inspect.getmembers(package)
        return {name: replaced(name, member) for name, member in members if is_builtin(member)}

    def patch(package, builder, scope):
        if not hasattr(scope, "modules"):
            scope.modules, scope.classes = [], set()
        changed = replacements(package)
        if inspect.ismodule(package):
            # all members of a module are exchanged at once, because there are hundreds
            members = vars(package)
            scope.modules.append((members, {name: members[name] for name in changed}))
            members.update(changed)
        elif package not in scope.classes:
            scope.classes.add(package)
            for name, replacement in changed.items():
                scope.set_attr(package, name, replacement)

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_builtin = patch


ARITHMETIC = ("add", "sub", "mul", "truediv")
OPERATORS = {f"__{name}__" for name in (*ARITHMETIC, "lt", "le", "gt", "ge", "eq", "ne", "and", "or")}
REFLECTED = {f"__r{name}__" for name in ARITHMETIC}
"""Operators of Python that call one function of NumPy, and those whose first operand is a number."""


def at_once(operator, reflected):
    """The operator of tensors, which calls NumPy at once where it has met operands of the same kinds before.

    Triton 3.9 finds anew at every operation what it calls and of which type the result is, which takes several times
    as long as NumPy.
    """
    from triton.language import constexpr, tensor
    from triton.runtime.interpreter import interpreter_semantic

    cast, plans = interpreter_semantic.cast, {}

    def call(x, y):
        if type(y) is tensor:
            key = x.type.name, y.type.name
        else:
            y = y.value if type(y) is constexpr else y
            # not the number itself, since 1 equals True, and 0.0 equals -0.0
            key = x.type.name, type(y), repr(y)
        plan = plans.get(key)
        if plan is None:
            result, plans[key] = planned(operator, x, y, reflected)
            return result
        if not plan:
            return operator(x, y)
        function, x_dtype, y_dtype, number, like = plan
        a = (x if x_dtype is None else cast(x, x_dtype)).handle
        b = (y if y_dtype is None else cast(y, y_dtype)).handle if number is None else number
        if reflected:
            a, b = b, a
        return made(x, function(a.data, b.data), a.dtype, like)

    return call


def planned(operator, x, y, reflected):
    """The result of an operator, and what `at_once` needs to repeat it; False where that is more than one function."""
    from triton.language import tensor
    from triton.runtime.interpreter import interpreter_builder, interpreter_semantic

    with pytest.MonkeyPatch.context() as patch:
        pairs = watched(patch, interpreter_semantic, "binary_op_type_checking_impl")
        moves = watched(patch, interpreter_builder, "create_addptr")
        calls = watched(patch, interpreter_builder, "binary_op")
        result = operator(x, y)
    if len(pairs) != 1 or len(calls + moves) != 1:
        return result, False
    ((*handles, function), handle) = calls[0] if calls else ((*moves[0][0], None), moves[0][1])
    (_, pair) = pairs[0]
    if any(a is not b.handle for a, b in zip((*handles, handle), (*pair, result), strict=True)):
        return result, False
    a, b = (handle.data for handle in handles)
    if moves:
        size = max(1, handles[0].get_element_ty().primitive_bitwidth // 8)

        def function(pointers, offsets):
            return pointers + size * offsets.astype(np.uint64)

    # Triton adds bits as numbers of one bit, and casts a result that is longer than its type
    elif a.dtype == b.dtype == np.bool_ and function not in (np.bitwise_and, np.bitwise_or):
        return result, False
    if function(a, b).dtype != handle.data.dtype:
        return result, False
    of_x, of_y = reversed(pair) if reflected else pair
    is_tensor = isinstance(y, tensor)
    return result, (
        function,
        None if x.dtype is of_x.dtype else of_x.dtype,
        of_y.dtype if is_tensor and y.dtype is not of_y.dtype else None,
        None if is_tensor else of_y.handle,
        kind_of(result),
    )


def watched(patch, owner, name):
    """A list of the arguments and the result of every call of a method while `patch` lasts."""
    method, calls = getattr(owner, name), []

    def call(*args, **more):
        result = method(*args, **more)
        calls.append((args, result))
        return result

    patch.setattr(owner, name, call)
    return calls


def kind_of(x):
    """All of a tensor but its values."""
    return x.type, x.shape, x.numel, x.dtype


def made(x, data, dtype, kind):
    """A tensor like `x` of a kind and with these values; `dtype` is that of its handle."""
    result = object.__new__(type(x))
    result.handle = type(x.handle)(data, dtype)
    result.type, result.shape, result.numel, result.dtype = kind
    return result


def keep_shapes_and_dtypes() -> None:
    """Let Triton make the type of a block, the shape of a tensor and the dtype of NumPy once a kind.

    Triton 3.9 makes them for every tensor.
    """
    from triton.language import block_type, constexpr, tensor
    from triton.runtime import interpreter

    blocks, make_block = {}, block_type.__init__

    def initialize_block(self, element_ty, shape):
        key = tuple(x.value if isinstance(x, constexpr) else x for x in shape), element_ty.name
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    block_type.__init__ = initialize_block

    kept, make = {}, tensor.__init__

    def initialize(self, handle, type):
        name = type.name
        if name not in kept:
            make(self, handle, type)
            kept[name] = self.shape, self.numel, self.dtype
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = kept[name]

    tensor.__init__ = initialize

    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype):
        name = dtype.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = find_once


def keep_types_of_operations() -> None:
    """Let Triton find once a kind of operands to which types an operation converts them, and how an index adds axes.

    Triton 3.9 finds it at every operation, which takes two thirds of the time of a kernel. It also repeats an operand
    as often as the other one is long; NumPy does this by itself where both are operands of one operation.
    """
    from triton.language import constexpr, core, tensor
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle

    semantic = interpreter.interpreter_semantic
    cast, dot, unwrap = semantic.cast, semantic.dot, core._unwrap_if_constexpr
    index = tensor.__getitem__.__wrapped__

    def kind(x):
        # not the number itself, since 1 equals True, and 0.0 equals -0.0
        return x.type.name if isinstance(x, tensor) else (type(x), repr(x))

    casts, by_hand = {}, {("fp32", "bf16"): _narrowed, ("bf16", "fp32"): _widened}

    def cast_at_once(x, dtype, *rounding):
        to = dtype.scalar
        if x.dtype is to:
            return x
        key = x.type.name, to.name, *rounding
        if key not in casts:
            with pytest.MonkeyPatch.context() as patch:
                calls = watched(patch, interpreter.interpreter_builder, "cast_impl")
                result = cast(x, dtype, *rounding)
            # the values of a comparison have another type than its handle
            single = len(calls) == 1 and calls[0][1] is result.handle and x.handle.dtype is x.dtype
            casts[key] = single and (by_hand.get((x.dtype.name, to.name)), result.handle.data.dtype, kind_of(result))
            return result
        if not casts[key]:
            return cast(x, dtype, *rounding)
        function, np_dtype, like = casts[key]
        return made(x, function(x.handle.data) if function else x.handle.data.astype(np_dtype), to, like)

    def once_a_kind(find, repeat):
        def converted(x, to):
            if not isinstance(x, tensor):
                return to
            if x.dtype is not to.dtype:
                x = cast_at_once(x, to.dtype)
            if x.type.name == to.type.name:
                return x
            data = np.broadcast_to(x.handle.data, to.handle.data.shape) if repeat else x.handle.data
            return tensor(TensorHandle(data, to.dtype), to.type)

        def convert(lhs, rhs, *rules, **more):
            key = kind(lhs), kind(rhs), rules, *more.items()
            if key not in found:
                found[key] = find(lhs, rhs, *rules, **more)
                return found[key]
            to = found[key]
            return converted(lhs, to[0]), converted(rhs, to[1])

        found = {}
        return convert

    def unwrap_if_needed(x):
        return x if type(x) in whole else x.value if type(x) is constexpr else unwrap(x)

    whole = {tensor, bool, int, float, str, type(None), core.dtype}

    indexed = {}

    @core.builtin
    def index_once(self, slices, _semantic=None):
        key = self.type.name, repr(slices)
        if type(slices) is not tuple or key not in indexed:
            result = index(self, slices, _semantic=_semantic)
            indexed[key] = result.handle.data.shape, kind_of(result)
            return result
        shape, like = indexed[key]
        return made(self, self.handle.data.reshape(shape), self.dtype, like)

    dots = {}

    def dot_at_once(lhs, rhs, acc, *rules):
        key = lhs.type.name, rhs.type.name, None if acc is None else acc.type.name, *rules
        if key not in dots:
            with pytest.MonkeyPatch.context() as patch:
                calls = watched(patch, interpreter.interpreter_builder, "create_dot")
                result = dot(lhs, rhs, acc, *rules)
            (((a, b, start, *options), handle),) = calls
            same = a is lhs.handle and b is rhs.handle and handle is result.handle
            same = same and (acc is None or start is acc.handle)
            dots[key] = same and (None if acc is not None else start, options, kind_of(result))
            return result
        if not dots[key]:
            return dot(lhs, rhs, acc, *rules)
        start, options, like = dots[key]
        start = acc.handle if start is None else start
        handle = interpreter.interpreter_builder.create_dot(lhs.handle, rhs.handle, start, *options)
        return made(lhs, handle.data, handle.dtype, like)

    semantic.cast, semantic.dot = cast_at_once, dot_at_once
    semantic.broadcast_impl_value = once_a_kind(semantic.broadcast_impl_value, repeat=True)
    semantic.binary_op_type_checking_impl = once_a_kind(semantic.binary_op_type_checking_impl, repeat=False)
    core._unwrap_if_constexpr = unwrap_if_needed
    tensor.__getitem__ = index_once


def spare_unused_checks_in_the_interpreter() -> None:
    """Let Triton's interpreter skip checks: of overflow, whose result it does not use, and of its own arrays (3.9)."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def initialize_handle(self, data, dtype):
        self.data, self.dtype, self.attr = data, dtype, {}

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
        TensorHandle.__init__ = initialize_handle
