// The readers of all block types, for one instruction set: a source of its own namespace includes this.
#pragma once

#include <cstring>
#include "ops/formats/gguf_groups.h"
#include "ops/formats/gguf_kernels.h"

namespace kbitq {
namespace {

template <typename Block>
void read_blocks(const uint8_t* __restrict blocks, int count, GgufRun& __restrict out) {
    static_assert(Block::kGroups <= kGgufRunGroups);
    out.has_min = Block::kMin;
    for (int block = 0; block < count; ++block, blocks += Block::kBytes) {
        for_groups<Block>([&](auto g) __attribute__((always_inline)) {
            GgufGroup group;
            Block::group(group, blocks, g);
            const int at = block * Block::kGroups + g;
            uint64_t half[2];  // as some types write them, so that no load waits for two stores
            std::memcpy(&half[0], group.q, 8);
            std::memcpy(&half[1], group.q + 8, 8);
            std::memcpy(out.q + kGroup * at, half, kGroup);
            out.scale[at] = group.scale;
            if constexpr (Block::kMin) out.min[at] = group.min;
        });
    }
}

GgufReader reader_of(int type) {
    GgufReader found = nullptr;
    with_gguf_block(type, [&](auto block) { found = read_blocks<decltype(block)>; });
    return found;
}

}  // namespace
}  // namespace kbitq
