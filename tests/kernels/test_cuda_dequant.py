"""csrc/dequant.cu against the torch reference: on the host through a shim, on a device where there is one."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strata_coord.kernels import cuda_dequant
from strata_coord.kernels.dequant import dequantize
from strata_coord.kernels.formats import block_format, type_id

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "kernels" / "csrc" / "dequant.cu"
ARCHITECTURES = ("75", "80", "86", "89", "90", "120")
Expand = Callable[[str, torch.Tensor, torch.Tensor], None]

WRAPPER = """
Dim blockIdx, blockDim, threadIdx, gridDim;
template <typename Format, typename Out>
void all_threads(const u8* raw, Out* out, u64 values, u64 stride, u64 parts) {
  gridDim.x = 3; blockDim.x = 4;  // fewer threads than parts: the grid-stride loop is used
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
      dequantize<Format, Out>(raw, out, values, stride, parts);
}
#define EXPORT(F) \\
  extern "C" void f32_##F(const u8* r, float* o, u64 v, u64 s, u64 p) { all_threads<F>(r, o, v, s, p); } \\
  extern "C" void bf16_##F(const u8* r, __nv_bfloat16* o, u64 v, u64 s, u64 p) { \\
    all_threads<F>(r, o, v, s, p); \\
  } \\
  extern "C" void f16_##F(const u8* r, __half* o, u64 v, u64 s, u64 p) { all_threads<F>(r, o, v, s, p); }
"""


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Expand:
    """The kernels compiled for the host, as a function of type name, bytes [batches, bytes] and output."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run CUDA sources on the host")
    folder = tmp_path_factory.mktemp("shim")
    exports = "\n".join(f"EXPORT({name})" for name in cuda_dequant.CUDA_FORMATS)
    (folder / "host.cpp").write_text(f'#include "{SOURCE}"\n{WRAPPER}\n{exports}\n')
    library = folder / "libdequant.so"
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    subprocess.run(
        [compiler, *options, "-I", HERE / "cuda_shim", folder / "host.cpp", "-o", library],
        check=True,
        timeout=120,
    )
    loaded = ctypes.CDLL(str(library))
    prefix = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

    def expand(name: str, raw: torch.Tensor, out: torch.Tensor) -> None:
        values = out.numel() // raw.shape[0]
        function = getattr(loaded, f"{prefix[out.dtype]}_{name}")
        sizes = [ctypes.c_uint64(n) for n in (values, raw.stride(0), out.numel() // 8)]
        function(ctypes.c_void_p(raw.data_ptr()), ctypes.c_void_p(out.data_ptr()), *sizes)

    return expand


def random_blocks(name: str, *, batches: int, blocks: int, seed: int) -> torch.Tensor:
    """Bytes [batches, bytes]: any pattern is a valid block, also with scales that are not finite."""
    form = block_format(type_id(name))
    num_bytes = blocks * max(form.block_bytes, form.block_bytes * 32 // form.block_elements)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batches, num_bytes), dtype=torch.uint8, generator=generator)


def same(found: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether all values are equal, a NaN to any NaN."""
    return torch.equal(found.nan_to_num(nan=0.5), reference.nan_to_num(nan=0.5)) and torch.equal(
        found.isnan(), reference.isnan()
    )


@pytest.mark.parametrize("name", cuda_dequant.CUDA_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference_bit_for_bit(on_host: Expand, name: str, dtype: torch.dtype) -> None:
    form = block_format(type_id(name))
    raw = random_blocks(name, batches=3, blocks=2, seed=1)
    reference = dequantize(
        raw.flatten(), type_id(name), raw.numel() // form.block_bytes * form.block_elements
    ).view(3, -1)
    padded = torch.full((3, raw.shape[1] + 7), 255, dtype=torch.uint8)
    padded[:, : raw.shape[1]] = raw  # batches with a gap between them, at odd addresses
    out = torch.full(reference.shape, 99.0, dtype=dtype)
    on_host(name, padded, out)
    assert same(out.float(), reference.to(dtype).float())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_every_card_people_own(tmp_path: Path, architecture: str) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc to compile CUDA sources")
    uses = "\n".join(
        f"template __global__ void dequantize<{name}, {out}>(const u8*, {out}*, u64, u64, u64);"
        for name in cuda_dequant.CUDA_FORMATS
        for out in ("float", "__nv_bfloat16", "__half")
    )
    source = tmp_path / "all.cu"
    source.write_text(f'#include "{SOURCE}"\n{uses}\n')
    command = [
        compiler,
        f"-arch=sm_{architecture}",
        "-std=c++17",
        "-cubin",
        "-o",
        tmp_path / "all.cubin",
        source,
    ]
    subprocess.run(command, check=True, timeout=120)
    assert (tmp_path / "all.cubin").stat().st_size > 0


@pytest.mark.gpu
@pytest.mark.leaves("the CUDA context, whose descriptors live as long as the process")
@pytest.mark.parametrize("name", cuda_dequant.CUDA_FORMATS)
def test_device_equals_the_reference(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    form = block_format(type_id(name))
    raw = random_blocks(name, batches=5, blocks=64, seed=2)
    values = raw.numel() // form.block_bytes * form.block_elements
    reference = dequantize(raw.flatten(), type_id(name), values)
    out = torch.empty(values, dtype=torch.float32, device="cuda")
    cuda_dequant.dequantize_cuda(raw.cuda(), type_id(name), out)
    assert same(out.cpu(), reference)
