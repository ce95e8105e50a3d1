// NF4: check the arguments, let go of the GIL, call the core.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/launch.h"
#include "bindings/tensor_view.h"
#include "format/nf4.h"
#include "ops/nf4/nf4.h"

namespace kbitq {
namespace {

void check_block(int block) {
    if (block < kNf4MinBlock || block > kNf4MaxBlock || (block & (block - 1)) != 0) {
        throw py::value_error("block: must be a power of two from " + std::to_string(kNf4MinBlock) + " to " +
                              std::to_string(kNf4MaxBlock) + ", got " + std::to_string(block));
    }
}

void check_codes(TensorView& codes, TensorView& scales, int64_t count, int block, int device) {
    check_block(block);
    codes.is(Element::u8).shaped({(count + 1) / 2}).on(device);
    scales.is(Element::f32).shaped({(count + block - 1) / block}).on(device);
}

void nf4_quantize(const py::object& w_arg, const py::object& codes_arg, const py::object& scales_arg, int block,
                  int threads, uintptr_t stream) {
    TensorView w("w", w_arg), codes("codes", codes_arg), scales("scales", scales_arg);
    w.is_floating();
    check_codes(codes, scales, w.count(), block, w.device());
    const Nf4QuantizeArgs args{w.data<void>(),        w.dtype(),           w.count(), block,
                               codes.data<uint8_t>(), scales.data<float>()};
    launch<Nf4QuantizeArgs>(nf4_quantize_cpu, KBITQ_CUDA_OP(nf4_quantize_cuda), args, w.device(), threads, stream);
}

void nf4_dequantize(const py::object& codes_arg, const py::object& scales_arg, const py::object& out_arg, int block,
                    int threads, uintptr_t stream) {
    TensorView codes("codes", codes_arg), scales("scales", scales_arg), out("out", out_arg);
    out.is_floating();
    check_codes(codes, scales, out.count(), block, out.device());
    const Nf4DequantizeArgs args{codes.data<uint8_t>(), scales.data<float>(), out.count(), block,
                                 out.data<void>(),      out.dtype()};
    launch<Nf4DequantizeArgs>(nf4_dequantize_cpu, KBITQ_CUDA_OP(nf4_dequantize_cuda), args, out.device(), threads,
                              stream);
}

void nf4_linear(const py::object& x_arg, const py::object& codes_arg, const py::object& scales_arg, int block,
                const std::optional<py::object>& bias_arg, const py::object& out_arg, int threads, uintptr_t stream) {
    TensorView x("x", x_arg), codes("codes", codes_arg), scales("scales", scales_arg), y("out", out_arg);
    x.is_floating().of_rank(2);
    y.is(x.element()).of_rank(2).on(x.device());
    y.shaped({x.size(0), y.size(1)});
    const int64_t rows = y.size(1), cols = x.size(1);
    check_codes(codes, scales, rows * cols, block, x.device());
    if (cols % block != 0) throw py::value_error("x: its features must be a multiple of the block");
    if (x.device() != kCpu && x.size(0) > kNf4FewRows) throw py::value_error("x: has too many rows");
    Nf4LinearArgs args{};
    args.x = x.data<void>(), args.dtype = x.dtype(), args.batch = x.size(0);
    args.codes = codes.data<uint8_t>(), args.scales = scales.data<float>();
    args.rows = rows, args.cols = cols, args.block = block;
    if (bias_arg) args.bias = TensorView("bias", *bias_arg).is(x.element()).shaped({rows}).on(x.device()).data<void>();
    args.y = y.data<void>();
    launch<Nf4LinearArgs>(nf4_linear_cpu, KBITQ_CUDA_OP(nf4_linear_cuda), args, x.device(), threads, stream);
}

}  // namespace

void bind_nf4(py::module_& m) {
    using py::arg;
    m.attr("nf4_levels") = std::vector<float>(kNf4Level, kNf4Level + kNf4Levels);
    m.attr("nf4_few_rows") = kNf4FewRows;
    m.def("nf4_quantize", &nf4_quantize, arg("w"), arg("codes"), arg("scales"), arg("block"), arg("threads") = 1,
          arg("stream") = 0, "codes [ceil(n / 2)] and scales [ceil(n / block)] of n values.");
    m.def("nf4_dequantize", &nf4_dequantize, arg("codes"), arg("scales"), arg("out"), arg("block"), arg("threads") = 1,
          arg("stream") = 0, "out = level[code] * scale, rounded once.");
    m.def("nf4_linear", &nf4_linear, arg("x"), arg("codes"), arg("scales"), arg("block"), arg("bias").none(true),
          arg("out"), arg("threads") = 1, arg("stream") = 0, "out [M, rows] = x [M, cols] W^T + bias.");
}

}  // namespace kbitq
