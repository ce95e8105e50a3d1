// repack and the linear layer on tiles: check the arguments, let go of the GIL, call the core.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/launch.h"
#include "bindings/packed_args.h"
#include "bindings/tensor_view.h"
#include "codecs/tile_records.h"
#include "ops/codec/repack.h"
#include "ops/linear/tiled.h"
#include "ops/linear/tiled_few_plan.h"

namespace kbitq {
namespace {

using Optional = std::optional<py::object>;

py::tuple tile_shape(int64_t rows, int64_t cols, int k, const std::string& codec) {
    return py::make_tuple(row_tiles(rows), tile_chunks(cols),
                          PackedArgs(rows, cols, kCpu, codec).bits(k).words_of_record());
}

void repack(const py::object& packed_arg, const py::object& absmax_arg, const py::object& tiles_arg, int64_t cols,
            bool inverse, int threads, uintptr_t stream, const std::string& codec) {
    TensorView packed("packed", packed_arg), absmax("absmax", absmax_arg), tiles("tiles", tiles_arg);
    packed.is(Element::i32).of_rank(2);
    tiles.is(Element::i32).of_rank(3).on(packed.device());
    PackedArgs planes(packed.size(0), cols, packed.device(), codec), records = planes;
    planes.bits_of_tiles(tiles).planes(packed, absmax);
    records.bits(planes.writable().k).tiles(tiles);
    const RepackArgs args{planes.writable(), records.writable().words, inverse};
    launch<RepackArgs>(repack_cpu, KBITQ_CUDA_OP(repack_cuda), args, packed.device(), threads, stream);
}

// The rows of x of each expert; one expert without offsets.
ExpertArgs experts_of(const Optional& offsets_arg, int device) {
    if (!offsets_arg) return {nullptr, 1};
    TensorView offsets("offsets", *offsets_arg);
    offsets.is(Element::i32).of_rank(1).on(device);
    if (offsets.size(0) < 2) throw py::value_error("offsets: needs one entry more than there are experts");
    return {offsets.data<int32_t>(), offsets.size(0) - 1};
}

void check_groups(const PackedMatrix& weight, int64_t experts) {
    if (weight.groups % experts || (weight.groups > 1 && weight.rows / weight.groups % kTileRows)) {
        throw py::value_error(
            "codebook: its groups must be of equal size, whole row tiles of 16, and a multiple of the experts");
    }
}

void linear_tiles(const py::object& x_arg, const py::object& tiles_arg, const py::object& codebook_arg,
                  const Optional& bias_arg, const py::object& out_arg, const py::object& workspace_arg,
                  const py::object& counters_arg, const Optional& offsets_arg, const Optional& staging_arg,
                  uintptr_t stream, const std::string& codec) {
    TensorView x("x", x_arg), tiles("tiles", tiles_arg), codebook("codebook", codebook_arg), out("out", out_arg),
        workspace("workspace", workspace_arg), counters("counters", counters_arg);
    x.is_floating().of_rank(2);
    const int device = x.device();
    if (device == kCpu) throw py::value_error("x: is on the CPU; tiles are for CUDA (planes serve the CPU)");
    if (x.element() == Element::f32) throw py::value_error("x: must be bfloat16 or float16, got float32");
    workspace.is(Element::u8).of_rank(1).on(device);
    counters.is(Element::i32).shaped({kTiledCounters}).on(device);
    out.is(x.element()).of_rank(2).shaped({x.size(0), out.size(1)}).on(device);
    const ExpertArgs experts = experts_of(offsets_arg, device);
    const int64_t rows = out.size(1) * experts.experts, cols = x.size(1);
    const PackedMatrix weight = PackedArgs(rows, cols, device, codec).codebook(codebook, 2).tiles(tiles).matrix();
    check_groups(weight, experts.experts);
    TiledLinearArgs args{x.data<void>(),
                         x.dtype(),
                         x.size(0),
                         weight,
                         nullptr,
                         out.data<void>(),
                         workspace.data<float>(),
                         counters.data<uint32_t>(),
                         nullptr};
    if (bias_arg)
        args.bias = TensorView("bias", *bias_arg).is(x.element()).shaped({out.size(1)}).on(device).data<void>();
    if (staging_arg)
        args.staging = TensorView("staging", *staging_arg).is(Element::u8).of_rank(1).on(device).data<void>();
    if (args.m == 0 || rows == 0) return;
    KBITQ_CUDA_CALL({
        if (workspace.size(0) < tiled_workspace_bytes(device))
            throw py::value_error("workspace: too small for this device");
        if (staging_arg &&
            TensorView("staging", *staging_arg).size(0) < tiled_staging_bytes(args.m, rows, cols, device))
            throw py::value_error("staging: too small for these rows of x");
        py::gil_scoped_release unlocked;
        void* const on = reinterpret_cast<void*>(stream);
        if (offsets_arg) return tiled_experts_cuda(args, experts, device, on);
        tiled_linear_cuda(args, device, on);
    });
    (void)stream;
}

void decode_tiles(const py::object& tiles_arg, const py::object& codebook_arg, const py::object& out_arg,
                  uintptr_t stream, const std::string& codec) {
    TensorView tiles("tiles", tiles_arg), codebook("codebook", codebook_arg), out("out", out_arg);
    out.is_floating().of_rank(2);
    const int device = out.device();
    const PackedArgs in = PackedArgs(out.size(0), out.size(1), device, codec).codebook(codebook, 1).tiles(tiles);
    if (device == kCpu) throw py::value_error("out: is on the CPU; tiles are for CUDA (planes serve the CPU)");
    const TiledDecodeArgs args{in.matrix(), out.data<void>(), out.dtype()};
    py::gil_scoped_release unlocked;
    KBITQ_CUDA_CALL(tiled_decode_cuda(args, device, reinterpret_cast<void*>(stream)));
    (void)args, (void)stream;
}

int64_t workspace_bytes(int device) {
    (void)device;
    KBITQ_CUDA_CALL(return tiled_workspace_bytes(device));
}

int64_t staging_bytes(int64_t m, int64_t rows, int64_t cols, int device) {
    (void)m, (void)rows, (void)cols, (void)device;
    KBITQ_CUDA_CALL(return tiled_staging_bytes(m, rows, cols, device));
}

int64_t rows_taken(int device) {
#if defined(KBITQ_HAS_CUDA)
    return tiled_linear_rows(device);
#else
    (void)device;
    return 0;
#endif
}

template <class Usual, class Smaller, int MP>
py::dict plan_as_dict(const tiled::FewWork& work, const tiled::FewCard& card, bool small_table) {
    using namespace tiled;
    using namespace pybind11::literals;
    const FewSizes sizes = small_table ? kFewSizes<Smaller, MP> : kFewSizes<Usual, MP>;
    const FewPlan plan = plan_few(sizes, work, card);
    return py::dict("warps"_a = plan.warps, "teams"_a = plan.teams(), "splits"_a = plan.splits(),
                    "parts"_a = plan.parts, "passes"_a = plan.passes, "batch"_a = plan.batch,
                    "total_tiles"_a = plan.total_tiles, "cluster"_a = plan.cluster, "bytes"_a = plan.bytes(sizes));
}

template <int ScaleBlocks>
py::dict trellis_plan(int k, const tiled::FewWork& work, const tiled::FewCard& card, bool small_table) {
    using namespace tiled;
    py::dict result;
    with_trellis_bits(k, [&](auto bits) {
        with_few_rows<true>(work.m, [&](auto mp) {
            result = plan_as_dict<TrellisFew<bits, ScaleBlocks, mp>, TrellisFewSmaller<bits, ScaleBlocks, mp>, mp>(
                work, card, small_table);
        });
    });
    return result;
}

py::dict planes_plan(int k, const tiled::FewWork& work, const tiled::FewCard& card, bool small_table) {
    using namespace tiled;
    py::dict result;
    with_bits(k, [&](auto bits) {
        if constexpr (bits <= kTileMaxBits) {
            with_few_rows<false>(work.m, [&](auto mp) {
                result = plan_as_dict<PlanesFew<bits, mp>, PlanesFewSmaller<bits, mp>, mp>(work, card, small_table);
            });
        }
    });
    return result;
}

// For the tests: how plan_few cuts a matrix on a card that need not be here.
py::dict few_plan(int k, int m, int tiles, int groups, int chunks, int multiprocessors, int shared_bytes,
                  const std::vector<int>& clusters, bool small_table, const std::string& codec) {
    tiled::FewCard card;
    card.multiprocessors = multiprocessors;
    card.shared_bytes = shared_bytes;
    for (size_t i = 0; i < clusters.size() && i < tiled::kFewMaxSplitShift; ++i) card.clusters[i + 1] = clusters[i];
    const tiled::FewWork work{tiles, groups, chunks, m};
    const PackedArgs matrix = PackedArgs(1, 1, kCpu, codec).bits(k);
    matrix.words_of_record();  // throws for a K without tiles
    const PackedOutput& view = matrix.writable();
    if (view.codec == Codec::planes) return planes_plan(k, work, card, small_table);
    return view.scale_blocks == 1 ? trellis_plan<1>(k, work, card, small_table)
                                  : trellis_plan<kWideScaleBlocks>(k, work, card, small_table);
}

}  // namespace

void bind_tiles(py::module_& m) {
    using py::arg;
    m.attr("tile_rows") = kTileRows;
    m.attr("tile_max_bits") = kTileMaxBits;
    m.attr("tiled_counters") = kTiledCounters;
    m.def("tile_shape", &tile_shape, arg("rows"), arg("cols"), arg("k"), arg("codec") = "planes",
          "Shape of the int32 tiles of a [rows, cols] matrix.");
    m.def("tiled_workspace_bytes", &workspace_bytes, arg("device"),
          "Bytes of workspace that linear_tiles needs on a device.");
    m.def("tiled_staging_bytes", &staging_bytes, arg("m"), arg("rows"), arg("cols"), arg("device"),
          "Bytes of staging that linear_tiles wants for m rows of x; 0 for none.");
    m.def("tiled_linear_rows", &rows_taken, arg("device"),
          "Rows of x up to which linear_tiles takes a product on this CUDA device with this build; 0: none.");
    m.attr("few_rows") = kFewRows;
    m.def("few_plan", &few_plan, arg("k"), arg("m"), arg("tiles"), arg("groups"), arg("chunks"), arg("multiprocessors"),
          arg("shared_bytes"), arg("clusters"), arg("small_table") = false, arg("codec") = "planes",
          "How the kernel for few rows of x cuts a matrix (csrc/ops/linear/tiled_few_plan.h); warps is 0 if nothing "
          "fits.");
    m.attr("tiled_workspace_sums") = kWorkspaceSums;
    m.def("repack", &repack, arg("packed"), arg("absmax"), arg("tiles"), arg("cols"), arg("inverse"),
          arg("threads") = 1, arg("stream") = 0, arg("codec") = "planes",
          "Fill tiles from packed and absmax, or (inverse) these from tiles.");
    m.def("linear_tiles", &linear_tiles, arg("x"), arg("tiles"), arg("codebook"), arg("bias").none(true), arg("out"),
          arg("workspace"), arg("counters"), arg("offsets").none(true), arg("staging").none(true), arg("stream") = 0,
          arg("codec") = "planes",
          "out [M, rows] = x [M, cols] W^T + bias; codebook [groups, levels]; offsets [experts + 1] deals rows of x to "
          "experts.");
    m.def("decode_tiles", &decode_tiles, arg("tiles"), arg("codebook"), arg("out"), arg("stream") = 0,
          arg("codec") = "planes", "Fill out [rows, cols]; codebook [levels].");
}

}  // namespace kbitq
