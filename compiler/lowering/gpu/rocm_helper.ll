; Linked into every ROCm module. TVM lowers a barrier to a bare s_barrier: where the hardware does not wait for outstanding
; stores to LDS by itself (gfx90a and later), a thread would read what has not arrived. The fences make LLVM emit the waits.
target triple = "amdgcn-amd-amdhsa"

define hidden void @prefuse_block_barrier() #0 {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  ret void
}

declare void @llvm.amdgcn.s.barrier()

attributes #0 = { alwaysinline convergent nounwind }

; Code object version 5, which linkers since lld 15 and drivers since ROCm 5.5 know.
!llvm.module.flags = !{!0}
!0 = !{i32 1, !"amdhsa_code_object_version", i32 500}
