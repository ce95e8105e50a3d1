// GGUF blocks to values, vector: sixteen codes are read (formats/gguf_blocks.h, which the compiler vectorises),
// widened, scaled, and the minimum subtracted.
#include "ops/formats/gguf_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <DType D>
inline void store_as(Stored<D>* out, F v) {
    if constexpr (D == DType::f32) store(out, v);
    if constexpr (D == DType::bf16) store(out, to_bf16(v));
    if constexpr (D == DType::f16) store(out, to_f16(v));
}

template <typename Block, DType D>
inline void decode_blocks(const uint8_t* blocks, int64_t count, Stored<D>* out) {
    for (int64_t block = 0; block < count; ++block, blocks += Block::kBytes, out += Block::kValues) {
        for_groups<Block>([&](auto g) __attribute__((always_inline)) {
            GgufGroup group;
            Block::group(group, blocks, g);
            for (int i = 0; i < kGroup; i += kLanes) {
                F v = mul(load_codes(group.q + i), splat(group.scale));
                if constexpr (Block::kMin) v = sub(v, splat(group.min));
                store_as<D>(out + kGroup * g + i, v);
            }
        });
    }
}

void decode(const GgufDecodeArgs& a, int64_t begin, int64_t end) {
    with_gguf_block(a.type, [&](auto type) {
        using Block = decltype(type);
        with_element(a.dtype, [&](auto d) {
            decode_blocks<Block, d>(a.blocks + begin * Block::kBytes, end - begin,
                                    static_cast<Stored<d>*>(a.out) + begin * Block::kValues);
        });
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
