"""A backend whose programs compute at once, by PyTorch on the host: for tests of values."""

from mpxla.device.null import NullBackend


class EagerBackend(NullBackend):
    """See `Backend`; buffers are tensors. It records compilations and calls as `NullBackend`."""

    def compile(self, name, graph, inputs, donated=(), keep_text=False):
        program = super().compile(name, graph, inputs, donated, keep_text)

        def call(arguments, seed=None):
            self.calls.append(name)
            specs = tuple(map(self.spec, arguments))
            assert specs == program.inputs, f"{name} takes {program.inputs}, not {specs}"
            return [result.detach() for result in graph(*arguments)]

        return call

    def put(self, tensors):
        return [tensor.detach().clone() for tensor in tensors]

    def adopt(self, tensors):
        return [tensor.detach() for tensor in tensors]

    def get(self, buffers):
        return [buffer.detach().clone() for buffer in buffers]

    def publish(self, buffers):
        return [buffer.detach().clone() for buffer in buffers]
