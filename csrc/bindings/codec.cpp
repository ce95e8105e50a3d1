// scan, quantize, dequantize, stats: check the arguments, let go of the GIL, call the device's version.
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/launch.h"
#include "bindings/packed_args.h"
#include "bindings/tensor_view.h"
#include "ops/codec/dequantize.h"
#include "ops/codec/feedback.h"
#include "ops/codec/quantize.h"
#include "ops/codec/scan.h"
#include "ops/codec/stats.h"

namespace kbitq {
namespace {

using Optional = std::optional<py::object>;

void scan(const py::object& w_arg, const py::object& amax_arg, const py::object& status_arg, int threads,
          uintptr_t stream) {
    TensorView w("w", w_arg), amax("amax", amax_arg), status("status", status_arg);
    w.is_floating();
    amax.is(Element::f32).shaped({1}).on(w.device());
    status.is(Element::i64).shaped({2}).on(w.device());
    const ScanArgs args{w.data<void>(), w.dtype(), w.count(), amax.data<float>(), status.data<int64_t>()};
    launch<ScanArgs>(scan_cpu, KBITQ_CUDA_OP(scan_cuda), args, w.device(), threads, stream);
}

void quantize(const py::object& w_arg, const py::object& levels_arg, const Optional& amax_arg,
              const Optional& importance_arg, const py::object& packed_arg, const py::object& absmax_arg,
              const Optional& codebook_arg, const std::string& scale, int threads, uintptr_t stream,
              const std::string& codec) {
    TensorView w("w", w_arg), levels("levels", levels_arg);
    w.is_floating().of_rank(2);
    levels.is(Element::f32).of_rank(1).on(w.device());
    TensorView packed("packed", packed_arg), absmax("absmax", absmax_arg),
        codebook("codebook", codebook_arg ? *codebook_arg : levels_arg);
    const PackedArgs out =
        PackedArgs(w.size(0), w.size(1), w.device(), codec).codebook(codebook, 1).planes(packed, absmax, true);
    if (levels.size(0) != codebook.size(0)) throw py::value_error("codebook: its size is not that of levels");
    const bool given = scale == "given" && out.writable().codec == Codec::trellis;
    if (scale != "absmax" && scale != "mse" && !given)
        throw py::value_error("scale: must be 'absmax' or 'mse' (of the trellis, 'given' too), got '" + scale + "'");
    if (amax_arg.has_value() != codebook_arg.has_value())
        throw py::value_error("codebook: goes with amax, and amax with it");
    QuantizeArgs args{};
    args.packed = out.writable();
    if (args.packed.float_scales && (scale != "absmax" || amax_arg)) {
        throw py::value_error("absmax: float32 maxima need scale='absmax' and no amax");
    }
    args.w = w.data<void>();
    args.dtype = w.dtype();
    args.rule = args.packed.float_scales ? ScaleRule::exact
                : given                  ? ScaleRule::given
                : scale == "mse"         ? ScaleRule::mse
                                         : ScaleRule::absmax;
    args.levels = levels.data<float>();
    if (amax_arg) {
        args.amax = TensorView("amax", *amax_arg).is(Element::f32).shaped({1}).on(w.device()).data<float>();
    } else {
        args.packed.codebook = nullptr;
    }
    if (importance_arg) {
        TensorView importance("importance", *importance_arg);
        importance.is(Element::f32).of_rank(2).on(w.device());
        importance.shaped({importance.size(0), w.size(1)});
        if (importance.size(0) < 1 || w.size(0) % importance.size(0))
            throw py::value_error("importance: its rows must divide those of w");
        args.importance = importance.data<float>();
        args.importance_rows = importance.size(0);
    }
    launch<QuantizeArgs>(quantize_cpu, KBITQ_CUDA_OP(quantize_cuda), args, w.device(), threads, stream);
}

void dequantize(const py::object& packed_arg, const py::object& absmax_arg, const py::object& codebook_arg,
                const py::object& out_arg, int threads, uintptr_t stream, const std::string& codec) {
    TensorView packed("packed", packed_arg), absmax("absmax", absmax_arg), codebook("codebook", codebook_arg),
        out("out", out_arg);
    out.is_floating().of_rank(2);
    const PackedArgs in =
        PackedArgs(out.size(0), out.size(1), out.device(), codec).codebook(codebook, 1).planes(packed, absmax, true);
    const DequantizeArgs args{in.matrix(), out.data<void>(), out.dtype()};
    launch<DequantizeArgs>(dequantize_cpu, KBITQ_CUDA_OP(dequantize_cuda), args, out.device(), threads, stream);
}

void stats(const py::object& w_arg, const py::object& packed_arg, const py::object& absmax_arg,
           const py::object& codebook_arg, const py::object& out_arg, int threads, uintptr_t stream,
           const std::string& codec) {
    TensorView w("w", w_arg), packed("packed", packed_arg), absmax("absmax", absmax_arg),
        codebook("codebook", codebook_arg), out("out", out_arg);
    w.is_floating().of_rank(2);
    out.is(Element::f64).shaped({w.size(0), kStatsColumns}).on(w.device());
    const PackedArgs in =
        PackedArgs(w.size(0), w.size(1), w.device(), codec).codebook(codebook, 1).planes(packed, absmax, true);
    const StatsArgs args{w.data<void>(), w.dtype(), in.matrix(), out.data<double>()};
    launch<StatsArgs>(stats_cpu, KBITQ_CUDA_OP(stats_cuda), args, w.device(), threads, stream);
}

void feedback(const py::object& w_arg, const py::object& triangle_arg, const py::object& scales_arg,
              const py::object& levels_arg, const py::object& packed_arg, int threads, uintptr_t stream) {
    TensorView w("w", w_arg), triangle("triangle", triangle_arg), scales("scales", scales_arg),
        levels("levels", levels_arg), packed("packed", packed_arg);
    w.is(Element::f32).of_rank(2);
    const int64_t rows = w.size(0), columns = w.size(1);
    if (columns < 1 || columns > kBlock) throw py::value_error("w: needs 1 to 32 columns");
    triangle.is(Element::f32).shaped({columns, columns}).on(w.device());
    scales.is(Element::f32).shaped({rows}).on(w.device());
    levels.is(Element::f32).of_rank(1).on(w.device());
    packed.is(Element::i32).of_rank(2).on(w.device());
    const int64_t k = packed.size(1);
    if (k < kMinBits || k > kMaxBits || levels.size(0) != int64_t{1} << k)
        throw py::value_error("packed: needs [rows, K] with K from 2 to 8, and levels 2^K");
    packed.shaped({rows, k});
    const FeedbackArgs args{w.data<float>(),           triangle.data<float>(),  scales.data<float>(),
                            levels.data<float>(),      packed.data<uint32_t>(), rows,
                            static_cast<int>(columns), static_cast<int>(k)};
    launch<FeedbackArgs>(feedback_cpu, KBITQ_CUDA_OP(feedback_cuda), args, w.device(), threads, stream);
}

}  // namespace

void bind_codec(py::module_& m) {
    using py::arg;
    m.def(
        "scan", &scan, arg("w"), arg("amax"), arg("status"), arg("threads") = 1, arg("stream") = 0,
        "amax[0] = largest finite magnitude; status = (count of non-finite elements, flat index of the first or -1).");
    m.def("quantize", &quantize, arg("w"), arg("levels"), arg("amax").none(true), arg("importance").none(true),
          arg("packed"), arg("absmax"), arg("codebook").none(true), arg("scale"), arg("threads") = 1, arg("stream") = 0,
          arg("codec") = "planes", "Fill packed, absmax and codebook from w [rows, cols].");
    m.def("feedback", &feedback, arg("w"), arg("triangle"), arg("scales"), arg("levels"), arg("packed"),
          arg("threads") = 1, arg("stream") = 0,
          "Round the columns of a block one by one, errors fed to the right: fills packed, and w with the errors.");
    m.def("dequantize", &dequantize, arg("packed"), arg("absmax"), arg("codebook"), arg("out"), arg("threads") = 1,
          arg("stream") = 0, arg("codec") = "planes", "Fill out [rows, cols].");
    m.def("stats", &stats, arg("w"), arg("packed"), arg("absmax"), arg("codebook"), arg("out"), arg("threads") = 1,
          arg("stream") = 0, arg("codec") = "planes",
          "Fill out [rows, 3]: sum w^2, sum (w - w')^2, max |w - w'| of each row.");
}

}  // namespace kbitq
