from harness import *
import importlib.util
torch.manual_seed(0)
root="/tmp/public/cutlass/examples/python/CuTeDSL/cute/blackwell/kernel/"; sys.path[:0]=["/tmp/public/cutlass/examples/python/CuTeDSL","/tmp/public/cutlass/examples/python/CuTeDSL/cute","/tmp/public/cutlass/examples/python/CuTeDSL/cute/blackwell"]
from cutlass.cute.runtime import make_ptr, make_fake_stream
def load(p):
    sys.path.insert(0, os.path.dirname((root+p if "mended" not in p else "/tmp/public/mended/mla_decode_fp16.py")))
    s=importlib.util.spec_from_file_location(os.path.basename(p)[:-3], (root+p if "mended" not in p else "/tmp/public/mended/mla_decode_fp16.py")); m=importlib.util.module_from_spec(s); sys.modules[s.name]=m; s.loader.exec_module(m); return m
def blockscaled(tile=(128,128), cl=(1,1), m=128, n=128, k=256, nv=True):
    b=load("blockscaled_gemm/dense_blockscaled_gemm_persistent.py")
    sv=16 if nv else 32
    ab=cutlass.Float4E2M1FN if nv else cutlass.Float8E4M3FN; sf=cutlass.Float8E4M3FN if nv else cutlass.Float8E8M0FNU
    g=b.Sm100BlockScaledPersistentDenseGemmKernel(sv,tile,cl)
    f=b.scaled_mm(g,ab,ab,cutlass.Float32,sf,"k","k","n",8,make_fake_stream())
    if nv:
        A,B=[torch.randint(0,256,(1,r,k//2),dtype=torch.uint8) for r in (m,n)]
        T=torch.tensor([0,.5,1,1.5,2,3,4,6,-0.,-.5,-1,-1.5,-2,-3,-4,-6]).double()
        a,bb=[torch.stack([T[(x&15).long()],T[(x>>4).long()]],-1).reshape(1,-1,k) for x in (A,B)]
    else:
        A,B=[torch.randn(1,r,k).to(torch.float8_e4m3fn) for r in (m,n)]; a,bb=A.double(),B.double()
    def scales(r):
        s=2.0**torch.randint(-2,3,(r,k//sv)).double()
        x=s.reshape(r//128,4,32,k//sv//4,4).permute(0,3,2,1,4).contiguous()   # atoms of 128 rows, 4 scales
        return s, (x.float().to(torch.float8_e4m3fn) if nv else (x.log2()+127).to(torch.uint8))
    (sa,SA),(sb,SB)=scales(m),scales(n)
    C=torch.full((1,m,n),float("nan"))
    P=lambda t,d,al: make_ptr(d,t.data_ptr(),cute.AddressSpace.gmem,assumed_align=al)
    f(P(A,ab,16),P(B,ab,16),P(SA,sf,32),P(SB,sf,32),P(C,cutlass.Float32,16),tuple(cutlass.Int32(i) for i in (m,n,k,1)),None) if os.environ.get("PUB_L") is None else 0
    err(C[0],(a[0]*sa.repeat_interleave(sv,1))@(bb[0]*sb.repeat_interleave(sv,1)).T)
def fmha(sq=128, sk=256, d=128, h=1, causal=False):
    import math
    from cutlass.cute.runtime import from_dlpack
    F=load("attention/fmha/fmha.py"); import inspect
    cls=F.BlackwellFusedMultiHeadAttentionForward
    print(inspect.signature(cls.__init__))
    kw=dict(qk_acc_dtype=cutlass.Float32,pv_acc_dtype=cutlass.Float32,mma_tiler=(128,128),head_dim=d,is_persistent=False,
      mask_type=getattr(F.fmha_utils.MaskEnum,"WINDOW_MASK") if causal else F.fmha_utils.MaskEnum.RESIDUAL_MASK if sk%128 else F.fmha_utils.MaskEnum.WINDOW_MASK,
      enable_ex2_emulation=False, enable_skip_correction=True, mma_tiler_mn=(128,128))
    sig=inspect.signature(cls.__init__).parameters
    f=cls(**{k:v for k,v in kw.items() if k in sig})
    q=torch.randn(1,sq,h,d).half(); k=torch.randn(1,sk,h,d).half()*(torch.linspace(.1,4,sk).half()[None,:,None,None] if os.environ.get('RISING') else 1); v=torch.randn(1,sk,h,d).half(); o=torch.full((1,sq,h,d),float("nan")).half()
    q,k,v,o=[x.reshape(1,x.shape[1],h,1,d) for x in (q,k,v,o)]
    T=[from_dlpack(x,assumed_align=16).mark_layout_dynamic(leading_dim=4) for x in (q,k,v,o)]
    sc=1/math.sqrt(d)
    I=lambda x: None if x is None else cutlass.Int32(x)
    ps=tuple(cutlass.Int32(i) for i in (1,sq,sq,sk,h,h,d,d))
    c=cute.compile(f,*T,ps,None,None,None,None,cutlass.Float32(sc*math.log2(math.e)),cutlass.Float32(sc),cutlass.Float32(1.0),None,None,I(0) if causal else None,None,None,make_fake_stream(),False,options="--opt-level=2")
    c(q,k,v,o,ps,None,None,None,None,cutlass.Float32(sc*math.log2(math.e)),cutlass.Float32(sc),cutlass.Float32(1.0),None,None,I(0) if causal else None,None,None,None,False)
    s=torch.einsum("bqhd,bkhd->bhqk",q[:,:,:,0].double(),k[:,:,:,0].double())*sc
    err(o[:,:,:,0],torch.einsum("bhqk,bkhd->bqhd",s.softmax(-1),v[:,:,:,0].double()))
def mla(seq=256, page=128, h=128, sq=1, split=1):
    import math
    from cutlass.cute.runtime import from_dlpack
    K=load("attention/mla/mla_decode_fp16.py" if not os.environ.get("MENDED") else "/../../../../../../../../../../tmp/public/mended/mla_decode_fp16.py").BlackwellMultiHeadLatentAttentionForwardFP16
    f=K(cutlass.Float32,cutlass.Float32,(128,128),(128,256),8,page,0.0,True,False,False)
    pages=seq//page
    P=lambda *s: torch.randn(*s).half()
    ql,qr=P(1,sq,h,512).permute(2,3,1,0),P(1,sq,h,64).permute(2,3,1,0)
    cl,cr=P(pages,page,512).permute(1,2,0),P(pages,page,64).permute(1,2,0)
    o=torch.full((1,sq,h,512),float("nan")).half().permute(2,3,1,0); lse=torch.full((1,sq,h),float("nan")).permute(2,1,0)
    pt=torch.arange(pages,dtype=torch.int32).reshape(1,pages).permute(1,0)
    seqs=torch.tensor([seq],dtype=torch.int32)
    def D(x,ld,order=None,div=8):
        from quack.cute_dsl_utils import torch2cute_dtype_map as M
        n=x.element_size(); d=16//n if order else 1
        sh=tuple(cute.sym_int(divisibility=d) if i==ld and order else cute.sym_int() for i in range(x.ndim))
        st=tuple(1 if i==ld else cute.sym_int64(divisibility=d) for i in range(x.ndim))
        return cute.runtime.make_fake_tensor(M[x.dtype],sh,stride=st,memspace=cute.AddressSpace.gmem,assumed_align=16)
    T=[D(ql,1,(3,2,0,1)),D(qr,1,(3,2,0,1)),D(cl,1,(2,0,1)),D(cr,1,(2,0,1)),D(pt,0),D(o,1,(3,2,0,1)),D(lse,0)]
    sc=1/math.sqrt(576)
    A=(None,cutlass.Int32(split),)
    c=cute.compile(f,*T,None,cutlass.Int32(split),D(seqs,0),None,cutlass.Float32(sc),cutlass.Float32(1.0),make_fake_stream(),options="--opt-level 2")
    c(ql,qr,cl,cr,pt,o,lse,None,cutlass.Int32(split),seqs,None,cutlass.Float32(sc),cutlass.Float32(1.0),None)
    kv=cl.permute(2,0,1).reshape(seq,512).double(); kr=cr.permute(2,0,1).reshape(seq,64).double()
    q=ql.permute(3,2,0,1)[0].double(); r=qr.permute(3,2,0,1)[0].double()
    s=(q@kv.T+r@kr.T)*sc
    err(o.permute(3,2,0,1)[0],s.softmax(-1)@kv)
for a in sys.argv[1:]:
    print("case",a,flush=True); eval(a)
