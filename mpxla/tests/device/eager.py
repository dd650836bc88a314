"""A backend whose programs compute at once, by PyTorch on the host: for tests of values."""

from mpxla.tests.device.null import NullBackend, NullExecutable


class EagerExecutable(NullExecutable):
    """See `Executable`; it runs a module."""

    def __call__(self, arguments, seed=None):
        specs = tuple(map(self._backend.spec, arguments))
        assert specs == self.inputs, f"{self.name} takes {self.inputs}, not {specs}"
        self._backend.calls.append(self.name)
        return [result.detach() for result in self.graph(*arguments)]


class EagerBackend(NullBackend):
    """See `Backend`; buffers are tensors. It records compilations and calls as `NullBackend`."""

    def compile(self, name, graph, inputs, donated=()):
        found = super().compile(name, graph, inputs, donated)
        program = EagerExecutable(self, name, found.inputs, found.outputs, donated)
        program.graph = graph
        self.compiled[-1] = program
        return program

    def put(self, tensors, owned=False):
        return [tensor.detach().clone() for tensor in tensors]

    def adopt(self, tensors, held=()):
        return [tensor.detach() for tensor in tensors]

    def get(self, buffers):
        return [buffer.detach().clone() for buffer in buffers]

    def publish(self, buffers, is_held=False):
        return [buffer.detach().clone() for buffer in buffers]

    def assign(self, tensors, buffers):
        for tensor, value in zip(tensors, self.publish(buffers), strict=True):
            tensor.data = value

    def view(self, buffer):
        return buffer.detach()
