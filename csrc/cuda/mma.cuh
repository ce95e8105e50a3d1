// One wrapper per PTX instruction of the tiled kernels: mma, cp.async, byte permute, loads at a fixed shared address.
#pragma once

#include "cuda/element.cuh"
#include "cuda/ptx.cuh"

namespace kbitq::tiled {

// Arithmetic by activation type: on the two elements of a register, and the m16n8k16 instruction, for which a register
// holds two neighbours along k.
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
    static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(d)
            : "r"(a), "r"(b), "r"(0x80008000u));  // + -0: a product's sign is kept
        return d;
    }
    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3F803F80u), "r"(b));  // 1 a + b
        return d;
    }
    // d = a b + c with a 16x16 (rows), b 16x8, d and c 16x8 in float32.
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t* a, const uint32_t* b,
                                               const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
              "f"(c[3]));
    }
};

template <>
struct Pair<__half> {
    static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t* a, const uint32_t* b,
                                               const float (&c)[4]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
              "f"(c[3]));
    }
};

// A half of v in both halves. Written so, it costs nothing before a product of pairs: the instruction chooses the half.
__device__ __forceinline__ uint32_t low_twice(uint32_t v) {
    uint32_t d;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(d) : "r"(v));
    return d;
}
__device__ __forceinline__ uint32_t high_twice(uint32_t v) {
    uint32_t d;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(d) : "r"(v));
    return d;
}

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// 16 bytes of which the first `bytes` are read and the rest zeros.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Programmatic dependent launch (sm_90): let the next kernel start, wait for the results of the one before. No-ops
// elsewhere.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_dependency() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Clusters (sm_90): all threads of all CTAs wait for each other; a word of another CTA's shared memory, at the place
// that `own` has in this one's.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ float load_cluster(const float* own, int rank) {
    float v = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(v)
                 : "r"(shared_address(own)), "r"(rank)
                 : "memory");
#endif
    return v;
}

template <int Selector>
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(Selector));
    return d;
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// byte `Index` of a, times 256, plus c: where a sum of products does what a byte permute could, on other units.
template <int Index>
__device__ __forceinline__ uint32_t byte_times_256(uint32_t a, uint32_t c) {
    uint32_t d;
    if constexpr (Index < 2) {
        asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(0x100u << (16 * Index)), "r"(a), "r"(c));
    } else {
        asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(0x100u << (16 * (Index - 2))), "r"(a), "r"(c));
    }
    return d;
}
__device__ __forceinline__ uint32_t byte_times_256(uint32_t a, int index, uint32_t c) {  // index: known when compiled
    return index == 0   ? byte_times_256<0>(a, c)
           : index == 1 ? byte_times_256<1>(a, c)
           : index == 2 ? byte_times_256<2>(a, c)
                        : byte_times_256<3>(a, c);
}

// (a & mask) | c in one instruction.
__device__ __forceinline__ uint32_t select_or(uint32_t a, uint32_t mask, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(c));
    return d;
}

// (a & mask) | (b & ~mask) in one instruction.
__device__ __forceinline__ uint32_t select(uint32_t a, uint32_t b, uint32_t mask) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}

// As load_shared (ptx.cuh), 8 bytes.
template <uint32_t offset>
__device__ __forceinline__ void load_shared_64(uint32_t address, uint32_t& low, uint32_t& high) {
    asm("ld.shared.v2.b32 {%0,%1}, [%2+%3];" : "=r"(low), "=r"(high) : "r"(address), "n"(offset));
}
// Loads of what cp.async has brought, free to be ordered among each other. The address must come from fresh() after the
// wait: then they are not ahead of it.
__device__ __forceinline__ uint4 load_record_128(uint32_t address) {
    uint4 v;
    asm("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
__device__ __forceinline__ uint32_t load_record_32(uint32_t address) {
    uint32_t v;
    asm("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ void load_record_64(uint32_t address, uint32_t& low, uint32_t& high) {
    asm("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(low), "=r"(high) : "r"(address));
}
__device__ __forceinline__ uint32_t fresh(uint32_t address) {
    asm volatile("" : "+r"(address)::"memory");
    return address;
}
__device__ __forceinline__ void store_shared_128(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

}  // namespace kbitq::tiled
