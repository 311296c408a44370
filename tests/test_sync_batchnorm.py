"""SyncBN keeps the model, and several processes take the step that one takes with the whole batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from utils.sync_batchnorm import GlooSyncBatchNorm, SyncBatchNormError, convert_sync_batchnorm

CPU = torch.device("cpu")


def build(name: str) -> nn.Module:
    """A model in float64 with the same random weights, running statistics and affine parameters everywhere."""
    torch.manual_seed(0)
    if name == "resnet18":
        from torchvision.models import resnet18

        model = resnet18(num_classes=10)
    else:
        import timm

        model = timm.create_model(name, num_classes=10, drop_rate=0.0, drop_path_rate=0.0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight.data, module.running_var):
                value.uniform_(0.5, 1.5)
            for value in (module.bias.data, module.running_mean):
                value.uniform_(-0.5, 0.5)
    return model.double()


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0"])
def test_a_converted_model_is_the_same_model_in_eval_mode(name):
    model, images = build(name).eval(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected, keys = model(images), list(model.state_dict())
    parameters = list(model.parameters())
    converted = convert_sync_batchnorm(model, CPU)
    assert torch.equal(converted(images), expected)
    assert list(converted.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(converted.parameters(), parameters, strict=True))
    assert not any(isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)) for module in converted.modules())


def test_the_layers_for_cuda_are_torchs_and_keep_the_activation():
    """What can be seen of the CUDA side without CUDA: in eval mode torch's layer takes CPU tensors too."""
    model, images = build("tf_efficientnet_lite0").eval(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected, keys = model(images), list(model.state_dict())
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    converted = convert_sync_batchnorm(model, torch.device("cuda"))
    assert torch.equal(converted(images), expected)
    assert list(converted.state_dict()) == keys
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in converted.modules()) == count > 0
    with pytest.raises(SyncBatchNormError, match="SyncBatchNormAct"):  # timm's converter would now drop it
        convert_sync_batchnorm(converted, torch.device("cuda"))


def test_torchs_own_converter_loses_timms_activations():
    """Why convert_sync_batchnorm exists: same keys, no message, other logits."""
    model, images = build("tf_efficientnet_lite0").eval(), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected, keys = model(images), list(model.state_dict())
    broken = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert list(broken.state_dict()) == keys
    assert not torch.allclose(broken(images), expected, rtol=0.1)


def train_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[dict, dict]:
    F.cross_entropy(model(images), labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, dict(model.named_buffers())


def ddp_steps(rank, world_size, names, images, labels):
    results = []
    for name in names:
        model = DistributedDataParallel(convert_sync_batchnorm(build(name).train(), CPU))
        results.append(train_step(model, images[rank::world_size], labels[rank::world_size]))
    return results


def test_two_processes_have_the_gradients_and_statistics_of_one_with_the_whole_batch():
    names = ["resnet18", "tf_efficientnet_lite0"]  # one call: each process imports timm once
    images, labels = torch.randn(8, 3, 64, 64, dtype=torch.float64), torch.arange(8)
    ranks = run_ranks(ddp_steps, 2, names, images, labels)
    for index, name in enumerate(names):
        expected = train_step(build(name).train(), images, labels)
        for rank in ranks:
            for ours, theirs in zip(rank[index], expected, strict=True):
                assert_equal_to_rounding({key.removeprefix("module."): value for key, value in ours.items()}, theirs)


def assert_equal_to_rounding(ours: dict, theirs: dict, tolerance: float = 1e-11) -> None:
    """Error against each tensor's largest value, measured: 2e-13. The floor is for gradients that are zero by
    algebra, such as a bias before another batch norm: what rounding leaves there was 3e-14."""
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=tolerance * (value.abs().max().item() + 0.1), msg=key)


def layer_step(layer: nn.Module, values: torch.Tensor, slope: torch.Tensor) -> dict:
    """One training step of sum(layer(values) * slope): everything that a step leaves behind."""
    values = values.clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(values)
    (output * slope).sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.requires_grad}
    return {"output": output.detach(), "input": values.grad, "grads": grads, "buffers": dict(layer.named_buffers())}


def layer_steps(rank, world_size, layer, sizes, values, slope):
    layer = convert_sync_batchnorm(layer, CPU)
    return layer_step(layer, values.split(sizes)[rank], slope.split(sizes)[rank])


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return 3 + 2 * torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def assert_ranks_equal_one_process(layer: nn.Module, sizes: list[int], values, slope, tolerance: float = 1e-12) -> list:
    ranks = run_ranks(layer_steps, len(sizes), layer, sizes, values, slope)
    whole = layer_step(copy.deepcopy(layer), values, slope)
    close = {"rtol": tolerance, "atol": tolerance}
    for key in ("output", "input"):
        torch.testing.assert_close(torch.cat([rank[key] for rank in ranks]), whole[key], **close)
    for name, gradient in whole["grads"].items():
        torch.testing.assert_close(sum(rank["grads"][name] for rank in ranks), gradient, **close)
    for rank in ranks:
        torch.testing.assert_close(rank["buffers"], whole["buffers"], **close)
    return ranks


@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 3], [5, 2, 1], [4, 0, 3]], ids=str)
def test_any_shares_of_a_batch_equal_the_whole_batch(sizes):
    layer = nn.BatchNorm2d(4).double()
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    nn.init.normal_(layer.bias)
    assert_ranks_equal_one_process(layer, sizes, *batch(sum(sizes), 4, 5, 3))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (7, 3)),
        (nn.BatchNorm1d(3, affine=False), (7, 3, 4)),
        (nn.BatchNorm3d(3, eps=0.1, momentum=0.7), (7, 3, 2, 3, 2)),
        (nn.BatchNorm2d(3, momentum=None), (7, 3, 2, 3)),
        (nn.BatchNorm2d(3, track_running_stats=False), (7, 3, 2, 3)),
        (nn.BatchNorm2d(3).requires_grad_(False), (7, 3, 2, 3)),
    ],
    ids=lambda value: str(value),
)
def test_every_kind_and_setting_of_the_layer(layer, shape):
    assert_ranks_equal_one_process(layer.double(), [4, 3], *batch(*shape))


def test_channels_last_stays_channels_last():
    values, slope = (value.to(memory_format=torch.channels_last) for value in batch(4, 3, 5, 6))
    for rank in assert_ranks_equal_one_process(nn.BatchNorm2d(3).double(), [2, 2], values, slope):
        assert rank["output"].is_contiguous(memory_format=torch.channels_last)
        assert rank["input"].is_contiguous(memory_format=torch.channels_last)


def test_a_large_mean_does_not_eat_the_variance():
    torch.manual_seed(2)
    values = 1000 + torch.randn(64, 8, 16, 16)
    layer = nn.BatchNorm2d(8, momentum=1.0)
    for rank in run_ranks(layer_steps, 2, layer, [40, 24], values, torch.randn_like(values)):
        variance = values.double().var((0, 2, 3))
        torch.testing.assert_close(rank["buffers"]["running_var"].double(), variance, rtol=1e-5, atol=0)


def half_precision_steps(rank, world_size, values):
    values = values.chunk(world_size)[rank]
    with torch.autocast("cpu", torch.bfloat16):
        autocast = layer_step(convert_sync_batchnorm(nn.BatchNorm2d(3), CPU), values, torch.ones(()))
    return autocast, layer_step(convert_sync_batchnorm(nn.BatchNorm2d(3).bfloat16(), CPU), values, torch.ones(()))


def test_bfloat16_has_float32_statistics():
    values = (8 + torch.randn(32, 3, 8, 8)).bfloat16()
    mean = 0.1 * values.double().mean((0, 2, 3))
    for autocast, pure in run_ranks(half_precision_steps, 2, values):
        torch.testing.assert_close(autocast["buffers"]["running_mean"].double(), mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(pure["buffers"]["running_mean"].double(), mean, rtol=1e-2, atol=0)
        assert {autocast["output"].dtype, pure["output"].dtype, pure["input"].dtype} == {torch.bfloat16}
        assert autocast["grads"]["weight"].dtype == torch.float32
        assert pure["grads"]["weight"].dtype == torch.bfloat16


def without_gradients(rank, world_size, values):
    """A first layer's input needs no gradient; under no_grad nothing does."""
    layer = convert_sync_batchnorm(nn.BatchNorm2d(3).double(), CPU)
    layer(values.chunk(world_size)[rank]).square().sum().backward()
    with torch.no_grad():
        output = layer(values.chunk(world_size)[rank])
    return layer.weight.grad, output.requires_grad


def test_an_input_without_gradient():
    values, _ = batch(6, 3, 2, 2)
    (first, needs), (second, _) = run_ranks(without_gradients, 2, values)
    layer = nn.BatchNorm2d(3).double()
    layer(values).square().sum().backward()
    torch.testing.assert_close(first + second, layer.weight.grad, rtol=1e-12, atol=1e-12)
    assert not needs


def evaluate_alone(rank, world_size, values):
    layer = convert_sync_batchnorm(nn.BatchNorm2d(3).double(), CPU)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 3, dtype=torch.float64))
    return layer.eval()(values) if rank == 0 else None


def test_eval_mode_asks_no_other_process():
    values, _ = batch(6, 3, 2, 2)
    alone, _ = run_ranks(evaluate_alone, 2, values, timeout=20)
    assert torch.equal(alone, nn.BatchNorm2d(3).double().eval()(values))


def one_value(rank, world_size):
    layer = convert_sync_batchnorm(nn.BatchNorm1d(3), CPU)
    with pytest.raises(SyncBatchNormError, match="Expected more than 1 value per channel when training"):
        layer(torch.ones(1 - rank, 3))
    return True


def test_one_value_in_all_is_refused_on_every_process():
    assert run_ranks(one_value, 2) == [True, True]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_one_process_is_the_ordinary_layer_to_the_bit(training, track):
    values, slope = batch(5, 3, 4, 4)
    layer = nn.BatchNorm2d(3, track_running_stats=track).double().train(training)
    ours = layer_step(convert_sync_batchnorm(copy.deepcopy(layer), CPU), values, slope)
    torch.testing.assert_close(ours, layer_step(layer, values, slope), rtol=0, atol=0)


def test_conversion_keeps_every_setting_and_object():
    layer = nn.BatchNorm2d(3, eps=0.2, momentum=None).double().eval()
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    before = {**layer.state_dict(keep_vars=True)}
    converted = convert_sync_batchnorm(convert_sync_batchnorm(model, CPU), CPU)
    assert isinstance(converted[0], GlooSyncBatchNorm)
    assert converted[0] is converted[2]
    assert all(value is before[key] for key, value in converted[0].state_dict(keep_vars=True).items())
    assert (converted[0].eps, converted[0].momentum, converted[0].training) == (0.2, None, False)
    with pytest.raises(ValueError, match="expected 4D input"):
        converted(torch.ones(2, 3))
    assert not copy.deepcopy(converted)[0].weight.requires_grad


class Doubling(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


def patched() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda input: input
    return layer


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [Doubling, nn.LazyBatchNorm2d, nn.modules.batchnorm.BatchNorm2d])
def test_an_unknown_kind_of_batchnorm_is_refused_and_nothing_changed(device, make):
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Sequential(nn.LazyBatchNorm2d() if "Lazy" in make.__name__ else make(3))
    )
    if make is nn.BatchNorm2d:
        model[1][0].forward = lambda input: input
    with pytest.raises(SyncBatchNormError, match=r"the layer 1\.0 is a .*--no-syncBN"):
        convert_sync_batchnorm(model, torch.device(device))
    assert type(model[0]) is nn.BatchNorm2d


def nccl_step(rank, world_size, images, labels):
    torch.distributed.destroy_process_group()
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = convert_sync_batchnorm(build("tf_efficientnet_lite0").cuda().train(), torch.device("cuda"))
    gradients, _ = train_step(DistributedDataParallel(model, device_ids=[0]), images.cuda(), labels.cuda())
    return {name.removeprefix("module."): gradient.cpu() for name, gradient in gradients.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_over_nccl_has_the_gradients_of_the_plain_model():
    images, labels = torch.randn(8, 3, 64, 64, dtype=torch.float64), torch.arange(8)
    (ours,) = run_ranks(nccl_step, 1, images, labels, timeout=120)
    expected, _ = train_step(build("tf_efficientnet_lite0").train(), images, labels)
    assert_equal_to_rounding(ours, expected, tolerance=1e-9)  # other convolution kernels
