from harness import *
import math
torch.manual_seed(0)
from flash_attn.cute.interface import _flash_attn_fwd, _flash_attn_bwd
import flash_attn.cute.interface as I; I.to_cute_tensor = fake
def go(L,S,H,Hk,D,causal,**kw):
    q=torch.randn(1,L,H,D).bfloat16(); k=torch.randn(1,S,Hk,D).bfloat16(); v=torch.randn(1,S,Hk,D).bfloat16()
    do=torch.randn(1,L,H,D).bfloat16()
    Q,K,V=[x.double().transpose(1,2).requires_grad_() for x in (q,k,v)]
    s=Q@K.repeat_interleave(H//Hk,1).transpose(-1,-2)/math.sqrt(D)
    if causal: s=s.masked_fill(~torch.ones(L,S,dtype=torch.bool).tril(S-L),-math.inf)
    out=s.softmax(-1)@V.repeat_interleave(H//Hk,1)
    out.backward(do.double().transpose(1,2))
    lse=s.logsumexp(-1).float().detach().contiguous(); o=out.detach().transpose(1,2).bfloat16().contiguous()
    r=_flash_attn_bwd(q,k,v,o,do,lse,causal=causal,**kw)
    for name,x,y in zip("dq dk dv".split(),r,(Q,K,V)):
        print(name,end=" "); err(x,y.grad.transpose(1,2))
for a in sys.argv[1:]:
    print("case",a,flush=True); eval(a)
