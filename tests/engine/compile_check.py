"""Compiles every variant of the step's kernels for Hopper; needs Triton's compiler, but no GPU: python compile_check.py"""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    """As much of a driver as the compiler asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_interface(self):
        return torch.cuda

    def get_active_torch_device(self):
        return torch.device("cpu")


driver.set_active(Hopper())

from espnet2_vllm.bench.geometry import opuslm_layout  # noqa: E402
from espnet2_vllm.engine.core import SpeechCore, SpeechWeights  # noqa: E402
from espnet2_vllm.engine.decode_attention import PLANS, Workspace, decode_attention  # noqa: E402
from espnet2_vllm.engine.fused import FusedStep  # noqa: E402
from espnet2_vllm.layout import Layout  # noqa: E402

HIDDEN, SLOTS = 64, 8
LAYOUTS = {
    "bagpiper": Layout.bagpiper(151936, [1025] * 8),
    "opuslm": opuslm_layout(50, ssl_units=12, codes=8, codebooks=8, phonemes=3),
}
launch, compiled = JITFunction.run, set()


def compile_only(kernel, *args, grid=None, warmup=False, **options):
    made = launch(kernel, *args, grid=grid, warmup=True, **options)
    assert made.asm["cubin"], kernel
    compiled.add((kernel.__name__, made.hash))
    return made


def main() -> None:
    JITFunction.run = compile_only
    for name, layout in LAYOUTS.items():
        rows = (layout.vocab_size, layout.vocab_size, layout.num_streams)
        weights = SpeechWeights(*(torch.zeros(count, HIDDEN, dtype=torch.bfloat16) for count in rows))
        core = SpeechCore(layout, weights, num_slots=SLOTS, max_rows=64, device=torch.device("cpu"))
        fused = FusedStep(core, weights, SLOTS)
        fused.warm_up(lambda hidden, head=weights.head: hidden @ head.t())
        ids, positions = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
        slots, starts = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        fused.embed(torch.zeros(4, HIDDEN, dtype=torch.bfloat16), ids, positions, slots, starts)
        print(f"{name}: {len(compiled)} variants of {len({kernel for kernel, _ in compiled})} kernels", flush=True)
    compiled.clear()
    for group, head_size in PLANS:
        for dtype in (torch.bfloat16, torch.float32):
            attend(group, head_size, dtype)
    print(f"attention: {len(compiled)} variants of {len({kernel for kernel, _ in compiled})} kernels", flush=True)


def attend(group: int, head_size: int, dtype: torch.dtype) -> None:
    """In parts and whole."""
    cache = torch.zeros(4, 16, 2, 2 * head_size, dtype=dtype)
    queries = torch.zeros(SLOTS, 2 * group, head_size, dtype=dtype)
    table = torch.zeros(SLOTS, 4, dtype=torch.int32)
    lengths, starts = torch.zeros(SLOTS, dtype=torch.int32), torch.zeros(SLOTS + 1, dtype=torch.int32)
    space = Workspace(SLOTS, 2 * group, 2, head_size, queries.device)
    for splits in (1, None):
        decode_attention(
            torch.zeros_like(queries), queries, *cache.split(head_size, dim=-1), table, lengths, starts, 1.0, space,
            splits=splits,
        )  # fmt: skip


if __name__ == "__main__":
    main()
