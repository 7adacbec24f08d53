"""Privacy of records: no secrets, and no paths outside of the working directory, the code and the installation."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
VARIABLES = frozenset({
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_AUTO_BOOST",
    "CUDA_CACHE_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_PTX_JIT", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_SCALE_LAUNCH_QUEUES",
    "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME", "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_INTERFACE_LAYER", "MKL_NUM_THREADS",
    "MKL_THREADING_LAYER", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CHECKS_DISABLE", "NCCL_COLLNET_ENABLE", "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE", "NCCL_DEBUG", "NCCL_DMABUF_ENABLE", "NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SL",
    "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_TC", "NCCL_IB_TIMEOUT", "NCCL_IGNORE_CPU_AFFINITY", "NCCL_LAUNCH_MODE",
    "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ", "NCCL_NSOCKS_PERTHREAD", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_PXN_DISABLE", "NCCL_RUNTIME_CONNECT", "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS",
    "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE", "OMP_STACKSIZE", "OMP_THREAD_LIMIT",
    "OMP_WAIT_POLICY", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "ROCR_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_CUDA_EVENT_CACHE", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HIGH_PRIORITY",
    "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_USE_COMM_NONBLOCKING",
})  # fmt: skip
"""The only environment variables that enter a record: those that affect speed or numbers."""
KEY = re.compile(r"(?=[A-Za-z+/=-]*\d)(?=[\d+/=-]*[A-Za-z])[A-Za-z\d+/=-]{16,}")
"""Letters and digits in a row, as long as an access key."""
PATH_VALUE = re.compile(r"^[/~]|[:=,][/~]")
PATH = re.compile(r"""(?<=["'])/[^"'\n]+(?=["'])|(?:(?<=file://)|(?<![\w./~$*-]))/[\w.@+~-]+(?:/[\w.@+~=-]*)+""")
"""An absolute path: anything in quotes, else two components or more."""
INSTALLED = re.compile(r".*/(?:(?:site|dist)-packages|lib(?:64)?(?=/python3\.\d+/))/(.+)", re.DOTALL)
"""A path inside a Python installation; its group is the part relative to it."""
HOME = re.compile(r"/(?:home|Users)/[^/]+|/root")
PUBLIC = ("/dev/", "/proc/", "/sys/")
"""Folders that are the same on every machine."""
MEASURED = ("config", "steps", "ranks", "certificate", "prediction")
"""Fields of a record that are never rewritten: numbers, and the configuration, whose hash is the record's id."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of VARIABLES, except those whose values look like keys or paths."""
    is_kept = lambda name, value: name in VARIABLES and not KEY.search(value) and not PATH_VALUE.search(value)
    return {name: value for name, value in sorted(environment.items()) if is_kept(name, value)}


def without_paths(text: str) -> str:
    """Return a text with its absolute paths made relative to the working directory, the installation or $HOME.

    Of any other path only the last component is kept: `.../name`.
    """
    return PATH.sub(lambda found: _shortened(found[0]), text)


def _shortened(path: str) -> str:
    if path.startswith(PUBLIC):
        return path
    if installed := INSTALLED.fullmatch(path):
        return installed[1]
    for folder in (os.getcwd(), str(CODE)):
        if folder != "/" and (path + "/").startswith(f"{folder}/"):
            return path[len(folder) + 1 :] or "."
    for home in (re.match(f"{re.escape(str(Path.home()))}(?=/|$)", path), HOME.match(path)):
        if home and home[0] != "/":
            return "$HOME" + path[home.end() :]
    return f".../{path.rstrip('/').rpartition('/')[2]}"


def command(words: list[str]) -> list[str]:
    """Return the words of a command without absolute paths; a whole word may be a path with spaces."""
    split = (re.fullmatch(r"([^/=]*=)?(/.+)", word, re.DOTALL) for word in words)
    return [
        (found[1] or "") + _shortened(found[2]) if found else without_paths(word)
        for word, found in zip(words, split, strict=True)
    ]


def cleaned(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without absolute paths and without variables outside of VARIABLES; measured values stay."""
    found = {name: value if name in MEASURED else _cleaned(value) for name, value in record.items()}
    environment = record.get("environment")
    if isinstance(environment, dict):
        named = environment.get("variables")
        if isinstance(environment.get("command"), list):
            found["environment"]["command"] = command(list(map(str, environment["command"])))
        if isinstance(named, dict):
            found["environment"]["variables"] = variables({str(name): str(value) for name, value in named.items()})
    return found


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, dict):
        return {name: _cleaned(one) for name, one in value.items()}
    return list(map(_cleaned, value)) if isinstance(value, list | tuple) else value
