"""Private names of torch, each wrapped in one function.

If a torch version lacks a name, only the feature in its `lost` text stops working; the user's forward still runs.
tests/test_torch_internals.py reports missing names.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

Result = TypeVar("Result")
Called = TypeVar("Called", bound=Callable[..., Any])
INTERNALS: list["Internal"] = []
FRAMES_OF_A_MODE = 12  # upper bound on stack frames between a tensor operation and its dispatch mode
KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
}


class Internal:
    """A private name of torch; `found` is None if this torch lacks it."""

    def __init__(self, module: str, name: str, lost: str) -> None:
        self._module, self._name, self.lost = module, name, lost
        INTERNALS.append(self)

    @property
    def name(self) -> str:
        """The full dotted name in torch."""
        return f"{self._module}.{self._name}"

    @cached_property
    def found(self) -> Any:
        """The object in torch, looked up on first use."""
        try:
            found: Any = import_module(self._module)
            for part in self._name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return None
        return found

    def __call__(self, *args: Any, otherwise: Any = None, **kwargs: Any) -> Any:
        """Call the object and return its result, or `otherwise` if this torch lacks it."""
        return otherwise if self.found is None else self.found(*args, **kwargs)


_dispatch_mode = Internal("torch.utils._python_dispatch", "TorchDispatchMode", "watch() cannot see any operation")
_without_modes = Internal(
    "torch.utils._python_dispatch", "_disable_current_modes", "creating a CausalBias in a watched model raises"
)
_fake_tensor = Internal("torch._subclasses.fake_tensor", "FakeTensor", "shape-only tensors are traced like real ones")
_operator = Internal("torch._ops", "OpOverload", "operations cannot be identified: nothing is measured")
_has_kernel = Internal("torch._C", "_dispatch_has_kernel_for_dispatch_key", "composite operations are not decomposed")
_graph_task = Internal("torch._C", "_current_graph_task_id", "calls that a backward pass recomputes are counted twice")
_transforms = Internal(
    "torch._C._functorch", "peek_interpreter_stack", "torch.func transforms are not detected and refuse checkpoints"
)
_is_mapped = Internal("torch._C._functorch", "is_batchedtensor", "torch.vmap over lengths of sequences raises")
_module_call = Internal(
    "torch.nn", "Module._call_impl", "one torch layer that is called on two lines is counted as two"
)
_sdpa_choice = Internal("torch", "_fused_sdp_choice", "attention_with_stats has a slower backward and no log-sum-exp")
_dispatch_modes = Internal("torch._C", "_len_torch_dispatch_stack", "kernels launch through the dispatcher: slower")
_function_modes = Internal("torch._C", "_is_torch_function_mode_enabled", "kernels launch through the dispatcher")
NO_FLEX = "compiled FlexAttention is measured uncompiled"
_included_keys = Internal("torch._C", "_dispatch_tls_local_include_set", f"{NO_FLEX} (included keys)")
_excluded_keys = Internal("torch._C", "_dispatch_tls_local_exclude_set", f"{NO_FLEX} (excluded keys)")
_force_keys = Internal("torch._C", "_ForceDispatchKeyGuard", NO_FLEX)
_script_builtin = Internal("torch.jit._builtins", "_register_builtin", "torch.jit.script refuses attention()")
SLOWER = "the backward of attention_with_stats recomputes its attention"
NO_LSE = "the largest score of rows outside the sample has wider bounds"
_forwards: dict[SDPBackend | None, Internal] = {
    backend: Internal("torch", f"ops.aten._scaled_dot_product_{name}_attention.default", f"{NO_LSE} ({name})")
    for backend, name in KERNELS.items()
}
_backwards: dict[SDPBackend | None, Internal] = {
    backend: Internal("torch", f"ops.aten._scaled_dot_product_{name}_attention_backward.default", f"{SLOWER} ({name})")
    for backend, name in KERNELS.items()
}
_cpu_forward, _cpu_backward = (
    Internal("torch", f"ops.aten._scaled_dot_product_flash_attention_for_cpu{part}.default", f"{SLOWER} (on a CPU)")
    for part in ("", "_backward")
)
_sequences_backward = Internal("torch", "ops.aten._flash_attention_backward.default", "ragged batches run one by one")
_compiled_call = Internal("torch._dynamo", "eval_frame", "compiled models are measured uncompiled")
_disabled = Internal("torch._compile", "_disable_dynamo", "torch.compile traces into QKClip.step()")
_default_store = Internal("torch.distributed.distributed_c10d", "_get_default_store", "results of ranks are not merged")
_shard_offset = Internal(
    "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "sharded parameters are not rescaled"
)

DispatchMode: Any = _dispatch_mode.found or object


def can_watch() -> bool:
    """Return True if a dispatch mode can see the operations of a model."""
    return _dispatch_mode.found is not None


def is_fake(kinds: tuple[type, ...]) -> bool:
    """Return True if one of these tensor classes is FakeTensor, which has a shape but no values."""
    return _fake_tensor.found is not None and _fake_tensor.found in kinds


def unseen(tensor: Tensor) -> bool:
    """Return True if the values of a tensor cannot be read: while compiling, under torch.vmap, fake or on meta."""
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return True
    return is_fake((type(tensor),)) or is_mapped(tensor)


def is_mapped(tensor: Tensor) -> bool:
    """Return True if torch.vmap maps over the tensor."""
    return bool(_is_mapped(tensor, otherwise=False))


def sizes_vary(*sizes: int) -> bool:
    """Return True if torch.compile traces with symbolic sizes; a Python loop over them would specialise them."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not all(has_static_value(size) for size in sizes)


def ragged_axis(tensor: Tensor) -> int:
    """Return the axis along which the sequences of a jagged tensor differ in length."""
    return int(getattr(tensor, "_ragged_idx"))  # noqa: B009  # of the jagged subclass


def known_longest(tensor: Tensor) -> int | None:
    """Return the cached length of the longest sequence of a jagged tensor; None if reading it would wait for a GPU."""
    found = getattr(tensor, "_maybe_max_seqlen", None)
    return found if type(found) is int else None


def without_modes() -> Any:
    """Return a context manager that disables all dispatch modes."""
    return _without_modes(otherwise=nullcontext())


def modes_in_place() -> int:
    """Return the number of dispatch modes that are active on this thread; 1 if unknown."""
    return int(_dispatch_modes(otherwise=1))


def schema_of(function: Any) -> Any | None:
    """Return the schema of a torch operation; None for any other callable."""
    is_operator = _operator.found is not None and isinstance(function, _operator.found)
    return getattr(function, "_schema", None) if is_operator else None


def has_kernel(function: Any, key: str) -> bool:
    """Return True if an operation has its own kernel for a dispatch key."""
    try:
        return bool(_has_kernel(function.name(), key, otherwise=False))
    except RuntimeError:  # reading a nested tensor's sizes is an operation unknown to the dispatcher
        return False


def in_backward() -> bool:
    """Return True if a backward pass is running on this thread."""
    number = _graph_task.found
    return number is not None and number() != -1


def local_part(parameter: Tensor) -> Tensor | None:
    """Return this rank's shard of a parameter; None if the parameter is not sharded."""
    return getattr(parameter, "_local_tensor", None)


def shard_offset(shape: Any, mesh: Any, placements: Any) -> Any | None:
    """Return the shape of this rank's shard of a tensor and its offset in the whole tensor."""
    return _shard_offset(shape, mesh, placements)


def store_of_ranks(name: str) -> Any:
    """Return a new connection to the key-value store of the default process group, with a prefix for its keys."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(name, _default_store().clone())


def fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """Return the process groups over which FSDP2 shards or replicates the parameters of a module."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    parameter_groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    meshes = [getattr(each, "mesh_info", None) for each in parameter_groups]
    groups = [getattr(mesh, f"{kind}_process_group", None) for mesh in meshes for kind in ("replicate", "shard")]
    return [group for group in groups if group is not None]


def called_module(frame: FrameType) -> torch.nn.Module | None:
    """Return the module that this frame calls; None if the frame is not a module call."""
    code = getattr(_module_call.found, "__code__", None)
    return frame.f_locals.get("self") if frame.f_code is code else None


def inside_nested_tensors() -> bool:
    """Return True if the caller runs inside an operation of a jagged tensor."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES_OF_A_MODE):
        if frame is None or frame.f_globals.get("__name__", "").startswith("torch.nested._internal"):
            return frame is not None
        frame = frame.f_back
    return False


def calls_compiled(frame: FrameType) -> bool:
    """Return True if this frame is the wrapper that torch.compile put around a function."""
    if frame.f_code.co_name != "compile_wrapper" or "torch._dynamo.eval_frame" not in sys.modules:
        return False
    return frame.f_code.co_filename == getattr(_compiled_call.found, "__file__", "")


def refuses_breaks(frame: FrameType) -> bool:
    """Return True if the function that this frame calls was compiled with fullgraph or errors on graph breaks."""
    settings = frame.f_locals.get("self")
    return bool(getattr(settings, "fullgraph", True)) or bool(getattr(settings, "error_on_graph_break", False))


def copy_each_(into: list[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one call."""
    if into:
        torch._foreach_copy_(into, list(sources))


def multiply_each_(tensors: list[Tensor], factors: list[Tensor]) -> None:
    """Multiply each tensor in place by its factor, which may broadcast, in one call."""
    if tensors:
        torch._foreach_mul_(tensors, factors)


def submodules_of(modules: Iterable[torch.nn.Module]) -> list[dict[str, torch.nn.Module | None]]:
    """Return the direct submodules of each module by name; children() is several times slower."""
    return list(map(attrgetter("_modules"), modules))


def current_stream(device: int | None = None) -> int:
    """Return the handle of the current CUDA stream of a device, by default the current device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def in_transform() -> bool:
    """Return True inside a torch.func transform."""
    return _transforms() is not None


def has_mode() -> bool:
    """Return True if a mode or a torch.func transform is active: a direct kernel launch would bypass it."""
    return bool(modes_in_place()) or bool(_function_modes(otherwise=True)) or in_transform()


def dispatch_keys() -> tuple[Any, Any]:
    """Return the dispatch keys that are included and excluded on this thread."""
    return _included_keys(), _excluded_keys()


def with_dispatch_keys(keys: tuple[Any, Any]) -> AbstractContextManager[Any]:
    """Return a context with these dispatch keys; graphs compiled by Inductor run without the keys of torch.vmap."""
    found: AbstractContextManager[Any] = _force_keys(*keys, otherwise=nullcontext())
    return found


def sdpa_backend(*args: Any, **kwargs: Any) -> SDPBackend | None:
    """Return the backend that SDPA would choose; None if unknown."""
    found = _sdpa_choice(*args, **kwargs)
    return None if found is None else SDPBackend(found)


def sdpa_forward(backend: SDPBackend | None, device: str = "cuda") -> Callable[..., Any] | None:
    """Return the forward kernel of a backend or the CPU; its second result is the log-sum-exp. None if missing."""
    kernel = _cpu_forward if device == "cpu" else _forwards.get(backend)
    return None if kernel is None else kernel.found


def sequences_backward() -> Callable[..., Any] | None:
    """Return the backward of flash attention over packed sequences; None if missing."""
    kernel: Callable[..., Any] | None = _sequences_backward.found
    return kernel


def sdpa_backward(backend: SDPBackend | None, device: str) -> Callable[..., Any] | None:
    """Return the backward of the kernel that `sdpa_forward` returns; None if missing."""
    kernel = _cpu_backward if device == "cpu" else _backwards.get(backend)
    return None if kernel is None else kernel.found


@contextmanager
def causal_bias_under_modes() -> Iterator[None]:
    """Make torch's CausalBias constructible under a dispatch mode, where its plain constructor raises."""
    from torch.nn.attention.bias import CausalBias  # imports torch's compiler

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return Tensor.__new__(cls)

    own: Callable[..., Any] | None = CausalBias.__dict__.get("__new__")
    CausalBias.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del CausalBias.__new__
        else:
            CausalBias.__new__ = own  # type: ignore[method-assign]


def is_in_scripts(function: Callable[..., Any], name: str) -> None:
    """Make torch.jit.script treat a function as one of torch's operations."""
    _script_builtin(function, name)


def keep_off_the_fast_path(attention: torch.nn.MultiheadAttention) -> None:
    """Disable the fused inference path of nn.TransformerEncoderLayer, which uses 1/√d_k and does not call this module.

    The layer uses that path only if query, key and value have the same width.
    """
    attention._qkv_same_embed_dim = False


def constant_in_graphs(function: Callable[[], Result]) -> Callable[[], Result]:
    """Mark a function so that Dynamo treats its result as a constant; Dynamo's own decorator imports all of Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: Called) -> Called:
    """Exclude a function from compilation. Do not use torch.compiler.disable: it imports all of Dynamo."""
    found: Called = _disabled(function, otherwise=function)
    return found


@constant_in_graphs
def is_exporting() -> bool:
    """Return True if torch.export is tracing; in torch 2.11, Dynamo replaces torch's own function by True."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))
