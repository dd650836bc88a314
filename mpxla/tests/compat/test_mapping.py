"""What the script's code sees of CUDA inside the launcher, and that nothing is left outside.

Each function runs on one rank, as if a script called it: files of tests count as the user's.
"""

import argparse
import sys
import threading
import types

import pytest
import torch

from mpxla import user_lines
from mpxla.compat import CompatError
from mpxla.errors import MpxlaError
from mpxla.tests.backends import backend_here
from mpxla.tests.compat.launching import inside, refusal
from mpxla.tests.ranks.run import run_ranks

pytestmark = pytest.mark.ranks


# Devices.


def name_devices():
    device = backend_here().device
    x = torch.arange(4.0)
    module = torch.nn.Linear(2, 2)
    weight = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.to("cuda")
    assert module.weight is weight is optimizer.param_groups[0]["params"][0]
    on_device = [
        torch.device("cuda"),
        torch.device("cuda:0"),
        torch.device("cuda", 0),
        torch.device(type="cuda", index=0),
        torch.device(0),
        x.to("cuda").device,
        x.to(0).device,
        x.to(device="cuda", dtype=torch.float64).device,
        x.to(torch.device("cuda"), torch.float16).device,
        x.cuda().device,
        x.cuda(0).device,
        x.cuda(device="cuda:0", non_blocking=True).device,
        torch.zeros(2, device="cuda").device,
        torch.randn(2, device=0).device,
        torch.ones_like(x, device="cuda:0").device,
        weight.device,
        torch.nn.Linear(2, 2).cuda().weight.device,
        torch.nn.Linear(2, 2, device="cuda").weight.device,
    ]
    with torch.device("cuda"):
        on_device.append(torch.zeros(2).device)
    assert set(map(str, on_device)) == {str(device)}, on_device
    assert x.cuda().is_cuda and x.is_cuda is (device == x.device)
    assert x.pin_memory() is x
    assert x.to("cpu").device == x.to(torch.float64).device == torch.device("cpu")
    assert x.to(torch.float64, True).dtype is torch.float64, "True is not the device 1"
    assert torch.device("cpu").type == "cpu" and torch.device("meta").type == "meta"
    assert x.type(torch.float64).dtype is torch.float64 and x.type() == "torch.FloatTensor"
    return (
        refusal(lambda: torch.device("cuda:1")),
        refusal(lambda: x.to(3)),
        refusal(lambda: torch.device("cuda", 2)),
        refusal(lambda: x.type("torch.cuda.HalfTensor")),
        refusal(lambda: torch.set_default_tensor_type("torch.cuda.FloatTensor")),
    )


def test_devices():
    by_name, by_index, by_both, by_type, by_default = inside(name_devices)
    assert "torch.cuda.FloatTensor as the default type cannot be mapped" in by_default
    assert "torch.cuda.HalfTensor cannot be mapped onto an XLA device: use torch.tensor(" in by_type
    assert 'torch.device("cuda:1")' in by_name
    for text, index in ((by_name, 1), (by_index, 3), (by_both, 2)):
        assert f"there is no device cuda:{index}: 1 process(es) run on this host" in text


def use_a_thread():
    errors = []

    def move():
        try:
            torch.ones(2).to("cuda")
        except CompatError as error:
            errors.append(str(error))

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    return errors


def test_other_threads_get_an_error():
    (text,) = inside(use_a_thread)
    assert "test_mapping.py:" in text and 'torch.ones(2).to("cuda")' in text
    assert "CUDA devices mean the XLA device on the thread that runs the script only" in text


# Names of torch.cuda.


def ask_about_the_device():
    cuda = torch.cuda
    assert cuda.is_available() and cuda.is_initialized() and cuda.is_bf16_supported()
    assert (cuda.device_count(), cuda.current_device()) == (1, 0)
    cuda.set_device(0), cuda.set_device("cuda:0"), cuda.set_device(torch.device("cuda"))
    cuda.init(), cuda.empty_cache(), cuda.ipc_collect(), cuda.synchronize(), cuda.synchronize(0)
    with cuda.device(0):
        pass
    name = f"XLA device {backend_here().device}"
    assert cuda.get_device_name() == cuda.get_device_properties(0).name == name
    assert refusal(lambda: cuda.set_device(1)).endswith("Use smp.local_rank() or no index.")
    return (
        refusal(lambda: cuda.get_device_properties(0).multi_processor_count),
        refusal(lambda: cuda.memory_stats()["num_alloc_retries"]),
    )


def test_questions_about_the_device():
    processors, retries = inside(ask_about_the_device)
    text = "get_device_properties().multi_processor_count cannot be mapped onto an XLA device"
    assert text in processors and "test_mapping.py:" in processors
    assert "memory_stats()['num_alloc_retries'] cannot be mapped" in retries
    assert "it counts active_bytes.all.current, " in retries


def count_memory():
    cuda = torch.cuda
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    held = torch.ones(50_000_000).cuda() + 1
    cuda.synchronize()
    assert held.shape == (50_000_000,)
    grown = cuda.memory_allocated() - before
    assert 150e6 < grown < 2e9
    del held
    free, total = cuda.mem_get_info()
    assert 0 < free < total == cuda.get_device_properties(0).total_memory
    assert cuda.max_memory_allocated() >= cuda.memory_reserved() > before // 2
    # A peak may grow at any time, as jax and torch_xla have threads of their own, but never falls.
    peaks = [cuda.max_memory_reserved(), cuda.memory_stats()["allocated_bytes.all.peak"]]
    assert peaks == sorted(peaks) and peaks[-1] <= cuda.max_memory_reserved()
    assert cuda.memory_summary().startswith("XLA device: ")


def test_memory_counters():
    inside(count_memory)


def seed():
    cuda = torch.cuda
    torch.manual_seed(1)
    host = torch.rand(3)
    torch.manual_seed(1)
    cuda.manual_seed(5)
    cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(3), host), "the host's generator is another one"
    assert cuda.initial_seed() == 5
    from mpxla.runtime.seeds import draw_seed

    in_step = draw_seed()
    cuda.manual_seed(5)
    assert draw_seed() == in_step
    # Outside of steps a tensor's device draws, which may be the host.
    seed_device = torch.manual_seed if backend_here().device.type == "cpu" else cuda.manual_seed
    seed_device(5)
    drawn = torch.rand(3, device="cuda").cpu()
    seed_device(5)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), drawn)
    torch.manual_seed(6)
    assert cuda.initial_seed() == 6, "torch.manual_seed seeds all devices"
    state, states = cuda.get_rng_state(), cuda.get_rng_state_all()
    first = draw_seed()
    assert draw_seed() != first
    cuda.set_rng_state(state)
    assert draw_seed() == first
    cuda.random.set_rng_state_all(states)
    assert draw_seed() == first
    cuda.seed()
    cuda.seed_all()
    assert cuda.initial_seed() != 6


def test_random_numbers():
    inside(seed)


def fork_generators():
    def draw():
        return torch.rand(2), torch.rand(2, device="cuda").cpu(), torch.cuda.get_rng_state()

    for devices in (None, [0]):
        torch.manual_seed(4)
        with torch.random.fork_rng(devices=devices):
            forked = draw()
        torch.testing.assert_close(draw(), forked, rtol=0, atol=0)
    torch.manual_seed(4)
    with torch.random.fork_rng(devices=[]):
        torch.cuda.manual_seed(9)
        torch.rand(2)
    assert torch.equal(torch.rand(2), forked[0]) and torch.cuda.initial_seed() == 9
    torch.manual_seed(4)
    with torch.random.fork_rng(enabled=False):
        draw()
    assert not torch.equal(torch.rand(2), forked[0])
    torch.manual_seed(4)
    with torch.random.fork_rng([], device_type="cpu"):
        torch.rand(2)
    assert torch.equal(torch.rand(2), forked[0])


def test_forked_random_numbers():
    inside(fork_generators)


def use_autocast():
    x = torch.ones(2, 2, device="cuda")
    with torch.cuda.amp.autocast():
        assert (x @ x).dtype is torch.bfloat16
    with torch.cuda.amp.autocast(False):
        assert (x @ x).dtype is torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    with torch.amp.autocast(device_type="cuda", enabled=False):
        assert (x @ x).dtype is torch.float32

    @torch.cuda.amp.autocast(dtype=torch.bfloat16)
    def product():
        return x @ x

    assert product().dtype is torch.bfloat16


def test_autocast():
    inside(use_autocast)


def scale_losses():
    import smdistributed.modelparallel.torch as smp
    from torch.amp import GradScaler

    loss = torch.ones(())
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(1)
    off = torch.cuda.amp.GradScaler(enabled=False)
    assert off.scale(loss) is loss and off.get_scale() == 1.0 and off.state_dict() == {}
    off.unscale_(optimizer), off.step(optimizer), off.update(), off.load_state_dict({})
    assert weight.item() == 0.0 and not off.is_enabled()
    assert not torch.cuda.amp.GradScaler(2.0, 2.0, 0.5, 10, False).is_enabled()
    assert not GradScaler("cuda", 2.0, 2.0, 0.5, 10, False).is_enabled()
    kinds = {smp.amp.GradScaler, torch.cuda.amp.GradScaler, GradScaler}
    scaler = smp.amp.GradScaler(init_scale=8.0)
    assert scaler.is_enabled()
    return (
        len(kinds),
        scaler.scale(loss).item(),
        scaler.get_scale(),
        refusal(lambda: scaler.unscale_(optimizer), MpxlaError),
    )


def test_all_names_of_the_scaler_mean_that_of_smp():
    kinds, scaled, scale, text = inside(scale_losses)
    assert (kinds, scaled, scale) == (1, 8.0, 8.0)
    assert "GradScaler was given a SGD; give it the smp.DistributedOptimizer" in text


def import_from_a_submodule():
    from torch.cuda.nccl import version  # noqa: F401 - it must fail


def touch_every_name():
    from mpxla.compat.names import CUDA_AMP_NAMES, CUDA_NAMES, CUDA_NVTX_NAMES, Fate, cuda_name

    tables = ((torch.cuda, CUDA_NAMES), (torch.cuda.amp, CUDA_AMP_NAMES))
    for module, names in (*tables, (torch.cuda.nvtx, CUDA_NVTX_NAMES)):
        for name, entry in names.items():
            if entry.fate is Fate.REFUSED:
                assert entry.text in refusal(lambda m=module, n=name: m.__getattribute__(n)), name
            else:
                getattr(module, name)
    for name in torch.cuda.__all__:
        if cuda_name(name).fate is Fate.REFUSED:
            refusal(lambda n=name: torch.cuda.__getattribute__(n))
    refusal(lambda: torch.cuda._lazy_init())
    refusal(lambda: torch.cuda.amp.custom_fwd)
    assert torch.cuda.random.manual_seed == torch.cuda.manual_seed
    assert torch.cuda.memory.memory_allocated == torch.cuda.memory_allocated
    from torch.cuda.amp.autocast_mode import autocast
    from torch.cuda.amp.grad_scaler import GradScaler

    assert (autocast, GradScaler) == (torch.cuda.amp.autocast, torch.cuda.amp.GradScaler)
    assert "an XLA device" in refusal(import_from_a_submodule)
    try:
        torch.cuda.nothing_of_that_name  # noqa: B018 - reading is the test
    except AttributeError:
        return refusal(lambda: torch.cuda.utilization())
    raise AssertionError("it does not exist")


def test_every_name_of_torch_cuda_is_mapped_or_refused():
    text = inside(touch_every_name)
    assert "test_mapping.py:" in text and "torch.cuda.utilization cannot be mapped" in text


def ask_as_a_library():
    """What libraries read is not changed: torch would take paths of CUDA."""
    library = types.ModuleType("library")
    path = torch.__file__.replace("__init__.py", "somewhere.py")
    code = "import torch\nanswer = torch.cuda.is_available(), torch.cuda.device_count()"
    exec(compile(code, path, "exec"), library.__dict__)
    assert library.answer == (False, 0)
    assert torch.cuda.is_available()


def test_libraries_see_torch_as_it_is():
    inside(ask_as_a_library)


@pytest.mark.parametrize(
    ("path", "is_script", "is_model"),
    [
        ("/home/me/train.py", True, True),
        ("/home/me/torch/importlib_tricks/train.py", True, True),
        ("<stdin>", True, True),
        ("<python-input-0>", True, True),
        ("<ipython-input-3-0123456789ab>", True, True),
        ("/tmp/ipykernel_41/1234567.py", True, True),
        ("<string>", False, False),
        (__file__, True, True),
        ("/home/me/.local/lib/python3.11/site-packages/package/module.py", False, True),
        ("/usr/lib/python3/dist-packages/package.py", False, True),
        (pytest.__file__, False, True),
        (torch.__file__, False, False),
        (argparse.__file__, False, False),
        (user_lines.__file__, False, False),
        ("<frozen importlib._bootstrap>", False, False),
    ],
)
def test_whose_file_it_is(path, is_script, is_model):
    assert user_lines.is_script_code(path) is is_script
    assert user_lines.is_model_code(path) is is_model


# Outside.


def leave_and_compare():

    from mpxla.compat.launcher import mapped

    def picture():
        return (
            type(torch.cuda), type(torch.cuda.amp), type(torch.distributed), torch.load,
            torch.autocast.__init__, torch.overrides._get_current_function_mode_stack(),
            torch.serialization.load, list(torch.serialization._package_registry),
            torch.UntypedStorage.cuda, type(torch.amp), type(torch.distributed.distributed_c10d),
            [type(m) for n, m in sys.modules.items() if n.startswith("torch.cuda")],
            torch.__future__.get_swap_module_params_on_conversion(), list(sys.meta_path),
            torch.cuda.is_available(), [n for n in sys.modules if n.startswith("smdistributed")],
        )  # fmt: skip

    before = picture()
    with mapped():
        import smdistributed.modelparallel.torch as smp

        assert smp.rank and torch.cuda.is_available()
        assert picture() != before
    assert picture() == before
    try:
        import smdistributed  # noqa: F401 - it must fail
    except ModuleNotFoundError:
        return True
    return False


def test_nothing_is_left_outside():
    assert run_ranks(leave_and_compare, 1) == [True]


def count_python_calls():
    from mpxla.compat.launcher import mapped

    x = torch.zeros(4)

    def calls():
        events = []
        sys.setprofile(lambda frame, event, value: events.append(event))
        x.add_(1.0)
        sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in events)

    x.add_(1.0)
    with mapped():
        x.add_(1.0)
        return calls()


def test_a_call_of_torch_runs_a_few_functions_of_python_more():
    """Each takes about a tenth of a microsecond, and the call itself one."""
    (count,) = run_ranks(count_python_calls, 1)
    assert count <= 6
