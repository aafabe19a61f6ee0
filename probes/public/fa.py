from harness import *
import math
torch.manual_seed(0)
from flash_attn.cute.interface import _flash_attn_fwd
import flash_attn.cute.interface as I; I.to_cute_tensor = fake
def ref(q,k,v,causal,qv=None,scale=None):
    q,k,v=[x.double().transpose(1,2) for x in (q,k,v)]
    g=q.shape[1]//v.shape[1]; k=k.repeat_interleave(g,1); v=v.repeat_interleave(g,1)
    s=q@k.transpose(-1,-2)
    d=q.shape[-1]
    if qv is not None: s=s+qv.double().transpose(1,2)@v.transpose(-1,-2); d+=v.shape[-1]
    s=s/math.sqrt(d)
    if causal:
        L,S=s.shape[-2:]; s=s.masked_fill(~torch.ones(L,S,dtype=torch.bool).tril(S-L),-math.inf)
    return (s.softmax(-1)@v).transpose(1,2)
def go(B,L,S,H,Hk,D,Dv,causal,qv=False,**kw):
    print("case",B,L,S,H,Hk,D,Dv,causal,qv,kw)
    q=torch.randn(B,L,H,D).bfloat16(); k=torch.randn(B,S,Hk,D).bfloat16(); v=torch.randn(B,S,Hk,Dv).bfloat16(); k*=torch.linspace(4,.1,S).bfloat16()[None,:,None,None] if os.environ.get('RISING') else 1
    w=torch.randn(B,L,H,Dv).bfloat16() if qv else None
    out=torch.full((B,L,H,Dv),float("nan")).bfloat16()
    r=_flash_attn_fwd(q,k,v,qv=w,causal=causal,out=out,return_lse=True,**kw)
    err(out, ref(q,k,v,causal,w))
for a in sys.argv[1:]:
    {"d128":lambda:go(1,256,256,1,1,128,128,False),"d128c":lambda:go(1,200,300,2,1,128,128,True),"d64":lambda:go(1,128,256,1,1,64,64,True),
     "mla":lambda:go(1,1,256,128,1,64,512,False,True),"mla1":lambda:go(1,1,256,64,1,64,512,False,True,num_splits=2),"d256":lambda:go(1,128,128,1,1,256,256,False),
     "split":lambda:go(1,1,512,4,1,128,128,False,num_splits=2)}[a]()
