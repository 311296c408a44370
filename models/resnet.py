"""ResNet-18, 34, 50, 101 and 152, written to be read.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, table 1.
https://arxiv.org/abs/1512.03385

A deep plain network is hard to optimise, because each layer has to learn all that shall go on, even what should stay
as it is. A residual block learns only the change: its output is relu(x + f(x)), and doing nothing is f(x) = 0.

The attributes are named as in torchvision (conv1, bn1, layer1 ... layer4, fc), because attribute names are the keys of
a state dict: torchvision's official files load strictly, and give the same logits.
"""

import torch
from torch import Tensor, nn


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A size x size convolution that keeps height and width at stride 1; no bias, the norm after it has its own."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """The way past a block: None where shapes agree, else a 1x1 projection (option B of the paper)."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: (N, inputs, H, W) -> (N, width, H / stride, W / stride). Of ResNet-18 and 34."""

    expansion = 1  # output channels / width

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))  # no relu yet: the change that a block adds may be negative
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up: (N, inputs, H, W) -> (N, 4 width, H / stride, W / stride). Of ResNet-50, 101 and 152.

    The 3x3 does the striding ("v1.5"), as in torchvision's weights. The paper strides in the first 1x1, which never
    looks at three of every four positions.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """Images (N, 3, H, W), float, normalised -> logits (N, num_classes). Shapes below are for 224 x 224 pixels."""

    def __init__(self, block: Block, depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv1 = conv(3, 64, 7, stride=2)  # -> (N, 64, 112, 112)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)  # -> (N, 64, 56, 56)
        grow = block.expansion
        self.layer1 = stage(block, 64, 64, depths[0], stride=1)  # -> (N, 64 grow, 56, 56)
        self.layer2 = stage(block, 64 * grow, 128, depths[1], stride=2)  # -> (N, 128 grow, 28, 28)
        self.layer3 = stage(block, 128 * grow, 256, depths[2], stride=2)  # -> (N, 256 grow, 14, 14)
        self.layer4 = stage(block, 256 * grow, 512, depths[3], stride=2)  # -> (N, 512 grow, 7, 7)
        self.avgpool = nn.AdaptiveAvgPool2d(1)  # -> (N, 512 grow, 1, 1), whatever H and W were
        self.fc = nn.Linear(512 * grow, num_classes)
        self.apply(initialise)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def stage(block: Block, inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    """`depth` blocks of one width; the first one strides and changes the number of channels, the others keep both."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *[block(width * block.expansion, width) for _ in range(depth - 1)])


def initialise(module: nn.Module) -> None:
    """He et al., https://arxiv.org/abs/1502.01852: variance 2 / fan_out keeps gradients of one size through relus.

    Norms start as torch makes them, scale 1 and shift 0; the linear layer keeps torch's own start too.
    """
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


# name -> block and blocks per stage: table 1 of the paper
ARCHITECTURES = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def resnet(name: str, num_classes: int) -> ResNet:
    """A ResNet by its name (a key of ARCHITECTURES), with random weights drawn from torch's default generator."""
    block, depths = ARCHITECTURES[name]
    return ResNet(block, depths, num_classes)
