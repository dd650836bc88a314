"""The report's text, its compressed modules, and sizes."""

import pytest

from mpxla.graph.partition import report as partition_report
from mpxla.graph.partition.auto import partition_auto
from mpxla.graph.partition.manual import partition_manual
from mpxla.graph.partition.report import format_report
from mpxla.tests.graph.partition.partition_graphs import Program

pytestmark = pytest.mark.unit


def gpt(num_blocks=8):
    program = Program()
    image = program.input(64)
    tok = program.add(image, parameters=("tok.weight",), path="model.tok", compute=0.5)
    pos = program.add(parameters=("pos.weight",), path="model.pos", compute=0.5)
    last = program.add(tok, pos, path="model", compute=0.0)
    for block in range(num_blocks):
        for part in ("attn", "mlp"):
            path = f"model.blocks.{block}.{part}"
            last = program.layer(last, path, compute=0.5, memory=1024, output=1536, gradient=1536)
    last = program.add(last, parameters=("tok.weight",), path="model.head", output=0)
    program.add(last, compute=0.0)
    program.parameter_bytes = dict.fromkeys(program.parameter_bytes, 1_000_000)
    return program


def report(program, num_stages, **options):
    partition = partition_auto(program.nodes, program.parameter_bytes, num_stages, 0.0, 0.0)
    return text_of(partition, **options)


def text_of(partition, flops=(), in_flight=None, weight_bytes=None, split=()):
    """The report, where all bytes of parameters are weights if nothing else is said."""
    return format_report(
        partition,
        flops=flops,
        in_flight=in_flight or [1] * partition.num_stages,
        weight_bytes=weight_bytes or partition.parameter_bytes,
        split=split,
    )


WHOLE = (
    "Partition assignments:\n"
    "stage  rank  modules                      parameters  gradients+state  compute  FLOPs"
    "   activations       cut\n"
    "    0     0  tok, pos, blocks.0-3      10 (9.54 MiB)              0 B   50.0 %     66"
    "  1 x 8.00 KiB  3.00 KiB\n"
    "    1     1  blocks.4-7, head, (step)   9 (8.58 MiB)              0 B   50.0 %    165"
    "  1 x 8.00 KiB  3.00 KiB\n"
    "balance of the ranks (largest / mean): compute 1.00, memory 1.05\n"
    "parameters held by several ranks: tok.weight on ranks 0, 1"
)


def test_whole_report():
    assert report(gpt(), 2, flops=range(22)) == WHOLE


def test_what_an_optimizer_needs_is_no_parameter():
    program = gpt()
    weights = {name: size // 4 for name, size in program.parameter_bytes.items()}
    header, row = report(program, 2, weight_bytes=weights).splitlines()[1:3]
    assert "parameters  gradients+state  compute" in header
    assert "10 (2.38 MiB)         7.15 MiB   50.0 %" in row


def test_parameters_that_ranks_share_are_counted():
    split = {"tok.weight", "model.blocks.1.mlp.weight", "model.blocks.7.attn.weight"}
    rows = report(gpt(), 2, split=split)
    header, *rows = rows.splitlines()[1:4]
    assert "parameters  split  gradients+state  compute" in header
    assert [row.split("MiB)")[1].split()[0] for row in rows] == ["2", "2"]  # one is tied
    assert "split" not in report(gpt(), 2)


def test_single_stage():
    row = report(gpt(), 1).splitlines()[2].split()
    expected = "0 0 tok, pos, blocks, head, (step) 18 (17.2 MiB) 0 B 100.0 % 0 1 x 16.0 KiB 0 B"
    assert row == expected.split()


def test_microbatches_in_flight_weigh_on_memory():
    program = gpt()
    program.parameter_bytes = dict.fromkeys(program.parameter_bytes, 0)
    lines = report(program, 2, in_flight=[3, 1]).splitlines()
    assert [" ".join(line.split()[-9:-2]) for line in lines[2:4]] == [
        "50.0 % 0 3 x 8.00 KiB",
        "50.0 % 0 1 x 8.00 KiB",
    ]
    assert "memory 1.50" in lines[4]


def test_long_lists_continue_on_the_next_line(monkeypatch):
    monkeypatch.setattr(partition_report, "MODULES_WIDTH", 14)
    lines = report(gpt(), 3).splitlines()
    assert [line[13:27].rstrip() for line in lines[2:9]] == [
        "tok, pos,",
        "blocks.0-1",
        "blocks.2-4,",
        "blocks.5.attn",
        "blocks.5.mlp,",
        "blocks.6-7,",
        "head, (step)",
    ]


def test_a_module_cut_in_two_is_marked():
    program = Program()
    last = program.input()
    for number in range(3):
        last = program.add(last, parameters=(f"p{number}",), path="model.big")
    last = program.layer(last, "model.end")
    text = report(program, 2)
    assert "big*," not in text.splitlines()[2]
    assert text.splitlines()[2].split()[2] == "big*"
    assert text.splitlines()[3].split()[2:4] == ["big*,", "end"]
    assert text.endswith("* = a part of the module's operations")
    assert "* =" not in report(gpt(), 2)


def test_ranks_without_a_stage_and_uneven_ranks():
    program = Program()
    last = program.input()
    pins = {}
    for number, rank in enumerate((0, 1, 0)):
        last = program.layer(last, f"model.{number}")
        pins[last] = rank
    partition = partition_manual(program.nodes, program.parameter_bytes, 3, pins, 0)
    lines = text_of(partition).splitlines()
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["0", "0", "0"],
        ["1", "1", "1"],
        ["2", "0", "2"],
    ]
    assert "compute 2.00, memory 2.00" in lines[5]
    assert lines[6] == "ranks without a stage: 2"


def test_stage_that_only_hands_inputs_on():
    program = Program()
    program.layer(program.input(4), "model.0")
    partition = partition_manual(program.nodes, program.parameter_bytes, 2, {1: 1}, 0)
    row = text_of(partition).splitlines()[2]
    assert row.split() == "0 0 - 0 (0 B) 0 B 0.0 % 0 - 4 B".split()


def test_graph_without_costs():
    program = Program()
    program.layer(program.input(), "model.0", compute=0.0)
    program.parameter_bytes = {"model.0.weight": 0}
    assert "compute 1.00, memory 1.00" in report(program, 1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "(0 B)"),
        (999, "(999 B)"),
        (1000, "(0.98 KiB)"),
        (10_230, "(9.99 KiB)"),
        (1023 * 1024, "(1.00 MiB)"),
        (150 * 2**30, "(150 GiB)"),
        (5000 * 2**40, "(5000 TiB)"),
    ],
)
def test_sizes(num_bytes, text):
    program = Program()
    program.layer(program.input(), "model.0")
    program.parameter_bytes = {"model.0.weight": num_bytes}
    assert text in report(program, 1)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["model.0", "model.1", "model.2"], ("0-2",)),
        (["model.0", "model.2", "model.3"], ("0", "2-3")),
        (["model.h.9", "model.h.10", "model.f"], ("h", "f")),
        (["model", "model.a", "model.b"], ("a", "b")),
        (["model.only", "model.only"], ("model.only",)),
        (["a.b.c", "a.b.d"], ("c", "d")),
        (["a.b", "c.d"], ("a", "c")),
        ([""], ("(step)",)),
        (["", "model.a", ""], ("model.a", "(step)")),
    ],
)
def test_names_of_a_stage_that_has_everything(paths, names):
    program = Program()
    last = program.input()
    for path in paths:
        last = program.add(last, parameters=("p",), path=path)
    partition = partition_auto(program.nodes, program.parameter_bytes, 1, 0.0, 0.0)
    assert partition.loads[0].modules == names


def test_ranges_need_whole_siblings_of_one_parent():
    program = Program()
    last = program.input()
    paths = ["m.a.0", "m.a.1", "m.b.2", "m.b.3.x", "m.b.3.y", "m.b.4", "m.a.2", "m.b.5"]
    for path in paths:
        last = program.layer(last, path)
    partition = partition_manual(
        program.nodes, program.parameter_bytes, 2, dict.fromkeys(range(1, 5), 0), 1
    )
    assert partition.loads[0].modules == ("a.0-1", "b.2", "b.3.x")
    assert partition.loads[1].modules == ("a.2", "b.3.y", "b.4-5")
