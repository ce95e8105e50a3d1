// GGUF blocks to values, vector: the codes that a reader left (which the compiler vectorises) are widened, scaled, and
// the minimum subtracted.
#include "ops/formats/gguf_reader.h"
#include "ops/formats/gguf_simd.h"

namespace kbitq::KBITQ_ISA {
namespace {

template <DType D>
inline void store_as(Stored<D>* out, F v) {
    if constexpr (D == DType::f32) store(out, v);
    if constexpr (D == DType::bf16) store(out, to_bf16(v));
    if constexpr (D == DType::f16) store(out, to_f16(v));
}

void decode(const GgufDecodeArgs& a, const GgufRun& run, int count, int64_t first) {
    with_element(a.dtype, [&](auto d) {
        Stored<d>* out = static_cast<Stored<d>*>(a.out) + first;
        for (int g = 0; g < count; ++g) {
            const F scale = splat(run.scale[g]), min = splat(run.has_min ? run.min[g] : 0.0f);
            for (int i = kGroup * g; i < kGroup * (g + 1); i += kLanes)
                store_as<d>(out + i, sub(mul(load_codes(run.q + i), scale), min));
        }
    });
}

}  // namespace
}  // namespace kbitq::KBITQ_ISA
