"""Batch normalization over the batch of all processes together, on any device, that keeps the model.

On CUDA timm's converter makes torch's SyncBatchNorm; torch's own converter drops the activation inside timm's
BatchNormAct2d without a message. Elsewhere GlooSyncBatchNorm of this file does the same work over gloo, because
torch's SyncBatchNorm refuses CPU tensors. state_dict keys are those of ordinary BatchNorm either way.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError


class SyncBatchNormError(UserError):
    """A normalization layer that cannot be synchronized without losing what it does; one sentence."""


class GlooSyncBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of the whole batch of all processes.

    Made by `convert_sync_batchnorm` only, which turns an existing layer into this class in place, so parameters,
    buffers, hooks, settings and timm's `drop` and `act` are the very same objects. Not a subclass of
    torch.nn.SyncBatchNorm: DistributedDataParallel refuses those on CPU. Input (N, C, ...) in any floating dtype;
    N may differ between the processes, and may be 0 on some. In eval mode and without other processes the original
    class's forward runs.
    """

    original_class: type[_BatchNorm]

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self.original_class.forward(self, input)
        self._check_input_dim(input)
        mean, variance, count = global_statistics(input.detach())
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_statistics(mean, variance * (count / (count - 1)))
        # Half-precision parameters join in the statistics' dtype: the kernel takes float32 ones for half inputs too.
        weight, bias = (None if p is None else p.to(mean.dtype) for p in (self.weight, self.bias))
        output = _Normalize.apply(input, weight, bias, mean, variance, count, self.eps)
        for name in ("drop", "act"):  # the children that timm's BatchNormAct2d applies, in its order
            if name in self._modules:
                output = self._modules[name](output)
        return output

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        # momentum None means the plain average of all batches so far
        momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        self.original_class._check_input_dim(self, input)


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Make every BatchNorm1d/2d/3d (and timm's BatchNormAct2d) of the model normalize over all processes.

    Call it on every process before DistributedDataParallel and use what it returns; the model is changed in place.
    Raises SyncBatchNormError, leaving the model as it was, for a BatchNorm of any other class: what a class of its own
    adds would be lost silently. That includes torch's SyncBatchNorm and timm's: timm's converter, run on its result,
    drops the activation. GlooSyncBatchNorm may be converted again on the CPU.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    convertible = convertible_classes()
    if device.type != "cuda":
        layers = {name: layer for name, layer in layers.items() if not isinstance(layer, GlooSyncBatchNorm)}
    for name, layer in layers.items():
        if type(layer) not in convertible or "forward" in vars(layer):
            raise SyncBatchNormError(
                f"the layer {name or '(the model itself)'} is a {type(layer).__name__}, a kind of BatchNorm that "
                f"cannot be synchronized on {device.type} without losing what it adds: train with --no-syncBN"
            )
    if device.type == "cuda":
        from timm.layers import convert_sync_batchnorm as convert_with_timm

        return convert_with_timm(model)
    for layer in layers.values():
        layer.original_class, layer.__class__ = type(layer), GlooSyncBatchNorm
    return model


def convertible_classes() -> set[type]:
    """The classes whose forward is known here to be batch normalization, then at most `drop` and `act`."""
    # A model with timm's layers in it has imported timm; without them its import (seconds) is not needed.
    timm_layers = sys.modules.get("timm.layers")
    known = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
    return known | ({timm_layers.BatchNormAct2d} if timm_layers else set())


def global_statistics(input: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean (C,), biased variance (C,) and number of values per channel, over the input (N, C, ...) of all processes.

    One all-reduce. Mean and variance are float64 for float64 inputs, else float32 (the variance of a half-precision
    input to about 1e-5, far below its own rounding). Raises SyncBatchNormError on every process if all together have
    fewer than two values per channel.
    """
    channels = input.shape[1]
    packed = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    if input.numel() > 0:
        # The scratch buffers' dtype is the one the kernel answers in: without them, that of a half-precision input.
        scratch = torch.zeros(2, channels, dtype=dtype, device=input.device)
        mean, variance = torch.ops.aten.batch_norm_update_stats(input, scratch[0], scratch[1], 0.0)
        packed[:channels], packed[channels:-1], packed[-1] = mean, variance, 1
        packed[channels:-1].addcmul_(packed[:channels], packed[:channels])
        packed *= input.numel() // channels  # sum, sum of squares, count
    dist.all_reduce(packed)
    count = int(packed[-1])
    if count < 2:
        raise SyncBatchNormError(
            f"Expected more than 1 value per channel when training, got input size {input.shape} and {count} value(s) "
            "per channel on all processes together: use a larger batch or larger images"
        )
    mean, square = packed[:-1].div_(count).chunk(2)
    # The subtraction cancels, hence float64: the variance's relative error is about 1e-16 (mean / deviation)^2.
    variance = (square - mean * mean).clamp_min_(0)
    return mean.to(dtype), variance.to(dtype), count


class _Normalize(torch.autograd.Function):
    """y = weight * xhat + bias with xhat = (x - mean) / sqrt(variance + eps); mean and variance are those of all x.

    Gradient of Ioffe and Szegedy 2015 (arXiv:1502.03167, section 3), its terms gathered:
    dx = weight / sqrt(variance + eps) * (dy - sum(dy) / count - xhat * sum(dy * xhat) / count), the sums running over
    all processes. The gradients of weight and bias, sum(dy * xhat) and sum(dy), stay local: DDP averages them.
    """

    @staticmethod
    def forward(ctx, input, weight, bias, mean, variance, count, eps):
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.eps = count, eps
        return F.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        input, weight, mean, variance = ctx.saved_tensors
        grad_input, grad_weight, grad_bias = local_gradients(grad_output, input, weight, mean, variance, ctx.eps)
        if ctx.needs_input_grad[0]:
            packed = torch.cat([grad_weight, grad_bias]).double()
            dist.all_reduce(packed)
            scale = (variance + ctx.eps).rsqrt() if weight is None else weight * (variance + ctx.eps).rsqrt()
            slope, offset = (-scale * mean_gradient for mean_gradient in (packed / ctx.count).to(mean.dtype).chunk(2))
            # slope * xhat + offset is a batch norm again: its fused kernel beats element-wise operations on (N, C, ...)
            grad_input.add_(F.batch_norm(input, mean, variance, slope, offset, eps=ctx.eps))
        needed = zip((grad_input, grad_weight, grad_bias), ctx.needs_input_grad, strict=False)
        return *(gradient if need else None for gradient, need in needed), None, None, None, None


def local_gradients(grad_output, input, weight, mean, variance, eps) -> tuple[Tensor, Tensor, Tensor]:
    """This process's gradients of input, weight and bias with mean and variance held constant."""
    if input.numel() == 0:  # the kernel divides by zero
        return torch.zeros_like(input), torch.zeros_like(mean), torch.zeros_like(mean)
    return torch.ops.aten.native_batch_norm_backward(
        grad_output, input, weight, mean, variance, None, None, False, eps, [True, True, True]
    )
