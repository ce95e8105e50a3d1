# One object per instruction set, each compiled with its own flags and kept in its own namespace (the linker would
# otherwise merge inline functions compiled for different sets into one copy). Chosen at run time: cpu/simd_level.h.
function(kbitq_simd_sources target)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    return()
  endif()
  target_sources(${target} PRIVATE cpu/kernels_avx2.cpp cpu/kernels_avx512.cpp
                                   cpu/matmul_avx2.cpp cpu/matmul_avx512.cpp cpu/matmul_avx512bf16.cpp)
  set_source_files_properties(cpu/kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c;-mbmi2")
  set_source_files_properties(cpu/kernels_avx512.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mf16c;-mbmi2")
  set_source_files_properties(cpu/matmul_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mbmi2")
  set_source_files_properties(cpu/matmul_avx512.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mfma;-mf16c;-mbmi2")
  set_source_files_properties(cpu/matmul_avx512bf16.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mfma;-mf16c;-mbmi2")
  target_compile_definitions(${target} PRIVATE KBITQ_X86=1)
endfunction()
