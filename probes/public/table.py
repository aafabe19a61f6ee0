import re, collections, os
text = open("/tmp/public/alld.log").read()
for extra in ("alld2.log", "fb.log"):
    p = "/tmp/public/" + extra
    if os.path.exists(p): text += "\n=== " + extra + "\n" + open(p).read()
text += "\n=== many\n" + open("/tmp/public/alld_half.log").read().split("=== many")[1].split("=== pair")[0]
ORDER = ["wrong parity", "expect_tx bytes", "no commit", "missing cluster barrier", "TMEM not freed", "TMA does not wait for its stage",
 "MMA does not wait for TMA", "epilogue does not wait for the accumulator", "try_wait not retried", "MMA does not wait for a free accumulator",
 "no bar.sync before a TMA store", "no wait_group.read before reuse", "no bar.sync behind wait_group.read", "no wait::st", "no wait::ld",
 "no fence.proxy.async", "no fence.mbarrier_init", "no fence.proxy.tensormap", "two CTAs write one place", "reduce-add turned into a store", "TMA store past the end"]
rows, seen = {}, set()
kernel = None
for line in text.splitlines():
    if line.startswith("==="): kernel = line[4:]; continue
    m = re.match(r"  (.+?) \((.*), \d+\): plain \[.*?\] (\S+) \| order \[.*?\] (\S+)", line)
    if not m: continue
    row, what, plain, order = m.groups()
    if (kernel, row, what) in seen: continue
    seen.add((kernel, row, what))
    r = rows.setdefault(row, [0]*7)
    r[0] += 1
    r[1] += plain.count("D"); r[2] += plain.count("w"); r[3] += plain.count("-") + plain.count("!")
    r[4] += bool(set(plain) & set("Dw"))
    r[5] += len(order) - order.count("-"); r[6] += bool(set(order) - {"-"})
    if not (set(plain) & set("Dw") or set(order) - {"-"}): print("NONE", kernel, row, what)
for row in ORDER:
    if row in rows:
        n, d, w, u, p, o, oo = rows[row]
        print(f"| {row} | {n} | {d}, {w}, {u} | {p} | {o} of {8*n} | {oo} |")
    else: print("| MISSING", row)
