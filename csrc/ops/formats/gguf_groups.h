// Calls body with each group of a block in turn: for_groups<Block>([&](auto g) { ... }). Its number is a constant, so
// that shifts and offsets are.
#pragma once

#include <type_traits>
#include <utility>

#include "formats/gguf_blocks.h"

namespace kbitq {
namespace {

template <typename Body, int... G>
[[gnu::always_inline]] static inline void for_each_of(std::integer_sequence<int, G...>, Body&& body) {
    (body(std::integral_constant<int, G>{}), ...);
}

template <typename Block, typename Body>
[[gnu::always_inline]] static inline void for_groups(Body&& body) {
    for_each_of(std::make_integer_sequence<int, Block::kGroups>{}, body);
}

}  // namespace
}  // namespace kbitq
