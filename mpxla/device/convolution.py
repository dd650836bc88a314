"""Convolutions as matrix products, for XLA's CPU backend, whose own are slow.

CPU time on one core, ms per microbatch of two images (layers of a U-net, kernels of 3 x 3, of 2 x 2
in the last two rows, which are transposed; the last three columns on a busier machine):

    channels, size, stride       PyTorch           XLA               here
                                 y    dx    dw     y    dx    dw     y    dx    dw
    3 to 24,  64 x 64, 1       0.35     -  0.33  0.67     -  0.46  0.26     -  0.63
    24 to 48, 64 x 64, 2       0.74  1.15  0.90  0.61  1.15  1.65  0.71  0.73  1.02
    48 to 96, 32 x 32, 2       0.47  0.62  0.51  0.73  0.70  0.92  0.61  0.56  0.69
    96 to 96, 16 x 16, 1       0.83  0.81  0.97  0.96  0.96  1.34  1.03  1.03  1.16
    48 to 3,  64 x 64, 1       1.59  1.21  1.41  3.25  0.79  4.68  0.52  0.51  0.93
    96 to 48, 16 x 16, 2       0.37  0.26  0.27  0.35  0.48  0.42  0.33  0.29  0.42
    96 to 24, 32 x 32, 2       0.75  0.69  0.74  1.14  0.57  1.31  0.62  0.57  1.21

In three dimensions (8 to 16, 16 x 32 x 32) it is 6.1, 9.3, 5.5; 21, 42, 38; 2.8, 2.5, 2.6. With
many channels XLA is as fast (128 to 128, 28 x 28: 10 each), and where columns pass what the
allocator keeps (32 MiB for all buffers of a program) or weights are megabytes, it is faster: 64 to
64 on 56 x 56, with columns of 29 MB, takes 11 by XLA and 29 here.

A convolution maps a *wide* image [B, C, *S] to a *narrow* one [B, O, *T], with a weight
[O, C, *kernel]; a transposed convolution, and the gradient of the input, go back. So there are
three things to compute, whatever the direction of a layer:

    contract         wide image, weight -> narrow image
    spread           narrow image, weight -> wide image
    weight_gradient  wide image, narrow image -> weight

Each is one product with *columns*: for every tap of the kernel the part of an image that the tap
meets, [taps * C, B * positions], gathered before the product or added up after it. With stride 1
both images can be the one that columns are made of; the one with fewer channels is taken. Columns
live inside a program only; the backward makes its own.

Where phases of `spread` are mixed, XLA makes one loop of that and of what comes next, which is slow
(a GELU's derivative on 24 x 2 x 64 x 64 takes 1.4 ms in place of 0.2). XLA's own convolution needs
copies of its operands there and takes as long in sum.

A graph keeps its arguments, results and saved values. This module must not know about ranks.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from mpxla.graph.typed import arguments_of
from mpxla.stage.cleanup import replace_call

__all__ = ["Window", "contract", "expand_convolutions", "spread", "weight_gradient"]

_aten = torch.ops.aten
_MOST_COLUMN_BYTES = 16 * 2**20
_MOST_WEIGHT_BYTES = 4 * 2**20
_Sizes = Sequence[int]


class Window(NamedTuple):
    """How a kernel moves: tap i of position t meets pixel stride * t + dilation * i - padding.

    One number per spatial dimension each. The image has as many zeros after it as the positions
    need.
    """

    stride: _Sizes
    padding: _Sizes
    dilation: _Sizes

    @property
    def is_dense(self) -> bool:
        """Whether it stops everywhere, so that it may be turned round."""
        return all(s == 1 for s in self.stride)

    def is_tiling(self, kernel: _Sizes) -> bool:
        """Whether every pixel belongs to one tap of one position."""
        is_whole = not any(self.padding) and all(d == 1 for d in self.dilation)
        return is_whole and list(kernel) == list(self.stride)

    def turned(self, kernel: _Sizes) -> "Window":
        """The window of the same products seen from the narrow image; for stride 1."""
        reach = [d * (k - 1) for d, k in zip(self.dilation, kernel, strict=True)]
        padding = [r - p for r, p in zip(reach, self.padding, strict=True)]
        return Window(self.stride, padding, self.dilation)


def expand_convolutions(module: fx.GraphModule) -> None:
    """Replaces the convolutions of a graph, and their derivatives, by functions of this module.

    Those stay as they are that have groups or another dtype than float32, and those whose columns
    or weights are so large that products gain nothing.
    """
    for node in list(module.graph.nodes):
        if node.target is _aten.convolution.default:
            _expand_forward(node)
        elif node.target is _aten.convolution_backward.default:
            _expand_backward(node)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _expand_forward(node: fx.Node) -> None:
    image, weight, bias, *options = arguments_of(node)
    layer = _Layer.of(image, weight, options, node)
    if layer.is_faster:
        replace_call(node, *layer.forward(image, weight, bias))


def _expand_backward(node: fx.Node) -> None:
    """Makes a node of its own of every gradient."""
    grad, image, weight, _, *options, _ = arguments_of(node)
    layer = _Layer.of(image, weight, options, grad)
    if not layer.is_faster:
        return
    spatial = range(2, grad.meta["val"].dim())
    calls = (
        layer.input_gradient(grad, weight),
        layer.weight_gradient(grad, image),
        (_aten.sum.dim_IntList, (grad, [0, *spatial])),
    )
    for element in list(node.users):
        replace_call(element, *calls[arguments_of(element)[1]])


_Call = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


class _Layer(NamedTuple):
    """A convolution as a graph has it; methods give the calls that compute it."""

    image: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    window: Window
    is_transposed: bool
    groups: int

    @classmethod
    def of(
        cls, image: fx.Node, weight: fx.Node, options: Sequence[Any], result: fx.Node
    ) -> "_Layer":
        """From the arguments that the operator and its derivative share."""
        stride, padding, dilation, is_transposed, _, groups = options
        tensors = image.meta["val"], weight.meta["val"], result.meta["val"]
        dims = tensors[0].dim() - 2
        window = Window(*(list(v) * (dims // len(v)) for v in (stride, padding, dilation)))
        return cls(*tensors, window, is_transposed, groups)

    @property
    def is_faster(self) -> bool:
        """Whether products take it, and are faster: see the table of the module."""
        if self.groups != 1 or any(t.dtype is not torch.float32 or not t.numel() for t in self[:3]):
            return False
        wide, narrow = self.image, self.result
        if self.is_transposed:
            wide, narrow = narrow, wide
        columns = wide.shape[1] * narrow.numel() // narrow.shape[1]
        if self.window.is_dense:
            columns = min(columns, narrow.shape[1] * wide.numel() // wide.shape[1])
        columns *= math.prod(self.weight.shape[2:])
        is_small = 4 * columns <= _MOST_COLUMN_BYTES
        return is_small and 4 * self.weight.numel() <= _MOST_WEIGHT_BYTES

    def forward(self, image: fx.Node, weight: fx.Node, bias: fx.Node | None) -> _Call:
        """The layer itself."""
        target = spread if self.is_transposed else contract
        return target, (image, weight, bias, self.window, list(self.result.shape[2:]))

    def input_gradient(self, grad: fx.Node, weight: fx.Node) -> _Call:
        """The gradient of the layer's input."""
        target = contract if self.is_transposed else spread
        return target, (grad, weight, None, self.window, list(self.image.shape[2:]))

    def weight_gradient(self, grad: fx.Node, image: fx.Node) -> _Call:
        """The gradient of the layer's weight."""
        images = (grad, image) if self.is_transposed else (image, grad)
        return weight_gradient, (*images, list(self.weight.shape[2:]), self.window)


def contract(
    wide: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    size: _Sizes,
) -> torch.Tensor:
    """A convolution of a wide image, to a narrow one with positions `size`."""
    kernel = weight.shape[2:]
    if window.is_dense and weight.shape[0] < weight.shape[1]:
        return _add_up(wide, _turned(weight), bias, window.turned(kernel), size)
    return _gather(wide, weight, bias, window, size)


def spread(
    narrow: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    size: _Sizes,
) -> torch.Tensor:
    """The transpose of `contract`, to a wide image of `size`; gives gradients of inputs, too."""
    kernel = weight.shape[2:]
    if window.is_dense and weight.shape[0] <= weight.shape[1]:
        return _gather(narrow, _turned(weight), bias, window.turned(kernel), size)
    return _add_up(narrow, weight, bias, window, size)


def weight_gradient(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    kernel: _Sizes,
    window: Window,
) -> torch.Tensor:
    """The gradient of the weight of `contract` or `spread`.

    The wide image is the input of a convolution, or the gradient of what a transposed one gives.
    """
    if window.is_dense and narrow.shape[1] < wide.shape[1]:
        return _turned(_weight_product(narrow, wide, kernel, window.turned(kernel)))
    return _weight_product(wide, narrow, kernel, window)


def _weight_product(
    gathered: torch.Tensor, other: torch.Tensor, kernel: _Sizes, window: Window
) -> torch.Tensor:
    """[B, C, *S] and [B, O, *T] to [O, C, *kernel]; columns are made of the first."""
    columns = _columns(gathered, kernel, window, other.shape[2:])
    rows = other.transpose(0, 1).reshape(other.shape[1], -1)
    # The smaller one on the right: XLA's CPU backend turns it round inside the product, which
    # takes 2 ns per element.
    if len(columns) < len(rows):
        product = (rows @ columns.t()).reshape(other.shape[1], *kernel, gathered.shape[1])
        return product.permute(0, -1, *range(1, len(kernel) + 1))
    product = (columns @ rows.t()).reshape(*kernel, gathered.shape[1], other.shape[1])
    return product.permute(-1, -2, *range(len(kernel)))


def _gather(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    size: _Sizes,
) -> torch.Tensor:
    """Columns, then a product with the weight [O, C, *kernel]."""
    spatial = range(2, weight.dim())
    matrix = weight.permute(0, *spatial, 1).reshape(weight.shape[0], -1)
    product = matrix @ _columns(image, weight.shape[2:], window, size)
    if bias is not None:
        product = product + bias[:, None]
    return product.reshape(weight.shape[0], image.shape[0], *size).transpose(0, 1)


def _columns(
    image: torch.Tensor, kernel: _Sizes, window: Window, positions: _Sizes
) -> torch.Tensor:
    """[B, C, *S] to [taps * C, B * positions]; the taps of one dimension after the other."""
    before, after = [], []
    for size, k, s, p, d, count in zip(image.shape[2:], kernel, *window, positions, strict=True):
        before.append(p)
        after.append(s * (count - 1) + d * (k - 1) + 1 - p - size)
    columns = _padded(image.transpose(0, 1), before, after)
    for dim in reversed(range(len(kernel))):
        extent = window.stride[dim] * (positions[dim] - 1) + 1
        parts = [
            _aten.slice(columns, 2 + dim, start, start + extent, window.stride[dim])
            for start in range(0, kernel[dim] * window.dilation[dim], window.dilation[dim])
        ]
        columns = torch.cat(parts)
    return columns.reshape(math.prod(kernel) * image.shape[1], -1)


def _add_up(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    size: _Sizes,
) -> torch.Tensor:
    """A product with the weight [O, C, *kernel], whose rows for every tap are added in place.

    Of pixels `stride * u + phase` of one phase, each tap meets all or none, and all of them at
    the same distance from u. So phases are summed apart, and then interleaved.
    """
    batch, (outs, channels, *kernel) = image.shape[0], weight.shape
    matrix = weight.permute(*range(2, weight.dim()), 1, 0).reshape(-1, outs)
    product = matrix @ image.transpose(0, 1).reshape(outs, -1)
    parts = product.reshape(-1, channels, batch, *image.shape[2:])
    # Pixels after the last tap (of 3 with kernel and stride 2) belong to no position.
    reached = [n * s for n, s in zip(image.shape[2:], window.stride, strict=True)]
    if not window.is_tiling(kernel) or any(r < n for r, n in zip(reached, size, strict=True)):
        counts = [-(-n // s) for n, s in zip(size, window.stride, strict=True)]
        phases = itertools.product(*map(range, window.stride))
        parts = torch.stack([_phase(parts, kernel, window, phase, counts) for phase in phases])
    result = _interleaved(parts, window.stride)
    for dim, count in enumerate(size):
        if result.shape[2 + dim] != count:
            result = _aten.slice(result, 2 + dim, 0, count)
    if bias is not None:
        result = result + bias.reshape(-1, *[1] * (result.dim() - 1))
    return result.transpose(0, 1)


def _phase(
    parts: torch.Tensor, kernel: _Sizes, window: Window, phase: _Sizes, counts: _Sizes
) -> torch.Tensor:
    """Sum over taps of [taps, C, B, *T], each moved to the pixels of a phase: [C, B, *counts]."""
    total = None
    for part, tap in zip(parts.unbind(), itertools.product(*map(range, kernel)), strict=True):
        moves = [
            divmod(a + p - d * i, s) for a, i, s, p, d in zip(phase, tap, *window, strict=True)
        ]
        before = [-move for move, _ in moves]
        after = [
            move + count - n
            for (move, _), count, n in zip(moves, counts, part.shape[2:], strict=True)
        ]
        ends = zip(part.shape[2:], before, after, strict=True)
        is_outside = any(min(b, a) <= -n for n, b, a in ends)
        if is_outside or any(rest for _, rest in moves):
            continue
        moved = _padded(part, before, after)
        total = moved if total is None else total + moved
    return parts.new_zeros(*parts.shape[1:3], *counts) if total is None else total


def _interleaved(phases: torch.Tensor, stride: _Sizes) -> torch.Tensor:
    """[phases, C, B, *counts], the last dimension's fastest, to [C, B, *(counts * stride)]."""
    dims = len(stride)
    channels, batch, *counts = phases.shape[1:]
    order = itertools.chain.from_iterable((dims + 2 + dim, dim) for dim in range(dims))
    mixed = phases.reshape(*stride, *phases.shape[1:]).permute(dims, dims + 1, *order)
    sizes = [count * step for count, step in zip(counts, stride, strict=True)]
    return mixed.reshape(channels, batch, *sizes)


def _padded(image: torch.Tensor, before: _Sizes, after: _Sizes) -> torch.Tensor:
    """With zeros around the spatial dimensions; negative numbers cut off."""
    widths = [w for pair in zip(reversed(before), reversed(after), strict=True) for w in pair]
    return _aten.constant_pad_nd(image, widths) if any(widths) else image


def _turned(weight: torch.Tensor) -> torch.Tensor:
    """[O, C, *kernel] to [C, O, *kernel], with the kernel turned round."""
    return weight.flip(tuple(range(2, weight.dim()))).transpose(0, 1)
