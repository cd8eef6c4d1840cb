"""Scratch: where does in-situ Adam lose against the benchmark?"""
import ctypes, time, statistics, torch, os, sys, subprocess
from superoffload import kernels
from superoffload.kernels.undo import UndoRecord, adam_record, adam_undo, adam_undo_redo
print(open('/sys/kernel/mm/transparent_hugepage/enabled').read().strip()); 
print(subprocess.run("lscpu | grep -i -E 'numa|socket|thread|model name|L3|L2'",shell=True,capture_output=True,text=True).stdout)
print("affinity", sorted(os.sched_getaffinity(0)))
N=16777216; B=24
libc=ctypes.CDLL(None,use_errno=True)
def alloc(n,dt,huge,pin=False):
    t=torch.empty(n,dtype=dt)
    size=t.numel()*t.element_size()
    if huge:
        a=(t.data_ptr()+ (1<<21)-1)&~((1<<21)-1); e=(t.data_ptr()+size)&~((1<<21)-1)
        r=libc.madvise(ctypes.c_void_p(a),ctypes.c_size_t(e-a),14)
        if r: print("madvise",ctypes.get_errno())
    if pin: 
        t.zero_(); c=torch.cuda.cudart().cudaHostRegister(t.data_ptr(),size,0); assert int(c)==0,c
    return t
def fill(t, s):
    if t.dtype==torch.float32: t.uniform_(-s,s)
    else: t.copy_((torch.rand(1<<20)*2*s-s).to(t.dtype).repeat(t.numel()//(1<<20)))
for huge in (0,1):
  for pin in (0,1):
    if pin and not torch.cuda.is_available(): continue
    p,m,v=(alloc(N*B,torch.float32,huge) for _ in range(3))
    g,w=(alloc(N*B,torch.bfloat16,huge,pin) for _ in range(2))
    fill(p,.02); fill(m,1e-4); fill(v,1e-7); v.abs_(); fill(g,1e-3)
    w.copy_(p)
    r=UndoRecord(N)
    out=[]
    for th in (16,14,12,8):
        for name,f in (("plain",lambda sl: kernels.adam_step(p[sl],m[sl],v[sl],g[sl],lr=1e-4,weight_decay=.01,step=11,grad_scale=.7,out16=w[sl],threads=th)),
                       ("record",lambda sl: adam_record(p[sl],m[sl],v[sl],g[sl],r,lr=1e-4,weight_decay=.01,step=11,grad_scale=.7,out16=w[sl],threads=th))):
            for rep in range(2):
                ts=[]
                for b in range(B):
                    sl=slice(b*N,(b+1)*N); t=time.perf_counter(); f(sl); ts.append(time.perf_counter()-t)
            out.append(f"{name}@{th}: {1e3*statistics.median(ts):.2f}ms")
    print("huge",huge,"pin",pin,"  ".join(out),flush=True)
    if pin:
        for t in (g,w): torch.cuda.cudart().cudaHostUnregister(t.data_ptr())
    del p,m,v,g,w
