"""Builds the stand-in for the CUDA libraries and names it to a process; see stub.c."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from causal_encoder.serve.placement import CUDA_DRIVER, CUDA_LIBRARIES

SONAMES = (CUDA_DRIVER, *CUDA_LIBRARIES)
_SOURCE = Path(__file__).with_name("stub.c")
_LIBRARY = "libstandin.so"
# What the functions that stub.c leaves out do: the first pattern that fits the whole name.
_BODIES = {
    r"cudaStreamCreateWithFlags|cublas(Lt)?Create(_v2)?": "return stub_create(object);",
    r"(cuda(Stream|Graph|GraphExec)|cublas|cublasLt)Destroy(_v2)?": "return stub_destroy(object);",
    r"cublasGemmEx|cublasSgemm_v2": 'return stub_tell("gemm", __func__, 0);',
    r"cublas(SetStream_v2|[SG]etMathMode)|cudaFuncSetAttribute": "return 0;",
    "cudaMemsetAsync": 'return stub_tell("memset", __func__, 0);',
    r"__cuda((Un)?Register\w+|\w+CallConfiguration)": "return 0;",
    r"\w+": 'stub_tell("unknown", __func__, 0); return 1;',
}


def find_provider() -> Path | None:
    """The CUDA provider of the installed ONNX Runtime."""
    spec = importlib.util.find_spec("onnxruntime")
    folders = (spec and spec.submodule_search_locations) or ()
    paths = (Path(folder) / "capi" / "libonnxruntime_providers_cuda.so" for folder in folders)
    return next(filter(Path.exists, paths), None)


def unavailable() -> str:
    """Why no stand-in can be built here; empty if one can."""
    if find_provider() is None:
        return "the installed ONNX Runtime has no CUDA provider for Linux"
    return "" if shutil.which("gcc") else "gcc is not installed"


def build(folder: Path) -> Mapping[str, str]:
    """Compile one library that goes by the name of every CUDA library.

    Args:
        folder: where to build.

    Returns:
        The environment in which a process loads it in place of the real ones, even where
        those are installed.
    """
    provider = find_provider()
    assert provider is not None
    owners = _imported_functions(provider)
    written = set(re.findall(r"\b(\w+)\(", _SOURCE.read_text()))
    generated = (
        f"int {name}(void **object) {{ (void)object; {_body(name)} }}\n"
        for name in owners
        if name not in written
    )
    source = folder / "standin.c"
    source.write_text(f'#include "{_SOURCE}"\n' + "".join(generated))
    # The loader looks for cudart's functions under the version "libcudart.so.13", and so on.
    versions = folder / "standin.map"
    versions.write_text(
        "".join(
            f"{soname} {{ {'; '.join(names)}; }};\n"
            for soname in SONAMES
            if (names := [name for name, owner in owners.items() if owner == soname])
        )
    )
    subprocess.run(
        ["gcc", "-std=gnu11", "-O1", "-shared", "-fPIC", f"-Wl,--version-script={versions}",
         "-o", folder / _LIBRARY, source],
        check=True,
    )  # fmt: skip
    for soname in SONAMES:
        (folder / soname).symlink_to(_LIBRARY)
    paths = filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "LD_PRELOAD": " ".join(SONAMES)}


def _imported_functions(provider: Path) -> dict[str, str]:
    """CUDA functions the provider links to, and the library each is looked for in, if named."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", provider], capture_output=True, text=True, check=True
    )
    symbols = (line.split()[-1].partition("@") for line in listing.stdout.splitlines())
    return {
        name: owner
        for name, _, owner in symbols
        if owner in SONAMES or (not owner and re.match("cu[A-Z]", name))
    }


def _body(name: str) -> str:
    return next(body for pattern, body in _BODIES.items() if re.fullmatch(pattern, name))
