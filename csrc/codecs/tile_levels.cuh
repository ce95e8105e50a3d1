// What the tiled kernels do with a codebook, whatever the codec: its levels are normalised to a largest magnitude in
// [1, 2), or what PlacedScale says, so that they fit the type of the activations; the power of two that was taken out
// is multiplied back into the sums at the very end.
#pragma once

#include "codecs/scale_e4m4.cuh"
#include "cuda/mma.cuh"

namespace kbitq::tiled {

// A level for each of the first `Count` lanes. The barrier keeps the load ahead of the copies of weights that follow
// it: the table waits for it, and behind those it would come last.
template <int Count>
__device__ __forceinline__ float load_level(const float* codebook) {
    const int lane = threadIdx.x % 32;
    const float level = lane < Count ? __ldcg(codebook + lane) : 0.0f;
    __syncwarp();
    return level;
}

// Levels `lane` and `lane` + 32 of 64.
__device__ __forceinline__ float2 load_two_levels(const float* codebook) {
    const int lane = threadIdx.x % 32;
    const float2 levels = make_float2(__ldcg(codebook + lane), __ldcg(codebook + 32 + lane));
    __syncwarp();
    return levels;
}

// The exponent e with 2^e <= largest magnitude < 2^(e+1) of all lanes' levels. 0 if all are zero.
__device__ __forceinline__ int codebook_exponent(float level) {
    uint32_t largest = __float_as_uint(level) & 0x7FFFFFFFu;
#if __CUDA_ARCH__ >= 800
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
#endif
    return largest < 0x00800000u ? 0 : static_cast<int>(largest >> 23) - 127;
}

// v * 2^e for e in -254..254, as a product with two floats that are normal.
__device__ __forceinline__ float multiply_exp2(float v, int e) {
    const int half = e / 2;
    return v * __int_as_float((127 + half) << 23) * __int_as_float((127 + e - half) << 23);
}

// What a lane keeps of the codebook: the normalised level of index `lane`, as the activations' type, in both halves of
// a register. `taken`: the exponent of the power of two that was taken out. ScaledWeights: the kernel scales weights
// before it multiplies them (scale_weights), else the sums.
template <typename T, int Count>
__device__ __forceinline__ uint32_t normalised_level(float level, int& taken, int lift) {
    taken = codebook_exponent(threadIdx.x % 32 < Count ? level : 0.0f) - lift;
    const float v = multiply_exp2(level, -taken);
    return Element<T>::round_pair(v, v);
}

// The same of 64 levels: `lane` in the low half, `lane` + 32 in the high one.
template <typename T, int Count>
__device__ __forceinline__ uint32_t normalised_level(float2 levels, int& taken, int lift) {
    static_assert(Count == 64);
    taken = codebook_exponent(fmaxf(fabsf(levels.x), fabsf(levels.y))) - lift;
    return Element<T>::round_pair(multiply_exp2(levels.x, -taken), multiply_exp2(levels.y, -taken));
}

// Sums times 2^this are the result (multiply_exp2).
template <typename T, bool ScaledWeights>
__device__ __forceinline__ int sums_exponent(int taken) {
    return ScaledWeights ? taken - PlacedScale<T>::kExponent : taken;
}

}  // namespace kbitq::tiled
