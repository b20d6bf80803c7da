"""Linear maps whose gradients take fewer passes over memory than those of torch, on a GPU.

Results are those of `nn.Linear`. On a CPU, in other precisions than those of the kernels, and inside `torch.compile`
they are computed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.autograd import Function, OnceDifferentiable, not_saved
from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.float32_matmul import float32_matmul, takes_parts
from subquad.kernels.layout import dense, parts_of_one, slices_of_one, whole_rows
from subquad.models.parts.casts import as_autocast, autocast_dtype


def _on_gpu(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and use_triton("linear", "auto", x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias; float32 matrices are multiplied on matrix units, where that is faster."""
    if a.dtype == torch.float32:
        return float32_matmul(a, b, bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


class LinearMap(OnceDifferentiable):
    """(x [..., K], weight [D, K], bias [D] or None) to x weight^T + bias.

    torch's sum for the gradient of a bias is slow, and so are its products of float32 matrices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(_rows(x), weight.t(), bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from subquad.kernels.sums import row_sums

        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        g = _rows(gradient)
        dx = _multiply(g, weight).view(x.shape) if wanted[0] else None
        dweight = _multiply(g.t(), _rows(x)) if wanted[1] else None
        with on_device_of(g):
            return dx, dweight, row_sums(g) if wanted[2] else None


class PartsMap(OnceDifferentiable):
    """`LinearMap` for large float32 products: x, the weight and the gradient are each split into float16 parts once.

    The backward pass keeps the parts of x, which have its size, and not x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from subquad.kernels.float32_matmul.parts import parts_matmul, split

        with on_device_of(x):
            x_parts, weight_parts = split(_rows(x)), split(weight)
            ctx.save_for_backward(*x_parts[:2], *weight_parts[:2])
            not_saved(ctx, x, weight, bias)
            return parts_matmul(x_parts, weight_parts.t(), bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from subquad.kernels.float32_matmul.parts import Parts, parts_matmul, split
        from subquad.kernels.sums import row_sums

        x, x_scale, weight, weight_scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx = dweight = dbias = None
        g = _rows(gradient)
        with on_device_of(g):
            if wanted[0] or wanted[1]:
                parts = split(g)
            if wanted[0]:
                dx = parts_matmul(parts, Parts(weight, weight_scale)).view(*gradient.shape[:-1], weight.shape[2])
            if wanted[1]:
                dweight = parts_matmul(parts.t(), Parts(x, x_scale))
            if wanted[2]:
                dbias = row_sums(g)
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] to x weight^T + bias, with weight [D, K] and bias [D]."""
    if not _on_gpu(x):
        return F.linear(x, weight, bias)
    dtype = autocast_dtype(x)
    if dtype != torch.float32 and (bias is None or not torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    x, weight = x.to(dtype), weight.to(dtype)
    product = PartsMap if takes_parts(x, weight) else LinearMap
    return product.apply(x, weight, None if bias is None else bias.to(dtype))


class Linear(nn.Linear):
    """A linear map, by default with a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class ResidualLinear(Linear):
    """A linear map that writes into the residual stream. Its initial weights may be smaller in deeper networks."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and x.stride(2) != 1 and use_triton("transpose", "auto", x):
            from subquad.kernels.transpose import channels_last

            # state space models return y with time contiguous, and a matrix product would copy that slowly
            with on_device_of(x):
                x = channels_last(x)
        return super().forward(x)


ALIGNED = 16
"""Number of elements at whose multiples rows of half precision begin: kernels read others by one element at a time."""


class SplitLinear(OnceDifferentiable):
    """(x [..., K], weight [D, K], sizes) to the parts of x weight^T along the last axis, whose rows begin aligned.

    The gradient of `split` is a concatenation of the gradients of the parts, as large as the result. Here each of them
    enters products with its rows of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        width = len(weight)
        if x.dtype == torch.float32:
            return _multiply(_rows(x), weight.t()).view(*x.shape[:-1], width).split(sizes, dim=-1)
        y = x.new_empty(*x.shape[:-1], width - width % -ALIGNED)
        torch.mm(_rows(x), weight.t(), out=_rows(y)[:, :width])
        return y[..., :width].split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = None, torch.empty_like(weight)
        for gradient, part, dpart in zip(gradients, weight.split(ctx.sizes), dweight.split(ctx.sizes), strict=True):
            if gradient is None:
                dpart.zero_()
                continue
            g = _rows(gradient)
            if g.dtype == torch.float32:
                float32_matmul(g.t(), _rows(x), out=dpart)
            else:
                torch.mm(g.t(), _rows(x), out=dpart)
            dx = _multiply(g, part) if dx is None else dx.addmm_(g, part)
        return None if dx is None else dx.view(x.shape), dweight, None


def split_linear(linear: nn.Linear, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """linear(x) split along its last axis, without a concatenation in the backward pass. It has no bias."""
    if not _on_gpu(x):
        return linear(x).split(sizes, dim=-1)
    return SplitLinear.apply(as_autocast(x), as_autocast(linear.weight), sizes)


NARROW = 512
"""`SharedInput` multiplies maps with fewer outputs together."""


class SharedInput(OnceDifferentiable):
    """(x [..., K], join, weights [D_i, K]) to x weight_i^T for every i.

    The gradients of x are added within the products, in place of a pass over memory for each. Narrow maps, such as
    those to one number a head, are one product, whose outputs are padded to a multiple of ALIGNED; their results are
    parts of its rows. With `join` these rows begin with the first map, which is wide, and so do the gradients where an
    operator made that of the first map with room for the others (`empty_in_rows`). Without it, a single narrow map that
    needs no padding is as a wide one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, join: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rows = _rows(x)
        narrow = [i for i, weight in enumerate(weights) if len(weight) < NARROW]
        ctx.join = join and len(narrow) > 0 and narrow[0] > 0
        if not ctx.join and len(narrow) == 1 and len(weights[narrow[0]]) % 8 == 0:
            narrow = []
        ctx.together = [0, *narrow] if ctx.join else narrow
        ctx.apart = [i for i in range(len(weights)) if i not in ctx.together]
        results = {i: rows @ weights[i].t() for i in ctx.apart}
        ctx.sizes = [len(weights[i]) for i in ctx.together]
        ctx.sizes.append(-sum(ctx.sizes) % ALIGNED)
        together = None
        if ctx.together:
            together = torch.cat([*(weights[i] for i in ctx.together), x.new_zeros(ctx.sizes[-1], x.shape[-1])])
            results |= zip(ctx.together, (rows @ together.t()).split(ctx.sizes, 1), strict=False)
        ctx.save_for_backward(x, together, *(weights[i] for i in ctx.apart))
        return tuple(results[i].unflatten(0, x.shape[:-1]) for i in range(len(weights)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, together, *apart = ctx.saved_tensors
        rows, dx = _rows(x), None
        found: list[Tensor | None] = [None] * len(gradients)
        weights, places, sizes = dict(zip(ctx.apart, apart, strict=True)), ctx.together, ctx.sizes
        whole = whole_rows(gradients[0]) if ctx.join else None
        if ctx.join and whole is None:
            weights[0], together = together.split((sizes[0], sum(sizes[1:])))
            places, sizes = places[1:], sizes[1:]
        products = [
            (_rows(gradient), weight, [i], [len(weight)])
            for i, weight in weights.items()
            if (gradient := gradients[i]) is not None
        ]
        if any(gradients[i] is not None for i in places):
            g = x.new_empty(len(rows), sum(sizes)) if whole is None else _rows(whole)
            columns = zip(g.split(sizes, 1), (*(gradients[i] for i in places), None), strict=True)
            for column, gradient in islice(columns, 0 if whole is None else 1, None):
                if gradient is None:
                    column.zero_()
                else:
                    column.copy_(_rows(gradient))
            products.append((g, together, places, sizes))
        for g, weight, own, widths in products:
            dx = g @ weight if dx is None else dx.addmm_(g, weight)
            for i, part in zip(own, (g.t() @ rows).split(widths), strict=False):
                found[i] = part if gradients[i] is not None else None
        return None if dx is None else dx.view(x.shape), None, *found


def shared_linears(linears: Sequence[nn.Linear], x: Tensor, *, join: bool = False) -> tuple[Tensor, ...]:
    """linear(x) for several maps of one x [..., K]. On a GPU, in half precision, their products are shared.

    join: what reads the result of the first map takes rows at any distance, as the convolution of heads does. Then the
    narrow maps are part of its product.
    """
    dtype = autocast_dtype(x)
    if not _on_gpu(x) or dtype == torch.float32 or any(linear.bias is not None for linear in linears):
        return tuple(linear(x) for linear in linears)
    return SharedInput.apply(x.to(dtype), join, *(linear.weight.to(dtype) for linear in linears))


def linear_behind(unit: Callable[..., Tensor], linear: nn.Linear, x: Tensor) -> Tensor:
    """linear(unit(x)) without a bias, for an operator that takes the weight behind it and then keeps x or unit(x)."""
    # a layer that is computed again meets a weight that `cast_once` casts no more, and must keep the same tensors
    weight = as_autocast(linear.weight)
    # a product in float32 has ways of its own, above
    if x.dtype == weight.dtype != torch.float32:
        return unit(x, weight)
    return linear(unit(x))


def silu_parts(x: Tensor, num_parts: int) -> tuple[Tensor, ...]:
    """F.silu(x) in equal parts along its last axis; their gradients are not copied into one tensor."""
    if not _on_gpu(x):
        return F.silu(x).chunk(num_parts, dim=-1)
    from subquad.kernels.swiglu.triton import SiluParts

    return SiluParts.apply(dense(x), num_parts)


class Split(Function):
    """(x, sizes) to the parts of x along its last axis.

    Their gradients are concatenated in the backward pass, unless an operator has written them into one tensor already.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # recorded gradients have no memory of their own to find
        whole = None if torch.is_grad_enabled() else parts_of_one(gradients)
        return torch.cat(gradients, dim=-1) if whole is None else whole, None


def split(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`x.split(sizes, dim=-1)`; gradients of the parts are not copied where they lie in one tensor."""
    return Split.apply(x, sizes) if _on_gpu(x) else x.split(sizes, dim=-1)


class Unbind(Function):
    """(x, axis) to the slices of x along an axis, counted from the front.

    Their gradients are stacked in the backward pass, unless an operator has written them into one tensor already.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return x.unbind(axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # recorded gradients have no memory of their own to find
        whole = None if torch.is_grad_enabled() else slices_of_one(gradients, ctx.axis)
        return torch.stack(gradients, ctx.axis) if whole is None else whole, None


def unbind(x: Tensor, axis: int) -> tuple[Tensor, ...]:
    """`x.unbind(axis)` for two slices or more; their gradients are not copied where they lie in one tensor."""
    if not _on_gpu(x):
        return x.unbind(axis)
    return Unbind.apply(x, axis)
