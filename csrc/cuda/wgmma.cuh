// One wrapper per warpgroup instruction of sm_90a: wgmma with weights from registers, its fences, its shared-memory
// descriptor. Elsewhere they trap; KBITQ_WGMMA says whether this pass of the compiler has them.
#pragma once

#include "cuda/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KBITQ_WGMMA 1
#else
#define KBITQ_WGMMA 0
#endif

namespace kbitq::tiled {

// The registers of an operand in and around the instruction are written before this, and not after it until a wait.
__device__ __forceinline__ void wgmma_fence() {
#if KBITQ_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if KBITQ_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
#if KBITQ_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}
// The descriptor of a 16 x N operand in shared memory: cores of 8 columns x 16 bytes (8 along k), those of the next 8
// columns right after, those of the other half of k `k_stride` bytes on. No swizzle.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, uint32_t k_stride) {
    constexpr uint64_t kColumnStride = 128;
    return static_cast<uint64_t>((shared & 0x3FFFF) >> 4) | static_cast<uint64_t>(k_stride >> 4) << 16 |
           kColumnStride >> 4 << 32;
}

// After a wait, before the sums are used: keeps the compiler from using them ahead of it.
template <int N>
__device__ __forceinline__ void wgmma_done(float (&d)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
    }
}

// Barriers in shared memory (8 bytes each), and the copy engine that arrives at them with the bytes it has brought.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
#if KBITQ_WGMMA
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
// Once by the thread that made the barriers, before anyone else uses them.
__device__ __forceinline__ void barrier_init_fence() {
#if KBITQ_WGMMA
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if KBITQ_WGMMA
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if KBITQ_WGMMA
    asm volatile(
        "{ .reg .pred done;\n"
        "again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}
// `bytes` (a multiple of 16) from global to shared memory; the barrier's phase ends when they are there.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
#if KBITQ_WGMMA
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
#endif
}

// d [64 x N] += a [64 x 16, 16 rows a warp, as for mma] b [16 x N]; asynchronous. d[n]: columns 8n .. 8n+7, as for mma.
template <typename T, int N>
struct Wgmma;

#define KBITQ_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define KBITQ_D2(i) KBITQ_D1(i), KBITQ_D1(i + 1)
#define KBITQ_D4(i) KBITQ_D2(i), KBITQ_D2(i + 2)
#define KBITQ_D8(i) KBITQ_D4(i), KBITQ_D4(i + 4)
#define KBITQ_D16(i) KBITQ_D8(i), KBITQ_D8(i + 8)
#define KBITQ_D32(i) KBITQ_D16(i), KBITQ_D16(i + 16)
#define KBITQ_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KBITQ_R16 KBITQ_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KBITQ_R32 \
    KBITQ_R16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KBITQ_R64                                                                                            \
    KBITQ_R32                                                                                                \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KBITQ_R128                                                                                             \
    KBITQ_R64                                                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "   \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "   \
    "%121, %122, %123, %124, %125, %126, %127"

#if KBITQ_WGMMA
#define KBITQ_WGMMA_ASM(n, type, registers, a_and_b, ...)                                                        \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type \
                 "." type " {" registers "}, " a_and_b ", add, 1, 1, 0; }"                                       \
                 : __VA_ARGS__                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#else
#define KBITQ_WGMMA_ASM(n, type, registers, a_and_b, ...) __trap()
#endif

#define KBITQ_WGMMA_SHAPE(n, registers, a_and_b, ...)                                                          \
    template <>                                                                                                \
    struct Wgmma<__nv_bfloat16, n> {                                                                           \
        static __device__ __forceinline__ void multiply(float (&d)[n / 8][4], const uint32_t* a, uint64_t b) { \
            KBITQ_WGMMA_ASM(n, "bf16", registers, a_and_b, __VA_ARGS__);                                       \
        }                                                                                                      \
    };                                                                                                         \
    template <>                                                                                                \
    struct Wgmma<__half, n> {                                                                                  \
        static __device__ __forceinline__ void multiply(float (&d)[n / 8][4], const uint32_t* a, uint64_t b) { \
            KBITQ_WGMMA_ASM(n, "f16", registers, a_and_b, __VA_ARGS__);                                        \
        }                                                                                                      \
    };

KBITQ_WGMMA_SHAPE(32, KBITQ_R16, "{%16, %17, %18, %19}, %20", KBITQ_D4(0))
KBITQ_WGMMA_SHAPE(64, KBITQ_R32, "{%32, %33, %34, %35}, %36", KBITQ_D8(0))
KBITQ_WGMMA_SHAPE(128, KBITQ_R64, "{%64, %65, %66, %67}, %68", KBITQ_D16(0))
KBITQ_WGMMA_SHAPE(256, KBITQ_R128, "{%128, %129, %130, %131}, %132", KBITQ_D32(0))

#undef KBITQ_WGMMA_SHAPE
#undef KBITQ_WGMMA_ASM
#undef KBITQ_R128
#undef KBITQ_R64
#undef KBITQ_R32
#undef KBITQ_R16
#undef KBITQ_R8
#undef KBITQ_D32
#undef KBITQ_D16
#undef KBITQ_D8
#undef KBITQ_D4
#undef KBITQ_D2
#undef KBITQ_D1

}  // namespace kbitq::tiled
