"""What Triton asks of a compiler; the interpreter goes around it."""

from triton.backends import compiler as triton_compiler


class InterpreterBackend(triton_compiler.BaseBackend):
    """Compiles nothing."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        raise NotImplementedError("kernels run under TRITON_INTERPRET=1 only")

    def add_stages(self, stages, options, *rest):
        raise NotImplementedError("kernels run under TRITON_INTERPRET=1 only")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
