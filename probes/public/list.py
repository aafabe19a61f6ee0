"""list.py SCRIPT CASES: the instructions of the recorded launches that order memory, by source line."""
import sys, re, collections, runpy
sys.path.insert(0, "/work/wt/public/scripts")
import harness
from shared import mutants
def visit(launch):
    p = launch.program
    print("KERNEL", p.name, launch.options.get("grid"))
    n = collections.Counter(); first = {}
    for ins in p.kernel.instrs:
        if mutants.group_of(ins) or ins.opcode.startswith(("cp.", "tcgen05", "red", "atom", "mbarrier")):
            k = ((ins.source or "").split("/")[-1], ins.opcode); n[k] += 1; first.setdefault(k, ins.line)
    for k, c in n.items(): print("  ", k[0], k[1], "x", c, "line", first[k])
with mutants.recorded(visit):
    script = sys.argv.pop(1)
    sys.argv[0] = script
    try: runpy.run_path(script, run_name="__main__")
    except BaseException as e: print(type(e), str(e)[:300])
