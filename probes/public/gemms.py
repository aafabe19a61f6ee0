from shim import *
B="blackwell/"; K=B+"kernel/"
F16,F32,BF=cutlass.Float16,cutlass.Float32,cutlass.BFloat16
def tut(n, mnk=(128,256,128)): example(B+f"tutorial/tutorial_gemm/fp16_gemm_{n}.py").run_dense_gemm(mnk, 1e-3)
def persistent(mnkl=(128,256,128,1), tile=(128,64), cl=(1,1), two=False, tma=True):
    example(K+"dense_gemm/dense_gemm_persistent.py").run(mnkl,F16,F16,F32,"k","k","n",tile,cl,two,tma)
def grouped(sizes=((128,128,128,1),(64,192,64,1)), tile=(128,64), cl=(1,1), two=False, mode="SMEM"):
    m=example(K+"grouped_gemm/grouped_gemm.py"); import cutlass.utils as u
    m.run(len(sizes),list(sizes),True,F16,F16,F32,"k","k","n",tile,cl,two,getattr(u.TensorMapUpdateMode,mode),1e-1,0,0,False)
def masked(mnkl=(128,128,256,2), tile=(128,128), cl=(1,1), two=False, fixed=False, v=""):
    import random; random.seed(3)
    example(K+f"blockwise_gemm/masked_grouped_gemm{v}.py").run(mnkl,cutlass.Float8E4M3FN,BF,F32,F32,"k","k","n",tile,cl,two,1e-1,0,0,fixed_m=fixed)
def mixdec(seq=256,hq=8,hk=1,d=128,kv=cutlass.Int8,splits=1,**k):
    example(K+"attention/mixed_input_fmha/mixed_input_fmha_decode.py").run(1,seq,hq,hk,d,d,splits,BF,kv,BF,F32,**k)
if __name__=="__main__":
    for a in sys.argv[1:]:
        print("case",a,flush=True)
        try: eval(a)
        except Exception as e:
            import traceback; traceback.print_exc(limit=-4)
