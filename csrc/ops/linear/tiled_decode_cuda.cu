// Tiles to a matrix, for the library's matmul. A warp takes a record: a lane has 8 neighbours of rows g and g + 8 in
// each block, so it makes 16 bytes of output at a time. Levels come from a table in which every lane has its own bank.
#include "codecs/planes_tiles.cuh"
#include "cuda/launch.cuh"
#include "format/scale_e4m4.h"
#include "ops/linear/tiled.h"

namespace kbitq {
namespace {

constexpr int kWarps = 8;
constexpr int kEntryBit = 7;  // a table entry is 32 lanes x 4 bytes

// The word and place of weight `odd` of pair p in the K words of a subtile (with the gathered pairs of K = 3 as word
// 3).
template <int K>
__device__ __forceinline__ uint32_t entry_address(const uint32_t* w, int p, int odd, uint32_t own) {
    const int word = K == 2 ? p / 8 : K == 5 ? p / 3 : p / 4;
    const int shift = K == 2   ? 8 * (p % 8 / 2) + 4 * odd + 2 * (p % 2)
                      : K == 5 ? p == 15 ? kEntryBit + 5 * odd : (7 + 10 * (p % 3) + 5 * odd) % 32
                               : 8 * (p % 4) + 4 * odd;
    const uint32_t turned = __funnelshift_r(w[word], w[word], (shift - kEntryBit + 32) % 32);
    return (turned & (((1u << K) - 1) << kEntryBit)) | own;
}

__device__ __forceinline__ uint32_t pack_two(float a, float b, __nv_bfloat16) {
    return matmul::Pair<__nv_bfloat16>::pack(a, b);
}
__device__ __forceinline__ uint32_t pack_two(float a, float b, __half) { return matmul::Pair<__half>::pack(a, b); }

template <typename T>
__device__ __forceinline__ void store_eight(const float (&v)[8], T* out, int64_t left, bool vector) {
    if (vector && left >= 8) {
        if constexpr (sizeof(T) == 4) {
            reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *reinterpret_cast<uint4*>(out) = make_uint4(pack_two(v[0], v[1], T()), pack_two(v[2], v[3], T()),
                                                        pack_two(v[4], v[5], T()), pack_two(v[6], v[7], T()));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < left) out[i] = T(v[i]);
    }
}

template <typename T, int K>
__global__ __launch_bounds__(kWarps * 32) void decode_kernel(const DecodeTilesArgs args, int64_t records, bool vector) {
    __shared__ __align__(4096) float table[32 << K];
    for (int i = threadIdx.x; i < 32 << K; i += blockDim.x) table[i] = args.packed.codebook[i / 32];
    __syncthreads();
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t chunks = tile_chunks(args.packed.cols);
    const char* const base = reinterpret_cast<const char*>(table);
    for (int64_t record = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; record < records;
         record += static_cast<int64_t>(gridDim.x) * kWarps) {
        const uint32_t* from = args.packed.words + record * tile_words(K);
        uint32_t words[4 * K];
#pragma unroll
        for (int j = 0; j < K; ++j)
            *reinterpret_cast<uint4*>(words + 4 * j) = reinterpret_cast<const uint4*>(from)[j * 32 + lane];
        const uint4 scales = reinterpret_cast<const uint4*>(from + tile_index_words(K))[g];
        const uint32_t scale_words[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            uint32_t w[K + 1];
#pragma unroll
            for (int i = 0; i < K; ++i) w[i] = words[s * K + i];
            if constexpr (K == 3) w[3] = matmul::last_pairs(w);
            if constexpr (K == 5) {
                w[5] = 0;
#pragma unroll
                for (int i = 0; i < 5; ++i) w[5] |= (w[i] >> 5 & 3u) << (2 * i + kEntryBit);
            }
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int block = part / 2, half = part % 2;
                const int64_t row = record / chunks * kTileRows + g + 8 * half;
                const int64_t col = record % chunks * kTileCols + (2 * s + block) * kBlock + t * 8;
                const float scale = decode_e4m4(scale_words[s] >> (16 * half + 8 * block) & 0xFFu);
                float v[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const int p = block * 8 + e / 4 * 4 + half + 2 * (e % 4 / 2);
                    v[e] = *reinterpret_cast<const float*>(base + entry_address<K>(w, p, e % 2, lane * 4)) * scale;
                }
                if (row < args.packed.rows)
                    store_eight(v, static_cast<T*>(args.out) + row * args.packed.cols + col, args.packed.cols - col,
                                vector);
            }
        }
    }
}

template <typename T>
void launch_decode(const DecodeTilesArgs& args, int device, cudaStream_t stream) {
    const int64_t records = row_tiles(args.packed.rows) * tile_chunks(args.packed.cols);
    if (records == 0) return;
    const unsigned grid = grid_for(divide_up(records, kWarps), device, 8);
    const bool vector = args.packed.cols % 8 == 0 && all_aligned16({args.out});
    switch (args.packed.k) {
        case 2: decode_kernel<T, 2><<<grid, kWarps * 32, 0, stream>>>(args, records, vector); break;
        case 3: decode_kernel<T, 3><<<grid, kWarps * 32, 0, stream>>>(args, records, vector); break;
        case 4: decode_kernel<T, 4><<<grid, kWarps * 32, 0, stream>>>(args, records, vector); break;
        case 5: decode_kernel<T, 5><<<grid, kWarps * 32, 0, stream>>>(args, records, vector); break;
        default: throw std::runtime_error("decode_tiles: tiles have 2 to 5 bits");
    }
    check_cuda(cudaGetLastError(), "decode_tiles", matrix_shape(args.packed.rows, args.packed.cols));
}

}  // namespace

void decode_tiles_cuda(const DecodeTilesArgs& args, int device, void* stream) {
    const DeviceGuard guard(device);
    const auto on = static_cast<cudaStream_t>(stream);
    if (args.dtype == DType::f32) return launch_decode<float>(args, device, on);
    if (args.dtype == DType::f16) return launch_decode<__half>(args, device, on);
    launch_decode<__nv_bfloat16>(args, device, on);
}

}  // namespace kbitq
