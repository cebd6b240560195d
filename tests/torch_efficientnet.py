"""EfficientNet-Lite in torch, with its batch norms, after `EfficientNet-PyTorch` and its Lite port.
Needs torch."""

from itertools import groupby

import torch
from torch import nn
from torch.nn import functional

STAGES = ((3, 1, 1), (3, 2, 6), (5, 2, 6), (3, 2, 6), (5, 1, 6), (5, 2, 6), (3, 1, 6))


class SameConv(nn.Conv2d):
    """TensorFlow's padding: the odd pixel is at the bottom and on the right."""

    def __init__(self, dim: int, out_dim: int, size: int, stride: int = 1, groups: int = 1):
        super().__init__(dim, out_dim, size, stride, groups=groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pads = []
        for side in (x.shape[3], x.shape[2]):
            total = max(
                (-(-side // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - side, 0
            )
            pads += [total // 2, total - total // 2]
        return super().forward(functional.pad(x, pads))


def norm(dim: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(dim, eps=1e-3)


class Block(nn.Module):
    def __init__(self, dim: int, out_dim: int, size: int, stride: int, widen: int):
        super().__init__()
        inner = widen * dim
        if widen > 1:
            self._expand_conv, self._bn0 = SameConv(dim, inner, 1), norm(inner)
        self._depthwise_conv, self._bn1 = SameConv(inner, inner, size, stride, inner), norm(inner)
        self._project_conv, self._bn2 = SameConv(inner, out_dim, 1), norm(out_dim)
        self.stride, self.widen = stride, widen
        self.is_residual = stride == 1 and dim == out_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu6(self._bn0(self._expand_conv(x))) if self.widen > 1 else x
        y = self._bn2(self._project_conv(functional.relu6(self._bn1(self._depthwise_conv(y)))))
        return x + y if self.is_residual else y


class EfficientNetLite(nn.Module):
    """(pixels - 127) / 128 [b 3 H W] -> the last features at strides 2 to 32, and class logits."""

    def __init__(self, block_dims: tuple[int, ...], classes: int = 1000, head_dim: int = 1280):
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2), norm(32)
        blocks, dim = [], 32
        for (_, dims), (size, stride, widen) in zip(groupby(block_dims), STAGES, strict=True):
            for number, out_dim in enumerate(dims):
                blocks.append(Block(dim, out_dim, size, 1 if number else stride, widen))
                dim = out_dim
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SameConv(dim, head_dim, 1), norm(head_dim)
        self._fc = nn.Linear(head_dim, classes)

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        features = []
        for block in self._blocks:
            if block.stride == 2:
                features.append(x)
            x = block(x)
        head = functional.relu6(self._bn1(self._conv_head(x)))
        return [*features, x], self._fc(head.mean((2, 3)))
