# The CUDA code as a static library, kbitq_cuda. It does not know Python, and nvcc takes minutes: with
# KBITQ_CUDA_CACHE=FOLDER it is compiled once for these sources, compilers and architectures, and every other
# interpreter's build finds it there.
set(KBITQ_CUDA_CACHE "" CACHE PATH "Where builds for several interpreters share the compiled CUDA code")

set(KBITQ_CUDA_ARCHIVE "")
if(KBITQ_CUDA_CACHE)
  file(GLOB_RECURSE inputs LIST_DIRECTORIES false CONFIGURE_DEPENDS *.h *.cuh *.cu *.cmake CMakeLists.txt)
  set(text "${CMAKE_CUDA_COMPILER_VERSION} ${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_ARCHITECTURES}")
  string(APPEND text " ${CMAKE_CXX_COMPILER_VERSION} ${CMAKE_SYSTEM_PROCESSOR} ${CMAKE_BUILD_TYPE}")
  foreach(input ${inputs})
    file(SHA256 ${input} digest)
    string(APPEND text " ${digest}")
  endforeach()
  string(SHA256 key "${text}")
  string(SUBSTRING ${key} 0 16 key)
  set(KBITQ_CUDA_ARCHIVE ${KBITQ_CUDA_CACHE}/libkbitq_cuda-${key}.a)
endif()

if(KBITQ_CUDA_ARCHIVE AND EXISTS ${KBITQ_CUDA_ARCHIVE})
  message(STATUS "kbitq: CUDA code compiled before: ${KBITQ_CUDA_ARCHIVE}")
  find_package(CUDAToolkit REQUIRED)
  add_library(kbitq_cuda STATIC IMPORTED)
  set_target_properties(kbitq_cuda PROPERTIES IMPORTED_LOCATION ${KBITQ_CUDA_ARCHIVE})
  target_link_libraries(kbitq_cuda INTERFACE CUDA::cudart_static)
else()
  file(GLOB KBITQ_CUDA_SOURCES CONFIGURE_DEPENDS ops/*/*_cuda.cu cuda/*.cu)
  add_library(kbitq_cuda STATIC ${KBITQ_CUDA_SOURCES})
  target_include_directories(kbitq_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(kbitq_cuda PRIVATE KBITQ_HAS_CUDA=1)
  # The codec rounds every operation on its own on the GPU too; the matmul sources want FMA. (nvcc's other defaults are
  # what the format needs: no flush to zero, IEEE division.)
  set_source_files_properties(ops/codec/scan_cuda.cu ops/codec/quantize_cuda.cu ops/codec/quantize_trellis_cuda.cu
                              ops/codec/dequantize_cuda.cu ops/codec/stats_cuda.cu
                              PROPERTIES COMPILE_OPTIONS "-fmad=false")
  if("${CMAKE_CUDA_ARCHITECTURES}" MATCHES "90a")
    set_source_files_properties(ops/linear/tiled_sm90_cuda.cu PROPERTIES COMPILE_DEFINITIONS KBITQ_SM90A=1)
  endif()
  set_target_properties(kbitq_cuda PROPERTIES CUDA_STANDARD 17 CUDA_RUNTIME_LIBRARY Static POSITION_INDEPENDENT_CODE ON
                                              CUDA_VISIBILITY_PRESET hidden INTERPROCEDURAL_OPTIMIZATION OFF)
  if(KBITQ_CUDA_ARCHIVE)
    # Renamed when it is whole: a build beside this one may look for it at any moment.
    add_custom_command(TARGET kbitq_cuda POST_BUILD
                       COMMAND ${CMAKE_COMMAND} -E make_directory ${KBITQ_CUDA_CACHE}
                       COMMAND ${CMAKE_COMMAND} -E copy $<TARGET_FILE:kbitq_cuda> ${KBITQ_CUDA_ARCHIVE}.new
                       COMMAND ${CMAKE_COMMAND} -E rename ${KBITQ_CUDA_ARCHIVE}.new ${KBITQ_CUDA_ARCHIVE}
                       COMMENT "kept for other interpreters: ${KBITQ_CUDA_ARCHIVE}")
  endif()
endif()
