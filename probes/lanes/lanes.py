"""On the GPU host: lanes of jobs side by side. lanes.py TOTAL LANE... ; LANE = GPUS=NAME-N:LIMIT,NAME-N:LIMIT...
A job is /tmp/jobs/NAME/job-N.sh, run in /tmp/jobs/NAME/tree (or the repository root for NAME main) with its src first."""
import os, subprocess, sys, threading, time
start = time.time(); total = float(sys.argv[1]); out = "/tmp/out"; os.makedirs(out, exist_ok=True)
root = os.getcwd(); lock = threading.Lock()
def lane(spec):
    gpus, jobs = spec.split("=")
    for item in jobs.split(","):
        name, limit = item.split(":")
        left = total - (time.time() - start)
        if left < 8:
            with lock: print(f"{time.time()-start:6.1f} {item} SKIPPED", flush=True)
            continue
        limit = min(float(limit), left - 4)
        who, number = name.rsplit("-", 1)
        home = f"/tmp/jobs/{who}"; tree = f"{home}/tree"
        if not os.path.isdir(tree): tree = root
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=gpus, HOME_JOB=home, JOB_OUT=f"{out}/{name}.d", PYTHONUNBUFFERED="1")
        env["PYTHONPATH"] = f"{tree}/src:{tree}/scripts:" + env.get("PYTHONPATH", "")
        env.setdefault("WARPSPEC_CACHE_DIR", "/tmp/kernels")
        os.makedirs(env["JOB_OUT"], exist_ok=True)
        begun = time.time()
        with open(f"{out}/{name}.log", "w") as log:
            done = subprocess.run(["timeout", "-k", "3", str(limit), "bash", f"{home}/job-{number}.sh"], cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT)
            log.write(f"\n[{name} gpu {gpus} rc {done.returncode} {time.time()-begun:.1f} s of {limit:.0f}]\n")
        with lock: print(f"{time.time()-start:6.1f} {name} gpu {gpus} rc {done.returncode} {time.time()-begun:.1f} s", flush=True)
threads = [threading.Thread(target=lane, args=(s,)) for s in sys.argv[2:]]
[t.start() for t in threads]; [t.join() for t in threads]
target = os.environ.get("OUT", "/tmp")
subprocess.run(f"rm -rf {target}/all.tgz; cd {out} && tar czf {target}/all.tgz . && ls -la {target}/all.tgz", shell=True)
