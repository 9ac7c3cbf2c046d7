"""A decoding command line whose codec fails as told: python faulty.py FAULT MODULE ARGUMENT...

FAULT: ``frames=N`` makes every clip of N frames raise an error, ``none`` nothing.
"""

import importlib
import sys

from espnet2_vllm.codec.torch_codec import TorchCodec


def fail_at(frames: int) -> None:
    check = TorchCodec._check_codes

    def checked(self, codes):
        if len(codes) == frames:
            raise RuntimeError(f"the script does not like clips of {frames} frames")
        return check(self, codes)

    TorchCodec._check_codes = checked


if __name__ == "__main__":
    fault, module, *arguments = sys.argv[1:]
    name, _, value = fault.partition("=")
    if name == "frames":
        fail_at(int(value))
    sys.exit(importlib.import_module(module).main(arguments))
