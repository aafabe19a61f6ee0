from harness import *
torch.manual_seed(0)
import quack.cache.jit
from quack.softmax import Softmax
from quack.rmsnorm import _compile_rmsnorm_fwd
from quack.cute_dsl_utils import torch2cute_dtype_map as M
BF=cutlass.BFloat16
def inner(f):
    while hasattr(f,"__wrapped__"): f=f.__wrapped__
    return f
def softmax(n):
    x=torch.randn(3,n).bfloat16(); o=torch.full_like(x,float("nan"))
    inner(Softmax.compile)(BF,BF,n)(x,o); err(o,x.double().softmax(-1))
def rms(n):
    x=torch.randn(3,n).bfloat16(); w=torch.randn(n); o=torch.full_like(x,float("nan")); r=torch.full((3,),float("nan"))
    inner(_compile_rmsnorm_fwd)(BF,BF,None,cutlass.Float32,None,None,n,True,False,False,False)(x,w,None,None,o,None,r,None,1e-6)
    d=x.double(); err(o,d/(d.pow(2).mean(-1,keepdim=True)+1e-6).sqrt()*w)
def topk(n):
    import importlib; T=importlib.import_module("quack.topk")
    x=torch.randn(3,n).bfloat16()
    v,i=T.topk_fwd(x,8)
    err(v,x.double().topk(8).values)
def ce(n):
    import importlib; C=importlib.import_module("quack.cross_entropy")
    x=torch.randn(3,n).bfloat16(); t=torch.randint(0,n,(3,)); l=torch.full((3,),float("nan"))
    r=C.cross_entropy_fwd(x,t); err(r[0] if isinstance(r,tuple) else r, torch.nn.functional.cross_entropy(x.double(),t,reduction="none"))
def gemm(pingpong=False, cl=(1,1), c=False, m=256, n=256, k=128, tile=(128,128), **kw):
    import quack.gemm as G
    a,b=torch.randn(1,m,k).bfloat16(),torch.randn(1,n,k).bfloat16(); d=torch.full((1,m,n),float("nan")).bfloat16()
    cc=torch.randn(1,m,n).bfloat16() if c else None
    sem=torch.zeros(1,dtype=torch.int32) if kw.get("is_dynamic_persistent") else None
    G.gemm(a,b,d,cc,sem,*tile,*cl,pingpong=pingpong,**kw)
    err(d,a.double()@b.double().transpose(1,2)+(cc.double() if c else 0))
for a in sys.argv[1:]:
    print("case",a,flush=True); eval(a)
