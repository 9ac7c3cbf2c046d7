"""What Triton asks of a device."""

import time

from triton.backends import driver as triton_driver
from triton.backends.compiler import GPUTarget


class InterpreterDriver(triton_driver.DriverBase):
    """One device, the processor."""

    utils = None

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", "interpreter", 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        import torch

        return torch.cpu

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError(f"no C++ type for {ty}: the interpreter compiles nothing")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        assert device == 0, f"device {device} of the interpreter"

    def get_current_stream(self, device=None):
        return 0

    def get_device_capability(self, device=None):
        return (0, 0)

    def get_empty_cache_for_benchmark(self):
        return None

    def clear_cache(self, cache):
        assert cache is None

    def get_benchmarker(self):
        def milliseconds(call, *, quantiles=None, **kwargs):
            start = time.perf_counter()
            call()
            taken = (time.perf_counter() - start) * 1e3
            return [taken] * len(quantiles) if quantiles else taken

        return milliseconds
