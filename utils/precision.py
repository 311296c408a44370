"""Number formats: what a training step and what a validation step compute in."""

from contextlib import AbstractContextManager, nullcontext

import torch

from utils.errors import UserError


class Precision:
    """Autocast and loss scaling as the options want them.

    Args:
        device: where it is computed.
        amp: None, "bf16" or "fp16", for training steps.
        eval_amp: whether validation uses `amp` too; without it, it is computed in the weights' own format.
        float64: whether inputs and weights are float64 instead of float32.

    Raises:
        UserError: fp16 without a CUDA device, where it has no loss scaling and no speed.
    """

    def __init__(self, device: torch.device, amp: str | None = None, eval_amp: bool = False, float64: bool = False):
        if amp == "fp16" and device.type != "cuda":
            raise UserError(f"--amp fp16 needs a CUDA device, this is {device.type}: use --amp bf16")
        self.device_type, self.eval_amp = device.type, eval_amp
        self.amp_dtype = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        self.dtype = torch.float64 if float64 else torch.float32
        # Small gradients vanish in fp16's range, not in bf16's; a disabled scaler passes everything through.
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")

    def training(self) -> AbstractContextManager:
        return self._autocast(True)

    def evaluation(self) -> AbstractContextManager:
        return self._autocast(self.eval_amp)

    def _autocast(self, wanted: bool) -> AbstractContextManager:
        if self.amp_dtype is None or not wanted:
            return nullcontext()
        return torch.autocast(self.device_type, self.amp_dtype)
