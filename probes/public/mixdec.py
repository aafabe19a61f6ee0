from gemms import *
import warpspec.sim as S
v=sys.argv[1]
m=example(K+f"attention/mixed_input_fmha/mixed_input_fmha_decode{v}.py")
import io
for seed in range(8):
    os.environ["PUB_SEED"]=str(seed)
    buf=io.StringIO()
    try:
        with contextlib.redirect_stdout(buf): m.run(1,512,8,1,128,128,1,BF,cutlass.Int8,BF,F32)
        print(seed,"right",flush=True)
    except Exception as e: print(seed,type(e).__name__, str(e)[:400].replace("\n"," | "),flush=True)
