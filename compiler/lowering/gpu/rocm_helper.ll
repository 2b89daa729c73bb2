; Linked into every ROCm module. TVM lowers a barrier to a bare s_barrier: where the hardware does not wait for outstanding
; stores to LDS by itself (gfx90a and later), a thread would read what has not arrived. The fences make LLVM emit the waits.
target triple = "amdgcn-amd-amdhsa"

define hidden void @prefuse_block_barrier() #0 {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  ret void
}

; A barrier of all blocks of a grid, which run at once (a cooperative launch), by a counter as in cuda_helper.cuh. Every wavefront
; fences for itself: stores of one are not waited for by the fence of another.
define hidden void @prefuse_grid_barrier(ptr addrspace(1) %counter, i32 %blocks) #0 {
entry:
  fence syncscope("agent") release
  call void @llvm.amdgcn.s.barrier()
  %thread = call i32 @llvm.amdgcn.workitem.id.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %arrive, label %end
arrive:
  %block = call i32 @llvm.amdgcn.workgroup.id.x()
  %is_other = icmp ne i32 %block, 0
  %rest = sub i32 -2147483647, %blocks
  %share = select i1 %is_other, i32 1, i32 %rest
  %before = atomicrmw add ptr addrspace(1) %counter, i32 %share syncscope("agent") monotonic
  br label %look
look:
  %seen = load atomic i32, ptr addrspace(1) %counter syncscope("agent") monotonic, align 4
  %changed = xor i32 %seen, %before
  %waits = icmp sgt i32 %changed, -1
  br i1 %waits, label %sleep, label %end
sleep:
  call void @llvm.amdgcn.s.sleep(i32 1)
  br label %look
end:
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("agent") acquire
  ret void
}

; Whether two arrays are one: TIR cannot compare pointers.
define hidden i32 @prefuse_same_address(ptr addrspace(1) %a, ptr addrspace(1) %b) #1 {
  %is_same = icmp eq ptr addrspace(1) %a, %b
  %result = zext i1 %is_same to i32
  ret i32 %result
}

declare void @llvm.amdgcn.s.barrier()
declare i32 @llvm.amdgcn.workitem.id.x()
declare i32 @llvm.amdgcn.workgroup.id.x()
declare void @llvm.amdgcn.s.sleep(i32 immarg)

attributes #0 = { alwaysinline convergent nounwind }
attributes #1 = { alwaysinline nounwind memory(none) }

; Code object version 5, which linkers since lld 15 and drivers since ROCm 5.5 know.
!llvm.module.flags = !{!0}
!0 = !{i32 1, !"amdhsa_code_object_version", i32 500}
