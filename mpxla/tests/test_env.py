"""Reading the environment of torchrun, mpirun and a process started by hand."""

import dataclasses
import json
import os
import re
from typing import Any

import pytest

from mpxla.env import (
    LaunchEnv,
    prepare_gloo,
    prepare_xla,
    read_environment,
    share_cores,
    xla_threads,
)
from mpxla.errors import ConfigError

pytestmark = pytest.mark.unit

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPIRUN_TWO_NODES = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def refused(environ):
    """Text of the error that reading must raise."""
    with pytest.raises(ConfigError) as caught:
        read_environment(environ)
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_neuron(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_no_variables_mean_one_process():
    assert read_environment({}) == LaunchEnv()
    assert (LaunchEnv().rank, LaunchEnv().world_size, LaunchEnv().source) == (0, 1, "none")


def test_torchrun_tells_how_often_it_restarted():
    assert read_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2
    text = refused(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"})
    assert "TORCHELASTIC_RESTART_COUNT=x must be an integer" in text


def test_a_rendezvous_address_alone_is_no_launcher():
    assert read_environment({"MASTER_ADDR": "x", "MASTER_PORT": "1"}).source == "none"


def test_os_environ_is_the_default(monkeypatch):
    monkeypatch.setenv("MPXLA_LOG_LEVEL", "debug")
    assert read_environment().log_level == "DEBUG"


def test_torchrun():
    assert read_environment(TORCHRUN) == LaunchEnv(
        rank=5,
        world_size=8,
        local_rank=1,
        local_size=4,
        master_addr="node0",
        master_port=1234,
        source="torchrun",
    )


@pytest.mark.parametrize("port", [1, 65535])
def test_lowest_and_highest_port(port):
    assert read_environment(TORCHRUN | {"MASTER_PORT": str(port)}).master_port == port


def test_torchrun_inside_mpirun_wins():
    env = read_environment(TORCHRUN | MPIRUN)
    assert (env.source, env.rank) == ("torchrun", 5)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            without(TORCHRUN, "LOCAL_RANK", "MASTER_PORT"),
            "the environment sets RANK, WORLD_SIZE, LOCAL_WORLD_SIZE but not LOCAL_RANK, "
            "MASTER_PORT: start all processes with torchrun",
        ),
        ({"WORLD_SIZE": "1"}, "sets WORLD_SIZE but not RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER"),
        (TORCHRUN | {"RANK": " "}, "sets WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE but not RANK:"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1 must be an integer >= 0"),
        (TORCHRUN | {"RANK": "two"}, "RANK=two must be an integer >= 0"),
        (TORCHRUN | {"WORLD_SIZE": "8.0"}, "WORLD_SIZE=8.0 must be an integer >= 0"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 must be below LOCAL_WORLD_SIZE=4"),
        (
            TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"},
            "LOCAL_RANK=0 must be below LOCAL_WORLD_SIZE=0",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 must be at most WORLD_SIZE=8"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 must be a port from 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be a port"),
    ],
)
def test_contradictory_torchrun_variables(environ, text):
    assert text in refused(environ)


def test_all_problems_of_the_launcher_are_listed():
    text = refused(TORCHRUN | {"RANK": "x", "LOCAL_RANK": "7", "MASTER_PORT": "99999"})
    assert text.startswith("the launcher's environment variables cannot be used:\n  - ")
    assert text.count("\n  - ") == 3


def test_mpirun_on_one_node():
    assert read_environment(MPIRUN) == LaunchEnv(
        rank=3,
        world_size=4,
        local_rank=3,
        local_size=4,
        master_addr="127.0.0.1",
        master_port=29500,
        source="mpirun",
    )


def test_mpirun_on_two_nodes():
    env = read_environment(MPIRUN_TWO_NODES | {"MASTER_ADDR": "node0", "MASTER_PORT": "77"})
    assert (env.master_addr, env.master_port) == ("node0", 77)
    assert (env.local_rank, env.local_size) == (1, 2)


def test_mpirun_with_variables_that_a_wrapper_exports():
    assert read_environment(MPIRUN | {"RANK": "3", "WORLD_SIZE": "4"}).source == "mpirun"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            MPIRUN_TWO_NODES,
            "4 processes run on several nodes (2 on this one), but MASTER_ADDR is not set; set it "
            "to the host of rank 0, for instance with mpirun -x MASTER_ADDR=<host>",
        ),
        (
            without(MPIRUN, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_SIZE is not set, although mpirun sets it",
        ),
        (
            MPIRUN | {"OMPI_COMM_WORLD_RANK": "4"},
            "OMPI_COMM_WORLD_RANK=4 must be below OMPI_COMM_WORLD_SIZE=4",
        ),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "a"},
            "OMPI_COMM_WORLD_LOCAL_RANK=a must be an integer >= 0",
        ),
        (MPIRUN | {"MASTER_PORT": "x"}, "MASTER_PORT=x must be an integer >= 0"),
        (MPIRUN | {"RANK": "1"}, "RANK=1 contradicts OMPI_COMM_WORLD_RANK=3; unset RANK"),
    ],
)
def test_contradictory_mpirun_variables(environ, text):
    assert text in refused(environ)


def test_configuration_as_json_text():
    env = read_environment(
        {"SM_HP_MP_PARAMETERS": '{"partitions": 2}', "MPXLA_CONFIG": ' {"microbatches": 4}'}
    )
    assert env.smp_parameters == {"partitions": 2}
    assert env.mpxla_config == {"microbatches": 4}


def test_blank_configuration_counts_as_unset():
    env = read_environment({"SM_HP_MP_PARAMETERS": "", "MPXLA_CONFIG": "  "})
    assert (env.smp_parameters, env.mpxla_config) == (None, None)


def test_configuration_as_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"microbatches": 4}))
    assert read_environment({"MPXLA_CONFIG": str(path)}).mpxla_config == {"microbatches": 4}


def test_missing_file(tmp_path):
    path = tmp_path / "nowhere.json"
    text = refused({"MPXLA_CONFIG": str(path)})
    assert f"MPXLA_CONFIG (file {path}) cannot be read: [Errno 2] No such file" in text
    assert 'Set it to JSON text such as {"microbatches": 4}, or to the path' in text


def test_file_that_is_not_text(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: 'utf-8' codec" in refused({"MPXLA_CONFIG": str(path)})


def test_bad_json_in_a_file_names_file_and_position(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1,\n "b" 2}')
    text = refused({"MPXLA_CONFIG": str(path)})
    assert re.search(r"MPXLA_CONFIG \(file .*\) is not valid JSON: .* line 2, column 6", text)


def test_bad_json_names_variable_and_position():
    text = refused({"SM_HP_MP_PARAMETERS": '{"partitions": 2,}'})
    assert text.startswith("SM_HP_MP_PARAMETERS is not valid JSON: ")
    assert "at line 1, column 17" in text or "at line 1, column 18" in text
    assert """near '{"partitions": 2,}'""" in text


def test_sagemaker_variable_is_never_a_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert "is not valid JSON" in refused({"SM_HP_MP_PARAMETERS": str(path)})


@pytest.mark.parametrize("name", ["SM_HP_MP_PARAMETERS", "MPXLA_CONFIG"])
def test_json_that_is_no_object(name):
    assert f"{name} must hold a JSON object of configuration keys" in refused({name: "[1]"})


def test_rounding_is_left_to_neuron_where_its_library_is_installed(monkeypatch):
    on = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}
    assert read_environment(on).rounds_stochastically
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "libneuronxla" or None)
    assert not read_environment(on).rounds_stochastically
    assert read_environment(on | {"PJRT_DEVICE": "CPU"}).rounds_stochastically


def test_cuda_is_asked_for_by_name_or_by_an_installed_plugin(monkeypatch):
    assert read_environment({"PJRT_DEVICE": " GPU "}).asks_for_cuda
    assert not read_environment({}).asks_for_cuda
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name == "jax_cuda12_plugin" or None
    )
    assert read_environment({"PJRT_DEVICE": " "}).asks_for_cuda
    assert not read_environment({"PJRT_DEVICE": "CPU"}).asks_for_cuda


def test_xla_is_prepared_and_the_users_settings_stay():
    environ = {}
    prepare_xla(environ)
    assert environ == {
        "XLA_FLAGS": "--xla_cpu_use_xnnpack=false",
        "XLA_ENABLE_PARAM_ALIASING": "0",
    }
    theirs = {"XLA_FLAGS": "--a --xla_cpu_use_xnnpack=true", "XLA_ENABLE_PARAM_ALIASING": "1"}
    environ = dict(theirs)
    prepare_xla(environ)
    assert environ == theirs


@pytest.mark.parametrize(
    ("processes", "mine", "others", "environ", "expected"),
    [
        (1, 8, 8, {}, None),
        (3, 8, 8, {}, "2"),
        (16, 8, 8, {}, "1"),
        (3, 8, 8, {"NPROC": "5"}, "5"),
        (3, 2, 8, {}, None),  # the launcher has bound it to its own
    ],
)
def test_processes_share_the_cores(processes, mine, others, environ, expected, monkeypatch):
    cores = {0: set(range(mine)), os.getppid(): set(range(others))}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    environ = dict(environ)
    share_cores(processes, environ)
    assert environ.get("NPROC") == expected
    assert xla_threads(environ) == int(expected or mine)


def test_rendezvous_file():
    assert read_environment({}).rendezvous_file is None
    assert read_environment({"MPXLA_RENDEZVOUS_FILE": "/tmp/x"}).rendezvous_file == "/tmp/x"


def test_the_description_is_frozen():
    env: Any = LaunchEnv()
    with pytest.raises(dataclasses.FrozenInstanceError):
        env.rank = 1


def test_log_level():
    assert read_environment({}).log_level == "INFO"
    assert read_environment({"MPXLA_LOG_LEVEL": "warning"}).log_level == "WARNING"
    assert "MPXLA_LOG_LEVEL=LOUD must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL" in refused(
        {"MPXLA_LOG_LEVEL": "loud"}
    )


def test_secret_is_read_and_not_shown():
    environ = {"MPXLA_SECRET": "a" * 32, "XDG_RUNTIME_DIR": "/run/user/1"}
    found = read_environment(environ)
    assert (found.secret, found.runtime_dir) == ("a" * 32, "/run/user/1")
    assert "aaaa" not in repr(found)


def test_short_secret_is_refused():
    with pytest.raises(ConfigError, match=r"MPXLA_SECRET has 5 characters.*32 or more.*token_hex"):
        read_environment({"MPXLA_SECRET": "guess"})


def test_gloo_listens_on_the_given_interface_unless_the_user_chose_one():
    environ = {}
    prepare_gloo(None, environ)
    assert environ == {}
    prepare_gloo("lo", environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}
    prepare_gloo("eth0", environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}


def test_torchrun_serves_the_store():
    assert not read_environment(TORCHRUN).has_agent_store
    assert read_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).has_agent_store
