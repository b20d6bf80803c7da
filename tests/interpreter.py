"""Changes of Triton's interpreter for tests without a GPU: it rounds as a GPU does and spares work that it repeats."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
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
    keep_what_operators_compute()
    keep_how_memory_is_read_and_written()
    keep_types_of_products()
    make_constants_once()
    spare_unused_checks_in_the_interpreter()


def round_in_the_interpreter() -> None:
    """Let Triton's interpreter round to the nearest bfloat16, as a GPU does.

    It truncates float32 (3.6 and 3.9), and casts float64 to numbers of another size.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, source, target):
        types = source.dtype.scalar, target.scalar
        if types[0] in (tl.float32, tl.float64) and types[1] == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return TensorHandle(values.view(torch.int16).numpy().view(np.uint16), target.scalar)
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

    patch, patched, parts, changes = interpreter._patch_lang, set(), {}, {}
    # older versions of Triton keep no record of what they patch
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    nothing = interpreter._LangPatchScope()

    def once(fn):
        if fn.__module__ not in parts:
            language = (interpreter.tl, interpreter.tl.core)
            parts[fn.__module__] = tuple(part in fn.__globals__.values() for part in language)
        # functions that see the same parts of the language need the same patches
        seen = parts[fn.__module__]
        if seen in patched:
            return nothing
        patched.add(seen)
        scope = interpreter._LangPatchScope()
        if seen in changes:
            for change in changes[seen]:
                scope.set_attr(*change)
        else:
            scope = patch(fn)
            changes[seen] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        restore = scope.restore

        def restore_and_forget():
            # only a launch restores; what device functions have patched is then patched anew in the next launch
            patched.clear()
            restore()

        scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = once


def find_members_once() -> None:
    """Let Triton's interpreter find the functions that it patches once a process; 3.9 searches for them every launch.

    A patched function calls the member itself, without the check that kernels are compiled, which it would pass.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def replacements(package):
        semantic = interpreter.interpreter_semantic

        def replaced(member):
            inner = getattr(member, "__wrapped__", member)

            def call(*args, **kwargs):
                kwargs["_semantic"] = semantic
                return inner(*args, **kwargs)

            return call

        members = interpreter.inspect.getmembers(package)
        return [(name, replaced(member)) for name, member in members if is_builtin(member)]

    def patch(package, builder, scope):
        for name, replacement in replacements(package):
            scope.set_attr(package, name, replacement)

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_builtin = patch


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
    cast, unwrap, index = semantic.cast, core._unwrap_if_constexpr, tensor.__getitem__.__wrapped__

    def kind(x):
        # not the number itself, since 1 equals True, and 0.0 equals -0.0
        return x.type.name if isinstance(x, tensor) else (type(x), repr(x))

    def once_a_kind(find, repeat):
        def converted(x, to):
            if not isinstance(x, tensor):
                return to
            if x.dtype is not to.dtype:
                x = cast(x, to.dtype)
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

    builder, plain, types = interpreter.interpreter_builder, {"fp32", "fp64", "int32", "int64"}, {}

    def cast_if_needed(x, dtype, *rounding):
        dtype = dtype.scalar
        if x.dtype is dtype:
            return x
        to = types.get((x.type.name, dtype.name))
        if to is not None and not any(rounding):
            return tensor(builder.cast_impl(x.handle, to), to)
        result, pair = cast(x, dtype, *rounding), {x.dtype.name, dtype.name}
        # all other casts take several steps
        if pair <= plain or pair in ({"fp16", "fp32"}, {"bf16", "fp32"}):
            types[x.type.name, dtype.name] = result.type
        return result

    def unwrap_if_needed(x):
        return x if type(x) in whole else x.value if type(x) is constexpr else unwrap(x)

    to = tensor.to.__wrapped__

    def to_if_needed(self, dtype, *rest, _semantic=None, **more):
        if rest or more or type(dtype) is not core.dtype:
            return to(self, dtype, *rest, _semantic=_semantic, **more)
        return cast_if_needed(self, dtype)

    whole = {tensor, bool, int, float, str, type(None), core.dtype}

    indexed = {}

    @core.builtin
    def index_once(self, slices, _semantic=None):
        key = self.type.name, repr(slices)
        if type(slices) is not tuple or key not in indexed:
            indexed[key] = index(self, slices, _semantic=_semantic)
            return indexed[key]
        to = indexed[key]
        return tensor(TensorHandle(self.handle.data.reshape(to.handle.data.shape), to.dtype), to.type)

    semantic.cast = cast_if_needed
    tensor.to.__wrapped__ = to_if_needed
    semantic.broadcast_impl_value = once_a_kind(semantic.broadcast_impl_value, repeat=True)
    semantic.binary_op_type_checking_impl = once_a_kind(semantic.binary_op_type_checking_impl, repeat=False)
    core._unwrap_if_constexpr = unwrap_if_needed
    tensor.__getitem__ = index_once


def keep_what_operators_compute() -> None:
    """Let Triton find once a kind of operands which function of NumPy an operator calls and which type its result has.

    Triton 3.9 goes through ten functions at every operation. Operations that convert an operand first are not kept.
    """
    from triton.language import constexpr, tensor
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_semantic

    last = None
    combine, move = InterpreterBuilder.binary_op, InterpreterBuilder.create_addptr

    def combine_and_note(self, lhs, rhs, op):
        nonlocal last
        handle = combine(self, lhs, rhs, op)
        last = lhs.data, rhs.data, op, handle
        return handle

    def move_and_note(self, pointer, offset):
        nonlocal last
        handle = move(self, pointer, offset)
        size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        last = pointer.data, offset.data, lambda x, y: x + size * y.astype(np.uint64), handle
        return handle

    def is_used(given, used):
        return given.dtype == used.dtype and np.may_share_memory(given, used)

    def plan(x, y, result):
        """What the operator has just computed: its function, whether operands change places, and a constant operand."""
        lhs, rhs, op, handle = last
        # Triton adds truth values as numbers
        if handle is not result.handle or (lhs.dtype == bool and "bitwise" not in op.__name__):
            return None
        x = x.handle.data
        if not isinstance(y, tensor):
            swapped = not is_used(x, lhs)
            constant = lhs if swapped else rhs
            used = rhs if swapped else lhs
            return (op, swapped, constant, handle.dtype, result.type) if is_used(x, used) else None
        y = y.handle.data
        # NumPy converts integers to the wider type by itself
        if (is_used(x, lhs) and is_used(y, rhs)) or {x.dtype.name, y.dtype.name} == {"int32", "int64"}:
            return op, False, None, handle.dtype, result.type
        return (op, True, None, handle.dtype, result.type) if is_used(x, rhs) and is_used(y, lhs) else None

    def kept(operator):
        plans = {}

        def compute(x, y):
            if type(y) is constexpr:
                y = y.value
            # not the number itself, since 1 equals True, and 0.0 equals -0.0
            key = x.type.name, y.type.name if type(y) is tensor else (type(y), repr(y))
            found = plans.get(key)
            if found is None:
                result = operator(x, y, _semantic=interpreter_semantic)
                plans[key] = isinstance(result, tensor) and plan(x, y, result)
                return result
            if found is False:
                return operator(x, y, _semantic=interpreter_semantic)
            op, swapped, constant, dtype, to = found
            y = y.handle.data if constant is None else constant
            return tensor(TensorHandle(op(y, x.handle.data) if swapped else op(x.handle.data, y), dtype), to)

        return compute

    InterpreterBuilder.binary_op, InterpreterBuilder.create_addptr = combine_and_note, move_and_note
    names = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "or", "xor")
    for name in (*names, "lt", "le", "gt", "ge", "eq", "ne"):
        setattr(tensor, f"__{name}__", kept(getattr(tensor, f"__{name}__").__wrapped__))


def keep_how_memory_is_read_and_written() -> None:
    """Let Triton find once a kind of operands how a load or a store repeats them and which type it has.

    Triton 3.9 goes through twenty functions at every access. What converts an operand first is not kept.
    """
    from triton.language import core, tensor
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    native, last = interpreter._interpreter, None
    load, store = core.load.__wrapped__, core.store.__wrapped__
    masked_load, masked_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def load_and_note(self, pointers, mask, other, *rest):
        nonlocal last
        handle = masked_load(self, pointers, mask, other, *rest)
        other = np.zeros_like(handle.data) if other is None else other.data
        last = mask.data, other, handle
        return handle

    def store_and_note(self, pointers, value, mask, *rest):
        nonlocal last
        last = mask.data, value.dtype
        return masked_store(self, pointers, value, mask, *rest)

    def kind(x):
        # not the number itself, since 1 equals True, and 0.0 equals -0.0
        return x.type.name if type(x) is tensor else (type(x), repr(x))

    def repeated(x, shape):
        return x if x.shape == shape else np.broadcast_to(x, shape)

    loads, stores = {}, {}

    def load_as_before(pointer, mask=None, other=None, *, _semantic=None, **hints):
        key = pointer.type.name, kind(mask), kind(other)
        found = loads.get(key)
        if found is None:
            result = load(pointer, mask, other, _semantic=_semantic, **hints)
            everywhere, rest, handle = last
            if result.handle is handle and type(other) is not tensor and (mask is None or type(mask) is tensor):
                loads[key] = everywhere, rest, result.type, result.type.scalar
            return result
        everywhere, rest, to, dtype = found
        where = everywhere if mask is None else repeated(mask.handle.data, rest.shape)
        data = native.load(repeated(pointer.handle.data, rest.shape), where, rest, rest.dtype)
        return tensor(TensorHandle(data, dtype), to)

    def store_as_before(pointer, value, mask=None, *, _semantic=None, **hints):
        key = pointer.type.name, kind(value), kind(mask)
        found = stores.get(key)
        if found is None:
            store(pointer, value, mask, _semantic=_semantic, **hints)
            if type(value) is tensor and value.dtype is last[1] and (mask is None or type(mask) is tensor):
                stores[key] = last[0]
            return
        shape = found.shape
        where = found if mask is None else repeated(mask.handle.data, shape)
        native.store(repeated(pointer.handle.data, shape), repeated(value.handle.data, shape), where)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load_and_note, store_and_note
    core.load.__wrapped__, core.store.__wrapped__ = load_as_before, store_as_before


def keep_types_of_products() -> None:
    """Let Triton check the operands of a matrix product, and find its type and its zeros, once a kind of operands."""
    import triton.language as tl
    from triton.language import core, tensor
    from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

    dot, products, zeros = core.dot.__wrapped__, {}, None
    create_dot = InterpreterBuilder.create_dot

    def create_and_note(self, a, b, start, *rest):
        nonlocal zeros
        zeros = start
        return create_dot(self, a, b, start, *rest)

    def dot_as_before(a, b, acc=None, *rest, _semantic=None, **more):
        key = a.type.name, b.type.name, None if acc is None else acc.type.name, repr(rest), repr(more)
        found = products.get(key)
        if found is None:
            result = dot(a, b, acc, *rest, _semantic=_semantic, **more)
            if a.dtype in (tl.float16, tl.bfloat16, tl.float32) and result.type.is_block() and len(a.shape) < 4:
                products[key] = result.type, None if acc is not None else zeros
            return result
        to, start = found
        start = acc.handle if start is None else start
        return tensor(create_dot(interpreter_builder, a.handle, b.handle, start, None, 0), to)

    InterpreterBuilder.create_dot = create_and_note
    core.dot.__wrapped__ = dot_as_before


def make_constants_once() -> None:
    """Let Triton make a range or a block of one number once; no operation changes an operand."""
    from triton.language import core, tensor

    def once(make):
        def constant(*args, _semantic=None, **more):
            given = *args, *more.items()
            if any(type(x) is tensor for x in given):
                return make(*args, _semantic=_semantic, **more)
            # 1 equals True, and 0.0 equals -0.0
            key = repr(given)
            if key not in made:
                made[key] = make(*args, _semantic=_semantic, **more)
            return made[key]

        made = {}
        return constant

    core.arange.__wrapped__, core.full.__wrapped__ = once(core.arange.__wrapped__), once(core.full.__wrapped__)


def spare_unused_checks_in_the_interpreter() -> None:
    """Let Triton's interpreter skip checks: of overflow, whose result it does not use, and of its own arrays (3.9)."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def initialize_handle(self, data, dtype):
        self.data, self.dtype, self.attr = data, dtype, {}

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
        TensorHandle.__init__ = initialize_handle
