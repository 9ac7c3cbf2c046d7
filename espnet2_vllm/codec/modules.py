"""A codec's modules as they are used here: nothing that only training needs, and one kernel where torch has six."""

from __future__ import annotations

import torch

_BLOCK = 1024


def for_inference(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """``model`` itself, on ``device``: weights of weight norm computed once for all, and on a GPU Snake in one kernel."""
    for module in model.modules():
        fold_weight_norm(module)
    model = model.to(device)
    if device.type == "cuda":
        fuse_snakes(model)
    return model


def fold_weight_norm(module: torch.nn.Module) -> None:
    """Replaces norm and direction by the weight that they make, which weight norm would compute anew in every call."""
    if "weight" in getattr(module, "parametrizations", {}):
        weight = torch.nn.Parameter(module.weight.detach(), requires_grad=False)
        torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
        del module.weight  # which is no parameter where nothing has a gradient
        module.weight = weight
    elif hasattr(module, "weight_g"):
        torch.nn.utils.remove_weight_norm(module)


def fuse_snakes(model: torch.nn.Module) -> int:
    """Puts ``FusedSnake`` in the place of transformers' and ESPnet's ``Snake1d``; how many there were."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Snake1d":
                setattr(module, name, FusedSnake(child.alpha))
                count += 1
    return count


def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """x + sin(alpha x)^2 / alpha of [B, C, ...], with alpha [1, C or 1, 1] (arXiv:2006.08195), as DAC computes it."""
    flat = x.reshape(x.shape[0], x.shape[1], -1)
    return (flat + (alpha + 1e-9).reciprocal() * torch.sin(alpha * flat).pow(2)).reshape(x.shape)


class FusedSnake(torch.nn.Module):
    """``snake`` that reads and writes its input once. float32, on a GPU or under Triton's interpreter."""

    def __init__(self, alpha: torch.nn.Parameter) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from .snake_kernel import snake_kernel

        x = x.contiguous()
        out = torch.empty_like(x)
        if not x.numel():
            return out
        rows, length = x.shape[0] * x.shape[1], x[0, 0].numel()
        with torch.cuda.device_of(x):
            grid = (rows, -(-length // _BLOCK))
            snake_kernel[grid](out, x, self.alpha, x.shape[1], length, ONE=self.alpha.numel() == 1, BLOCK=_BLOCK)
        return out
