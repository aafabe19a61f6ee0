"""Lets a CUTLASS example's own run() work on the CPU in warpspec.sim: no device, its tensors on the CPU."""
from harness import *
import importlib.util
from torch.overrides import TorchFunctionMode
ROOT = "/tmp/public/cutlass/examples/python/CuTeDSL/"
sys.path[:0] = [ROOT, ROOT + "cute", ROOT + "cute/blackwell"]
import cutlass.torch as cutlass_torch, cutlass.cute.testing as testing


BUFFERS = []
def aligned(t):
    """A copy that begins at a multiple of 256 bytes, with the strides of t."""
    import ctypes
    if t.numel() == 0: return t
    n = (1 + sum((s - 1) * d for s, d in zip(t.shape, t.stride()))) * t.element_size()
    BUFFERS.append(buffer := ctypes.create_string_buffer(n + 512))
    address = ctypes.addressof(buffer)
    flat = torch.frombuffer((ctypes.c_char * n).from_address(address + -address % 256), dtype=torch.uint8).view(t.dtype)
    out = torch.as_strided(flat, t.shape, t.stride())
    return out.copy_(t)


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        moved = getattr(func, "__name__", "") == "cuda" or "cuda" in str(kwargs.get("device", ""))
        if "cuda" in str(kwargs.get("device", "")): kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") == "cuda": return aligned(args[0])
        if getattr(func, "__name__", "") == "to":
            new = tuple("cpu" if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
            moved |= new is not args and any(isinstance(a, str) and "cuda" in a for a in args[1:])
            args = new
        result = func(*args, **kwargs)
        return aligned(result) if moved and isinstance(result, torch.Tensor) else result


class Stream: cuda_stream = 0
torch.cuda.is_available = lambda: True
torch.cuda.current_stream = torch.cuda.default_stream = lambda *a: Stream
torch.cuda.synchronize = lambda *a: None
OnCpu().__enter__()


def strided(t, dtype):
    import ctypes
    shape, stride = tuple(t.shape), tuple(t.stride)
    n = 1 + sum((s - 1) * d for s, d in zip(shape, stride))
    raw = torch.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(t.data_ptr), dtype=dtype)
    return torch.as_strided(raw, shape, stride)


def convert(src, dst):
    kinds = {"Float8E4M3FN": torch.float8_e4m3fn, "Float8E5M2": torch.float8_e5m2, "Float8E8M0FNU": torch.float8_e8m0fnu, "Float32": torch.float32, "Float16": torch.float16, "BFloat16": torch.bfloat16}
    f32, name = strided(src, kinds[src.element_type.__name__]).float(), dst.element_type.__name__
    if dst.element_type.width >= 16:
        strided(dst, kinds[name]).copy_(f32)
        return
    if dst.element_type.width == 8:
        kind = {"Float8E4M3FN": torch.float8_e4m3fn, "Float8E5M2": torch.float8_e5m2, "Float8E8M0FNU": torch.float8_e8m0fnu, "Int8": torch.int8, "Uint8": torch.uint8}[name]
        strided(dst, torch.uint8).copy_(f32.to(kind).view(torch.uint8))
        return
    import ctypes
    if name == "Int4": code = f32.to(torch.int32) & 15
    else:
        values = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
        code = (f32.abs()[..., None] - values).abs().argmin(-1) | ((f32 < 0).int() << 3)
    shape, stride = tuple(dst.shape), tuple(dst.stride)
    at = sum(torch.arange(n).reshape([-1 if j == i else 1 for j in range(len(shape))]) * d for i, (n, d) in enumerate(zip(shape, stride)))
    flat = torch.zeros(int(at.max()) + 1, dtype=torch.int32)
    flat[at.reshape(-1)] = code.reshape(-1).to(torch.int32)
    data = (flat[0::2] | flat[1::2] << 4).to(torch.uint8)
    torch.frombuffer((ctypes.c_char * len(data)).from_address(dst.data_ptr), dtype=torch.uint8).copy_(data)


testing.convert = convert
testing.benchmark = lambda *a, **k: 0.0


def example(path):
    """The module of an example, by its path below CuTeDSL/cute."""
    full = ROOT + "cute/" + path
    sys.path.insert(0, os.path.dirname(full))
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], full)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, f in list(vars(module).items()):  # a host function called without cute.compile
        if name == "host_function" and "cute.compile(" not in open(full).read():
            def call(*args, no_cache=True, _f=f, **kw):
                import inspect
                from cutlass.base_dsl.typing import Constexpr
                c = cute.compile(_f, *args, **kw)
                names = inspect.signature(_f).parameters
                run = [a for a, p in zip(args, names.values()) if "onstexpr" not in str(p.annotation)]
                c(*run)
            module.host_function = call
    return module


from cutlass._mlir import ir
import cutlass.cute.runtime as cr
_mlir_type = cr._Tensor.mlir_type.fget
cr._Tensor.mlir_type = property(lambda t: ir.Type.parse(str(_mlir_type(t)).replace(", generic,", ", gmem,"), context=_mlir_type(t).context))
cr._Tensor.memspace = property(lambda t: cute.AddressSpace.gmem)
class TorchStream:
    cuda_stream = 0
    def __init__(self, *a, **k): pass
    def synchronize(self): pass
torch.cuda.Stream = TorchStream
torch.cuda.stream = lambda *a: contextlib.nullcontext()

class Graph:
    def replay(self): pass
torch.cuda.CUDAGraph = Graph
torch.cuda.graph = lambda *a, **k: contextlib.nullcontext()
