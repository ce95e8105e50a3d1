# One object per instruction set, each compiled with its own flags and kept in its own namespace (the linker would
# otherwise merge inline functions compiled for different sets into one copy). Chosen at run time: cpu/simd_level.h.
include(CheckCXXCompilerFlag)

function(kbitq_simd_sources target)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    return()
  endif()
  target_sources(${target} PRIVATE ops/codec/kernels_avx2.cpp ops/codec/kernels_avx512.cpp
                                   ops/formats/code_stream_avx2.cpp ops/formats/code_stream_avx512.cpp
                                   ops/formats/gguf_decode_avx2.cpp ops/formats/gguf_decode_avx512.cpp
                                   ops/formats/gguf_linear_avx2.cpp ops/formats/gguf_linear_avx512.cpp
                                   ops/linear/linear_avx2.cpp ops/linear/linear_avx512.cpp
                                   ops/nf4/nf4_avx2.cpp ops/nf4/nf4_avx512.cpp)
  set_source_files_properties(ops/codec/kernels_avx2.cpp ops/formats/code_stream_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c;-mbmi2")
  set_source_files_properties(ops/codec/kernels_avx512.cpp ops/formats/code_stream_avx512.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mf16c;-mbmi2")
  set_source_files_properties(ops/linear/linear_avx2.cpp ops/nf4/nf4_avx2.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mbmi2")
  set_source_files_properties(ops/linear/linear_avx512.cpp ops/nf4/nf4_avx512.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mfma;-mf16c;-mbmi2")
  set_source_files_properties(ops/formats/gguf_decode_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c;-mbmi2")
  set_source_files_properties(ops/formats/gguf_decode_avx512.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mf16c;-mbmi2")
  set_source_files_properties(ops/formats/gguf_linear_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mbmi2")
  set_source_files_properties(ops/formats/gguf_linear_avx512.cpp PROPERTIES
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mfma;-mf16c;-mbmi2")
  check_cxx_compiler_flag(-mavx512bf16 KBITQ_COMPILES_AVX512_BF16)  # since GCC 10
  if(KBITQ_COMPILES_AVX512_BF16)
    target_sources(${target} PRIVATE ops/linear/linear_bf16.cpp ops/nf4/nf4_bf16.cpp)
    set_source_files_properties(ops/linear/linear_bf16.cpp ops/nf4/nf4_bf16.cpp PROPERTIES
                                COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mfma;-mf16c;-mbmi2")
    target_compile_definitions(${target} PRIVATE KBITQ_AVX512_BF16=1)
  endif()
  check_cxx_compiler_flag("-mamx-tile -mamx-bf16" KBITQ_COMPILES_AMX)  # since GCC 11
  if(KBITQ_COMPILES_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_sources(${target} PRIVATE ops/nf4/nf4_amx.cpp)
    set_source_files_properties(ops/nf4/nf4_amx.cpp PROPERTIES
                                COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mamx-tile;-mamx-bf16;-mfma;-mf16c;-mbmi2")
    target_compile_definitions(${target} PRIVATE KBITQ_AMX=1)
  endif()
  target_compile_definitions(${target} PRIVATE KBITQ_X86=1)
endfunction()
