"""The Snake kernel against its plain twin: natively on a GPU, elsewhere under Triton's interpreter. ``compile``: for Hopper."""

import os
import sys

import torch

COMPILE = "compile" in sys.argv
if not COMPILE and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from espnet2_vllm.codec.modules import FusedSnake, snake  # noqa: E402


def compile_for_hopper():
    import triton
    from triton.backends.compiler import GPUTarget

    from espnet2_vllm.codec.snake_kernel import snake_kernel

    types = {"out": "*fp32", "x": "*fp32", "alpha": "*fp32", "channels": "i32", "length": "i32"}
    for one in (True, False):
        values = {"ONE": one, "BLOCK": 1024}
        source = triton.compiler.ASTSource(
            snake_kernel, {**types, **dict.fromkeys(values, "constexpr")}, constexprs=values
        )
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert made.asm["cubin"]
        assert "sin.approx" not in made.asm["ptx"], "sines of large arguments would be wrong"
    print("compiled")


def main():
    if COMPILE:
        compile_for_hopper()
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for seed, shape, channels in ((1, (2, 3, 1500), 3), (2, (1, 4, 7), 1), (3, (2, 6, 5, 2), 6), (4, (1, 2, 0), 2)):
        noise = torch.Generator().manual_seed(seed)
        x = (torch.randn(shape[0], *shape[:0:-1], generator=noise) * 20).to(device)
        x = x.permute(0, *range(len(shape) - 1, 0, -1))  # as a convolution may leave it
        assert x.shape == shape
        alpha = torch.nn.Parameter(torch.rand(1, channels, 1, generator=noise).to(device) * 3)
        with torch.inference_mode():
            torch.testing.assert_close(FusedSnake(alpha)(x), snake(x, alpha), rtol=1e-5, atol=1e-5)
    print("equal")


if __name__ == "__main__":
    main()
