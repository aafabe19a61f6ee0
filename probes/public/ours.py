import harness, sys
import mutate
for a in sys.argv[1:]: mutate.KERNELS[a]()
