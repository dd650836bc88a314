"""The package `smdistributed.modelparallel.torch`: SMP's names, found in mpxla.

`importable()` lets Python import the package and its submodules, beside other packages below
`smdistributed` that are installed. A name that mpxla lacks can be imported, since scripts import
more than they use; to call it is an error that names the missing feature.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

import mpxla
from mpxla.compat import CompatError
from mpxla.compat.names import (
    SMP_MODULES,
    SMP_PACKAGE,
    SMP_VERSION,
    TRANSLATIONS,
    UNKNOWN,
    Fate,
)
from mpxla.compat.optimizers import FusedLamb, FusedNovoGrad
from mpxla.log import warn_once
from mpxla.parallel.gradients.grad_scaler import GradScaler
from mpxla.patches import checkpoint
from mpxla.session import current
from mpxla.user_lines import at_script_line

__all__ = ["importable"]


@contextlib.contextmanager
def importable() -> Generator[None]:
    """Makes the package importable; on exit Python forgets it."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if getattr(module, "__loader__", None) is finder:
                del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_parent = SMP_PACKAGE.startswith(f"{fullname}.")
        if not is_parent and _below(fullname) is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin="mpxla", is_package=True)
        if is_parent:  # what is installed beside the package is found where it is
            installed = importlib.machinery.PathFinder.find_spec(fullname, path)
            spec.submodule_search_locations = [*_locations(installed)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """A stand-in for what no table lists: a module, or a name that was imported from one."""
        below = _below(spec.name)
        return None if below is None or below in SMP_MODULES else _Unknown(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        below = _below(module.__name__)
        if isinstance(module, _Unknown):
            return
        if below is None:
            module.__dict__["__version__"] = SMP_VERSION
            module.__doc__ = "Parent of the package that mpxla provides for SMP's scripts."
            return
        module.__doc__ = f"SMP's names of {module.__name__}, provided by mpxla."
        module.__dict__["__getattr__"] = _reader(below)
        module.__dict__["__all__"] = [
            name for name, entry in SMP_MODULES[below].items() if entry.fate is Fate.SUPPORTED
        ]


def _locations(spec: importlib.machinery.ModuleSpec | None) -> Sequence[str]:
    return (spec.submodule_search_locations or ()) if spec is not None else ()


class _Unknown(ModuleType):
    """A module or a name of SMP that mpxla does not know: a script may import it, and not use it.

    Names that SMP's package has are found in its inner modules as well.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise CompatError(f"{at_script_line()}: {self.__name__}: {UNKNOWN.text}.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in mpxla.__all__:
            return getattr(mpxla, name)
        return _stand_in(f"{self.__name__}.{name}", UNKNOWN.text)


class _StandIn(type):
    """Class of the names that mpxla lacks: good for imports and `isinstance`, and nothing else."""

    def _refuse(cls) -> Any:
        raise CompatError(
            f"{at_script_line()}: {cls.__qualname__} is not supported: {cls.__doc__}."
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._refuse()


def _stand_in(path: str, reason: str) -> type:
    def refuse_subclass(cls: Any, **kwargs: Any) -> None:
        base: Any = cls.__mro__[1]
        base._refuse()

    names = {"__doc__": reason, "__qualname__": path}
    return _StandIn(path, (), {**names, "__init_subclass__": classmethod(refuse_subclass)})


def _below(fullname: str) -> str | None:
    """`"nn"` for `smdistributed.modelparallel.torch.nn`; None outside the package."""
    if fullname == SMP_PACKAGE:
        return ""
    head, _, tail = fullname.partition(f"{SMP_PACKAGE}.")
    return tail if not head and tail else None


def _reader(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of the package."""
    path = f"{SMP_PACKAGE}.{module}" if module else SMP_PACKAGE

    def read(name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        child = f"{module}.{name}" if module else name
        if child in SMP_MODULES:
            return importlib.import_module(f"{SMP_PACKAGE}.{child}")
        if (module, name) in _OWN:
            return _OWN[module, name]
        if not module and name in mpxla.__all__:
            return SMP_VERSION if name == "__version__" else getattr(mpxla, name)
        known = SMP_MODULES[module].get(name)
        if known is None:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        return _stand_in(f"{path}.{name}", known.text)

    return read


# --- names that are another thing than mpxla's own ------------------------------------------------


@contextlib.contextmanager
def _model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    zero_init: bool = False,
    **settings: Any,
) -> Generator[None]:
    """`smp.model_creation`, which SMP's examples call with `zero_init=True` in any case."""
    if zero_init and current().topology.sdp == 1:
        zero_init = False
        warn_once(
            "zero_init",
            "smp.model_creation(zero_init=True) has no effect without sharded data parallelism, "
            "which the key sharded_data_parallel_degree switches on.",
        )
    with mpxla.model_creation(tensor_parallelism, dtype, zero_init, **settings):
        yield


def _translate(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
    """The state dict as it is; stands for all of SMP's translations between names.

    SMP put layers of its own into models of transformers. Here a model that is split keeps the
    names of the plain one, in both directions.

    Args:
        state_dict: of a model, or of a file of transformers.
        max_seq_len: without effect: SMP cut masks to it, which transformers no longer saves.

    Raises:
        CompatError: it has the names of SMP's own layers.
    """
    foreign = next((name for name in state_dict if ".seq_layers." in f".{name}"), None)
    if foreign is not None:
        raise CompatError(
            f"{at_script_line()}: {foreign!r} is a name of SMP's own layers "
            f"(smp.nn.DistributedTransformer), which mpxla does not translate. Load the weights "
            f"from files with the names of transformers."
        )
    return dict(state_dict)


_OWN: dict[tuple[str, str], Any] = {
    ("", "model_creation"): _model_creation,
    ("patches.checkpoint", "checkpoint"): checkpoint.checkpoint,
    ("patches.checkpoint", "checkpoint_sequential"): checkpoint.checkpoint_sequential,
    ("amp", "GradScaler"): GradScaler,
    **{("nn", name): getattr(mpxla.nn, name) for name in mpxla.nn.__all__},
    ("nn", "FusedLayerNorm"): nn.LayerNorm,
    ("model", "DistributedModel"): mpxla.DistributedModel,
    **{
        (f"nn.huggingface.{family}", name): _translate
        for family, names in TRANSLATIONS.items()
        for name in names
    },
    ("optimizers", "FusedLamb"): FusedLamb,
    ("optimizers", "FusedLAMB"): FusedLamb,
    ("optimizers", "FusedNovoGrad"): FusedNovoGrad,
}
