"""Uploads: values, copies, and nothing to compile. Downloads have all of complex numbers."""

import pytest
import torch

from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks

VALUES = [0, 1, 7, 0.0, 1.0, 2.5, True, False]


def upload():
    from mpxla.device.torch_xla.compile import num_compilations
    from mpxla.device.torch_xla.tensors import current_device, make_ready, to_device

    device = current_device()
    host = [torch.tensor(value) for value in VALUES]
    host += [torch.randn(3, 5).t(), torch.zeros(0, 2), torch.arange(4096.0), torch.ones(1)]
    kept = [value.clone() for value in host]
    before = num_compilations()
    uploaded = to_device(host, device)
    for value in host:
        value.zero_()
    make_ready(uploaded)
    again = to_device(uploaded, device)
    compiled = num_compilations() - before
    is_kept = all(
        a.data_ptr() == b.data_ptr() or a.equal(b) for a, b in zip(uploaded, again, strict=True)
    )
    return kept, [value.cpu() for value in uploaded], compiled, is_kept


def test_uploads_are_copies_and_compile_nothing():
    ((host, uploaded, compiled, is_kept),) = run_ranks(upload, 1)
    for want, got in zip(host, uploaded, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    assert compiled == 0
    assert is_kept


def scalar_constants():
    import torch_xla

    from mpxla.device.torch_xla.tensors import current_device

    moved = torch.tensor(1.0).to(current_device())
    return torch_xla._XLAC._check_tensor_need_materialization([moved])


def test_reason_for_not_using_to():
    assert run_ranks(scalar_constants, 1) == [[True]]


def download():
    from mpxla.device.torch_xla.tensors import current_device, host_view, make_ready, to_device

    device = current_device()
    host = [torch.tensor(value) for value in VALUES]
    host += [torch.zeros(0, 2), torch.randn(7, 3), torch.randn(3).bfloat16()]
    there = to_device(host, device)
    make_ready(there)
    pending = [torch.tensor(1).to(device), torch.ones(2, 3).to(device).t() * 2]
    want = [*host, torch.tensor(1), torch.full((3, 2), 2.0)]
    ready = there[-2]
    is_shared = host_view(ready).data_ptr() == host_view(ready).data_ptr()
    return want, [host_view(value).clone() for value in (*there, *pending)], is_shared


def test_downloads_share_memory_and_wait_for_pending_values():
    ((want, got, is_shared),) = run_ranks(download, 1)
    for expected, value in zip(want, got, strict=True):
        assert value.dtype == expected.dtype and torch.equal(value, expected)
    assert is_shared


def mix_in_lists():
    """On the device such a list would end the process."""
    from mpxla.device.torch_xla.tensors import current_device
    from mpxla.errors import StepError
    from mpxla.runtime.valueless import AbsentParameter

    own, absent = torch.ones(3).to(current_device()), AbsentParameter(torch.empty(3, device="meta"))
    with torch.no_grad():
        absent.mul_(0.5).add_(own)
        try:
            torch._foreach_mul_([own, absent], 0.5)
        except StepError as error:
            return own.cpu().tolist(), str(error)


def test_lists_of_tensors_here_and_elsewhere_are_refused():
    ((values, text),) = run_ranks(mix_in_lists, 1)
    assert values == [1, 1, 1]
    assert "torch._foreach_mul was called at" in text and "whose device is meta" in text


def complex_downloads():
    from mpxla.device.torch_xla.tensors import current_device, host_view, to_device, to_host

    host = [torch.tensor([1 + 2j, 3 - 4j], dtype=kind) for kind in (torch.cfloat, torch.cdouble)]
    uploaded = to_device(host, current_device())
    return [(host, to_host(uploaded)), (host, [host_view(value) for value in uploaded])]


def test_downloads_have_the_parts_of_complex_numbers():
    (pairs,) = run_ranks(complex_downloads, 1)
    for want, got in pairs:
        torch.testing.assert_close(got, want)
