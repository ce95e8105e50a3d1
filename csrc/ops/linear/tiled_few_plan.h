// How the work of the kernel for few rows of x (tiled_few.cuh) is cut: for a card and an instance of the kernel, the
// cut of least cost among those that fit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "format/tile_order.h"
#include "ops/linear/tiled.h"

namespace kbitq::tiled {

constexpr int kFewMaxWarps = 16, kFewMaxSplitShift = 3, kFewMaxSplits = 1 << kFewMaxSplitShift;

// How an instance of the kernel is made up, measured on an H200. MP: rows of x it has room for.
template <class Decoder, int MP>
struct FewLayout {
    static constexpr int kLargeRecord = 2304;  // bytes; more than those of 4 bits a weight
    static constexpr bool kScaledWeights = MP == 16 || (MP >= 4 && Decoder::kWholeBlocks);  // instead of sums
    static constexpr int kStages = MP == 8 || (MP == 1 && Decoder::kRecordBytes < kLargeRecord) ? 3 : 2;  // of a ring
    // The operands of blocks 0 to 3 hold the activations of blocks 4 to 7 too, in the columns of those: 16 registers
    // instead of 32, for a sum of each half. Worth it where decoding takes most registers.
    static constexpr bool kFolded = MP == 1 && Decoder::kWholeBlocks && Decoder::kBits == 4;
    static constexpr bool kAhead = MP == 1;  // registers are left to fetch a chunk's activations before their turn
};

// The instance for m rows of x: run(std::integral_constant<int, MP>).
template <bool WholeBlocks, typename Run>
void with_few_rows(int64_t m, Run&& run) {
    if (m == 1) return run(std::integral_constant<int, 1>{});
    if (m == 2) return run(std::integral_constant<int, 2>{});
    if constexpr (!WholeBlocks) {
        if (m <= 4) return run(std::integral_constant<int, 4>{});
    }
    if (m <= 8) return run(std::integral_constant<int, 8>{});
    run(std::integral_constant<int, 16>{});
}

// What an instance needs of shared memory.
struct FewSizes {
    int table, ring;  // bytes; of the ring for each warp
    int mp;
    int sums() const { return kTileRows * mp * 4; }  // bytes, of a row tile
};

template <class Decoder, int MP>
constexpr FewSizes kFewSizes{Decoder::kTableBytes, FewLayout<Decoder, MP>::kStages * Decoder::kRecordBytes, MP};

// The matrix as the cut sees it.
struct FewWork {
    int tiles_per_group = 0, groups = 0, chunks = 0, m = 0;
    bool operator==(const FewWork& other) const {
        return tiles_per_group == other.tiles_per_group && groups == other.groups && chunks == other.chunks &&
               m == other.m;
    }
};

struct FewCard {
    int multiprocessors = 0, shared_bytes = 0;  // of a block
    int clusters[kFewMaxSplitShift + 1] = {};   // of 2^i CTAs that run at a time; 0 for i = 0 and without clusters
};

struct FewPlan {
    int warps = 0;         // of a CTA; 0: nothing fits
    int team_shift = 0;    // log2 of the teams of warps; they take row tiles in turn
    int split_shift = 0;   // log2 of the CTAs that share a part, each with chunks of its own
    int parts = 0;         // of a group's row tiles, one CTA (times splits) each
    int passes = 0;        // of a team's warps over the chunks, one each at a time
    int batch = 0;         // row tiles between two sums over the warps; a multiple of the teams
    int total_tiles = 0;   // row tiles whose totals are kept in shared memory; 0: sums go to y at once
    bool cluster = false;  // the CTAs that share a part are a cluster
    int teams() const { return 1 << team_shift; }
    int splits() const { return 1 << split_shift; }
    int bytes(const FewSizes& sizes) const {
        return sizes.table + warps * sizes.ring + (total_tiles + batch * (warps / teams())) * sizes.sums();
    }
};

// Do the partial sums of so many splits fit the workspace (tiled_workspace_bytes), and their counters?
inline bool splits_fit(const FewWork& work, int parts, int splits, const FewCard& card) {
    const int64_t sums = static_cast<int64_t>(work.tiles_per_group) * work.groups * kTileRows * work.m * splits;
    return sums <= card.multiprocessors * kWorkspaceSums && static_cast<int64_t>(parts) * work.groups <= kTiledCounters;
}

// Sets how many row tiles a batch has, and for how many totals are kept; false if nothing fits.
inline bool place_sums(FewPlan& plan, const FewSizes& sizes, int tiles, int shared_bytes) {
    const int teams = plan.teams(), of_batch = plan.warps / teams * sizes.sums();
    const auto batch = [&](int places) {
        const int room = shared_bytes - sizes.table - plan.warps * sizes.ring - places * sizes.sums();
        return std::min((tiles + teams - 1) / teams, std::max(room, 0) / (of_batch * teams)) * teams;
    };
    plan.total_tiles = 0;
    plan.batch = batch(0);
    if (plan.split_shift > 0 || (plan.passes > 1 && plan.batch < tiles)) plan.batch = batch(plan.total_tiles = tiles);
    return plan.batch > 0;
}

// The time of the busiest multiprocessor, in hundredths of what it takes for a record; fitted to an H200. It counts
// records (each of the four schedulers has whole warps), the activations that warps fetch, and sums.
inline int64_t few_cost(const FewPlan& plan, const FewSizes& sizes, int tiles, int waves) {
    const int teams = plan.teams(), warps = std::max((plan.warps + 3) / 4 * 4, 8);
    const int64_t records = static_cast<int64_t>(plan.passes) * ((tiles + teams - 1) / teams) * warps;
    int each = 100;
    if (sizes.mp <= 4) each += 3 * (16 - warps);
    if (sizes.mp == 8) each += warps == 12 ? 0 : warps > 12 ? 15 : 14;
    if (sizes.mp == 16) each += (16 - warps) * 8 / 5;
    const int activations = plan.passes * (sizes.mp <= 4 ? warps : plan.warps) * (40 + 3 * sizes.mp);
    const int syncs = ((tiles + plan.batch - 1) / plan.batch - 1) * (plan.total_tiles ? plan.passes : 1);
    const int splits = plan.split_shift == 0 ? 0 : plan.cluster ? 1800 : 3000;
    return waves * (records * each + activations + syncs * (300 + 100 * sizes.mp)) + splits;
}

// Tries a plan with every number of warps and teams; the cheapest one that fits becomes `best` if it costs less.
inline void try_warps(FewPlan plan, const FewSizes& sizes, const FewWork& work, int shared_bytes, int tiles, int waves,
                      FewPlan& best, int64_t& least) {
    const int most_teams = work.chunks <= 4 ? 8 : 2;
    for (plan.team_shift = 0; plan.teams() <= std::min(most_teams, tiles); ++plan.team_shift) {
        for (plan.warps = kFewMaxWarps; plan.warps >= std::max(4, plan.teams()); plan.warps -= plan.teams()) {
            const int side_by_side = (plan.warps >> plan.team_shift) * plan.splits();
            plan.passes = (work.chunks + side_by_side - 1) / side_by_side;
            if (!place_sums(plan, sizes, tiles, shared_bytes)) continue;
            const int64_t cost = few_cost(plan, sizes, tiles, waves);
            if (cost < least) {
                least = cost;
                best = plan;
            }
        }
    }
}

// The cut of least cost among those that fit, with `rounds` times as many parts as run at a time. No warps: none fits.
inline FewPlan plan_few(const FewSizes& sizes, const FewWork& work, const FewCard& card, int rounds = 1) {
    FewPlan best;
    int64_t least = INT64_MAX;
    bool finest = true;  // every part is one row tile already
    for (int split_shift = 0; 1 << split_shift <= std::min(kFewMaxSplits, work.chunks); ++split_shift) {
        const int splits = 1 << split_shift, clusters = card.clusters[split_shift];
        const int at_a_time = clusters > 0 ? clusters : std::max(card.multiprocessors / splits, 1);
        const int parts = std::clamp(at_a_time * rounds / work.groups, 1, work.tiles_per_group);
        const int tiles = (work.tiles_per_group + parts - 1) / parts;
        finest = finest && tiles == 1;
        const int waves = (work.groups * parts + at_a_time - 1) / at_a_time;
        if (split_shift > 0 && clusters == 0 && !splits_fit(work, parts, splits, card)) break;
        FewPlan plan;
        plan.split_shift = split_shift;
        plan.parts = parts;
        plan.cluster = clusters > 0;
        try_warps(plan, sizes, work, card.shared_bytes, tiles, waves, best, least);
    }
    return best.warps == 0 && !finest ? plan_few(sizes, work, card, 2 * rounds) : best;
}

}  // namespace kbitq::tiled
