"""What the programs of the `xla` transport look like to XLA, and what one process computes."""

import re

import pytest
import torch
import torch_xla

from mpxla.comm.mesh import Mesh, Meshes
from mpxla.comm.xla_programs import Operand, Program, operand_of
from mpxla.device.torch_xla.collectives.device_runner import DeviceRunner, is_device_world
from mpxla.device.torch_xla.collectives.programs import trace
from mpxla.device.torch_xla.tensors import current_device
from mpxla.errors import TopologyError

pytestmark = pytest.mark.ranks

COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "transfer": "all-gather",
}
MOVES = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|send|recv)\("
)
MIXED = (
    Operand((2, 3), torch.float32),
    Operand((4,), torch.bool),
    Operand((1,), torch.int64),
    Operand((5,), torch.float32),
    Operand((3,), torch.uint8),
)


@pytest.fixture(scope="module", autouse=True)
def device():
    return current_device()


def programs() -> list[Program]:
    """One of every kind, in the meshes of two pipelines of two and of three stages."""
    found = []
    for world_size, pp in ((4, 2), (6, 3)):
        pipelines = [tuple(range(s, s + pp)) for s in range(0, world_size, pp)]
        replicas = [tuple(range(s, world_size, pp)) for s in range(pp)]
        meshes = Meshes(world_size, pipelines)
        meshes.add([tuple(range(world_size)), *pipelines, *replicas])
        for group in (tuple(range(world_size)), pipelines[0], replicas[0]):
            mesh = meshes.of_group(group)
            for dtype in (torch.float32, torch.bfloat16, torch.int32):
                found.append(Program("all_reduce", mesh, (Operand((6,), dtype),)))
                found.append(Program("all_gather", mesh, (Operand((2, 3), dtype),)))
                parts = Operand((len(group), 3), dtype)
                found.append(Program("reduce_scatter", mesh, (parts,)))
        for low in range(pp - 1):
            for slot in (0, 1):
                found.append(Program("transfer", meshes.of_pair(low, low + 1), MIXED, slot))
    return found


def hlo(program):
    return torch_xla._XLAC._get_xla_tensors_hlo(trace(program).outputs)


@pytest.fixture(scope="module")
def lowered(device):
    return [(program, hlo(program)) for program in programs()]


def lines_of(text: str) -> list[tuple[str, str]]:
    """The instructions of a program that move data between replicas, with their operation."""
    return [(m.group(1), line) for line in text.splitlines() if (m := MOVES.search(line))]


def groups_of(line: str) -> list[list[int]]:
    (text,) = re.findall(r"replica_groups=\{(\{[\d,{}]+\})\}", line)
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]


def test_rule_2_each_collective_names_the_full_mesh_of_sorted_groups(lowered):
    for program, text in lowered:
        world = sorted(program.mesh.members)
        for _, line in lines_of(text):
            groups = groups_of(line)
            assert groups == [list(group) for group in program.mesh.groups]
            assert sorted(rank for group in groups for rank in group) == world
            assert groups == sorted(groups) == [sorted(group) for group in groups]
            assert len({len(group) for group in groups}) == 1


def test_rule_2_each_program_has_one_mesh_and_all_together_fewer_than_twelve(lowered):
    for world_size in (4, 6):
        seen = set()
        for program, text in lowered:
            meshes = {str(groups_of(line)) for _, line in lines_of(text)}
            assert len(meshes) == 1, program
            if len(program.mesh.members) == world_size:
                seen |= meshes
        assert 2 < len(seen) <= 12


def test_rule_3_transfers_are_programs_of_their_own_over_pairs(lowered):
    for program, text in lowered:
        kinds = {kind for kind, _ in lines_of(text)}
        assert kinds == {COLLECTIVES[program.op]}, program
        if program.op == "transfer":
            assert {len(group) for _, line in lines_of(text) for group in groups_of(line)} == {2}


def test_rule_3_operands_have_a_dim(lowered):
    """Only torch_xla's own token, a scalar that chains collectives, has none."""
    for program, text in lowered:
        for _, line in lines_of(text):
            operands = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]*)\]", line.split(" = ")[1])
            with_dims = [dims for dims in operands if dims]
            assert with_dims, program
            assert operands.count("") <= 2, program  # the token, as operand and as result
            assert "pred[" not in line, program
    assert operand_of(torch.tensor(1.0)) == ((1,), torch.float32)


def test_rule_3_the_sender_keeps_a_live_use_of_the_result(lowered):
    """What the gather gives is what the program gives, on both ends: XLA cannot drop it."""
    for program, text in lowered:
        if program.op == "transfer":
            root = next(line for line in text.splitlines() if line.strip().startswith("ROOT %tup"))
            reached = used_by(text, re.findall(r"%[\w.-]+", root.split("tuple(")[1]))
            gathers = [line.split(" = ")[0].split()[-1] for _, line in lines_of(text)]
            assert gathers
            assert set(gathers) <= reached


def used_by(text: str, names: list[str]) -> set[str]:
    """All instructions that these ones depend on."""
    operands = {}
    for line in text.splitlines():
        if " = " in line:
            name, rest = line.split(" = ", 1)
            operands[name.split()[-1]] = re.findall(r"%[\w.-]+", rest)
    found, open_names = set(), list(names)
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += operands.get(name, [])
    return found


def test_transfers_give_the_half_of_the_end_that_sends(lowered):
    for program, text in lowered:
        if program.op == "transfer":
            halves = re.findall(r"slice\(\w+\[2,\d+\].*slice=\{\[(\d):(\d)\]", text)
            assert halves == [(str(program.slot), str(program.slot + 1))] * len(lines_of(text))


def test_rule_4_neighbouring_pairs_have_two_colours_and_no_pair_twice(lowered):
    for world_size, pp in ((4, 2), (6, 3)):
        meshes = {
            program.mesh
            for program, _ in lowered
            if program.op == "transfer" and len(program.mesh.members) == world_size
        }
        assert len(meshes) == min(pp - 1, 2)
        for mesh in meshes:
            ranks = [rank for group in mesh.groups for rank in group]
            assert len(set(ranks)) == len(ranks)


def test_rule_5_nothing_is_permuted_sent_or_broadcast(lowered):
    for program, text in lowered:
        for word in (
            "collective-permute",
            "collective-broadcast",
            "all-to-all",
            " send(",
            " recv(",
        ):
            assert word not in text, program


def test_programs_are_the_same_text_whoever_traces_them(lowered):
    again = [hlo(program) for program in programs()]
    numbers = re.compile(r"(?<=[\w])\.\d+")
    for (program, text), other in zip(lowered, again, strict=True):
        assert numbers.sub("", text) == numbers.sub("", other), program


def test_names_of_programs_tell_everything_that_makes_them_differ():
    names = [str(program) for program in programs()]
    assert len(set(names)) == len(set(programs()))
    assert str(Program("transfer", Mesh(((0, 1),)), MIXED[:2], 1)) == (
        "transfer from end 1 of float32[2, 3], bool[4] over {0,1}"
    )


# --- executed by torch_xla itself, in a world of one -------------------------------------------


def test_a_device_that_knows_all_processes_is_recognized():
    assert is_device_world(1)
    assert not is_device_world(2)


@pytest.mark.parametrize("on_device", [False, True])
def test_device_runner_executes_programs(device, on_device):
    runner, mesh = DeviceRunner(0, 1), Mesh(((0,),))
    values = [torch.arange(6.0).view(2, 3), torch.tensor([True, False])]
    if on_device:
        values = [value.to(device) for value in values]
    for op, expected in [("all_reduce", values[0]), ("all_gather", values[0][None])]:
        loaded = runner.load(runner.lower(Program(op, mesh, (operand_of(values[0]),))))
        (result,) = runner.execute(loaded, [runner.fetch(values[0])], to_host=not on_device)
        assert result.device.type == ("xla" if on_device else "cpu")
        assert torch.equal(result.cpu(), expected.cpu())
        assert runner.execute(loaded, [None], to_host=True)[0].count_nonzero() == 0
    transfer = Program("transfer", mesh, tuple(map(operand_of, values)))
    loaded = runner.load(runner.lower(transfer))
    for result, value in zip(runner.execute(loaded, values, to_host=True), values, strict=True):
        assert torch.equal(result, value.cpu())
    runner.close()


def test_device_runner_refuses_a_mesh_that_leaves_ranks_out():
    runner = DeviceRunner(0, 1)
    program = Program("all_reduce", Mesh(((1, 2),)), (Operand((1,), torch.int32),))
    with pytest.raises(TopologyError, match=r"over \{1,2\} leaves out rank 0: on this device all"):
        runner.lower(program)


def test_device_runner_refuses_ranks_that_are_not_devices():
    with pytest.raises(TopologyError, match="rank 1 of 2 has device 0 of 1: start one process per"):
        DeviceRunner(1, 2)
