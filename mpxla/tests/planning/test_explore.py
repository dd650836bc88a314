"""The search over layouts, against trying everything."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from mpxla.cli.main import main
from mpxla.cli.paper import parse_devices
from mpxla.errors import ConfigError
from mpxla.planning.device import DeviceModel
from mpxla.planning.explore import Space, explore, layouts, least_bytes
from mpxla.planning.files import read_file
from mpxla.planning.predict import predict, shortest_s
from mpxla.planning.transformer import Transformer
from mpxla.planning.work import Work, step_costs

pytestmark = pytest.mark.unit

A100 = read_file("device", "a100-80gb", DeviceModel)
MODEL = Transformer("small", 8, 1024, 8, 8, 4096, 32000, 1024, 16, dropout=True)
SPACE = Space(microbatch_sizes=(1, 2))


def everything(model, device, num_devices, space=SPACE):
    works = [Work(model, layout, device) for layout in layouts(model, num_devices, space)]
    return [(work, predict(work)) for work in works]


@pytest.fixture(scope="module")
def on_eight():
    return everything(MODEL, A100, 8)


@pytest.mark.parametrize("share", [0.94, 0.03, 0.02])
def test_the_search_finds_what_trying_everything_finds(on_eight, share):
    device = replace(A100, usable_memory_share=share)
    fitting = [p for _, p in on_eight if max(p.rank_bytes) <= device.usable_bytes]
    assert share == 0.94 or len(fitting) < len(on_eight)
    expected = sorted(p.step_s for p in fitting)[:3]
    found = explore(MODEL, device, 8, SPACE)
    assert [p.step_s for p in found.best] == pytest.approx(expected)
    assert found.num_layouts == len(on_eight)
    assert found.num_simulated < len(on_eight) / 2


def test_bounds_are_bounds(on_eight):
    for work, found in on_eight:
        bound_s = shortest_s(work.layout, found.num_microbatches, step_costs(work))
        assert bound_s <= found.step_s * (1 + 1e-9), work.layout
        assert least_bytes(work) <= max(found.rank_bytes) + 1, work.layout


def test_layouts_use_all_devices():
    found = list(layouts(MODEL, 8, SPACE))
    assert len(found) == len(set(found))
    assert {layout.devices for layout in found} == {8}
    assert {layout.recompute for layout in found} == {"none", "selective", "full"}
    flash = layouts(replace(MODEL, flash_attention=True), 8, SPACE)
    assert {layout.recompute for layout in flash} == {"none", "full"}


def test_a_model_that_fits_nowhere(on_eight):
    device = replace(A100, memory_bytes=1e8)
    least = min(max(p.rank_bytes) for _, p in on_eight)
    with pytest.raises(ConfigError) as caught:
        explore(MODEL, device, 8, SPACE)
    text = str(caught.value)
    assert "small fits on no layout of 8 devices with 0.094 GB each" in text
    assert f"The least possible is {least / 1e9:.3g} GB, by " in text
    assert "set it. Use more devices" in text


def test_a_model_that_cannot_be_divided():
    with pytest.raises(ConfigError, match="cannot be spread over 7 devices: no stages x tensor x"):
        explore(replace(MODEL, layers=3), A100, 7, SPACE)


def test_numbers_of_devices():
    assert parse_devices("64..1024") == [64, 128, 256, 512, 1024]
    assert parse_devices("8,12") == [8, 12]
    for wrong in ("", "8..", "a", "0", "8,-1"):
        with pytest.raises(ConfigError, match=r"write a number, 64,96 or 64\.\.1024"):
            parse_devices(wrong)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence_length")
    values = {key: getattr(MODEL, key) for key in ("name", *keys, "global_batch")}
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    return str(path)


def plan(capsys, *words):
    status = main(["plan", *words])
    done = capsys.readouterr()
    return status, done.out, done.err


def test_the_command_searches(capsys, file):
    words = ("--model", file, "--device-model", "a100-80gb", "--devices", "4..8", "--search")
    status, out, err = plan(capsys, *words)
    assert (status, err) == (0, "")
    assert out.count("best of ") == 2 and "4 devices:" in out and "8 devices:" in out


def test_the_command_predicts_a_layout(capsys, file):
    words = ("--model", file, "--device-model", "h200", "--devices", "8", "--stages", "2")
    status, out, err = plan(capsys, *words, "--tensor", "2", "--microbatches", "4")
    assert (status, err) == (0, "")
    assert "2 x 2 x 2, interleaved, 1 per rank, microbatch 2, recompute none, whole state" in out
    status, _, err = plan(capsys, *words, "--microbatches", "4", "--memory-limit", "0.1")
    assert status == 1
    assert "needs" in err and "more than the 0.107 GB of a device. Try --search" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either a factory (module:function) or --model with the sizes of a transformer, and "),
        (("--model", "gpt3-175b"), "--model needs --device-model and --devices as well"),
        (
            (
                *("--model", "gpt3-175b", "--device-model", "h200"),
                *("--devices", "8", "--stages", "2", "--search"),
            ),
            "--search of a model on paper tries all numbers of stages",
        ),
        (("a:b", "--model", "gpt3-175b"), "transformer, and has both. Name one."),
    ],
)
def test_wrong_commands(capsys, words, message):
    status, _, err = plan(capsys, *words)
    assert status == 1 and message in err


def test_wrong_layouts(capsys, file):
    words = ("--model", file, "--device-model", "h200", "--devices", "8")
    _, _, err = plan(capsys, *words, "--stages", "3")
    assert "8 devices cannot be divided into 3 stages x 1 tensor-parallel devices" in err
    _, _, err = plan(capsys, *words, "--microbatches", "16")
    assert "global batch of 16 cannot be divided into 16 microbatches on 2 replicas" in err


@pytest.mark.slow
def test_a_search_takes_less_than_a_minute_of_one_core():
    code = (
        "import time, mpxla.cli.main as m; "
        "m.main('plan --model gpt3-175b --device-model h200 --devices 64..1024 --search'.split()); "
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 60
